"""CPUs of other machines: few rows are as fast as RAM is read, many as cores multiply."""

from __future__ import annotations

import pytest

from offspec.loaders.machine.cpus import FLOPS, KNOWN_CPUS, WEIGHTS_PER_S


@pytest.mark.parametrize("name", KNOWN_CPUS)
def test_products_are_limited_by_ram_and_by_cores(name: str) -> None:
    cpu = KNOWN_CPUS[name]
    packed, plain = cpu.flops(0.5625), cpu.flops(2.0)
    assert packed[1] == 2 * min(cpu.ram_bytes_per_s / 0.5625, WEIGHTS_PER_S * cpu.num_cores)
    assert plain[1] == cpu.ram_bytes_per_s
    assert packed[128] == plain[128] == FLOPS * cpu.num_cores
    assert cpu.flops(2.0, 1e9)[1] == 1e9
