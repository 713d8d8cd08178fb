"""The built-in pair: a small target and a smaller draft, trained by scripts/train_builtin.py, and held-out prompts."""

from __future__ import annotations

import json
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def path(role: str) -> Path:
    """The checkpoint folder of `target` or `draft`."""
    return _HERE / role


def prompts() -> list[str]:
    """Held-out prompts: beginnings of Python functions and modules that neither model was trained on."""
    lines = (_HERE / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]
