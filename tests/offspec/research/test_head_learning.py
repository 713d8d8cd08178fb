"""A head learns between requests: from the texts and states that it was told, and its file is found again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.checkpoints.head_files import write_head
from offspec.errors import UsageError
from offspec.research.head_learning import HeadAligner, HeadWindow
from offspec.research.head_structures import structure_of
from offspec.research.online import AlignmentParams
from offspec.research.target_texts import Forest

from ...pair import Pair

KINDS = ("eagle3", "medusa", "hydra", "recurrent", "mlp", "clover", "koala", "amphista", "clover2", "fspad")
DAILY = ("eagle3", "recurrent")  # that reads the text, and that has a state of its own
SAMPLED = SamplingParams(10, temperature=1.0, seed=3, ignore_eos=True)
DRAFTED = SpeculationParams(8, lookup=False)
PROMPT = "def area(width"
NUM_LAYERS = 4


@pytest.fixture(scope="module")
def plain(deep_pair: Pair) -> Iterator[Engine]:
    with Engine.load(str(deep_pair.target), draft="none", device="cpu", dtype="fp32") as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[int]:
    return ids_of(plain, SpeculationParams(budget=0))


def head_of(kind: str, plain: Engine, folder: Path) -> Path:
    beginning = structure_of(kind)(plain.target, 0)
    write_head(folder / kind, beginning.config, beginning.tensors)
    return folder / kind


def ids_of(engine: Engine, speculation: SpeculationParams) -> list[int]:
    steps = list(engine.generate(PROMPT, SAMPLED, speculation))
    engine.learn(steps[-1].stats)
    return [token for step in steps for token in step.token_ids]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in DAILY else pytest.mark.nightly) for kind in KINDS]
)
def test_it_learns_from_its_own_texts(
    kind: str, deep_pair: Pair, plain: Engine, expected: list[int], tmp_path: Path
) -> None:
    """The loss on the same text falls, the text stays plain decoding's, and the file has what was learnt."""
    head, file = head_of(kind, plain, tmp_path), tmp_path / "learnt.safetensors"
    loading = {"draft": str(head), "device": "cpu", "dtype": "fp32"}
    with Engine.load(str(deep_pair.target), learn=True, learn_file=file, **loading) as engine:
        aligner, losses = engine.aligner, list[float]()
        assert isinstance(aligner, HeadAligner)
        for is_last in (False, True):
            assert ids_of(engine, DRAFTED) == expected
            window = aligner.windows[-1]
            with torch.no_grad():
                losses.append(aligner.loss([window], 1.0))
            for _ in range(0 if is_last else 6):
                aligner.step([window])
        assert losses[1] < losses[0]
        aligner.adapter.merge()
        aligner.adapter.save(file)
    with Engine.load(str(deep_pair.target), learn_file=file, **loading) as learnt:
        assert ids_of(learnt, DRAFTED) == expected
        assert learnt.aligner is not None
        for name, tensor in aligner.adapter.merged.items():
            torch.testing.assert_close(learnt.aligner.adapter.merged[name], tensor)
    other = head_of("recurrent" if kind != "recurrent" else "medusa", plain, tmp_path / "other")
    with pytest.raises(UsageError, match="another draft"):
        Engine.load(str(deep_pair.target), **{**loading, "draft": str(other)}, learn_file=file)


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_places_have_the_targets_states(kind: str, deep_pair: Pair, plain: Engine, tmp_path: Path) -> None:
    """Prompt and answer are recorded as the shards of `distill` have them, whatever passes they came in."""
    head = head_of(kind, plain, tmp_path)
    with Engine.load(str(deep_pair.target), draft=str(head), device="cpu", dtype="fp32", learn=True) as engine:
        found = ids_of(engine, DRAFTED)
        aligner, prompt = engine.aligner, plain.encode(PROMPT)
    assert isinstance(aligner, HeadAligner)
    (window,) = aligner.windows
    assert isinstance(window, HeadWindow)
    text = [*prompt, *found][:-1]
    assert window.tokens[: window.num_tokens].tolist() == text[: window.num_tokens]
    assert window.num_tokens >= len(text) - 8
    assert window.said_from == len(prompt) - 1
    layers = aligner.head.target_layers or (NUM_LAYERS - 1,)
    told = Forest(plain.target, 1, layers).add(np.array([text]), 8)
    states = told["hidden"][0] if aligner.head.target_layers else plain.target.normed(told["hidden"][0])
    count = window.num_tokens
    torch.testing.assert_close(window.states[:count], states[:count], atol=1e-4, rtol=1e-4)
    assert (window.choices[:count, 0] == told["labels"][0, :count, 0].numpy()).mean() > 0.95


@pytest.mark.slow
def test_a_long_text_fills_several_windows(
    deep_pair: Pair, plain: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offspec.research.head_learning.HEAD_PARAMS", AlignmentParams(window_tokens=64))
    head, prompt = head_of("eagle3", plain, tmp_path), [*range(20, 110)]
    with Engine.load(str(deep_pair.target), draft=str(head), device="cpu", learn=True) as engine:
        steps = list(engine.generate(prompt, SamplingParams(20, ignore_eos=True), DRAFTED))
        assert engine.aligner is not None
        first, second, *_ = engine.aligner.windows
        assert isinstance(first, HeadWindow)
        assert isinstance(second, HeadWindow)
        assert first.num_tokens == len(first.tokens) == 64
        assert first.tokens[-16:].tolist() == second.tokens[:16].tolist()
        assert len(first.said()) == 0, "all of it is the prompt"
        assert second.said()[0] == len(prompt) - 1 - 48
        engine.learn(steps[-1].stats)
    assert steps[-1].stats.learn_steps is not None
