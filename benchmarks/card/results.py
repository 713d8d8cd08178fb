"""The files of a run: `results.jsonl`, to which each part appends its figures as they arise, and how they are read.

Nothing here imports torch: the process that starts the parts must survive what a part does to the device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
Line = dict[str, Any]  # part, device, figures, seconds, is_done; error, if it failed
RESULTS_FILE, LOG_FILE, TABLE_FILE = "results.jsonl", "log.txt", "card.txt"
MAX_FILES, MAX_FILE_BYTES = 8, 16 * 2**20  # that a lent machine gives back


def append(folder: Path, line: Mapping[str, Any]) -> None:
    """Write one line in one call, so that lines of several processes do not mix, and a killed process leaves it."""
    file = os.open(folder / RESULTS_FILE, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    try:
        os.write(file, (json.dumps(line) + "\n").encode())
    finally:
        os.close(file)


def read(file: Path) -> list[Line]:
    """The complete lines of a file of results; [] if it does not exist."""
    lines = list[Line]()
    for text in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
        with suppress(ValueError):  # the last line of a process that was killed
            lines.append(json.loads(text))
    return lines


def end_last_line(file: Path) -> None:
    """Let the next line begin on its own line, if a killed process left an incomplete one."""
    if file.exists() and (content := file.read_bytes()) and not content.endswith(b"\n"):
        file.write_bytes(content + b"\n")


def latest(lines: Iterable[Line], device: str) -> dict[str, Line]:
    """Part → its last line for this device; a part that was done once stays done."""
    by_part = dict[str, Line]()
    for line in lines:
        if line["device"] == device and not (is_done(by_part, line["part"]) and not line["is_done"]):
            by_part[line["part"]] = line
    return by_part


def is_done(results: Mapping[str, Line], part: str) -> bool:
    return bool(results.get(part, {}).get("is_done"))
