"""Headers that tell the truth are read; every kind of lie is refused in one line that names the file and the remedy."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors as hub_errors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as load_reference
from safetensors.torch import save, save_file

from offspec.errors import CheckpointError, MissingWeightsError
from offspec.loaders.files.checkpoint import DTYPE_BYTES, Checkpoint, num_bytes
from offspec.loaders.files.containers import open_checkpoint
from offspec.loaders.files.hub import resolve, resolve_files
from offspec.loaders.files.safetensors_folder import read_header
from offspec.loaders.streaming.stored_model import StoredModel

from ...examples import examples
from ...refusals import refused

Json = dict[str, Any]
TENSORS = {
    "embed": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "layers.0.w": torch.arange(6, dtype=torch.float32).reshape(2, 3) + 100,
    "layers.1.w": torch.arange(5, dtype=torch.float32) + 200,
    "scalar": torch.tensor(7.0),
}


def forge(path: Path, header: Json | bytes, data: bytes = b"", *, header_bytes: int | None = None) -> Path:
    """Writes a safetensors file whose header may say anything."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if header_bytes is None else header_bytes) + raw + data)
    return path


def entry(dtype: object = "F32", shape: object = (2, 3), data_offsets: object = (0, 24)) -> Json:
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A complete checkpoint in a single file."""
    (tmp_path / "config.json").write_text('{"model_type": "toy"}')
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The same checkpoint in two shards."""
    (folder / "model.safetensors").unlink()
    shards = {"a.safetensors": ["embed", "layers.0.w"], "b.safetensors": ["layers.1.w", "scalar"]}
    for shard, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, folder / shard)
    write_index(folder, {name: shard for shard, names in shards.items() for name in names})
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def assert_holds_tensors(checkpoint: Checkpoint) -> None:
    assert checkpoint.tensors.keys() == TENSORS.keys()
    for name, info in checkpoint.tensors.items():
        expected = TENSORS[name]
        assert (info.name, info.dtype, info.shape) == (name, "F32", tuple(expected.shape))
        stored = info.path.read_bytes()[info.offset : info.offset + info.nbytes]
        assert stored == expected.numpy().tobytes()


# -------------------------------------------------------------------------------------------------------------- opening


def test_single_file(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert_holds_tensors(checkpoint)
    assert checkpoint.path == folder
    assert checkpoint.config == {"model_type": "toy"}
    assert checkpoint.generation_config == {}
    assert num_bytes(checkpoint) == 4 * (12 + 6 + 5 + 1)


def test_shards(sharded: Path) -> None:
    checkpoint = open_checkpoint(str(sharded))
    assert_holds_tensors(checkpoint)
    assert checkpoint.tensors["scalar"].path == sharded / "b.safetensors"


def test_single_file_goes_before_an_index(folder: Path) -> None:
    write_index(folder, {"embed": "gone.safetensors"})
    assert_holds_tensors(open_checkpoint(folder))


def test_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    assert open_checkpoint(folder).generation_config == {"eos_token_id": 2}


def test_a_byte_order_mark_is_no_fault(folder: Path) -> None:
    (folder / "config.json").write_text('{"a": 1}', encoding="utf-8-sig")
    assert open_checkpoint(folder).config == {"a": 1}


def test_links_may_leave_the_folder_as_in_the_hub_cache(sharded: Path) -> None:
    blobs = sharded / "blobs"
    snapshot = sharded / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    for file in [path for path in sharded.iterdir() if path.is_file()]:
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(blobs / file.name)
    assert_holds_tensors(open_checkpoint(snapshot))


def test_tensors_that_the_index_does_not_name_are_left_out(sharded: Path) -> None:
    write_index(sharded, {"embed": "a.safetensors"})
    assert list(open_checkpoint(sharded).tensors) == ["embed"]


def test_missing_folder(tmp_path: Path) -> None:
    with refused(CheckpointError, "gone", "No such file"):
        open_checkpoint(tmp_path / "gone")


@pytest.mark.each_value
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"{", "JSON"),
        (b"", "JSON"),
        (b"\xff\xfe\xfa", "JSON"),
        (b"[" * 200_000, "JSON"),
        (b"[1]", "object"),
        (b"null", "object"),
    ],
)
def test_bad_json(folder: Path, file: str, content: bytes, what: str) -> None:
    (folder / file).write_bytes(content)
    with refused(CheckpointError, folder / file, what):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "x.pt", "consolidated.00.pth"]
)
def test_pickles_are_refused(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with refused(MissingWeightsError, "code", "save_pretrained", "trust"):
        open_checkpoint(folder)


def test_pickles_beside_safetensors_are_no_matter(folder: Path) -> None:
    (folder / "pytorch_model.bin").touch()
    (folder / "model.gguf").touch()
    assert_holds_tensors(open_checkpoint(folder))


@pytest.mark.parametrize("is_empty", [True, False])
@pytest.mark.parametrize("parent", ["models", "snapshots"])
def test_no_weights(parent: str, is_empty: bool, tmp_path: Path) -> None:
    """Names of the hub's repositories help only with a folder of the hub's cache."""
    folder = tmp_path / parent / "here"
    folder.mkdir(parents=True)
    if not is_empty:
        (folder / "config.json").write_text("{}")
    is_of_the_hub = parent == "snapshots"
    fault = "empty folder" if is_empty and not is_of_the_hub else "model.safetensors"
    with refused(MissingWeightsError, folder, fault, "GGUF") as caught:
        open_checkpoint(folder)
    assert ("org/name" in str(caught.value)) == is_of_the_hub


def test_shards_without_their_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with refused(MissingWeightsError, "shards", "model.safetensors.index.json"):
        open_checkpoint(folder)


# ---------------------------------------------------------------------------------------------------------------- index


def test_missing_shard(sharded: Path) -> None:
    (sharded / "b.safetensors").unlink()
    with refused(MissingWeightsError, "b.safetensors", "1 of 2", "download"):
        open_checkpoint(sharded)


OUTSIDE = ("../x.safetensors", "/etc/passwd", "a/../../x", "..\\x", "C:\\x", "\\\\host\\x", "a\0")


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        *((weight_map, ["weight_map"]) for weight_map in (None, [], {}, "a.safetensors")),
        *(({"embed": shard}, ["outside"]) for shard in OUTSIDE),
        ({"embed": 3}, ["'embed'", "3"]),
        ({"embed": "a.safetensors", "ghost": "b.safetensors"}, ["b.safetensors", "'ghost'"]),
    ],
)
def test_bad_index(sharded: Path, weight_map: object, words: list[str]) -> None:
    write_index(sharded, weight_map)
    with refused(CheckpointError, *words):
        open_checkpoint(sharded)


def test_shard_in_a_subfolder(sharded: Path) -> None:
    (sharded / "sub").mkdir()
    (sharded / "a.safetensors").rename(sharded / "sub" / "a.safetensors")
    write_index(sharded, {"embed": "sub/a.safetensors"})
    assert list(open_checkpoint(sharded).tensors) == ["embed"]


def test_index_that_is_not_json(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text("<html>")
    with refused(CheckpointError, "model.safetensors.index.json", "JSON"):
        open_checkpoint(sharded)


# --------------------------------------------------------------------------------------------------------------- header


def test_every_dtype_has_its_size(tmp_path: Path) -> None:
    for dtype, size in DTYPE_BYTES.items():
        path = forge(tmp_path / "x", {"t": entry(dtype, [3], [0, 3 * size])}, bytes(3 * size))
        assert read_header(path)["t"].nbytes == 3 * size


def test_metadata_empty_tensors_and_padding_are_fine(tmp_path: Path) -> None:
    header = {"__metadata__": {"format": "pt"}, "none": entry("F32", [0, 5], [0, 0]), "one": entry("U8", [], [0, 1])}
    path = forge(tmp_path / "x", json.dumps(header).encode() + b"   ", b"\x05")
    tensors = read_header(path)
    assert list(tensors) == ["none", "one"]
    assert tensors["none"].nbytes == 0
    assert path.read_bytes()[tensors["one"].offset] == 5


def test_order_in_the_header_does_not_matter(tmp_path: Path) -> None:
    path = forge(tmp_path / "x", {"b": entry("U8", [2], [1, 3]), "a": entry("U8", [1], [0, 1])}, b"abb")
    assert list(read_header(path)) == ["b", "a"]


@pytest.mark.parametrize(
    ("dtype", "shape", "data_offsets", "what"),
    [
        (None, [2, 3], [0, 24], "dtype None"),
        (["F32"], [2, 3], [0, 24], "dtype ['F32']"),
        ("F32", None, [0, 24], "shape None"),
        ("F32", {"0": 6}, [0, 24], "shape"),
        ("F32", [-2, -3], [0, 24], "shape [-2, -3]"),
        ("F32", [True, 6], [0, 24], "shape [True, 6]"),
        ("F32", [2.0, 3], [0, 24], "shape [2.0, 3]"),
        ("F32", ["6"], [0, 24], "shape ['6']"),
        ("F32", [2**62, 2**62], [0, 24], "shape"),
        ("F32", [0, 2**62], [0, 0], "shape"),
        ("F32", [10**4000, 0], [0, 0], "shape"),
        ("F32", [1] * 65, [0, 4], "shape"),
        ("F32", [2, 3], None, "data_offsets None"),
        ("F32", [2, 3], [0], "data_offsets [0]"),
        ("F32", [2, 3], [0, 24, 48], "data_offsets [0, 24, 48]"),
        ("F32", [2, 3], [-24, 0], "data_offsets [-24, 0]"),
        ("F32", [2, 3], [24, 0], "data_offsets [24, 0]"),
        ("F32", [1], [False, 4], "data_offsets [False, 4]"),
        ("F32", [2, 3], [0, 23], "24 23"),
        ("BF16", [2, 3], [0, 24], "12 bytes"),
    ],
)
def test_bad_entry(tmp_path: Path, dtype: object, shape: object, data_offsets: object, what: str) -> None:
    path = forge(tmp_path / "x.safetensors", {"layers.0.w": entry(dtype, shape, data_offsets)}, bytes(24))
    with refused(CheckpointError, path, "'layers.0.w'", *what.split(" ", 1), "download"):
        read_header(path)


@pytest.mark.parametrize("dtype", ["F4", "C64", "f32", "F128"])
def test_a_dtype_that_is_not_known_is_no_damage(tmp_path: Path, dtype: str) -> None:
    path = forge(tmp_path / "x.safetensors", {"layers.0.w": entry(dtype)}, bytes(24))
    with refused(CheckpointError, path, "'layers.0.w'", f"'{dtype}'", "16- or 4-bit") as caught:
        read_header(path)
    assert "damaged" not in str(caught.value)


def test_fp8_scales_are_no_damage(folder: Path) -> None:
    scales = {"layers.0.scale": torch.zeros(4, dtype=torch.uint8).view(torch.float8_e8m0fnu)}
    save_file(TENSORS | scales, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensors["layers.0.scale"].dtype == "F8_E8M0"
    with refused(CheckpointError, "fp8", "quantization_config"):
        StoredModel.of(checkpoint, layer_prefix="model.layers.")


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ([0, 4], [8, 12], "'second' hole"),
        ([4, 8], [8, 12], "'first' hole"),
        ([0, 4], [0, 4], "overlaps"),
        ([0, 4], [2, 6], "'second' overlaps"),
        ([0, 4], [4, 8], "too long"),
    ],
)
def test_bad_layout(tmp_path: Path, first: list[int], second: list[int], what: str) -> None:
    header = {"first": entry("U8", [4], first), "second": entry("U8", [4], second)}
    path = forge(tmp_path / "x", header, bytes(12))
    with refused(CheckpointError, path, *what.split()):
        read_header(path)


def test_another_length(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for content, words in ((whole[:-10], ("truncated", "download")), (whole + b"\0", ("too long",))):
        path.write_bytes(content)
        with refused(CheckpointError, path, *words, len(whole), len(content)):
            open_checkpoint(folder)


def test_every_truncation_is_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with refused(CheckpointError, "download"):
            open_checkpoint(folder)


@pytest.mark.parametrize(
    ("header", "what"),
    [
        (b'{"a": {', "header JSON"),
        (b'{"\xff": 1}', "header JSON"),
        (b"[]", "header JSON object"),
        (b" {}", "header JSON object"),
        (b"", "header JSON object"),
        (b'{"a": {}, "a": {}}', "'a' twice"),
        (b'{"t": {"dtype": "F32", "dtype": "F16"}}', "'dtype' twice"),
        (b'{"__metadata__": {"x": "1", "x": "2"}}', "'x' twice"),
        (b'{"a":' * 50_000, "header JSON"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "download"),
        ({"t": [0, 24]}, "'t' [0, 24]"),
        *(({"__metadata__": value}, "__metadata__") for value in ({"format": 1}, {"format": None}, [], "pt", None)),
    ],
)
def test_bad_header(tmp_path: Path, header: Json | bytes, what: str) -> None:
    path = forge(tmp_path / "x", header)
    with refused(CheckpointError, path, *what.split()):
        read_header(path)


def test_names_cannot_break_the_line(tmp_path: Path) -> None:
    path = forge(tmp_path / "two\nlines", {"a\nb\x1b[2J" + "c" * 10_000: entry("?")})
    with refused(CheckpointError) as caught:
        read_header(path)
    assert "\x1b" not in str(caught.value)


def test_absurd_header_length(tmp_path: Path) -> None:
    path = forge(tmp_path / "x", {}, header_bytes=2**63)
    with refused(CheckpointError, path, 2**63):
        read_header(path)


def test_git_lfs_pointer(folder: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"
    (folder / "model.safetensors").write_text(pointer)
    with refused(MissingWeightsError, "git-lfs", "git lfs pull"):
        open_checkpoint(folder)


def test_what_is_no_file(folder: Path) -> None:
    path, config = folder / "model.safetensors", folder / "config.json"
    path.unlink()
    path.symlink_to(folder / "gone")
    with refused(CheckpointError, "model.safetensors", "No such file"):
        open_checkpoint(folder)
    path.unlink()
    save_file(TENSORS, path)
    config.unlink()
    with refused(CheckpointError, "no config.json"):
        open_checkpoint(folder)
    config.mkdir()
    with refused(CheckpointError, "config.json", "Is a directory"):
        open_checkpoint(folder)


def test_permission_denied(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: object, *args: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.open", denied)
    with refused(CheckpointError, "model.safetensors", "Permission denied"):
        open_checkpoint(folder)


# ---------------------------------------------------------------------------------------------------------- corruptions

WHOLE = save(TENSORS, metadata={"format": "pt"})
HEADER_END = 8 + struct.unpack("<Q", WHOLE[:8])[0]
PLAUSIBLE = sorted({*WHOLE[8:HEADER_END], *b'0123456789-.{}[]",: eE\\\n\x00\x7f\xff'})


def assert_loads_like_the_reference_or_is_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text("{}")
        (Path(scratch) / "model.safetensors").write_bytes(content)
        try:
            checkpoint = open_checkpoint(scratch)
            model = StoredModel.of(checkpoint, layer_prefix="layers.")
        except CheckpointError:
            return
        reference = load_reference(content)
        assert reference.keys() == checkpoint.tensors.keys()
        for name, info in checkpoint.tensors.items():
            assert content[info.offset : info.offset + info.nbytes] == reference[name].numpy().tobytes()
            assert info.shape == tuple(reference[name].shape)
        assert model.by_name.keys() == reference.keys()


@examples(300)
@given(edits=st.lists(st.tuples(st.integers(0, HEADER_END - 1), st.sampled_from(PLAUSIBLE)), min_size=1, max_size=4))
def test_corrupted_bytes(edits: list[tuple[int, int]]) -> None:
    content = bytearray(WHOLE)
    for position, byte in edits:
        content[position] = byte
    assert_loads_like_the_reference_or_is_refused(bytes(content))


SMALL = st.integers(-1, 100)
LEAVES = st.none() | st.booleans() | SMALL | st.integers() | st.floats() | st.text(max_size=5)
FIELDS = {
    "dtype": st.sampled_from([*DTYPE_BYTES, "F4", "C64"]) | LEAVES,
    "shape": st.lists(SMALL, max_size=3) | st.recursive(LEAVES, st.lists, max_leaves=4),
    "data_offsets": st.lists(SMALL, min_size=2, max_size=2) | LEAVES,
}


@st.composite
def lying_headers(draw: st.DrawFn) -> bytes:
    """A header that is valid JSON of the right form, in which one or two fields are not true."""
    header = json.loads(WHOLE[8:HEADER_END])
    for _ in range(draw(st.integers(1, 2))):
        name = draw(st.sampled_from(sorted(TENSORS)))
        field = draw(st.sampled_from(sorted(FIELDS)))
        header[name][field] = draw(FIELDS[field])
    return json.dumps(header).encode()


@examples(300)
@given(header=lying_headers())
def test_lying_headers(header: bytes) -> None:
    assert_loads_like_the_reference_or_is_refused(struct.pack("<Q", len(header)) + header + WHOLE[HEADER_END:])


# -------------------------------------------------------------------------------------------------- folders and hub ids


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[tuple[str, Json]]]:
    """Replaces the download by an answer (a path, or an exception to raise) and records the calls."""

    def install(answer: Any) -> list[tuple[str, Json]]:
        calls: list[tuple[str, Json]] = []

        def download(repo_id: str, **kwargs: Any) -> str:
            calls.append((repo_id, kwargs))
            if isinstance(answer, Exception):
                raise answer
            return str(answer)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return calls

    return install


Hub = Callable[[Any], list[tuple[str, Json]]]


def caused(exc: Exception, cause: Exception) -> Exception:
    exc.__cause__ = cause
    return exc


def http_error(kind: type[hub_errors.HfHubHTTPError], text: str = "404 Client Error.\nmore") -> Exception:
    # Version 0.x wants a response of requests, 1.x one of httpx, 2.x one of httpx2; all they look at is this.
    return kind(text, response=SimpleNamespace(headers={}, request=None, status_code=404))  # type: ignore[arg-type]


def test_a_folder_of_the_form_of_a_hub_id_is_a_folder(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    hub(AssertionError("no download"))
    assert resolve("org/name") == Path("org/name")


def test_a_hub_id_names_its_revision(tmp_path: Path, hub: Hub) -> None:
    calls = hub(tmp_path)
    for model in ("org/name@refs/pr/3", "org/name"):
        assert resolve(model, weights=False) == resolve_files(model, ["config.json"]) == tmp_path
    assert [(name, more["revision"]) for name, more in calls] == [("org/name", "refs/pr/3")] * 2 + [
        ("org/name", None)
    ] * 2


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/model") == tmp_path / "model"


@pytest.mark.parametrize(
    "model", ["", "gpt2", "llama-3.2_1B", "./a/b", "a/b/c", "../x", "~/gone/x", "org/", "a b/c", "a\0/b"]
)
def test_what_is_neither_folder_nor_hub_id(hub: Hub, model: str) -> None:
    calls = hub(AssertionError("no download"))
    with refused(CheckpointError, "no such folder", "org/name"):
        resolve(model)
    assert not calls


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with refused(CheckpointError, "model.safetensors", "GGUF", "the folder"):
        resolve(str(path))


def test_a_path_that_the_system_refuses(hub: Hub) -> None:
    hub(AssertionError("no download"))
    with refused(CheckpointError, "too long"):
        resolve("x" * 500)


def test_download(tmp_path: Path, hub: Hub) -> None:
    calls = hub(tmp_path)
    assert resolve("Qwen/Qwen2.5-0.5B", revision="v1") == tmp_path
    [(repo_id, kwargs)] = calls
    assert (repo_id, kwargs["revision"]) == ("Qwen/Qwen2.5-0.5B", "v1")
    # HF_HOME, HF_TOKEN and HF_HUB_OFFLINE are the library's business.
    assert kwargs.keys() == {"revision", "allow_patterns", "ignore_patterns"}


def downloaded(call: tuple[str, Json], *files: str) -> list[str]:
    """Those of a repository's files that a call brings."""
    return list(huggingface_hub.utils.filter_repo_objects(files, allow_patterns=call[1]["allow_patterns"]))


WANTED = [
    "model.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "additional_chat_templates/tools.jinja", "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json",
    "quantize_config.json", "LICENSE", "LICENSE.txt", "NOTICE", "USE_POLICY.md",
]  # fmt: skip
UNWANTED = [
    "pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "consolidated.00.pth",
    "consolidated.safetensors", "original/model.safetensors", "original/tokenizer.model", "onnx/model.safetensors",
    "fp16/model-00001-of-00002.safetensors", "checkpoint-500/model.safetensors",
    "checkpoint-500/model.safetensors.index.json", "model.fp16.safetensors", "model.fp16.safetensors.index.json",
    "adapter_model.safetensors", "model-Q4_K_M.gguf", "modeling_custom.py",
]  # fmt: skip


def test_what_is_downloaded(tmp_path: Path, hub: Hub) -> None:
    calls = hub(tmp_path)
    resolve("org/name")
    assert downloaded(calls[0], *WANTED, *UNWANTED) == WANTED


def test_a_single_file_is_downloaded_at_once(folder: Path, hub: Hub) -> None:
    write_index(folder, {"embed": "a.safetensors"})  # which is not read where a single file is
    calls = hub(folder)
    assert resolve("org/name") == folder
    assert len(calls) == 1


def test_the_shards_that_the_index_names_are_downloaded(tmp_path: Path, hub: Hub) -> None:
    named = ["model-00001-of-00002.safetensors", "deeper/part[2].safetensors"]
    write_index(tmp_path, {"embed": named[0], "layers.0.w": named[1], "layers.1.w": named[1]})
    calls = hub(tmp_path)
    assert resolve("org/name", "v1") == tmp_path
    assert [(repo_id, kwargs["revision"]) for repo_id, kwargs in calls] == [("org/name", "v1")] * 2
    others = ["model-00003-of-00003.safetensors", "deeper/part2.safetensors", "fp16/model-00001-of-00002.safetensors"]
    assert downloaded(calls[0], *named, *others) == []
    assert downloaded(calls[1], *named, *others, "config.json") == [*named, "config.json"]


@pytest.mark.parametrize(("weight_map", "what"), [(None, "weight_map"), ({"embed": "../x"}, "outside")])
def test_an_index_that_lies_is_refused_before_shards_are_downloaded(
    tmp_path: Path, hub: Hub, weight_map: object, what: str
) -> None:
    write_index(tmp_path, weight_map)
    calls = hub(tmp_path)
    with refused(CheckpointError, what):
        resolve("org/name")
    assert len(calls) == 1


def test_without_weights_only_json_is_downloaded(sharded: Path, hub: Hub) -> None:
    calls = hub(sharded)
    resolve("org/name", weights=False)
    (call,) = calls
    assert downloaded(call, "config.json", "model.safetensors.index.json", "model.safetensors", "LICENSE") == [
        "config.json",
        "model.safetensors.index.json",
    ]


def test_a_repository_of_pickles_is_refused(tmp_path: Path, hub: Hub) -> None:
    """Of which none was downloaded."""
    (tmp_path / "config.json").write_text("{}")
    calls = hub(tmp_path)
    folder = resolve("org/name")
    assert downloaded(calls[0], "pytorch_model.bin", "pytorch_model-00001-of-00002.bin") == []
    with refused(MissingWeightsError, "safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (http_error(hub_errors.GatedRepoError), "gated https://huggingface.co/org/name"),
        (http_error(hub_errors.RepositoryNotFoundError), "folder hub"),
        (http_error(hub_errors.RevisionNotFoundError), "revision 'v9'"),
        (hub_errors.HFValidationError("Cannot have --\nin it"), "hub id HFValidationError"),
        (hub_errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE"),
        (
            caused(hub_errors.LocalEntryNotFoundError("not cached"), hub_errors.OfflineModeIsEnabled("offline")),
            "HF_HUB_OFFLINE",
        ),
        (
            caused(hub_errors.LocalEntryNotFoundError("Got:\nwhat"), ConnectionError("Name not known\nmore")),
            "folder reached ConnectionError: known",
        ),
        (hub_errors.LocalEntryNotFoundError("not cached"), "reached LocalEntryNotFoundError"),
        (http_error(hub_errors.HfHubHTTPError, "500 Server Error\nx"), "failed HfHubHTTPError 500"),
        (OSError(28, "No space left on device"), "failed OSError space left"),
        (TimeoutError(), "failed TimeoutError again"),
        (RuntimeError("the transport's own kind"), "failed RuntimeError transport's"),
    ],
)
def test_hub_errors(hub: Hub, error: Exception, what: str) -> None:
    hub(error)
    with refused(CheckpointError, "org/name", *what.split()) as caught:
        resolve("org/name", revision="v9")
    assert caught.value.__cause__ is error


def test_no_revision_is_main(hub: Hub) -> None:
    hub(http_error(hub_errors.RevisionNotFoundError))
    with refused(CheckpointError, "org/name", "revision 'main'"):
        resolve("org/name")
