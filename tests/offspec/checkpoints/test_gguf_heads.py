"""Heads in GGUF files, as llama.cpp's conversion writes them: the same numbers as in the published layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.drafts.beside_llama_cpp import write_head
from offspec.checkpoints.head_files import HeadFiles, is_head
from offspec.checkpoints.opening import open_model
from offspec.errors import CheckpointError

from ...pair import Pair, build_pair
from ...refusals import refused
from ..model.heads.head_twins import (
    DFLASH_CONFIG,
    DSPARK_CONFIG,
    EAGLE_CONFIG,
    dflash_tensors,
    dspark_tensors,
    eagle_tensors,
    write_folder,
)

HEADS: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "EAGLE-3": (EAGLE_CONFIG, eagle_tensors(3)),
    "DFlash": (DFLASH_CONFIG, dflash_tensors()),
    "DSpark": (DSPARK_CONFIG, dspark_tensors()),
}
LAYERS = 6


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"), num_layers=LAYERS)


@pytest.fixture(scope="module", params=HEADS)
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same head as a folder and as a GGUF file."""
    config, tensors = HEADS[request.param]
    place = tmp_path_factory.mktemp("head")
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    defaults = {"max_position_embeddings": 64, "rope_theta": 10000.0, "head_dim": head_dim, "num_hidden_layers": 1}
    defaults |= config
    words = [f"t{i}" for i in range(config["vocab_size"])]
    file = write_head(place / "head.gguf", defaults, tensors, LAYERS, lambda writer: writer.add_token_list(words))
    return write_folder(place / "folder", config, tensors), file


def test_the_same_head(head: tuple[Path, Path], pair: Pair) -> None:
    """Its shape, the target's layers that it reads, and every number of it."""
    target = open_model(pair.target, "fp32", []).config
    folder, file = (HeadFiles.open(path, target) for path in head)
    assert is_head(head[1])
    assert file.spec.target_layers == folder.spec.target_layers
    assert file.spec.shapes == folder.spec.shapes
    assert file.spec.kind == folder.spec.kind
    one, other = (each.load(torch.float32, torch.device("cpu")) for each in (folder, file))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_head_is_no_model(head: tuple[Path, Path]) -> None:
    with refused(CheckpointError, "is a head", "draft of its model"):
        open_model(head[1], "fp32", [])
