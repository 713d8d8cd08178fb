"""What a user can set about choosing and guessing tokens; the CLI's defaults are read from here.

Imports neither torch nor numpy, so that `--help` answers at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from offspec.errors import UsageError

SEED_LIMIT = 1 << 64
MAX_NODES = 1024  # of a tree where the budget is found
MAX_ROWS = 3072  # expanded candidates that wait in the draft's KV cache at a time
Scoring = Literal["coupled", "specexec"]
Tree = Literal["best-first", "sequoia", "opt-tree"]
Stopping = Literal["default", "thompson", "thompson-calibrated"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop; the defaults are greedy.

    temperature 0 is greedy and ignores top_k, top_p and min_p. top_k 0, top_p 1 and min_p 0 are off. The repetition
    penalty (CTRL, 1909.05858, as transformers applies it) weighs every token of the prompt and of the text so far.
    seed None draws one; the statistics tell which. Raises UsageError for a value outside its range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        checks = [
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 (off) and below 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0; 1 is off"),
            ("seed", self.seed is None or 0 <= self.seed < SEED_LIMIT, "between 0 and 2**64 - 1"),
            ("stop", not isinstance(self.stop, str) and all(self.stop), "a tuple of texts that are not empty"),
        ]
        for name, good, wanted in checks:
            if not good:
                raise UsageError(f"{name} must be {wanted}, not {getattr(self, name)!r}")


@dataclass(frozen=True)
class SpeculationParams:
    """How the tree is drafted.

    budget: nodes of a tree, 0 for plain decoding, None for what pays here (`scheduler.budget`). scoring: coupled (shared
    noise, fitted sharpness) or specexec (cumulative draft probability). tree: how its shape is
    found; the others are there to be compared with (`scheduler.static`). width: nodes expanded by one draft forward; None
    is what pays, or an eighth of a given budget, from 16 to 64. children: candidates kept of an expanded node. max_depth: longest path. stopping:
    when drafting ends: where nothing is left to gain, or by Thompson sampling (EESD). lookup: merge in what followed the
    same tokens earlier in the text. reuse: what was drafted
    below the accepted token stays. overlap: draft on while the target's pass runs. Raises UsageError for a value out of
    range. The text is the same whatever is set here.
    """

    budget: int | None = None
    scoring: Scoring = "coupled"
    tree: Tree = "best-first"
    width: int | None = None
    children: int = 16
    max_depth: int = 32
    stopping: Stopping = "default"
    lookup: bool = True
    reuse: bool = True
    overlap: bool = True

    def __post_init__(self) -> None:
        if self.scoring not in ("coupled", "specexec"):
            raise UsageError(f"scoring must be coupled or specexec, not {self.scoring!r}")
        for name, kind in (("tree", Tree), ("stopping", Stopping)):
            if getattr(self, name) not in get_args(kind):
                raise UsageError(f"{name} must be one of {', '.join(get_args(kind))}, not {getattr(self, name)!r}")
        for name, least in (("budget", 0), ("width", 1), ("children", 1), ("max_depth", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise UsageError(f"{name} must be at least {least}, not {value}")
