"""Reads config.json's settings of rotary position embeddings, in the layouts of transformers 4 and 5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offspec.loaders.files.checkpoint import show

from ..errors import CheckpointError, UnsupportedModelError
from .config_values import Json, check_range, is_positive_number, mapping, numbers, positive, positive_number

ROPE_NEEDED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "proportional": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": (),
}
ROPE_OPTIONAL = (
    "factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "llama_4_scaling_beta",
)
THETA_RANGE = (1.0, 1e15)  # outside it, powers may exceed fp32's range
SCALING_RANGE = (1e-6, 1e6)  # of RoPE's other parameters
ROPE_KINDS = tuple(ROPE_NEEDED)
ROPE_HEADER = ("rope_theta", "rope_type", "type", "partial_rotary_factor")  # not parameters of the scaling
ORIGINAL_CONTEXT = "original_max_position_embeddings"
LONG_FACTORS, SHORT_FACTORS = "long_factor", "short_factor"
FULL, SLIDING = LAYER_KINDS = ("full_attention", "sliding_attention")
LINEAR = "linear_attention"


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding.

    kind: default, linear, proportional, llama3, yarn or longrope. scaling: its parameters by their names in the file.
    """

    theta: float
    kind: str
    scaling: Json


def read_rope(config: Json) -> RopeConfig:
    """RoPE settings from either layout: `rope_theta` + `rope_scaling`, or `rope_parameters` (transformers 5).

    If a file has both, a user added `rope_scaling` to extend the context, and it takes precedence. The key
    `default_theta` is the family's default.
    """
    new, old = (mapping(config, key) for key in ("rope_parameters", "rope_scaling"))
    if kinds := _kinds(old or new):
        raise UnsupportedModelError(f"separate RoPE for each kind of layer ({show(kinds[0])}) is not supported")
    scaling = dict(old or new)
    named = [source for source in (scaling, config, new) if source.get("rope_theta") is not None]
    theta = positive_number(named[0] if named else {}, "rope_theta", config.get("default_theta", 10000.0))
    check_range("rope_theta", theta, THETA_RANGE)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise UnsupportedModelError(f"RoPE scaling {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    _check_numbers(kind, scaling)
    if kind in ("llama3", "yarn", "longrope"):
        stated = config if config.get(ORIGINAL_CONTEXT) is not None else scaling
        scaling[ORIGINAL_CONTEXT] = positive(stated, ORIGINAL_CONTEXT, config.get("max_position_embeddings"))
    if kind == "longrope":
        _complete_longrope(config, scaling)
    kept = {key: value for key, value in scaling.items() if key not in ROPE_HEADER}
    if kind == "proportional":
        kept["partial_rotary_factor"] = read_rotary_share(config)
    return RopeConfig(theta, kind, kept)


def read_ropes(config: Json) -> tuple[RopeConfig, RopeConfig]:
    """RoPE of layers with full attention, and of layers with a window.

    transformers 5 nests `rope_parameters` by kinds of layers. In earlier versions, `rope_theta` and `rope_scaling` are
    for full attention; the other layers have `rope_local_base_freq`, or `rope_theta` without scaling.
    """
    new = mapping(config, "rope_parameters")
    flat = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
    if not _kinds(new):
        local_theta = config.get("rope_local_base_freq") or config.get("default_local_theta")
        local_theta = local_theta or config.get("rope_theta") or new.get("rope_theta")
        return read_rope(config), read_rope({**flat, "rope_theta": local_theta})
    full, local = ({**flat, "rope_parameters": mapping(new, kind)} for kind in (FULL, SLIDING))
    if config.get("rope_scaling"):  # a user added it
        full["rope_scaling"] = config["rope_scaling"]
    local |= {"default_theta": config.get("default_local_theta") or config.get("default_theta", 10000.0)}
    return read_rope(full), read_rope(local)


def has_null_theta(config: Json) -> bool:
    """Whether `rope_theta` is null wherever it stands, and not only missing. Some families have no RoPE then."""
    sources = (config, mapping(config, "rope_parameters"), mapping(config, "rope_scaling"))
    thetas = [source["rope_theta"] for source in sources if "rope_theta" in source]
    return bool(thetas) and all(theta is None for theta in thetas)


def read_rotary_share(config: Json) -> float:
    """The share of a head's dimensions that RoPE rotates: `partial_rotary_factor` in either layout."""
    key = "partial_rotary_factor"
    sources = (mapping(config, "rope_scaling"), mapping(config, "rope_parameters"), config)
    value = next((source[key] for source in sources if source.get(key) is not None), 1.0)
    if not is_positive_number(value) or value > 1:
        raise CheckpointError(f"config.json: {key} must be a number above 0, and 1 at most, not {show(value)}")
    return float(value)


def _kinds(parameters: Json) -> list[str]:
    """The kinds of layers, if the parameters are nested by them."""
    return [key for key, value in parameters.items() if isinstance(value, dict)]


def _check_numbers(kind: str, scaling: Json) -> None:
    wanted = ROPE_NEEDED[kind] + tuple(key for key in ROPE_OPTIONAL if scaling.get(key) not in (None, 0))
    if wrong := [key for key in wanted if not is_positive_number(scaling.get(key))]:
        raise CheckpointError(
            f"config.json: RoPE scaling {kind!r} needs a positive {wrong[0]}, not {show(scaling.get(wrong[0]))}"
        )
    for key in wanted:
        check_range(key, scaling[key], SCALING_RANGE)
    if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
        raise CheckpointError("config.json: RoPE scaling 'llama3' needs a low_freq_factor below its high_freq_factor")


def _complete_longrope(config: Json, scaling: dict[str, Any]) -> None:
    """Check LongRoPE's factors. The default of `factor` is the ratio of the two contexts."""
    for key in (SHORT_FACTORS, LONG_FACTORS):
        scaling[key] = numbers(scaling.get(key), key)
    if scaling.get("factor") is None:
        scaling["factor"] = positive(config, "max_position_embeddings") / scaling[ORIGINAL_CONTEXT]
    elif not is_positive_number(scaling["factor"]):
        raise CheckpointError(f"config.json: factor must be a positive number, not {show(scaling['factor'])}")
