"""Mixtures in GGUF: experts of every type are read one by one, in memory and from disk, and say what llama.cpp says."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offspec import Engine
from offspec.backends.weights import dense
from offspec.checkpoints.experts import by_expert
from offspec.checkpoints.gguf import translated
from offspec.drafts.model_draft import ModelDraft
from offspec.errors import CheckpointError
from offspec.loaded_target import LoadedTarget
from offspec.loaders.files.checkpoint import TensorInfo
from offspec.loaders.files.gguf_file import read_model
from offspec.loaders.formats.gguf import QUANTISED
from offspec.model.decoder import Decoder
from offspec.text.tokenizer import Tokenizer

from ... import fakes
from ...fakes import Family, TinyModel, build
from ...gguf_models import write_model
from ...llama_cpp import LlamaCpp
from ...loaders.gguf_samples import NAMES, oracle, random_blocks
from ...pair import Pair
from ...refusals import refused
from ..model.families.test_families import PLAIN, TREES, perturbed, says, streamed
from .test_gguf_models import NUM_TOKENS, PROMPT, decoder_of, worst_gap

Packed = Mapping[str, tuple[str, Tensor]]  # GGUF's name → type and blocks

PARTS = ("gate", "up", "down")
NUM_EXPERTS = 3
WIDE = {"hidden_size": 256, "head_dim": 32, "num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2}
# Rows of 40 outputs, which are no whole number of a kernel's; down projections of 40 inputs, which have no blocks.
ODD = Family("qwen3_moe", {**fakes.FAMILIES["qwen3-moe"].settings, "mlp_only_layers": []})
ROUNDED = 0.1  # of logits that lie some units apart: llama.cpp rounds the other factor of packed matrices to 8 bits


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return build(ODD, tmp_path_factory.mktemp("odd"))


@pytest.fixture(scope="module")
def of_all_types(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Packed]:
    """A file whose experts have every type, three of them in a layer, and these by their names."""
    folder, num_layers = tmp_path_factory.mktemp("types"), -(-len(NAMES) // len(PARTS))
    settings = {**WIDE, "moe_intermediate_size": 256, "num_hidden_layers": num_layers}
    names = [f"blk.{layer}.ffn_{part}_exps.weight" for layer in range(num_layers) for part in PARTS]
    packed = {name: (kind, blocks_of(kind)) for name, kind in zip(names, NAMES, strict=False)}
    return written(build(Family("qwen3_moe", settings), folder / "model"), folder, packed), packed


def blocks_of(kind: str) -> Tensor:
    """[experts, 256, bytes of a row]"""
    return random_blocks(kind, NUM_EXPERTS * 256, 256 // QUANTISED[kind].num_weights).view(NUM_EXPERTS, 256, -1)


def written(model: TinyModel, folder: Path, packed: Mapping[str, tuple[str, Tensor]] = {}, **kinds: str) -> Path:
    tensors, config = dict(model.reference.state_dict()), model.reference.config.to_dict()
    kinds |= {name: kind for name, (kind, _) in packed.items()}
    blocks = {name: content.numpy() for name, (_, content) in packed.items()}
    return write_model(folder / "model.gguf", config, tensors, kinds, blocks=blocks)


def experts_of(decoder: Decoder) -> Iterator[tuple[str, int, Tensor]]:
    """GGUF's name of the tensor, the expert's number and the numbers of each matrix of a model's experts."""
    for layer in range(decoder.config.num_layers):
        for group in decoder.weights.experts(layer, dict.fromkeys(range(NUM_EXPERTS), 1)):
            for number, weights in group.items():
                for name, weight in weights.items():
                    part = name.split("_")[0]
                    yield f"blk.{layer}.ffn_{part}_exps.weight", number, dense(weight, torch.float32)


def test_experts_of_every_type_are_slices_of_their_tensors(of_all_types: tuple[Path, Packed]) -> None:
    """In memory, and read from disk one by one."""
    path, packed = of_all_types
    with closing(LoadedTarget(streamed(path))) as from_disk:
        for decoder in (decoder_of(path), from_disk.decoder):
            read = {(name, number): matrix for name, number, matrix in experts_of(decoder)}
            for name, (kind, blocks) in packed.items():
                for number in range(NUM_EXPERTS):
                    assert torch.equal(read[name, number], oracle(kind, blocks[number])), (kind, number)


def test_experts_of_all_types_say_what_llama_cpp_says(of_all_types: tuple[Path, Packed], llama_cpp: LlamaCpp) -> None:
    path, _ = of_all_types
    text = llama_cpp.greedy(path, PROMPT, NUM_TOKENS)
    assert len(text) == NUM_TOKENS
    assert worst_gap(decoder_of(path), PROMPT, text) < ROUNDED


def test_plain_trees_and_streamed_are_one_text(odd: TinyModel, pair: Pair, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(pair.target)
    draft = ModelDraft(perturbed(decoder_of(written(odd, tmp_path))), "draft")
    path = written(odd, tmp_path, gate_exps="Q8_0", up_exps="MXFP4")
    engine = Engine(LoadedTarget(decoder_of(path)), tokenizer, draft)
    plain, num_tokens = says(engine, PLAIN)
    with closing(LoadedTarget(streamed(path))) as from_disk:
        text, num_passes = says(Engine(from_disk, tokenizer, draft), TREES)
    assert text == plain
    assert num_passes < num_tokens


def test_a_tensor_for_each_expert_is_read_as_one_for_all(odd: TinyModel, tmp_path: Path) -> None:
    """As llama.cpp wrote Mixtral until April 2024."""
    model = read_model(written(odd, tmp_path, up_exps="Q8_0"))
    split = dict(model.tensors)
    for name, info in model.tensors.items():
        if match := re.fullmatch(r"(blk\.\d\.ffn_\w+)_exps\.weight", name):
            del split[name]
            for number, part in enumerate(slices(info)):
                split[f"{match[1]}.{number}.weight"] = replace(part, name=f"{match[1]}.{number}.weight")
    apart = translated(replace(model, tensors=split))
    assert dict(apart.tensors) == dict(by_expert(translated(model)).tensors)


def slices(info: TensorInfo) -> list[TensorInfo]:
    """Of each expert."""
    nbytes = info.nbytes // info.shape[0]
    return [
        replace(info, shape=info.shape[1:], nbytes=nbytes, offset=info.offset + i * nbytes)
        for i in range(info.shape[0])
    ]


def test_experts_of_an_architecture_without_them_are_refused(odd: TinyModel, tmp_path: Path) -> None:
    model = read_model(written(odd, tmp_path))
    metadata = {key.replace("qwen3moe", "qwen3"): value for key, value in model.metadata.items()}
    with refused(CheckpointError, model.path, "mixture of experts", "qwen3"):
        translated(replace(model, metadata={**metadata, "general.architecture": "qwen3"}))
