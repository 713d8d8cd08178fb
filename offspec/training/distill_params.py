"""The user settings of `offspec distill`, with the CLI's defaults. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import UsageError

Init = Literal["next", "last"]


@dataclass(frozen=True)
class DistillParams:
    """How an exit layer is trained.

    steps: optimiser steps, of batch_texts texts each. num_texts: the number of texts that the target generates for
    training (given files are used completely). text_tokens: tokens of each text. temperature: of sampling these texts.
    num_labels: the number of likeliest tokens kept of the target's distribution at each position. learning_rate: the
    peak, for a hidden size of 256; it falls with the square root of the size. init: training starts from a copy of the
    next layer or of the target's last one. Raises UsageError for a value out of range.
    """

    steps: int = 800
    num_texts: int = 256
    text_tokens: int = 256
    batch_texts: int = 4
    temperature: float = 1.0
    num_labels: int = 32
    learning_rate: float = 1e-3
    init: Init = "last"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.init not in get_args(Init):
            raise UsageError(f"init must be one of {', '.join(get_args(Init))}, not {self.init!r}")
        for name, least in (("steps", 1), ("num_texts", 1), ("text_tokens", 2), ("batch_texts", 1), ("num_labels", 1)):
            if (value := getattr(self, name)) < least:
                raise UsageError(f"{name} must be at least {least}, not {value}")
        for name in ("temperature", "learning_rate"):
            if not (value := getattr(self, name)) > 0:
                raise UsageError(f"{name} must be above 0, not {value}")
