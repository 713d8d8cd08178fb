"""A mixture of experts in GGUF: all on the card, and with its experts in RAM."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.mixtures import SHAPES, write_file
from offspec import Engine, SamplingParams
from offspec.loaders.accelerators.accelerator import accelerator_of

from .bench import Bench
from .results import Figures

NUM_TOKENS, NUM_TEXTS, LONG_PROMPT = 48, 16, 1000


def mixture(bench: Bench, name: str, num_layers: str, *memories: str) -> Iterator[Figures]:
    """Tokens/s of one text and of several at once, and of a long prompt; texts are of random tokens without drafts.

    num_layers: of the file, which is written in the shape of a published model. memories: of the card, in GiB each, or
    "all".
    """
    path, shape = bench.folder / f"{name}-{num_layers}.gguf", SHAPES[name]
    if not path.exists():
        write_file(path, shape, int(num_layers))
    random, found = np.random.default_rng(0), Figures()
    vocabulary = shape.config["vocab_size"]
    prompts = [[int(token) for token in row] for row in random.integers(1, vocabulary, (NUM_TEXTS, 8))]
    long = [[int(token) for token in random.integers(1, vocabulary, LONG_PROMPT)]]
    for memory in memories:
        limit = {} if memory == "all" else {"vram": f"{memory}GiB"}
        began = time.perf_counter()
        with Engine.load(
            str(path), draft="none", device=str(bench.device), texts=NUM_TEXTS, context=LONG_PROMPT + 64, **limit
        ) as engine:
            of_memory: dict[str, Any] = {"load_s": time.perf_counter() - began}
            found[memory] = of_memory
            if engine.plan is not None:
                experts = engine.plan.placement.experts
                of_memory |= {"on_device": experts.device, "in_ram": experts.host, "resident": experts.are_resident}
            tokens(engine, prompts[:1], 8)  # kernels are compiled, and choices measured
            for kind, asked, count in (
                ("one_text", prompts[:1], NUM_TOKENS),
                (f"{NUM_TEXTS}_texts", prompts, NUM_TOKENS // 2),
                ("prompt", long, 1),
            ):
                began = time.perf_counter()
                texts = tokens(engine, asked, count)
                seconds = time.perf_counter() - began
                of_memory[f"{kind}_s"] = seconds
                counted = sum(map(len, texts)) if kind != "prompt" else LONG_PROMPT
                of_memory[f"{kind}_tokens_per_s"] = counted / seconds
                of_memory[f"{kind}_ids"] = [each[:6] for each in texts[:2]]
            of_memory["peak_device_bytes"] = accelerator_of(bench.device).held_bytes()[1]
        accelerator_of(bench.device).release_memory()
        yield found


def tokens(engine: Engine, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """The texts' tokens."""
    texts: list[list[int]] = [[] for _ in prompts]
    for index, step in engine.generate_many(prompts, SamplingParams(num_tokens, ignore_eos=True)):
        texts[index] += step.token_ids
    return texts
