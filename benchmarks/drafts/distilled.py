"""Tokens per pass of distilled drafts in a domain, on held-out texts (`offspec distill TARGET --draft SMALL`).

    python -m benchmarks.drafts.distilled lessons LESSONS.txt --folder /usr/include/linux
    python -m benchmarks.drafts.distilled measure --model TARGET --folder /usr/include/linux --drafts builtin,RESULT

`lessons` writes the folder's texts that are not held out into one file, for `offspec distill --text`. `measure`
continues pieces of the held-out texts with each draft: alone, and with recall and lookup, which are the defaults. A
draft is a name as in `--draft`, or DRAFT+FILE with low-rank additions. The texts must not depend on the draft. The last
line is JSON. Files are divided as in `alignment.py`; `specialise.py` creates a target that knows the folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from offspec import Engine, SamplingParams, SpeculationParams

from .alignment import pieces, seeded, split


@dataclass(frozen=True)
class Row:
    """Tokens per pass of a draft: alone, and with recall and lookup."""

    draft: str
    temperature: float
    alone: float
    with_all: float


def files_of(folder: Path, pattern: str) -> tuple[list[Path], list[Path]]:
    return split(sorted(file for file in folder.rglob(pattern) if file.is_file()))


def write_lessons(out: Path, folder: Path, pattern: str) -> None:
    learnt_from, _ = files_of(folder, pattern)
    texts = [file.read_text(encoding="utf-8", errors="ignore").strip() for file in learnt_from]
    out.write_text("\n".join(texts), encoding="utf-8")
    print(f"{len(texts)} files, {out.stat().st_size:,} bytes")


def load(model: str, draft: str) -> Engine:
    name, _, learnt = draft.partition("+")
    more: dict[str, Any] = {"learn_file": learnt} if learnt else {}
    return Engine.load(model, draft=name, dtype="fp32", **more)


def tokens_per_pass(
    engine: Engine, prompts: list[list[int]], params: SamplingParams, speculation: SpeculationParams
) -> tuple[float, list[list[int]]]:
    """Tokens per pass, and the texts. The calibration starts from scratch."""
    fresh, texts, num_passes = engine.with_draft(engine.draft), list[list[int]](), 0
    for seed, prompt in enumerate(prompts):
        steps = list(fresh.generate(prompt, seeded(params, seed), speculation))
        texts.append([token for step in steps for token in step.token_ids])
        num_passes += steps[-1].stats.num_passes
    return sum(map(len, texts)) / num_passes, texts


def measure(args: argparse.Namespace) -> None:
    alone = SpeculationParams(args.budget, lookup=False, recall=False)
    everything = replace(alone, lookup=True, recall=True)
    _, held_out = files_of(args.folder, args.pattern)
    rows, wanted = list[Row](), dict[float, list[list[int]]]()
    print(f"{args.held_out} held-out prompts x {args.max_new_tokens} tokens, budget {args.budget}")
    for draft in args.drafts.split(","):
        with load(args.model, draft) as engine:
            prompts = pieces(engine, held_out, args.held_out, args.prompt_tokens, seed=2)
            for temperature in map(float, args.temperatures.split(",")):
                params = SamplingParams(args.max_new_tokens, temperature=temperature)
                found = [tokens_per_pass(engine, prompts, params, speculation) for speculation in (alone, everything)]
                (by_draft, texts), (with_all, same) = found
                if not texts == same == wanted.setdefault(temperature, texts):
                    sys.exit("Error: a draft changed a text")
                rows.append(Row(draft, temperature, by_draft, with_all))
                print(f"{temperature:>4g}  {by_draft:.2f} ({with_all:.2f} with recall and lookup)  {draft}", flush=True)
    print(json.dumps({"model": args.model, "rows": [asdict(row) for row in rows]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["lessons", "measure"])
    parser.add_argument("out", type=Path, nargs="?", help="file of `lessons`")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--pattern", default="*.h")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--drafts", default="builtin")
    parser.add_argument("--temperatures", default="0.6")
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--held-out", type=int, default=24, help="number of measured prompts")
    args = parser.parse_args()
    if args.action == "measure":
        measure(args)
    elif args.out is None:
        parser.error("`lessons` needs a file to write")
    else:
        write_lessons(args.out, args.folder, args.pattern)


if __name__ == "__main__":
    main()
