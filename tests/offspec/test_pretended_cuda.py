"""The engine on a CUDA device that is only pretended (`tests/pretend_cuda.py`): what CUDA would refuse is refused, and texts are the CPU's.

In a process of its own, whose torch is told that there is a device.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offspec import Engine, SamplingParams, SpeculationParams
from offspec import engine as engine_module
from offspec.planning import Plan, plan_here

from ..pair import build_pair
from ..pretend_cuda import build_guard, pretended_cuda

SAMPLED = SamplingParams(16, temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=3, ignore_eos=True)
REQUESTS = {
    "greedy": (SamplingParams(16, ignore_eos=True), SpeculationParams()),
    "sampled": (SAMPLED, SpeculationParams(24)),
    "plain": (SAMPLED, SpeculationParams(0)),
    "sequoia": (SAMPLED, SpeculationParams(8, tree="sequoia")),
    "joint": (SamplingParams(16, ignore_eos=True), SpeculationParams(accept="joint")),
}
Move = Callable[[Plan], Plan]


def resident(plan: Plan) -> Plan:
    return plan


def in_ram(plan: Plan) -> Plan:
    return streamed(plan, in_ram=tuple(range(len(plan.layers))))


def on_disk(plan: Plan) -> Plan:
    return streamed(plan, on_disk=tuple(range(len(plan.layers))), num_host_slots=2)


def streamed(plan: Plan, **where: Any) -> Plan:
    placement = replace(plan.placement, resident=(), num_slots=2, **where)
    return replace(plan, placement=placement, stream_bytes=sum(layer.read_bytes for layer in plan.layers))


def texts(pair: Path, device: str, move: Move = resident) -> dict[str, list[int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "plan_here", lambda *args: move(plan_here(*args)))
        engine = Engine.load(str(pair / "target"), draft=str(pair / "draft"), device=device, dtype="fp32")
    assert str(engine.target.device).startswith(device)
    said = {
        name: [token for step in engine.generate("def area(", *request) for token in step.token_ids]
        for name, request in REQUESTS.items()
    }
    engine.close()
    return said


def main(folder: Path) -> None:
    """All texts, as JSON: name of the place → name of the request → token ids."""
    build_pair(folder, num_layers=4)
    found = {"cpu": texts(folder, "cpu")}
    with pretended_cuda(folder / "guard.so"):
        for move in (resident, in_ram, on_disk):
            found[move.__name__] = texts(folder, "cuda:0", move)
    print(json.dumps(found))


def test_texts_are_the_cpus(tmp_path: Path) -> None:
    if shutil.which("g++") is None or sys.platform != "linux":
        pytest.skip("pretending takes a C++ compiler, and Linux")
    build_guard(tmp_path)
    command = [sys.executable, "-m", "tests.offspec.test_pretended_cuda", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    expected = found.pop("cpu")
    assert all(len(ids) == 16 for ids in expected.values())
    assert found == {"resident": expected, "in_ram": expected, "on_disk": expected}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
