"""What a draft with a model prepares on a GPU, with stand-ins for the device and the graphs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offspec.drafts import model_draft
from offspec.drafts.model_draft import ModelDraft
from offspec.scheduler.params import MAX_ROWS


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
