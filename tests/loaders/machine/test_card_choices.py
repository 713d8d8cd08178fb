"""A second process on the same card chooses the same kernels; another card or version measures anew."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offspec.backends.on_gpu import FUSED_ROWS
from offspec.loaders.formats import StoredWeight, four_bit
from offspec.loaders.machine import card_choices as module
from offspec.loaders.machine.card_choices import choices_file, fused_rows

CARD, DTYPE = torch.device("cpu"), torch.bfloat16  # stands for a card, whose properties are pretended

HAS_FUSED = module._has_fused


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    properties = SimpleNamespace(name="Pretended 4090", total_memory=24 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    return properties


@pytest.fixture(autouse=True)
def new_process() -> Iterator[Callable[[], None]]:
    """Forgets what a process keeps."""
    yield FUSED_ROWS.clear
    FUSED_ROWS.clear()


def matrix(shape: tuple[int, int] = (64, 128), blocksize: int = 64) -> StoredWeight:
    return four_bit.Weight4bit("weight", four_bit.Layout4bit(shape, "nf4", blocksize), ())


def measuring(monkeypatch: pytest.MonkeyPatch, rows: int) -> list[StoredWeight]:
    """What is measured from now on, always with this result."""
    measured = list[StoredWeight]()
    monkeypatch.setattr(module, "measure_fused_rows", lambda stored, *_: measured.append(stored) or rows)
    monkeypatch.setattr(module, "_has_fused", lambda *_: True)
    return measured


def test_a_second_process_has_the_first_ones_fused_rows(
    monkeypatch: pytest.MonkeyPatch, new_process: Callable[[], None]
) -> None:
    first = measuring(monkeypatch, 8)
    assert fused_rows(matrix(), CARD, DTYPE) == 8
    new_process()
    second = measuring(monkeypatch, 32)  # another load of the machine, another result
    assert fused_rows(matrix(), CARD, DTYPE) == 8
    assert FUSED_ROWS.get("nf4", (64, 128), DTYPE, CARD) == 8
    assert (len(first), len(second)) == (1, 0)


@pytest.mark.parametrize(
    "other",
    [
        lambda: fused_rows(matrix((128, 128)), CARD, DTYPE),
        lambda: fused_rows(matrix(blocksize=128), CARD, DTYPE),
        lambda: fused_rows(matrix(), CARD, torch.float16),
    ],
    ids=["shape", "layout", "dtype"],
)
def test_other_products_are_measured(monkeypatch: pytest.MonkeyPatch, other: Callable[[], int]) -> None:
    measuring(monkeypatch, 8)
    fused_rows(matrix(), CARD, DTYPE)
    measured = measuring(monkeypatch, 32)
    assert other() == 32
    assert len(measured) == 1
    assert len(list(choices_file(CARD).parent.glob("card-*"))) == 1


@pytest.mark.parametrize("change", ["name", "driver", "torch", "bitsandbytes"])
def test_another_card_driver_or_version_is_measured(
    monkeypatch: pytest.MonkeyPatch, card: SimpleNamespace, change: str
) -> None:
    measuring(monkeypatch, 8)
    fused_rows(matrix(), CARD, DTYPE)
    if change == "name":
        card.name = "Pretended 4080"
    if change == "driver":
        monkeypatch.setattr(module, "_driver", lambda: "NVRM version: 580.1")
    if change == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    if change == "bitsandbytes":
        monkeypatch.setattr(module, "versions", lambda *packages: ["9.9"] * len(packages))
    measured = measuring(monkeypatch, 32)
    assert fused_rows(matrix(), CARD, DTYPE) == 32
    assert len(measured) == 1


@pytest.mark.parametrize("rows", [None, "8", -1, True, 1.5, [8]])
def test_damaged_choices_are_measured_again(monkeypatch: pytest.MonkeyPatch, rows: Any) -> None:
    measuring(monkeypatch, 8)
    fused_rows(matrix(), CARD, DTYPE)
    content = json.loads(choices_file(CARD).read_text())
    (key,) = content
    choices_file(CARD).write_text(json.dumps({key: rows}))
    assert fused_rows(matrix(), CARD, DTYPE) == 8
    assert json.loads(choices_file(CARD).read_text()) == content


def test_a_kernel_that_does_not_run_any_more_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring(monkeypatch, 8)
    fused_rows(matrix(), CARD, DTYPE)
    monkeypatch.setattr(module, "_has_fused", HAS_FUSED)
    assert fused_rows(matrix(), CARD, DTYPE) == 0, "a CPU has no fused product"
