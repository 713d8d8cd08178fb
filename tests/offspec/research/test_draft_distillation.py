"""A draft is distilled on its target: it predicts it better, and a run that was killed gives the same to the bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.checkpoints.opening import open_model
from offspec.errors import UsageError, VocabularyMismatchError
from offspec.research.distill_params import DraftParams
from offspec.research.distillation import Teacher
from offspec.research.draft_distillation import DistilledDraft, Untrained, WholeStudent, distill_draft
from offspec.research.target_texts import SHARD_TEXTS, Shards

from ...fakes import LendingWeights
from ...pair import Pair, variant
from ...refusals import refused
from .interruptions import Stop, stop_at

ROOT = Path(__file__).parents[3]
SMALL = DraftParams(steps=24, num_texts=48, text_tokens=12, num_labels=8, learning_rate=3e-3)
MIXED = replace(SMALL, on_policy=0.5, rounds=2)
LOW_RANK = replace(SMALL, lora_rank=4)


@pytest.fixture(scope="module")
def teacher(pair: Pair) -> Iterator[Teacher]:
    with Engine.load(str(pair.target), draft="none", device="cpu", dtype="fp32") as engine:
        yield Teacher(engine.target, open_model(pair.target, "fp32", []), engine.tokenizer)


def untrained(pair: Pair, teacher: Teacher) -> Untrained:
    return Untrained.of_model(pair.draft, teacher.tokenizer, torch.device("cpu"))


def train(pair: Pair, teacher: Teacher, out: Path, params: DraftParams = SMALL, **more: Any) -> DistilledDraft:
    return distill_draft(teacher, untrained(pair, teacher), params, out, **more)


@pytest.fixture(scope="module")
def done(pair: Pair, teacher: Teacher, tmp_path_factory: pytest.TempPathFactory) -> DistilledDraft:
    return train(pair, teacher, tmp_path_factory.mktemp("trained") / "out")


@pytest.fixture(scope="module")
def trained(done: DistilledDraft) -> Path:
    return done.path


@pytest.fixture(scope="module")
def additions(pair: Pair, teacher: Teacher, tmp_path_factory: pytest.TempPathFactory) -> DistilledDraft:
    return train(pair, teacher, tmp_path_factory.mktemp("additions") / "more.safetensors", LOW_RANK)


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors" if path.is_dir() else path)


def same(one: Path, other: Path) -> bool:
    found, expected = weights(one), weights(other)
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


def test_training_brings_the_draft_nearer_to_the_target(done: DistilledDraft) -> None:
    assert done.divergence < done.divergence_before
    assert list(done.path.parent.iterdir()) == [done.path]


def test_the_result_is_a_draft_of_the_same_text(pair: Pair, trained: Path) -> None:
    assert json.loads((trained / "config.json").read_text())["model_type"] == "llama"
    params = SamplingParams(12, seed=0, ignore_eos=True)
    with Engine.load(str(pair.target), draft=str(trained), device="cpu", dtype="fp32") as engine:
        plain, drafted = (engine.complete("def area(", params, SpeculationParams(budget)) for budget in (0, 16))
    assert plain == drafted


def test_all_weights_are_trained_in_their_own_dtype(pair: Pair, trained: Path) -> None:
    found, before = weights(trained), weights(pair.draft)
    assert {name: tensor.dtype for name, tensor in found.items()} == {n: t.dtype for n, t in before.items()}
    assert not any(torch.equal(found[name], before[name]) for name in found)


def test_additions_are_one_file_that_the_draft_loads(pair: Pair, additions: DistilledDraft) -> None:
    assert additions.divergence < additions.divergence_before
    given: dict[str, Any] = {"draft": str(pair.draft), "learn_file": additions.path, "device": "cpu", "dtype": "fp32"}
    with Engine.load(str(pair.target), **given) as engine:
        assert engine.aligner is not None
        name = "model.layers.0.self_attn.q_proj.weight"
        assert not torch.equal(engine.aligner.adapter.merged[name], engine.aligner.adapter.originals[name])
        plain = engine.complete("def area(", SamplingParams(8), SpeculationParams(0))
        assert engine.complete("def area(", SamplingParams(8)) == plain


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "stops"),
    [
        (replace(MIXED, on_policy=1.0, steps=12), [("training steps", 4), ("texts written by the draft", 1)]),
        pytest.param(LOW_RANK, [("training steps", 9)], marks=pytest.mark.nightly),
    ],
)
def test_an_interrupted_run_gives_the_same_to_the_last_bit(
    pair: Pair,
    teacher: Teacher,
    tmp_path: Path,
    params: DraftParams,
    stops: list[tuple[str, int]],
) -> None:
    expected = train(pair, teacher, tmp_path / "whole", params).path
    for number, (what, at) in enumerate(stops):
        with pytest.raises(Stop):
            train(
                *(pair, teacher, tmp_path / "out", params),
                resume=number > 0,
                progress=stop_at(what, at),
                checkpoint_every_s=0,
            )
        assert not (tmp_path / "out").exists()
    torch.rand(7)  # what else happened to the random numbers of this process does not count
    assert same(train(pair, teacher, tmp_path / "out", params, resume=True).path, expected)


# ------------------------------------------------------------------------------------------------ texts


def test_on_policy_texts_are_the_drafts_and_take_one_pass_of_the_target(
    pair: Pair, teacher: Teacher, tmp_path: Path
) -> None:
    target, student = teacher.target, WholeStudent(untrained(pair, teacher), SMALL)
    lent = LendingWeights(target.weights)
    counted = type(target)(target.config, lent, dtype=target.dtype, device=target.device)
    shards = Shards(tmp_path, counted, teacher.tokenizer, SMALL, [])
    shards.make(lambda *_: None, [0], student.decoder)
    assert lent.lent == [*range(target.config.num_layers)]
    drafted = shards.load(0)
    by_draft = Shards(tmp_path / "by-draft", student.decoder, teacher.tokenizer, SMALL, [])
    (tmp_path / "by-draft").mkdir()
    by_draft.make(lambda *_: None, [0])
    assert torch.equal(drafted["tokens"], by_draft.load(0)["tokens"])
    assert not torch.equal(drafted["log_probabilities"], by_draft.load(0)["log_probabilities"])


def test_prompts_are_the_files_and_the_rest_is_the_targets(teacher: Teacher, tmp_path: Path) -> None:
    (text := tmp_path / "text.txt").write_text("def area(width, height):\n    return width * height\n" * 200)
    params = replace(SMALL, prompt_tokens=4)
    shards = Shards(tmp_path, teacher.target, teacher.tokenizer, params, [text])
    assert len(shards) == SMALL.num_texts // SHARD_TEXTS
    shards.make(lambda *_: None, [0])
    tokens, ids = shards.load(0)["tokens"], teacher.tokenizer.encode(text.read_text())
    beginnings = {tuple(ids[first : first + 4]) for first in range(0, len(ids), 4)}
    assert tokens.shape == (SHARD_TEXTS, SMALL.text_tokens)
    assert {tuple(row[:4].tolist()) for row in tokens} <= beginnings
    assert not {tuple(row[4:8].tolist()) for row in tokens} <= beginnings
    with refused(UsageError, "`prompt_tokens`", "`texts`"):
        Shards(tmp_path, teacher.target, teacher.tokenizer, params, [])


# ------------------------------------------------------------------------------------------------ refusals


def test_what_cannot_be_made_is_refused_before_anything_is(pair: Pair, teacher: Teacher, tmp_path: Path) -> None:
    (taken := tmp_path / "taken").mkdir()
    with refused(UsageError, taken, "exists", "`out`"):
        train(pair, teacher, taken)
    with refused(UsageError, taken, "folder", "`out`"):
        train(pair, teacher, taken, replace(SMALL, lora_rank=2))
    with refused(UsageError, "`on_policy`", "`prompt_tokens`"):
        train(pair, teacher, tmp_path / "out", replace(SMALL, on_policy=0.5), texts=[ROOT / "README.md"])
    with refused(UsageError, "`text_tokens=129`", "context"):
        train(pair, teacher, tmp_path / "out", replace(SMALL, text_tokens=129))
    with refused(UsageError, "exceeds the draft's hidden size of 32"):
        train(pair, teacher, tmp_path / "out", replace(SMALL, lora_rank=33))
    assert list(tmp_path.iterdir()) == [taken]


def test_another_vocabulary_is_refused(pair: Pair, teacher: Teacher, tmp_path: Path) -> None:
    other = variant(pair.draft, tmp_path / "other")
    said = json.loads((other / "tokenizer.json").read_text())
    vocabulary = said["model"]["vocab"]
    first, second = list(vocabulary)[40:42]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(said))
    with refused(VocabularyMismatchError, "vocabulary"):
        Untrained.of_model(other, teacher.tokenizer, torch.device("cpu"))


@pytest.mark.parametrize("settings", [{"on_policy": 1.5}, {"rounds": 0}, {"lora_rank": -1}])
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(settings))):
        DraftParams(**settings)
