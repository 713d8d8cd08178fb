"""Compares joint acceptance (MJSD) with exact greedy verification: likelihood under the target, and tokens per pass.

    python -m benchmarks.scheduling.joint [--model builtin] [--taus 0.01,0.05,0.1,0.2,0.4,0.7,1] [--beam 8] [--gamma 16]
        [--searched 1,2,4,8] [--plot joint.svg]

Held-out prompts; all texts have the same length. Exact verification uses the same draft and a tree with as many nodes.
`searched` is joint decoding with the target as its own draft: a beam search of the target itself, block by block, which
the draft approximates; `--searched` also runs it with blocks of other lengths. Log-likelihoods are the target's, over
the final text, in nats per token. Neither they nor tokens per pass depend on the machine's speed, so one run is enough.
Likely text often repeats itself. So the table also has the share of repeated 4-grams (`repeated`), and the gain over
greedy on prompts without more repetition. `odd` is the share of tokens below 1 % under the target. `ROUGE-L` compares
with how the prompt goes on in the standard library, where this Python has it. `tok/s` are by the cost model of the card
(`replay.Costs`), for what drafts one round per level. Joules per token are printed where RAPL can be read, for this
machine. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.drafts.model_draft import ModelDraft
from offspec.scheduler.params import tree_room
from offspec.tools.benchmark import token_log_likelihoods

from .references import energy_j, reference_of, rouge_l
from .replay import Costs

ODD = 0.01


@dataclass(frozen=True)
class Text:
    """The text of one method for one prompt. log_likelihood: nats per token.

    repeated: the share of 4-grams that occur earlier in the text. odd: the share of tokens below 1 % under the target.
    rouge_l: against the prompt's own continuation, if it is known.
    """

    log_likelihood: float
    repeated: float
    odd: float
    num_tokens: int
    num_passes: int
    rouge_l: float | None = None


@dataclass(frozen=True)
class Row:
    """One way over all prompts; `texts` are in their order.

    tokens_per_s: on the clock of the card; None for exact trees. joules_per_token: measured, or None.
    """

    name: str
    tau: float | None
    texts: list[Text]
    tokens_per_s: float | None = None
    joules_per_token: float | None = None

    @property
    def log_likelihood(self) -> float:
        return statistics.mean(text.log_likelihood for text in self.texts)

    @property
    def repeated(self) -> float:
        return statistics.mean(text.repeated for text in self.texts)

    @property
    def odd(self) -> float:
        return statistics.mean(text.odd for text in self.texts)

    @property
    def rouge_l(self) -> float | None:
        known = [text.rouge_l for text in self.texts if text.rouge_l is not None]
        return statistics.mean(known) if known else None

    @property
    def tokens_per_pass(self) -> float:
        return sum(text.num_tokens for text in self.texts) / sum(text.num_passes for text in self.texts)

    def gains(self, greedy: Row, *, fresh: bool = False) -> list[float]:
        """Gain over greedy decoding in nats per token, by prompt; fresh: only texts without more repetition."""
        pairs = zip(self.texts, greedy.texts, strict=True)
        return [
            mine.log_likelihood - its.log_likelihood
            for mine, its in pairs
            if not fresh or mine.repeated <= its.repeated
        ]

    def as_dict(self) -> dict[str, object]:
        names = ("log_likelihood", "repeated", "odd", "rouge_l", "tokens_per_pass", "tokens_per_s", "joules_per_token")
        means = {name: getattr(self, name) for name in names}
        return {"name": self.name, "tau": self.tau, **means, "texts": [asdict(text) for text in self.texts]}


def repeated_share(tokens: Sequence[int], length: int = 4) -> float:
    """The share of `length`-grams that occur earlier in the text; 0 for a shorter text."""
    grams = [tuple(tokens[start : start + length]) for start in range(len(tokens) - length + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def measure(
    engine: Engine,
    prompts: Sequence[list[int]],
    speculation: SpeculationParams,
    max_new_tokens: int,
    name: str,
) -> Row:
    texts, references, joules, began_j = list[Text](), _references(engine, max_new_tokens), 0.0, energy_j()
    for prompt in prompts:
        began_j = energy_j()
        steps = list(engine.generate(prompt, SamplingParams(max_new_tokens, ignore_eos=True), speculation))
        tokens, stats = [token for step in steps for token in step.token_ids], steps[-1].stats
        joules += (energy_j() or 0.0) - (began_j or 0.0)
        found = token_log_likelihoods(engine, prompt, tokens)
        odd = float((found < math.log(ODD)).mean())
        reference = references.get(tuple(prompt))
        rouge = None if reference is None else rouge_l(tokens, reference)
        texts.append(Text(float(found.mean()), repeated_share(tokens), odd, stats.num_tokens, stats.num_passes, rouge))
    tau = speculation.tau if speculation.is_lossy else None
    per_token = joules / sum(text.num_tokens for text in texts) if began_j is not None else None
    return Row(name, tau, texts, _card_rate(texts, speculation), per_token)


def _references(engine: Engine, num_tokens: int) -> dict[tuple[int, ...], list[int]]:
    """Token ids of a held-out prompt → as many as are generated of what follows it."""
    texts = {prompt: reference_of(prompt) for prompt in builtin.prompts()}
    return {
        tuple(engine.encode(prompt)): engine.tokenizer.encode(text)[:num_tokens]
        for prompt, text in texts.items()
        if text is not None
    }


def _card_rate(texts: Sequence[Text], speculation: SpeculationParams) -> float | None:
    """Tokens/s on the clock of the card; None for trees whose rounds are not known."""
    if speculation.budget != 0 and not speculation.is_lossy:
        return None
    num_nodes, num_rounds = (0, 0) if speculation.budget == 0 else (tree_room(speculation, "cpu"), speculation.gamma)
    costs, num_passes = Costs(), sum(text.num_passes for text in texts)
    seconds = costs.pass_s(1 + num_nodes) + num_rounds * costs.round_s(1)
    return sum(text.num_tokens for text in texts) / (num_passes * seconds)


def described(row: Row, greedy: Row) -> str:
    """A line of the table."""
    gains, fresh = row.gains(greedy), row.gains(greedy, fresh=True)
    better = f"{sum(gain > 0 for gain in gains)} of {len(gains)}" if row is not greedy else ""
    among = f"{statistics.mean(fresh):+.3f} ({len(fresh)})" if fresh and row is not greedy else ""
    return (
        f"{row.name:<18}  {row.log_likelihood:>10.3f}  {row.tokens_per_pass:>8.2f}  {row.repeated:>8.2f}  "
        f"{row.odd:>5.3f}"
        f"  {better:>8}  {among:>18}  {_shown(row.rouge_l, 3)}  {_shown(row.tokens_per_s, 2)}"
        + (f"  {row.joules_per_token:.2f} J" if row.joules_per_token is not None else "")
    )


def _shown(value: float | None, digits: int) -> str:
    return f"{'' if value is None else format(value, f'.{digits}f'):>7}"


def plot(rows: Sequence[Row], file: Path) -> None:
    """Likelihood against tokens per pass, a line through the taus."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    joint = [row for row in rows if row.tau is not None and row.name.startswith("joint")]
    axes.plot(
        [row.tokens_per_pass for row in joint],
        [row.log_likelihood for row in joint],
        marker="o",
        label="joint acceptance (lossy)",
    )
    for row in joint:
        at = (row.tokens_per_pass, row.log_likelihood)
        axes.annotate(f"τ {row.tau:g}", at, xytext=(-6, 4), textcoords="offset points", ha="right")
    for row, marker in zip((row for row in rows if row not in joint), "s^*", strict=False):
        axes.plot(row.tokens_per_pass, row.log_likelihood, marker=marker, linestyle="", label=row.name)
    axes.set(xlabel="tokens per pass", ylabel="log-likelihood under the target, nats per token")
    axes.legend()
    with rc_context({"svg.fonttype": "none"}):  # text as text: a tenth of the bytes
        figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--taus", default="0.01,0.05,0.1,0.2,0.4,0.7,1")
    parser.add_argument("--beam", type=int, default=SpeculationParams.beam)
    parser.add_argument("--gamma", type=int, default=SpeculationParams.gamma)
    parser.add_argument("--searched", default="", help="more lengths of the blocks that the target searches by itself")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--max-prompts", type=int, default=None)
    parser.add_argument("--plot", type=Path, default=None)
    args = parser.parse_args()
    engine = Engine.load(args.model, draft=args.draft, dtype="fp32")
    if engine.draft.decoder is None:
        sys.exit("Error: no draft to measure; give --draft PATH")
    prompts = [engine.encode(prompt) for prompt in builtin.prompts()[: args.max_prompts]]
    nodes = args.beam * args.gamma
    ways: list[tuple[str, Engine, SpeculationParams]] = [
        ("greedy, plain", engine, SpeculationParams(budget=0)),
        (f"greedy, {nodes} nodes", engine, SpeculationParams(budget=nodes, lookup=False, recall=False)),
    ]
    for tau in map(float, args.taus.split(",")):
        speculation = SpeculationParams(accept="joint", tau=tau, beam=args.beam, gamma=args.gamma)
        ways.append((f"joint, tau {tau:g}", engine, speculation))
    searcher = engine.with_draft(ModelDraft(engine.target, "the target"))
    for gamma in (*map(int, filter(None, args.searched.split(","))), args.gamma):
        own = SpeculationParams(accept="joint", tau=0.5, beam=args.beam, gamma=gamma)  # of a ratio that is 1
        ways.append(("searched" if gamma == args.gamma else f"searched, {gamma}", searcher, own))

    print(f"{len(prompts)} held-out prompts x {args.max_new_tokens} tokens; beam {args.beam}, gamma {args.gamma}")
    print(f"{'':<18}  nats/token  per pass  repeated    odd  likelier  where no more rep.  ROUGE-L    tok/s")
    rows: list[Row] = []
    for name, runner, speculation in ways:
        rows.append(measure(runner, prompts, speculation, args.max_new_tokens, name))
        print(described(rows[-1], rows[0]), flush=True)
    if args.plot is not None:
        plot(rows, args.plot)
    settings = {"beam": args.beam, "gamma": args.gamma, "max_new_tokens": args.max_new_tokens}
    told = [row.as_dict() for row in rows]
    print(json.dumps({"model": engine.name, "draft": engine.draft_name, "settings": settings, "rows": told}))


if __name__ == "__main__":
    main()
