"""llama.cpp's speed is estimated near what people report, and only where the estimate means something."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offspec.checkpoints.opening import model_to_plan
from offspec.loaders.machine.cpus import KNOWN_CPUS
from offspec.loaders.machine.gpus import KNOWN_GPUS
from offspec.loaders.machine.hardware import Rates
from offspec.loaders.streaming.placement import Limits
from offspec.planning.memory import MemoryOptions
from offspec.planning.other_programs import llama_cpp_tokens_per_s
from offspec.planning.plan import Plan, make_plan

from ...llama_configs import LLAMA_8B_IN_BF16, write_config

GIB = 2**30
QWEN3_8B = {**LLAMA_8B_IN_BF16, "model_type": "qwen3", "intermediate_size": 12288, "num_hidden_layers": 36}
QWEN3_8B |= {"vocab_size": 151936, "head_dim": 128}
SMALL_MIXTURE = {
    **LLAMA_8B_IN_BF16,
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "hidden_size": 1024,
    "head_dim": 128,
    "vocab_size": 32000,
    "num_experts": 32,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1024,
}


def rates_of(gpu: str) -> Rates:
    return replace(KNOWN_GPUS[gpu].rates(), ram_bytes_per_s=KNOWN_CPUS["desktop"].ram_bytes_per_s, disk_bytes_per_s=7e9)


def plan_of(folder: Path, config: dict[str, Any], limits: Limits, form: str = "q4_k_m") -> Plan:
    target = model_to_plan(write_config(folder, config), form, "bf16", [])
    return make_plan(target, [], limits, MemoryOptions(context=512), GIB // 4)


@pytest.mark.parametrize(
    ("config", "gpu", "reported"),
    [(LLAMA_8B_IN_BF16, "rtx3080", 112), (QWEN3_8B, "rtx5090", 222), (LLAMA_8B_IN_BF16, "rtx4090", 130)],
    ids=["8B on a 3080", "8B on a 5090", "8B on a 4090"],
)
def test_near_what_people_report(config: dict[str, Any], gpu: str, reported: float, tmp_path: Path) -> None:
    """Sources: docs/results/gpu.md."""
    made = plan_of(tmp_path, config, Limits(9 * GIB, 64 * GIB))
    assert llama_cpp_tokens_per_s(made, rates_of(gpu)) == pytest.approx(reported, rel=0.25)


def test_layers_and_experts_in_ram_are_read_by_the_cpu(tmp_path: Path) -> None:
    rates = rates_of("rtx4090")
    for config, vram in ((LLAMA_8B_IN_BF16, 5 * GIB), (SMALL_MIXTURE, GIB // 2)):
        all_there, some = (plan_of(tmp_path, config, Limits(limit, 64 * GIB)) for limit in (20 * GIB, vram))
        fast, slow = (llama_cpp_tokens_per_s(made, rates) for made in (all_there, some))
        faster_ram = llama_cpp_tokens_per_s(some, replace(rates, ram_bytes_per_s=300e9))
        assert fast is not None
        assert slow is not None
        assert faster_ram is not None
        assert slow < faster_ram < fast


def test_nothing_is_said_without_a_card_or_about_files_that_do_not_fit(tmp_path: Path) -> None:
    rates = rates_of("rtx4090")
    for limits in (Limits(None, 64 * GIB), Limits(4 * GIB, GIB)):
        assert llama_cpp_tokens_per_s(plan_of(tmp_path, LLAMA_8B_IN_BF16, limits), rates) is None
