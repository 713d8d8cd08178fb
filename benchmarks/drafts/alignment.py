"""Tokens per pass in a domain while the draft learns from the target (`--learn`), on held-out texts.

    python -m benchmarks.drafts.alignment [--draft FOLDER] [--folder FOLDER --pattern '*.h'] [--temperature 0.6]

Prompts are pieces of a folder's text files, by default the C headers of this Python. Every fourth file is held out, and
the continuations of its pieces are measured: with the draft alone, which only `--learn` changes; with recall
(`offspec.drafts.recall`); and with recall and lookup. With --recurring, the draft learns from the measured prompts with
other seeds, to simulate recurring requests. The texts must not depend on the training. Times are this machine's, and
the amount of training (`AlignmentParams.most_share`) depends on them slightly. The last line is JSON.
`benchmarks/drafts/specialise.py` creates a --model for a domain that the built-in draft does not know.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.drafts.model_draft import ModelDraft
from offspec.training.online import Aligner, AlignmentParams

FIRST_SEED = 1000  # of the training requests; measured requests have lower seeds


@dataclass(frozen=True)
class Row:
    """Figures of the held-out prompts after a number of generated tokens.

    with_recall: tokens per pass with recall. with_lookup: also with lookup.

    loss, unlearnt_loss: KL(target ‖ draft) per token in nats on the requests since the previous row, with the draft
    before each request, and with the original draft. share: of the additions in use. generate_s, learn_s: seconds so
    far.
    """

    num_tokens: int
    num_steps: int
    generate_s: float
    learn_s: float
    loss: float | None
    unlearnt_loss: float | None
    share: float
    tokens_per_pass: float
    with_recall: float
    with_lookup: float


def split(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Training files, and held-out files (every fourth)."""
    return [file for i, file in enumerate(files) if i % 4], list(files[::4])


def pieces(engine: Engine, files: Sequence[Path], count: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Prompts of num_tokens each, from random places of the files in turn."""
    draws = random.Random(seed)
    texts = [
        engine.tokenizer.encode(text)
        for file in files
        if (text := file.read_text(encoding="utf-8", errors="ignore").strip())
    ]
    texts = [text for text in texts if len(text) > num_tokens]
    if not texts:
        sys.exit(f"Error: no file with more than {num_tokens} tokens; give another --folder or --pattern")
    draws.shuffle(texts)
    prompts = []
    for number in range(count):
        text = texts[number % len(texts)]
        start = draws.randrange(len(text) - num_tokens)
        prompts.append(text[start : start + num_tokens])
    return prompts


def measure(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, speculation: SpeculationParams
) -> tuple[float, list[list[int]]]:
    """Tokens per pass, and the texts, without training. The calibration starts from scratch, as in every row."""
    assert engine.draft.decoder is not None
    fresh = engine.with_draft(ModelDraft(engine.draft.decoder, engine.draft_name))  # without its aligner
    texts, num_passes = [], 0
    for seed, prompt in enumerate(prompts):
        steps = list(fresh.generate(prompt, seeded(params, seed), speculation))
        texts.append([token for step in steps for token in step.token_ids])
        num_passes += steps[-1].stats.num_passes
    return sum(map(len, texts)) / num_passes, texts


def seeded(params: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(params.max_new_tokens, temperature=params.temperature, seed=seed, ignore_eos=True)


def main() -> None:
    p = AlignmentParams
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--folder", type=Path, default=Path(sysconfig.get_path("include")))
    parser.add_argument("--pattern", default="*.h")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--held-out", type=int, default=8, help="number of measured prompts")
    parser.add_argument("--requests", default="0,8,16,32,64", help="numbers of requests after which to measure")
    parser.add_argument("--recurring", action="store_true", help="learn from the measured prompts, with other seeds")
    parser.add_argument("--rank", type=int, default=p.rank)
    parser.add_argument("--learning-rate", type=float, default=p.learning_rate)
    parser.add_argument("--replays", type=float, default=p.replays)
    parser.add_argument("--most-share", type=float, default=p.most_share)
    parser.add_argument("--most-guesses", type=int, default=p.most_guesses, help="0 trains only on the text")
    parser.add_argument("--most-prompt", type=int, default=p.most_prompt, help="0 does not train on prompts")
    parser.add_argument("--reach-power", type=float, default=p.reach_power)
    args = parser.parse_args()
    engine = Engine.load(args.model, draft=args.draft, dtype="fp32")
    if engine.draft.decoder is None:
        sys.exit("Error: no draft to train; give --draft PATH")
    settings = AlignmentParams(
        rank=args.rank,
        learning_rate=args.learning_rate,
        replays=args.replays,
        most_share=args.most_share,
        most_guesses=args.most_guesses,
        most_prompt=args.most_prompt,
        reach_power=args.reach_power,
    )
    engine.draft.aligner = aligner = Aligner(engine.draft.decoder, settings)
    files = sorted(file for file in args.folder.rglob(args.pattern) if file.is_file())
    learnt_from, held_out = split(files)
    marks = [int(mark) for mark in args.requests.split(",")]
    lessons = pieces(engine, learnt_from, marks[-1], args.prompt_tokens, seed=1)
    exam = pieces(engine, held_out, args.held_out, args.prompt_tokens, seed=2)
    if args.recurring:
        lessons = [exam[number % len(exam)] for number in range(marks[-1])]
    params = SamplingParams(args.max_new_tokens, temperature=args.temperature)
    alone = SpeculationParams(args.budget, lookup=False, recall=False)
    recalling, everything = replace(alone, recall=True), replace(alone, recall=True, lookup=True)

    print(f"{len(exam)} held-out prompts x {args.max_new_tokens} tokens, {len(files)} files")
    print(
        f"{'tokens':>6}  {'steps':>5}  {'generated s':>11}  {'learnt s':>8}  {'loss':>5}  {'as came':>7}  "
        f"{'share':>5}  tokens per pass (with recall, and lookup)"
    )
    rows: list[Row] = []
    wanted: list[list[int]] = []
    num_tokens, generate_s, learn_s = 0, 0.0, 0.0
    losses: list[tuple[float, float]] = []
    for number in range(marks[-1] + 1):
        if number in marks:
            tokens_per_pass, texts = measure(engine, exam, params, alone)
            with_recall, same = measure(engine, exam, params, recalling)
            with_lookup, still = measure(engine, exam, params, everything)
            wanted = wanted or texts
            if not texts == same == still == wanted:
                sys.exit("Error: the training changed a text")
            loss, unlearnt = (sum(part) / len(losses) for part in zip(*losses, strict=True)) if losses else (None, None)
            share = aligner.adapter.share
            spent = num_tokens, aligner.num_steps, generate_s, learn_s
            row = Row(*spent, loss, unlearnt, share, tokens_per_pass, with_recall, with_lookup)
            losses = []
            rows.append(row)
            print(
                f"{num_tokens:>6}  {row.num_steps:>5}  {generate_s:>11.1f}  {learn_s:>8.1f}  {_cell(loss):>5}  "
                f"{_cell(unlearnt):>7}  "
                f"{share:>5.1f}  {tokens_per_pass:.2f} ({with_recall:.2f}, {with_lookup:.2f})",
                flush=True,
            )
        if number < marks[-1]:
            *_, last = engine.generate(lessons[number], seeded(params, FIRST_SEED + number), everything)
            engine.learn(last.stats)
            s = last.stats
            num_tokens, learn_s = num_tokens + s.num_tokens, learn_s + s.learn_s
            generate_s += s.prefill_s + s.decode_s
            if s.learnt_loss is not None and s.unlearnt_loss is not None:
                losses.append((s.learnt_loss, s.unlearnt_loss))
    gain = rows[-1].tokens_per_pass / rows[0].tokens_per_pass - 1
    gain_with_recall = rows[-1].with_recall / rows[0].tokens_per_pass - 1
    print(f"gain by learning {gain:+.0%}, with recall {gain_with_recall:+.0%}; the texts are the same")
    about = {"model": engine.name, "draft": Path(engine.draft_name or "").name, "temperature": args.temperature}
    about |= {"domain": args.pattern, "recurring": args.recurring, **asdict(aligner.params)}
    print(
        json.dumps({**about, "gain": gain, "gain_with_recall": gain_with_recall, "rows": [asdict(row) for row in rows]})
    )


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    main()
