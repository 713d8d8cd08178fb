"""Checks that speculative text equals plain decoding's, token for token. It does not depend on the terminal.

Each prompt is decoded plainly once per temperature. Then the same request runs with every given budget, scoring and
draft, and the token ids are compared. With a random draft nearly every token takes a pass, so such texts stop after a
few passes, each over a whole tree. A difference is reported with the distance of the target's values for both tokens.

Near-ties are counted by tokens compared: those of a text up to its first difference, after which it is another text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from offspec.scheduler.params import SEED_LIMIT, Constraint, SamplingParams, Scoring, SpeculationParams
from offspec.scheduler.trees.sampling import Sampler

from ..drafts.model_draft import ModelDraft
from ..engine import Engine
from ..errors import UsageError
from ..model.decoder import Decoder, random_decoder
from ..model.rope_config import RopeConfig
from ..stats import exactness
from .benchmark import budget_name

# The largest distance of two tokens' values that counts as a near-tie where the engine is not exact.
NEAR_TIE = {torch.float32: 0.0, torch.float16: 0.05, torch.bfloat16: 0.25}
# With packed KV entries, by their format, in any dtype: if a product's rounding crosses the border of two codes, later
# entries differ as much as packing changes them. Two and a half times what was measured (docs/results/long-texts.md).
PACKED_TIE = {"8": 1.0, "4": 4.0}
RANDOM_PASSES = 4  # with a random draft, the number of passes after which each text stops


@dataclass(frozen=True)
class Setting:
    """One combination of speculation and sampling. `draft` is `own` (the engine's) or `random`.

    budget None is the automatic one. Raises UsageError for an invalid value.
    """

    temperature: float
    top_p: float
    budget: int | None
    scoring: Scoring
    draft: str
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        self.sampling(max_new_tokens=1, seed=0)
        self.speculation()

    def __str__(self) -> str:
        return (
            f"temperature {self.temperature:g}, top-p {self.top_p:g}, {self.draft} draft, "
            f"{self.scoring} scoring, budget {self.budget_name}"
        )

    @property
    def budget_name(self) -> str:
        return budget_name(self.budget)

    def sampling(self, max_new_tokens: int, seed: int) -> SamplingParams:
        return SamplingParams(
            max_new_tokens, temperature=self.temperature, top_p=self.top_p, seed=seed, constraint=self.constraint
        )

    def speculation(self) -> SpeculationParams:
        return SpeculationParams(budget=self.budget, scoring=self.scoring)


@dataclass(frozen=True)
class Difference:
    """The first position at which a text differs from plain decoding's. A token is None if that text had ended.

    gap: the distance of the two tokens' values (logits / T + noise); None if sampling excludes one of them.
    """

    setting: Setting
    prompt_index: int
    token_index: int
    plain_token: int | None
    speculative_token: int | None
    gap: float | None
    is_near_tie: bool

    def __str__(self) -> str:
        plain, speculative = (
            "the end" if token is None else f"token {token}" for token in (self.plain_token, self.speculative_token)
        )
        apart = "one of them is excluded by sampling" if self.gap is None else f"{self.gap:.3g} apart"
        return (
            f"prompt {self.prompt_index}, position {self.token_index}: {speculative} instead of {plain}, {apart} "
            f"({self.setting})"
        )


@dataclass
class VerificationReport:
    """The result of `verify`. inexact_reason: as the engine's.

    `tokens_per_pass[i]` and `num_compared[i]`, in tokens, belong to `settings[i]`."""

    num_prompts: int
    num_tokens: int = 0
    settings: list[Setting] = field(default_factory=list)
    tokens_per_pass: list[float] = field(default_factory=list)
    num_compared: list[int] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    inexact_reason: str | None = None

    @property
    def promise(self) -> str:
        """How near texts should come to plain decoding's: "exact", or "up to near-ties"."""
        return exactness(self.inexact_reason)

    @property
    def errors(self) -> list[Difference]:
        """The differences that are not near-ties of 16-bit arithmetic, or of packed KV entries."""
        return [difference for difference in self.differences if not difference.is_near_tie]

    @property
    def near_ties(self) -> list[Difference]:
        """The differences that rounding explains."""
        return [difference for difference in self.differences if difference.is_near_tie]

    @property
    def near_ties_per_1000(self) -> float:
        """How many near-ties were decided differently, per 1,000 tokens compared."""
        return 1000 * len(self.near_ties) / max(1, sum(self.num_compared))

    @property
    def largest_gap(self) -> float:
        """The largest distance of two tokens' values in a near-tie that was decided differently; 0 without any."""
        return max((difference.gap for difference in self.near_ties if difference.gap is not None), default=0.0)

    @property
    def is_exact(self) -> bool:
        return not self.errors

    def as_dict(self) -> dict[str, Any]:
        return {
            "exact": self.is_exact,
            "promise": self.promise,
            "inexact_reason": self.inexact_reason,
            "num_prompts": self.num_prompts,
            "num_tokens": self.num_tokens,
            "near_ties": {
                "num": len(self.near_ties),
                "num_compared": sum(self.num_compared),
                "per_1000_tokens": self.near_ties_per_1000,
                "largest_gap": self.largest_gap,
            },
            "settings": [
                {**asdict(setting), "tokens_per_pass": tokens_per_pass, "num_compared": num_compared}
                for setting, tokens_per_pass, num_compared in zip(
                    self.settings, self.tokens_per_pass, self.num_compared, strict=True
                )
            ],
            "differences": [asdict(difference) for difference in self.differences],
        }


def settings_of(
    temperatures: Sequence[float],
    top_p: float,
    budgets: Sequence[int | None],
    scorings: Sequence[Scoring],
    drafts: Sequence[str],
    constraint: Constraint | None = None,
) -> list[Setting]:
    """Every combination, grouped by temperature; top_p is used at temperature 1 only."""
    return [
        Setting(temperature, top_p if temperature == 1 else 1.0, budget, scoring, draft, constraint)
        for temperature, draft, scoring, budget in itertools.product(temperatures, drafts, scorings, budgets)
    ]


def verify(
    engine: Engine,
    prompts: Sequence[str],
    settings: Sequence[Setting],
    *,
    max_new_tokens: int = 16,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> VerificationReport:
    """Compare every setting with plain decoding on every prompt. progress(settings done, number of settings).

    Raises UsageError if a setting uses the engine's own draft and it has none.
    """
    engines, drafts = {"own": engine}, {setting.draft for setting in settings}
    if "random" in drafts:
        engines["random"] = engine.with_draft(ModelDraft(_random_draft(engine), "random"))
    if drafts - {"random"} and not engine.guesses:
        raise UsageError("the engine has no draft; choose one (`draft`), or verify a random one (`drafts=random`)")
    report = VerificationReport(len(prompts), inexact_reason=engine.inexact_reason)
    ids = [engine.tokenizer.encode(prompt) for prompt in prompts]
    plain: dict[tuple[float, float], list[list[int]]] = {}
    for done, setting in enumerate(settings):
        # Each prompt has another seed, so that the test covers more noise.
        params = [setting.sampling(max_new_tokens, (seed + i) % SEED_LIMIT) for i in range(len(ids))]
        key = (setting.temperature, setting.top_p)
        if key not in plain:
            plain[key] = [
                _run(engine, prompt, p, SpeculationParams(budget=0))[0] for prompt, p in zip(ids, params, strict=True)
            ]
        max_passes = RANDOM_PASSES if setting.draft == "random" else None
        num_tokens = num_passes = num_compared = 0
        for i, (prompt, p, wanted) in enumerate(zip(ids, params, plain[key], strict=True)):
            tokens, passes, was_stopped = _run(engines[setting.draft], prompt, p, setting.speculation(), max_passes)
            num_tokens, num_passes = num_tokens + len(tokens), num_passes + passes
            compared = wanted[: len(tokens)] if was_stopped else wanted
            differences = list(first_difference(engine, setting, i, prompt, p, compared, tokens))
            num_compared += differences[0].token_index + 1 if differences else len(compared)
            report.differences += differences
        report.num_tokens += num_tokens
        report.num_compared.append(num_compared)
        report.settings.append(setting)
        report.tokens_per_pass.append(num_tokens / num_passes)
        if progress is not None:
            progress(done + 1, len(settings))
    return report


def _random_draft(engine: Engine) -> Decoder:
    """A draft of the smallest possible size, because its memory is not planned."""
    config = engine.target.config.as_native().plain_layers(1)
    rope = config.rope
    shape = replace(
        config,
        windows=(None,),
        unrotated=(),
        rotary_share=1.0,
        rope=RopeConfig(rope.theta, "default", {}) if rope.kind == "longrope" else rope,
        hidden_size=64,
        intermediate_size=64,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        tied_head=True,
    )
    return random_decoder(shape, seed=0, dtype=engine.target.dtype, device=engine.target.device)


def _run(
    engine: Engine,
    prompt: Sequence[int],
    params: SamplingParams,
    speculation: SpeculationParams,
    max_passes: int | None = None,
) -> tuple[list[int], int, bool]:
    """The tokens of one request, its passes, and whether `max_passes` stopped it before the end of its text."""
    with closing(engine.generate(prompt, params, speculation)) as request:
        steps = list(itertools.islice(request, max_passes))
    tokens = [token for step in steps for token in step.token_ids]
    was_stopped = len(steps) == max_passes and steps[-1].finish_reason is None
    return tokens, steps[-1].stats.num_passes, was_stopped


def first_difference(
    engine: Engine,
    setting: Setting,
    index: int,
    prompt: Sequence[int],
    params: SamplingParams,
    wanted: list[int],
    actual: list[int],
) -> Iterator[Difference]:
    """The first difference of two texts, if there is one."""
    if wanted == actual:
        return
    at = next(
        (i for i, (a, b) in enumerate(zip(wanted, actual, strict=False)) if a != b), min(len(wanted), len(actual))
    )
    a, b = (wanted[at] if at < len(wanted) else None), (actual[at] if at < len(actual) else None)
    gap = None if a is None or b is None else _gap(engine, prompt, wanted[:at], params, (a, b))
    yield Difference(setting, index, at, a, b, gap, gap is not None and gap <= near_tie(engine))


def near_tie(engine: Engine) -> float:
    """The largest distance of two tokens' values that rounding may decide otherwise in another pass."""
    if engine.is_exact:
        return 0.0
    kv_cache = "" if engine.plan is None else engine.plan.inputs.target.kv.name
    return max(NEAR_TIE[engine.target.dtype], PACKED_TIE.get(kv_cache, 0.0))


def _gap(
    engine: Engine, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams, tokens: tuple[int, int]
) -> float | None:
    """The distance of two tokens' values after a text, including noise; None if sampling excludes one of them."""
    target, device, text, (a, b) = engine.target, engine.target.device, [*prompt, *answer], tokens
    hidden = target.forward(torch.tensor(text), torch.arange(len(text), device=device), target.new_cache())
    sampler = Sampler(params, params.seed or 0, target.config.vocab_size, device)
    sampler.extend(prompt, is_prompt=True)
    if params.constraint is not None:
        sampler.constrain(engine.compile_constraint(params.constraint, prompt))
    sampler.extend(answer)
    values = sampler.process(target.logits(hidden[-1:]).double(), [[]])[0]
    if not sampler.is_greedy:
        values = values + sampler.noise(len(text))
    gap = float((values[a] - values[b]).abs())
    return gap if math.isfinite(gap) else None
