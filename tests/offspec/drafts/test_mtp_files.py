"""An MTP layer in a GGUF file: within the target's, or beside it, as llama.cpp's users download it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.drafts.beside_llama_cpp import write_glm
from offspec import Engine, SamplingParams, SpeculationParams, loading
from offspec.checkpoints.head_files import HeadFiles, is_head
from offspec.checkpoints.opening import open_model
from offspec.drafts.head_draft import HeadDraft
from offspec.errors import CheckpointError
from offspec.loaders.files.gguf_file import companion
from offspec.loaders.streaming.placement import ExpertSlots
from offspec.model.heads.mtp import MtpHead
from offspec.planning.plan import Plan
from offspec.planning.probe import plan_here

from ...mtp_models import NUM_LAYERS, random_layer
from ...pair import build_pair
from ...refusals import refused
from .test_mtp_draft import SAMPLED, ids_of

PROMPT = "def area(width"
TARGET, LAYER = "Tiny-Q4_K_M.gguf", "mtp-Tiny-Q8_0.gguf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """whole.gguf has all; a target and its MTP layer lie beside it as two files, by llama.cpp's names."""
    place = tmp_path_factory.mktemp("mtp")
    source = build_pair(place, num_layers=NUM_LAYERS).target
    config, tokenizer = (json.loads((source / f"{name}.json").read_text()) for name in ("config", "tokenizer"))
    config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    model = load_file(source / "model.safetensors")
    layer = {f"mtp.{name}": tensor for name, tensor in random_layer(config).items()}
    shared = {name: tensor for name, tensor in model.items() if ".layers." not in name}
    parts: dict[str, dict[str, Tensor]] = {"whole.gguf": model | layer, TARGET: model, LAYER: shared | layer}
    for name, tensors in parts.items():
        write_glm(place / name, config, tensors, tokenizer)
    other = {**config, "num_hidden_layers": NUM_LAYERS + 1}
    write_glm(place / "other.gguf", other, shared | layer, tokenizer)
    return place


def head_of(engine: Engine) -> MtpHead:
    assert isinstance(engine.draft, HeadDraft)
    assert isinstance(engine.draft.head, MtpHead)
    return engine.draft.head


def test_it_drafts_from_either_file(folder: Path) -> None:
    """As many tokens, and the same text, which is plain decoding's."""
    drafted = list[tuple[list[int], int]]()
    for name, draft in (("whole.gguf", "mtp"), (TARGET, str(folder / LAYER))):
        with Engine.load(str(folder / name), draft=draft, device="cpu", dtype="fp32") as engine:
            head_of(engine)
            for budget in (0, 8):
                speculation = SpeculationParams(budget, lookup=False)
                steps = list(engine.generate(PROMPT, SamplingParams(12, ignore_eos=True), speculation))
                text = [token for step in steps for token in step.token_ids]
                drafted.append((text, steps[-1].stats.num_drafted_tokens))
    assert len({tuple(text) for text, _ in drafted}) == 1
    assert drafted[1] == drafted[3]
    assert drafted[1][1] > 0


def test_with_experts_from_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer is found beside the target."""
    with Engine.load(str(folder / TARGET), draft="none", device="cpu", dtype="fp32") as resident:
        expected = ids_of(resident, PROMPT, SAMPLED)

    def planned(*args: Any) -> Plan:
        plan = plan_here(*args)
        return replace(plan, placement=replace(plan.placement, experts=ExpertSlots(2)))

    monkeypatch.setattr(loading, "plan_here", planned)
    with Engine.load(str(folder / TARGET), draft="mtp", device="cpu", dtype="fp32") as streamed:
        assert head_of(streamed)
        assert ids_of(streamed, PROMPT, SAMPLED, 12) == expected


def test_another_targets_layer_is_refused(folder: Path) -> None:
    with refused(CheckpointError, "other.gguf", NUM_LAYERS + 1, NUM_LAYERS):
        Engine.load(str(folder / TARGET), draft=str(folder / "other.gguf"), device="cpu", dtype="fp32")


def test_it_is_no_model(folder: Path, tmp_path: Path) -> None:
    """A folder with one beside a model is that model's."""
    assert is_head(folder / LAYER)
    assert not is_head(folder / TARGET)
    with refused(CheckpointError, LAYER, "is a head"):
        open_model(folder / LAYER, "fp32", [])
    for name in (TARGET, LAYER):
        (tmp_path / name).hardlink_to(folder / name)
    assert HeadFiles.of_mtp(open_model(tmp_path, "fp32", [])).path.name == LAYER


@pytest.mark.parametrize(
    ("model", "beside", "is_its"),
    [
        ("A-7B-Q4_K_M.gguf", "mtp-A-7B-Q8_0.gguf", True),
        ("A-7B.gguf", "mtp-a-7b-UD-IQ4_XS.gguf", True),
        ("A-7B-Q4_K_M.gguf", "mtp-A-70B-Q8_0.gguf", False),
        ("A-7B-Q4_K_M.gguf", "A-7B-mtp-Q8_0.gguf", False),
    ],
)
def test_which_file_is_a_models(model: str, beside: str, is_its: bool, tmp_path: Path) -> None:
    (tmp_path / beside).touch()
    assert companion(tmp_path / model, "mtp-") == (tmp_path / beside if is_its else None)
