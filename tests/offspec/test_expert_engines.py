"""Engines over mixtures of experts: drafts, texts that share passes, and what is read from disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec import Engine, SamplingParams, SpeculationParams, loading
from offspec.backends.weights import Weight
from offspec.checkpoints.load import load_weights
from offspec.checkpoints.opening import open_model
from offspec.checkpoints.shadows import make_shadow
from offspec.errors import UsageError
from offspec.loaders.streaming.experts import CachedExperts, ResidentExperts
from offspec.loaders.streaming.placement import EXPERTS_ITEM, ExpertSlots, Limits, place
from offspec.planning.plan import Plan, all_resident, experts_cost
from offspec.planning.probe import plan_here

from ..pair import MIXTURE, Pair, build_pair

LAYERS = 3
PROMPTS = ["def area(", "for item in self.items:", "x = 1"]
GREEDY, SAMPLED = (
    SamplingParams(12, ignore_eos=True),
    SamplingParams(12, temperature=1.0, seed=3, ignore_eos=True),
)
PLAIN, TREES = SpeculationParams(0), SpeculationParams(8)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("mixture"), num_layers=LAYERS, **MIXTURE)


def load(pair: Pair, num_slots: int | None = None, **options: Any) -> Engine:
    """num_slots: of experts, the others come from disk; None: all are resident."""

    def planned(*args: Any) -> Plan:
        plan = plan_here(*args)
        slots = plan.placement.experts if num_slots is None else ExpertSlots(num_slots)
        return replace(plan, placement=replace(plan.placement, experts=slots))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "plan_here", planned)
        return Engine.load(str(pair.target), device="cpu", **{"draft": "none", **options})


def says(engine: Engine, params: SamplingParams, speculation: SpeculationParams = TREES) -> list[int]:
    return [token for step in engine.generate(PROMPTS[0], params, speculation) for token in step.token_ids]


@pytest.fixture(scope="module")
def expected(pair: Pair) -> dict[str, list[int]]:
    """Plain decoding's texts."""
    with load(pair) as engine:
        return {"greedy": says(engine, GREEDY, PLAIN), "sampled": says(engine, SAMPLED, PLAIN)}


@pytest.mark.parametrize(("draft", "num_slots"), [("self:1", None), ("self:1", 3), ("mixture", 3)])
def test_drafts_change_no_text(
    pair: Pair, expected: Mapping[str, list[int]], draft: str, num_slots: int | None
) -> None:
    """Of the target's first layers, and of another mixture, all of which is in memory."""
    name = str(pair.draft) if draft == "mixture" else draft
    with load(pair, num_slots, draft=name) as engine:
        assert says(engine, GREEDY) == expected["greedy"]
        assert says(engine, SAMPLED) == expected["sampled"]
        if draft == "self:1":
            assert ("n-gram" in engine.draft.name or "lookup" in engine.draft.name) == (num_slots is not None)


def test_what_copies_or_trains_whole_layers_is_refused(pair: Pair) -> None:
    files = open_model(pair.target, "fp32", [])
    with pytest.raises(UsageError, match="a shadow is for models without experts, and this qwen3_moe has 8"):
        make_shadow(files, 4)
    for draft, feature in (("shadow", "a shadow"), ("self", "an exit layer")):
        with pytest.raises(UsageError, match=f"{feature} is for models without experts"):
            load(pair, draft=draft)


def test_texts_share_passes_over_experts_from_disk(pair: Pair) -> None:
    with load(pair) as engine:
        alone = [
            [token for step in engine.generate(prompt, GREEDY, PLAIN) for token in step.token_ids] for prompt in PROMPTS
        ]
    with load(pair, 3) as engine:
        together: list[list[int]] = [[] for _ in PROMPTS]
        for index, step in engine.generate_many(PROMPTS, GREEDY, max_texts=3):
            together[index] += step.token_ids
    assert together == alone


# ------------------------------------------------------------------------------------------------ bytes


class Requests:
    """Requests for experts, and how many bytes of these were not in memory."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.missing_bytes, lend = 0, CachedExperts.lend_held

        def noted(cached: CachedExperts, layer: int, rows: Mapping[int, int]) -> Iterator[Any]:
            units = {number: cached._first[layer] + number for number in rows}
            absent = [number for number, unit in units.items() if unit not in cached._held]
            self.missing_bytes += sum(cached._experts[layer][number].record.read_bytes for number in absent)
            return lend(cached, layer, rows)

        patch.setattr(CachedExperts, "lend_held", noted)
        patch.setattr(CachedExperts, "expect", lambda *args: None)


def test_what_is_read_is_what_routers_chose_and_memory_lacked(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch)
    with load(pair, 6) as engine:
        says(engine, GREEDY, PLAIN)
        assert 0 < engine.loaded.bytes_streamed == requests.missing_bytes


def storage_bytes(weights: Iterator[Weight]) -> int:
    """Of the memory behind tensors, each piece once."""
    storages = {w.untyped_storage().data_ptr(): w.untyped_storage() for w in weights if isinstance(w, torch.Tensor)}
    return sum(storage.nbytes() for storage in storages.values())


def test_experts_take_the_memory_that_was_planned(tmp_path: Path) -> None:
    large = build_pair(tmp_path, num_layers=2, **MIXTURE | {"moe_intermediate_size": 512})
    files = open_model(large.target, "fp32", [])
    costs, cost = [layer.cost(files.dtype) for layer in files.stored.layers], experts_cost(files)
    assert cost is not None
    limit = sum(layer.resident_bytes for layer in costs) + 9 * cost.slot_bytes + 100
    placement = place(costs, [], Limits(None, limit), None, cost)
    assert placement.experts == ExpertSlots(9)
    planned = next(item.on_device for item in placement.items if item.name == EXPERTS_ITEM)
    with closing(load_weights(files, placement, torch.device("cpu"))) as weights:
        assert isinstance(weights._experts, CachedExperts)
        assert weights._experts.memory.nbytes == pytest.approx(planned, rel=0.05)
    with closing(load_weights(files, all_resident(files), torch.device("cpu"))) as weights:
        assert isinstance(weights._experts, ResidentExperts)
        held = (w for layer in weights._experts._experts.values() for expert in layer for w in expert.values())
        assert storage_bytes(held) == pytest.approx(cost.resident_bytes, rel=0.05)
