"""`quantize --format q4_k_m` and the like: llama.cpp's types, chosen as it does, with its importance matrices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from offspec import ConvertParams, convert
from offspec.checkpoints.model_files import ModelFiles
from offspec.checkpoints.opening import model_to_plan, open_model
from offspec.errors import CheckpointError, OffspecError, UnsupportedModelError, UsageError
from offspec.loaders.convert import read_whole
from offspec.loaders.formats.gguf_search import search_rows
from offspec.loaders.params import MADE_MIXTURES

from ...pair import Pair, build_pair, variant
from ...refusals import refused

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"), 3, **SIZES)


def converted(source: Path, target: Path, form: str, imatrix: Path | None = None) -> ModelFiles:
    convert(source, target, ConvertParams(form, imatrix=None if imatrix is None else str(imatrix)))
    return open_model(target, "auto", [])


@pytest.mark.parametrize("form", MADE_MIXTURES)
def test_matrices_have_llama_cpps_types(pair: Pair, tmp_path: Path, form: str) -> None:
    """Those that a plan has for a GGUF file. Norms stay as they are."""
    made = converted(pair.target, tmp_path / "made", form).stored.by_name
    planned = model_to_plan(pair.target, form, "auto", []).stored.by_name
    matrices = {name: weight.dtype for name, weight in planned.items() if len(weight.shape) == 2}
    assert {name: made[name].dtype for name in matrices} == matrices
    assert {weight.dtype for name, weight in made.items() if name not in matrices} <= {"BF16", "F32"}


def write_imatrix(path: Path, sums: Mapping[str, np.ndarray], num_tokens: float = 4.0) -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "imatrix", use_temp_file=False)
    for name, numbers in sums.items():
        writer.add_tensor(f"{name}.in_sum2", numbers)
        writer.add_tensor(f"{name}.counts", np.full((len(numbers), 1), num_tokens, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_errors_count_by_importance(pair: Pair, tmp_path: Path) -> None:
    """Of the matrices that the file has; the others are quantised as without it."""
    sums = np.random.default_rng(1).random((1, 256), dtype=np.float32)
    file = write_imatrix(tmp_path / "imatrix.gguf", {"blk.1.attn_q.weight": sums, "blk.9.attn_q.weight": sums})
    source = open_model(pair.target, "auto", []).stored.by_name
    made = converted(pair.target, tmp_path / "made", "q4_k_s", file).stored.by_name
    for layer, importance in ((1, torch.from_numpy(sums[0] / 4)), (0, None)):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        expected = search_rows(read_whole(source[name]), made[name].dtype, importance)
        info = made[name].streamed[0]
        blocks = torch.from_numpy(np.fromfile(info.path, np.uint8, info.nbytes, offset=info.offset))
        assert torch.equal(blocks, expected.flatten())


def test_a_file_of_no_use_is_refused(pair: Pair, tmp_path: Path) -> None:
    other = write_imatrix(tmp_path / "other.gguf", {"encoder.weight": np.ones((1, 256), dtype=np.float32)})
    negative = write_imatrix(tmp_path / "negative.gguf", {"blk.0.attn_q.weight": -np.ones((1, 256), dtype=np.float32)})
    text = tmp_path / "imatrix.dat"
    text.write_bytes(b"imatrix")
    wider = write_imatrix(tmp_path / "wider.gguf", {"blk.0.attn_q.weight": np.ones((1, 512), dtype=np.float32)})
    cases: list[tuple[Path, type[OffspecError], str]] = [
        (wider, UsageError, "this very model"),
        (text, UsageError, "llama-imatrix -o"),
        (other, UsageError, "of this model"),
        (negative, CheckpointError, "damaged"),
    ]
    for file, kind, words in cases:
        with refused(kind, words):
            converted(pair.target, tmp_path / f"of-{file.stem}", "q4_k_m", file)
    with pytest.raises(UsageError, match="imatrix"):
        ConvertParams("nf4", imatrix="imatrix.gguf")


def test_a_run_with_another_imatrix_does_not_go_on(pair: Pair, tmp_path: Path) -> None:
    """At the same path: the file's size and time are part of what the result depends on."""
    file = write_imatrix(tmp_path / "imatrix.gguf", {"blk.0.attn_q.weight": np.ones((1, 256), dtype=np.float32)})
    params = ConvertParams("q4_k_m", imatrix=str(file))

    def stop(done: int, total: int) -> None:
        if done > total / 2:  # some files are there
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(pair.target, tmp_path / "made", params, progress=stop)
    os.utime(file, (1, 1))
    with refused(UsageError, "unfinished", "imatrix"):
        convert(pair.target, tmp_path / "made", params)


def test_four_bits_are_not_rounded_again(pair: Pair, tmp_path: Path) -> None:
    convert(pair.target, tmp_path / "nf4", ConvertParams("nf4"))
    with refused(CheckpointError, "already quantised", "16-bit"):
        convert(tmp_path / "nf4", tmp_path / "made", ConvertParams("q4_k_m"))


def test_a_model_without_known_names_is_refused(pair: Pair, tmp_path: Path) -> None:
    foreign = variant(pair.target, tmp_path / "foreign", model_type="unheard")
    with refused(UnsupportedModelError, "no types in q4_k_m"):
        convert(foreign, tmp_path / "made", ConvertParams("q4_k_m"))
