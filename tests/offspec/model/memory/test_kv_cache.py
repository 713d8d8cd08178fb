"""The KV cache against a plain list of what it should hold."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from offspec.model.memory.kv_cache import KVLayout, plain_layers
from offspec.model.memory.sequence_cache import SequenceCache

from ....examples import examples

LAYERS, KV_HEADS, HEAD_DIM = 2, 3, 4
Entry = tuple[float, int]  # the number that fills its keys (its values: the negative), and its position


def new_cache() -> SequenceCache:
    cpu = torch.device("cpu")
    return SequenceCache(plain_layers([KVLayout(KV_HEADS, HEAD_DIM)] * LAYERS, torch.float32, cpu), cpu)


def add(cache: SequenceCache, entries: list[Entry], *, pending: bool) -> None:
    """Writes entries behind what is there, the way the decoder does: reserve, every layer, count."""
    start = cache.size
    cache.extend(len(entries))
    cache.positions[start : start + len(entries)] = torch.tensor([position for _, position in entries])
    for layer in range(LAYERS):
        keys = torch.tensor([number + 100 * layer for number, _ in entries])[:, None, None].expand(
            -1, KV_HEADS, HEAD_DIM
        )
        cache.write(layer, keys, -keys, start)
    cache.append(0 if pending else len(entries), len(entries) if pending else 0)


def check(cache: SequenceCache, committed: list[Entry], pending: list[Entry]) -> None:
    entries = committed + pending
    assert (cache.length, cache.pending, cache.size) == (len(committed), len(pending), len(entries))
    assert cache.size <= cache.capacity == len(cache.positions)
    assert cache.positions[: cache.size].tolist() == [position for _, position in entries]
    for layer in range(LAYERS):
        keys, values = cache.read(layer, cache.size)
        assert keys.shape == values.shape == (KV_HEADS, cache.size, HEAD_DIM)
        expected = torch.tensor([number + 100 * layer for number, _ in entries])[None, :, None].expand_as(keys)
        assert torch.equal(keys, expected)
        assert torch.equal(values, -expected)


@given(st.data())
@examples(60)
def test_holds_what_a_plain_list_would(data: st.DataObject) -> None:
    cache = new_cache()
    committed: list[Entry] = []
    pending: list[Entry] = []
    for number in range(0, 40 * data.draw(st.integers(1, 12), label="operations"), 40):
        operation = data.draw(st.sampled_from(["commit", "pend", "keep", "truncate"]))
        count = data.draw(st.integers(0, 9), label="entries")
        if operation == "commit" and not pending:
            entries = [(float(number + i), len(committed) + i) for i in range(count)]
            add(cache, entries, pending=False)
            committed += entries
        elif operation == "pend":
            entries = [(float(number + i), len(committed) + i // 2) for i in range(count)]
            add(cache, entries, pending=True)
            pending += entries
        elif operation == "keep":
            stay = [i for i in range(len(pending)) if data.draw(st.booleans(), label=f"keep {i}")]
            end = data.draw(st.integers(0, len(stay)), label="of these committed")
            cache.keep(stay[:end], stay[end:])
            committed, pending = committed + [pending[i] for i in stay[:end]], [pending[i] for i in stay[end:]]
        elif operation == "truncate":
            length = data.draw(st.integers(0, len(committed)), label="length")
            cache.truncate(length)
            committed, pending = committed[:length], []
        check(cache, committed, pending)


def some_pending() -> tuple[SequenceCache, list[Entry], list[Entry]]:
    cache = new_cache()
    committed = [(1.0, 0), (2.0, 1)]
    pending = [(3.0, 2), (4.0, 2), (5.0, 3), (6.0, 3)]
    add(cache, committed, pending=False)
    add(cache, pending, pending=True)
    return cache, committed, pending


def test_growth_is_geometric_and_keeps_contents() -> None:
    cache, capacities = new_cache(), set()
    entries = [(float(i), i) for i in range(200)]
    for entry in entries:
        add(cache, [entry], pending=False)
        capacities.add(cache.capacity)
    check(cache, entries, [])
    assert len(capacities) < 20
    assert cache.nbytes == 2 * LAYERS * KV_HEADS * HEAD_DIM * 4 * cache.capacity


def test_what_is_reserved_is_all_there_is() -> None:
    """A plan counts on it; and room that was reserved is used before any more is made."""
    cache = new_cache()
    cache.reserve(40)
    cache.reserve(41)
    assert cache.capacity == 41
    for i in range(41):
        add(cache, [(float(i), i)], pending=False)
    assert cache.capacity == 41


def test_filled_in_inference_mode_and_kept_outside_it() -> None:
    with torch.inference_mode():
        cache, committed, pending = some_pending()
    cache.keep([1, 3])
    check(cache, [*committed, pending[1], pending[3]], [])
