from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offspec.errors import MemoryLimitError
from offspec.loaders.streaming.placement import (
    ExpertsCost,
    ExpertSlots,
    ExpertTimes,
    Item,
    Limits,
    PassRates,
    PinnedLayers,
    Placement,
    UnitCost,
    place,
    places_of,
    predict_experts_s,
    predict_pass_s,
    scattered,
)

from ...examples import examples
from ...refusals import refused

GB = 10**9


def layers(num: int, nbytes: int = GB) -> list[UnitCost]:
    return [UnitCost(nbytes, nbytes, nbytes) for _ in range(num)]


ITEMS = [Item("KV cache", on_device=2 * GB), Item("embedding", on_host=GB)]
costs = st.lists(
    st.builds(lambda n, extra: UnitCost(n, n + extra, n * 2), st.integers(1, 50), st.integers(0, 5)),
    min_size=1,
    max_size=20,
)


@examples(320)
@given(costs, st.integers(0, 2000), st.one_of(st.none(), st.integers(0, 2000)))
def test_what_is_placed_fits_and_every_layer_lies_somewhere(
    costs: list[UnitCost], ram: int, device: int | None
) -> None:
    items = [Item("a", 10, 5), Item("b", 0, 7)]
    try:
        placed = place(costs, items, Limits(device, ram))
    except MemoryLimitError:
        return
    assert sorted(placed.resident + placed.in_ram + placed.on_disk) == list(range(len(costs)))
    assert placed.ram_bytes <= ram
    used = sum(costs[i].resident_bytes for i in placed.resident) + placed.slots.num * placed.slots.nbytes
    if device is None:
        assert placed.ram_bytes == 22 + used
        assert placed.in_ram == ()
    else:
        assert placed.device_bytes == 10 + used <= device
        host = sum(costs[i].slot_bytes for i in placed.in_ram) + placed.slots.num_host * placed.slots.nbytes
        assert placed.ram_bytes == 12 + host
    assert (placed.slots.num > 0) == bool(placed.streamed)
    assert (placed.slots.num_host > 0) == (device is not None and bool(placed.on_disk))


@examples(320)
@given(costs, st.integers(0, 1000), st.integers(0, 500))
def test_more_memory_never_keeps_less(costs: list[UnitCost], ram: int, more: int) -> None:
    def kept(ram: int) -> int:
        try:
            return len(place(costs, [], Limits(None, ram)).resident)
        except MemoryLimitError:
            return -1

    equal = [UnitCost(c.read_bytes, costs[0].slot_bytes, costs[0].resident_bytes) for c in costs]
    costs[:] = equal
    assert kept(ram) <= kept(ram + more)


def test_residents_are_interleaved() -> None:
    placed = place(layers(12), ITEMS, Limits(None, 10 * GB))
    assert placed.slots.num == 3
    assert placed.resident == (1, 4, 7, 10)


def test_a_gpu_spills_to_ram_then_to_disk() -> None:
    roomy = place(layers(12), ITEMS, Limits(8 * GB, 64 * GB))
    assert (len(roomy.resident), len(roomy.in_ram), len(roomy.on_disk)) == (3, 9, 0)
    assert roomy.slots.num_host == 0
    tight = place(layers(12), ITEMS, Limits(8 * GB, 8 * GB))
    assert (len(tight.resident), len(tight.in_ram), len(tight.on_disk)) == (3, 4, 5)
    assert tight.slots.num_host == 3


def test_the_slots_in_ram_are_as_large_as_those_on_the_device() -> None:
    """The largest layer stays on the device here, but every slot has its size."""
    costs = [UnitCost(n, n, 2 * n) for n in (40, 40, 50, 40, 40)]
    placed = place(costs, [], Limits(250, 125))
    assert (placed.resident, placed.in_ram, placed.on_disk) == ((2,), (), (0, 1, 3, 4))
    assert (placed.slots.num_host, placed.slots.nbytes, placed.ram_bytes) == (2, 50, 100)


def test_a_refusal_has_the_numbers_and_the_remedy() -> None:
    with refused(MemoryLimitError, "3.7 GiB", "RAM", "4.7 GiB", "KV cache 1.9 GiB", "`ram`"):
        place(layers(12), ITEMS, Limits(None, 4 * GB))
    with refused(MemoryLimitError, "VRAM", "`vram`"):
        place(layers(12), ITEMS, Limits(3 * GB, 64 * GB))
    with refused(MemoryLimitError, "RAM", "`ram`"):
        place(layers(12), ITEMS, Limits(8 * GB, 2 * GB))


def predict(placed: Placement, costs: list[UnitCost], compute_s: float, disk: float, link: float | None) -> float:
    return predict_pass_s(placed, costs, PassRates((compute_s,) * len(costs), disk, link), 1)


def test_a_pass_takes_the_slowest_link_s_time_or_the_computing_s() -> None:
    costs = layers(12)
    streamed = place(costs, [], Limits(None, 3 * GB))
    assert predict(streamed, costs, 0.01, GB, None) == pytest.approx(12.0, rel=0.01)
    assert predict(streamed, costs, 3.0, GB, None) == pytest.approx(36.0, rel=0.01)
    resident = place(costs, [], Limits(None, 12 * GB))
    assert predict(resident, costs, 0.5, GB, None) == pytest.approx(6.0)
    half = place(costs, [], Limits(None, 9 * GB))
    assert predict(half, costs, 0.5, GB, None) == pytest.approx(6.0, rel=0.01)  # residents hide the transfers
    on_gpu = place(costs, [], Limits(3 * GB, 20 * GB))
    assert predict(on_gpu, costs, 0.01, GB, 10 * GB) == pytest.approx(1.2, rel=0.01)
    from_disk = place(costs, [], Limits(3 * GB, 9 * GB))
    assert predict(from_disk, costs, 0.01, GB, 10 * GB) == pytest.approx(len(from_disk.on_disk), rel=0.01)


def test_the_disk_reads_into_ram_while_other_layers_come_from_there() -> None:
    costs = layers(24)
    placed = replace(
        place(costs, [], Limits(2 * GB, 40 * GB)),
        places=places_of(in_ram=(i for i in range(24) if i % 8), on_disk=(0, 8, 16)),
    )
    placed = replace(placed, slots=replace(placed.slots, num_host=3))
    assert predict(placed, costs, 0.0, GB, 10 * GB) == pytest.approx(3.0, rel=0.01)  # the disk rests at no time


def test_a_pass_moves_what_one_of_its_rows_uses() -> None:
    always, experts = UnitCost(GB, GB, GB), UnitCost(GB, GB, GB, row_share=0.25)
    costs, rates = [always, experts] * 6, PassRates((0.0,) * 12, GB, 4 * GB)
    placed = place(costs, [], Limits(2 * GB, 40 * GB))
    assert predict_pass_s(placed, costs, rates, 1) == pytest.approx(6 * 0.25 * 1.25)
    assert predict_pass_s(placed, costs, rates, 2) == pytest.approx(6 * 0.25 * 1.4375)
    assert predict_pass_s(placed, costs, rates, 64) == pytest.approx(3.0, rel=1e-6)


def experts_of(num: int = 64, least: int = 4) -> ExpertsCost:
    """Of four layers, each expert with half a GB; a row uses an eighth of a layer's."""
    return ExpertsCost(num, GB // 2, GB // 2, num * GB // 2, least, 1 / 8, num // 4, 10**9)


def test_experts_get_what_layers_leave() -> None:
    for ram, slots in ((60, ExpertSlots(64, are_resident=True)), (20, ExpertSlots(26)), (9, ExpertSlots(4))):
        placed = place(layers(4), ITEMS, Limits(None, ram * GB), None, experts_of())
        assert placed.experts == slots
        assert placed.ram_bytes <= ram * GB
        assert placed.is_resident == slots.are_resident
    assert len(placed.resident) == 4
    beside_layers_on_disk = place(layers(4), ITEMS, Limits(None, 8 * GB), None, experts_of())
    assert beside_layers_on_disk.experts == ExpertSlots(4)
    assert beside_layers_on_disk.on_disk


def test_experts_of_a_gpu_have_slots_there_and_in_ram() -> None:
    placed = place(layers(4), ITEMS, Limits(10 * GB, 40 * GB), None, experts_of())
    assert placed.experts == ExpertSlots(8, 64)
    assert placed.device_bytes <= 10 * GB
    assert placed.ram_bytes <= 40 * GB
    assert place(layers(4), ITEMS, Limits(10 * GB, 21 * GB), None, experts_of()).experts == ExpertSlots(8, 40)
    assert place(layers(4), ITEMS, Limits(40 * GB, 21 * GB), None, experts_of()).is_resident


def test_slots_that_would_hold_all_are_not_residents_that_take_more() -> None:
    """Residents may be unpacked or converted, slots hold what is stored."""
    unpacked = replace(experts_of(), resident_bytes=64 * GB)
    assert place(layers(4), ITEMS, Limits(None, 50 * GB), None, unpacked).experts == ExpertSlots(64)


def test_experts_take_their_slowest_way() -> None:
    experts, half = experts_of(), ExpertSlots(32)
    assert experts.num_used(1) == pytest.approx(2)
    times = ExpertTimes(compute_s=1.0, disk_s=4.0)
    assert predict_experts_s(experts, ExpertSlots(64, 0, True), times, 1) == pytest.approx(2)
    assert predict_experts_s(experts, half, times, 1) == pytest.approx(4)
    assert predict_experts_s(experts, half, times, 10**4) == pytest.approx(32)
    # The CPU and the link share what is not on the device: a third of it each time that both need in turn.
    beside = ExpertTimes(compute_s=0.1, host_s=2.0, link_s=1.0, disk_s=4.0)
    in_ram, on_disk = ExpertSlots(16, 64), ExpertSlots(16, 48)
    assert predict_experts_s(experts, in_ram, beside, 1) == pytest.approx(2 * 0.75 * 2 / 3)
    assert predict_experts_s(experts, on_disk, beside, 1) == pytest.approx(2 * 0.25 * 4)


@examples(320)
@given(costs, st.integers(0, 2000), st.one_of(st.none(), st.integers(0, 2000)), st.data())
def test_pinned_layers_stay_or_all_is_refused(
    costs: list[UnitCost], ram: int, device: int | None, data: st.DataObject
) -> None:
    num_pinned = data.draw(st.integers(0, len(costs)))
    try:
        placed = place(costs, [], Limits(device, ram), PinnedLayers(num_pinned))
    except MemoryLimitError:
        return
    assert placed.resident[:num_pinned] == tuple(range(num_pinned))
    assert sorted(placed.resident + placed.in_ram + placed.on_disk) == list(range(len(costs)))


def test_the_others_are_spread_behind_those_that_are_pinned() -> None:
    assert place(layers(12), [], Limits(None, 8 * GB), PinnedLayers(2)).resident == (0, 1, 3, 7, 10)
    assert place(layers(12), [], Limits(8 * GB, 64 * GB), PinnedLayers(4)).resident == (0, 1, 2, 3, 8)
    assert place(layers(12), [], Limits(None, 12 * GB), PinnedLayers(4)).resident == tuple(range(12))


def test_pinned_layers_that_do_not_fit_are_refused_with_their_bytes() -> None:
    place(layers(12), ITEMS, Limits(None, 9 * GB), PinnedLayers(4))
    with refused(MemoryLimitError, "8.4 GiB", "3.7 GiB", "exit layer"):
        place(layers(12), ITEMS, Limits(None, 9 * GB - 1), PinnedLayers(4))


@pytest.mark.parametrize("num_layers", [1, 2, 3, 8, 25, 80])
def test_every_beginning_of_scattered_layers_lies_among_all(num_layers: int) -> None:
    order = scattered(num_layers)
    assert sorted(order) == list(range(num_layers))
    for count in range(1, num_layers):
        chosen = sorted(order[:count])
        gaps = [b - a for a, b in pairwise((-1, *chosen, num_layers))]
        assert max(gaps) <= 4 * (num_layers + 1) / (count + 1)
