"""A converted checkpoint is what transformers would have saved, whatever interrupted it; or it is not there."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from offspec import convert
from offspec.errors import CheckpointError, MissingWeightsError, StorageError, UsageError
from offspec.loaders import convert as converting
from offspec.loaders.files import shards
from offspec.loaders.files.checkpoint import num_bytes
from offspec.loaders.files.containers import open_checkpoint
from offspec.loaders.files.records import Record
from offspec.loaders.files.safetensors_folder import INDEX_FILE, read_header
from offspec.loaders.files.safetensors_folder import UNFINISHED_MARKER as MARKER
from offspec.loaders.formats import bf16_bits, bf16_packed, stored_weights
from offspec.loaders.formats.four_bit import pack_4bit
from offspec.loaders.formats.process_state import bitsandbytes_functional
from offspec.loaders.params import LOSSLESS_FORMAT, ConvertParams
from offspec.loaders.streaming.weights import split_names

from ..refusals import refused
from .fakes import LAYER_PREFIX

Tensors = dict[str, Tensor]
NUM_LAYERS = 3
KEEP = ConvertParams("keep")
PACKED = ConvertParams(LOSSLESS_FORMAT)


def toy_tensors(dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Layers of differing size, with an odd matrix among them."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    tensors = {
        "lm_head.weight": noise(50, 32),
        "model.embed_tokens.weight": noise(50, 32),
        "model.norm.weight": noise(32),
    }
    for index in range(NUM_LAYERS):
        prefix = f"model.layers.{index}"
        tensors[f"{prefix}.mlp.up_proj.weight"] = noise(33 + index, 32)
        tensors[f"{prefix}.mlp.down_proj.weight"] = noise(32, 33 + index)
        tensors[f"{prefix}.mlp.up_proj.bias"] = noise(33 + index)
        tensors[f"{prefix}.input_layernorm.weight"] = noise(32)
    return tensors


def write(folder: Path, tensors: Tensors, num_shards: int = 1) -> Path:
    """A checkpoint, scattered over shards in such a way that no layer lies in one of them."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "toy", "torch_dtype": "bfloat16"}')
    (folder / "tokenizer.json").write_text('{"é": 1}', encoding="utf-8")
    (folder / "LICENSE").write_text("terms")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (folder / "training_args.bin").write_bytes(b"a pickle")
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map = {name: f"part-{i % num_shards}.safetensors" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, folder / shard)
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "source", toy_tensors(), num_shards=3)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "made" / "target"


def loaded(folder: Path) -> Tensors:
    """Every tensor, as the safetensors library reads it."""
    tensors = {}
    for path in {info.path for info in open_checkpoint(folder).tensors.values()}:
        with safe_open(path, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    return tensors


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def same(found: Tensors, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype
        and found[name].shape == tensor.shape
        and torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        for name, tensor in expected.items()
    )


def is_multiplied(name: str) -> bool:
    return name.startswith(LAYER_PREFIX) and name.endswith("proj.weight")


# ------------------------------------------------------------------------------------------------------------- results


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_keep_changes_no_bit(dtype: torch.dtype, num_shards: int, tmp_path: Path, target: Path) -> None:
    tensors = toy_tensors(dtype)
    source = write(tmp_path / "source", tensors, num_shards)
    done = convert(source, target, KEEP)
    assert same(loaded(target), tensors)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    assert (done.source_bytes, done.result_bytes, done.num_resumed) == (nbytes, nbytes, 0)
    kept = ("config.json", "tokenizer.json", "LICENSE", "additional_chat_templates/tools.jinja")
    assert all((target / name).read_bytes() == (source / name).read_bytes() for name in kept)
    made = {f"model-{i:05d}-of-{done.num_files:05d}.safetensors" for i in range(1, done.num_files + 1)}
    assert contents(target).keys() == {*kept, *made, INDEX_FILE}


@pytest.mark.each_value
@pytest.mark.parametrize("params", [ConvertParams(), ConvertParams("nf4", False), ConvertParams("fp4")], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_matrices_of_layers_are_packed_and_all_else_is_kept(
    dtype: torch.dtype, params: ConvertParams, tmp_path: Path, target: Path
) -> None:
    tensors = toy_tensors(dtype)
    convert(write(tmp_path / "source", tensors), target, params)
    expected: Tensors = {}
    for name, tensor in tensors.items():
        packed = pack_4bit(tensor, params.format, nested=params.double_quant) if is_multiplied(name) else {"": tensor}
        expected |= {name + suffix: part for suffix, part in packed.items()}
    assert same(loaded(target), expected)
    said = json.loads((target / "config.json").read_text())
    assert said.pop("quantization_config") == {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_quant_type": params.format,
        "bnb_4bit_use_double_quant": params.double_quant,
        "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": ["lm_head"],
        "llm_int8_threshold": 6.0,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
    }
    assert said == {"model_type": "toy", "torch_dtype": "bfloat16"}
    index = json.loads((target / INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())


def test_packed_bf16_comes_back_as_it_was(tmp_path: Path, target: Path) -> None:
    tensors = toy_tensors()
    source = write(tmp_path / "source", tensors, num_shards=3)
    done = convert(source, target, PACKED)
    found = loaded(target)
    wide = [name for name in tensors if "up_proj.weight" in name]  # rows of whole blocks; the others would not shrink
    for name, tensor in tensors.items():
        assert (name not in found) == (name in wide)
        assert name in wide or same({name: found[name]}, {name: tensor})
    assert [name for name in done.bits_per_weight if done.bits_per_weight[name] < 16] == wide
    assert done.bits_per_weight.keys() == {name for name in tensors if is_multiplied(name)}
    sizes = [sum(part.nbytes for part_name, part in found.items() if part_name.startswith(name)) for name in wide]
    bits = [8 * size / tensors[name].numel() for size, name in zip(sizes, wide, strict=True)]
    assert bits == [done.bits_per_weight[name] for name in wide]
    assert done.result_bytes == sum(tensor.nbytes for tensor in found.values()) < done.source_bytes
    assert "quantization_config" not in json.loads((target / "config.json").read_text())
    convert(target, tmp_path / "back", ConvertParams("bf16"))
    assert same(loaded(tmp_path / "back"), tensors)
    convert(target, tmp_path / "kept", KEEP)
    assert same(loaded(tmp_path / "kept"), found)
    for params in (ConvertParams("nf4"), ConvertParams("fp32")):
        convert(target, tmp_path / params.format, params)
        convert(source, tmp_path / f"{params.format}-plainly", params)
        assert same(loaded(tmp_path / params.format), loaded(tmp_path / f"{params.format}-plainly"))


def test_nan_and_infinity_are_packed_as_they_are(tmp_path: Path, target: Path) -> None:
    tensors = toy_tensors()
    matrix = tensors["model.layers.1.mlp.up_proj.weight"]
    matrix.view(torch.int16)[0, :5] = torch.tensor([0x7F81, -1, 0x7F80, 1, -(1 << 15)]).to(torch.int16)
    convert(write(tmp_path / "source", tensors), target, PACKED)
    convert(target, tmp_path / "back", ConvertParams("bf16"))
    assert same(loaded(tmp_path / "back"), tensors)


def test_what_packed_bf16_is_not_made_of(tmp_path: Path, target: Path) -> None:
    for dtype, word in ((torch.float16, "F16"), (torch.float32, "F32")):
        source = write(tmp_path / word, toy_tensors(dtype))
        with refused(CheckpointError, source, word, LOSSLESS_FORMAT, "`format=bf16`"):
            convert(source, target, PACKED)
    source = write(tmp_path / "source", toy_tensors())
    convert(source, tmp_path / "nf4")
    with refused(CheckpointError, tmp_path / "nf4", "quantised", "nf4", "`format=keep`"):
        convert(tmp_path / "nf4", target, PACKED)
    convert(source, tmp_path / "packed", PACKED)
    with refused(CheckpointError, tmp_path / "packed", "already", "`format=keep`"):
        convert(tmp_path / "packed", target, PACKED)
    assert not target.exists()


def test_a_memory_that_changes_bits_is_found(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each matrix is unpacked again before it is written."""

    def harmed(matrix: Tensor) -> bf16_bits.PackedBits | None:
        bits = bf16_bits.pack(matrix)
        if bits is not None:
            bits.low[3, 5] ^= 4
        return bits

    monkeypatch.setattr(bf16_packed, "pack", harmed)
    with refused(CheckpointError, "up_proj.weight", "other bits", "memory"):
        convert(write(tmp_path / "source", toy_tensors()), target, PACKED)
    with pytest.raises(CheckpointError):
        open_checkpoint(target)


@pytest.mark.parametrize("harm", ["truncate", "cut off the exceptions"])
def test_a_damaged_packed_checkpoint_is_refused(harm: str, tmp_path: Path, target: Path) -> None:
    convert(write(tmp_path / "source", toy_tensors()), target, PACKED)
    file = target / "model-00003-of-00004.safetensors"
    if harm == "truncate":
        os.truncate(file, file.stat().st_size - 1)
        with refused(CheckpointError, file):
            open_checkpoint(target)
        return
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight.bf16_groups"
    save_file(tensors | {name: tensors[name][:, :-3].contiguous()}, file, {"format": "pt"})
    with refused(CheckpointError, file, "up_proj.weight", "bf16_groups", "damaged"):
        stored_weights(open_checkpoint(target).tensors)


@pytest.mark.parametrize("params", [KEEP, ConvertParams(), ConvertParams(double_quant=False)], ids=str)
def test_a_layer_is_one_aligned_read(params: ConvertParams, source: Path, target: Path) -> None:
    convert(source, target, params)
    infos = open_checkpoint(target).tensors
    layers, _ = split_names(infos, LAYER_PREFIX)
    for layer in layers:
        tensors = [infos[name] for name in layer.values()]
        record = Record.of(tensors)
        assert len(record.extents) == 1
        assert record.extents[0].offset == shards.PAGE_BYTES
        assert all(info.offset % {"BF16": 2, "F32": 4}.get(info.dtype, 1) == 0 for info in tensors)
        assert record.read_bytes == sum(info.nbytes for info in tensors)
    assert len({next(iter(layer)) for layer in layers}) == 1


def test_a_quantised_checkpoint_can_be_kept(source: Path, tmp_path: Path, target: Path) -> None:
    convert(source, tmp_path / "nf4")
    convert(tmp_path / "nf4", target, KEEP)
    assert contents(target) == contents(tmp_path / "nf4")


def test_transformers_reads_the_result_and_says_the_same(tmp_path: Path, tiny_model: Callable[[str], Any]) -> None:
    """Against transformers' own quantisation of the same weights: equal logits, from equal bytes."""
    bitsandbytes_functional()
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    source = tiny_model("llama-biased").folder
    convert(source, tmp_path / "ours")
    options: dict[str, Any] = {"device_map": "cpu", "dtype": torch.float32}
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", **options)
    asked = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    theirs = AutoModelForCausalLM.from_pretrained(source, quantization_config=asked, **options)
    assert ours.model.layers[0].mlp.up_proj.weight.quant_state.nested
    tokens = torch.arange(1, 40)[None]
    with torch.no_grad():  # train: in eval mode some CPUs get the weights repacked, with scales rounded to bf16
        assert torch.equal(ours.train()(tokens).logits, theirs.train()(tokens).logits)
    theirs.save_pretrained(tmp_path / "theirs")
    assert same(loaded(tmp_path / "ours"), loaded(tmp_path / "theirs"))


def test_all_that_belongs_to_a_hub_id_comes_with_it(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is downloaded is what is carried over."""
    published = write(tmp_path / "published", toy_tensors(), num_shards=3)
    beside = ("tokenizer.model", "added_tokens.json", "NOTICE", "USE_POLICY.md", "chat_template.jinja")
    for name in beside:
        (published / name).write_text("terms")

    def download(repo_id: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        for name in huggingface_hub.utils.filter_repo_objects(contents(published), allow_patterns=allow_patterns):
            (tmp_path / "cache" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(published / name, tmp_path / "cache" / name)
        return str(tmp_path / "cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    convert("org/name", target, KEEP)
    assert {*beside, "tokenizer.json", "LICENSE", "additional_chat_templates/tools.jinja"} < contents(target).keys()
    assert same(loaded(target), toy_tensors())


def test_progress_counts_the_bytes_of_the_source(source: Path, target: Path) -> None:
    told: list[tuple[int, int]] = []
    total = num_bytes(open_checkpoint(source))
    convert(source, target, progress=lambda *counts: told.append(counts))
    assert told[0] == (0, total)
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


# ------------------------------------------------------------------------------------------------------ interruptions


class StopError(Exception):
    """Stands for whatever ends a run."""


def stop_at(monkeypatch: pytest.MonkeyPatch, function: str, call: int) -> None:
    """The `call`-th call of a function of `shards` or `convert` ends the run."""
    owner: Any = shards if hasattr(shards, function) else converting
    real, calls = getattr(owner, function), iter(range(10_000))

    def counting(*args: Any, **more: Any) -> Any:
        if next(calls) == call:
            raise StopError
        return real(*args, **more)

    monkeypatch.setattr(owner, function, counting)


@pytest.mark.each_value
@pytest.mark.parametrize("params", [KEEP, ConvertParams(), PACKED], ids=lambda params: params.format)
@pytest.mark.parametrize("function", ["_write", "_read_back", "sync_folder", "read_whole", "_fill"])
@pytest.mark.slow
def test_stopped_anywhere_it_goes_on(
    function: str, params: ConvertParams, source: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "whole", params)
    expected = contents(tmp_path / "whole")
    for call in range(100):
        is_stopped = [stops(monkeypatch, function, number, source, target, params) for number in (call, 1)]
        assert is_whole_or_refused(target, expected)
        if MARKER in contents(target):
            convert(source, target, params)
        assert contents(target) == expected
        shutil.rmtree(target)
        if not is_stopped[0]:
            break
    assert call > 5 or (function == "read_whole" and params is KEEP)


def stops(
    monkeypatch: pytest.MonkeyPatch, function: str, call: int, source: Path, target: Path, params: ConvertParams
) -> bool:
    """Whether the run was stopped by `stop_at`; a target that is finished already is left alone."""
    if target.exists() and MARKER not in contents(target):
        return False
    with monkeypatch.context() as patch:
        stop_at(patch, function, call)
        try:
            convert(source, target, params)
        except StopError:
            return True
    return False


def is_whole_or_refused(target: Path, expected: dict[str, bytes]) -> bool:
    try:
        open_checkpoint(target)
    except CheckpointError as exc:
        return "unfinished" in str(exc) or not any(path.suffix == ".safetensors" for path in target.iterdir())
    return {name: content for name, content in contents(target).items() if name != MARKER} == expected


KILLED = """
import sys, time
from pathlib import Path
from offspec.loaders.files import shards
from offspec import ConvertParams, convert

real, writes = shards.write_verified, iter(range(99))

def slow(path, content, *later):
    def chunks():
        for i, chunk in enumerate(content):
            yield chunk
            if number == 2 and i == 2:
                print("now", flush=True)
                time.sleep(3600)
    number = next(writes)
    return real(path, chunks(), *later)

shards.write_verified = slow
convert(Path(sys.argv[1]), Path(sys.argv[2]), ConvertParams(sys.argv[3]))
"""


@pytest.mark.slow
def test_killed_in_the_middle_of_a_file_it_goes_on(source: Path, target: Path, tmp_path: Path) -> None:
    params = PACKED
    arguments = [sys.executable, "-c", KILLED, str(source), str(target), params.format]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"now\n"
        with refused(UsageError, "another process"):
            convert(source, target, params)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(300)
        process.stdout.close()
    left = {path.name for path in target.iterdir()}
    assert MARKER in left
    assert any(name.endswith(".part") for name in left)
    with refused(MissingWeightsError, target, "unfinished"):
        open_checkpoint(target)
    told: list[int] = []
    done = convert(source, target, params, progress=lambda bytes_done, _: told.append(bytes_done))
    assert done.num_resumed in (1, 2)  # the last whole one may not be verified yet
    assert told[0] > 0
    convert(source, tmp_path / "whole", params)
    assert contents(target) == contents(tmp_path / "whole")


@pytest.mark.parametrize("num_files", [0, 2])
def test_a_folder_that_another_process_has_made_anew(
    num_files: int, source: Path, target: Path, tmp_path: Path
) -> None:
    """The first one ends with an error, and does no harm to the second one's result."""

    def make_anew(bytes_done: int, bytes_total: int) -> None:
        if not (tmp_path / "removed").exists() and len(list(target.glob("*.safetensors"))) >= num_files:
            target.rename(tmp_path / "removed")
            convert(source, target, KEEP)

    with refused(StorageError, target, "removed", "process"):
        convert(source, target, progress=make_anew)
    convert(source, tmp_path / "whole", KEEP)
    assert contents(target) == contents(tmp_path / "whole")


@pytest.mark.parametrize("harm", ["rmtree", "unlink"])
def test_a_folder_that_is_removed_meanwhile(harm: str, source: Path, target: Path) -> None:
    def remove(bytes_done: int, bytes_total: int) -> None:
        if target.exists():
            shutil.rmtree(target) if harm == "rmtree" else (target / MARKER).unlink(missing_ok=True)

    with refused(StorageError, "removed", "repeat"):
        convert(source, target, progress=remove)
    assert not target.exists() or not (target / INDEX_FILE).exists()


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    """Each writes and verifies its own; the last one's stays."""
    file = tmp_path / "file"

    def content() -> Iterator[memoryview]:
        yield memoryview(b"first")
        shards.write_verified(file, [memoryview(b"the other one's")])
        assert file.read_bytes() == b"the other one's"
        yield memoryview(b" and last")

    shards.write_verified(file, content())
    assert contents(tmp_path) == {"file": b"first and last"}


def test_a_disk_that_is_too_small_is_refused_first(source: Path, small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(2**20 + 2**19))
    with refused(StorageError, small_disk / "target", "free"):
        convert(source, small_disk / "target", KEEP)
    (small_disk / "ballast").unlink()
    convert(source, small_disk / "target", KEEP)


def test_what_a_killed_run_left_of_a_file_makes_room_first(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, "_read_back", 1)
        with pytest.raises(StopError):
            convert(source, target, KEEP)
    half = min(target.glob("*.part"))  # the next file may have been begun, too
    left = []

    def look(*args: object) -> None:
        left.extend(target.glob("*.part"))

    monkeypatch.setattr(converting, "_check_space", look)
    before = half.read_bytes()
    with refused(UsageError, "unfinished"):
        convert(source, target)
    assert half.read_bytes() == before
    convert(source, target, KEEP)
    assert left == []


@pytest.mark.parametrize("free_bytes", [0, 4096 * 6])
def test_a_disk_that_fills_up_meanwhile(
    free_bytes: int, source: Path, small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ballast, target = small_disk / "ballast", small_disk / "target"

    def fill_up(*args: object) -> None:  # behind the back of the check
        ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - free_bytes))

    with monkeypatch.context() as patch:
        patch.setattr(converting, "_check_space", fill_up)
        with refused(StorageError, "no space left", "repeat"):
            convert(source, target)
    assert not list(target.glob("*.part"))
    with pytest.raises(CheckpointError):
        open_checkpoint(target)
    ballast.unlink()
    convert(source, target)
    convert(source, tmp_path / "whole")
    assert contents(target) == contents(tmp_path / "whole")


def test_a_disk_that_is_full_as_the_system_tells_it(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same where no file system can be mounted."""

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(shards.os, "fsync", full)
        with refused(StorageError, "no space left"):
            convert(source, target)
    convert(source, target)
    assert open_checkpoint(target).tensors


def test_a_marker_that_cannot_be_written_is_named(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same where no file system can be mounted: closing the file fails once more."""

    class Full(io.FileIO):
        def write(self, content: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real = Path.open

    def open_full(path: Path, mode: str = "r", **more: Any) -> Any:
        if path.name != MARKER:
            return real(path, mode, **more)
        return io.TextIOWrapper(io.BufferedRandom(Full(path, mode)), **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_full)
        with refused(StorageError, target / MARKER, "no space left"):
            convert(source, target)
    convert(source, target)


def test_a_disk_that_lies(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_read_back", lambda file: (os.fstat(file.fileno()).st_size, 0))
    with refused(StorageError, target / "model-00001-of-00004.safetensors", "memory"):
        convert(source, target)
    with pytest.raises(CheckpointError):
        open_checkpoint(target)


@pytest.mark.parametrize("harm", ["truncate", "delete"])
def test_a_source_that_changes_meanwhile(harm: str, source: Path, target: Path) -> None:
    victim, calls = source / "part-1.safetensors", iter(range(99))

    def progress(bytes_done: int, bytes_total: int) -> None:
        if next(calls) == 4:
            victim.unlink() if harm == "delete" else os.truncate(victim, 3000)

    with refused(CheckpointError, "part-1.safetensors"):
        convert(source, target, progress=progress)
    with pytest.raises(CheckpointError):
        open_checkpoint(target)


# ------------------------------------------------------------------------------------------------------------ refusals


def unfinished(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch, params: ConvertParams) -> None:
    with monkeypatch.context() as patch:
        stop_at(patch, "_write", 2)
        with pytest.raises(StopError):
            convert(source, target, params)


def test_an_unfinished_result_of_another_kind(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished(source, target, monkeypatch, ConvertParams("fp4"))
    before = contents(target)
    with refused(UsageError, "fp4"):
        convert(source, target)
    with refused(UsageError, "double_quant"):
        convert(source, target, ConvertParams("fp4", False))
    os.utime(source / "part-0.safetensors", ns=(0, 0))
    with refused(UsageError, "other weights"):
        convert(source, target, ConvertParams("fp4"))
    assert contents(target) == before


@pytest.mark.parametrize("said", ["", "{}", "[" * 100_000])
def test_a_marker_that_says_nothing(said: str, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished(source, target, monkeypatch, KEEP)
    (target / MARKER).write_text(said)
    with refused(UsageError, "unfinished"):
        convert(source, target, KEEP)
    for path in target.glob("model-*"):
        path.unlink()
    convert(source, target, KEEP)  # with nothing made there is nothing to mix up
    assert not (target / MARKER).exists()


def test_a_finished_file_that_was_replaced_is_made_again(
    source: Path, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unfinished(source, target, monkeypatch, KEEP)
    (first, *_) = sorted(target.glob("model-*.safetensors"))
    save_file({"other": torch.ones(1)}, first)
    convert(source, target, KEEP)
    convert(source, tmp_path / "whole", KEEP)
    assert contents(target) == contents(tmp_path / "whole")


def test_a_target_that_is_taken(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("years of work")
    with refused(UsageError, "not empty"):
        convert(source, tmp_path / "full")
    assert contents(tmp_path / "full") == {"thesis.tex": b"years of work"}
    with refused(UsageError, "file"):
        convert(source, tmp_path / "full" / "thesis.tex")
    convert(source, tmp_path / "done", KEEP)
    with refused(UsageError, "not empty"):
        convert(source, tmp_path / "done", KEEP)
    (tmp_path / "link").symlink_to(source)
    for inside in (source, source / "deeper" / "still", tmp_path, tmp_path / "link", source / ".." / "source"):
        with refused(UsageError, "new folder"):
            convert(source, inside)
    assert not (source / "deeper").exists()
    monkeypatch.chdir(source)
    with refused(UsageError, "new folder"):
        convert(Path("."), Path("target"))


@pytest.mark.parametrize("name", ["LICENSE", "config.json", "additional_chat_templates/tools.jinja"])
def test_a_link_out_of_the_source_is_not_followed(name: str, source: Path, tmp_path: Path, target: Path) -> None:
    (secret := tmp_path / "secret").write_text('{"model_type": "toy", "key": "mine alone"}')
    (source / name).unlink()
    (source / name).symlink_to(secret)
    with refused(CheckpointError, source / name, "link", secret, "outside"):
        convert(source, target, KEEP)
    assert not target.exists()


def test_a_folder_of_links_out_of_the_source_is_not_followed(source: Path, tmp_path: Path, target: Path) -> None:
    shutil.move(source / "additional_chat_templates", tmp_path / "elsewhere")
    (source / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    with refused(CheckpointError, "link", tmp_path / "elsewhere", "outside"):
        convert(source, target, KEEP)


def test_links_within_the_source_and_into_the_hubs_blobs_are_followed(source: Path, tmp_path: Path) -> None:
    (source / "NOTICE").symlink_to("LICENSE")
    convert(source, tmp_path / "of folder", KEEP)
    assert (tmp_path / "of folder" / "NOTICE").read_text() == "terms"
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "123"
    shutil.copytree(source, snapshot)
    blobs.mkdir()
    for name in ("LICENSE", "config.json", "tokenizer.json"):
        shutil.move(snapshot / name, blobs / name)
        (snapshot / name).symlink_to(Path("..", "..", "blobs", name))
    convert(snapshot, tmp_path / "of hub", KEEP)
    assert (tmp_path / "of hub" / "LICENSE").read_text() == "terms"


def test_a_target_that_cannot_be_written(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", forbidden)
    with refused(StorageError, "Permission denied"):
        convert(source, target)


def test_what_is_quantised_already(source: Path, tmp_path: Path, target: Path) -> None:
    convert(source, tmp_path / "nf4")
    with refused(CheckpointError, tmp_path / "nf4", "already", "`format=keep`"):
        convert(tmp_path / "nf4", target)
    shutil.copyfile(source / "config.json", tmp_path / "nf4" / "config.json")  # the tensors still tell
    with refused(CheckpointError, tmp_path / "nf4", "already"):
        convert(tmp_path / "nf4", target)
    assert not target.exists()


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ({"model.layers.0.experts": torch.ones(2, 3, 4)}, "linear"),
        ({"model.layers.0.table": torch.ones(2, 3)}, "linear"),
        ({"model.layers.0.a.weight": torch.ones(2, 3, dtype=torch.int32)}, "I32"),
        ({"model.layers.0.a.weight": torch.ones(2, 3).to(torch.float8_e4m3fn)}, "fp8"),
        ({"transformer.h.0.a.weight": torch.ones(2, 3)}, "another architecture"),
        ({"model.layers.1.a.weight": torch.ones(2, 3)}, "layer 0"),
    ],
)
def test_a_source_that_cannot_be_quantised(tensors: Tensors, word: str, tmp_path: Path, target: Path) -> None:
    source = write(tmp_path / "source", tensors)
    with refused(CheckpointError, word):
        convert(source, target)
    assert not target.exists()


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, target: Path) -> None:
    tensors = toy_tensors()
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.nan
    with refused(CheckpointError, "layers.1.mlp.up_proj.weight"):
        convert(write(tmp_path / "source", tensors), target)


def test_params_that_cannot_be_meant() -> None:
    for arguments in (("int3",), ("keep", False)):
        with refused(UsageError, arguments[0]):
            ConvertParams(*arguments)  # type: ignore[arg-type]


def test_the_header_is_one_that_both_readers_accept(tmp_path: Path) -> None:
    """Names that JSON has to escape, tensors without elements and without dimensions."""
    content = {'ä\n"': torch.ones(3), "empty": torch.ones(0, 4), "scalar": torch.tensor(1, dtype=torch.uint8)}

    def chunks(tensor: Tensor) -> Callable[[], list[memoryview]]:
        return lambda: [tensor.reshape(-1).view(torch.uint8).numpy().data]

    kinds = {torch.float32: "F32", torch.uint8: "U8"}
    pieces = [shards.ShardPiece(name, kinds[t.dtype], tuple(t.shape), chunks(t)) for name, t in content.items()]
    shards.write_shard(tmp_path / "model.safetensors", pieces)
    assert read_header(tmp_path / "model.safetensors").keys() == content.keys()
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert same({name: file.get_tensor(name) for name in content}, content)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.nightly("converts 300 MB in a process of its own")
def test_memory_is_two_layers_and_a_tensor_per_thread(tmp_path: Path) -> None:
    """128 layers of 2 MiB and a table of 64: what a fresh process takes more than before it began."""
    tensors = {"model.embed_tokens.weight": torch.zeros(16384, 2048, dtype=torch.bfloat16)}
    tensors |= {f"model.layers.{i}.a.weight": torch.ones(1024, 1024, dtype=torch.bfloat16) for i in range(128)}
    source = write(tmp_path / "source", tensors)
    script = """
import sys
from pathlib import Path
from offspec import convert
from offspec.stats import peak_host_bytes
from offspec.loaders.formats import bf16_bits, bf16_packed, stored_weights
from offspec.loaders.formats.four_bit import pack_4bit
from offspec.loaders.formats.process_state import bitsandbytes_functional
import torch
pack_4bit(torch.ones(1024, 1024, dtype=torch.bfloat16))
before = peak_host_bytes()
convert(Path(sys.argv[1]), Path(sys.argv[2]))
print(peak_host_bytes() - before)
"""
    arguments = [sys.executable, "-c", script, str(source), str(tmp_path / "target")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    grown = int(subprocess.run(arguments, env=env, capture_output=True, check=True).stdout)
    assert grown < 110 << 20


def test_a_run_that_is_told_to_stop_leaves_nothing_that_looks_whole(source: Path, target: Path) -> None:
    deadline = time.monotonic() + 300

    def interrupt(done: int, total: int) -> None:
        assert time.monotonic() < deadline
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, target, progress=interrupt)
    with pytest.raises(CheckpointError):
        open_checkpoint(target)
    convert(source, target)
