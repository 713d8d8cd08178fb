"""What is planned fits, is what will be loaded, and can be told of a checkpoint or a card that is not here."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec import LoadOptions
from offspec.backends.device_kinds import GPU
from offspec.backends.gpu import SLICE
from offspec.builtin import path as builtin_path
from offspec.checkpoints.from_config import stored_from_config
from offspec.checkpoints.model_files import ModelFiles
from offspec.checkpoints.opening import model_to_plan, open_model
from offspec.errors import CheckpointError, ContextLengthError, MemoryLimitError, UsageError
from offspec.loaders.machine.gpus import KNOWN_GPUS
from offspec.loaders.machine.hardware import Rates
from offspec.loaders.params import PLAN_FORMATS
from offspec.loaders.streaming.placement import Limits
from offspec.notes import Note
from offspec.planning.memory import MemoryOptions, MemoryUse, Reservation
from offspec.planning.plan import DEFAULT_CONTEXT, LAYER_LAUNCHES, MIN_CONTEXT, Plan, make_plan
from offspec.planning.probe import measure_link
from offspec.planning.report import explain_plan
from offspec.tools.forecast import Assumptions, make_forecast

from ... import llama_configs
from ...llama_configs import LLAMA_8B, write_config
from ...refusals import refused, tells

GIB = 2**30
LLAMA_70B: dict[str, Any] = llama_configs.LLAMA_70B | {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
}
PHI_4: dict[str, Any] = {  # as published
    "model_type": "phi3",
    "hidden_size": 5120,
    "intermediate_size": 17920,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 10,
    "vocab_size": 100352,
    "max_position_embeddings": 16384,
    "original_max_position_embeddings": 16384,
    "rope_theta": 250000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
RATES = Rates(disk_bytes_per_s=5e9, host_to_device_bytes_per_s=25e9, matmul_flops={1: 1e12, 256: 1e14})


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 70B model of which only config.json is here."""
    folder = tmp_path_factory.mktemp("llama-70b")
    (folder / "config.json").write_text(json.dumps(LLAMA_70B))
    return folder


@cache
def files_of(folder: Path, form: str) -> ModelFiles:
    """Of a config.json that no test changes."""
    return model_to_plan(folder, form, "bf16", [])


def plan(folder: Path, form: str, limits: Limits, allowed: MemoryOptions | None = None) -> Plan:
    return make_plan(files_of(folder, form), [], limits, allowed or MemoryOptions(), GIB // 2)


def test_a_70b_model_has_its_size(large: Path) -> None:
    files = model_to_plan(large, None, "bf16", [])
    assert files.num_parameters == 70_553_706_496  # as the hub tells of Llama 3.1 70B
    sizes = {
        form: sum(layer.record.read_bytes for layer in stored_from_config(files.config, form).layers)
        for form in PLAN_FORMATS
    }
    assert sizes["fp32"] == pytest.approx(2 * sizes["bf16"], rel=1e-3)
    assert sizes["fp16"] == sizes["bf16"]
    weight_bytes = {"nf4": 0.5 + 1 / 64, "fp8": 1 + 4 / 128**2, "w4a16": 0.5 + 2 / 128, "nvfp4": 0.5 + 1 / 16}
    for form, nbytes in weight_bytes.items():
        assert sizes["bf16"] / sizes[form] == pytest.approx(2 / nbytes, rel=1e-3)


@pytest.mark.each_value
@pytest.mark.parametrize("form", ["bf16", "nf4"])
@pytest.mark.parametrize("ram", [12 * GIB, 64 * GIB, 200 * GIB])
@pytest.mark.parametrize("vram", [None, 24 * GIB, 80 * GIB])
def test_plans_fit_and_more_memory_is_never_slower(large: Path, form: str, ram: int, vram: int | None) -> None:
    small, roomy = plan(large, form, Limits(vram, ram)), plan(large, form, Limits(vram, 2 * ram))
    for planned in (small, roomy):
        p = planned.placement
        assert p.ram_bytes <= p.limits.ram
        assert p.device_bytes <= (p.limits.device or 0)
    assert roomy.predict_pass_s(RATES, 64) < 1.001 * small.predict_pass_s(RATES, 64)
    assert small.predict_pass_s(RATES, 512) > 0.999 * small.predict_pass_s(RATES, 1)


def test_where_layers_come_from_disk_so_does_the_embedding(large: Path) -> None:
    def names(ram: int) -> set[str]:
        return {item.name for item in plan(large, "nf4", Limits(24 * GIB, ram)).placement.items}

    assert "embedding" in names(64 * GIB)
    assert "embedding" not in names(12 * GIB)


def test_an_embedding_that_fits_nowhere_keeps_layers_streaming(tmp_path: Path) -> None:
    """Without it all layers would stay, and then it would have to stay with them."""
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 8, "vocab_size": 60_000}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B | shape | {"head_dim": 8}))
    files = model_to_plan(tmp_path, "fp32", "auto", [])
    seen = set()
    for ram in range(80 * 2**20, 140 * 2**20, 2**17):
        try:
            p = make_plan(files, [], Limits(None, ram), MemoryOptions(context=64), 0).placement
        except MemoryLimitError:
            continue
        assert p.on_disk or "embedding" in {item.name for item in p.items}
        seen.add(bool(p.on_disk))
    assert False in seen


@pytest.mark.parametrize(("vram", "tree", "planned"), [(None, None, 256), (None, 512, 512), (GIB, 8, 1024)])
def test_room_is_made_for_the_largest_tree_there_may_be(
    large: Path, vram: int | None, tree: int | None, planned: int
) -> None:
    made = plan(large, "nf4", Limits(vram and 24 * vram, 64 * GIB), MemoryOptions(context=4096, tree=tree))
    (item,) = (item for item in made.placement.items if item.name == "KV cache")
    assert made.tree == planned
    assert item.on_device == (4096 + planned) * 327_680


def test_a_default_context_shrinks_to_what_fits_one_asked_for_does_not(large: Path) -> None:
    assert plan(large, "nf4", Limits(24 * GIB, 64 * GIB)).context == DEFAULT_CONTEXT
    tight = plan(large, "nf4", Limits(5 * GIB, 64 * GIB))
    assert MIN_CONTEXT <= tight.context < DEFAULT_CONTEXT
    with refused(MemoryLimitError, "`context`"):
        plan(large, "nf4", Limits(5 * GIB, 64 * GIB), MemoryOptions(context=DEFAULT_CONTEXT))
    with refused(UsageError, "`context=200000`", 131_072):
        plan(large, "nf4", Limits(24 * GIB, 64 * GIB), MemoryOptions(context=200_000))


@pytest.mark.parametrize("limits", [Limits(60 * GIB, 64 * GIB), Limits(34 * GIB, 64 * GIB)])
def test_a_default_context_is_as_long_as_costs_nothing(large: Path, limits: Limits) -> None:
    """What is resident, how layers are streamed and what is predicted stay; twice as many entries would still fit."""
    usual, grown = plan(large, "nf4", limits, MemoryOptions(context=DEFAULT_CONTEXT)), plan(large, "nf4", limits)
    assert usual.placement.is_resident == grown.placement.is_resident == (limits.device != 34 * GIB)
    assert (grown.placement.places, grown.placement.slots) == (usual.placement.places, usual.placement.slots)
    assert grown.predict_pass_s(RATES, 16) == usual.predict_pass_s(RATES, 16)
    if grown.placement.is_resident:
        assert DEFAULT_CONTEXT < grown.context < 131_072
        assert plan(large, "nf4", limits, MemoryOptions(context=2 * grown.context)).placement.is_resident
    else:
        assert grown.context == DEFAULT_CONTEXT


def test_a_default_context_costs_no_expert(tmp_path: Path) -> None:
    """Experts in memory take all that layers leave."""
    experts = {"num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 1024, "norm_topk_prob": True}
    shape = {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 8}
    config = LLAMA_70B | shape | experts | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    streamed, resident = (plan(tmp_path, "bf16", Limits(vram * GIB, 64 * GIB)) for vram in (3, 16))
    assert (streamed.placement.is_resident, streamed.context) == (False, DEFAULT_CONTEXT)
    assert (resident.placement.is_resident, resident.context) == (True, 131_072)


def test_a_default_context_keeps_to_the_factors_of_short_texts(tmp_path: Path) -> None:
    """LongRoPE's factors for long texts would change short ones."""
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    settings = {"max_position_embeddings": 131072, "original_max_position_embeddings": 8192}
    config = PHI_4 | settings | {"rope_scaling": {"type": "su", **factors}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    limits = Limits(80 * GIB, 64 * GIB)
    assert plan(tmp_path, "nf4", limits).context == 8192
    for prompt, context in ((8000, 8192), (8192, 8692)):
        assert plan(tmp_path, "nf4", limits, MemoryOptions(prompt=prompt, answer_tokens=500)).context == context


def test_the_request_that_will_come_fits_if_memory_holds_it(large: Path) -> None:
    limits = Limits(24 * GIB, 64 * GIB)
    short = plan(large, "nf4", limits, MemoryOptions(prompt=100, answer_tokens=200))
    assert short.placement == plan(large, "nf4", limits).placement
    long = plan(large, "nf4", limits, MemoryOptions(prompt=20_000, answer_tokens=256))
    assert long.placement == plan(large, "nf4", limits, MemoryOptions(context=20_256)).placement
    assert (long.context, long.usual_tokens) == (20_256, 10_128)


@pytest.mark.slow
def test_a_prompt_is_refused_only_if_no_context_that_fits_holds_it(large: Path) -> None:
    tight = Limits(5 * GIB, 64 * GIB)
    usual = plan(large, "nf4", tight)
    assert plan(large, "nf4", tight, MemoryOptions(prompt=100, answer_tokens=100_000)).context == usual.context
    with refused(ContextLengthError, "60000 tokens", usual.largest_context, "`vram`"):
        plan(large, "nf4", tight, MemoryOptions(prompt=60_000, answer_tokens=256))


@pytest.mark.parametrize(("context", "asked", "chosen"), [(None, "auto", "16"), (32768, "auto", "8"), (512, "4", "4")])
def test_the_cache_is_packed_where_a_long_context_costs_residents(
    large: Path, context: int | None, asked: str, chosen: str
) -> None:
    limits = Limits(24 * GIB, 64 * GIB)
    made = plan(large, "nf4", limits, MemoryOptions(context=context, kv_cache=asked))
    assert made.inputs.target.kv.name == chosen
    (item,) = (item for item in made.placement.items if item.name == "KV cache")
    token_bytes = {"16": 327_680, "8": 80 * 8 * 2 * 136, "4": 80 * 8 * (102 + 76)}[chosen]
    slots = 2 if made.placement.entries_in_ram else 0  # of entries in RAM, for a layer each
    assert item.on_device + item.on_host == (made.context + made.tree) * token_bytes * (80 + slots) // 80
    notes = [note for note in explain_plan(made) if "KV cache in" in note.text]
    assert bool(notes) == (chosen != "16")
    if asked == "auto" and notes:
        plain = plan(large, "nf4", limits, MemoryOptions(context=context, kv_cache="16"))
        numbers = [len(each.placement.resident) for each in (made, plain)]
        assert f"{numbers[0]} layers are resident instead of {numbers[1]}" in notes[0].text
        assert notes[0].advice


def test_a_context_that_fits_with_a_packed_cache_alone(large: Path) -> None:
    """32k tokens of 320 KiB are 10 GiB, which neither the card nor RAM has room for."""
    made = plan(large, "nf4", Limits(9 * GIB, 6 * GIB), MemoryOptions(context=32768))
    assert made.inputs.target.kv.name == "8"
    (note,) = (note for note in explain_plan(made) if "KV cache in" in note.text)
    assert "would not fit" in note.text
    with refused(MemoryLimitError, "`context`"):
        plan(large, "nf4", Limits(9 * GIB, 6 * GIB), MemoryOptions(context=131072))


@pytest.mark.parametrize(("context", "kv_cache"), [(32_768, "8"), (131_072, "16")])
def test_entries_of_streamed_layers_lie_in_ram_where_contexts_are_long(
    large: Path, context: int, kv_cache: str
) -> None:
    limits, options = Limits(22 * GIB, 64 * GIB), MemoryOptions(context=context, kv_cache=kv_cache)
    made = plan(large, "nf4", limits, options)
    placed, target = made.placement, made.inputs.target
    assert set(placed.entries_in_ram) <= set(placed.in_ram)
    assert len(placed.entries_in_ram) > len(placed.in_ram) - 8  # the device's last bytes have some more
    (item,) = (item for item in placed.items if item.name == "KV cache")
    of_layer = target.kv_bytes(made.kv_entries, range(1))
    assert item.on_host == len(placed.entries_in_ram) * of_layer
    assert item.on_device == (80 - len(placed.entries_in_ram) + 2) * of_layer
    assert limits.device is not None
    assert limits.device - of_layer < placed.device_bytes <= limits.device
    assert placed.ram_bytes <= limits.ram
    seconds = [made.predict_pass_s(RATES, 1, num_tokens) for num_tokens in (0, context // 2, context)]
    assert made.predict_pass_s(RATES, 1) == seconds[1]
    moved = made.entry_stream_bytes / 25e9
    assert seconds[2] - seconds[0] == pytest.approx(moved, rel=0.05)
    assert any(tells(note.text, "in RAM", f"{len(placed.entries_in_ram)}") for note in explain_plan(made))


@pytest.mark.slow
def test_plans_tell_the_context_from_which_entries_lie_in_ram(large: Path) -> None:
    limits = Limits(22 * GIB, 64 * GIB)
    first = plan(large, "nf4", limits).first_context_with_entries_in_ram()
    assert first is not None
    assert DEFAULT_CONTEXT < first < 32_768
    for context, lies in ((first - 1, False), (first, True)):
        made = plan(large, "nf4", limits, MemoryOptions(context=context, kv_cache="16"))
        assert bool(made.placement.entries_in_ram) == lies
    assert plan(large, "nf4", Limits(None, 64 * GIB)).first_context_with_entries_in_ram() is None


def test_what_reads_the_entries_of_all_layers_keeps_them_on_the_device(large: Path) -> None:
    class Reading:
        def memory_use(self, target: ModelFiles, reservation: Reservation) -> MemoryUse:
            return MemoryUse(target_entries=1000, reads_all_entries=True)

    files = model_to_plan(large, "nf4", "bf16", [])
    options = MemoryOptions(context=32768, kv_cache="16")
    made = make_plan(files, [Reading()], Limits(22 * GIB, 64 * GIB), options, 0)
    assert made.placement.entries_in_ram == ()
    assert made.kv_entries == 32768 + made.tree + 1000


def test_a_packed_head_is_unpacked_in_slices_on_a_gpu_only(large: Path) -> None:
    items = {item.name: item for item in plan(large, "q4_k_m", Limits(24 * GIB, 64 * GIB)).placement.items}
    assert items["unpacking the head"].on_device == 2 * SLICE < 2 * 128256 * 8192
    for form, limits in (("bf16", Limits(200 * GIB, 64 * GIB)), ("q4_k_m", Limits(None, 64 * GIB))):
        assert "unpacking the head" not in {item.name for item in plan(large, form, limits).placement.items}


def test_what_a_pass_is_made_of(large: Path) -> None:
    """Arithmetic alone: every matrix of the layers once, the head for as many rows as a verdict looks at first."""
    planned = plan(large, "bf16", Limits(200 * GIB, 64 * GIB))
    rates = Rates(matmul_flops={1: 1e12, 1000: 1e12})
    in_layers, head = 70_553_706_496 - 2 * 128256 * 8192, 128256 * 8192
    for width, head_rows in ((8, 8), (512, 64)):
        expected_s = 2 * (width * in_layers + head_rows * head) / 1e12
        assert planned.predict_pass_s(rates, width) == pytest.approx(expected_s, rel=1e-3)
        keys, head_dim = 4096, 128  # of attention to which every head of queries multiplies as many keys and values
        expected_s += 2 * width * 80 * 64 * 2 * keys * head_dim / 1e12
        assert planned.predict_pass_s(rates, width, keys) == pytest.approx(expected_s, rel=1e-3)


def test_a_link_is_measured_where_something_comes_through_it(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offspec.planning.probe.measure_host_to_device", lambda device, seconds: 25e9)
    device = torch.device("cuda")
    streamed, resident = (plan(large, "nf4", Limits(vram, 64 * GIB)) for vram in (24 * GIB, 80 * GIB))
    assert measure_link(streamed, device) == pytest.approx(25e9, rel=0.01)
    assert measure_link(resident, device) is None  # and no infinity, which JSON does not have


@pytest.mark.parametrize(
    ("device", "allowed", "expected"),
    [
        (24, MemoryOptions(), []),
        (24, MemoryOptions(vram=80 * GIB), [("`vram=80 GiB`", "24 GiB")]),
        (None, MemoryOptions(ram=99 * GIB), [("`ram=99 GiB`", "64 GiB")]),
        (None, MemoryOptions(vram=1 * GIB), [("`vram`", "CPU")]),
    ],
)
def test_what_was_allowed_and_is_not_there_is_noted(
    large: Path, device: int | None, allowed: MemoryOptions, expected: list[tuple[str, ...]]
) -> None:
    limits = Limits(None if device is None else device * GIB, 64 * GIB)
    advice = [note.text for note in explain_plan(plan(large, "nf4", limits, allowed)) if note.advice]
    assert len(advice) == len(expected)
    assert all(tells(text, *words) for text, words in zip(advice, expected, strict=True))


def test_a_model_from_its_config_costs_what_the_real_one_does() -> None:
    files = open_model(builtin_path("target"), "auto", [])
    sized = stored_from_config(files.config, "bf16")
    assert sized.by_name.keys() == files.stored.by_name.keys()
    for mine, real in zip(sized.layers, files.stored.layers, strict=True):
        assert mine.cost(files.dtype).resident_bytes == real.cost(files.dtype).resident_bytes


def test_headers_alone_are_enough_to_plan_and_not_to_load(tmp_path: Path) -> None:
    folder = tmp_path / "headers"
    shutil.copytree(builtin_path("target"), folder)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: 8 + int.from_bytes(content[:8], "little")])
    whole = open_model(builtin_path("target"), "auto", [])
    assert model_to_plan(folder, None, "auto", []).num_parameters == whole.num_parameters
    with refused(CheckpointError, file, "truncated"):
        open_model(folder, "auto", [])


def test_weights_that_are_not_all_there_are_sized_by_the_config_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    folder, notes = tmp_path / "model", list[Note]()
    shutil.copytree(builtin_path("target"), folder)
    file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    whole = open_model(folder, "auto", [])
    content = file.read_bytes()
    file.write_bytes(content[:100])
    with refused(CheckpointError, file, "truncated", "header"):
        model_to_plan(folder, None, "auto", notes)
    file.write_bytes(content[:9] + b"!" + content[10:])
    with refused(CheckpointError, file, "damaged"):
        model_to_plan(folder, None, "auto", notes)
    assert not notes
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    opened = [model_to_plan(folder, None, "auto", notes)]
    file.rename(folder / "model-00001-of-00002.safetensors")
    opened.append(model_to_plan(folder, None, "auto", notes))
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}))
    opened.append(model_to_plan(folder, None, "auto", notes))
    assert {files.num_parameters for files in opened} == {whole.num_parameters}
    told = [note.text for note in notes if tells(note.text, "model", "bf16", "config.json", "weights")]
    assert len(told) == 3


@pytest.mark.slow
def test_a_forecast_for_a_card_that_is_not_here(large: Path) -> None:
    forecast = make_forecast(
        LoadOptions(str(large), draft="none", ram=64 * GIB), Assumptions("RTX 4090", "nf4", 7e9), widths=(1, 256)
    )
    told = forecast.as_dict()
    assert 0.5 < told["pass_s"][1] < 1.0  # DESIGN's simulated 4090 takes 0.9 s
    assert told["limits"]["ram_bytes"] <= 64 * GIB
    assert len(told["resident_layers"]) + len(told["ram_layers"]) == 80
    together = told["memory"][-1]
    assert together["device_bytes"] == forecast.plan.placement.device_bytes
    assert together["ram_bytes"] == forecast.plan.placement.ram_bytes
    link = forecast.rates.host_to_device_bytes_per_s
    assert link is not None
    slower = replace(forecast.rates, host_to_device_bytes_per_s=link / 2)
    assert forecast.plan.predict_pass_s(slower, 1) > 1.5 * told["pass_s"][1]


def test_the_largest_context_is_the_last_that_fits(large: Path) -> None:
    limits = Limits(12 * GIB, 8 * GIB)
    most = plan(large, "nf4", limits).largest_context
    assert DEFAULT_CONTEXT < most < LLAMA_70B["max_position_embeddings"]  # type: ignore[operator]
    assert plan(large, "nf4", limits, MemoryOptions(context=most, kv_cache="16")).context == most
    with refused(MemoryLimitError, "`context`"):
        plan(large, "nf4", limits, MemoryOptions(context=most + 1, kv_cache="16"))


def test_states_of_recurrent_layers_stay_on_the_device(tmp_path: Path) -> None:
    """Qwen3.5's 27B: KV entries of 16 of its 64 layers may be in RAM, and do not grow with the states of the others."""
    config = {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "num_hidden_layers": 64,
        "linear_num_value_heads": 48,
        "max_position_embeddings": 262_144,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B | config))
    for context, vram in ((4096, 80), (65_536, 12)):
        made = plan(tmp_path, "nf4", Limits(vram * GIB, 64 * GIB), MemoryOptions(context=context, kv_cache="16"))
        items = {item.name: item for item in made.placement.items}
        kv_bytes, states = 16 * 2 * 4 * 256 * 2 * (context + made.tree), items["recurrent states"]
        assert bool(made.placement.entries_in_ram) == (vram == 12)
        slots = 2 if made.placement.entries_in_ram else 0
        assert items["KV cache"].on_device + items["KV cache"].on_host == kv_bytes * (16 + slots) // 16
        assert (states.on_device, states.on_host) == (
            made.inputs.target.kv_bytes(made.tree) - kv_bytes * made.tree // (context + made.tree),
            0,
        )


@pytest.mark.parametrize(("form", "is_unpacked"), [("nf4", False), ("fp8", True)])
def test_a_resident_model_has_the_speed_of_its_format(form: str, is_unpacked: bool, tmp_path: Path) -> None:
    """Few rows are multiplied packed where there is a kernel; others are unpacked, as many rows and exact ones are."""
    files = model_to_plan(write_config(tmp_path, LLAMA_8B), form, "bf16", [])
    resident, streamed = (
        make_plan(files, [], Limits(vram * GIB, 64 * GIB), MemoryOptions(context=512), GIB) for vram in (22, 4)
    )
    rates = KNOWN_GPUS["rtx4090"].rates(1.0 if form == "fp8" else 0.5625)
    plain_s = resident.predict_pass_s(rates, 1)
    unpacked_s = resident.predict_pass_s(replace(rates, packed_bytes_per_s=None), 1)
    assert plain_s == unpacked_s if is_unpacked else plain_s < unpacked_s / 2
    assert resident.predict_pass_s(rates, 65) > 0.95 * unpacked_s
    assert streamed.predict_pass_s(rates, 1) == streamed.predict_pass_s(replace(rates, packed_bytes_per_s=None), 1)


def test_a_layer_on_a_card_takes_its_launches(tmp_path: Path) -> None:
    """However fast the card is."""
    files = model_to_plan(write_config(tmp_path, LLAMA_8B), None, "bf16", [])
    fast = Rates(host_to_device_bytes_per_s=1e15, matmul_flops={1: 1e18}, dequantise_elements_per_s=1e18)
    on_card, on_cpu = (
        make_plan(files, [], Limits(vram, 64 * GIB), MemoryOptions(context=512), GIB) for vram in (40 * GIB, None)
    )
    assert on_card.predict_pass_s(fast, 1) == pytest.approx(32 * LAYER_LAUNCHES * GPU.launch_s, rel=0.01)
    assert on_cpu.predict_pass_s(fast, 1) < LAYER_LAUNCHES * GPU.launch_s
