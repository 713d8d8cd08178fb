"""A streamed model that transformers' modules compute stays within what was granted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ...pair import VOCAB_SIZE, build_pair

NUM_LAYERS = 12
CONFIG = {
    "model_type": "dots1",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
    "n_shared_experts": 1,
    "max_position_embeddings": 1024,
    "eos_token_id": 0,
}
PROGRAM = """
import json, sys
import transformers
from offspec import Engine, SamplingParams

def status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) * 1024

granted = status("VmRSS") + 380 * 2**20
engine = Engine.load(sys.argv[1], draft="lookup", device="cpu", dtype="fp32", context=512, ram=granted)
steps = engine.generate(list(range(5, 205)), SamplingParams(4, ignore_eos=True))
num_tokens = sum(len(step.token_ids) for step in steps)
placement, layer = engine.plan.placement, engine.plan.layers[0].slot_bytes
print(json.dumps({"peak": status("VmHWM"), "granted": granted, "planned": placement.ram_bytes, "layer": layer,
                  "on_disk": len(placement.on_disk), "num_tokens": num_tokens}))
"""


@pytest.mark.nightly("measures the memory of a process with a model")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_what_was_planned_and_no_layer_more(tmp_path: Path) -> None:
    folder, pair = tmp_path / "model", build_pair(tmp_path)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pair.target / name, folder)
    save_file(_tensors(), folder / "model.safetensors")
    ended = subprocess.run([sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told["num_tokens"] == 4
    assert told["on_disk"] >= NUM_LAYERS // 2
    assert told["planned"] <= told["granted"]
    assert told["peak"] <= told["planned"] + told["layer"]


def _tensors() -> dict[str, torch.Tensor]:
    """All of them small numbers; 28 MiB a layer."""
    hidden, inner, kv = 512, 768, 256
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "self_attn.q_norm.weight": (64,),
        "self_attn.k_norm.weight": (64,),
        "mlp.gate.weight": (4, hidden),
        "mlp.gate.e_score_correction_bias": (4,),
    }
    for mlp in ("shared_experts", *(f"experts.{number}" for number in range(4))):
        layer |= {f"mlp.{mlp}.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        layer[f"mlp.{mlp}.down_proj.weight"] = (hidden, inner)
    shapes = {f"model.layers.{index}.{name}": shape for index in range(NUM_LAYERS) for name, shape in layer.items()}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCAB_SIZE, hidden))
    shapes["model.norm.weight"] = (hidden,)
    generator = torch.Generator().manual_seed(0)
    return {name: 0.03 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
