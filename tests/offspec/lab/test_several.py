"""Several drafts at once: the text is plain decoding's, each has its memory and its text, misuse is refused early."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.drafts.model_draft import ModelDraft
from offspec.errors import UsageError
from offspec.lab.several import SeveralDrafts
from offspec.session import Session

from ...pair import Pair, build_pair, scale_weights, variant
from ...refusals import refused, tells

PROMPT = "def area("
PLAIN = SpeculationParams(0)
SAMPLING = {
    "greedy": SamplingParams(14, seed=0, ignore_eos=True),
    "warm": SamplingParams(14, temperature=1.0, top_p=0.95, repetition_penalty=1.2, seed=2, ignore_eos=True),
}
SPECULATION = {
    "auto": SpeculationParams(),
    "fixed": SpeculationParams(16),
    "plain scoring": SpeculationParams(16, scoring="specexec", recall=False, reuse=False),
    "everything": SpeculationParams(32, recycling=True),
}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"), 4, max_position_embeddings=256)


@pytest.fixture(scope="module")
def small(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another draft, which is wrong more often."""
    folder = variant(pair.draft, tmp_path_factory.mktemp("small") / "draft")
    return scale_weights(folder, {"model.layers.1.mlp.down_proj.weight": 0.5})


def text_of(engine: Engine, sampling: SamplingParams, speculation: SpeculationParams) -> list[int]:
    return [token for step in engine.generate(PROMPT, sampling, speculation) for token in step.token_ids]


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("first", ["model", "shadow", "exit"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_the_text_is_plain_decodings(pair: Pair, small: Path, first: str, sampling: str) -> None:
    """With every kind of first draft; `shadow` guesses with what is there."""
    options = {"exit_layer": 2} if first == "exit" else {}
    name = {"model": str(pair.draft), "exit": "self"}.get(first, first)
    with Engine.load(pair.target, draft=[name, small], device="cpu", dtype="fp32", **options) as engine:
        plain = text_of(engine, SAMPLING[sampling], PLAIN)
        for name, speculation in SPECULATION.items():
            assert text_of(engine, SAMPLING[sampling], speculation) == plain, name


def test_each_draft_has_a_text_and_estimates_of_its_own(pair: Pair, small: Path) -> None:
    with Engine.load(pair.target, draft=[pair.draft, small, pair.draft], device="cpu", dtype="fp32") as engine:
        assert isinstance(engine.draft, SeveralDrafts)
        assert engine.draft_name == f"{pair.draft} + {small} + {pair.draft}"
        caches = engine.new_caches()
        *_, last = engine.generate(PROMPT, SAMPLING["greedy"], SpeculationParams(16), caches=caches)
        assert caches.draft is not None
        assert [text.decoder for text in caches.beside] == [draft.decoder for draft in engine.draft.others]
        assert min(text.length for text in (caches.draft, *caches.beside)) > len(engine.encode(PROMPT)) + 10
        profiles = [own.calibration.of(greedy=True).profile.values for own in engine.learnt.beside]
        assert not np.array_equal(*profiles), "what was learnt of one is not the other's"
        assert last.stats.num_tokens == 14


@pytest.mark.slow
def test_a_conversation_goes_on_and_texts_share_passes(pair: Pair, small: Path) -> None:
    speculation = SpeculationParams(16)
    with Engine.load(pair.target, draft=[pair.draft, small], device="cpu", dtype="fp32", texts=3) as engine:
        alone = engine.with_draft(ModelDraft(engine.draft.decoder, "alone"))  # type: ignore[arg-type]
        texts = list[tuple[list[int], int]]()
        for each in (alone, engine):
            session = Session(each)
            for message in ("Hello", "Again"):
                *_, last = session.reply(message, SAMPLING["greedy"], speculation)
                texts.append((last.token_ids, session.num_tokens))
        assert texts[:2] == texts[2:]
        prompts, found = [PROMPT, "import os\n", "x = 1\n"], dict[int, list[int]]()
        for number, step in engine.generate_many(prompts, SAMPLING["warm"], speculation):
            found.setdefault(number, []).extend(step.token_ids)
        for number, prompt in enumerate(prompts):
            steps = engine.generate(prompt, SAMPLING["warm"], PLAIN)
            assert found[number] == [token for step in steps for token in step.token_ids]


def test_guesses_of_the_small_one_are_used(pair: Pair, small: Path) -> None:
    """The draft's rounds take the guesses: fewer forwards than alone, for as good a tree."""
    rounds = list[float]()
    for drafts in ([small], [small, pair.target]):
        with Engine.load(pair.target, draft=drafts, device="cpu", dtype="fp32") as engine:
            caches, calls = engine.new_caches(), [0]
            inner = caches.draft.states  # type: ignore[union-attr]

            def counted(*args: object, calls: list[int] = calls, inner: object = inner, **more: object) -> object:
                calls[0] += 1
                return inner(*args, **more)  # type: ignore[operator]

            caches.draft.states = counted  # type: ignore[union-attr, method-assign, assignment]
            speculation = SpeculationParams(16, recall=False, lookup=False, overlap=False)
            *_, last = engine.generate(PROMPT, SAMPLING["greedy"], speculation, caches=caches)
            rounds.append(calls[0] / last.stats.num_tokens)
    assert rounds[1] < 0.7 * rounds[0]


def test_memory_of_each_is_planned(pair: Pair, small: Path) -> None:
    sizes = list[dict[str, int]]()
    for drafts in ([pair.draft], [pair.draft, small]):
        with Engine.load(pair.target, draft=drafts, device="cpu", dtype="fp32") as engine:
            assert engine.plan is not None
            sizes.append({item.name: item.on_device for item in engine.plan.placement.items})
    one, both = sizes
    for name in ("draft", "draft KV cache", "recall", "guessing"):
        assert both[name] == 2 * one[name], name


@pytest.mark.parametrize(
    ("drafts", "words"),
    [
        (["lookup", "SMALL"], ["draft=lookup", "model"]),
        (["none", "SMALL"], ["draft=none", "model"]),
        (["DRAFT", "shadow"], ["draft=shadow", "first"]),
        (["DRAFT", "lookup"], ["draft=lookup", "first"]),
    ],
)
def test_what_cannot_be_combined(pair: Pair, small: Path, drafts: list[str], words: list[str]) -> None:
    names = {"SMALL": str(small), "DRAFT": str(pair.draft)}
    with refused(UsageError, *words):
        Engine.load(pair.target, draft=[names.get(name, name) for name in drafts], device="cpu", dtype="fp32")


def test_no_draft_at_all_is_a_mistake() -> None:
    with refused(UsageError, "draft"):
        Engine.load("builtin", draft=[])


@pytest.mark.parametrize("asked", [{"tree": "sequoia"}, {"accept": "mix"}])
def test_what_uses_one_draft(pair: Pair, small: Path, asked: dict[str, str]) -> None:
    with Engine.load(pair.target, draft=[pair.draft, small], device="cpu", dtype="fp32") as engine:
        with pytest.raises(UsageError) as caught:
            text_of(engine, SAMPLING["greedy"], SpeculationParams(**asked))  # type: ignore[arg-type]
        assert tells(str(caught.value), *[f"{key}={value}" for key, value in asked.items()], "several")
