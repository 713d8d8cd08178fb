"""Checks in fp32 whether a peer's text is the target's greedy text.

A grown model computes the small model's function. So the small model in fp32 gives, within a second, the large one's
output without rounding: plain decoding of each prompt, and for any text the logit gap of each token to the best one. Of
a real pair, the target itself does.

In bf16, near-ties may be decided either way, and the text then differs. So two texts are compared up to the first
difference, and every later token by its gap, given the text before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.text.prompt import Prompt
from offspec.tools.verification import NEAR_TIE

GAP = NEAR_TIE[torch.bfloat16]  # in logits


@dataclass(frozen=True)
class Judgement:
    """num_equal: tokens before the first difference from plain decoding.

    num_ties: tokens that are not the likeliest; their largest logit gap is `worst_gap`. is_exact: rounding to bf16
    explains all gaps.
    """

    num_tokens: int
    num_equal: int
    num_ties: int
    worst_gap: float

    @property
    def is_exact(self) -> bool:
        return self.worst_gap <= GAP


class Truth:
    """A model in fp32 with the target's function."""

    def __init__(self, source: Path) -> None:
        self._engine = Engine.load(str(source), draft="none", dtype="fp32", device="cpu")
        self.plain = cache(self._plain)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(self._engine.encode(prompt))

    def _plain(self, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        steps = self._engine.generate(prompt, SamplingParams(num_tokens, ignore_eos=True), SpeculationParams(budget=0))
        return [token for step in steps for token in step.token_ids]

    def judge(self, prompt: tuple[int, ...], tokens: list[int]) -> Judgement:
        wanted = self.plain(prompt, len(tokens))
        equal = next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=True)) if a != b), len(tokens))
        target = self._engine.target
        text = torch.tensor([*prompt, *tokens[:-1]])
        hidden = target.forward(text, torch.arange(len(text)), target.new_cache())
        logits = target.logits(hidden[len(prompt) - 1 :])
        gaps = logits.amax(dim=1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return Judgement(len(tokens), equal, int((gaps > 0).sum()), float(gaps.max()))
