"""A 4-bit checkpoint that transformers made says here what it says there, resident and streamed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offspec.checkpoints.load import WeightSettings, load_decoder
from offspec.checkpoints.opening import open_model
from offspec.loaders.formats.process_state import bitsandbytes_functional
from offspec.loaders.streaming.placement import Limits, Placement, Slots, places_of
from offspec.model.decoder import CachedDecoder, Decoder
from offspec.planning.plan import all_resident

from ..fakes import FAMILIES, VOCAB_SIZE, build

CPU = torch.device("cpu")
NO_NODES = np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 0), bool)
PROMPT = [(7 * i) % VOCAB_SIZE for i in range(20)]
NUM_TOKENS = 24


def quantized(tmp_path: Path, **options: Any) -> tuple[Path, Any]:
    """A tiny checkpoint in 4 bits, and the model that transformers has of it, computing in fp32."""
    bitsandbytes_functional()  # its import is noisy, and warnings are errors here
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    family = FAMILIES["llama-gqa"]
    build(replace(family, settings={**family.settings, "intermediate_size": 128}), tmp_path / "source")
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **options)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "source", quantization_config=settings, device_map="cpu", dtype=torch.float32
    )
    model.save_pretrained(tmp_path / "packed")
    # In eval mode bitsandbytes repacks on some CPUs, and rounds the scales to bf16; there is no dropout to mind.
    return tmp_path / "packed", model.train()


@torch.no_grad()
def greedy_of(model: Any) -> list[int]:
    text = list(PROMPT)
    for _ in range(NUM_TOKENS):
        text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(PROMPT) :]


def greedy(decoder: Decoder) -> list[int]:
    text, chain, said = CachedDecoder(decoder), PROMPT, list[int]()
    for _ in range(NUM_TOKENS):
        chain = [int(text.score(chain, *NO_NODES)[-1].argmax())]
        said += chain
    return said


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": torch.bfloat16},
        {"bnb_4bit_quant_type": "fp4", "llm_int8_skip_modules": ["lm_head", "down_proj"]},
    ],
    ids=["nf4-nested", "nf4-bf16-storage", "fp4-skips"],
)
def test_greedy_tokens_are_those_of_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    folder, model = quantized(tmp_path, **options)
    files = open_model(folder, "fp32", [])
    num_layers = files.config.num_layers
    slot = max(layer.record.nbytes for layer in files.stored.layers)
    on_disk = Placement(places_of(on_disk=range(num_layers)), Slots(2, 0, slot), (), Limits(None, 0), 0, 0)
    expected = greedy_of(model)
    assert len(set(expected)) > 8
    for placement in (all_resident(files), on_disk):
        decoder = load_decoder(files, placement, CPU, WeightSettings(has_far_embedding=True))
        assert greedy(decoder) == expected
        decoder.weights.close()
