"""The harness: cells end as they should whatever a worker does, are kept and found again, and are judged
and counted right.
"""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks.peers import cells, report
from benchmarks.peers.catalog import Row
from benchmarks.peers.cells import Cell, Terms
from benchmarks.peers.gguf_file import rewrite
from benchmarks.peers.prepare import HERE, Files, RealPair
from benchmarks.peers.truth import Judgement, Truth
from offspec import builtin

TERMS = Terms("1b", 2**30, 1, num_tokens=6, num_steady_tokens=4, num_steady_prompts=2, timeout_s=300)
ROW = Row("fake", "fake", "counts", {"step": 2})
WORKER = f"""
import sys
sys.path.insert(0, {str(HERE / "workers")!r})
import common

def load(job):
    def generate(prompt, num_tokens, emit):
        step = job.settings["step"]
        for first in range(0, num_tokens, step):
            emit(range(prompt[0] + first, prompt[0] + first + step))
    return generate, "7.1"

common.run(load)
"""


@pytest.fixture
def no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests neither make control groups nor drop the machine's page cache."""
    from contextlib import nullcontext

    monkeypatch.setattr(cells, "memory_group", lambda limit: nullcontext(None))
    monkeypatch.setattr(cells, "drop_page_cache", lambda: None)


def run(tmp_path: Path, code: str, terms: Terms = TERMS) -> Cell:
    worker = tmp_path / "worker.py"
    worker.write_text(code)
    files = Files(tmp_path, tmp_path)
    return cells.run(cells.blank(ROW, 0, terms), Path(sys.executable), worker, files, [10, 11], terms, fits=True)


@pytest.mark.usefixtures("no_group")
def test_a_cell_that_ends_well(tmp_path: Path) -> None:
    cell = run(tmp_path, WORKER)
    assert (cell.status, cell.error, cell.version) == ("ok", "", "7.1")
    assert cell.token_ids == [10, 11, 12, 13, 14, 15]
    assert [count for _, count in cell.arrivals] == [2, 4, 6]
    assert (cell.num_passes, cell.decode[0]) == (3, 4)
    assert cell.peak_bytes > 2**20
    assert not cell.is_limited


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize(
    ("code", "status", "error"),
    [
        ("print('no such model'); raise SystemExit(3)", "failed", "no such model"),
        ("pass", "failed", "exited without a message"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "memory", "more than 1 GiB"),
        ("import time; time.sleep(600)", "time", "time limit"),
        (WORKER.replace("num_tokens, step)", "num_tokens - step, step)"), "failed", "4 of 6 tokens"),
    ],
)
def test_cells_that_do_not(tmp_path: Path, code: str, status: str, error: str) -> None:
    cell = run(tmp_path, code, replace(TERMS, timeout_s=0.3) if status == "time" else TERMS)
    assert cell.status == status
    assert error in cell.error


@pytest.mark.slow
def test_texts_are_judged_by_the_target(tmp_path: Path) -> None:
    truth = Truth(builtin.path("target"))
    prompt = truth.encode(builtin.prompts()[0])
    plain = truth.plain(prompt, 12)
    assert truth.judge(prompt, plain) == Judgement(12, 12, 0, 0.0)
    wrong = [*plain[:5], plain[5] + 1, *plain[6:]]
    judged = truth.judge(prompt, wrong)
    assert judged.num_equal == 5
    assert judged.num_ties >= 1
    assert not judged.is_exact


def test_lines_of_the_table() -> None:
    def cell(row: str, prompt: int, seconds: float, **more: object) -> Cell:
        done = cells.blank(Row(row, row, "", {}), prompt, TERMS)
        done.token_ids, done.num_passes, done.peak_bytes = [0] * 6, 3, 10 * (prompt + 1)
        done.arrivals, done.judgement = [(1.0, 2), (1.0 + seconds, 6)], Judgement(6, 6, 0, 0.0)
        done.__dict__.update(more)
        return done

    found = [
        cell("offspec", 0, 1.0),
        cell("offspec", 1, 3.0),
        cell("llama.cpp, draft, 16", 0, 9.0),  # an older one of the same kind does not count
        cell("llama.cpp, draft, 16", 0, 4.0, judgement=Judgement(6, 2, 3, 0.9)),
        cell("llama.cpp, draft, 16", 1, 1.0, status="time", error="not done"),
    ]
    ours, theirs = report.lines(found)
    assert (ours.tokens_per_s, ours.worst_tokens_per_s, ours.best_tokens_per_s) == (2.0, 4 / 3, 4.0)
    assert (ours.tokens_per_pass, ours.peak_bytes, ours.text) == (2.0, 20, "equal")
    assert theirs.tokens_per_s == 1.0
    assert theirs.times_slower == 4.0  # on the prompt that both have
    assert theirs.text == "differs in 1 of 1 (by 0.9)"
    assert theirs.failures == ["time: not done"]
    table = report.markdown([ours, theirs], report.terms(found))
    assert "| llama.cpp, draft, 16 | 1 x 6 | 1 (1, 1) | 4 |" in table
    steady = report.lines([*found, cell("llama.cpp", 0, 4.0)])[1]
    assert steady.times_slower == 2.0  # on all of ours, since its own prompt makes no difference
    assert "- llama.cpp, draft, 16: time: not done" in table


def test_a_real_pair_takes_the_prompts_of_two_sets_by_turns(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wt", encoding="utf-8") as out:
        out.writelines(json.dumps({"task_id": f"h{i}", "prompt": f"def f{i}():"}) + "\n" for i in range(2))
    questions = [{"question_id": i, "category": "a", "turns": [f"question {i}"]} for i in range(3)]
    (tmp_path / "mt_bench.jsonl").write_text("\n".join(map(json.dumps, questions)), encoding="utf-8")
    pair = RealPair("real", Files(tmp_path / "target.gguf", tmp_path / "draft.gguf"), tmp_path, tmp_path)
    texts = [messages[0]["content"] for messages in pair.prompts()]  # type: ignore[index]
    assert [texts[0], "def f0" in texts[1], texts[2], "def f1" in texts[3]] == ["question 0", True, "question 1", True]


def test_a_gguf_file_is_rewritten_in_bf16(tmp_path: Path) -> None:
    matrix = np.random.default_rng(0).standard_normal((4, 64), dtype=np.float32)
    packed = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType.Q8_0)
    vector = np.arange(64, dtype=np.float32)
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "qwen2")
    writer.add_block_count(3)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("blk.0.attn_q.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_q.bias", vector)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    rewrite(tmp_path / "model.gguf", tmp_path / "bf16.gguf")
    read = gguf.GGUFReader(tmp_path / "bf16.gguf")
    assert read.fields["general.architecture"].contents() == "qwen2"
    assert read.fields["qwen2.block_count"].contents() == 3
    assert read.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    weight, bias = read.tensors
    assert (weight.name, weight.tensor_type.name, bias.tensor_type.name) == ("blk.0.attn_q.weight", "BF16", "F32")
    values = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    assert np.allclose(gguf.quants.dequantize(weight.data, weight.tensor_type), values, rtol=2**-8)
    assert np.array_equal(bias.data, vector)
