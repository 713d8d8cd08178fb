"""What lossy acceptance (joint, MJSD) and early exits (EESD) are worth on a real pair, beside exact decoding.

    scripts/fetch_real_pair && scripts/fetch_prompts
    python -m benchmarks.real.quality --quick          # 2 prompts of each set, three lossy rows
    python -m benchmarks.real.quality                  # 20 of each set, 24 lossy rows; days on two cores; resumable
    python -m benchmarks.real.quality --taus 0.1,0.4 --gammas 8 --dtype bf16

Rows: plain decoding, the default engine (exact, with the draft), and `--accept joint` for each tau and each gamma, the
k of k-token decoding; for each gamma also the exact engine with as many nodes as the beam has, because the default may
find that drafting does not pay here. `--accept bild` for each threshold where the draft doubts (`--fallbacks`). Each
answers the same prompts greedily. Columns:

- HumanEval: pass@1 by the set's own tests, which run in a limited process (`sandbox.py`). GSM8K: the answer's last
  number. `against exact`: prompts that only this row solves, and that only exact decoding does. `cut`: answers that
  reached `--tokens`.
- nats/token: log-likelihood of the text under the target; perplexity is exp of its negative. ROUGE-L: of the answer's
  code, or its text, against the set's reference answer, in tokens of the model.
- tokens per pass (the accepted length, with the target's own token), and tokens/s on this machine's clock, with the
  prompt's pass. `over exact` and `over plain`: tokens/s over those of the default engine and of plain decoding on the
  same prompt, both measured again when they are older than `--beside` seconds: on a slow machine once for each row,
  which takes most of the time. Each text begins without recall of the texts before.
- J/token: of a card by NVML, otherwise of this machine's processors by RAPL.

Brackets: 95 % intervals over prompts (bootstrap). One JSON line per row and prompt lies in `quality.jsonl` of the
folder, with the text, and the same command goes on behind them.

Early exits: `--exit FILE` (may be repeated) adds rows of a trained exit layer with both ways of stopping, beside lookup
and the draft model. They are exact: their columns of quality are those of plain decoding. This trains one for the 1.5B
target. The steps and texts bound its time (there is no limit in minutes); after Ctrl-C, `--resume` continues:

    offspec distill PAIR/Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf --exit-layer 7 --dtype fp32 --steps 200
        --num-texts 64 --text-tokens 128 --batch-texts 2 --out exit7.safetensors
    python -m benchmarks.real.quality --exit exit7.safetensors --only "exit|lookup|16 nodes"
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.card.energy import energy_meter
from offspec import Engine, OffspecError, SamplingParams, SpeculationParams
from offspec.checkpoints.exit_layers import ExitFile
from offspec.drafts.base import Draft
from offspec.drafts.self_draft import SelfDraft
from offspec.drafts.without_model import LookupDraft, NoDraft
from offspec.errors import MemoryLimitError
from offspec.model.early_exit import EarlyExit
from offspec.scheduler.params import Stopping
from offspec.tools.benchmark import Workload, token_log_likelihoods

from .answers import Answer, AnswerKey, Beside, Meter, Run, Way, measure
from .measures import energy_j, rouge_l
from .models import DRAFT, FOLDER, PROMPTS, TARGET
from .quality_table import EXACT, PLAIN, UNREADABLE, show
from .results import Results
from .tasks import TASKS, Task

TAUS, GAMMAS = "0.05,0.1,0.2,0.4,0.7,1", "4,8,16"
FALLBACKS = "0.5,0.7,0.9"
STOPPINGS: tuple[Stopping, ...] = ("default", "thompson")
WARM_UP_TOKENS = 16
EXIT_NODES = 16  # as in docs/results/early-exit.md: in memory, the default engine may send no tree at all


@dataclass(frozen=True)
class Work:
    """What to measure. num_prompts: of each set. num_tokens: of an answer, at most. pattern: of rows' names."""

    sets: Sequence[str]
    num_prompts: int
    num_tokens: int
    taus: Sequence[float]
    gammas: Sequence[int]
    fallbacks: Sequence[float]
    exits: Sequence[Path]
    pattern: str


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    for path in (args.model, args.draft):
        if Path(path).parent == FOLDER and not Path(path).exists():
            sys.exit(f"Error: {path} is not there: run scripts/fetch_real_pair")
    work = work_of(args)
    try:
        tasks = {name: TASKS[name](args.prompt_folder)[: work.num_prompts] for name in work.sets}
    except FileNotFoundError as exc:
        sys.exit(f"Error: {exc.filename} is not there: run scripts/fetch_prompts")
    results = Results(args.folder / "quality.jsonl", Answer.read)
    options = {"dtype": args.dtype, "context": args.context, "needs_draft_model": True}
    try:
        with Engine.load(args.model, draft=args.draft, **options) as engine:
            measuring = Measuring(engine, args.dtype, list(ways(engine, work)), work.num_tokens, args.beside)
            for answer in measuring.missing(tasks, results):
                print(told(results.add(answer)), file=sys.stderr, flush=True)
    except (OffspecError, OSError) as exc:  # OSError: answers cannot be run within limits
        sys.exit(f"Error: {exc}")
    print(show(list(results.entries.values())))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--quick", action="store_true", help="2 prompts of each set, tau 0.1 and 1, gamma 8, one threshold"
    )
    made.add_argument("--model", default=str(TARGET), help="another target [the fetched one]")
    made.add_argument("--draft", default=str(DRAFT), help="another draft model [the fetched one]")
    made.add_argument("--sets", default=",".join(TASKS))
    made.add_argument("--prompts", type=int, default=20, help="of each set")
    made.add_argument("--tokens", type=int, default=512, help="of an answer, at most")
    made.add_argument("--taus", default=TAUS)
    made.add_argument("--gammas", default=GAMMAS)
    made.add_argument("--fallbacks", default=FALLBACKS)
    made.add_argument("--exit", type=Path, action="append", default=[], metavar="FILE", help="a trained exit layer")
    made.add_argument("--only", default="", help="a pattern of rows' names; the two exact references are always there")
    made.add_argument("--dtype", default="fp32", choices=("fp32", "bf16"))
    made.add_argument("--beside", type=float, default=60.0, metavar="SECONDS", help="how old the references may be")
    made.add_argument("--context", type=int, default=2048)
    made.add_argument("--folder", type=Path, default=Path("build/real"), help="folder for results")
    made.add_argument("--prompt-folder", type=Path, default=PROMPTS)
    return made


def work_of(args: argparse.Namespace) -> Work:
    """Exits for an unknown set."""
    sets = args.sets.split(",")
    if unknown := [name for name in sets if name not in TASKS]:
        sys.exit(f"Error: the set {unknown[0]!r} has no answers to judge by; choose from {', '.join(TASKS)}")
    if args.quick:
        return Work(sets, 2, 256, (0.1, 1.0), (8,), (0.7,), args.exit, args.only)
    taus, fallbacks = ([float(part) for part in each.split(",")] for each in (args.taus, args.fallbacks))
    gammas = [int(part) for part in args.gammas.split(",")]
    return Work(sets, args.prompts, args.tokens, taus, gammas, fallbacks, args.exit, args.only)


# ------------------------------------------------------------------------------------------------ rows


def ways(engine: Engine, work: Work) -> Iterator[Way]:
    """The references, and the other rows whose names the pattern matches. Raises OffspecError for a wrong exit."""
    yield Way(PLAIN, engine.with_draft(NoDraft()), SpeculationParams(0))
    yield Way(EXACT, engine.with_draft(engine.draft), SpeculationParams())
    others = [*block_ways(engine, work), *bild_ways(engine, work), *exit_ways(engine, work.exits)]
    yield from (way for way in others if re.search(work.pattern, way.name))


def block_ways(engine: Engine, work: Work) -> Iterator[Way]:
    """Joint acceptance by blocks of gamma tokens, each after exact acceptance of as many nodes."""
    for gamma in work.gammas:
        yield from _of_nodes(engine, engine.draft, "draft model", SpeculationParams.beam * gamma)
        for tau in work.taus:
            speculation = SpeculationParams(accept="joint", tau=tau, gamma=gamma)
            yield Way(f"joint, tau {tau:g}, gamma {gamma}", engine.with_draft(engine.draft), speculation)


def bild_ways(engine: Engine, work: Work) -> Iterator[Way]:
    """The draft speaks alone until it doubts, by each threshold."""
    for fallback in work.fallbacks:
        speculation = SpeculationParams(accept="bild", tau=fallback)
        yield Way(f"bild, tau {fallback:g}", engine.with_draft(engine.draft), speculation)


def exit_ways(engine: Engine, files: Sequence[Path]) -> Iterator[Way]:
    """Early exits beside lookup and the draft model, with the engine's own number of nodes and with EXIT_NODES."""
    if not files:
        return
    exits = [exit_draft(engine, path) for path in files]
    for budget in (None, EXIT_NODES):
        yield from _of_nodes(engine, LookupDraft(), "lookup", budget)
        if budget is not None:  # otherwise it is the default
            yield from _of_nodes(engine, engine.draft, "draft model", budget)
        for path, draft in zip(files, exits, strict=True):
            name = f"exit after layer {draft.decoder.num_first} ({path.name})"
            yield from _of_nodes(engine, draft, name, budget, STOPPINGS)


def exit_draft(engine: Engine, path: Path) -> SelfDraft:
    """The engine's target as its own draft, without a second copy. Raises OffspecError for a file that does not fit."""
    assert engine.plan is not None
    target, placement = engine.plan.inputs.target, engine.plan.placement
    file = ExitFile.open(path, target)
    if streamed := [layer for layer in placement.streamed if layer < file.exit_layer]:
        raise MemoryLimitError(f"{path} drafts with {file.exit_layer} layers, and layer {streamed[0]} is not in memory")
    return SelfDraft(EarlyExit(engine.target, file.exit_layer, file.load(engine.target.dtype, engine.target.device)))


def _of_nodes(
    engine: Engine, draft: Draft, name: str, budget: int | None, stoppings: Sequence[Stopping] = ("default",)
) -> Iterator[Way]:
    """Exact ways of a draft. budget: nodes; None finds the number while it runs."""
    nodes = "" if budget is None else f", {budget} nodes"
    for stopping in stoppings:
        flag = "" if stopping == "default" else f", `--stopping {stopping}`"
        yield Way(f"{name}{nodes}{flag}", engine.with_draft(draft), SpeculationParams(budget, stopping=stopping))


# ------------------------------------------------------------------------------------------------ measuring


class Measuring:
    """Answers of all ways of one engine to tasks, prompt by prompt."""

    def __init__(self, engine: Engine, dtype: str, ways: Sequence[Way], num_tokens: int, max_age_s: float) -> None:
        self._engine, self._dtype, self._ways = engine, dtype, ways
        self._num_tokens, self._max_age_s = num_tokens, max_age_s
        self._meter: Meter = energy_meter(engine.target.device) or energy_j

    def missing(self, tasks: dict[str, list[Task]], results: Results[Answer]) -> Iterator[Answer]:
        """Those that `results` does not have, by prompts."""
        is_warm = False
        for name, each in tasks.items():
            for task in each:
                todo = [way for way in self._ways if results.get(self._key(way, name, task)) is None]
                if todo and not is_warm:
                    self._warm_up(task)
                    is_warm = True
                yield from self._answers(todo, name, task)

    def _warm_up(self, task: Task) -> None:
        """A few tokens of each way, so that no first answer pays for what is done once."""
        for way in self._ways:
            self._run(self._ids(task), min(WARM_UP_TOKENS, self._num_tokens), way)

    def _answers(self, todo: Sequence[Way], name: str, task: Task) -> Iterator[Answer]:
        ids = self._ids(task)
        run = partial(self._run, ids, self._num_tokens)
        beside = Beside({way.name: way for way in self._ways if way.name in (EXACT, PLAIN)}, run, self._max_age_s)
        for way in todo:
            references = beside.runs()
            found = references[way.name] if way.name in references else run(way)
            yield self._judged(self._key(way, name, task), task, ids, found, references)

    def _run(self, ids: list[int], num_tokens: int, way: Way) -> Run:
        return measure(way, ids, SamplingParams(num_tokens), self._meter)

    def _judged(self, key: AnswerKey, task: Task, ids: list[int], run: Run, references: Mapping[str, Run]) -> Answer:
        return Answer(
            key,
            run.text,
            len(run.token_ids),
            run.num_passes,
            run.seconds,
            run.joules,
            float(token_log_likelihoods(self._engine, ids, run.token_ids).sum()),
            rouge_l(self._tokens(task.answer_of(run.text)), self._tokens(task.reference)),
            task.failure_of(run.text),
            run.is_cut,
            references[EXACT].rate,
            references[PLAIN].rate,
        )

    def _key(self, way: Way, name: str, task: Task) -> AnswerKey:
        draft = self._engine.draft_name or ""
        return AnswerKey(self._engine.name, draft, self._dtype, way.name, name, task.prompt.name, self._num_tokens)

    def _ids(self, task: Task) -> list[int]:
        return self._engine.encode(Workload("", task.prompt.messages).for_model(self._engine))

    def _tokens(self, text: str) -> list[int]:
        return self._engine.tokenizer.encode(text, add_special_tokens=False)


def told(answer: Answer) -> str:
    """A line of progress."""
    key, joules = answer.key, answer.joules
    energy = UNREADABLE if joules is None else f"{joules / answer.num_tokens:.2f}"
    return (
        f"{key.prompt} {key.way}: {answer.failure or 'solved'}, {answer.num_tokens / answer.num_passes:.2f} tokens per "
        f"pass, {answer.num_tokens / answer.seconds:.2f} tokens/s (exact {answer.exact.tokens_per_s:.2f}, plain "
        f"{answer.plain.tokens_per_s:.2f}), J/token {energy}"
    )


if __name__ == "__main__":
    main()
