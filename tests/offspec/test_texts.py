"""Text is plain decoding's: each kind of draft x format x placement x sampling, alone and where texts share passes.

Any two values of these meet in the default run. Kinds of head, of hybrids and of mixtures, drafts of another vocabulary
and conversations have files of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from offspec import Engine, SamplingParams, SpeculationParams, convert, loading
from offspec.loaders.params import ConvertParams
from offspec.loaders.streaming.placement import places_of
from offspec.planning.plan import Plan
from offspec.planning.probe import plan_here

from ..cli.sandbox import write_gguf
from ..machines import needs_kernels
from ..pair import Pair, build_pair
from .checkpoints.test_grouped_models import CASES
from .checkpoints.test_grouped_models import build as build_grouped
from .drafts.test_head_draft import HEADS
from .model.heads.head_twins import write_folder

pytestmark = needs_kernels
NUM_LAYERS = 3
PROMPTS = ("def area(", "for i in range(10):\n    print(i)\n")
SAMPLING = {
    "greedy": SamplingParams(6, ignore_eos=True),
    "T = 1": SamplingParams(6, temperature=1.0, seed=3, ignore_eos=True),
}
PLAIN, SHARED = SpeculationParams(0), SpeculationParams(8)
ALONE = {"few nodes": (0, SpeculationParams(3)), "many nodes": (1, SpeculationParams(64))}  # after which of PROMPTS
DRAFTS = ("model", "lookup", "self", "shadow", "head")


@dataclass(frozen=True)
class Form:
    """How a target is stored, and the options of `Engine.load` that say how it is computed."""

    stored: str = "plain"
    options: dict[str, Any] = field(default_factory=dict)


FORMS = {
    "fp32": Form(options={"dtype": "fp32"}),
    "fp16": Form(options={"dtype": "fp16"}),
    "bf16": Form(options={"dtype": "bf16"}),
    "bf16 in fp32": Form("bf16", {"dtype": "fp32"}),
    "nf4": Form("nf4", {"dtype": "fp32"}),
    "q4_k_m": Form("q4_k_m", {"dtype": "fp32"}),
    "gptq": Form("gptq", {"dtype": "fp32"}),
    "rows in 8 bits": Form("gguf", {"arithmetic": "int8"}),
    "entries in 8 bits": Form(options={"dtype": "fp32", "kv_cache": "8"}),
    "entries in 4 bits": Form(options={"dtype": "bf16", "kv_cache": "4"}),
}


def half(plan: Plan) -> Plan:
    """The layer in the middle stays."""
    return streamed(plan, resident=(1,))


def streamed(plan: Plan, *, resident: tuple[int, ...] = (), entries_in_ram: tuple[int, ...] = ()) -> Plan:
    on_disk = tuple(i for i in range(NUM_LAYERS) if i not in resident)
    slots = replace(plan.placement.slots, num=2, nbytes=max(cost.slot_bytes for cost in plan.layers))
    places = places_of(resident=resident, on_disk=on_disk)
    return replace(plan, placement=replace(plan.placement, places=places, slots=slots, entries_in_ram=entries_in_ram))


def with_entries_in_ram(plan: Plan) -> Plan:
    """Of more layers than have slots for their entries."""
    return streamed(plan, entries_in_ram=tuple(range(NUM_LAYERS)))


PLACEMENTS: dict[str, Callable[[Plan], Plan]] = {
    "resident": lambda plan: plan,
    "half streamed": half,
    "streamed": streamed,
    "entries in RAM": with_entries_in_ram,
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"), NUM_LAYERS, max_position_embeddings=256, intermediate_size=64)


@pytest.fixture(scope="module")
def stored(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The target as a `Form` has it."""
    folder = tmp_path_factory.mktemp("stored")

    @cache
    def get(form: str) -> Path:
        if form == "plain":
            return pair.target
        if form == "gguf":
            write_gguf(pair.target, folder / "target.gguf", {"attn_": "Q8_0", "ffn_gate": "Q4_0", "norm": "F32"})
            return folder / "target.gguf"
        if form == "gptq":
            return build_grouped(pair, folder, CASES["gptq, act order"]).packed
        convert(pair.target, folder / form, ConvertParams(form))
        return folder / form

    return get


@pytest.fixture(scope="module")
def draft_options(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Options of `Engine.load` for each of DRAFTS."""
    config, tensors = HEADS["EAGLE-3"]
    head = write_folder(tmp_path_factory.mktemp("head"), config, tensors())
    options = {
        "model": {"draft": str(pair.draft)},
        "self": {"draft": "self", "exit_layer": 1},
        "head": {"draft": str(head)},
    }
    return {name: options.get(name, {"draft": name}) for name in DRAFTS}


def load(folder: Path, placement: str, **options: Any) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "plan_here", lambda *args: PLACEMENTS[placement](plan_here(*args)))
        return Engine.load(str(folder), device="cpu", **options)


def says(engine: Engine, prompt: str, params: SamplingParams, speculation: SpeculationParams) -> list[int]:
    return [token for step in engine.generate(prompt, params, speculation) for token in step.token_ids]


@pytest.fixture(scope="module")
def expected(stored: Callable[[str], Path]) -> Callable[[str], dict[str, list[list[int]]]]:
    """What plain decoding says where all layers are resident: a form's texts by the names of samplings."""

    @cache
    def get(form: str) -> dict[str, list[list[int]]]:
        with load(stored(FORMS[form].stored), "resident", draft="none", **FORMS[form].options) as engine:
            return {
                name: [says(engine, prompt, params, PLAIN) for prompt in PROMPTS] for name, params in SAMPLING.items()
            }

    return get


@pytest.mark.each_value(together=2)
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("alone", ALONE)
def test_text_is_plain_decodings(
    stored: Callable[[str], Path],
    draft_options: dict[str, dict[str, Any]],
    expected: Callable[[str], dict[str, list[list[int]]]],
    draft: str,
    form: str,
    placement: str,
    sampling: str,
    alone: str,
) -> None:
    """Alone, and where texts share passes."""
    (number, speculation), params, plain = ALONE[alone], SAMPLING[sampling], expected(form)[sampling]
    assert all(len(set(text)) > 2 for text in plain)
    with load(stored(FORMS[form].stored), placement, **draft_options[draft], **FORMS[form].options) as engine:
        assert engine.is_exact
        assert says(engine, PROMPTS[number], params, speculation) == plain[number]
        together: list[list[int]] = [[] for _ in PROMPTS]
        for index, step in engine.generate_many(PROMPTS, params, SHARED, max_texts=len(PROMPTS)):
            together[index] += step.token_ids
        assert together == plain
        assert (engine.target.weights.bytes_streamed > 0) == (placement != "resident")
        far = engine.target.entries_in_ram
        assert (far is not None) == (placement == "entries in RAM")
        if far is not None and draft != "self":  # whose two caches have slots for all of their layers
            assert far.copies.num_bytes > 0
