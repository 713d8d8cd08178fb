"""A mixture of experts on a CUDA device that is only pretended: wherever its experts lie, texts are the CPU's.

`test_pretended_cuda` runs and checks it.
"""

from __future__ import annotations

import itertools
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

from ..pair import MIXTURE, build_pair
from ..pretend_cuda import CUDA
from ..pretend_experts import PretendedKernels, pretended_experts
from ..pretend_streams import Machine
from .test_pretended_cuda import Move, load, races_in, says

EXPERTS, LAYERS = 6, 2
BY_ROWS = ExpertChoice(lambda rows: 1.0 if rows == 1 else 100.0, 1.5)
# Slots, whether layers come from RAM, too, and which experts the CPU computes: those of one row, or none.
WAYS = {
    "resident": (None, False, None),
    "all in RAM": (ExpertSlots(3, EXPERTS * LAYERS), True, BY_ROWS),
    "most on disk": (ExpertSlots(1, 2), False, BY_ROWS),
    "all in slots": (ExpertSlots(EXPERTS * LAYERS, EXPERTS * LAYERS), False, None),
}


def build(folder: Path) -> Path:
    folder.mkdir()
    pair = build_pair(folder, num_layers=LAYERS, **MIXTURE | {"num_experts": EXPERTS})
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
AT_ONCE = COUNTED_WAYS
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


def of_method(folder: Path, machine: Machine, name: str, kernels: PretendedKernels | None) -> dict[str, Any]:
    """The text, races, kinds of groups and counts of one of WAYS."""
    slots, are_streamed, choice = WAYS[name]
    found = dict[str, Any]()
    with (
        chosen_by(choice) as kinds,
        load(folder, "plain", "cuda:0", with_slots(slots, are_streamed), draft="lookup") as engine,
    ):
        found["text"] = says(engine, "greedy")
        found["kinds"] = sorted(set(kinds))
        if name in COUNTED_WAYS:
            found["counts"] = {rows: asdict(counted(engine, machine, rows, kernels)) for rows in COUNTED_ROWS}
    found["races"] = races_in(machine)
    return found


def measured(folder: Path, machine: Machine) -> dict[str, Any]:
    """What `of_method` gives for each of WAYS, one by one and at once. folder: from `build`."""
    found = {name: of_method(folder, machine, name, None) for name in WAYS}
    for name in AT_ONCE:
        with pretended_experts(machine) as kernels:
            found[f"{name}, at once"] = of_method(folder, machine, name, kernels)
        assert kernels.launches
    return found


CHOICE, TRANSFER = "offspec/model/parts/chosen_experts.py _on_host", "loaders/streaming/small_transfers.py _send"


def check(found: dict[str, Any], expected: list[int]) -> None:
    """The text and groups of each of WAYS; the host waits for the choice, and for transfers that are long over."""
    for way, of_one in found.items():
        slots, _, choice = WAYS[way.removesuffix(", at once")]
        kinds = [] if slots is None else ["device"] if choice is None else ["device", "host"]
        assert (of_one["text"], of_one["races"], of_one["kinds"]) == (expected, [], kinds), way
    for rows in map(str, COUNTED_ROWS):
        for name in COUNTED_WAYS:
            counts = found[name]["counts"][rows]["waits"]
            assert counts[CHOICE] == 1
            assert counts.keys() <= {CHOICE, TRANSFER}
            assert counts.get(TRANSFER, 0) <= 1
        # At once, experts that are all resident need not even that.
        assert found["resident, at once"]["counts"][rows]["waits"] == {}
        assert found["all in slots, at once"]["counts"][rows]["waits"] == {CHOICE: 1, TRANSFER: 1}
    for name in AT_ONCE:  # router, activation and sum included; two launches in place of three products for each expert
        few, many = (found[f"{name}, at once"]["counts"][str(rows)] for rows in COUNTED_ROWS)
        assert few["launches"] == many["launches"] == 2
        assert many["operations"] <= few["operations"] + 3 <= 30
