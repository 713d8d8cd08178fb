"""What was measured on this machine, as JSON in the user's cache folder: one file per device and versions.

If a file cannot be written, each process repeats the measurement.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from offspec.user_folders import user_folder, write_cached

from ..files.small_files import parse_json, read_small_file


def measured_file(kind: str, identity: Sequence[object]) -> Path:
    """The file for measurements of a kind. identity: all that they depend on, as JSON can express it."""
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return user_folder("cache") / f"{kind}-{digest[:12]}.json"


def versions(*packages: str) -> list[str]:
    """The versions of packages; "" for one that is not installed."""
    numbers = list[str]()
    for package in packages:
        try:
            numbers.append(version(package))
        except PackageNotFoundError:
            numbers.append("")
    return numbers


def read_measured(file: Path) -> dict[str, Any]:
    """The content of a file; {} if it is missing or is no JSON object."""
    try:
        content = parse_json(read_small_file(file))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_measured(file: Path, content: Mapping[str, Any]) -> None:
    """Write a file atomically; if that fails, the next process repeats the measurement."""
    write_cached(file, json.dumps(content, indent=1).encode())
