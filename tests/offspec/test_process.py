"""What is changed for the whole process, and when."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offspec.checkpoints import load
from offspec.checkpoints.load import load_decoder
from offspec.checkpoints.opening import ModelFiles
from offspec.loaders.placement import Limits, Placement, Slots
from offspec.loaders.weights import RamWeights
from offspec.process import disable_cudnn_attention, set_num_threads

from ..fakes import FAMILIES, build


def test_cudnn_attention_is_off_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", asked.append)
    disable_cudnn_attention()
    assert asked == [False]


def test_every_decoder_on_a_gpu_computes_without_cudnn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also one over weights that were not opened by `load_weights`, as the benchmark's are when it is resumed."""
    asked: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", asked.append)
    monkeypatch.setattr(load, "Decoder", lambda *args, **options: None)
    files = ModelFiles.open(build(FAMILIES["llama-gqa"], tmp_path).folder, "fp32", "cpu", [])
    load.decoder_over(files, RamWeights([], {}), torch.device("cuda"))
    assert asked == [False]


def test_a_model_that_is_loaded_on_the_cpu_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", asked.append)
    files = ModelFiles.open(build(FAMILIES["llama-gqa"], tmp_path).folder, "fp32", "cpu", [])
    everything = tuple(range(files.config.num_layers))
    placement = Placement(everything, (), (), Slots(0, 0, 0), (), Limits(None, 0), 0, 0)
    load_decoder(files, placement, torch.device("cpu")).weights.close()
    assert asked == []


def test_threads_are_torchs() -> None:
    before = torch.get_num_threads()
    try:
        set_num_threads(before + 1)
        assert torch.get_num_threads() == before + 1
    finally:
        set_num_threads(before)
