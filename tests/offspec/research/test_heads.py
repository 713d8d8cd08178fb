"""Training of heads: it computes what drafting computes, resumes to the bit, and writes heads that draft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.errors import CheckpointError, NumericalError, UsageError
from offspec.model.heads.text import HeadText
from offspec.research.distill_params import HEADS, HeadParams
from offspec.research.distillation import Teacher
from offspec.research.head_structures import structure_of
from offspec.research.heads import HeadStudent, distill_head
from offspec.research.target_texts import Forest, Shard
from offspec.research.unrolling import SoftCrossEntropy

from ...fakes import FAMILIES, build
from ...pair import Pair, build_pair
from ...refusals import refused
from ..model.heads.test_kinds_of_head import told
from .interruptions import Stop, stop_at

PARAMS = HeadParams(steps=6, num_texts=16, text_tokens=12, batch_texts=8, num_labels=16)
# Has a state of its own, guesses a block. One that reads the text is trained by `test_a_head_of_few_tokens`, and a
# layer of the target's kind by `test_hybrid_drafts`.
DAILY = ("recurrent", "dflash")
GREEDY = SamplingParams(10, ignore_eos=True)


def test_a_kind_that_nobody_knows_is_refused() -> None:
    with refused(UsageError, "head=none", "eagle3", "medusa", "fspad"):
        structure_of("none")


@pytest.mark.parametrize("kind", HEADS)
def test_training_computes_what_drafting_computes(kind: str, teacher: Teacher) -> None:
    """Row i of step s, unrolled over a text, is the node that is s below the text's token i + 1."""
    beginning = structure_of(kind)(teacher.target, 0)
    student = HeadStudent(beginning, teacher.target)
    with torch.no_grad():
        for part in student.parts.values():
            part.add_(0.1 * torch.randn(part.shape, generator=torch.Generator().manual_seed(1)))
    tokens = np.random.default_rng(0).integers(5, 200, (2, 9))
    layers = beginning.layers or (teacher.target.config.num_layers - 1,)
    batch = Forest(teacher.target, 2, layers).add(tokens, 8)
    with torch.no_grad():
        unrolled = [made.states.view(2, 8 - step, -1) for step, (made, _) in enumerate(student.unrolled(batch))]
    hidden = batch["hidden"][1]
    seen = hidden if beginning.layers else teacher.target.normed(hidden)
    text, words = HeadText(student.head), tokens[1].tolist()
    text.feed(told(words[:4], seen[:4], student.head.target_layers, [], words[4:5]))
    empty = np.empty(0, dtype=np.int64)
    found = [text.states(words[4:5], empty, empty, empty)]
    for step in (1, 2):
        found.append(text.states([], tokens[1, 4 + step, None], np.array([step]), np.array([-1, 0][:step])))
    for step, states in enumerate(found):
        torch.testing.assert_close(states[0], unrolled[step][1, 3], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_resumed_run_is_the_same_to_the_bit(teacher: Teacher, tmp_path: Path) -> None:
    """With a head that has little to train; nightly, killed, with one that reads states."""
    kind, whole = "medusa", distill_head(teacher, "medusa", PARAMS, out=tmp_path / "whole")

    with pytest.raises(Stop):
        distill_head(
            teacher, kind, PARAMS, out=tmp_path / "parts", progress=stop_at("training steps", 4), checkpoint_every_s=0
        )
    with pytest.raises(UsageError, match="interrupted"):
        distill_head(teacher, kind, PARAMS, out=tmp_path / "parts")
    parts = distill_head(teacher, kind, PARAMS, out=tmp_path / "parts", resume=True)
    one, other = (load_file(done.path / "model.safetensors") for done in (whole, parts))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert whole.agreement == parts.agreement


def test_the_loss_has_the_gradient_of_the_formula() -> None:
    """Also for rows whose wanted probabilities do not sum to 1."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 11, generator=generator, dtype=torch.double).requires_grad_()
    columns = torch.stack([torch.randperm(11, generator=generator)[:4] for _ in range(5)])
    wanted = torch.rand(5, 4, generator=generator, dtype=torch.double)
    expected = -(wanted * logits.log_softmax(-1).gather(1, columns)).sum()
    found = SoftCrossEntropy.apply(logits, columns, wanted)
    torch.testing.assert_close(found, expected)
    one, other = (torch.autograd.grad(2 * loss, logits)[0] for loss in (found, expected))
    torch.testing.assert_close(one, other)


def assert_drafts(pair: Pair, head: Path) -> None:
    """The text with this head is plain decoding's."""
    with Engine.load(str(pair.target), draft=str(head), device="cpu", dtype="fp32") as engine:
        plain, drafted = (
            [token for step in engine.generate("def area", GREEDY, speculation) for token in step.token_ids]
            for speculation in (SpeculationParams(budget=0), SpeculationParams(budget=12))
        )
    assert plain == drafted


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in DAILY else pytest.mark.nightly) for kind in HEADS]
)
def test_a_trained_head_drafts(kind: str, teacher: Teacher, deep_pair: Pair, tmp_path: Path) -> None:
    """Its loss has fallen, its folder is that of its kind, and the text is plain decoding's."""
    done = distill_head(teacher, kind, PARAMS, out=tmp_path / kind)
    assert len(done.agreement) == min(structure_of(kind)(teacher.target, 0).steps, PARAMS.text_tokens - 2)
    assert [len(prompt) for prompt in done.prompts] == [6] * 4
    assert_drafts(deep_pair, done.path)
    with pytest.raises(UsageError, match="exists already"):
        distill_head(teacher, kind, PARAMS, out=done.path)


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    """Before the target writes any text."""
    parallel = build(FAMILIES["falcon-h1"], tmp_path / "hybrid").decoder()
    with refused(UsageError, "MTP", "falcon_h1"):
        structure_of("mtp")(parallel, 0)
    with pytest.raises(UsageError, match="a target of 4 layers, not 3"):
        structure_of("eagle3")(build(FAMILIES["llama-gqa"], tmp_path / "short").decoder(), 0)
    with pytest.raises(UsageError, match="at least 3 tokens"):
        HeadParams(text_tokens=2)
    with pytest.raises(UsageError, match="temperature"):
        HeadParams(temperature=1e-300)


def test_a_training_that_diverges_writes_no_head(teacher: Teacher, tmp_path: Path) -> None:
    with pytest.raises(NumericalError, match="smaller `learning_rate`"):
        distill_head(teacher, "recurrent", replace(PARAMS, learning_rate=1e30), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_head_that_is_not_trained_yet_is_told(
    deep_pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    for name, said in (("head:medusa", "distill MODEL --head medusa"), ("head:none", "distill MODEL --head none")):
        with pytest.raises(UsageError, match=said):
            Engine.load(str(deep_pair.target), draft=name, device="cpu", dtype="fp32")


@pytest.mark.slow
def test_a_head_belongs_to_its_target(teacher: Teacher, tmp_path: Path) -> None:
    done = distill_head(teacher, "recurrent", replace(PARAMS, steps=1), out=tmp_path / "head")
    (tmp_path / "other").mkdir()
    other = build_pair(tmp_path / "other", num_layers=4, rope_theta=5000.0)
    with pytest.raises(CheckpointError, match="another target"):
        Engine.load(str(other.target), draft=str(done.path), device="cpu", dtype="fp32")
    with pytest.raises(UsageError, match="there is none"):
        Engine.load(str(other.target), draft="head", device="cpu", dtype="fp32")


@pytest.mark.slow
def test_a_head_of_few_tokens(teacher: Teacher, deep_pair: Pair, tmp_path: Path) -> None:
    """It has columns for the tokens that the target says most, and drafts with them."""
    params = replace(PARAMS, head_tokens=40, steps=2)
    done = distill_head(teacher, "eagle3", params, out=tmp_path / "few")
    tensors = load_file(done.path / "model.safetensors")
    columns = tensors["d2t"] + torch.arange(40)
    assert len(tensors["lm_head.weight"]) == 40
    assert torch.equal(torch.nonzero(tensors["t2d"])[:, 0], columns)
    assert_drafts(deep_pair, done.path)
    with pytest.raises(UsageError, match="all tokens"):
        distill_head(teacher, "medusa", params, out=tmp_path / "other")


def test_a_head_over_the_targets_learns_from_few_tokens(teacher: Teacher, tmp_path: Path) -> None:
    """It predicts the others, too: its file is that of one that learnt from all."""
    kind = "medusa-shared"
    done = distill_head(teacher, kind, replace(PARAMS, head_tokens=40, steps=1), out=tmp_path / "few")
    tensors = load_file(done.path / "model.safetensors")
    beginning = structure_of(kind)(teacher.target, 0)
    assert tensors.keys() == beginning.tensors.keys()
    assert any(not torch.equal(tensors[name], tensor) for name, tensor in beginning.tensors.items())


@torch.no_grad()
def test_few_tokens_have_the_logits_of_all(teacher: Teacher) -> None:
    columns = torch.tensor([3, 17, 90])
    beginning = structure_of("mtp")(teacher.target, 0)
    batch = batch_of(teacher, beginning.layers)
    few, of_all = (HeadStudent(beginning, teacher.target, some) for some in (columns, None))
    for (some, _), (made, _) in zip(few.unrolled(batch), of_all.unrolled(batch), strict=True):
        torch.testing.assert_close(few.head.head(some.states), of_all.head.head(made.states)[:, columns])
    assert few.head.vocabulary.num_known(teacher.target.config.vocab_size) == 3


def batch_of(teacher: Teacher, layers: tuple[int, ...]) -> Shard:
    """What the target says of 4 random texts."""
    tokens = np.random.default_rng(0).integers(5, 200, (4, 12))
    said = Forest(teacher.target, 4, layers or (teacher.target.config.num_layers - 1,)).add(tokens, 16)
    return {name: part.clone() for name, part in said.items()}  # outside of inference mode


def test_the_loss_falls(teacher: Teacher) -> None:
    """On one batch, within a few steps."""
    beginning = structure_of("clover2")(teacher.target, 0)
    student, batch = HeadStudent(beginning, teacher.target), batch_of(teacher, beginning.layers)
    optimizer, losses = torch.optim.Adam(student.parameters(), lr=1e-2), []
    for _ in range(6):
        losses.append(student(batch))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
