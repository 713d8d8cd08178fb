"""The tensor types of GGUF files, with ggml's numbers and names, and the size of a block of each.

Source: ggml's `ggml.h` and `ggml-quants.h`; the numbers are part of the file format.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GgufType:
    """A block of `num_weights` weights along a row has `num_bytes` bytes. A plain float is a block of one."""

    name: str
    num_weights: int
    num_bytes: int


GGUF_TYPES: dict[int, GgufType] = {
    0: GgufType("F32", 1, 4),
    1: GgufType("F16", 1, 2),
    2: GgufType("Q4_0", 32, 18),
    3: GgufType("Q4_1", 32, 20),
    6: GgufType("Q5_0", 32, 22),
    7: GgufType("Q5_1", 32, 24),
    8: GgufType("Q8_0", 32, 34),
    10: GgufType("Q2_K", 256, 84),
    11: GgufType("Q3_K", 256, 110),
    12: GgufType("Q4_K", 256, 144),
    13: GgufType("Q5_K", 256, 176),
    14: GgufType("Q6_K", 256, 210),
    16: GgufType("IQ2_XXS", 256, 66),
    17: GgufType("IQ2_XS", 256, 74),
    18: GgufType("IQ3_XXS", 256, 98),
    19: GgufType("IQ1_S", 256, 50),
    20: GgufType("IQ4_NL", 32, 18),
    21: GgufType("IQ3_S", 256, 110),
    22: GgufType("IQ2_S", 256, 82),
    23: GgufType("IQ4_XS", 256, 136),
    27: GgufType("I64", 1, 8),
    29: GgufType("IQ1_M", 256, 56),
    30: GgufType("BF16", 1, 2),
    39: GgufType("MXFP4", 32, 17),
}
