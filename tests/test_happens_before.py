"""The order of accesses, by clocks."""

from __future__ import annotations

import torch

from .happens_before import MOST_ACCESSES, Extent, HappensBefore, joined, overlap

MAIN, BESIDE, THIRD = 0, 1, 2


def accessed(order: HappensBefore, stream: int, tensor: torch.Tensor, *, is_write: bool) -> None:
    order.access(stream, "touch", [(tensor, is_write)])


def test_clocks_are_joined() -> None:
    assert joined({0: 3, 1: 1}, {1: 2, 2: 1}) == {0: 3, 1: 2, 2: 1}
    assert joined({}, {1: 2}) == {1: 2}


def test_streams_that_nothing_orders_race() -> None:
    for first, second, races in ((True, True, 1), (True, False, 1), (False, True, 1), (False, False, 0)):
        order, tensor = HappensBefore(), torch.zeros(8)
        accessed(order, MAIN, tensor, is_write=first)
        accessed(order, BESIDE, tensor, is_write=second)
        assert len(order.races) == races


def test_an_event_orders_what_came_before_it() -> None:
    order, tensor = HappensBefore(), torch.zeros(8)
    accessed(order, MAIN, tensor, is_write=True)
    event = order.clock(MAIN)
    order.wait(BESIDE, event)
    accessed(order, BESIDE, tensor, is_write=True)
    assert order.races == []
    order.wait(THIRD, event)  # not what has come since
    accessed(order, THIRD, tensor, is_write=False)
    assert len(order.races) == 1


def test_orders_follow_from_each_other() -> None:
    order, tensor = HappensBefore(), torch.zeros(8)
    accessed(order, MAIN, tensor, is_write=True)
    order.wait(BESIDE, order.clock(MAIN))
    order.wait(THIRD, order.clock(BESIDE))
    accessed(order, THIRD, tensor, is_write=True)
    assert order.races == []


def test_what_the_host_has_waited_for_is_over_for_all() -> None:
    order, tensor = HappensBefore(), torch.zeros(8)
    accessed(order, MAIN, tensor, is_write=False)
    order.host_access("fill", tensor, is_write=False)
    assert order.races == []
    order.host_access("fill", tensor, is_write=True)
    assert len(order.races) == 1
    order.forget_races()
    order.host_waits(order.clock(MAIN))
    order.host_access("fill", tensor, is_write=True)
    accessed(order, BESIDE, tensor, is_write=True)
    assert order.races == []


def test_other_bytes_of_the_same_memory_do_not_race() -> None:
    order, tensor = HappensBefore(), torch.zeros(6, 8)
    accessed(order, MAIN, tensor[:, :4], is_write=True)
    accessed(order, BESIDE, tensor[:, 4:], is_write=True)
    assert order.races == [], "rows are interleaved"
    accessed(order, BESIDE, tensor.view(-1).view(torch.uint8)[15:16], is_write=True)
    assert len(order.races) == 1


def test_bytes_overlap_exactly() -> None:
    whole = torch.zeros(4, 6, dtype=torch.int16)
    views = [whole, whole[1:3], whole[:, ::2], whole[:, 1::2], whole.T[2:4], whole[3, 5:], whole[:, :1].expand(4, 9)]
    for one in views:
        for other in views:
            whole.zero_()
            one.fill_(1)
            assert overlap(Extent.of(one), Extent.of(other)) == bool(other.any())


def test_freed_memory_is_lent_to_its_stream_again() -> None:
    for waits, races in ((False, 1), (True, 0)):
        order, tensor = HappensBefore(), torch.zeros(8)
        accessed(order, MAIN, tensor, is_write=True)
        order.wait(BESIDE, order.clock(MAIN))
        accessed(order, BESIDE, tensor, is_write=False)
        del tensor
        if waits:
            order.wait(MAIN, order.clock(BESIDE))
        order.memory(torch.zeros(8), THIRD)
        assert order.races == [], "another stream's memory is not lent to it"
        order.memory(torch.zeros(8), MAIN)
        assert len(order.races) == races


def test_accesses_that_are_over_are_forgotten() -> None:
    order, tensor = HappensBefore(), torch.zeros(400)
    for first in range(200):
        accessed(order, MAIN, tensor[first : first + 2], is_write=False)
        order.host_waits(order.clock(MAIN))
    assert len(order.memory(tensor)) <= MOST_ACCESSES
