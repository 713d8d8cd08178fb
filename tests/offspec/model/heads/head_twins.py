"""Published heads in plain torch, written from their projects' sources, and folders with random ones.

EAGLE: SafeAILab/EAGLE (eagle/model/cnets1.py and cnets.py). A twin computes one path at a time, without a cache: row i
has the features of the place before its token, and attends to all rows before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from offspec.model.decoder import Decoder

from ....pair import CONFIG

EAGLE_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": CONFIG["vocab_size"],
    "draft_vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
}


def random_tensors(shapes: Mapping[str, Sequence[int]], seed: int = 0) -> dict[str, Tensor]:
    """Matrices with small numbers, norms near 1."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(tuple(shape), generator=generator) * (0.2 if len(shape) > 1 else 0.1) + (len(shape) == 1)
        for name, shape in shapes.items()
    }


def eagle_tensors(
    version: int, hidden: int = 32, layer: str = "midlayer", num_taps: int = 3, *, has_norms: bool = False
) -> dict[str, Tensor]:
    """Random weights of an EAGLE head, by the names of its project's files. has_norms: EAGLE-1 as Mistral has it."""
    wide = hidden * (2 if version == 3 else 1)
    shapes: dict[str, Sequence[int]] = {f"{layer}.self_attn.{name}_proj.weight": (16, wide) for name in "kv"}
    shapes |= {f"{layer}.self_attn.q_proj.weight": (32, wide), f"{layer}.self_attn.o_proj.weight": (hidden, 32)}
    shapes |= {f"{layer}.mlp.{name}_proj.weight": (40, hidden) for name in ("gate", "up")}
    shapes |= {f"{layer}.mlp.down_proj.weight": (hidden, 40), f"{layer}.post_attention_layernorm.weight": (hidden,)}
    if version == 1:
        norms = dict.fromkeys(("norm.weight", f"{layer}.input_layernorm.weight"), (hidden,)) if has_norms else {}
        return random_tensors(shapes | norms | {"fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,)})
    norms = ("norm.weight", f"{layer}.input_layernorm.weight", f"{layer}.hidden_norm.weight")
    shapes |= dict.fromkeys(norms, (hidden,))
    shapes |= {"fc.weight": (hidden, num_taps * 32), "lm_head.weight": (96, hidden)}
    columns = torch.arange(96) * 3  # the target's tokens
    known = torch.zeros(CONFIG["vocab_size"], dtype=torch.bool).index_fill(0, columns, True)
    return random_tensors(shapes) | {"d2t": columns - torch.arange(96), "t2d": known}


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, pickled: str = "") -> Path:
    """A head's folder; with its weights as a pickle of this name, if one is given."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(dict(tensors), folder / pickled)
    else:
        save_file(dict(tensors), folder / "model.safetensors")
    return folder


class EagleTwin:
    """EAGLE's reference forward, one path at a time."""

    def __init__(self, version: int, tensors: Mapping[str, Tensor], target: Decoder, **flags: bool) -> None:
        self._version, self._tensors, self._target, self._flags = version, tensors, target, flags
        prefixes = ("midlayer.", "layers.0.")
        self._layer = {
            n.split(".", 1 if "mid" in n else 2)[-1]: t for n, t in tensors.items() if n.startswith(prefixes)
        }

    def fused(self, states: Tensor) -> Tensor:
        return states if self._version == 1 else states @ self._tensors["fc.weight"].T

    def logits(self, features: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits [1, columns] and features [1, hidden] after the last of a path's tokens, given T features before."""
        embedded = self._target.embedding_rows(torch.tensor(list(tokens)))
        hidden = self._layer_of(embedded, features)
        if self._version == 1:
            if "norm.weight" in self._tensors:
                hidden = _norm(hidden, self._tensors["norm.weight"])
            return self._target.linear_logits(hidden)[-1:], hidden[-1:]
        normed = _norm(hidden, self._tensors["norm.weight"])
        return (normed @ self._tensors["lm_head.weight"].T)[-1:], (
            normed if self._flags.get("norm_output") else hidden
        )[-1:]

    def _layer_of(self, embedded: Tensor, features: Tensor) -> Tensor:
        w = self._layer
        if self._version == 1:
            residual = torch.cat((embedded, features), -1) @ self._tensors["fc.weight"].T + self._tensors["fc.bias"]
            x = _norm(residual, w["input_layernorm.weight"]) if "input_layernorm.weight" in w else residual
        else:
            normed = _norm(features, w["hidden_norm.weight"])
            residual = normed if self._flags.get("norm_before_residual") else features
            x = torch.cat((_norm(embedded, w["input_layernorm.weight"]), normed), -1)
        x = residual + _attention(x, w)
        inner = _norm(x, w["post_attention_layernorm.weight"])
        gate, up = (inner @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T


class FspadTwin(EagleTwin):
    """FSPAD's reference forward (Luc4Gui/FSPAD, cnets_fspad.py)."""

    def __init__(self, tensors: Mapping[str, Tensor], target: Decoder) -> None:
        super().__init__(1, tensors, target)

    def logits(self, features: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        f, w = {n.removeprefix("fc."): t for n, t in self._tensors.items() if n.startswith("fc.")}, self._layer
        embedded = self._target.embedding_rows(torch.tensor(list(tokens)))
        x = torch.cat((embedded, features), -1) @ f["fc.weight"].T + f["fc.bias"]
        up = _norm(x, f["post_attention_layernorm.weight"]) @ f["mlp.up_proj.weight"].T
        x = x + (F.silu(embedded @ f["mlp.gate_proj.weight"].T) * up) @ f["mlp.down_proj.weight"].T
        x = x + _attention(x, w)
        gate, up = (
            _norm(x, w["post_attention_layernorm.weight"]) @ w[f"mlp.{n}_proj.weight"].T for n in ("gate", "up")
        )
        both = torch.cat((x, x), -1) + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T
        return self._target.linear_logits(both[-1:, :HIDDEN]), both[-1:, HIDDEN:]


def fspad_tensors() -> dict[str, Tensor]:
    shapes: dict[str, Sequence[int]] = {
        name: tensor.shape for name, tensor in eagle_tensors(1, layer="layers.0").items()
    }
    shapes = {name.replace("fc.", "fc.fc."): shape for name, shape in shapes.items()}
    shapes |= {f"fc.mlp.{name}_proj.weight": (40, HIDDEN) for name in ("gate", "up")}
    shapes |= {"fc.mlp.down_proj.weight": (HIDDEN, 40), "fc.post_attention_layernorm.weight": (HIDDEN,)}
    return random_tensors(shapes | {"layers.0.mlp.down_proj.weight": (2 * HIDDEN, 40)})


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def _attention(x: Tensor, w: Mapping[str, Tensor], heads: int = 4, kv_heads: int = 2) -> Tensor:
    length, dim = len(x), 8
    q, k, v = ((x @ w[f"self_attn.{name}_proj.weight"].T).view(length, -1, dim).transpose(0, 1) for name in "qkv")
    angles = torch.arange(length)[:, None] / 10000.0 ** (torch.arange(0, dim, 2) / dim)
    cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
    q, k = (part * cos + torch.cat((-part[..., dim // 2 :], part[..., : dim // 2]), -1) * sin for part in (q, k))
    k, v = (part.repeat_interleave(heads // kv_heads, 0) for part in (k, v))
    scores = (q @ k.transpose(1, 2)) / dim**0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).reshape(length, -1) @ w["self_attn.o_proj.weight"].T


# ------------------------------------------------------------------------------------------------ without attention
#
# FasterDecoding/Medusa (medusa_model.py), zankner/Hydra (prefix_mlp_head.py), vLLM (mlp_speculator.py). Each twin gives
# the logits after a path of tokens, whose first one is the text's last, from the final state before that token.

MEDUSA_CONFIG = {"medusa_num_heads": 3, "medusa_num_layers": 2}
HYDRA_CONFIG = {"hydra_num_heads": 3, "hydra_num_layers": 2, "hydra_head_arch": "mlp", "grounded_heads": True}
HYDRA_PREFIX_CONFIG = {**HYDRA_CONFIG, "hydra_head_arch": "prefix-mlp"}
MLP_CONFIG = {"model_type": "mlp_speculator", "n_predict": 3, "emb_dim": 32, "inner_dim": 24, "scale_input": True}
RECURRENT_CONFIG = {"offspec_head": "recurrent", "intermediate_size": 40}
VOCAB, HIDDEN, INNER = CONFIG["vocab_size"], 32, 24


def medusa_tensors() -> dict[str, Tensor]:
    shapes: dict[str, Sequence[int]] = {}
    for step in range(3):
        for block in range(2):
            shapes |= {f"{step}.{block}.linear.weight": (HIDDEN, HIDDEN), f"{step}.{block}.linear.bias": (HIDDEN,)}
        shapes[f"{step}.2.weight"] = (VOCAB, HIDDEN)
    return random_tensors(shapes)


def medusa_logits(tensors: Mapping[str, Tensor], state: Tensor, embedded: Tensor) -> Tensor:
    step = len(embedded) - 1
    for block in range(2):
        name = f"{step}.{block}.linear"
        state = state + F.silu(state @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"])
    return state @ tensors[f"{step}.2.weight"].T


PREFIX = "prefix_embeding_layer."


def hydra_tensors(*, has_prefix: bool = False) -> dict[str, Tensor]:
    """has_prefix: Hydra++, with a layer over the text, and with dropouts, which count as layers."""
    first, second, head = ("1", "3", ".1") if has_prefix else ("0", "1", "")
    shapes: dict[str, Sequence[int]] = {"input_embed_fn.weight": (VOCAB, HIDDEN)}
    for step in range(3):
        for part in ("linear", "res_connection"):
            shapes |= {f"hydra_mlp.{step}.{first}.{part}.weight": (HIDDEN, (2 + step) * HIDDEN)}
            shapes |= {f"hydra_mlp.{step}.{first}.{part}.bias": (HIDDEN,)}
        shapes |= {f"hydra_mlp.{step}.{second}.linear.weight": (HIDDEN, HIDDEN)}
        shapes |= {f"hydra_mlp.{step}.{second}.linear.bias": (HIDDEN,)}
        shapes |= {f"hydra_lm_head.{step}{head}.weight": (VOCAB, HIDDEN), f"hydra_lm_head.{step}{head}.bias": (VOCAB,)}
    return random_tensors(shapes | _prefix_shapes() if has_prefix else shapes)


def _prefix_shapes() -> dict[str, Sequence[int]]:
    inner = CONFIG["intermediate_size"]
    shapes: dict[str, Sequence[int]] = {f"layers.0.self_attn.{name}_proj.weight": (16, HIDDEN) for name in "kv"}
    shapes |= {f"layers.0.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qo"}
    shapes |= {f"layers.0.mlp.{name}_proj.weight": (inner, HIDDEN) for name in ("gate", "up")}
    shapes |= {"layers.0.mlp.down_proj.weight": (HIDDEN, inner), "norm.weight": (HIDDEN,)}
    shapes |= {f"layers.0.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return {f"{PREFIX}{name}": shape for name, shape in shapes.items()}


def hydra_prefix(tensors: Mapping[str, Tensor], states: Tensor) -> Tensor:
    """States [T, hidden] after the layer over the text."""
    start = f"{PREFIX}layers.0."
    w = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
    x = states + _attention(_norm(states, w["input_layernorm.weight"]), w)
    inner = _norm(x, w["post_attention_layernorm.weight"])
    gate, up = (inner @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return _norm(x + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T, tensors[f"{PREFIX}norm.weight"])


def hydra_logits(tensors: Mapping[str, Tensor], state: Tensor, embedded: Tensor) -> Tensor:
    step = len(embedded) - 1
    first, second, head = ("1", "3", ".1") if f"{PREFIX}norm.weight" in tensors else ("0", "1", "")

    def product(name: str, x: Tensor) -> Tensor:
        return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    x, mlp = torch.cat((state, embedded.flatten())), f"hydra_mlp.{step}"
    x = product(f"{mlp}.{first}.res_connection", x) + F.silu(product(f"{mlp}.{first}.linear", x))
    x = x + F.silu(product(f"{mlp}.{second}.linear", x))
    return product(f"hydra_lm_head.{step}{head}", x)


def mlp_tensors() -> dict[str, Tensor]:
    shapes: dict[str, Sequence[int]] = {}
    for step in range(3):
        shapes |= {f"emb.{step}.weight": (VOCAB, INNER), f"head.{step}.weight": (VOCAB, INNER)}
        shapes |= {f"proj.{step}.weight": (INNER, INNER if step else HIDDEN)}
        shapes |= {f"ln.{step}.weight": (INNER,), f"ln.{step}.bias": (INNER,)}
    return {f"speculator.{name}": tensor for name, tensor in random_tensors(shapes).items()}


def mlp_logits(tensors: Mapping[str, Tensor], state: Tensor, tokens: Sequence[int]) -> Tensor:
    def of(name: str, step: int, part: str = "weight") -> Tensor:
        return tensors[f"speculator.{name}.{step}.{part}"]

    def normed(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean() + 1e-6)

    weight = 0.5 ** (0.5 / 3)
    added = ((1 - weight**2) * (INNER / 2)) ** 0.5
    state = normed(state) / 2**0.5
    for step, token in enumerate(tokens):
        state = of("proj", step) @ state + added / weight * of("emb", step)[token]
        state = F.gelu(normed(state) * of("ln", step) + of("ln", step, "bias"))
    return of("head", len(tokens) - 1) @ state


CLOVER2_CONFIG = {"clover": {"num_heads": 5, "num_layers": 2}, "num_attention_heads": 4}
CELLS = ("clover_head_mlp_rnn", "clover_head_mlp_rnn2")


def clover2_tensors() -> dict[str, Tensor]:
    """With a table of embeddings of its own, as XiaoBin1992/clover writes it."""
    inner = CONFIG["intermediate_size"]
    shapes: dict[str, Sequence[int]] = {"clover_embed_tokens.weight": (VOCAB, HIDDEN)}
    shapes |= dict.fromkeys(("clover_norm.weight", "clover_head_norm.weight", "clover_head_mlp.bias"), (HIDDEN,))
    shapes |= {"clover_head_mlp.weight": (HIDDEN, HIDDEN), "clover_head_mlp2.weight": (HIDDEN, 2 * HIDDEN)}
    for name in (*(f"{cell}.{part}" for cell in CELLS for part in "qkv"), "clover_head_mlp2"):
        shapes = {f"{name}.weight": (HIDDEN, HIDDEN)} | shapes | {f"{name}.bias": (HIDDEN,)}
    shapes |= {f"{cell}.input_layernorm.weight": (HIDDEN,) for cell in CELLS}
    for layer in range(2):
        shapes |= {f"layers.{layer}.self_attn.{name}_proj.weight": (16, HIDDEN) for name in "kv"}
        shapes |= {f"layers.{layer}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qo"}
        shapes |= {f"layers.{layer}.mlp.{name}_proj.weight": (inner, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"layers.{layer}.mlp.down_proj.weight": (HIDDEN, inner)}
        shapes |= {f"layers.{layer}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return random_tensors(shapes)


def clover2_states(tensors: Mapping[str, Tensor], states: Tensor, tokens: Sequence[int]) -> Tensor:
    """The states [1 + P, hidden] for logits: after the text, and after each token of a path of P.

    states [T, hidden]: the target's. tokens [T + P]: those after each state, then the path's.
    """
    embedded = tensors["clover_embed_tokens.weight"][torch.tensor(list(tokens))]

    def product(name: str, x: Tensor) -> Tensor:
        return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]

    def cell(name: str, x: Tensor, token: Tensor) -> Tensor:
        normed = _norm(x, tensors[f"{name}.input_layernorm.weight"])
        inputs = (product(f"{name}.q", normed), product(f"{name}.k", token), product(f"{name}.v", token))
        q, k, v = (part.view(len(x), 4, -1) for part in inputs)
        cosine = (q * k).sum(-1) / (q.norm(dim=-1) * k.norm(dim=-1))
        return x + (cosine[..., None] * v).view(len(x), -1)

    x = cell(CELLS[0], states, embedded[: len(states)])
    for layer in range(2):
        w = {n.removeprefix(f"layers.{layer}."): t for n, t in tensors.items() if n.startswith(f"layers.{layer}.")}
        x = x + _attention(_norm(x, w["input_layernorm.weight"]), w)
        inner = _norm(x, w["post_attention_layernorm.weight"])
        gate, up = (inner @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T
    x = _norm(x, tensors["clover_norm.weight"])[-1:]
    found = [product("clover_head_mlp", x)]
    for token in embedded[len(states) :, None]:
        x = cell(CELLS[1], x, token)
        found.append(product("clover_head_mlp2", torch.cat((x, token), -1)))
    return _norm(torch.cat(found), tensors["clover_head_norm.weight"])


DFLASH_CONFIG = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "block_size": 6,
    "num_target_layers": 6,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2, 4]},
}


DSPARK_CONFIG = {
    **{key: value for key, value in DFLASH_CONFIG.items() if key != "dflash_config"},
    "architectures": ["Qwen3DSparkModel"],
    "mask_token_id": 7,
    "target_layer_ids": [0, 2, 4],
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def dspark_tensors() -> dict[str, Tensor]:
    """DFlash's, with a head of its own, a Markov head and a confidence head (DeepSpec, dspark/qwen3/modeling.py)."""
    shapes: dict[str, Sequence[int]] = {f"{name}.weight": (VOCAB, HIDDEN) for name in ("embed_tokens", "lm_head")}
    shapes |= {f"markov_head.markov_w{number}.weight": (VOCAB, 6) for number in (1, 2)}
    shapes |= {"confidence_head.proj.weight": (1, HIDDEN + 6), "confidence_head.proj.bias": (1,)}
    return dflash_tensors() | random_tensors(shapes, 1)


def markov_logits(tensors: Mapping[str, Tensor], tokens: Sequence[int]) -> Tensor:
    """Logits [T, vocab] that follow from the token before each place (DeepSpec, markov_head.py: VanillaMarkov)."""
    embedding, out = (tensors[f"markov_head.markov_w{number}.weight"] for number in (1, 2))
    return embedding[torch.tensor(list(tokens))] @ out.T


def dflash_tensors() -> dict[str, Tensor]:
    shapes: dict[str, Sequence[int]] = {"fc.weight": (HIDDEN, 3 * HIDDEN)}
    shapes |= dict.fromkeys(("hidden_norm.weight", "norm.weight"), (HIDDEN,))
    for layer in range(2):
        shapes |= {f"layers.{layer}.self_attn.{name}_proj.weight": (16, HIDDEN) for name in "kv"}
        shapes |= {f"layers.{layer}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qo"}
        shapes |= {f"layers.{layer}.self_attn.{name}_norm.weight": (8,) for name in "qk"}
        shapes |= {f"layers.{layer}.mlp.{name}_proj.weight": (40, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"layers.{layer}.mlp.down_proj.weight": (HIDDEN, 40)}
        shapes |= {f"layers.{layer}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return random_tensors(shapes)


def dflash_states(
    tensors: Mapping[str, Tensor], states: Tensor, block: Tensor, window: int | None = None, *, is_causal: bool = False
) -> Tensor:
    """States [B, hidden] of the block (z-lab/dflash, model.py, without its cache); its first is not used there.

    states [T, 3 * hidden]: the target's. block [B, hidden]: embeddings of the text's last token and of masks. window,
    is_causal: of the second layer.
    """
    context = _norm(states @ tensors["fc.weight"].T, tensors["hidden_norm.weight"])
    length, dim, x = len(context) + len(block), 8, block
    angles = torch.arange(length)[:, None] / 10000.0 ** (torch.arange(0, dim, 2) / dim)
    cos, sin = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))

    def turned(heads: Tensor, first: int) -> Tensor:
        swapped = torch.cat((-heads[..., dim // 2 :], heads[..., : dim // 2]), -1)
        return heads * cos[first:] + swapped * sin[first:]

    for layer in range(2):
        w = {n.removeprefix(f"layers.{layer}."): t for n, t in tensors.items() if n.startswith(f"layers.{layer}.")}
        normed = _norm(x, w["input_layernorm.weight"])
        both = torch.cat((context, normed))
        q = (normed @ w["self_attn.q_proj.weight"].T).view(len(block), 4, dim)
        k, v = ((both @ w[f"self_attn.{name}_proj.weight"].T).view(length, 2, dim) for name in "kv")
        q = turned(_norm(q, w["self_attn.q_norm.weight"]).transpose(0, 1), len(context))
        k = turned(_norm(k, w["self_attn.k_norm.weight"]).transpose(0, 1), 0).repeat_interleave(2, 0)
        scores = q @ k.transpose(1, 2) / dim**0.5
        if layer == 1:
            behind = torch.arange(len(context), length)[:, None] - torch.arange(length)
            scores[:, (behind < 0 if is_causal else behind <= -(window or length))] = -torch.inf
            scores[:, behind >= (window or length)] = -torch.inf
        out = scores.softmax(-1) @ v.transpose(0, 1).repeat_interleave(2, 0)
        x = x + out.transpose(0, 1).reshape(len(block), -1) @ w["self_attn.o_proj.weight"].T
        inner = _norm(x, w["post_attention_layernorm.weight"])
        gate, up = (inner @ w[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T
    return _norm(x, tensors["norm.weight"])


def recurrent_tensors() -> dict[str, Tensor]:
    shapes = {"cell.weight": (HIDDEN, 2 * HIDDEN), "cell.bias": (HIDDEN,)}
    return random_tensors({**shapes, "up.weight": (40, 2 * HIDDEN), "down.weight": (HIDDEN, 40)})
