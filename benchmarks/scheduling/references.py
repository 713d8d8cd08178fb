"""Texts to compare generated ones with: how the held-out prompts go on in the standard library; and ROUGE-L."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from pathlib import Path

from .repetition import MODULES

HELD_OUT = (*MODULES, "mailcap")  # where the prompts come from


def reference_of(prompt: str) -> str | None:
    """What follows `prompt` in its module of this Python; None where it has another text (prompts: CPython 3.11.7)."""
    for name in HELD_OUT:
        file = Path(sysconfig.get_path("stdlib")) / f"{name}.py"
        if file.is_file():
            _, found, rest = file.read_text(encoding="utf-8").partition(prompt)
            if found:
                return rest
    return None


def rouge_l(tokens: Sequence[int], reference: Sequence[int]) -> float:
    """ROUGE-L (Lin, 2004): the F1 of the longest common subsequence of two texts; 0 if one is empty."""
    lengths = [0] * (len(reference) + 1)  # of common subsequences of the tokens so far and each beginning
    for token in tokens:
        above = 0  # of one token less, and one beginning shorter
        for place, other in enumerate(reference, 1):
            above, lengths[place] = (
                lengths[place],
                above + 1 if token == other else max(lengths[place], lengths[place - 1]),
            )
    return 2 * lengths[-1] / (len(tokens) + len(reference)) if tokens and reference else 0.0


def energy_j() -> float | None:
    """Joules that this machine's processors have used since some time in the past (RAPL); None if it cannot be read."""
    files = sorted(Path("/sys/class/powercap").glob("intel-rapl:?/energy_uj"))
    try:
        return sum(int(file.read_text()) for file in files) / 1e6 if files else None
    except (OSError, ValueError):
        return None
