"""Experts in slots of a device, with a CPU in its place; `pretended_mixture` has the order of its copies."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import closing

import pytest
import torch

from offspec.loaders.accelerators.accelerator import accelerator_of
from offspec.loaders.streaming.device_experts import DeviceExperts, ExpertChoice
from offspec.loaders.streaming.stored_model import StoredModel
from offspec.loaders.streaming.weights import HostExperts

from ..fakes import FakeReader
from .test_experts import EXPERTS, LAYERS, cached, fake_reader, ones, take
from .test_experts import model as model  # the fixture

EQUAL = ExpertChoice(lambda rows: float(rows), 1.0)


def on_device(
    model: StoredModel, num_slots: int, num_host: int, choice: ExpertChoice | None
) -> tuple[DeviceExperts, FakeReader]:
    reader, accelerator = fake_reader(model), accelerator_of(torch.device("cpu"))
    return DeviceExperts(model.experts, cached(model, num_host, reader), num_slots, accelerator, choice), reader


def computed(source: DeviceExperts, layer: int, rows: Mapping[int, int]) -> tuple[set[int], set[int]]:
    """The experts that the CPU computes, and those of the device."""
    host, device = set[int](), set[int]()
    for group in source.lend(layer, rows):
        (host if isinstance(group, HostExperts) else device).update(group)
    return host, device


def test_the_cpu_and_the_link_take_equally_long() -> None:
    choice = ExpertChoice(lambda rows: 0.1 * rows, 1.0)
    assert choice.num_on_host([1, 1, 1, 1]) == 4
    assert choice.num_on_host([1, 4, 20, 400]) == 3 - 1
    assert choice.num_on_host([400] * 3) == 0
    assert choice.num_on_host([]) == 0


@pytest.mark.parametrize(("num_slots", "num_host"), [(1, 1), (2, 5), (6, 24), (24, 24)])
@pytest.mark.parametrize("choice", [None, EQUAL])
def test_what_is_lent_is_right(model: StoredModel, num_slots: int, num_host: int, choice: ExpertChoice | None) -> None:
    source, reader = on_device(model, num_slots, num_host, choice)
    luck = random.Random(num_slots)
    with closing(source):
        for _ in range(8):
            for layer in range(LAYERS):
                rows = {n: luck.randint(1, 3) for n in luck.sample(range(EXPERTS), luck.randint(1, EXPERTS))}
                source.expect((layer + 1) % LAYERS, ones(luck.randrange(EXPERTS)))
                assert take(source, layer, rows) == {number: 100.0 * layer + number for number in rows}
    if num_host == LAYERS * EXPERTS:
        assert len(reader.reads) <= LAYERS * EXPERTS
    assert source.bytes_streamed >= reader.bytes_read


def test_few_rows_go_to_the_cpu_and_many_to_the_device(model: StoredModel) -> None:
    source, _ = on_device(model, 2, LAYERS * EXPERTS, ExpertChoice(lambda rows: rows / 4, 1.0))
    with closing(source):
        host, device = computed(source, 0, {0: 1, 1: 1, 2: 100, 3: 90})
    assert host == {0, 1}
    assert device == {2, 3}


def test_experts_used_most_come_to_the_device_while_the_cpu_computes(model: StoredModel) -> None:
    source, _ = on_device(model, 3, LAYERS * EXPERTS, ExpertChoice(lambda rows: 0.4 * rows, 1.0))
    with closing(source):
        assert computed(source, 0, ones(3, 4)) == ({3, 4}, set())
        for _ in range(8):
            computed(source, 0, ones(3, 4))
            computed(source, 1, ones(7))
        before = source.bytes_streamed
        assert computed(source, 0, ones(3, 4)) == (set(), {3, 4})
        assert source.bytes_streamed == before


def test_without_costs_everything_is_moved(model: StoredModel) -> None:
    source, _ = on_device(model, 3, 5, None)
    with closing(source):
        assert computed(source, 1, ones(*range(EXPERTS))) == (set(), set(range(EXPERTS)))
