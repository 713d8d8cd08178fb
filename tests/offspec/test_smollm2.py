"""A model that nobody here trained: SmolLM2-135M-Instruct in GGUF says what transformers says of the same file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from offspec import Engine, SamplingParams, loading
from offspec.cli.main import run

from .checkpoints.test_grouped_models import RATES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.slow
MIB = 2**20
NUM_TOKENS = 8
PROMPTS = ("What is the capital of France?", "你好")
MORE_PROMPTS = (
    "def fibonacci(n):",
    "Write a haiku about the sea.",
    "Translate to German: good morning",
    "List three prime numbers.",
    "Who wrote Hamlet?",
    "Why is the sky blue?",
    "2 + 2 =",
    "Name a fruit that is yellow.",
    "Explain recursion in one sentence.",
    "Write a limerick about a cat 🐈.",
    "What does HTTP stand for?",
    "Give me a recipe for pancakes.",
    "Continue: once upon a time",
    "What is the boiling point of water?",
    "Sort these: 3, 1, 2",
    "Who are you?",
    "Write SQL that counts the rows of a table called users.",
    "Summarise: The quick brown fox jumps over the lazy dog.",
)


@contextmanager
def kernels() -> Iterator[None]:
    """Products in the one way that is fast without having measured which one is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "with_arithmetic", lambda rates, *_: rates)
        yield


@contextmanager
def loaded(target: str, draft: str, **options: Any) -> Iterator[Engine]:
    with kernels(), Engine.load(target, draft=draft, device="cpu", dtype="fp32", **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    with loaded(str(smollm2), "lookup", context=512) as engine:
        yield engine


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> PreTrainedModel:
    gguf = pytest.importorskip("gguf")
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    memmap, read = np.memmap, gguf.GGUFReader  # views of the former take several times as long as an array's

    def without_tokens(path: str) -> Any:
        """The tokens' names are a hundred thousand values, which a model does not need."""
        reader = read(path)
        for name in ("tokens", "token_type", "merges"):
            del reader.fields[f"tokenizer.ggml.{name}"]
        return reader

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gguf.gguf_reader.np.memmap", lambda *args, **options: np.asarray(memmap(*args, **options)))
        for name, function in {"GGUFReader": without_tokens, "get_tensor_name_map": gguf.get_tensor_name_map}.items():
            patch.setattr(gguf, name, cache(function))  # asked for the same thing many times
        model = AutoModelForCausalLM.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32)
    return model.eval()


@pytest.mark.parametrize(
    "prompt", [*PROMPTS, *(pytest.param(prompt, marks=pytest.mark.nightly) for prompt in MORE_PROMPTS)]
)
def test_greedy_text_equals_transformers(engine: Engine, reference: PreTrainedModel, prompt: str) -> None:
    ids = engine.tokenizer.encode_chat([{"role": "user", "content": prompt}])
    steps = engine.generate(ids, SamplingParams(NUM_TOKENS))
    said = [token for step in steps for token in step.token_ids]
    with torch.no_grad():
        logits = reference(torch.tensor([[*ids, *said]])).logits[0, len(ids) - 1 : -1]
    assert said == logits.argmax(-1).tolist()
    assert len(said) == NUM_TOKENS or said[-1] == reference.config.eos_token_id


def test_streamed_it_says_the_same(
    engine: Engine, smollm2: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 48 MiB beside all that is no layer, some of which read ahead."""
    monkeypatch.setattr("sys.stdin", None)
    monkeypatch.setattr("offspec.tools.forecast.measure_rates", lambda *_, **__: RATES)

    def said_by(command: str, *args: object) -> Any:
        common = ("--draft", "none", "--dtype", "fp32", "--context", 128, "-q", "--json")
        code = run([str(arg) for arg in (command, smollm2, *args, *common)])
        out, err = capsys.readouterr()
        assert code == 0, err
        return json.loads(out)

    rest = sum(
        row["ram_bytes"]
        for row in said_by("plan")["memory"]
        if not row["what"].startswith(("resident layers", "layers in RAM", "streaming buffers", "total"))
    )
    question = PROMPTS[0]
    answer = said_by("run", question, "--ram", f"{rest + 48 * MIB}B", "--max-new-tokens", 4, "--temperature", 0)
    assert answer["stats"]["stream_bytes_per_pass"] > 0
    ids = engine.tokenizer.encode_chat([{"role": "user", "content": question}])
    assert answer["token_ids"] == [
        token for step in engine.generate(ids, SamplingParams(4)) for token in step.token_ids
    ]
