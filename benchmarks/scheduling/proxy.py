"""Proxy tuning (`--accept proxy`): how far a small model's training moves a large one that was not trained.

    python -m benchmarks.scheduling.proxy --judge TRAINED_TARGET --trained TRAINED_DRAFT --folder /usr/include/linux
        [--model builtin] [--base builtin] [--strengths 0.5,1] [--temperatures 0,1] [--prompts 8] [--tokens 64]

The model continues beginnings of texts of a domain that it was not trained on. `nats/token`: log-likelihood of its
text under the judge, the same model after training on the domain. Rows: plain text of the model, the trained draft
alone, both in one mean of logits (`--accept mix`), proxy tuning, and the judge's own text. `per pass`: tokens. Make the
judge with `benchmarks.drafts.specialise`, the trained draft with `offspec distill`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.tools.benchmark import token_log_likelihoods

from ..drafts.alignment import pieces
from ..drafts.distilled import files_of

PLAIN = SpeculationParams(0)


@dataclass(frozen=True)
class Row:
    """One way over all prompts."""

    name: str
    temperature: float
    log_likelihood: float
    tokens_per_pass: float

    def __str__(self) -> str:
        return f"{self.temperature:>11g}  {self.name:<22}  {self.log_likelihood:>10.3f}  {self.tokens_per_pass:>8.2f}"


def measure(
    name: str,
    engine: Engine,
    judge: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    how: SpeculationParams,
) -> Row:
    likelihoods, num_tokens, num_passes = list[float](), 0, 0
    for seed, prompt in enumerate(prompts):
        own = SamplingParams(params.max_new_tokens, params.temperature, seed=seed, ignore_eos=True)
        steps = list(engine.generate(prompt, own, how))
        tokens = [token for step in steps for token in step.token_ids]
        likelihoods.append(float(token_log_likelihoods(judge, prompt, tokens).mean()))
        num_tokens, num_passes = num_tokens + len(tokens), num_passes + len(steps)
    return Row(name, params.temperature, statistics.fmean(likelihoods), num_tokens / num_passes)


def ways(args: argparse.Namespace, judge: Engine) -> Iterator[tuple[str, Engine, SpeculationParams]]:
    """Names, engines and settings, with a beam of 8 times 8."""
    beam = {"beam": 8, "gamma": 8}
    with Engine.load(args.model, draft=[args.trained, args.base], dtype="fp32", device="cpu") as both:
        yield "plain", both, PLAIN
        for strength in map(float, args.strengths.split(",")):
            given = None if strength >= 1 else strength
            yield f"proxy {strength:g}", both, SpeculationParams(accept="proxy", strength=given, **beam)
    with Engine.load(args.model, draft=args.trained, dtype="fp32", device="cpu") as trained:
        yield "mix 0.5", trained, SpeculationParams(accept="mix", strength=0.5, **beam)
    with Engine.load(args.trained, draft="none", dtype="fp32", device="cpu") as small:
        yield "trained draft alone", small, PLAIN
    yield "judge, plain", judge, PLAIN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--judge", required=True)
    parser.add_argument("--trained", required=True)
    parser.add_argument("--base", default="builtin")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--pattern", default="*.h")
    parser.add_argument("--strengths", default="0.5,1")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    judge, rows = Engine.load(args.judge, draft="none", dtype="fp32", device="cpu"), list[Row]()
    _, held_out = files_of(args.folder, args.pattern)
    prompts = pieces(judge, held_out, args.prompts, args.prompt_tokens, seed=2)
    print(f"{len(prompts)} beginnings of {args.prompt_tokens} tokens, {args.tokens} more")
    print("temperature  way                     nats/token  per pass")
    for name, engine, how in ways(args, judge):
        for temperature in map(float, args.temperatures.split(",")):
            rows.append(measure(name, engine, judge, prompts, SamplingParams(args.tokens, temperature), how))
            print(rows[-1], flush=True)
    print(json.dumps({"model": args.model, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
