"""What answers are judged by beside their likelihood: ROUGE-L, and the joules of processors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


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
