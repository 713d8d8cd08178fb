"""Shows that speculative text is plain decoding's, token for token. Knows nothing of the terminal.

Each prompt is decoded plainly once per temperature; then the same request runs with every budget, scoring and draft
asked for, and the token ids are compared. A difference is explained: how far apart the target held the two tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from offspec.scheduler.params import SamplingParams, Scoring, SpeculationParams
from offspec.scheduler.sampling import Sampler

from .engine import Engine
from .model import random_decoder

# How far apart two tokens' values may lie to count as a near-tie; in fp32 no difference is excused.
NEAR_TIE = {torch.float32: 0.0, torch.float16: 0.05, torch.bfloat16: 0.25}


@dataclass(frozen=True)
class Setting:
    """One way of guessing, for one way of choosing. `draft` is own or random."""

    temperature: float
    top_p: float
    budget: int
    scoring: Scoring
    draft: str


@dataclass(frozen=True)
class Difference:
    """Where a text left plain decoding's: `gap` is the distance of the two tokens' values (logits / T + noise)."""

    setting: Setting
    prompt_index: int
    token_index: int
    plain_token: int
    speculative_token: int
    gap: float
    is_near_tie: bool


@dataclass
class Report:
    """What `verify` found. `tokens_per_pass[i]` belongs to `settings[i]`."""

    num_prompts: int
    num_tokens: int = 0
    settings: list[Setting] = field(default_factory=list)
    tokens_per_pass: list[float] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @property
    def is_exact(self) -> bool:
        """Whether every text was plain decoding's, but for near-ties of 16-bit arithmetic."""
        return all(difference.is_near_tie for difference in self.differences)

    def as_dict(self) -> dict[str, Any]:
        return {
            "exact": self.is_exact,
            "num_prompts": self.num_prompts,
            "num_tokens": self.num_tokens,
            "settings": [
                {**asdict(setting), "tokens_per_pass": tokens_per_pass}
                for setting, tokens_per_pass in zip(self.settings, self.tokens_per_pass, strict=True)
            ],
            "differences": [asdict(difference) for difference in self.differences],
        }


def settings_of(
    temperatures: Sequence[float],
    top_p: float,
    budgets: Sequence[int],
    scorings: Sequence[Scoring],
    drafts: Sequence[str],
) -> list[Setting]:
    """Every combination, grouped by temperature; top_p counts at temperature 1 only."""
    return [
        Setting(temperature, top_p if temperature == 1 else 1.0, budget, scoring, draft)
        for temperature, draft, scoring, budget in itertools.product(temperatures, drafts, scorings, budgets)
    ]


def verify(
    engine: Engine,
    prompts: Sequence[str],
    settings: Sequence[Setting],
    *,
    max_new_tokens: int = 32,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Compare every setting with plain decoding on every prompt. progress(settings done, settings in all)."""
    engines = {"own": engine, "random": engine.with_draft(_random_draft(engine), "random")}
    report = Report(num_prompts=len(prompts))
    ids = [engine.tokenizer.encode(prompt) for prompt in prompts]
    plain: dict[tuple[float, float], list[list[int]]] = {}
    for done, setting in enumerate(settings):
        params = SamplingParams(max_new_tokens, temperature=setting.temperature, top_p=setting.top_p, seed=seed)
        key = (setting.temperature, setting.top_p)
        if key not in plain:
            plain[key] = [
                _tokens(engine, prompt, _seeded(params, i), SpeculationParams(budget=0))[0]
                for i, prompt in enumerate(ids)
            ]
        num_tokens = num_passes = 0
        speculation = SpeculationParams(budget=setting.budget, scoring=setting.scoring)
        for i, (prompt, wanted) in enumerate(zip(ids, plain[key], strict=True)):
            found, passes = _tokens(engines[setting.draft], prompt, _seeded(params, i), speculation)
            num_tokens, num_passes = num_tokens + len(found), num_passes + passes
            report.differences += _differences(engine, setting, i, prompt, _seeded(params, i), wanted, found)
        report.num_tokens += num_tokens
        report.settings.append(setting)
        report.tokens_per_pass.append(num_tokens / num_passes)
        if progress is not None:
            progress(done + 1, len(settings))
    return report


def _seeded(params: SamplingParams, prompt_index: int) -> SamplingParams:
    """Another seed for each prompt, so that more of the noise is exercised."""
    return replace(params, seed=(params.seed or 0) + prompt_index)


def _random_draft(engine: Engine) -> Any:
    shape = (
        engine.draft.config
        if engine.draft is not None
        else replace(engine.target.config, num_layers=1, windows=(None,))
    )
    return random_decoder(shape, seed=0, dtype=engine.target.dtype, device=engine.target.device)


def _tokens(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, speculation: SpeculationParams
) -> tuple[list[int], int]:
    """(token ids, passes) of one request."""
    steps = list(engine.generate(prompt, params, speculation))
    return [token for step in steps for token in step.token_ids], steps[-1].stats.num_passes


def _differences(
    engine: Engine,
    setting: Setting,
    index: int,
    prompt: Sequence[int],
    params: SamplingParams,
    wanted: list[int],
    found: list[int],
) -> Iterator[Difference]:
    """The first difference of two texts, if there is one."""
    if wanted == found:
        return
    at = next((i for i, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b), min(len(wanted), len(found)))
    a, b = (wanted[at] if at < len(wanted) else -1), (found[at] if at < len(found) else -1)
    gap = _gap(engine, [*prompt, *wanted[:at]], params, a, b) if a >= 0 and b >= 0 else float("inf")
    yield Difference(setting, index, at, a, b, gap, gap <= NEAR_TIE[engine.target.dtype])


def _gap(engine: Engine, text: list[int], params: SamplingParams, a: int, b: int) -> float:
    """How far apart the target holds two tokens after a text, noise included; infinite where one of them is excluded."""
    target, device = engine.target, engine.target.device
    hidden = target.forward(
        torch.tensor(text, device=device), torch.arange(len(text), device=device), target.new_cache()
    )
    sampler = Sampler(params, params.seed or 0, target.config.vocab_size, device)
    values = sampler.process(target.logits(hidden[-1:]).double(), [[]])[0]
    if not sampler.is_greedy:
        values = values + sampler.noise(len(text))
    gap = float((values[a] - values[b]).abs())
    return gap if gap == gap else float("inf")
