"""Which engines are exact, and that they say so. `test_texts` shows what it means."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.backends.x86.processor import using
from offspec.errors import UsageError
from offspec.model.exactness import FASTEST_METHOD

from ..machines import each_choice_with_kernels, needs_kernels, this_processor
from ..pair import Pair, build_pair
from ..refusals import refused

pytestmark = needs_kernels
GetEngine = Callable[..., Engine]
PLAIN = SpeculationParams(budget=0)
PROMPTS = ("def area(", "for i in range(10):\n    print(i)\n" * 3, "x = 1", "class Stack:\n    def push(self, ")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"), 3, max_position_embeddings=512)


@pytest.fixture(scope="module")
def load(pair: Pair) -> Iterator[GetEngine]:
    """Loads the pair's target; engines close at the end."""
    engines = list[Engine]()

    def get(draft: str = "own", **options: Any) -> Engine:
        name = str(pair.draft) if draft == "own" else draft
        more: dict[str, Any] = {"exit_layer": 1} if draft == "self" else {}
        engines.append(Engine.load(str(pair.target), draft=name, device="cpu", **more, **options))
        return engines[-1]

    yield get
    for engine in engines:
        engine.close()


def text(engine: Engine, prompt: str, params: SamplingParams, speculation: SpeculationParams) -> list[int]:
    """A text's tokens."""
    return [token for step in engine.generate(prompt, params, speculation) for token in step.token_ids]


@pytest.mark.nightly("120 texts; the default run has one of each draft and place")
@this_processor
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_many_seeds_of_the_built_in_pair(dtype: str) -> None:
    with Engine.load("builtin", device="cpu", dtype=dtype) as engine:
        assert engine.is_exact
        for seed in range(40):
            params = SamplingParams(64, temperature=seed % 2, seed=seed, ignore_eos=True)
            prompt = PROMPTS[seed % len(PROMPTS)]
            plain = text(engine, prompt, params, PLAIN)
            for budget in (8, 64):
                assert text(engine, prompt, params, SpeculationParams(budget=budget)) == plain, (seed, budget)


@pytest.mark.slow
def test_fast_arithmetic_is_not_exact(load: GetEngine) -> None:
    fast, fp32 = load("none", dtype="bf16", arithmetic="fast"), load("none", dtype="fp32", arithmetic="fast")
    for engine in (fast, fp32):
        assert not engine.is_exact
        assert engine.inexact_reason == FASTEST_METHOD
        assert any("near-ties" in str(note) and FASTEST_METHOD in str(note) for note in engine.notes)
        stats = next(engine.generate("x", SamplingParams(1))).stats
        assert (stats.exactness, stats.as_dict()["exact"]) == ("up to near-ties", False)


@pytest.mark.slow
def test_exact_engines_say_so(load: GetEngine) -> None:
    engine = load("none", dtype="fp32")
    assert engine.is_exact
    assert engine.inexact_reason is None
    stats = next(engine.generate("x", SamplingParams(1))).stats
    assert (stats.exactness, stats.as_dict()["exact"]) == ("exact", True)
    stats.is_lossy = True
    assert (stats.exactness, stats.as_dict()["exact"]) == ("lossy", False)


@pytest.mark.slow
@each_choice_with_kernels
@pytest.mark.parametrize("arithmetic", ["auto", "exact"])
def test_every_processor_with_kernels_is_exact(load: GetEngine, arithmetic: str) -> None:
    """The choice alone, which also instructions that this processor lacks do not change."""
    engine = load("none", dtype="bf16", arithmetic=arithmetic)
    assert engine.inexact_reason is None


@pytest.mark.parametrize("arithmetic", ["exact", "int8"])
def test_exact_arithmetic_is_refused_where_it_is_impossible(pair: Pair, arithmetic: str) -> None:
    with using(()), refused(UsageError, "arithmetic", arithmetic, "kernels for this processor", "omit it"):
        Engine.load(str(pair.target), draft="none", device="cpu", dtype="bf16", arithmetic=arithmetic)
