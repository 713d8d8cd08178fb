"""Retrieval from other texts (REST), and from an index that keeps only what came often (CREST): size and acceptance.

    python -m benchmarks.drafts.retrieval [--prompts 8] [--tokens 64] [--temperatures 0,1] [--megabytes 3]
        [--lengths 2,4] [--leasts 2,5]

The target's recorded texts on the held-out prompts are replayed without a draft model: with lookup in the text itself
and token recycling alone, and with retrieval from the standard library of this Python besides. Modules that the prompts
come from are left out. The pruned index keeps places whose last `length` tokens came at least `least` times (CREST,
2408.04678, keeps the most frequent n-grams). Its size counts the kept places and the tokens that can follow them. 64
nodes are sent. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.scheduling.repetition import MODULES
from benchmarks.scheduling.replay import Costs, Recording, Replayed, VirtualClock, record, replay
from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.model.decoder import CachedDecoder
from offspec.scheduler.drafting.drafter import DraftRequest
from offspec.scheduler.drafting.learnt import RunningEstimates
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.guessing.lookup import NO_TOKEN, PromptLookup
from offspec.scheduler.guessing.retrieval import Retrieval, SuffixIndex, build_index
from offspec.scheduler.trees.token_tree import BoolArray

NODES = 64  # sent
REACH, BEFORE = 16, 8  # tokens after a place, and up to it, that the pruned index keeps


def library(engine: Engine, num_bytes: int) -> np.ndarray:
    """Tokens of modules of the standard library, int32, NO_TOKEN between modules."""
    parts: list[list[int]] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if file.stem not in MODULES and num_bytes > 0:
            text = file.read_text(encoding="utf-8")
            num_bytes -= len(text)
            parts.append([*engine.tokenizer.encode(text), NO_TOKEN])
    return np.array([token for part in parts for token in part], dtype=np.int32)


def frequent(index: SuffixIndex, length: int, least: int) -> BoolArray:
    """[N]: the places whose last `length` tokens end at `least` places or more. The index has one shard."""
    order, tokens = index.order.astype(np.int64), index.tokens
    ends = np.stack([np.where(order >= back, tokens[order - back], NO_TOKEN) for back in range(length)])
    starts = np.concatenate(([True], (ends[:, 1:] != ends[:, :-1]).any(0)))
    run = starts.cumsum() - 1
    is_frequent = (np.bincount(run) >= least)[run] & (ends != NO_TOKEN).all(0)
    kept = np.zeros(len(tokens), dtype=np.bool_)
    kept[order[is_frequent]] = True
    return kept


def pruned(index: SuffixIndex, kept: BoolArray) -> tuple[SuffixIndex, int]:
    """The index of the kept places, and its bytes. Tokens that no kept place can reach are removed."""
    is_needed = np.convolve(kept, np.ones(REACH + 1, dtype=np.int64))[: len(kept)] > 0  # the place and what follows
    is_needed |= np.convolve(kept[::-1], np.ones(BEFORE, dtype=np.int64))[: len(kept)][::-1] > 0  # what is compared
    tokens = np.where(is_needed, index.tokens, NO_TOKEN).astype(np.int32)
    gaps = ~is_needed & np.concatenate(([False], ~is_needed[:-1]))
    small = build_index(tokens[~gaps])
    order = small.order[kept[~gaps][small.order]]
    return SuffixIndex(small.tokens, order), 4 * (len(small.tokens) + len(order))


@dataclass(frozen=True)
class Row:
    """One way over all prompts."""

    name: str
    temperature: float
    num_bytes: int
    tokens_per_pass: float


def measure(engine: Engine, recordings: Sequence[Recording], index: SuffixIndex | None) -> float:
    """Tokens per pass."""
    learnt, parts = RunningEstimates.nothing(engine.target.config.vocab_size, lambda rows: 1.0), list[Replayed]()
    for recording in recordings:
        clock, sampler = VirtualClock(), recording.sampler(engine.target.config.vocab_size)
        guessers = [PromptLookup(learnt.lookups), learnt.recycling]
        guessers += [] if index is None else [Retrieval(index, learnt.retrievals)]
        params, request = SpeculationParams(NODES), DraftRequest(sampler)
        drafter = ModelDrafter(None, request, params, learnt, guessers=guessers, clock=clock.now)
        parts.append(replay(recording, drafter, sampler, clock, Costs(), target=CachedDecoder(engine.target)))
    return Replayed.total(parts).tokens_per_pass


def rows(
    engine: Engine, recordings: Sequence[Recording], lengths: Sequence[int], leasts: Sequence[int], num_bytes: int
) -> Iterator[Row]:
    """Without retrieval, with the whole index, and with pruned ones."""
    temperature, index = recordings[0].params.temperature, build_index(library(engine, num_bytes))
    yield Row("lookup and recycling", temperature, 0, measure(engine, recordings, None))
    yield Row("whole index", temperature, 8 * len(index.tokens), measure(engine, recordings, index))
    for length in lengths:
        for least in leasts:
            small, size = pruned(index, frequent(index, length, least))
            yield Row(f"{length} tokens, {least} times", temperature, size, measure(engine, recordings, small))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--megabytes", type=float, default=3)
    parser.add_argument("--lengths", default="2,4")
    parser.add_argument("--leasts", default="2,5")
    parser.add_argument("--folder", type=Path, default=Path("build/recordings"), help="folder for recorded texts")
    args = parser.parse_args()
    engine, found = Engine.load(args.model, draft="lookup", device="cpu", dtype="fp32"), list[Row]()
    lengths, leasts = ([int(part) for part in text.split(",")] for text in (args.lengths, args.leasts))
    for temperature in map(float, args.temperatures.split(",")):
        params = SamplingParams(args.tokens, temperature=temperature, seed=0, ignore_eos=True)
        recordings = record(engine, builtin.prompts()[: args.prompts], params, args.folder)
        for row in rows(engine, recordings, lengths, leasts, round(args.megabytes * 1e6)):
            found.append(row)
            size = f"{row.num_bytes / 1e6:6.1f} MB"
            print(
                f"{row.temperature:>4g}  {row.name:<22}  {size}  {row.tokens_per_pass:.2f} tokens per pass", flush=True
            )
    print(json.dumps({"model": engine.name, "rows": [asdict(row) for row in found]}))


if __name__ == "__main__":
    main()
