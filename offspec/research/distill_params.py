"""The user settings of `offspec distill`, with the CLI's defaults. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import UsageError

Init = Literal["next", "last"]
HEADS = (  # `head_structures.STRUCTURES`
    *("eagle3", "medusa", "medusa-shared", "hydra", "recurrent", "mlp", "clover", "clover2", "koala", "amphista"),
    *("fspad", "mtp", "dflash"),
)
LEAST_TEMPERATURE = 1e-3  # a smaller one could overflow
LEAST_TEXT = 3  # tokens: a place whose state a head reads, the token after it, and one to predict


@dataclass(frozen=True)
class DistillParams:
    """How an exit layer is trained.

    steps: optimiser steps, of batch_texts texts each. num_texts: the number of texts that the target generates for
    training (given files are used completely, unless they give prompts only). text_tokens: tokens of each text.
    prompt_tokens: of a given file's texts, only so many first tokens are used, and the model writes the rest; 0 uses
    all. temperature: of sampling these texts. num_labels: the number of likeliest tokens kept of the target's
    distribution at each position. learning_rate: the peak, for a hidden size of 256; it falls with the square root of
    the size. init: training starts from a copy of the next layer or of the target's last one. Raises UsageError for a
    value out of range.
    """

    steps: int = 800
    num_texts: int = 256
    text_tokens: int = 256
    prompt_tokens: int = 0
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
        if not 0 <= self.prompt_tokens < self.text_tokens:
            raise UsageError(f"prompt_tokens must be less than text_tokens, not {self.prompt_tokens}")
        for name in ("temperature", "learning_rate"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise UsageError(f"{name} must be above 0 and finite, not {value}")
        if self.temperature < LEAST_TEMPERATURE:
            raise UsageError(f"temperature must be at least {LEAST_TEMPERATURE}, not {self.temperature}")


@dataclass(frozen=True)
class HeadParams(DistillParams):
    """How a head is trained. learning_rate falls with the hidden size, not with its square root.

    head_tokens: an EAGLE head predicts only so many tokens, the most frequent ones; a head over the target's own learns
    from these alone, and predicts all. 0 is all. Raises UsageError for a value out of range.
    """

    learning_rate: float = 3e-3
    head_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text_tokens < LEAST_TEXT:
            raise UsageError(
                f"a head learns from texts of at least {LEAST_TEXT} tokens, not `text_tokens={self.text_tokens}`"
            )
        if self.head_tokens < 0:
            raise UsageError(f"head_tokens must be at least 0, not {self.head_tokens}")


@dataclass(frozen=True)
class DraftParams(DistillParams):
    """How a draft model is trained (DistillSpec, 2310.08461).

    on_policy: the share of texts
    that the draft itself writes, with the target's predictions along them; the target writes the others. rounds: how
    often in the run the draft writes new texts; earlier ones stay in use. lora_rank: train only low-rank additions of
    this rank; 0 trains all weights. Raises UsageError for a value out of range.
    """

    learning_rate: float = 5e-4
    on_policy: float = 0.0
    rounds: int = 4
    lora_rank: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.on_policy <= 1:
            raise UsageError(f"on_policy must be between 0 and 1, not {self.on_policy}")
        for name, least in (("rounds", 1), ("lora_rank", 0)):
            if (value := getattr(self, name)) < least:
                raise UsageError(f"{name} must be at least {least}, not {value}")
