"""What a draft with a model prepares on a GPU, with stand-ins for the device and the graphs, and its rows on a CPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offspec.checkpoints import load, opening
from offspec.checkpoints.opening import open_model
from offspec.drafts import model_draft
from offspec.drafts.base import DraftOptions, OpenRequest
from offspec.drafts.kinds import open_draft
from offspec.drafts.model_draft import ModelDraft
from offspec.planning.memory import Reservation
from offspec.scheduler.params import MAX_ROWS

from ...cli.sandbox import write_gguf
from ...machines import AMX, AVX2, AVX512_BF16, by_processor
from ...pair import build_pair


@pytest.mark.parametrize("device", ["cuda:0", "cpu"])
def test_rounds_are_recorded_once_before_texts_and_on_a_gpu_only(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = list[int]()

    class Graphs:
        def __init__(self, decoder: Any, capacity: int) -> None:
            self.capacity = capacity

        def prepare(self) -> None:
            prepared.append(self.capacity)

    monkeypatch.setattr(model_draft, "TreeGraphs", Graphs)
    monkeypatch.setattr(model_draft, "is_static", lambda decoder: True)
    decoder: Any = SimpleNamespace(device=torch.device(device), config=None)
    draft = ModelDraft(decoder, "draft")
    for _ in range(2):  # two engines may share a draft
        draft.prepare(100)
    assert prepared == ([100 + 1 + MAX_ROWS] if device == "cuda:0" else [])


@by_processor(
    "dtype, learn, rows, processor",
    ("auto", False, torch.float32, AVX512_BF16),
    ("auto", False, torch.bfloat16, AMX),
    ("auto", False, torch.bfloat16, AVX2),
    ("bf16", False, torch.bfloat16, AVX512_BF16),
    ("auto", True, torch.bfloat16, AVX512_BF16),
)
def test_a_packed_draft_has_rows_in_fp32_where_these_are_faster(
    dtype: str, learn: bool, rows: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "LEAST_EXACT_WEIGHTS", 0)
    monkeypatch.setattr(opening, "SMALL_MODEL_BYTES", 0)
    pair, path = build_pair(tmp_path, 3), tmp_path / "draft.gguf"
    write_gguf(
        pair.draft, path, {"attn_": "Q8_0", "ffn_gate": "Q8_0", "ffn_up": "Q8_0", "token_embd": "Q8_0", "norm": "F32"}
    )
    target = open_model(pair.target, "bf16", [])
    opened = open_draft("target", OpenRequest(DraftOptions(str(path), learn=learn), target, None, dtype, []))
    (files,) = opened.models
    assert files.dtype == rows
    (planned,) = (item for item in opened.memory_use(target, Reservation(64, 16)).items if "KV" in item.name)
    assert planned.on_device == files.kv_bytes(64 + MAX_ROWS) > 0
