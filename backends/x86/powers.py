"""e to the power of numbers, and what is made of it, for vectors of fp32 numbers in kernels."""

from __future__ import annotations

from .compiler import Emitter
from .encodings import constant

SMALLEST, LARGEST = -87.0, 80.0  # below the first, a power counts as zero; above the second, it is not computed
_ROUNDING = 1.5 * 2**23  # added to a number and subtracted again, it leaves a whole number
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)


def power_of_e(e: Emitter, x: str, lanes: int) -> str:
    """e to the power of x, for x up to LARGEST: 2 to a whole number times a polynomial (Cephes' expf)."""
    vector, ints = f"<{lanes} x float>", f"<{lanes} x i32>"

    shifted = e.fma(vector, x, of_all(1.44269504088896341), of_all(_ROUNDING))
    whole = e.op(f"fsub {vector} {shifted}, {of_all(_ROUNDING)}")
    rest = e.fma(vector, whole, of_all(-0.693359375), x)
    rest = e.fma(vector, whole, of_all(2.12194440e-4), rest)
    power = of_all(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        power = e.fma(vector, power, rest, of_all(coefficient))
    square = e.op(f"fmul {vector} {rest}, {rest}")
    power = e.op(f"fadd {vector} {e.fma(vector, power, square, rest)}, {of_all(1.0)}")
    exponents = e.op(f"shl {ints} {e.op(f'bitcast {vector} {shifted} to {ints}')}, splat (i32 23)")
    bits = e.op(f"add {ints} {e.op(f'bitcast {vector} {power} to {ints}')}, {exponents}")
    power = e.op(f"bitcast {ints} {bits} to {vector}")
    is_small = e.op(f"fcmp olt {vector} {x}, {of_all(SMALLEST)}")
    power = e.op(f"select <{lanes} x i1> {is_small}, {vector} zeroinitializer, {vector} {power}")
    is_nan = e.op(f"fcmp uno {vector} {x}, {x}")
    return e.op(f"select <{lanes} x i1> {is_nan}, {vector} {x}, {vector} {power}")


def sigmoid_divisor(e: Emitter, x: str, lanes: int) -> str:
    """1 + e to the power of -x: what a number is divided by to be multiplied by the sigmoid of x."""
    vector = f"<{lanes} x float>"
    negative = at_most(e, e.op(f"fneg {vector} {x}"), LARGEST, lanes)
    return e.op(f"fadd {vector} {power_of_e(e, negative, lanes)}, {of_all(1.0)}")


def at_most(e: Emitter, x: str, limit: float, lanes: int) -> str:
    """The smaller one of each number and the limit; NaN stays."""
    vector = f"<{lanes} x float>"
    is_above = e.op(f"fcmp ogt {vector} {x}, {of_all(limit)}")
    return e.op(f"select <{lanes} x i1> {is_above}, {vector} {of_all(limit)}, {vector} {x}")


def at_least(e: Emitter, x: str, limit: float, lanes: int) -> str:
    """The larger one of each number and the limit; NaN stays."""
    vector = f"<{lanes} x float>"
    is_below = e.op(f"fcmp olt {vector} {x}, {of_all(limit)}")
    return e.op(f"select <{lanes} x i1> {is_below}, {vector} {of_all(limit)}, {vector} {x}")


def of_all(number: float) -> str:
    """A constant vector of one number."""
    return f"splat (float {constant(number)})"
