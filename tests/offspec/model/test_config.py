"""What is read from a config.json, and what is refused in one line."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offspec.errors import CheckpointError, OffspecError, UnsupportedModelError
from offspec.model.config import ModelConfig, read_config

from ...examples import examples
from ...fakes import FAMILIES, config_json, in_old_layout
from ...refusals import refused

LLAMA = config_json(FAMILIES["llama-gqa"])
MISTRAL = config_json(FAMILIES["mistral-window"])
QWEN2 = config_json(FAMILIES["qwen2-window"])
QWEN3 = config_json(FAMILIES["qwen3"])


GRANITE_H, FALCON_H1, NEMOTRON_H = (config_json(FAMILIES[name]) for name in ("granite-h", "falcon-h1", "nemotron-h"))


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def rope(**parameters: Any) -> dict[str, Any]:
    return LLAMA | {"rope_parameters": {"rope_theta": 10000.0, **parameters}}


def outcome(config: dict[str, Any]) -> ModelConfig | str:
    try:
        return read_config(config)
    except OffspecError as error:
        return str(error)


# ------------------------------------------------------------------------------------------------ what is read


# Gemma 4 is younger than the old layout.
def test_both_layouts_say_the_same() -> None:
    for family in FAMILIES.keys() - {"gemma4", "gemma4-layer-inputs"}:
        new = config_json(FAMILIES[family])
        assert read_config(in_old_layout(new)) == read_config(new), family


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MISTRAL, (9, 9, 9)),
        (MISTRAL | {"sliding_window": None}, (None, None, None)),
        (without(MISTRAL, "sliding_window"), (4096, 4096, 4096)),
        (QWEN2, (None, 8, 8)),
        (without(QWEN2, "sliding_window"), (None, 4096, 4096)),
        (QWEN2 | {"use_sliding_window": False}, (None, None, None)),
        (QWEN2 | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, (8, None, 8)),
        (QWEN2 | {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3}, (None, None, None)),
        (MISTRAL | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, (9, None, 9)),
    ],
)
def test_windows(config: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read_config(config).windows == windows


def test_missing_values_mean_what_they_mean_in_transformers() -> None:
    """The defaults of transformers where a key may be missing; old checkpoints rely on them."""
    keys = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "tie_word_embeddings")
    config = read_config(without(LLAMA, *keys))
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps, config.tied_head) == (4, 16, 1e-6, False)
    assert (config.rope.theta, config.rope.kind) == (10000.0, "default")
    assert read_config(without(QWEN3, "head_dim")).head_dim == 128
    assert read_config(LLAMA | {"num_key_value_heads": None, "head_dim": None}).num_kv_heads == 4


@pytest.mark.parametrize(("said", "factor", "expected"), [(64, 4.0, 256), (256, 4.0, 256)])
def test_yarn_stretches_the_context_where_the_config_does_not_say_so_itself(
    said: int, factor: float, expected: int
) -> None:
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": 64}
    assert read_config(LLAMA | {"max_position_embeddings": said, "rope_scaling": scaling}).max_context == expected


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_the_original_context_is_looked_for_where_it_may_stand(kind: str) -> None:
    parameters = {"rope_type": kind, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    name = "original_max_position_embeddings"

    def original(config: dict[str, Any]) -> Any:
        return read_config(config).rope.scaling[name]

    assert original(rope(**parameters) | {name: 99}) == 99
    assert original(rope(**parameters, **{name: 77})) == 77
    assert original(rope(**parameters, **{name: 77}) | {name: 99}) == 99
    assert original(rope(**parameters)) == LLAMA["max_position_embeddings"]


def test_scaling_added_by_hand_to_a_new_config_counts() -> None:
    """Model cards say: for long texts add `rope_scaling` to config.json."""
    added = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "rope_scaling": added}
    found = read_config(config).rope
    assert (found.kind, found.theta, found.scaling["factor"]) == ("yarn", 5000.0, 4.0)
    assert found == read_config(rope(**added, rope_theta=5000.0) | {"rope_theta": 1.0}).rope


def windows_of(name: str, **said: Any) -> tuple[int | None, ...]:
    return read_config(without(config_json(FAMILIES[name]), "layer_types") | said).windows


def test_which_layers_of_a_family_have_a_window() -> None:
    """The patterns that transformers assumes where `layer_types` is missing."""
    assert windows_of("gemma2") == (8, None, 8, None)
    assert windows_of("gemma3", num_hidden_layers=7) == (8, 8, 8, 8, 8, None, 8)
    assert windows_of("gemma3", sliding_window_pattern=2) == (8, None, 8, None)
    assert windows_of("olmo3") == windows_of("exaone4") == windows_of("cohere2") == (8, 8, 8, None)
    assert windows_of("exaone4", sliding_window=None) == (None,) * 4
    assert windows_of("phi3") == windows_of("starcoder2") == (9, 9, 9)
    assert windows_of("smollm3-window") == (None, 8, 8, None)
    without_window = without(config_json(FAMILIES["phi3"]), "sliding_window")
    assert read_config(without_window).windows == (None, None, None)


def test_which_layers_of_a_family_have_no_positions() -> None:
    def unrotated(name: str, **said: Any) -> tuple[int, ...]:
        return read_config(config_json(FAMILIES[name]) | said).unrotated

    assert unrotated("cohere2") == unrotated("exaone4") == unrotated("smollm3") == (1, 3)
    assert unrotated("exaone4", sliding_window=None) == unrotated("llama-gqa") == ()
    assert unrotated("smollm3", no_rope_layers=[1, 1, 0, 1]) == (2,)
    assert unrotated("granite-dense-hybrid", position_embedding_type=None) == (0, 1, 2)
    assert unrotated("olmo-hybrid") == (0, 1, 2, 3)
    assert unrotated("olmo-hybrid", rope_parameters={"rope_theta": 500000.0}) == ()
    assert unrotated("olmo-hybrid", rope_parameters=None) == ()


def test_which_layers_of_a_hybrid_attend() -> None:
    """What transformers assumes where `layer_types` is missing."""

    def attending(name: str, **said: Any) -> list[int]:
        config = read_config(without(config_json(FAMILIES[name]), "layer_types") | said)
        return [layer for layer in range(config.num_layers) if "attention" in config.parts_of(layer)]

    assert attending("qwen3.5") == attending("olmo-hybrid", num_hidden_layers=7) == [3]
    assert attending("olmo-hybrid", num_hidden_layers=2) == [1]
    assert attending("lfm2", full_attn_idxs=[0, 2]) == [0, 2]
    assert attending("lfm2") == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("said", "size"),
    [
        ({}, 96),  # 1.3 * 64 = 83, the next multiple of 16
        ({"block_auto_adjust_ff_dim": False}, 96),
        ({"block_auto_adjust_ff_dim": False, "block_ff_dim": 50}, 50),
    ],
)
def test_the_size_of_lfm2s_mlp(said: dict[str, Any], size: int) -> None:
    modeling = pytest.importorskip("transformers.models.lfm2")
    config = config_json(FAMILIES["lfm2"]) | said
    module = modeling.modeling_lfm2.Lfm2MLP(modeling.Lfm2Config(**without(config, "model_type")))
    assert read_config(config).intermediate_size == module.w1.out_features == size


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_longrope_by_all_its_names(kind: str) -> None:
    said = config_json(FAMILIES["phi3-longrope"])
    found = read_config(said | {"rope_parameters": {**said["rope_parameters"], "rope_type": kind}})
    assert found == read_config(said)
    assert (found.rope.kind, found.rope.scaling["factor"]) == ("longrope", 2.0)


GEMMA3_4B = {  # as Google published it: most keys are left out
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "eos_token_id": [1, 106],
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}


def test_a_config_of_text_and_images_that_leaves_out_what_transformers_assumes() -> None:
    config = read_config(GEMMA3_4B)
    assert (config.model_type, config.num_heads, config.num_kv_heads, config.head_dim) == ("gemma3_text", 8, 4, 256)
    assert (config.vocab_size, config.tied_head, config.max_context) == (262208, True, 131072)
    assert config.windows == ((1024,) * 5 + (None,)) * 5 + (1024,) * 4
    assert config.local_rope is not None
    assert (config.rope.theta, config.rope.kind, config.local_rope.theta, config.local_rope.kind) == (
        1e6,
        "linear",
        1e4,
        "default",
    )
    assert (config.attention_scale, config.logit_cap, config.activation) == (1 / 16, None, "gelu_pytorch_tanh")


def test_a_family_without_a_field_is_llama(monkeypatch: pytest.MonkeyPatch) -> None:
    """What exit layers and drafts have learnt is found by it, so fields that other families bring must not show."""
    assert read_config(LLAMA).differences() == read_config(QWEN3).differences() == {}
    assert read_config(config_json(FAMILIES["arcee"])).differences().keys() == {"activation", "mlp"}


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("model_type", ["gpt2", None, ["llama"]])
def test_an_unknown_architecture_is_named_with_the_supported_ones(model_type: Any) -> None:
    supported = ("llama", "mistral", "ministral", "qwen2", "qwen3")
    with refused(UnsupportedModelError, repr(model_type), "GPT2LMHeadModel", *supported):
        read_config(LLAMA | {"model_type": model_type, "architectures": ["GPT2LMHeadModel"]})


def test_nemotron_hs_layers_may_be_letters() -> None:
    config = without(NEMOTRON_H, "layers_block_type") | {"hybrid_override_pattern": "M-*M"}
    assert read_config(config) == read_config(NEMOTRON_H)


@pytest.mark.parametrize("limit", [{"__float__": "Infinity"}, math.inf, None])
def test_the_steps_of_mamba2_may_be_without_limit(limit: object) -> None:
    """transformers 5 writes the first; JSON of Python's the second; early files have no such key."""
    for config in (GRANITE_H, FALCON_H1):
        mamba = read_config(config | {"time_step_limit": None if limit is None else [0.0, limit]}).mamba
        assert mamba is not None
        assert mamba.step_limits == (0.0, math.inf)


def test_experts_of_nemotron_h_are_refused() -> None:
    with refused(UnsupportedModelError, "'moe'", "not supported", "nemotron_h"):
        read_config(NEMOTRON_H | {"layers_block_type": ["linear_attention", "moe"]})


@pytest.mark.parametrize(
    ("family", "settings", "key"),
    [
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("mixtral", {"num_local_experts": 10**6}, "num_experts_per_tok"),
        ("glm4-moe", {"n_group": 3}, "n_group"),
        ("glm4-moe", {"n_group": 8, "topk_group": 4}, "topk_group"),
        ("glm4-moe", {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, "topk_group"),
    ],
)
def test_impossible_mixtures_are_refused(family: str, settings: dict[str, Any], key: str) -> None:
    with refused(CheckpointError, key):
        read_config(config_json(FAMILIES[family]) | settings)


@pytest.mark.parametrize("key", ["num_experts", "n_routed_experts"])
def test_the_number_of_experts_has_several_names_and_a_default(key: str) -> None:
    config = without(config_json(FAMILIES["qwen3-moe"]), "num_local_experts")
    for settings, num in (({key: 7}, 7), ({}, 128)):
        experts = read_config(config | settings).experts
        assert experts is not None
        assert experts.num == num


def test_minimax_states_the_share_of_rope_in_numbers() -> None:
    config = config_json(FAMILIES["minimax-m2"])
    assert read_config(without(config, "rope_parameters") | {"rotary_dim": 12}).rotary_share == 0.5


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (without(LLAMA, "model_type"), "architecture"),
        (LLAMA | {"hidden_act": "mish"}, "mish"),
        (config_json(FAMILIES["gemma3"]) | {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
        (config_json(FAMILIES["gpt-oss"]) | {"swiglu_limit": 8.0}, "swiglu_limit 8.0"),
        (config_json(FAMILIES["olmoe"]) | {"clip_qkv": 5.0}, "clip_qkv 5.0"),
        (config_json(FAMILIES["granite-dense-hybrid"]) | {"layer_types": ["moe"] * 3}, "'moe'"),
        (config_json(FAMILIES["hunyuan"]) | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        (LLAMA | {"quantization_config": {"quant_method": "hqq"}}, "hqq"),
        (LLAMA | {"is_causal": False}, "is_causal"),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention"),
        (rope(rope_type="dynamic", factor=2.0), "dynamic"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (QWEN2 | {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with refused(UnsupportedModelError, *named.split()):
        read_config(config)


REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)


@pytest.mark.parametrize("key", REQUIRED)
def test_sizes_are_positive_integers(key: str) -> None:
    for value in (None, 0, "64", 64.0, True, [64]):
        with refused(CheckpointError, key, "integer", 1, repr(value)):
            read_config(LLAMA | {key: value})
    with refused(CheckpointError, key):
        read_config(without(LLAMA, key))


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (LLAMA | {"num_key_value_heads": 3}, "num_attention_heads 4 multiple num_key_value_heads 3"),
        (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000"),
        (LLAMA | {"head_dim": 15}, "head_dim 15 odd"),
        (LLAMA | {"rms_norm_eps": 1e300}, "rms_norm_eps 1e-30 0.1"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window"),
        (QWEN2 | {"max_window_layers": -1}, "max_window_layers"),
        (QWEN2 | {"layer_types": ["full_attention"] * 2}, "layer_types 2 layers num_hidden_layers 3"),
        (
            config_json(FAMILIES["glm4"]) | {"rope_parameters": {"partial_rotary_factor": 0.2}},
            "partial_rotary_factor 3 16",
        ),
        (config_json(FAMILIES["smollm3"]) | {"no_rope_layers": [1]}, "no_rope_layers 4 layers"),
        (config_json(FAMILIES["lfm2"]) | {"layer_types": ["conv", [], "conv", 1]}, "layer_types list 4"),
        (GRANITE_H | {"mamba_n_heads": 3}, "mamba_n_heads 3 128 mamba_expand"),
        (GRANITE_H | {"mamba_n_groups": 3}, "4 heads multiple 3 groups"),
        (GRANITE_H | {"time_step_limit": [0.1, {"__float__": "Infinite"}]}, "time_step_limit list two numbers"),
        (FALCON_H1 | {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers 5 4"),
        (without(NEMOTRON_H, "layers_block_type") | {"hybrid_override_pattern": ""}, "layers_block_type list"),
        (config_json(FAMILIES["olmo-hybrid"]) | {"linear_num_key_heads": 0}, "linear_num_key_heads"),
        (LLAMA | {"rope_parameters": [1]}, "rope_parameters object"),
        (rope(rope_theta="large"), "rope_theta"),
        (rope(rope_type="linear", factor=-2.0), "'linear' positive factor -2.0"),
        (rope(rope_type="longrope", factor=2.0), "short_factor list None"),
        (rope(rope_type="longrope", short_factor=[1.0] * 8, long_factor=[2.0] * 7), "long_factor 7 numbers"),
        (rope(rope_type="yarn", factor=2.0, original_max_position_embeddings=1.5), "original_max_position_embeddings"),
        (rope(rope_type="llama3", factor=8.0, high_freq_factor=4.0), "'llama3' positive low_freq_factor"),
        (MISTRAL | {"sliding_window": 2**64 + 8}, "sliding_window at most 2147483647"),
        (rope(rope_theta=1e300), "rope_theta 1 1e+15"),
        (rope(rope_type="yarn", factor=2.0, attention_factor=[]), "positive attention_factor []"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(config: dict[str, Any], named: str) -> None:
    with refused(CheckpointError, *named.split()):
        read_config(config)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
PARAMETERS = ("rope_theta", "rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "mscale")


@pytest.mark.slow
@given(st.data())
@examples(500)
def test_whatever_stands_there_gives_a_config_or_one_line(data: st.DataObject) -> None:
    config = dict(data.draw(st.sampled_from([config_json(family) for family in FAMILIES.values()])))
    scaling = {"rope_type": data.draw(st.sampled_from(["default", "linear", "llama3", "yarn"])), "factor": 2.0}
    scaling |= data.draw(st.dictionaries(st.sampled_from(PARAMETERS), ANYTHING, max_size=2), label="scaling")
    config["rope_parameters"] = scaling
    keys = st.sampled_from([*config, "layer_types", "rope_scaling", "quantization_config", "architectures"])
    config |= data.draw(st.dictionaries(keys, ANYTHING, max_size=3), label="config")
    result = outcome(config)
    assert isinstance(result, ModelConfig) or len(result.splitlines()) == 1


@pytest.mark.parametrize(
    "said",
    [
        {"rope_parameters": {"\x85": {}}},
        {"model_type": "\x85", "architectures": ["\x85"]},
        {"model_type": "\x85", "architectures": "\x85"},
        {"quantization_config": {"quant_method": "\x85"}},
    ],
    ids=["rope", "architectures", "architecture", "quantisation"],
)
def test_a_line_break_in_a_name_breaks_no_line(said: dict[str, Any]) -> None:
    result = outcome(config_json(FAMILIES["llama-gqa"]) | said)
    assert isinstance(result, str)
    assert len(result.splitlines()) == 1
