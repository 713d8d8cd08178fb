"""Training says before it begins that memory is short, instead of being ended by the kernel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from offspec.errors import MemoryLimitError
from offspec.loaders.machine.hardware import Gpu, Hardware, read_hardware
from offspec.loaders.units import format_size
from offspec.research.distill_params import DistillParams
from offspec.research.target_texts import Shard
from offspec.research.trainer import Student, Trainer

from ...refusals import refused


class OneMatrix(Student):
    """A million weights, 4 MB, and a bias that is not trained."""

    width, device = 1000, torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Linear(1000, 1000)
        self.matrix.bias.requires_grad_(False)

    def forward(self, batch: Shard) -> Tensor:
        return self.matrix(batch["states"]).square().mean()


@pytest.mark.parametrize(("on_card", "needed"), [(False, 12_000_000), (True, 16_000_000)])
def test_what_does_not_fit_is_refused(
    on_card: bool, needed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = read_hardware(torch.device("cpu"))

    def hardware(free: int) -> Hardware:
        ram = replace(here.ram, available_bytes=10**12 if on_card else free)
        return replace(here, ram=ram, gpu=Gpu("card", 0, 10**12, free, (9, 0)) if on_card else None)

    monkeypatch.setattr("offspec.research.trainer.read_hardware", lambda device: hardware(needed))
    Trainer(OneMatrix(), DistillParams(), tmp_path)
    monkeypatch.setattr("offspec.research.trainer.read_hardware", lambda device: hardware(needed - 1))
    with refused(MemoryLimitError, "training 1 M weights takes", format_size(needed)):
        Trainer(OneMatrix(), DistillParams(), tmp_path)
