"""Sizes that headers and configs claim, each by itself: refused, or read in little memory and time.

They are compared with what the files hold before anything of that size is made. What is tried is a number that is none,
the largest that a config may name, and some beyond the integers of 32 and 64 bits.
"""

from __future__ import annotations

import copy
import json
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from offspec.checkpoints.gguf import translated
from offspec.checkpoints.head_files import HeadFiles
from offspec.checkpoints.opening import model_to_plan, open_model
from offspec.errors import CheckpointError
from offspec.loaders.files.gguf_file import read_model
from offspec.model.config import read_config
from offspec.model.decoder import wanted_shapes

from ..fakes import FAMILIES, TinyModel, build, config_json
from ..offspec.checkpoints.test_gguf_models import OWN, gguf_of
from ..offspec.checkpoints.test_mistral import write_mistral
from ..offspec.drafts.test_head_draft import HEADS
from ..offspec.model.heads.head_twins import write_folder
from ..pair import Pair, build_pair
from ..refusals import refused
from .damage import judge

if sys.platform != "linux":
    pytest.skip("limits on memory as Linux has them", allow_module_level=True)

import resource

SIZES = (0, -1, 2**31 - 1, 2**31, 2**63)
MOST_BYTES = 2**30  # more than before
GetModel = Callable[[str], TinyModel]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"), num_layers=3)


@contextmanager
def little_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + MOST_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def places(content: Any) -> Iterator[tuple[Any, ...]]:
    """The paths to all integers in JSON."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        if isinstance(value, (dict, list)):
            yield from ((key, *rest) for rest in places(value))
        elif isinstance(value, int) and not isinstance(value, bool):
            yield (key,)


def judge_sizes(name: str, content: Mapping[str, Any], read: Callable[[dict[str, Any]], object]) -> None:
    """`read` gets the content with each size in each place, and may refuse it."""
    for path in places(content):
        for size in SIZES:
            changed = holder = copy.deepcopy(dict(content))
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = size
            with little_memory():
                judge(f"{name}: {path} is {size}", lambda changed=changed: read(changed))  # type: ignore[misc]


def in_file(file: Path, read: Callable[[], object]) -> Callable[[dict[str, Any]], object]:
    """A function that writes JSON to `file` and reads what it belongs to."""

    def act(content: dict[str, Any]) -> None:
        file.write_text(json.dumps(content))
        read()

    return act


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted({family.model_type for family in FAMILIES.values()}))
def test_sizes_in_a_config_without_weights(model_type: str, tmp_path: Path) -> None:
    family = next(family for family in FAMILIES.values() if family.model_type == model_type)
    read = in_file(tmp_path / "config.json", lambda: model_to_plan(tmp_path, None, "auto", []))
    judge_sizes(model_type, config_json(family), read)


def test_many_layers_of_many_experts() -> None:
    """Each number may be that large, and their product is too large."""
    config = config_json(FAMILIES["mixtral"]) | {"num_hidden_layers": 1000, "num_local_experts": 10_000}
    with little_memory(), refused(CheckpointError, 1000, 10_000, "experts"):
        wanted_shapes(read_config(config))


def test_sizes_in_a_config_of_weights(pair: Pair, tmp_path: Path) -> None:
    content = json.loads((pair.target / "config.json").read_text())
    for file in pair.target.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    judge_sizes("llama", content, in_file(tmp_path / "config.json", lambda: open_model(tmp_path, "fp32", [])))


@pytest.mark.parametrize("kind", HEADS)
def test_sizes_in_the_config_of_a_head(kind: str, pair: Pair, tmp_path: Path) -> None:
    config, tensors = HEADS[kind]
    folder, target = write_folder(tmp_path, config, tensors()), open_model(pair.target, "fp32", []).config
    read = in_file(folder / "config.json", lambda: HeadFiles.open(folder, target))
    read(config)
    judge_sizes(kind, config, read)
    for key in {"num_hidden_layers", "max_position_embeddings", "head_dim"} - config.keys():
        judge_sizes(kind, {key: 1}, lambda changed: read({**config, **changed}))


def test_sizes_in_a_header(pair: Pair, tmp_path: Path) -> None:
    for file in pair.target.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (weights := tmp_path / "model.safetensors").unlink()
    content = (pair.target / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    few = dict(list(header.items())[:4])

    def read(changed: dict[str, Any]) -> None:
        text = json.dumps({**header, **changed}).encode()
        weights.write_bytes(struct.pack("<Q", len(text)) + text + data)
        open_model(tmp_path, "fp32", [])

    judge_sizes("header", few, read)
    for size in (0, 1, 2**24, 2**31, 2**63):
        weights.write_bytes(struct.pack("<Q", size) + content[8:])
        with little_memory():
            judge(f"header of {size} bytes", lambda: open_model(tmp_path, "fp32", []))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-gqa", "gemma3", "gemma4", "smollm3", "qwen3.5", "lfm2", "exaone4-full"])
def test_sizes_in_a_gguf_files_metadata(family: str, tiny_model: GetModel, tmp_path: Path) -> None:
    """A list by layer of 2**31 layers would have 17 GB."""
    (tmp_path / "model").mkdir()
    model = build(OWN[family], tmp_path / "model") if family in OWN else tiny_model(family)
    file = read_model(gguf_of(model, tmp_path))
    numbers = {key: value for key, value in file.metadata.items() if not key.startswith("tokenizer.")}

    def read(changed: dict[str, Any]) -> None:
        read_config(translated(replace(file, metadata={**file.metadata, **changed})).config)

    judge_sizes(family, numbers, read)


@pytest.mark.slow
def test_sizes_in_params_json(tiny_model: GetModel, tmp_path: Path) -> None:
    model = tiny_model("ministral")
    config = json.loads((model.folder / "config.json").read_text())
    folder = write_mistral(
        tmp_path / "folder", config, load_file(model.folder / "model.safetensors"), sliding_window=[8]
    )
    params = json.loads((folder / "params.json").read_text())
    judge_sizes("params", params, in_file(folder / "params.json", lambda: open_model(folder, "fp32", [])))
