"""LayerSkip's checkpoints open as published, and their exits need no layer of their own."""

from __future__ import annotations

import json
from pathlib import Path

from offspec.checkpoints.opening import model_to_plan
from offspec.drafts.base import DraftOptions, OpenRequest
from offspec.drafts.kinds import open_draft
from offspec.drafts.self_draft import OpenedSelf
from offspec.loaders.streaming.placement import Limits
from offspec.notes import Note
from offspec.planning.memory import MemoryOptions
from offspec.planning.plan import make_plan

# facebook/layerskip-llama3.2-1B: Llama's layout, in which nothing says that it was trained for early exits.
LAYERSKIP = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def test_a_layerskip_checkpoint_is_planned_without_an_exit_layer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LAYERSKIP))
    notes = list[Note]()
    files = model_to_plan(tmp_path, None, "auto", notes)
    opened = open_draft("target", OpenRequest(DraftOptions("self:4"), files, None, "auto", notes))
    assert isinstance(opened, OpenedSelf)
    assert opened.file is None
    layer = files.stored.layers[0].cost(files.dtype).resident_bytes
    plan = make_plan(files, [opened], Limits(None, 2**40), MemoryOptions(context=64), 0)
    little = Limits(None, plan.placement.ram_bytes - 8 * layer)
    placement = make_plan(files, [opened], little, MemoryOptions(context=64), 0).placement
    assert set(placement.resident) >= set(range(4))
    assert placement.streamed
    (model, num_layers), *others = opened.guessing(placement).layers
    assert (model, num_layers, others) == (files, 4, []), "a round goes through no layer behind the exit"
