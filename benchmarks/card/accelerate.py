"""The same shape by transformers and accelerate in the same memory of the card: layers that do not fit are in RAM."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from .bench import Bench
from .jobs import JOBS
from .results import Figures

PROMPT_TOKENS, NUM_TOKENS = 20, 6


def accelerate(bench: Bench, name: str, memory: str) -> Iterator[Figures]:
    """Seconds of a prompt and of each token, with `device_map` and no values of importance in the weights."""
    try:
        import accelerate
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as exc:
        yield {"missing": str(exc)}
        return
    shape = JOBS[name].target
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=2048,
    )
    with accelerate.init_empty_weights():
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    allowed: dict[int | str, str] = {0: f"{memory}GiB", "cpu": "100GiB"}
    places = accelerate.infer_auto_device_map(model, allowed, no_split_module_classes=["LlamaDecoderLayer"])
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model = accelerate.dispatch_model(model, places, main_device=0).eval()
    found: dict[str, Any] = {
        "accelerate": accelerate.__version__,
        "in_ram": sum(place == "cpu" for place in places.values()),
        "seconds": [],
    }
    ids, past = torch.arange(5, 5 + PROMPT_TOKENS, device=bench.device)[None], None
    for _ in range(1 + NUM_TOKENS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.inference_mode():
            out = model(ids, past_key_values=past, use_cache=True)
        ids, past = out.logits[:, -1:].argmax(-1), out.past_key_values
        torch.cuda.synchronize()
        found["seconds"].append(time.perf_counter() - began)
    found["tokens_per_s"] = NUM_TOKENS / sum(found["seconds"][1:])
    found["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    yield found
