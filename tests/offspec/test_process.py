"""What is changed for the whole process, and when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offspec.checkpoints import load
from offspec.checkpoints.load import load_decoder
from offspec.checkpoints.opening import open_model
from offspec.loaders.streaming.placement import Limits, Placement, Slots, places_of
from offspec.loaders.streaming.weights import RamWeights
from offspec.process import disable_cudnn_attention, set_num_threads

from ..fakes import FAMILIES, build

matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
REDUCED = [
    (matmul, "allow_bf16_reduced_precision_reduction"),
    (matmul, "allow_fp16_reduced_precision_reduction"),
    (matmul, "allow_tf32"),
    (cudnn, "allow_tf32"),
]


def reduced() -> list[bool]:
    return [getattr(place, name) for place, name in REDUCED]


@pytest.fixture
def reduced_precision() -> Iterator[None]:
    """All of torch's shortcuts on a GPU are on, as another part of the program may have left them."""
    before = reduced()
    for place, name in REDUCED:
        setattr(place, name, True)
    yield
    for (place, name), value in zip(REDUCED, before, strict=True):
        setattr(place, name, value)


def test_cudnn_attention_is_off_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", asked.append)
    disable_cudnn_attention()
    assert asked == [False]


@pytest.mark.usefixtures("reduced_precision")
def test_every_decoder_on_a_gpu_computes_without_cudnn_and_with_fp32_sums(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also one over weights that were not opened by `load_weights`, as the benchmark's are when it is resumed."""
    asked: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", asked.append)
    monkeypatch.setattr(load, "Decoder", lambda *args, **options: None)
    files = open_model(build(FAMILIES["llama-gqa"], tmp_path).folder, "fp32", [])
    load.decoder_over(files, RamWeights([], {}), torch.device("cuda"))
    assert asked == [False]
    assert not any(reduced())


@pytest.mark.usefixtures("reduced_precision")
def test_a_model_that_is_loaded_on_the_cpu_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", asked.append)
    files = open_model(build(FAMILIES["llama-gqa"], tmp_path).folder, "fp32", [])
    everything = places_of(resident=range(files.config.num_layers))
    placement = Placement(everything, Slots(0, 0, 0), (), Limits(None, 0), 0, 0)
    load_decoder(files, placement, torch.device("cpu")).weights.close()
    assert asked == []
    assert all(reduced())


def test_threads_are_torchs() -> None:
    before = torch.get_num_threads()
    try:
        set_num_threads(before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        set_num_threads(before)
