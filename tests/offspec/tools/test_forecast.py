"""What a forecast takes from this machine, and what it assumes of another one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offspec.checkpoints.opening import model_to_plan
from offspec.loaders.machine.cpus import KNOWN_CPUS
from offspec.loaders.machine.gpus import KNOWN_GPUS
from offspec.loaders.machine.hardware import Hardware, Memory, Rates
from offspec.loaders.streaming.placement import Limits
from offspec.planning.memory import MemoryOptions
from offspec.planning.plan import Plan, make_plan
from offspec.tools import forecast
from offspec.tools.forecast import Assumptions, Machine

from ...llama_configs import LLAMA_8B_IN_BF16, write_config

GIB = 2**30
HERE = Hardware(Memory(64 * GIB, 60 * GIB, 64 * GIB, "given"), "a CPU", 4, "given", KNOWN_GPUS["rtx4090"].gpu())


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    target = model_to_plan(write_config(tmp_path, LLAMA_8B_IN_BF16), None, "bf16", [])
    return make_plan(target, [], Limits(8 * GIB, 64 * GIB), MemoryOptions(context=512), GIB)


def ram_rate(machine: Machine, plan: Plan) -> float | None:
    return machine._with_cpu(Rates(), plan.inputs.target, plan).ram_bytes_per_s


def test_the_ram_beside_a_card_that_is_here_is_measured(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Machine(torch.device("cpu"), None, HERE, Assumptions())
    monkeypatch.setattr(forecast, "measure_memory", lambda device, seconds: 5e10)
    assert ram_rate(here, plan) == 5e10

    def fail(device: torch.device, seconds: float) -> float:
        raise MemoryError

    monkeypatch.setattr(forecast, "measure_memory", fail)
    assert ram_rate(here, plan) is None


def test_the_ram_beside_an_assumed_card_is_assumed(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "measure_memory", lambda device, seconds: 5e10)
    for assumed, expected in (
        (Assumptions("4090"), KNOWN_CPUS["desktop"].ram_bytes_per_s),
        (Assumptions("4090", cpu="server"), KNOWN_CPUS["server"].ram_bytes_per_s),
        (Assumptions("4090", cpu="server", ram_bytes_per_s=1e11), 1e11),
        (Assumptions("4090", cpu="this"), 5e10),
    ):
        machine = Machine(torch.device("cpu"), KNOWN_GPUS["rtx4090"], HERE, assumed)
        assert ram_rate(machine, plan) == expected
