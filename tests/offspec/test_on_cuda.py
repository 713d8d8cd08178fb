"""The engine on a CUDA device: what it says is what the CPU says, whatever lies where, in whatever form,
whoever guesses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from offspec import SamplingParams, SpeculationParams
from offspec.backends.choice import backend_of
from offspec.backends.gpu import has_fp32_output
from offspec.backends.weights import dense
from offspec.drafts.self_draft import SelfDraft
from offspec.loaders.formats.four_bit import has_kernels
from offspec.model.early_exit import EarlyExit
from offspec.planning.plan import Plan
from offspec.research.online import Aligner, AlignmentParams

from ..late_work import late_copies, late_layers
from .test_pretended_cuda import (
    FORMS,
    Move,
    build,
    in_ram,
    load,
    on_disk,
    resident,
    says,
    streamed,
    texts,
    with_entries_in_ram,
)

pytestmark = pytest.mark.gpu
MOVES = pytest.mark.parametrize("move", [resident, in_ram, on_disk, with_entries_in_ram])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pair"))


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", [1, 64])
def test_logits_are_not_rounded_to_16_bits(num_rows: int) -> None:
    if not has_fp32_output():
        pytest.skip("torch cannot")
    generator = torch.Generator().manual_seed(0)
    states, head = (torch.randn(n, 256, generator=generator).bfloat16() for n in (num_rows, 1000))
    logits = backend_of(torch.device("cuda:0")).linear_fp32(states.to("cuda:0"), head.to("cuda:0")).cpu()
    torch.testing.assert_close(logits, states.float() @ head.float().T, rtol=1e-5, atol=1e-4)
    assert not torch.equal(logits, logits.bfloat16().float())


@MOVES
@pytest.mark.parametrize("form", FORMS)
def test_texts_are_the_cpus(folder: Path, form: str, move: Move) -> None:
    assert texts(load(folder, form, "cuda:0", move)) == texts(load(folder, form, "cpu"))


@pytest.mark.parametrize("late", [late_copies, late_layers])
@pytest.mark.parametrize("move", [in_ram, on_disk, with_entries_in_ram])
def test_late_work_changes_no_text(folder: Path, move: Move, late: Callable[[], AbstractContextManager[None]]) -> None:
    """Each copy, or each layer, takes a millisecond longer: whatever does not wait for it reads the wrong bytes."""
    expected = texts(load(folder, "plain", "cpu"))
    with late():
        assert texts(load(folder, "plain", "cuda:0", move)) == expected


def test_without_bitsandbytes_they_are_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "nf4" not in FORMS or not has_kernels(torch.device("cuda:0")):
        pytest.skip("there is nothing to do without")
    expected = texts(load(folder, "nf4", "cpu"))
    monkeypatch.setattr("offspec.loaders.formats.four_bit.has_kernels", lambda device: False)
    assert texts(load(folder, "nf4", "cuda:0", in_ram)) == expected


@pytest.mark.parametrize("kv_cache", [16, 8, 4])
def test_entries_in_ram_are_those_on_the_device(tmp_path: Path, kv_cache: int) -> None:
    """Of prompts that take several chunks, in texts that share passes, too."""
    folder = build(tmp_path, max_position_embeddings=2048)
    params, found = SamplingParams(24, temperature=1.0, seed=4, ignore_eos=True), []
    prompts = ["def area(" * 300, "x = 1\n" * 200, "for i in range("]
    for move in (in_ram, with_entries_in_ram):
        engine = load(folder, "plain", "cuda:0", move, kv_cache=kv_cache, context=2048)
        said: list[list[int]] = [[] for _ in prompts]
        for index, step in engine.generate_many(prompts, params, max_texts=3):
            said[index] += step.token_ids
        found.append(said)
        engine.close()
    assert found[0] == found[1]


def first_stay(plan: Plan) -> Plan:
    return streamed(plan, resident=(0, 1), in_ram=(2, 3))


@pytest.mark.parametrize("move", [resident, first_stay])
def test_the_target_guesses_for_itself(folder: Path, move: Move) -> None:
    expected = texts(load(folder, "plain", "cpu"))
    loaded, cpu = load(folder, "plain", "cuda:0", move, draft="none"), load(folder, "plain", "cpu", draft="none")
    with cpu.target.weights.layer(3) as last:
        layer = {name: dense(weight, torch.float32).to("cuda:0") for name, weight in last.items()}
    engine = loaded.with_draft(SelfDraft(EarlyExit(loaded.target, 2, layer)))
    assert says(engine, "sampled") == expected["sampled"]
    assert says(engine, "greedy") == expected["greedy"]
    cpu.close()
    engine.close()


def test_a_draft_learns(folder: Path) -> None:
    engine, expected = load(folder, "plain", "cuda:0", learn=True), texts(load(folder, "plain", "cpu"))
    assert engine.draft.decoder is not None
    engine.draft.aligner = Aligner(engine.draft.decoder, AlignmentParams(most_share=1e9))
    for _ in range(2):
        *_, last = engine.generate("def area(", SamplingParams(48, ignore_eos=True), SpeculationParams(16))
        engine.learn(last.stats)
    assert engine.aligner.num_steps > 0
    found = texts(engine)
    assert {**found, "joint": expected["joint"]} == expected  # which depends on the draft
