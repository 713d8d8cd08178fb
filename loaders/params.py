"""User settings of conversion and planning, with the CLI's defaults. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offspec.errors import UsageError

Progress = Callable[[int, int], None]  # is told what is done, and of how much
QUANT_TYPES = ("nf4", "fp4")
FLOAT_FORMATS = ("bf16", "fp16", "fp32")
KV_CACHES = ("16", "8", "4")  # bits of the target's KV entries, see `offspec.model.memory.kv_formats`
LOSSLESS_FORMAT = "bf16-packed"
# llama.cpp's mixtures of types that `quantize` makes; in safetensors folders, as the other formats.
MADE_MIXTURES = ("q4_k_m", "q4_k_s", "q5_k_m", "q5_k_s", "q6_k", "q8_0", "iq4_xs")
CONVERT_FORMATS = (*QUANT_TYPES, *MADE_MIXTURES, LOSSLESS_FORMAT, *FLOAT_FORMATS, "keep")
SHADOW_FORMATS = {4: "q4_k", 3: "q3_k", 2: "q2_k"}  # bits → the format of a shadow's matrices
GROUPED_METHODS = ("awq", "gptq")
FP8_METHODS = ("fp8", "fbgemm_fp8")
COMPRESSED_TENSORS = "compressed-tensors"
MXFP4 = "mxfp4"  # gpt-oss's method, and a format of several methods
QUANT_METHODS = (
    "bitsandbytes",
    *GROUPED_METHODS,
    *FP8_METHODS,
    COMPRESSED_TENSORS,
    MXFP4,
)  # methods that offspec reads
# llama.cpp's mixtures of types in GGUF files. "q2_k" also names a shadow's format, in which all matrices are Q2_K.
GGUF_MIXTURES = (
    *("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_0", "q4_1", "q4_k_s", "q4_k_m"),
    *("q5_0", "q5_1", "q5_k_s", "q5_k_m", "q6_k", "q8_0", "iq4_xs"),
)
PLAN_FORMATS = ("bf16", LOSSLESS_FORMAT, "fp16", "fp32", "fp8", "nf4", "w4a16", "nvfp4", MXFP4, *GGUF_MIXTURES)


@dataclass(frozen=True)
class ConvertParams:
    """The result of `offspec quantize`.

    format: nf4, fp4, one of MADE_MIXTURES, LOSSLESS_FORMAT (bf16 in fewer bytes), one of FLOAT_FORMATS (packed matrices
    are unpacked), keep (the same tensors in a new layout), or one of SHADOW_FORMATS. double_quant: store scales of nf4
    and fp4 in 8 bit instead of 32. imatrix: a file of llama.cpp's importance matrices, for one of MADE_MIXTURES.
    """

    format: str = "nf4"
    double_quant: bool = True
    imatrix: str | None = None

    def __post_init__(self) -> None:
        if self.format not in (*CONVERT_FORMATS, *SHADOW_FORMATS.values()):
            raise UsageError(f"unknown format {self.format!r}; use {', '.join(CONVERT_FORMATS)}")
        if self.format not in QUANT_TYPES and not self.double_quant:
            raise UsageError(f"double_quant=False needs format {' or '.join(QUANT_TYPES)}, not {self.format}")
        if self.format not in MADE_MIXTURES and self.imatrix is not None:
            raise UsageError(f"`imatrix` needs one of the formats {', '.join(MADE_MIXTURES)}, not {self.format}")
