"""A mixture of experts on a CUDA device that is only pretended: wherever its experts lie, texts are the CPU's.

In a process of its own, as `test_pretended_cuda`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offspec.loaders.streaming.device_experts import DeviceExperts, ExpertChoice
from offspec.loaders.streaming.placement import ExpertSlots, places_of
from offspec.loaders.streaming.weights import HostExperts
from offspec.planning.plan import Plan

from ..pair import build_pair
from ..pretend_cuda import in_own_process, pretended_cuda
from .test_pretended_cuda import Move, load, measured_once, races_in, texts

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
    "all in RAM": (ExpertSlots(3, EXPERTS * LAYERS), True, BY_ROWS),
    "most on disk": (ExpertSlots(1, 2), False, BY_ROWS),
    "all moved": (ExpertSlots(4, 6), False, None),
}


def build(folder: Path) -> Path:
    pair = build_pair(folder, num_layers=LAYERS, **MIXTURE)
    pair.target.rename(folder / "plain")
    return folder


def with_slots(slots: ExpertSlots, are_streamed: bool) -> Move:
    """are_streamed: the plan's layers are in RAM, too."""

    def move(plan: Plan) -> Plan:
        placement = replace(plan.placement, experts=slots)
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


def main(folder: Path) -> None:
    """Texts, races and kinds of groups of each of WAYS, as JSON."""
    build(folder)
    found: dict[str, Any] = {"cpu": texts(load(folder, "plain", "cpu", draft="lookup"), NAMES)}
    with pretended_cuda(folder / "guard.so") as machine, measured_once():
        for name, (slots, are_streamed, choice) in WAYS.items():
            with chosen_by(choice) as kinds:
                said = texts(load(folder, "plain", "cuda:0", with_slots(slots, are_streamed), draft="lookup"), NAMES)
            found[name] = {"texts": said, "races": races_in(machine), "kinds": sorted(set(kinds))}
    print(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `main` prints."""
    results: dict[str, Any] = in_own_process("tests.offspec.test_pretended_mixture", tmp_path_factory.mktemp("mixture"))
    return results


@pytest.mark.slow
def test_texts_are_the_cpus_and_everything_is_in_order(found: dict[str, Any]) -> None:
    for name in WAYS:
        assert found[name]["texts"] == found["cpu"]
        assert found[name]["races"] == []
        assert found[name]["kinds"] == (["device"] if name == "all moved" else ["device", "host"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
