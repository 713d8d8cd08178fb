"""Measures formats of the KV cache: memory beside the plan, seconds, and what they change in the target's predictions.

    python -m benchmarks.grow DIR --shape 1b
    python -m benchmarks.long_texts memory DIR --tokens 4096,16384 --formats 16,8,4
    python -m benchmarks.long_texts memory DIR --tokens 65536 --last 2048
    python -m benchmarks.long_texts quality MODEL --text FILE --tokens 2000 [--windows 4]
    python -m benchmarks.long_texts borders MODEL --text FILE --tokens 500

`memory` measures each combination in a process of its own: the plan's RAM, the process's peak, prefill tokens/s, and
the median seconds of passes of 1 and 16 rows after so many tokens. With `--last N` only the last N tokens are
prefilled, after random entries in place of the others: memory and seconds at the end of a long text, without the hour
before it. `quality` scores a text in windows of so many tokens with each format: the share of positions with the same
best token as with 16 bit, and the difference of perplexity. It computes in fp32, so that differences are the format's.
`borders` scores a text in one pass and in passes of a few rows, in fp32: the share of stored numbers (codes) that
differ, in the first layer and in all, the largest difference of log-probabilities, and the positions whose best token
differs. Products with other numbers of rows round differently.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from offspec import KV_CACHES, Engine
from offspec.model.block import kv_layouts
from offspec.model.decoder import CachedDecoder
from offspec.scheduler.trees.token_tree import TokenTree

WIDTHS, REPEATS = (1, 16), 5
BORDER_WIDTHS = (1, 16, 64)
HEAD_ROWS = 256  # rows whose logits are in memory at once
SPARE_TOKENS = 64
FILLED_AT_ONCE = 1024  # random entries, which are written again and again
MIB = 2**20


def measure_memory(model: str, num_tokens: int, kv_cache: str, last: int | None) -> None:
    """Print one row of the table. last: prefill so many tokens, after random entries; None: all."""
    engine = Engine.load(model, draft="none", device="cpu", context=num_tokens + SPARE_TOKENS, kv_cache=kv_cache)
    assert engine.plan is not None
    planned, vocabulary = engine.plan.placement.ram_bytes, engine.target.config.vocab_size
    text = CachedDecoder(engine.target, engine.plan.kv_entries)
    prompt = np.random.default_rng(0).integers(0, vocabulary, min(num_tokens, last or num_tokens)).tolist()
    _fill(text, num_tokens - len(prompt))
    start = time.perf_counter()
    text.score(prompt, *_chain(0))
    prefill_s = time.perf_counter() - start
    passes = [statistics.median(_pass_s(text, width) for _ in range(REPEATS)) for width in WIDTHS]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    cells = [f"{num_tokens}", kv_cache, f"{text.cache.nbytes / MIB:.0f}", f"{planned / MIB:.0f}", f"{peak / MIB:.0f}"]
    cells += [f"{peak / planned - 1:+.1%}", f"{len(prompt) / prefill_s:.0f}", *(f"{seconds:.3f}" for seconds in passes)]
    print(f"| {' | '.join(cells)} |", flush=True)


def _fill(text: CachedDecoder, count: int) -> None:
    """Commit `count` random entries to the text's empty cache."""
    decoder, generator = text.decoder, torch.Generator().manual_seed(0)
    for layer, layout in enumerate(kv_layouts(decoder.config)):
        if layout is None:
            continue
        shape = 2, FILLED_AT_ONCE, layout.num_heads, layout.head_dim
        keys, values = torch.randn(shape, generator=generator).to(decoder.dtype)
        for start in range(0, count, FILLED_AT_ONCE):
            text.cache.write(layer, keys[: count - start], values[: count - start], start)
    text.cache.begin(count)


def _pass_s(text: CachedDecoder, width: int) -> float:
    start = time.perf_counter()
    text.score([], *_chain(width))
    seconds = time.perf_counter() - start
    text.keep([])
    return seconds


def _chain(num_nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """A tree with one branch: tokens, depths and mask."""
    tree = TokenTree.chain(range(num_nodes))
    return tree.tokens, tree.depths, tree.mask()


def measure_quality(model: str, text: Path, num_tokens: int, num_windows: int) -> None:
    """Print a row for each format."""
    print("| format | same best token | perplexity | difference |\n|---|---:|---:|---:|")
    best, nats = dict[str, Tensor](), dict[str, float]()
    for kv_cache in KV_CACHES:
        with Engine.load(model, draft="none", device="cpu", dtype="fp32", kv_cache=kv_cache) as engine:
            ids = engine.tokenizer.encode(text.read_text(encoding="utf-8"))[: num_tokens * num_windows]
            scored = [_score(engine, ids[at : at + num_tokens]) for at in range(0, len(ids), num_tokens)]
        best[kv_cache] = torch.cat([window for window, _ in scored])
        nats[kv_cache] = sum(float(losses.sum()) for _, losses in scored) / sum(len(losses) for _, losses in scored)
        same = (best[kv_cache] == best[KV_CACHES[0]]).double().mean()
        difference = np.expm1(nats[kv_cache] - nats[KV_CACHES[0]])
        print(f"| {kv_cache} | {same:.2%} | {np.exp(nats[kv_cache]):.3f} | {difference:+.3%} |", flush=True)
    print(f"\n{len(best[KV_CACHES[0]])} tokens in windows of {num_tokens}, fp32")


@torch.inference_mode()
def measure_borders(model: str, text: Path, num_tokens: int) -> None:
    """Print a row for each format and width of passes."""
    print("| format | rows of a pass | codes: first layer | all layers | log-probability | best tokens |")
    print("|---|---:|---:|---:|---:|---:|")
    for kv_cache in KV_CACHES:
        with Engine.load(model, draft="none", device="cpu", dtype="fp32", kv_cache=kv_cache) as engine:
            ids = engine.tokenizer.encode(text.read_text(encoding="utf-8"))[:num_tokens]
            whole, expected = _scored_by(engine, ids, num_tokens)
            for width in BORDER_WIDTHS:
                other, found = _scored_by(engine, ids, width)
                pairs = list(zip(whole.cache.stored(len(ids)), other.cache.stored(len(ids)), strict=True))
                first = pairs[: len(pairs) // engine.target.config.num_layers]
                cells = [f"{_share(some):.1e}" for some in (first, pairs)]
                cells.append(f"{(found - expected).abs().max():.1e}")
                cells.append(f"{(found.argmax(-1) != expected.argmax(-1)).sum()} of {len(ids)}")
                print(f"| {kv_cache} | {width} | {' | '.join(cells)} |", flush=True)


def _scored_by(engine: Engine, ids: list[int], width: int) -> tuple[CachedDecoder, Tensor]:
    """The text, scored in passes of so many rows, and its log-probabilities [T, vocab]."""
    text, found = CachedDecoder(engine.target, len(ids)), list[Tensor]()
    for at in range(0, len(ids), width):
        tokens = torch.tensor(ids[at : at + width])
        hidden = engine.target.forward(tokens, torch.arange(at, at + len(tokens)), text.cache)
        text.cache.append(len(tokens), 0)
        found.append(engine.target.logits(hidden).log_softmax(-1))
    return text, torch.cat(found)


def _share(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The share of stored numbers that differ; plain ones differ by more than 1e-5 of their size."""
    differ = [~torch.isclose(*pair, rtol=1e-5) if pair[0].is_floating_point() else pair[0] != pair[1] for pair in pairs]
    return float(sum(each.sum() for each in differ) / sum(each.numel() for each in differ))


@torch.inference_mode()
def _score(engine: Engine, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Each position's best token [T], and the loss of the next token [T - 1] in nats."""
    target, tokens = engine.target, torch.tensor(ids)
    hidden = target.forward(tokens, torch.arange(len(ids)), target.new_cache())
    best, losses = list[Tensor](), list[Tensor]()
    for at in range(0, len(ids), HEAD_ROWS):
        logits, following = target.logits(hidden[at : at + HEAD_ROWS]), tokens[at + 1 : at + 1 + HEAD_ROWS]
        best.append(logits.argmax(-1))
        losses.append(F.cross_entropy(logits[: len(following)], following, reduction="none"))
    return torch.cat(best), torch.cat(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["memory", "quality", "borders"])
    parser.add_argument("model")
    parser.add_argument("--tokens", default="4096", help="numbers of tokens, such as 4096,16384")
    parser.add_argument("--formats", default=",".join(KV_CACHES))
    parser.add_argument("--last", type=int, help="tokens to prefill, for `memory`; random entries replace the others")
    parser.add_argument("--text", type=Path, help="the text whose tokens `quality` and `borders` score")
    parser.add_argument("--windows", type=int, default=1, help="windows of the text, for `quality`")
    parser.add_argument("--row", action="store_true", help="measure the first combination in this process")
    args = parser.parse_args()
    lengths, formats = [int(length) for length in args.tokens.split(",")], args.formats.split(",")
    if args.what == "quality":
        measure_quality(args.model, args.text, lengths[0], args.windows)
        return
    if args.what == "borders":
        measure_borders(args.model, args.text, lengths[0])
        return
    if args.row:
        measure_memory(args.model, lengths[0], formats[0], args.last)
        return
    widths = " | ".join(f"s per pass of {width}" for width in WIDTHS)
    print(f"| tokens | format | KV MiB | planned MiB | peak MiB | difference | prefill tokens/s | {widths} |")
    print("|---:|---|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    for length in lengths:
        for name in formats:
            given = ["--tokens", str(length), "--formats", name, "--row"]
            given += ["--last", str(args.last)] if args.last else []
            subprocess.run([sys.executable, "-m", "benchmarks.long_texts", "memory", args.model, *given], check=True)


if __name__ == "__main__":
    main()
