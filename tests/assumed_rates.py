"""Engines are loaded with assumed rates: measuring them takes longer than most tests, and goes by the clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest


def assume_rates(patch: pytest.MonkeyPatch) -> None:
    """A first estimate for each engine, as of a small CPU; what its passes take is still measured."""
    from offspec import loading
    from offspec.loaders.machine.hardware import Rates
    from offspec.planning.plan import Plan

    flops = {1: 5e9, 16: 4e10, 128: 8e10}

    def measure_link(plan: Plan, device: object) -> float | None:
        return 1e9 if plan.placement.streamed else None

    def measure_quick_rates(target: object, device: object, link: float | None) -> Rates:
        return Rates(link, link, matmul_flops=flops, dequantise_elements_per_s=1e9, packed_bytes_per_s=link)

    def with_expert_rates(rates: Rates, plan: Plan, device: object) -> Rates:
        if plan.experts is None or plan.placement.experts.are_resident:
            return rates
        return replace(rates, disk_bytes_per_s=1e9, host_to_device_bytes_per_s=1e9, host_matmul_flops=flops)

    def with_arithmetic(rates: Rates, *target: object) -> Rates:
        return rates

    for function in (measure_link, measure_quick_rates, with_expert_rates, with_arithmetic):
        patch.setattr(loading, function.__name__, function)


@pytest.fixture(autouse=True, scope="module")
def assumed_rates() -> Iterator[None]:
    """Of the engines that a module's tests and fixtures load."""
    with pytest.MonkeyPatch.context() as patch:
        assume_rates(patch)
        yield
