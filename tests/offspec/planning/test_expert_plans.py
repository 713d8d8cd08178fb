"""Plans of mixtures: what their experts take, in bytes and in seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offspec.checkpoints.model_files import ModelFiles
from offspec.checkpoints.opening import model_to_plan
from offspec.drafts.acceptance import LOOKUP
from offspec.loaders.machine.hardware import Rates
from offspec.loaders.streaming.placement import EXPERTS_ITEM, Limits
from offspec.planning.draft_forecast import Guessing, predict_drafting
from offspec.planning.memory import MemoryOptions
from offspec.planning.plan import Plan, make_plan
from offspec.planning.report import tell_tiers

from ...llama_configs import write_config

GIB = 2**30
CONFIG = {  # of Qwen3-30B-A3B's shape, with fewer layers
    "model_type": "qwen3_moe",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
RATES = Rates(
    disk_bytes_per_s=2e9,
    host_to_device_bytes_per_s=20e9,
    matmul_flops={1: 4e10, 256: 1e12},
    host_matmul_flops={1: 1e10, 256: 1e11},
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = tmp_path_factory.mktemp("mixture")
    write_config(folder, CONFIG)
    return model_to_plan(folder, "nf4", "bf16", [])


def plan(files: ModelFiles, limits: Limits) -> Plan:
    return make_plan(files, [], limits, MemoryOptions(context=1024), GIB // 4)


def test_experts_take_the_memory_that_is_left(files: ModelFiles) -> None:
    whole = plan(files, Limits(None, 16 * GIB))
    assert whole.placement.is_resident
    assert whole.experts is not None
    assert whole.experts.num == 6 * 128
    part = plan(files, Limits(None, whole.placement.ram_bytes - GIB))
    assert not part.placement.streamed
    assert part.placement.ram_bytes <= whole.placement.ram_bytes - GIB
    num, nbytes = part.placement.experts.device, part.experts.slot_bytes if part.experts else 0
    assert next(item for item in part.placement.items if item.name == EXPERTS_ITEM).on_device == num * nbytes
    assert f"{num} of 768 experts are in memory" in tell_tiers(part)
    assert "nothing is streamed" in tell_tiers(whole)


def test_a_pass_reads_the_experts_that_its_rows_use_and_memory_lacks(files: ModelFiles) -> None:
    whole = plan(files, Limits(None, 16 * GIB))
    part = plan(files, Limits(None, whole.placement.ram_bytes - GIB))
    assert part.experts is not None
    missing = 1 - part.placement.experts.device / 768
    read_s = 6 * 8 * missing * part.experts.read_bytes / 2e9
    assert part.predict_pass_s(RATES, 1) - whole.predict_pass_s(RATES, 1) < read_s
    assert part.predict_pass_s(RATES, 1) > read_s
    seconds = [part.predict_pass_s(RATES, rows) for rows in (1, 2, 4, 16, 64, 2000)]
    assert seconds == sorted(seconds)
    assert seconds[4] < 64 / 2 * seconds[0], "rows share experts"
    more = part.with_more(ram=GIB // 2)
    assert more.placement.experts.device > part.placement.experts.device
    assert more.predict_pass_s(RATES, 1) < seconds[0]


def test_no_draft_is_predicted_to_pay_where_each_row_moves_more(files: ModelFiles) -> None:
    part = plan(files, Limits(None, 2 * GIB))
    assert predict_drafting(part, Guessing(acceptance=LOOKUP), lambda model: RATES, greedy=True).num_nodes == 0


def test_beside_a_gpu_the_cpu_computes_what_it_can(files: ModelFiles) -> None:
    small = plan(files, Limits(2 * GIB, 16 * GIB))
    assert small.placement.experts.host == 768
    assert 0 < small.placement.experts.device < 768
    rates = replace(RATES, matmul_flops={1: 1e12, 256: 1e14})
    without = replace(rates, host_matmul_flops={})
    assert small.predict_pass_s(rates, 1) < small.predict_pass_s(without, 1)
    choice = small.expert_choice(rates)
    assert choice is not None
    assert small.expert_choice(without) is None
    assert choice.num_on_host([1] * 8) > 0 == choice.num_on_host([200] * 8)
    assert tell_tiers(small).startswith("all 6 layers are resident, without their experts")
