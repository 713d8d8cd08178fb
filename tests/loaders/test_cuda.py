"""The link to a GPU brings every layer whole and in time, from pinned RAM and from disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offspec.loaders.cuda import pin, unpin
from offspec.loaders.placement import Limits, Placement
from offspec.loaders.readers import HostBuffer
from offspec.loaders.tiers import StoredModel, TieredWeights

from .fakes import Tensors, open_with

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
EMBEDDING = "model.embed.weight"


def tensors(num_layers: int = 9) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    made = {EMBEDDING: torch.randn(50, 512, generator=generator)}
    for index in range(num_layers):
        made[f"model.layers.{index}.mix.weight"] = torch.randn(512, 512, generator=generator)
        made[f"model.layers.{index}.norm"] = torch.randn(512, generator=generator)
    return made


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("num_slots", [2, 3])
@pytest.mark.parametrize(
    ("resident", "in_ram"), [((), range(9)), ((), ()), ((4,), range(0, 9, 2)), ((0, 8), (1, 2, 3)), (range(9), ())]
)
def test_every_pass_computes_with_the_right_layers(
    tmp_path: Path,
    resident: range | tuple[int, ...],
    in_ram: range | tuple[int, ...],
    num_slots: int,
    synchronous: bool,
) -> None:
    made, device = tensors(), torch.device("cuda")
    model = StoredModel.of(open_with(tmp_path, made))
    in_ram = tuple(i for i in in_ram if i not in resident)
    on_disk = tuple(i for i in range(9) if i not in resident and i not in in_ram)
    slot_bytes = max(layer.record.nbytes for layer in model.layers)
    placement = Placement(
        tuple(resident), in_ram, on_disk, num_slots, num_slots, slot_bytes, (), Limits(2**30, 2**30), 0, 0
    )
    weights = TieredWeights(
        model, placement, dtype=torch.float32, device=device, embedding=EMBEDDING, synchronous=synchronous
    )
    x = torch.randn(64, 512, device=device)
    # Many passes without a synchronisation between: a slot that is overwritten too early shows in the sums.
    passes = []
    for _ in range(20):
        hidden = x
        for index in range(9):
            with weights.layer(index) as layer:
                for _ in range(4):
                    hidden = torch.nn.functional.rms_norm(hidden @ layer["mix.weight"], (512,), layer["norm"])  # type: ignore[operator, arg-type]
        passes.append(hidden)
    expected = x
    for index in range(9):
        for _ in range(4):
            mixed = expected @ made[f"model.layers.{index}.mix.weight"].to(device)
            expected = torch.nn.functional.rms_norm(mixed, (512,), made[f"model.layers.{index}.norm"].to(device))
    for found in passes:
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    rows = weights.rows(EMBEDDING, torch.tensor([3, 49, 3]))
    torch.testing.assert_close(rows.cpu(), made[EMBEDDING][[3, 49, 3]])
    weights.close()


def test_memory_is_pinned_where_it_lies() -> None:
    buffer = HostBuffer(3 * 2**20 + 5)
    assert pin(buffer)
    assert buffer.tensor.is_pinned()
    unpin(buffer)
    assert not buffer.tensor.is_pinned()
