"""The real pair against llama.cpp on the same files: greedy texts, and the perplexity of a fixed text.

    python -m benchmarks.real.correct [FILE ...] [--prompts 4] [--tokens 64]    # by default the fetched pair

Each file is run plainly, drafted (a chat's text has its draft from the first file on: the last file is the draft), and
streamed from the disk with half of its layers resident, in fp32. offspec's three texts must be equal. llama.cpp rounds
the inputs of its products to 8 bits, so its text may take another token at a near-tie. Therefore each of its tokens is
compared with offspec's logits after the same text: `gap` is how far the token's logit lies behind the largest.

Perplexity: `exp` of the mean negative log-probability of held-out Python code, token by token, by both programs.
llama.cpp's server reports the likeliest tokens only; the few places where the text's token is not among the first
1,000 are left out for both. The exit status is 1 if a text or a perplexity (0.5 %) differs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.planning.plan import PROGRAM_ITEM, WORKSPACE_BYTES

from .models import DRAFT, PROMPTS, TARGET
from .prompts import read_set

MOST_GAP = 0.5  # logits that 8-bit inputs of 28 layers' products may be off
MOST_DIFFERENCE = 0.005  # of perplexities
NUM_PROBS = 1000
CONTEXT = 1024


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp's server for one file, in this process."""

    address: str

    def complete(self, prompt: Sequence[int], count: int, **options: Any) -> dict[str, Any]:
        asked = {"prompt": list(prompt), "n_predict": count, "temperature": 0.0, "return_tokens": True, **options}
        request = urllib.request.Request(
            f"{self.address}/completion", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def log_probability(self, before: Sequence[int], token: int) -> float | None:
        """Of a token after a text; None if it is not among the likeliest."""
        found = self.complete(before, 1, n_probs=NUM_PROBS, cache_prompt=True)
        likeliest = found["completion_probabilities"][0]["top_logprobs"]
        return next((each["logprob"] for each in likeliest if each["id"] == token), None)


@contextmanager
def llama_cpp(file: Path) -> Iterator[LlamaCpp]:
    try:
        import xllamacpp
    except ImportError:
        sys.exit("Error: this needs llama.cpp: pip install 'xllamacpp>=2026.10'")
    params = xllamacpp.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers, params.verbosity = CONTEXT, 1, False, 0, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    try:
        yield LlamaCpp(server.listening_address)
    finally:
        del server


def greedy(engine: Engine, prompt: Sequence[int], count: int, budget: int | None) -> list[int]:
    steps = engine.generate(list(prompt), SamplingParams(count), SpeculationParams(budget))
    return [token for step in steps for token in step.token_ids]


def gaps(engine: Engine, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """How far each token's logit lies behind the largest one after the text before it [T]."""
    logits = _logits(engine, [*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    return logits.amax(1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def perplexities(engine: Engine, peer: LlamaCpp, ids: Sequence[int]) -> tuple[float, float, int]:
    """offspec's, llama.cpp's, and the number of tokens that both are over."""
    log_probabilities = _logits(engine, ids[:-1]).log_softmax(-1)
    own, other = list[float](), list[float]()
    for place in range(1, len(ids)):
        said = peer.log_probability(ids[:place], ids[place])
        if said is not None:
            other.append(said)
            own.append(float(log_probabilities[place - 1, ids[place]]))
    return math.exp(-sum(own) / len(own)), math.exp(-sum(other) / len(other)), len(own)


def _logits(engine: Engine, ids: Sequence[int]) -> torch.Tensor:
    target = engine.target
    with torch.inference_mode():
        return target.logits(target.forward(torch.tensor(ids), torch.arange(len(ids)), target.new_cache()))


def bytes_for_half(engine: Engine) -> int:
    """The RAM that the plan needs beside the program itself if half of its resident layers stay."""
    assert engine.plan is not None
    plan, placement = engine.plan, engine.plan.placement
    layers = sum(plan.layers[i].resident_bytes for i in placement.resident)
    return layers // 2 + sum(item.on_host + item.on_device for item in placement.items if item.name != PROGRAM_ITEM)


def check(file: Path, draft: Path, prompts: Sequence[Any], count: int, num_perplexity: int) -> bool:
    """Print one file's comparison; whether it holds."""
    options: dict[str, Any] = {"dtype": "fp32", "device": "cpu", "context": CONTEXT}
    with Engine.load(file, draft=str(draft), **options) as engine:
        ids = [engine.encode(prompt) for prompt in prompts]
        plain = [greedy(engine, each, count, 0) for each in ids]
        drafted = [greedy(engine, each, count, 64) for each in ids]
        needed = bytes_for_half(engine)
    ram = psutil.Process().memory_info().rss + WORKSPACE_BYTES + needed
    with Engine.load(file, draft=str(draft), ram=ram, **options) as engine:
        assert engine.plan is not None
        num_streamed = len(engine.plan.placement.streamed)
        streamed = [greedy(engine, each, count, 64) for each in ids]
    print(f"{file.name}: {len(ids)} texts of at most {count} tokens")
    print(f"  drafted as plain: {plain == drafted}; streamed ({num_streamed} layers) as plain: {plain == streamed}")
    with Engine.load(file, draft="none", **options) as engine, llama_cpp(file) as peer:
        theirs = [peer.complete(each, len(own))["tokens"] for each, own in zip(ids, plain, strict=True)]
        worst = max(float(gaps(engine, each, text).max()) for each, text in zip(ids, theirs, strict=True))
        text = engine.encode("\n".join(builtin.prompts())[: 4 * num_perplexity])[:num_perplexity]
        own, other, num_tokens = perplexities(engine, peer, text)
    equal = sum(a == b for a, b in zip(plain, theirs, strict=True))
    print(f"  llama.cpp: {equal} texts equal; worst gap of one of its tokens {worst:.3f} (limit {MOST_GAP})")
    print(f"  perplexity over {num_tokens} tokens: {own:.4f}, llama.cpp {other:.4f} ({own / other - 1:+.2%})")
    sys.stdout.flush()
    is_near = abs(own / other - 1) <= MOST_DIFFERENCE and worst <= MOST_GAP
    return num_streamed > 0 and plain == drafted == streamed and is_near


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[TARGET, DRAFT])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--perplexity-tokens", type=int, default=256)
    args = parser.parse_args()
    if missing := [file for file in args.files if not file.is_file()]:
        sys.exit(f"Error: {missing[0]} is not there: run scripts/fetch_real_pair")
    prompts = [each.messages for each in read_set("mt_bench", PROMPTS)[: args.prompts]]
    holds = [check(file, args.files[-1], prompts, args.tokens, args.perplexity_tokens) for file in args.files]
    sys.exit(0 if all(holds) else 1)


if __name__ == "__main__":
    main()
