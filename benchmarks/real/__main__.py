"""Tokens per pass of a real pair on the field's prompts: offspec beside SpecExec, Sequoia, OPT-Tree and lookup.

    scripts/fetch_real_pair && scripts/fetch_prompts
    python -m benchmarks.real --quick              # 6 prompts, 64 nodes: 12 minutes on two cores
    python -m benchmarks.real                      # 20 prompts of each set, T = 0, 0.6 and 1; hours; resumable
    python -m benchmarks.real --own shadow:4/0,shadow:3/9,resident/14 --draft none     # copies of the target's layers
    python -m benchmarks.real --draft HEAD --budgets 7,16,64,256     # with a chain of 7

The target's texts are recorded once by plain decoding, in fp32, so that they do not depend on the shape of a pass. Each
method is replayed along the same texts. Its tokens per pass do not depend on this machine; where a method chooses its
own budget, seconds are those of the card's cost model (benchmarks/scheduling/schedulers.py). Every pass counts,
including the first. Finished cells lie in `results.jsonl` of the folder, and the same command goes on behind them.

Brackets: 95 % intervals over prompts (bootstrap). Prompts of whose answer the prompt holds more than half (4-grams)
have rows of their own, because any lookup predicts them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.scheduling.replay import Recording, record
from offspec import Engine, SamplingParams
from offspec.checkpoints.shadows import find_shadow, make_shadow
from offspec.drafts.base import Draft
from offspec.drafts.layer_drafts import SHADOW, LayersOfTarget, load_shadow
from offspec.drafts.model_draft import ModelDraft
from offspec.drafts.without_model import WithoutModel
from offspec.loaders.streaming.placement import spread
from offspec.loaders.streaming.weights import LayerView
from offspec.model.layer_draft import LayerDraft

from .agreement import agreement
from .models import DRAFT, FOLDER, PROMPTS, TARGET
from .prompts import read_set
from .results import Cell, CellKey, Results
from .rows import Row, chosen, of_targets_states, with_model, without_model
from .table import show

SETS = ("mt_bench", "humaneval", "gsm8k")
TOP_P = {0.6: 0.9}  # as SpecExec's and Spec-Bench's settings at this temperature

QUICK = "^lookup|authors|at 0.7|opt-tree|^offspec$"  # rows of a quick run


@dataclass(frozen=True)
class Work:
    """What to measure. num_prompts: of each set. budgets: nodes of a tree; None for offspec's own choice."""

    sets: Sequence[str]
    num_prompts: int
    num_tokens: int
    temperatures: Sequence[float]
    budgets: Sequence[int | None]
    pattern: str


def main(arguments: Sequence[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    work = work_of(args)
    for path in (args.model, args.draft):
        if Path(path).parent == FOLDER and not Path(path).exists():
            sys.exit(f"Error: {path} is not there: run scripts/fetch_real_pair")
    try:
        texts = {name: read_set(name, args.prompt_folder)[: work.num_prompts] for name in work.sets}
    except FileNotFoundError as exc:
        sys.exit(f"Error: {exc.filename} is not there: run scripts/fetch_prompts")
    except ValueError as exc:
        sys.exit(f"Error: {exc}")
    results = Results(args.folder / "results.jsonl", Cell.read)
    with Engine.load(args.model, draft=args.draft, dtype="fp32", context=args.context, threads=args.threads) as engine:
        engines = [engine.with_draft(own_draft(engine, each)) for each in args.own.split(",") if each] or [engine]
        for temperature in work.temperatures:
            params = SamplingParams(work.num_tokens, temperature, top_p=TOP_P.get(temperature, 1.0), seed=0)
            for name, prompts in texts.items():
                posed = [each.text if args.raw else each.messages for each in prompts]
                recordings = record(engine, posed, params, args.folder / "texts")
                for each in engines:
                    for cell in measured(each, name, recordings, work, results):
                        print(cell, file=sys.stderr, flush=True)
    print(show(list(results.entries.values())))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="2 prompts of each set, 64 nodes, T = 0 and 1, five rows")
    made.add_argument("--model", default=str(TARGET), help="another target [the fetched one]")
    made.add_argument("--draft", default=str(DRAFT), help="another draft: a path, shadow:4, … [the fetched one]")
    made.add_argument("--own", default="", help="copies of the target's layers as drafts: KIND[:BITS]/RESIDENT, ...")
    made.add_argument("--sets", default=",".join(SETS), help="names, or files in MT-Bench's format")
    made.add_argument("--prompts", type=int, default=20, help="of each set")
    made.add_argument("--tokens", type=int, default=128)
    made.add_argument("--temperatures", default="0,0.6,1")
    made.add_argument("--budgets", default="16,64,128,256,512,1024,2048,auto")
    made.add_argument("--only", default="", help="a pattern of methods' names")
    made.add_argument("--raw", action="store_true", help="prompts as plain text, for models without a chat template")
    made.add_argument("--context", type=int, default=2048)
    made.add_argument("--threads", type=int, help="two processes of one thread each are faster than one of two")
    made.add_argument("--folder", type=Path, default=Path("build/real"), help="folder for texts and results")
    made.add_argument("--prompt-folder", type=Path, default=PROMPTS)
    return made


def work_of(args: argparse.Namespace) -> Work:
    sets = args.sets.split(",")
    if args.quick:
        return Work(sets, 2, 64, (0.0, 1.0), (64,), args.only or QUICK)
    budgets = [None if each == "auto" else int(each) for each in args.budgets.split(",")]
    return Work(sets, args.prompts, args.tokens, [*map(float, args.temperatures.split(","))], budgets, args.only)


def measured(
    engine: Engine, name: str, recordings: Sequence[Recording], work: Work, results: Results[Cell]
) -> Iterator[Cell]:
    """The cells of one set at one temperature; those that are missing are measured and stored."""
    temperature, draft = recordings[0].params.temperature, engine.draft_name or ""
    shape = (name, len(recordings), work.num_tokens, temperature)
    if type(engine.draft) is ModelDraft and engine.draft.other is None:  # in one vocabulary
        key = CellKey(engine.name, draft, "agreement", None, *shape)
        yield results.get(key) or results.add(Cell.of_agreement(key, agreement(engine, recordings)))
    for budget in work.budgets:
        for row in rows(engine.draft, budget, work.pattern):
            key = CellKey(engine.name, draft, row.name, budget, *shape)
            yield results.get(key) or results.add(Cell.of_texts(key, recordings, row.replay(engine, recordings)))


def rows(draft: Draft, budget: int | None, pattern: str) -> Sequence[Row]:
    if type(draft) is ModelDraft:
        return chosen([*without_model(budget), *with_model(budget)], pattern)
    return chosen([*(without_model(budget) if isinstance(draft, WithoutModel) else of_targets_states(budget))], pattern)


def own_draft(engine: Engine, name: str) -> Draft:
    """`shadow:3/9`: a copy in 3 bits of all layers but 9; `resident/14`: 14 layers alone; both spread evenly."""
    kind, _, number = name.partition("/")
    if not number.isdecimal():
        sys.exit(f"Error: --own {name}: write the number of resident layers after a slash, e.g. shadow:3/9")
    assert engine.plan is not None
    files, target = engine.plan.inputs.target, engine.target
    count = target.config.num_layers
    resident = spread(count, int(number))
    if kind.startswith(SHADOW):
        bits = int(kind.partition(":")[2])
        shadow = find_shadow(files, bits)
        if shadow is None:
            make_shadow(files, bits)
            shadow = find_shadow(files, bits)
        assert shadow is not None
        return load_shadow(shadow, target, set(range(count)) - set(resident))
    view = LayerView(target.weights, resident, target.weights.scratch)
    return LayersOfTarget(LayerDraft(target, resident, view), f"{kind} ({len(resident)} of {count} layers)")


if __name__ == "__main__":
    main()
