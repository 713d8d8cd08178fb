"""Damaged checkpoints in fp8, AWQ, GPTQ and compressed-tensors, by number: case N is the same everywhere.

Each loads and writes a text, or ends in one line of an `OffspecError`, in bounded time and memory. So does a plan from
its config.json alone. Codes and scales are random, so a damaged checkpoint may have any text.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from offspec.checkpoints.opening import model_to_plan
from offspec.loaders.files.checkpoint import DTYPE_BYTES
from offspec.stats import peak_host_bytes

from ..pair import build_pair
from .checkpoints import VALUES, Findings, Said, damaged_header, outcome_of, places, quick_loading, said_by, tried
from .damage import peak_bytes_anew

HIDDEN, INTERMEDIATE = 32, 64  # multiples of the groups of all forms
SETTINGS: tuple[Any, ...] = (
    *(4, 8, 16, 32, 64, 128, 2**70, 1.0, "4", [16, 16], [2**70, 16], [16, 2**70], [0, 16], [16.0, 16], [True, 16]),
    *("16x32", "999999999x16", "channel", "group", "tensor", "block", "tensor_group", "token", "float", "int", "e5m2"),
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized", "marlin-24"),
    *("mxfp4-pack-quantized", "mxfp8-quantized", "awq", "gptq", "fp8", "fbgemm_fp8", "compressed-tensors", "exl2"),
    *("bitsandbytes", "gemm", "gemv", "gptq_v2", {"-:.*": {}}, {"+:.*": {"bits": 8}}, [[16, 16]]),
)
KEYS = (
    "weight_block_size",
    "group_size",
    "strategy",
    "dynamic",
    "version",
    "sparsity_config",
    "block_structure",
    "fmt",
)
PARTS = (
    *("weight", "weight_scale", "weight_scale_inv", "input_scale", "qweight", "qzeros", "scales", "g_idx", "bias"),
    *("weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale", "absmax", "SCB"),
)


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: dtype by safetensors' name."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes

    def resized(self, dtype: str, shape: tuple[int, ...]) -> Stored:
        """Its bytes, cut or repeated, as a tensor of this dtype and shape."""
        nbytes = int(np.prod(shape, dtype=object)) * DTYPE_BYTES[dtype]
        return Stored(dtype, shape, (self.content * (nbytes // max(1, len(self.content)) + 1))[:nbytes])


Tensors = dict[str, Stored]
Pack = Callable[[str, int, int], Tensors]  # a module's name and its matrix' outputs and inputs → its tensors


# ----------------------------------------------------------------------------------------------------- sound ones


def _floats(dtype: str, shape: tuple[int, ...], value: float = 0.01) -> Stored:
    kinds = {"F32": np.float32, "F16": np.float16}
    if dtype == "BF16":
        return Stored(dtype, shape, (np.full(shape, value, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes())
    return Stored(dtype, shape, np.full(shape, value, kinds[dtype]).tobytes())


def _codes(dtype: str, shape: tuple[int, ...]) -> Stored:
    """Random bytes; of fp8 finite numbers alone."""
    content = np.random.default_rng(shape).integers(0, 256, int(np.prod(shape)) * DTYPE_BYTES[dtype], dtype=np.uint8)
    return Stored(dtype, shape, (content & (0xBF if dtype == "F8_E4M3" else 0xFF)).tobytes())


def _integers(dtype: str, values: object) -> Stored:
    array = np.array(values, {"I32": "<i4", "I64": "<i8", "U8": "u1"}[dtype])
    return Stored(dtype, array.shape, array.tobytes())


def _fp8_blocks(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}.weight": _codes("F8_E4M3", (rows, columns)),
        f"{name}.weight_scale_inv": _floats("F32", (-(-rows // 24), columns // 16)),
    }


def _fp8_rows(name: str, rows: int, columns: int) -> Tensors:
    scales = {"weight_scale": _floats("BF16", (rows, 1)), "input_scale": _floats("F32", (1,))}
    return {f"{name}.weight": _codes("F8_E4M3", (rows, columns))} | {f"{name}.{part}": t for part, t in scales.items()}


def _awq(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}.qweight": _codes("I32", (columns, rows // 8)),
        f"{name}.qzeros": _codes("I32", (columns // 16, rows // 8)),
        f"{name}.scales": _floats("F16", (columns // 16, rows)),
    }


def _gptq(name: str, rows: int, columns: int, size: int | None = None) -> Tensors:
    groups = 1 if size is None else columns // size
    return {
        f"{name}.qweight": _codes("I32", (columns // 8, rows)),
        f"{name}.qzeros": _codes("I32", (groups, rows // 8)),
        f"{name}.scales": _floats("F16", (groups, rows)),
        f"{name}.g_idx": _integers("I32", np.arange(columns)[::-1] % groups),
    }


def _packed(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}.weight_packed": _codes("I32", (rows, columns // 8)),
        f"{name}.weight_scale": _floats("BF16", (rows, columns // 16)),
        f"{name}.weight_zero_point": _codes("I32", (-(-rows // 8), columns // 16)),
        f"{name}.weight_shape": _integers("I64", [rows, columns]),
        f"{name}.weight_g_idx": _integers("I32", np.arange(columns)[::-1] % (columns // 16)),
    }


def _int8(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}.weight": _codes("I8", (rows, columns)),
        f"{name}.weight_scale": _floats("F32", (rows, 1), 0.001),
    }


def _fp8_scheme(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}.weight": _codes("F8_E4M3", (rows, columns)),
        f"{name}.weight_scale": _floats("F32", (1, columns // 16)),
    }


def _nvfp4(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}.weight_packed": _codes("U8", (rows, columns // 2)),
        f"{name}.weight_scale": _codes("F8_E4M3", (rows, columns // 16)),
        f"{name}.weight_global_scale": _floats("F32", (1,), 50.0),
    }


def _mxfp4(name: str, rows: int, columns: int) -> Tensors:
    return {
        f"{name}.weight_packed": _codes("U8", (rows, columns // 2)),
        f"{name}.weight_scale": _integers("U8", np.full((rows, columns // 32), 120)),
    }


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "float", **weights}, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


FP8, GPTQ = {"quant_method": "fp8", "fmt": "e4m3"}, {"quant_method": "gptq", "bits": 4, "desc_act": True}
FORMS: dict[str, tuple[Pack, dict[str, Any]]] = {
    "fp8, blocks": (_fp8_blocks, FP8 | {"weight_block_size": [24, 16]}),
    "fp8, rows": (_fp8_rows, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}),
    "gptq": (lambda *matrix: _gptq(*matrix, 16), GPTQ | {"group_size": 16, "checkpoint_format": "gptq"}),
    "gptq, one group": (_gptq, GPTQ | {"group_size": -1}),
    "w4a16": (_packed, _compressed("pack-quantized", type="int", num_bits=4, group_size=16, symmetric=False)),
    "int8": (_int8, _compressed("int-quantized", type="int", num_bits=8, strategy="channel")),
    "fp8 by a scheme": (
        _fp8_scheme,
        _compressed("float-quantized", num_bits=8, strategy="block", block_structure=[64, 16]),
    ),
    "nvfp4": (_nvfp4, _compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16)),
    "mxfp4": (_mxfp4, _compressed("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32)),
}


def build_all(folder: Path) -> dict[str, Path]:
    """A sound checkpoint of each form, below `folder`."""
    plain = build_pair(folder, intermediate_size=INTERMEDIATE, tie_word_embeddings=False).target
    tensors, config = read_tensors(plain / "model.safetensors"), json.loads((plain / "config.json").read_text())
    made = {}
    for form, (pack, settings) in FORMS.items():
        made[form] = shutil.copytree(plain, folder / form)
        packed = dict[str, Stored]()
        for name, tensor in tensors.items():
            is_matrix = name.endswith("_proj.weight")
            packed |= pack(name.removesuffix(".weight"), *tensor.shape) if is_matrix else {name: tensor}
        write_tensors(made[form] / "model.safetensors", packed)
        (made[form] / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return made


def read_tensors(file: Path) -> Tensors:
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    return {
        name: Stored(entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def write_tensors(file: Path, tensors: Mapping[str, Stored]) -> None:
    header, at = dict[str, Any](), 0
    for name, tensor in tensors.items():
        end = at + len(tensor.content)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensor.content for tensor in tensors.values()))


# ----------------------------------------------------------------------------------------------------- damaged ones


def damage(folder: Path, chance: random.Random) -> str:
    """Damage config.json's settings, or one or all tensors of a part; returns which and how."""
    if (kind := chance.randrange(10)) < 4:
        return _damaged_settings(folder / "config.json", chance)
    if kind == 4:
        return damaged_header(folder, chance)
    file = folder / "model.safetensors"
    tensors = read_tensors(file)
    name = chance.choice([name for name in tensors if "_proj." in name])
    change = chance.choice((_other_shape, _other_dtype, _other_content, _other_name))
    part = name.rpartition(".")[2]
    names = [name] if chance.random() < 0.5 else [other for other in tensors if other.endswith(f"_proj.{part}")]
    seed = chance.random()
    for each in names:  # each in the same way
        told = change(tensors, each, random.Random(seed))
    write_tensors(file, tensors)
    return f"{len(names)} x {name}: {told}"


def _damaged_settings(file: Path, chance: random.Random) -> str:
    config = json.loads(file.read_text())
    settings = config["quantization_config"]
    holder, key = chance.choice([(config, "quantization_config"), *places(settings), *places(settings)])
    alike = [value for value in (*SETTINGS, *VALUES) if type(value) is type(holder[key])]
    kind, value = chance.random(), chance.choice(alike if alike and chance.random() < 0.5 else (*SETTINGS, *VALUES))
    if kind < 0.15:
        del holder[key]
        value = "taken out"
    elif kind < 0.3:
        holder, key = settings, chance.choice(KEYS)
        holder[key] = value
    else:
        holder[key] = value
    file.write_text(json.dumps(config))
    return f"config.json: {key}: {str(value)[:50]}"


def _other_shape(tensors: Tensors, name: str, chance: random.Random) -> str:
    tensor = tensors[name]
    shape = list(tensor.shape)
    at = chance.randrange(len(shape))
    kind = chance.choice(("turned", "flat", "longer", "empty", "one more", "one", "halved", "double", "number"))
    if kind == "turned":
        shape.reverse()
    elif kind in ("flat", "number"):
        shape = [int(np.prod(shape))] if kind == "flat" else []
    elif kind == "longer":
        shape.insert(at, 1)
    else:
        size = shape[at]
        shape[at] = {"empty": 0, "one more": size + 1, "one": 1, "halved": size // 2, "double": 2 * size}[kind]
    tensors[name] = tensor.resized(tensor.dtype, tuple(shape))
    return f"{kind}, {list(tensor.shape)} -> {shape}"


def _other_dtype(tensors: Tensors, name: str, chance: random.Random) -> str:
    tensor, dtype = tensors[name], chance.choice(list(DTYPE_BYTES))
    shape = tensor.shape
    if chance.random() < 0.5 and shape:  # with as many bytes
        ratio = DTYPE_BYTES[tensor.dtype] / DTYPE_BYTES[dtype]
        shape = (*shape[:-1], int(shape[-1] * ratio))
    tensors[name] = tensor.resized(dtype, shape)
    return f"{tensor.dtype} -> {dtype}"


def _other_content(tensors: Tensors, name: str, chance: random.Random) -> str:
    tensor = tensors[name]
    size = len(tensor.content)
    kinds = {
        "zeros": bytes(size),
        "ones": b"\xff" * size,
        "largest": (b"\xff" * (DTYPE_BYTES[tensor.dtype] - 1) + b"\x7f") * size,
        "lowest": (bytes(DTYPE_BYTES[tensor.dtype] - 1) + b"\x80") * size,
        "random": chance.randbytes(size),
    }
    kind = chance.choice(list(kinds))
    tensors[name] = replace(tensor, content=kinds[kind][:size])
    return kind


def _other_name(tensors: Tensors, name: str, chance: random.Random) -> str:
    other = f"{name.rpartition('.')[0]}.{chance.choice(PARTS)}"
    kind = chance.choice(("renamed", "missing", "twice"))
    tensor = tensors[name] if kind == "twice" else tensors.pop(name)
    if kind != "missing":
        tensors[other] = tensor
    return f"{kind}, {other}"


# ----------------------------------------------------------------------------------------------------- the cases


def run_cases(numbers: range, sound: Mapping[str, Path], folder: Path) -> Findings:
    """sound: by form. folder: where damaged copies are made, one at a time."""
    findings, forms = Findings(also_right=("loaded",)), list(sound)
    with quick_loading():
        expected = {form: said_by(path) for form, path in sound.items()}
        for number in numbers:
            form, chance = forms[number % len(forms)], random.Random(number)
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(sound[form], folder)
            told = damage(folder, chance)
            began, before = time.perf_counter(), peak_bytes_anew()
            found = tried(folder)
            outcome = _outcome(found, expected[form])
            (folder / "model.safetensors").unlink()
            if (plan := _planned(folder)) is not None:
                outcome = f"plan: {plan}"
            grown, seconds = peak_host_bytes() - before, time.perf_counter() - began
            findings.add(f"case {number} ({form}: {told})", outcome, grown, seconds)
    return findings


def _outcome(found: Said | str, expected: Said) -> str:
    if isinstance(found, str):
        return found
    if found.prompt != expected.prompt:
        return f"another prompt: {found.prompt}"
    return "same" if found.text == expected.text else "loaded"


def _planned(folder: Path) -> str | None:
    """What is wrong with a plan from config.json alone; None if nothing is."""
    found = outcome_of(lambda: model_to_plan(folder, None, "fp32", []))
    return found if isinstance(found, str) and found != "refused" else None
