"""What a draft is expected to bring: it follows from measured tokens per pass, and from the seconds of rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from offspec.checkpoints.model_files import ModelFiles
from offspec.checkpoints.opening import model_to_plan
from offspec.drafts.acceptance import SHADOWS, SMALL_MODEL
from offspec.loaders.machine.hardware import Rates
from offspec.loaders.streaming.placement import Limits
from offspec.planning.draft_forecast import (
    MAX_ROUNDS,
    Acceptance,
    Guessing,
    Spread,
    predict_drafting,
    round_s,
)
from offspec.planning.memory import MemoryOptions
from offspec.planning.plan import Plan, make_plan

from ...llama_configs import LLAMA_8B_IN_BF16, write_config

GIB = 2**30
SMALL = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 8}
FLOPS = {1: 4e11, 64: 25.6e12, 256: 1e14}
RATES = Rates(host_to_device_bytes_per_s=25e9, disk_bytes_per_s=5e9, matmul_flops=FLOPS, dequantise_elements_per_s=2e11)


def files_of(folder: Path, config: Mapping[str, Any], form: str | None = None) -> ModelFiles:
    folder.mkdir(exist_ok=True)
    write_config(folder, config)
    return model_to_plan(folder, form, "bf16", [])


@pytest.fixture
def target(tmp_path: Path) -> ModelFiles:
    return files_of(tmp_path / "target", LLAMA_8B_IN_BF16)


@pytest.fixture
def draft(tmp_path: Path) -> ModelFiles:
    return files_of(tmp_path / "draft", LLAMA_8B_IN_BF16 | SMALL)


@pytest.fixture
def plan(target: ModelFiles) -> Plan:
    return make_plan(target, [], Limits(8 * GIB, 64 * GIB), MemoryOptions(context=2048), GIB)


def rates_of(model: ModelFiles) -> Rates:
    return RATES


@pytest.mark.parametrize("acceptance", [SMALL_MODEL, *SHADOWS.values()])
def test_tokens_per_pass_are_those_measured_and_less_with_fewer_rounds(acceptance: Acceptance) -> None:
    for greedy, measured in ((True, acceptance.greedy), (False, acceptance.sampled)):
        for nodes, tokens in measured.items():
            found = [acceptance.tokens(nodes, rounds, greedy=greedy) for rounds in range(MAX_ROUNDS + 1)]
            assert found[-1] == pytest.approx(tokens)
            assert found == sorted(found)
            assert all(1 <= found[rounds] + 0.1 <= rounds + 1.2 for rounds in (0, 1, 2))


def test_a_draft_that_approximates_fewer_layers_errs_less() -> None:
    few, most, whole = (SHADOWS[3].tokens(64, MAX_ROUNDS, greedy=True, share=share) for share in (0.1, 1.0, 0.0))
    assert most == pytest.approx(SHADOWS[3].greedy[64])
    assert most < few < whole == pytest.approx(MAX_ROUNDS + 1)


def test_without_guesses_decoding_is_plain(plan: Plan) -> None:
    found = predict_drafting(plan, Guessing(), rates_of, greedy=True)
    assert found.tokens_per_s == pytest.approx(1 / plan.predict_pass_s(RATES, 1))
    assert (found.num_nodes, found.num_rounds, found.tokens_per_pass) == (0, 0, 1)


def test_slower_rounds_are_fewer_and_overlap_hides_some(plan: Plan, draft: ModelFiles, target: ModelFiles) -> None:
    quick, slow = Guessing(((draft, 8),), SMALL_MODEL), Guessing(((target, 32),), SMALL_MODEL)
    alone = replace(slow, overlaps=False)
    found = [predict_drafting(plan, guessing, rates_of, greedy=True) for guessing in (quick, slow, alone)]
    rates = [one.tokens_per_s for one in found]
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 3
    assert found[0].num_rounds > found[1].num_rounds
    last = found[-1]
    assert last.tokens_per_s == pytest.approx(last.tokens_per_pass / (last.pass_s + last.num_rounds * last.round_s))
    sampled = predict_drafting(plan, quick, rates_of, greedy=False)
    assert sampled.tokens_per_s < found[0].tokens_per_s


@pytest.mark.parametrize(("greedy", "num_texts"), [(True, 1), (False, 4)])
def test_the_range_is_that_of_prompts(plan: Plan, draft: ModelFiles, greedy: bool, num_texts: int) -> None:
    """With the tree and the rounds that are the best for the usual prompt."""
    usual = Acceptance({64: 10.0}, {64: 6.0}, "this test")
    spread = replace(usual, spread=Spread(0.5, 1.5, "here"))
    found, alone = (
        predict_drafting(plan, Guessing(((draft, 8),), given), rates_of, greedy=greedy, num_texts=num_texts)
        for given in (spread, usual)
    )
    assert (found.num_nodes, found.num_rounds, found.tokens_per_s) == (
        *(alone.num_nodes, alone.num_rounds),
        alone.tokens_per_s,
    )
    assert alone.least_tokens_per_pass == alone.tokens_per_pass == alone.most_tokens_per_pass
    assert alone.least_tokens_per_s == alone.tokens_per_s == alone.most_tokens_per_s
    assert found.least_tokens_per_pass < found.tokens_per_pass < found.most_tokens_per_pass
    assert found.least_tokens_per_s < found.tokens_per_s < found.most_tokens_per_s


def test_what_a_draft_cannot_speed_up_is_decoded_plainly(plan: Plan, target: ModelFiles) -> None:
    """A round as long as a pass brings one token at most."""
    slow = Rates(host_to_device_bytes_per_s=1e15, disk_bytes_per_s=1e15, matmul_flops={1: 1e9, 256: 1e9})
    found = predict_drafting(plan, Guessing(((target, 32),), SMALL_MODEL), lambda model: slow, greedy=True)
    assert found.tokens_per_pass == 1


def test_a_round_reads_its_layers(plan: Plan, target: ModelFiles, draft: ModelFiles, tmp_path: Path) -> None:
    packed = files_of(tmp_path / "packed", LLAMA_8B_IN_BF16, "nf4")
    seconds = [
        round_s(plan, Guessing(((model, count),), SMALL_MODEL), rates_of, 16)
        for model, count in ((draft, 8), (target, 8), (target, 16), (packed, 16))
    ]
    assert seconds == sorted(seconds)
    each = sum(w.shape[0] * w.shape[1] for w in target.stored.layers[0].weights.values() if len(w.shape) == 2)
    assert seconds[2] - seconds[1] == pytest.approx(8 * (each * 2 / 4e11 + 75 * 5e-6), rel=1e-3)
    captured = round_s(plan, Guessing(((draft, 8),), SMALL_MODEL, is_captured=True), rates_of, 16)
    assert captured < seconds[0]
    on_cpu = make_plan(target, [], Limits(None, 8 * GIB), MemoryOptions(context=2048), GIB)
    assert round_s(on_cpu, Guessing(((target, 16),), SMALL_MODEL), rates_of, 16) < seconds[2]
    assert round_s(plan, Guessing(acceptance=SMALL_MODEL), rates_of, 16) == 0


def test_trees_of_other_sizes_bring_about_what_was_measured() -> None:
    """Of the built-in pair: docs/results/scheduling.md."""
    measured = Acceptance({64: 12.85, 256: 16.00}, {64: 5.14, 256: 6.61}, "docs/results/scheduling.md")
    for greedy, nodes, tokens in ((True, 16, 8.60), (True, 128, 14.28), (False, 16, 3.81), (False, 128, 5.87)):
        assert measured.tokens(nodes, MAX_ROUNDS, greedy=greedy) == pytest.approx(tokens, rel=0.06)
    assert 1 < measured.tokens(1, MAX_ROUNDS, greedy=False) < 2
    largest, larger = (measured.tokens(nodes, MAX_ROUNDS, greedy=True) for nodes in (256, 1024))
    assert largest == larger


def test_texts_share_the_pass_and_its_nodes(plan: Plan, draft: ModelFiles) -> None:
    """A streamed pass takes as long for eight texts as for one, and small trees bring more per node."""
    guessing = Guessing(((draft, 8),), SMALL_MODEL)
    found = {
        number: predict_drafting(plan, guessing, rates_of, greedy=True, num_texts=number) for number in (1, 2, 4, 8, 16)
    }
    rates = [one.tokens_per_s for one in found.values()]
    each = [one.tokens_per_s / number for number, one in found.items()]
    assert rates == sorted(rates)
    assert all(next_one <= one * (1 + 1e-9) for one, next_one in pairwise(each))
    assert 2.5 < rates[3] / rates[0] < 8
    assert all(number * one.num_nodes <= plan.tree for number, one in found.items())
    assert found[1] == predict_drafting(plan, guessing, rates_of, greedy=True)
    assert found[8].pass_s == pytest.approx(plan.predict_pass_s(RATES, 8 * (1 + found[8].num_nodes)))
