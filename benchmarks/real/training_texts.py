"""Chats of the real target, for heads and exit layers to learn from: it answers instructions of MT-Bench's kinds.

    python -m benchmarks.real.training_texts --out texts.txt
    offspec distill ~/.cache/offspec/real_pair/Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf --head eagle3 --text texts.txt

None of these instructions is in the sets that are measured. The file holds whole chats with their special tokens, as
the target reads them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from offspec import Engine, SamplingParams, SpeculationParams

from .models import TARGET

KINDS = (
    "Write a short letter to a friend about {}.",
    "You are a patient teacher. Explain {} to a child of ten.",
    "What are the arguments for and against {}? Weigh them.",
    "List five facts about {}, each with one sentence.",
    "Write a Python class that models {}, with two methods and an example of its use.",
    "A shop sells tickets for a talk on {} at 12 dollars, and 3 of 40 are free. How much does it earn? Show the steps.",
    'Give a JSON object with the keys "name", "kind" and "uses" that describes {}.',
    "Compare {} today with a hundred years ago, in two paragraphs.",
)
TOPICS = (
    "a bicycle", "the tides", "a library", "bread", "the stock market", "a lighthouse", "vaccines", "chess",
    "a steam engine", "rice fields", "the moon", "a bank account", "photosynthesis", "a railway", "maps", "honey bees",
)  # fmt: skip


def instructions(count: int) -> list[str]:
    """`count` of them, of all kinds in turns, each with another topic."""
    pairs = [(kind, TOPICS[(i + turn) % len(TOPICS)]) for turn in range(len(TOPICS)) for i, kind in enumerate(KINDS)]
    return [kind.format(topic) for kind, topic in pairs[:count]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(TARGET), help="the target [the fetched one]")
    parser.add_argument("--count", type=int, default=len(KINDS) * len(TOPICS), help="chats [128]")
    parser.add_argument("--tokens", type=int, default=128, help="at most, of each answer")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    params = SamplingParams(args.tokens, temperature=0.7, seed=0)
    with Engine.load(args.model, draft="none", context=1024) as engine:
        texts = [engine.encode([{"role": "user", "content": each}]) for each in instructions(args.count)]
        for index, step in engine.generate_many(list(texts), params, SpeculationParams(0), max_texts=16):
            texts[index] += step.token_ids
            if step.finish_reason is not None:
                print(f"chat {index}: {len(texts[index])} tokens", file=sys.stderr)
        chats = [engine.tokenizer.decode(text, skip_special_tokens=False) for text in texts]
    args.out.write_text("\n".join(chats), encoding="utf-8")


if __name__ == "__main__":
    main()
