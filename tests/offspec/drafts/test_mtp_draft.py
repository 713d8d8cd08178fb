"""MTP: a checkpoint's own layer drafts; its logits are the reference's, and the text is plain decoding's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.checkpoints.conversion import convert
from offspec.checkpoints.head_files import HeadFiles, StoredTensors
from offspec.checkpoints.load import load_decoder
from offspec.checkpoints.opening import model_to_plan, open_model
from offspec.checkpoints.shadows import Shadow, make_shadow
from offspec.drafts.base import DraftOptions, OpenRequest
from offspec.drafts.head_draft import HeadDraft
from offspec.drafts.kinds import automatic_names, open_draft
from offspec.errors import UsageError
from offspec.loaded_target import LoadedTarget
from offspec.loaders.convert import convert as convert_layers
from offspec.loaders.params import ConvertParams
from offspec.model.heads.mtp import OWN_EMBEDDING, OWN_HEAD, MtpHead
from offspec.model.names import LAYER_PREFIX
from offspec.notes import Note
from offspec.planning.plan import all_resident

from ...fakes import CPU
from ...mtp_models import EXPERTS, KINDS, NUM_LAYERS, Twin, write_model
from ...pair import variant
from ...refusals import refused
from ..model.heads.test_kinds_of_head import check_logits
from ..test_hybrid_models import loaded

PROMPTS = ["def area(width", "print(1"]
GREEDY = SamplingParams(8, ignore_eos=True)
SAMPLED = SamplingParams(8, temperature=0.9, seed=3, ignore_eos=True)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp(kind), kind)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with Engine.load(str(model), draft="mtp", device="cpu", dtype="fp32") as engine:
        yield engine


def ids_of(engine: Engine, prompt: str, params: SamplingParams, budget: int | None = 0) -> list[int]:
    speculation = SpeculationParams(budget=budget, lookup=False)
    return [token for step in engine.generate(prompt, params, speculation) for token in step.token_ids]


def test_logits_equal_the_reference(model: Path, kind: str) -> None:
    """Embedding and head are the target's; copies of them in the checkpoint are not loaded."""
    files = open_model(model, "fp32", [])
    target, opened = load_decoder(files, all_resident(files), CPU), HeadFiles.of_mtp(files)
    assert not {OWN_EMBEDDING, OWN_HEAD} & opened.spec.shapes.keys()
    head = opened.spec.make(opened.load(torch.float32, CPU), target)
    check_logits(head, Twin.of(model, kind, target), 32)


def test_a_layer_with_experts_drafts(tmp_path: Path) -> None:
    """DeepSeek-V3's, whose layer is a mixture as the target's last one."""
    model = write_model(tmp_path, EXPERTS)
    files = open_model(model, "fp32", [])
    target, opened = load_decoder(files, all_resident(files), CPU), HeadFiles.of_mtp(files)
    head = opened.spec.make(opened.load(torch.float32, CPU), target)
    check_logits(head, Twin.of(model, EXPERTS, target), 32)
    with Engine.load(str(model), draft="mtp", device="cpu", dtype="fp32") as engine:
        assert isinstance(engine.draft, HeadDraft)
        assert ids_of(engine, PROMPTS[0], SAMPLED, 12) == ids_of(engine, PROMPTS[0], SAMPLED)


@pytest.mark.each_value
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_text_is_plain_decodings(engine: Engine, params: SamplingParams) -> None:
    """Alone, and in passes that texts share."""
    assert isinstance(engine.draft, HeadDraft)
    assert isinstance(engine.draft.head, MtpHead)
    expected = [ids_of(engine, prompt, params) for prompt in PROMPTS]
    assert [ids_of(engine, prompt, params, budget) for prompt, budget in zip(PROMPTS, (12, None), strict=True)] == (
        expected
    )
    texts: dict[int, list[int]] = {index: [] for index in range(len(PROMPTS))}
    for index, step in engine.generate_many(PROMPTS, params, SpeculationParams(budget=8)):
        texts[index] += step.token_ids
    assert [*texts.values()] == expected


def test_streamed_layers_and_a_quantised_mtp_layer(model: Path, kind: str, engine: Engine, tmp_path: Path) -> None:
    """NF4 by another program reaches DeepSeek's layout, whose layer counts as one of the target's; not Qwen's."""
    convert_layers(model, tmp_path / "nf4", ConvertParams("nf4"), layer_prefix=LAYER_PREFIX)
    files, notes = open_model(tmp_path / "nf4", "fp32", []), list[Note]()
    request = OpenRequest(DraftOptions("mtp"), files, engine.tokenizer, "fp32", notes)
    opened, target = open_draft(str(model), request), loaded(tmp_path / "nf4", 1)
    draft = opened.load(CPU)(target)
    assert isinstance(draft, HeadDraft)
    is_packed = kind == "nextn"
    assert isinstance(draft.head, MtpHead)
    assert isinstance(draft.head.tensors["fc.weight"], Tensor) != is_packed
    assert any("bits, in which it accepts little" in note.text and note.advice for note in notes) == is_packed
    streamed = Engine(LoadedTarget(target), engine.tokenizer, draft)
    assert ids_of(streamed, PROMPTS[0], SAMPLED, 12) == ids_of(streamed, PROMPTS[0], SAMPLED)
    target.weights.close()


def test_quantize_and_shadows_leave_it_in_16_bits(model: Path, tmp_path: Path) -> None:
    convert(model, tmp_path / "nf4", ConvertParams("nf4"))
    files = open_model(tmp_path / "nf4", "fp32", [])
    opened = HeadFiles.of_mtp(files)
    assert isinstance(opened.tensors, StoredTensors)
    assert opened.tensors.bits == 16
    assert not {OWN_EMBEDDING, OWN_HEAD} & opened.spec.shapes.keys()
    if files.config.delta is None:
        whole = open_model(model, "fp32", [])
        make_shadow(whole, 4, tmp_path / "shadow")
        assert len(Shadow.open(tmp_path / "shadow", whole).layers) == NUM_LAYERS


def test_it_is_the_default_draft(engine: Engine, model: Path) -> None:
    with Engine.load(str(model), device="cpu", dtype="fp32") as automatic:
        assert isinstance(automatic.draft, HeadDraft)
        assert any("MTP layer" in note.text for note in automatic.notes)


def test_a_checkpoint_without_the_layer_that_it_names_runs(model: Path, tmp_path: Path) -> None:
    bare = variant(model, tmp_path / "bare")
    tensors = load_file(bare / "model.safetensors")
    layers = tuple(f"model.layers.{i}." for i in range(NUM_LAYERS))
    kept = {n: t for n, t in tensors.items() if n.startswith((*layers, "model.embed", "model.norm", "lm_head"))}
    save_file(kept, bare / "model.safetensors")
    with Engine.load(str(bare), device="cpu", dtype="fp32") as engine:
        assert any("has no MTP layer" in note.text for note in engine.notes)
        assert not isinstance(engine.draft, HeadDraft)
    with refused(UsageError, "draft=mtp", "has none"):
        Engine.load(str(bare), draft="mtp", device="cpu", dtype="fp32")


def test_plans_list_it(engine: Engine, model: Path, tmp_path: Path) -> None:
    """Also from config.json alone, without weights."""
    assert engine.plan is not None
    items = {item.name: item.on_device for item in engine.plan.placement.items}
    assert items["head's weights"] > 0
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, tmp_path)
    files = model_to_plan(tmp_path, None, "auto", [])
    request = OpenRequest(DraftOptions("mtp"), files, None, "auto", [])
    assert automatic_names("model", request) == ["mtp", "lookup"]
    opened = open_draft("model", request)
    guessing = opened.guessing(engine.plan.placement)
    assert guessing.acceptance is not None
    assert "MTP" in guessing.acceptance.source
