"""Of all changes that would make a model faster, the one that brings the most is advised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from offspec.checkpoints.opening import model_to_plan
from offspec.drafts.weighing import Prospect
from offspec.drafts.without_model import LookupDraft
from offspec.loaders.machine.hardware import Rates
from offspec.loaders.streaming.placement import Limits
from offspec.planning.draft_forecast import Guessing, predict_drafting
from offspec.planning.memory import MemoryOptions
from offspec.planning.plan import Plan, make_plan
from offspec.tools.improvements import Gain, Improvement, Improvements, best_improvement

from ...llama_configs import LLAMA_8B_IN_BF16, write_config

GIB = 2**30
RATES = Rates(host_to_device_bytes_per_s=25e9, disk_bytes_per_s=5e9, matmul_flops={1: 4e11, 256: 1e14})


def plan_of(folder: Path, vram: int, form: str | None = None) -> Plan:
    write_config(folder, LLAMA_8B_IN_BF16)
    target = model_to_plan(folder, form, "bf16", [])
    return make_plan(target, [], Limits(vram, 64 * GIB), MemoryOptions(context=2048), GIB)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return plan_of(tmp_path, 8 * GIB)


def prospect(plan: Plan, name: str, tokens_per_s: float) -> Prospect:
    drafting = predict_drafting(plan, Guessing(), lambda model: RATES, greedy=True)
    return Prospect(name, plan, greedy=replace(drafting, tokens_per_s=tokens_per_s))


def improvements(plan: Plan) -> Improvements:
    return Improvements(plan, LookupDraft(), RATES, lambda model: RATES)


def test_gains_and_four_bit_have_tokens_per_s(plan: Plan) -> None:
    made = improvements(plan)
    now = predict_drafting(plan, LookupDraft().guessing(plan.placement), lambda model: RATES, greedy=True).tokens_per_s
    vram = [gain for gain in made.gains() if gain.kind == "VRAM"]
    rates = [now, *(gain.tokens_per_s for gain in vram)]
    assert rates == sorted(set(rates))
    packed = made.four_bit()
    assert packed is not None
    assert packed.tokens_per_s > 2 * now


def test_a_model_that_fits_has_no_gains(tmp_path: Path) -> None:
    made = improvements(plan_of(tmp_path, 40 * GIB))
    assert (made.gains(), made.four_bit()) == ([], None)


def test_what_costs_nothing_is_advised_before_memory_if_it_brings_much(plan: Plan) -> None:
    now, other = prospect(plan, "lookup", 2.0), prospect(plan, "shadow:4", 2.5)
    gains = [Gain("RAM", 8 * GIB, plan, 1.0, 2.2), Gain("RAM", 16 * GIB, plan, 0.2, 8.0)]
    packed = Gain("format", "nf4", plan, 0.5, 6.0)
    missing = Prospect("head", why_not="it is not there")

    assert best_improvement(now, [now, other], gains, packed) == Improvement("format", "nf4", 6.0, 3.0)
    assert best_improvement(now, [now, other], gains, None) == Improvement("RAM", 16 * GIB, 8.0, 4.0)
    assert best_improvement(now, [now, other, missing], [], None) == Improvement("draft", "shadow:4", 2.5, 1.25)
    family = replace(prospect(plan, "org/small", 8.0), download_bytes=GIB)
    instead = replace(prospect(plan, "shadow:4", 9.0), why_not="lookup would draft")
    assert best_improvement(now, [now, family, instead], [], None) == Improvement("draft", "org/small", 8.0, 4.0, GIB)


def test_more_ram_for_experts_is_a_gain(tmp_path: Path) -> None:
    """All layers are resident, and experts are read from disk."""
    shape = {"model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 2, "moe_intermediate_size": 4096}
    folder = write_config(tmp_path, LLAMA_8B_IN_BF16 | shape | {"num_hidden_layers": 8, "head_dim": 128})
    target = model_to_plan(folder, None, "bf16", [])
    made = make_plan(target, [], Limits(8 * GIB, 8 * GIB), MemoryOptions(context=512), GIB)
    assert not made.placement.streamed
    rates = replace(RATES, host_matmul_flops={1: 1e11})
    gains = Improvements(made, LookupDraft(), rates, lambda model: rates).gains()
    assert any(gain.kind == "RAM" for gain in gains)


def test_more_memory_is_as_much_as_brings_the_most_per_byte(plan: Plan) -> None:
    """Not the largest amount, and not a first step that brings little."""
    now = prospect(plan, "none", 1.0)
    gains = [Gain("VRAM", step * 8 * GIB, plan, 1.0, rate) for step, rate in ((1, 1.2), (2, 4.0), (3, 4.1))]
    found = best_improvement(now, [now], gains, None)
    assert found is not None
    assert found.value == 16 * GIB
