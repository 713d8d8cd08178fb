"""Reads values of a config.json and checks their type and range.

An invalid value raises CheckpointError, one line that names the key.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeGuard

from offspec.loaders.files.checkpoint import show

from ..errors import CheckpointError

Json = Mapping[str, Any]
MAX_SIZE = 2**31 - 1  # of every integer: a larger one could overflow silently, and no model is so large
MAX_LAYERS = 10_000  # a wrong config must not exhaust memory before it is compared with the tensors
EPS_RANGE = (1e-30, 0.1)  # fp32 cannot represent a smaller one; a larger one would make the norm another function
SCALE_RANGE = (1e-6, 1e6)  # of factors and divisors


def positive(config: Json, key: str, default: int | None = None) -> int:
    """An integer of at least 1; null is a missing key."""
    return integer(config, key, default, least=1)


def number_of_layers(config: Json, key: str = "num_hidden_layers") -> int:
    """An integer from 1 to MAX_LAYERS: lists have an entry for each."""
    value = positive(config, key)
    if value > MAX_LAYERS:
        raise CheckpointError(f"config.json: {key} {value} exceeds the limit of {MAX_LAYERS}")
    return value


def integer(config: Json, key: str, default: int | None, *, least: int) -> int:
    """An integer of at least `least`; null is a missing key."""
    value = config.get(key) if config.get(key) is not None else default
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CheckpointError(f"config.json: {key} must be an integer of at least {least}, not {show(value)}")
    if value > MAX_SIZE:
        raise CheckpointError(f"config.json: {key} must be at most {MAX_SIZE}, not {show(value)}")
    return value


def positive_number(config: Json, key: str, default: float | None = None) -> float:
    """A finite number above 0; null is a missing key."""
    value = config.get(key) if config.get(key) is not None else default
    if not is_positive_number(value):
        raise CheckpointError(f"config.json: {key} must be a positive number, not {show(value)}")
    return float(value)


def number_in(config: Json, key: str, default: float, allowed: tuple[float, float] = SCALE_RANGE) -> float:
    """A number in a range, including both ends; null is a missing key."""
    value = positive_number(config, key, default)
    check_range(key, value, allowed)
    return value


def optional_number(config: Json, key: str) -> float | None:
    """`number_in`; None if the key is null or missing."""
    return None if config.get(key) is None else number_in(config, key, 1.0)


def is_positive_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def check_range(key: str, value: float, allowed: tuple[float, float]) -> None:
    least, most = allowed
    if not least <= value <= most:
        raise CheckpointError(f"config.json: {key} must be from {least:g} to {most:g}, not {show(value)}")


def plain(value: Any) -> Any:
    """A value of a JSON file, with numbers in place of {"__float__": "Infinity"}, which transformers 5 writes."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {key: plain(each) for key, each in value.items()}
    return list(map(plain, value)) if isinstance(value, list) else value


def interval(config: Json, key: str, default: tuple[float, float]) -> tuple[float, float]:
    """Two ascending numbers from 0 on, the second maybe infinite; null is a missing key."""
    value = config.get(key) if config.get(key) is not None else list(default)
    ends = plain(value)
    is_pair = isinstance(ends, list) and len(ends) == 2
    if not is_pair or not all(isinstance(end, (int, float)) and not isinstance(end, bool) for end in ends):
        raise CheckpointError(f"config.json: {key} must be a list of two numbers, not {show(value)}")
    low, high = ends
    if not 0 <= low < high:
        raise CheckpointError(f"config.json: {key} must be two ascending numbers from 0 on, not {show(value)}")
    return float(low), float(high)


def mapping(config: Json, key: str) -> Json:
    """An object; null and a missing key are an empty one."""
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"config.json: {key} must be an object, not {show(value)}")
    return value


def numbers(value: Any, key: str) -> tuple[float, ...]:
    """A list of numbers in SCALE_RANGE."""
    if not isinstance(value, list) or not value or not all(map(is_positive_number, value)):
        raise CheckpointError(f"config.json: {key} must be a list of positive numbers, not {show(value)}")
    for number in value:
        check_range(key, number, SCALE_RANGE)
    return tuple(map(float, value))
