"""The verdicts of `offspec plan` for well-known models and cards, one after another, to be read critically.

    python -m benchmarks.plan_transcript [--models llama-3.1-8b,qwen3-32b] [--gpus rtx3060,rtx4090] [--ram 64GiB]

Models are config.json alone, as published without what plans do not need. Formats are those that people take: Q4_K_M,
and MXFP4 for gpt-oss.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.mixtures import SHAPES
from offspec.cli.main import run

_ATTENTION = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
_LLAMA = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 131072}
_QWEN3 = SHAPES["qwen3-30b-a3b"].config
_GPT_OSS = {"model_type": "gpt_oss", "sliding_window": 128, **SHAPES["gpt-oss-20b"].config}
_GPT_OSS |= {"num_local_experts": 32, "quantization_config": {"quant_method": "mxfp4"}}


def _shape(*numbers: int) -> dict[str, int]:
    return dict(zip(_ATTENTION, numbers, strict=True))


MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-70B": _LLAMA | _shape(8192, 28672, 80, 64, 8),
    "Llama-3.1-405B": _LLAMA | _shape(16384, 53248, 126, 128, 8),
    "Qwen3-32B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        **_shape(5120, 25600, 64, 64, 8),
    },
    "Qwen3.5-27B": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "head_dim": 256,
        "max_position_embeddings": 262144,
        "linear_num_value_heads": 48,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
        **_shape(5120, 17408, 64, 24, 4),
    },
    "Llama-3.1-8B": _LLAMA | _shape(4096, 14336, 32, 32, 8),
    "Qwen3-30B-A3B": _QWEN3,
    "gpt-oss-20b": _GPT_OSS,
    "gpt-oss-120b": _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128, "num_experts": 128},
    "Qwen3-235B-A22B": {
        **_QWEN3,
        **_shape(4096, 12288, 94, 64, 4),
        "moe_intermediate_size": 1536,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "max_position_embeddings": 163840,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        **_shape(7168, 18432, 61, 128, 128),
    },
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--gpus", default="rtx3060,rtx3090,rtx4090,rtx5090")
    parser.add_argument("--ram", default="64GiB")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models.split(","):
            path = Path(folder) / name
            path.mkdir()
            (path / "config.json").write_text(json.dumps(MODELS[name]))
            form = [] if name.startswith("gpt-oss") else ["--format", "q4_k_m"]
            for gpu in args.gpus.split(","):
                asked = ["plan", name, *form, "--gpu", gpu, "--ram", args.ram]
                print(f"\n$ offspec {' '.join(asked)}", flush=True)
                run(["plan", str(path), *asked[2:], "-q"])


if __name__ == "__main__":
    main()
