"""A draft from nothing, for targets without a small sibling: `offspec distill TARGET --new-draft hidden,layers`.

It is a decoder of Llama's layout with the target's vocabulary. Its layers are random. Its embedding, which is also its
head, is the target's embedding reduced to its principal components. So tokens that the target treats alike are alike
from the first step on.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from offspec.loaders.accelerators.accelerator import accelerator_of
from offspec.loaders.machine.hardware import read_gpu, read_memory
from offspec.loaders.units import format_size

from ..checkpoints.opening import ModelFiles
from ..checkpoints.saving import NewCheckpoint
from ..errors import MemoryLimitError, UsageError
from ..model.config import ModelConfig, read_config
from ..model.decoder import Decoder, wanted_shapes
from ..model.names import EMBEDDING
from .draft_distillation import Untrained

HEAD_DIMS = (64, 32, 16, 8)  # the first that gives two heads or more
DEVIATION = 0.02  # of random weights, and of the embedding
TRAINED_BYTES = 16  # of a weight in training: the weight, its gradient, and Adam's two numbers
TABLE_ROWS = 4096  # rows of the target's embedding read at once


def new_config(target: ModelFiles, hidden: int, layers: int) -> dict[str, Any]:
    """config.json of a small draft for `target`. Raises UsageError for a hidden size that has no heads."""
    if layers < 1:
        raise UsageError(f"a draft has at least 1 layer, not {layers} (`new_draft`)")
    sizes = [size for size in HEAD_DIMS if hidden % (2 * size) == 0]
    if hidden < 1 or not sizes:
        raise UsageError(
            f"a hidden size of {hidden} cannot be divided into heads; choose a multiple of 16 (`new_draft`)"
        )
    config, heads = target.checkpoint.config, hidden // sizes[0]
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    return ends | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": target.config.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": -(-8 * hidden // (3 * 32)) * 32,  # 8/3, as in Llama
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": sizes[0],
        "max_position_embeddings": target.config.max_context,
        "rope_theta": target.config.rope.theta,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }


def new_draft(files: ModelFiles, target: Decoder, hidden: int, layers: int, *, seed: int = 0) -> Untrained:
    """An untrained draft on the target's device.

    Raises UsageError for shapes that are none, MemoryLimitError for a draft that is too large to be trained here.
    """
    config_json = new_config(files, hidden, layers)
    config = read_config(config_json)
    _check_memory(config, target.device)
    generator = torch.Generator().manual_seed(seed)
    tensors = dict[str, Tensor]()
    for name, shape in wanted_shapes(config).items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape)
            continue
        deviation = (
            DEVIATION / (2 * layers) ** 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else DEVIATION
        )
        tensors[name] = deviation * torch.randn(shape, generator=generator)
    tensors[EMBEDDING] = components(target, hidden)
    placed = {name: tensor.to(target.device) for name, tensor in tensors.items()}
    name = f"new {hidden},{layers} {seed}"
    return Untrained(name, config, placed, NewCheckpoint(config_json, files.checkpoint, torch.bfloat16))


def _check_memory(config: ModelConfig, device: torch.device) -> None:
    """Raises MemoryLimitError."""
    needed = TRAINED_BYTES * sum(math.prod(shape) for shape in wanted_shapes(config).values())
    free = read_gpu(device).free_bytes if accelerator_of(device).has_own_memory else read_memory().available_bytes
    if needed > free:
        raise MemoryLimitError(
            f"training a draft of hidden size {config.hidden_size} and {config.num_layers} layers needs "
            f"{format_size(needed)}, and {format_size(free)} are free; choose a smaller one (`new_draft`)"
        )


@torch.inference_mode()
def components(target: Decoder, count: int) -> Tensor:
    """The target's embedding [V, H] in its first `count` principal components: fp32 [V, count], deviation DEVIATION.

    Raises UsageError for more components than the embedding has.
    """
    size, width = target.config.vocab_size, target.config.hidden_size
    if count > width:
        raise UsageError(
            f"the target's embedding has {width} components, not {count}; choose a smaller draft (`new_draft`)"
        )
    rows = torch.cat([_rows(target, first, min(first + TABLE_ROWS, size)) for first in range(0, size, TABLE_ROWS)])
    rows -= rows.mean(0)
    _, directions = torch.linalg.eigh((rows.T @ rows).double())  # ascending
    chosen = directions[:, -count:].flip(-1).float()
    signs = chosen.gather(0, chosen.abs().argmax(0, keepdim=True)).sign()  # eigenvectors have no sign of their own
    projected: Tensor = rows @ (chosen * signs)
    return projected * (DEVIATION / projected.std())


def _rows(target: Decoder, first: int, last: int) -> Tensor:
    return target.weights.rows(target.config.embedding_name, torch.arange(first, last)).float().cpu()


def parse_shape(text: str) -> tuple[int, int]:
    """ "128,2" → (128, 2). Raises UsageError."""
    parts = text.split(",")
    if len(parts) != 2 or not all(part.strip().isdecimal() and len(part) < 8 for part in parts):
        raise UsageError(f"`new_draft={text}` is not HIDDEN,LAYERS such as 256,2")
    return int(parts[0]), int(parts[1])
