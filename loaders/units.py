"""Parses and formats sizes, rates and durations for people."""

from __future__ import annotations

import re

from offspec.errors import UsageError

KIB, MIB, GIB = 2**10, 2**20, 2**30

# As in docker, systemd and java, a single letter is binary; "GB" is decimal, as on the label of a disk.
_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<prefix>[kmgt]?)(?P<kind>ib|b|)", re.IGNORECASE | re.ASCII)
_MAX_BYTES = 2**60


def parse_size(text: str) -> int:
    """Bytes of "20GiB", "6.5 GB" (decimal), "512M" (binary, as "512MiB"), "4096B" or "0". Raises UsageError.

    A number without a unit is refused, because 20 could mean bytes or GiB.
    """
    shown = repr(text[:40])
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{shown} is not a size; write it as 20GiB, 6.5GB or 512MiB")
    prefix, kind = match["prefix"].lower(), match["kind"].lower()
    number = float(match["number"])
    if (number and not prefix + kind) or (kind == "ib" and not prefix):
        raise UsageError(f"{shown} has no unit; write it as 20GiB, 6.5GB or 512MiB, or as 4096B for bytes")
    nbytes = number * (1000 if prefix and kind == "b" else 1024) ** _PREFIXES[prefix]
    if nbytes > _MAX_BYTES:
        raise UsageError(f"{shown} is too large; write a size like 20GiB, 6.5GB or 512MiB")
    return int(nbytes)


def format_size(nbytes: float) -> str:
    """Memory, in binary units: "23.5 GiB", "512 MiB"."""
    for unit, size in (("TiB", 2**40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if nbytes >= 0.9995 * size:  # values that would round up to "1024 MiB" get the next unit
            return f"{_digits(nbytes / size)} {unit}"
    return f"{nbytes:.0f} B"


def format_quantity(value: float, unit: str) -> str:
    """A rate or a decimal size: "3.4 GB/s", "820 GFLOP/s"."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * size:
            return f"{_digits(value / size)} {prefix}{unit}"
    return f"{_digits(value)} {unit}"


def format_count(number: float) -> str:
    """A count in the style of model names: "70.6 B", "135 M", "4096"."""
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= 0.9995 * size:
            return f"{_digits(number / size)} {letter}"
    return str(round(number))


def format_seconds(seconds: float) -> str:
    """A duration with two or three digits: "1.6 s", "28 s", "3 min"."""
    if seconds >= 119.5:
        return f"{seconds / 60:.0f} min"
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.0995 else f"{_digits(seconds)} s"


def _digits(number: float) -> str:
    """One decimal below 100, none from 100 on."""
    text = f"{number:.1f}" if number < 99.95 else f"{number:.0f}"
    return text.removesuffix(".0")
