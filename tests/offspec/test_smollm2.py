"""A model that nobody here trained: SmolLM2-135M-Instruct in GGUF says what transformers says of the same file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from offspec import Engine, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIB = 2**20
NUM_TOKENS = 16
PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Translate to German: good morning",
    "def fibonacci(n):",
    "List three prime numbers.",
    "Who wrote Hamlet?",
    "Why is the sky blue?",
    "2 + 2 =",
    "Name a fruit that is yellow.",
    "Explain recursion in one sentence.",
    "Write a limerick about a cat 🐈.",
    "你好",
    "What does HTTP stand for?",
    "Give me a recipe for pancakes.",
    "Continue: once upon a time",
    "What is the boiling point of water?",
    "Sort these: 3, 1, 2",
    "Who are you?",
    "Write SQL that counts the rows of a table called users.",
    "Summarise: The quick brown fox jumps over the lazy dog.",
)


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    loaded = Engine.load(str(smollm2), draft="lookup", device="cpu", dtype="fp32", context=512)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32)
    return model.eval()


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_equals_transformers(engine: Engine, reference: PreTrainedModel, prompt: str) -> None:
    ids = engine.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    steps = engine.generate(ids, SamplingParams(NUM_TOKENS))
    said = [token for step in steps for token in step.token_ids]
    with torch.no_grad():
        whole = reference.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )[0].tolist()
    assert said == whole[len(ids) :]


def offspec(*args: object) -> str:
    command = [sys.executable, "-m", "offspec", *map(str, args)]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=dict(os.environ)).stdout


def test_streamed_it_says_the_same(engine: Engine, smollm2: Path) -> None:
    """With 48 MiB beside all that is no layer, some of which read ahead."""
    common = ["--draft", "none", "--dtype", "fp32", "--context", 128, "-q", "--json"]
    plan = json.loads(offspec("plan", smollm2, *common))
    rest = sum(
        row["ram_bytes"]
        for row in plan["memory"]
        if not row["what"].startswith(("resident layers", "layers in RAM", "streaming buffers", "total"))
    )
    question = PROMPTS[0]
    answer = json.loads(
        offspec(
            "run",
            smollm2,
            question,
            *common,
            "--ram",
            f"{rest + 48 * MIB}B",
            "--max-new-tokens",
            12,
            "--temperature",
            0,
        )
    )
    assert answer["stats"]["stream_bytes_per_pass"] > 0
    ids = engine.tokenizer.encode_chat([{"role": "user", "content": question}])
    said = [token for step in engine.generate(ids, SamplingParams(12)) for token in step.token_ids]
    assert answer["token_ids"] == said
