#!/usr/bin/env python3
"""Asks of every model type that transformers writes text with whether it runs through its modules, and runs it right.

For each type a tiny random model is written, opened as offspec opens any checkpoint, and scores a prompt with a tree of
guesses and a second tree behind a part of the first; each row's logits are compared with those that transformers gives
for the row's own text. One line a type: `right`, `wrong`, `refused` with the reason, or why no tiny model was made.
Arguments: model types; none is all of them. Nothing is downloaded.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar

from offspec.checkpoints.load import load_decoder
from offspec.checkpoints.opening import open_model
from offspec.errors import OffspecError
from offspec.model.decoder import CachedDecoder
from offspec.planning.plan import all_resident

MAX_PARAMETERS = 30_000_000
TOLERANCE = 1e-3  # of the largest logit
CHAIN = [5, 9, 33, 70, 71, 72, 40, 41, 9, 33, 70, 71, 72]
TOKENS, PARENTS = [3, 4, 50, 6, 7, 8], [-1, -1, 0, 1, 2, 2]
KEPT = [0, 2, 5]
# What makes a model tiny, under all the names that configs have for it; each config takes those that it knows.
HEADS = {"num_attention_heads": 4, "n_head": 4, "num_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
EXPERTS = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4)
CHOSEN = dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2)
WIDTHS = dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32)
INNER = dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size"), 48)
NARROW = dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16)
ROUTING = {"n_group": 1, "topk_group": 1, "num_shared_experts": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
DEPTHS = dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 3)
KINDS = {"full_attn_idxs": [1]}  # LFM2's layers with attention; by default all
LENGTHS = {"max_position_embeddings": 64, "n_positions": 64, "sliding_window": 8, "rotary_dim": 4, "vocab_size": 128}
# transformers zeroes a padding token's row in some models that it loads.
SPECIALS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
TINY = HEADS | LATENT | EXPERTS | CHOSEN | WIDTHS | INNER | NARROW | ROUTING | DEPTHS | KINDS | LENGTHS | SPECIALS


_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
_HEADS_OF_STATE = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 1, "chunk_size": 8}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "num_kv_shared_layers": 0}
OF_TYPE: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "gemma3n_text": {**_SLIDING, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128},
    "gemma4_text": {**_SLIDING, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention", "mamba"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 1, "chunk_size": 8},
    "nemotron_h": {**_HEADS_OF_STATE, "layers_block_type": ["mamba", "attention", "mlp"]},
    "zamba2": {**_MAMBA, "layers_block_type": ["mamba", "hybrid", "mamba"], "num_mem_blocks": 1, "adapter_rank": 8},
}


def tiny_config(model_type: str) -> Any:
    known = transformers.AutoConfig.for_model(model_type)
    names = {*known.to_dict(), *known.attribute_map}
    settings = {name: value for name, value in TINY.items() if name in names} | OF_TYPE.get(model_type, {})
    if "kv_lora_rank" in settings:  # latents are expanded to all heads
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    return transformers.AutoConfig.for_model(model_type, **settings)


@torch.no_grad()
def write_model(model_type: str, folder: Path) -> Any:
    """A random model; what transformers reads back. Raises ValueError for one that is not tiny."""
    library: Any = transformers.AutoModelForCausalLM
    config = tiny_config(model_type)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in library.from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size:,} parameters")
    model = library.from_config(tiny_config(model_type), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(parameter + 0.1 * noise if parameter.dim() == 1 else 1.2 * noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    return library.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def largest_difference(reference: Any, text: CachedDecoder) -> float:
    """Between logits of all rows, as a share of the largest logit."""
    mask, paths = np.zeros((len(TOKENS), len(TOKENS)), bool), list[list[int]]()
    for node, parent in enumerate(PARENTS):
        mask[node] = mask[parent] if parent >= 0 else False
        mask[node, node] = True
        paths.append([*(paths[parent] if parent >= 0 else []), TOKENS[node]])
    depths = np.array([len(path) for path in paths])
    first = text.score(CHAIN, np.array(TOKENS), depths, mask)
    text.keep(KEPT)
    second = text.score([11], np.array([12, 13]), np.array([1, 1]), np.eye(2, dtype=bool))
    behind = [*CHAIN, *(TOKENS[node] for node in KEPT), 11]
    texts = [CHAIN, *(CHAIN + path for path in paths), behind, [*behind, 12], [*behind, 13]]
    rows = zip(texts, torch.cat((first, second)), strict=True)
    expected = ((reference(torch.tensor([ids]), use_cache=False).logits[0, -1].float(), row) for ids, row in rows)
    return max(float((row - wanted).abs().max() / wanted.abs().max()) for wanted, row in expected)


def judge(model_type: str, folder: Path) -> str:
    try:
        reference = write_model(model_type, folder)
    except Exception as exc:  # noqa: BLE001 (configs that have sizes of other names raise what they like)
        return f"not made: {' '.join(str(exc).split())[:120]}"
    try:
        files = open_model(folder, "fp32", [])
    except OffspecError as exc:
        return f"refused: {str(exc).removeprefix(f'{folder}: ')}"
    decoder = load_decoder(files, all_resident(files), torch.device("cpu"))
    found = largest_difference(reference, CachedDecoder(decoder))
    return f"{'right' if found < TOLERANCE else 'wrong'}: {found:.0e}, {type(decoder).__name__}"


def main(model_types: Sequence[str]) -> None:
    disable_progress_bar()
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    verdicts = Counter[str]()
    for model_type in model_types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        with tempfile.TemporaryDirectory() as folder:
            verdict = judge(model_type, Path(folder))
        verdicts[f"{verdict.split(':')[0]} {verdict.rpartition(', ')[2] if verdict.startswith('right') else ''}"] += 1
        print(f"{model_type:28}{verdict}", flush=True)
    print(", ".join(f"{count} {verdict.strip()}" for verdict, count in sorted(verdicts.items())))


if __name__ == "__main__":
    main(sys.argv[1:])
