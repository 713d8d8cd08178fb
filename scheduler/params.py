"""What a user can set about choosing and guessing tokens; the CLI's defaults are read from here.

Imports neither torch nor numpy, so that `--help` answers at once.
"""

from __future__ import annotations

import math
import reprlib
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal, get_args

from offspec.errors import UsageError

SEED_LIMIT = 1 << 64
MAX_STOPS, MAX_STOP_LENGTH = 64, 1024  # stop texts, and characters of one: each token's text is looked through for all
_STOP_LENGTH = f"texts of at most {MAX_STOP_LENGTH} characters"
MAX_NODES = 1024  # of a tree where the budget is found
DEFAULT_NODES = 64  # of a tree of the baselines that do not find their own budget, where none is given
# The same where a CPU computes: arithmetic for so many rows takes longer there than any disk takes for 16-bit weights
# (512 operations for each weight, a TFLOP/s for 4 GB/s), and KV entries for more are memory that layers could stay in.
CPU_MAX_NODES = 256
MAX_ROWS = 3072  # expanded candidates that wait in the draft's KV cache at a time
MAX_JOINT_NODES = 256  # of a tree that is accepted jointly: the logits of all of it are in memory at a time
Accept = Literal["exact", "joint"]
Scoring = Literal["coupled", "specexec"]
Tree = Literal["best-first", "sequoia", "opt-tree"]
Stopping = Literal["default", "thompson", "thompson-calibrated"]
NUMBERS: dict[str, tuple[type, str]] = {"int": (Integral, "a whole number"), "float": (Real, "a number")}


def max_nodes(device_type: str) -> int:
    """The largest tree that is sent where the budget is found."""
    return CPU_MAX_NODES if device_type == "cpu" else MAX_NODES


def _check_numbers(params: Any) -> None:
    """Raises UsageError where what should be a number is none; numpy's are numbers."""
    for field in fields(params):
        kind, _, none = str(field.type).partition(" | ")
        value, (wanted, what) = getattr(params, field.name), NUMBERS.get(kind, (object, "anything"))
        if value is None and not none:
            raise UsageError(f"{field.name} has no value; give {what}")
        if value is not None and not isinstance(value, wanted):
            raise UsageError(f"{field.name} must be {what}{' or None' if none else ''}, not {value!r}")


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
        _check_numbers(self)
        are_texts = isinstance(self.stop, (tuple, list)) and all(isinstance(text, str) for text in self.stop)
        checks = [
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 (off) and below 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0; 1 is off"),
            ("seed", self.seed is None or 0 <= self.seed < SEED_LIMIT, "between 0 and 2**64 - 1"),
            ("stop", are_texts and all(self.stop), "a tuple of texts that are not empty"),
            ("stop", are_texts and len(self.stop) <= MAX_STOPS, f"at most {MAX_STOPS} texts"),
            ("stop", are_texts and max(map(len, self.stop), default=0) <= MAX_STOP_LENGTH, _STOP_LENGTH),
        ]
        for name, good, wanted in checks:
            if not good:
                raise UsageError(f"{name} must be {wanted}, not {reprlib.repr(getattr(self, name))}")


@dataclass(frozen=True)
class SpeculationParams:
    """How the tree is drafted.

    budget: nodes of a tree, 0 for plain decoding, None for what pays here (`scheduler.budget`). scoring: coupled
    (shared noise, fitted sharpness) or specexec (cumulative draft probability). tree: how its shape is found; the
    others are baselines (`scheduler.baselines`). width: nodes expanded by one draft forward; None is what pays, or an
    eighth of a given budget, from 16 to 64. children: candidates kept of an expanded node. max_depth: longest path.
    stopping: when drafting ends: when another round is not worth its cost, or by Thompson sampling (EESD), as published
    or knowing costs and the draft's confidence. lookup: merge in what followed the same tokens earlier in the text.
    recycling: merge in what the target thought likely after the same token, as where there is no draft model it
    is always done. recall: correct the draft by what the target said at places like this one. reuse: what was drafted
    below the accepted token stays. overlap: draft on while the target's pass runs. The text is the same whatever of
    this is set.

    accept: exact, or joint (`scheduler.joint`), which is lossy: it takes the longest guess whose joint likelihood is
    `tau` of the draft's own or more, in (0, 1]. What is guessed is then a beam search of the draft, `beam` wide and
    `gamma` tokens deep, and the settings above, which say how an exact tree is drafted, stay as they are. The three say
    nothing where accept is exact.

    Raises UsageError for a value out of range, or for settings that do not go together.
    """

    budget: int | None = None
    scoring: Scoring = "coupled"
    tree: Tree = "best-first"
    width: int | None = None
    children: int = 16
    max_depth: int = 32
    stopping: Stopping = "default"
    lookup: bool = True
    recycling: bool = False
    recall: bool = True
    reuse: bool = True
    overlap: bool = True
    accept: Accept = "exact"
    tau: float = 0.1
    beam: int = 8
    gamma: int = 16

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.scoring not in ("coupled", "specexec"):
            raise UsageError(f"scoring must be coupled or specexec, not {self.scoring!r}")
        for name, kind in (("tree", Tree), ("stopping", Stopping), ("accept", Accept)):
            if getattr(self, name) not in get_args(kind):
                raise UsageError(f"{name} must be one of {', '.join(get_args(kind))}, not {getattr(self, name)!r}")
        for name, least in (("budget", 0), ("width", 1), ("children", 1), ("max_depth", 1), ("beam", 1), ("gamma", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise UsageError(f"{name} must be at least {least}, not {value}")
        if not 0 < self.tau <= 1:
            raise UsageError(f"tau must be above 0 and at most 1, not {self.tau!r}")
        if self.is_lossy:
            self._check_joint()

    @property
    def is_lossy(self) -> bool:
        """Whether the text may be another than plain decoding's."""
        return self.accept == "joint"

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raises UsageError where tokens that are chosen like this cannot be accepted like this."""
        if self.is_lossy and sampling.temperature > 0:
            raise UsageError(
                "joint acceptance looks for the likeliest text, so temperature must be 0, "
                f"not {sampling.temperature:g}; to sample, use accept exact"
            )

    def _check_joint(self) -> None:
        for name in ("budget", "scoring", "tree", "width", "stopping"):
            if (value := getattr(self, name)) != getattr(SpeculationParams, name):
                raise UsageError(
                    f"{name} {value} says how an exact tree is drafted, and joint acceptance drafts a beam "
                    f"(beam, gamma); leave {name} out, or use accept exact"
                )
        if self.beam * self.gamma > MAX_JOINT_NODES:
            raise UsageError(
                f"beam x gamma is the size of the tree and must be at most {MAX_JOINT_NODES}, "
                f"not {self.beam * self.gamma}"
            )
