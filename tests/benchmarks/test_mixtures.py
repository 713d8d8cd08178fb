"""Files of random mixtures are what both programs read; their figures are shown by task."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import mixtures
from offspec.checkpoints.load import load_decoder
from offspec.checkpoints.opening import open_model
from offspec.planning.plan import all_resident

from ..llama_cpp import LlamaCpp
from ..offspec.checkpoints.test_gguf_models import worst_gap

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "vocab_size": 96,
    "max_position_embeddings": 512,
}
TYPES = {"qwen3-30b-a3b": {"F32", "Q4_K", "Q6_K"}, "gpt-oss-20b": {"F32", "Q8_0", "MXFP4"}}
ROUNDED = 0.1  # of logits that lie some units apart: llama.cpp rounds to 8 bits


@pytest.fixture(params=list(TYPES))
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a shape, which is a small one here, without YaRN, whose borders llama.cpp rounds."""
    name: str = request.param
    shape = mixtures.SHAPES[name]
    known = {key: value for key, value in shape.metadata.items() if "scaling" not in key}
    small_shape = replace(shape, config={**shape.config, **SMALL}, metadata=known)
    monkeypatch.setitem(mixtures.SHAPES, name, small_shape)
    return name


def test_a_file_is_what_both_programs_read(small: str, llama_cpp: LlamaCpp, tmp_path: Path) -> None:
    path, prompt = tmp_path / "model.gguf", list(range(4, 20))
    mixtures.write_file(path, mixtures.SHAPES[small], 4)
    files = open_model(path, "fp32", [])
    assert {info.dtype for info in files.checkpoint.tensors.values()} == TYPES[small]
    decoder = load_decoder(files, all_resident(files), torch.device("cpu"))
    hidden = decoder.forward(torch.tensor(prompt), torch.arange(len(prompt)), decoder.new_cache())
    assert 0.3 < decoder.logits(hidden).std() < 3
    assert worst_gap(decoder, prompt, llama_cpp.greedy(path, prompt, 8)) < ROUNDED


def call(monkeypatch: pytest.MonkeyPatch, small: str, folder: Path) -> None:
    flags = ["--layers", "2", "--tokens", "3", "--texts", "2", "--prompt-tokens", "20", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", ["mixtures", "--shape", small, "--work", str(folder), "--threads", "1", *flags])
    mixtures.main()


def test_figures_by_task(
    small: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seconds = iter((2.0, 1.0, 4.0, 1.0))

    def turn(program: str, path: Path, tasks: list[dict[str, Any]], args: Any) -> dict[str, Any]:
        assert path.exists()
        took = next(seconds)
        return {
            "tasks": [
                {"seconds": took, "read_bytes": 6_000_000, "token_ids": [[len(program)] for _ in task["prompts"]]}
                for task in tasks
            ]
        }

    monkeypatch.setattr(mixtures, "turn", turn)
    call(monkeypatch, small, tmp_path)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["one", "text", "llama.cpp", "1.00", "3.00", "2.0", "1", "of", "1"] in lines
    assert ["2", "texts", "offspec", "6.00", "1.00", "1.0", "0", "of", "2"] in lines
    assert ["prompt", "of", "20", "offspec", "20.00", "1.00", "6.0", "0", "of", "1"] in lines


@pytest.mark.nightly("loads a model with two programs; the table is tested by default")
def test_both_programs_run(
    small: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("xllamacpp")
    call(monkeypatch, small, tmp_path)
    assert "offspec" in capsys.readouterr().out
