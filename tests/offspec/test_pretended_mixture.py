"""A mixture of experts on a CUDA device that is only pretended: wherever its experts lie, texts are the CPU's.

In a process of its own, as `test_pretended_cuda`.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from offspec import Engine
from offspec.loaders.streaming.device_experts import DeviceExperts, ExpertChoice
from offspec.loaders.streaming.placement import ExpertSlots, places_of
from offspec.loaders.streaming.weights import HostExperts
from offspec.planning.plan import Plan

from ..pair import build_pair
from ..pretend_cuda import CUDA, in_own_process, pretended_cuda
from ..pretend_experts import PretendedKernels, pretended_experts
from ..pretend_streams import Machine
from .test_pretended_cuda import Move, load, races_in, says, texts

EXPERTS, LAYERS = 6, 2
MIXTURE = {
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
NAMES = ("greedy", "plain")
BY_ROWS = ExpertChoice(lambda rows: 1.0 if rows == 1 else 100.0, 1.5)
# Slots, whether layers come from RAM, too, and which experts the CPU computes: those of one row, or none.
WAYS = {
    "resident": (None, False, None),
    "all in RAM": (ExpertSlots(3, EXPERTS * LAYERS), True, BY_ROWS),
    "most on disk": (ExpertSlots(1, 2), False, BY_ROWS),
    "all moved": (ExpertSlots(4, 6), False, None),
    "all in slots": (ExpertSlots(EXPERTS * LAYERS, EXPERTS * LAYERS), False, None),
}


def build(folder: Path) -> Path:
    pair = build_pair(folder, num_layers=LAYERS, **MIXTURE)
    pair.target.rename(folder / "plain")
    return folder


def with_slots(slots: ExpertSlots | None, are_streamed: bool) -> Move:
    """are_streamed: the plan's layers are in RAM, too."""

    def move(plan: Plan) -> Plan:
        placement = replace(plan.placement, experts=slots or plan.placement.experts)
        if are_streamed:
            sizes = replace(placement.slots, num=2, nbytes=max(cost.slot_bytes for cost in plan.layers))
            placement = replace(placement, places=places_of(in_ram=range(LAYERS)), slots=sizes)
        return replace(plan, placement=placement)

    return move


@contextmanager
def chosen_by(choice: ExpertChoice | None) -> Iterator[list[str]]:
    """Yields the kinds of groups that are lent: "host" or "device"."""
    kinds, lend = list[str](), DeviceExperts.lend

    def noted(self: DeviceExperts, *args: Any) -> Any:
        for group in lend(self, *args):
            kinds.append("host" if isinstance(group, HostExperts) else "device")
            yield group

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "expert_choice", lambda self, rates: choice)
        patch.setattr(DeviceExperts, "lend", noted)
        yield kinds


@dataclass(frozen=True)
class LayerCounts:
    """Of a layer of experts in which every expert is where it stays: operations of the device, and waits for it.

    launches: of products with chosen experts.
    """

    operations: float
    waits: dict[str, float]
    launches: float


COUNTED_PASSES, COUNTED_ROWS = 2, (1, 16)
COUNTED_WAYS = ("resident", "all in slots")
AT_ONCE = ("resident", "most on disk", "all in slots")
NO_ROWS: Any = None  # of a pass, which experts do not look at
VIEWS = (
    "view",
    "slice",
    "split",
    "select",
    "unsqueeze",
    "expand",
    "t.",
    "unbind",
    "detach",
    "alias",
    "to.dtype_layout",
)


def counted(engine: Engine, machine: Machine, num_rows: int, kernels: PretendedKernels | None) -> LayerCounts:
    """Averages over layers and passes, after passes that have brought the experts."""
    decoder, operations, waits = engine.target, list[str](), Counter[str]()

    def passes(num_rows: int) -> list[Tensor]:
        return [torch.randn(num_rows, decoder.config.hidden_size).to(CUDA) for _ in range(COUNTED_PASSES)]

    def run(passes: list[Tensor]) -> None:
        for rows, part in itertools.product(passes, decoder._expert_parts):
            with decoder.weights.layer(part.layer) as tensors, torch.inference_mode():
                weights = decoder.layer_weights(tensors, part.layer)
                part.forward(rows, weights, NO_ROWS, 0, len(rows))

    run(passes(COUNTED_ROWS[-1]))
    counted_passes = passes(num_rows)
    machine.counts.waits.clear()
    before = 0 if kernels is None else kernels.launches
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine.recording, "note", lambda name, *_: operations.append(name.removeprefix("aten.")))
        run(counted_passes)
    num_layers = COUNTED_PASSES * LAYERS
    for (place, _), number in machine.counts.waits.items():
        waits[place] += number
    work = sum(not name.startswith(VIEWS) for name in operations)
    launches = 0 if kernels is None else kernels.launches - before
    return LayerCounts(work / num_layers, {place: n / num_layers for place, n in waits.items()}, launches / num_layers)


def of_way(folder: Path, machine: Machine, name: str, kernels: PretendedKernels | None) -> dict[str, Any]:
    """Texts, races, kinds of groups and counts of one of WAYS."""
    slots, are_streamed, choice = WAYS[name]
    found = dict[str, Any]()
    with (
        chosen_by(choice) as kinds,
        load(folder, "plain", "cuda:0", with_slots(slots, are_streamed), draft="lookup") as engine,
    ):
        found["texts"] = {name: says(engine, name) for name in (NAMES if kernels is None else NAMES[:1])}
        found["kinds"] = sorted(set(kinds))
        if name in COUNTED_WAYS:
            found["counts"] = {rows: asdict(counted(engine, machine, rows, kernels)) for rows in COUNTED_ROWS}
    found["races"] = races_in(machine)
    return found


def main(folder: Path) -> None:
    """What `of_way` gives for each of WAYS, one by one and at once, as JSON."""
    build(folder)
    found: dict[str, Any] = {"cpu": texts(load(folder, "plain", "cpu", draft="lookup"), NAMES)}
    with pretended_cuda(folder / "guard.so") as machine:
        for name in WAYS:
            found[name] = of_way(folder, machine, name, None)
        for name in AT_ONCE:
            with pretended_experts(machine) as kernels:
                found[f"{name}, at once"] = of_way(folder, machine, name, kernels)
            assert kernels.launches
    print(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `main` prints."""
    results: dict[str, Any] = in_own_process("tests.offspec.test_pretended_mixture", tmp_path_factory.mktemp("mixture"))
    return results


@pytest.mark.slow
def test_texts_are_the_cpus_and_everything_is_in_order(found: dict[str, Any]) -> None:
    for name, (slots, _, choice) in WAYS.items():
        kinds = [] if slots is None else ["device"] if choice is None else ["device", "host"]
        for way in (name, f"{name}, at once") if name in AT_ONCE else (name,):
            texts = found[way]["texts"]
            assert texts == {name: found["cpu"][name] for name in texts}
            assert found[way]["races"] == []
            assert found[way]["kinds"] == kinds


CHOICE, TRANSFER = "offspec/model/parts/chosen_experts.py _on_host", "loaders/streaming/small_transfers.py _send"


@pytest.mark.slow
def test_the_host_waits_for_the_choice_alone(found: dict[str, Any]) -> None:
    """And for transfers that are long over; at once, experts that are all resident need not even that."""
    for name, rows in itertools.product(("resident", "all in slots"), map(str, COUNTED_ROWS)):
        counts = found[name]["counts"][rows]["waits"]
        assert counts[CHOICE] == 1
        assert counts.keys() <= {CHOICE, TRANSFER}
        assert counts.get(TRANSFER, 0) <= 1
    assert [found["resident, at once"]["counts"][str(rows)]["waits"] for rows in COUNTED_ROWS] == [{}, {}]
    for rows in map(str, COUNTED_ROWS):
        assert found["all in slots, at once"]["counts"][rows]["waits"] == {CHOICE: 1, TRANSFER: 1}


@pytest.mark.slow
def test_at_once_operations_do_not_grow_with_rows(found: dict[str, Any]) -> None:
    """Router, activation and sum included; two launches in place of three products for each expert."""
    for name in ("resident, at once", "all in slots, at once"):
        few, many = (found[name]["counts"][str(rows)] for rows in COUNTED_ROWS)
        assert few["launches"] == many["launches"] == 2
        assert many["operations"] <= few["operations"] + 3 <= 30


if __name__ == "__main__":
    main(Path(sys.argv[1]))
