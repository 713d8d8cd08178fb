"""Quality against speed of the lossy ways in which the draft's distribution counts too (`--accept NAME`).

    python -m benchmarks.scheduling.lossy [--model builtin] [--draft auto] [--temperatures 0,1]
        [--strengths 0.2,0.5,0.8] [--rollbacks 0.01,0.1] [--beam 8] [--gamma 8] [--only PATTERN]

Held-out prompts; all texts have the same length. All ways draft the same beam, but for `bild`: its draft speaks alone
until it doubts, for at most beam x gamma tokens. Its strength is the fallback threshold, and `tau` the rollback's.
`nats/token`: log-likelihood under the target, of the final text. `agrees`: the share of tokens that the target itself
would have chosen there, with the same noise; exact text has 100 %. `tok/s` are by the cost model of the card
(`replay.Costs`): a pass 0.9 s, a draft round 12 ms, one for each level of the tree. Likelihood and agreement are not
quality: a text may differ and be as good. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.lab.blend import WAYS
from offspec.model.decoder import CachedDecoder
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import TokenTree
from offspec.tools.benchmark import token_log_likelihoods

from .replay import Costs

EXACT = 1e-9  # strength with which `mix` is the target alone


@dataclass(frozen=True)
class Row:
    """One way over all prompts."""

    name: str
    temperature: float
    log_likelihood: float
    agreement: float
    tokens_per_pass: float
    tokens_per_s: float

    def __str__(self) -> str:
        return (
            f"{self.temperature:>11g}  {self.name:<18}  {self.log_likelihood:>10.3f}  {self.agreement:>6.1%}  "
            f"{self.tokens_per_pass:>8.2f}  {self.tokens_per_s:>6.2f}"
        )


def agreement(engine: Engine, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams) -> float:
    """The share of `tokens` that the target chooses after the text before them; one pass over the text as a chain."""
    assert params.seed is not None
    sampler = Sampler(params, params.seed, engine.target.config.vocab_size, engine.target.device)
    sampler.extend(prompt)
    chain = TokenTree.chain(tokens[:-1])
    logits = CachedDecoder(engine.target).score_rows(list(prompt), chain.tokens, chain.depths, chain.mask())
    found = [
        sampler.choose(logits[place], len(prompt) + place, tokens[:place]) == token
        for place, token in enumerate(tokens)
    ]
    return float(np.mean(found))


def measure(
    engine: Engine, prompts: Sequence[list[int]], params: SamplingParams, speculation: SpeculationParams, name: str
) -> Row:
    likelihoods, agreements = list[float](), list[float]()
    num_tokens = num_passes = num_nodes = 0
    for number, prompt in enumerate(prompts):
        own = SamplingParams(params.max_new_tokens, params.temperature, seed=number, ignore_eos=True)
        steps = list(engine.generate(prompt, own, speculation))
        tokens, stats = [token for step in steps for token in step.token_ids], steps[-1].stats
        likelihoods.append(float(token_log_likelihoods(engine, prompt, tokens).mean()))
        agreements.append(agreement(engine, prompt, tokens, own))
        num_tokens, num_passes = num_tokens + stats.num_tokens, num_passes + stats.num_passes
        num_nodes += stats.num_drafted_tokens
    costs, num_rounds = Costs(), 0.0 if speculation.budget == 0 else float(speculation.gamma)
    if speculation.accept == "bild":
        num_rounds = 1 + num_nodes / num_passes  # a chain, and the round that doubts
    seconds = costs.pass_s(1 + round(num_nodes / num_passes)) + num_rounds * costs.round_s(1)
    per_pass = num_tokens / num_passes
    return Row(
        name,
        params.temperature,
        statistics.fmean(likelihoods),
        statistics.fmean(agreements),
        per_pass,
        per_pass / seconds,
    )


def ways(
    strengths: Sequence[float], rollbacks: Sequence[float], beam: int, gamma: int
) -> Iterator[tuple[str, SpeculationParams]]:
    """Names, and settings."""
    yield "plain", SpeculationParams(budget=0)
    yield "exact", SpeculationParams(accept="mix", strength=EXACT, beam=beam, gamma=gamma)
    for accept in WAYS:
        for strength in strengths:
            found = SpeculationParams(accept=accept, strength=strength, beam=beam, gamma=gamma)
            yield f"{accept} {strength:g}", found
    for strength in strengths:
        for tau in rollbacks:
            bild = SpeculationParams(accept="bild", strength=strength, tau=tau, beam=beam, gamma=gamma)
            yield f"bild {strength:g}, tau {tau:g}", bild


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--strengths", default="0.2,0.5,0.8")
    parser.add_argument("--rollbacks", default="0.01,0.1")
    parser.add_argument("--only", default="", help="a pattern of ways' names")
    parser.add_argument("--beam", type=int, default=8)
    parser.add_argument("--gamma", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--max-prompts", type=int, default=12)
    args = parser.parse_args()
    engine = Engine.load(args.model, draft=args.draft, dtype="fp32", device="cpu")
    if engine.draft.decoder is None:
        sys.exit("Error: no draft to measure; give --draft PATH")
    prompts = [engine.encode(prompt) for prompt in builtin.prompts()[: args.max_prompts]]
    strengths, rollbacks = ([float(part) for part in each.split(",")] for each in (args.strengths, args.rollbacks))
    chosen = [way for way in ways(strengths, rollbacks, args.beam, args.gamma) if re.search(args.only, way[0])]
    rows = list[Row]()
    print(f"{len(prompts)} held-out prompts x {args.max_new_tokens} tokens; beam {args.beam}, gamma {args.gamma}")
    print("temperature  way                 nats/token  agrees  per pass   tok/s")
    for temperature in map(float, args.temperatures.split(",")):
        params = SamplingParams(args.max_new_tokens, temperature)
        for name, speculation in chosen:
            rows.append(measure(engine, prompts, params, speculation, name))
            print(rows[-1], flush=True)
    print(json.dumps({"model": engine.name, "draft": engine.draft_name, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
