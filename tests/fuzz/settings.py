"""Random settings of drafts, caches, sampling, constraints and sessions, by number: each text is plain decoding's.

Case N is the same everywhere: an engine with the built-in target in fp32, and requests to it, alone, in a batch, one
after the other on kept caches, or as turns of a conversation that is rewound. Plain decoding has no draft, no tree and
no caches of earlier texts. A combination that cannot work is refused in one line.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import numpy as np

from offspec import KV_CACHES, Constraint, Engine, SamplingParams, SpeculationParams, Step, builtin
from offspec.errors import ConstraintError, OffspecError, UsageError
from offspec.loaders.streaming.placement import Slots, places_of
from offspec.planning.plan import Plan
from offspec.planning.probe import plan_here
from offspec.running.batch import Batch
from offspec.scheduler.params import TREES, Scoring, Stopping
from offspec.session import Session
from offspec.tools.verification import Setting, first_difference

from ..offspec.checkpoints.test_grouped_models import RATES

PLAIN, CONTEXT = SpeculationParams(budget=0), 512
PROMPTS = (
    "def area(",
    "class Tree:\n    def",
    "for i in range(10):\n    print(i)\n" * 3,
    "x = 1\ny = ",
    "import",
    "    return self._items[",
)
MESSAGES = ("def area(", "Close the file.", "for item in", "and?")
CONSTRAINTS = (
    Constraint.regex("[0-9]{2,9}"),
    Constraint.regex("(ab|cd)+"),
    Constraint.json_object(),
    Constraint.json_schema({"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "required": ["a"]}),
    Constraint.grammar('root ::= "x" [a-c]+ ("," | "!") "é"\n'),
)
DRAFTS: tuple[Any, ...] = (
    *("none", "lookup", "builtin", "builtin", "builtin", "shadow:4", "shadow:2", "self"),
    "shadow:3",
)
Text = tuple[tuple[int, ...], str, str | None]  # token ids, text, and why it ended


def streamed(num_resident: int) -> Callable[..., Plan]:
    """In place of `plan_here`: all layers but some come from disk."""

    def place(*args: Any) -> Plan:
        plan = plan_here(*args)
        resident, on_disk = (tuple(r.tolist()) for r in np.split(np.arange(len(plan.layers)), [num_resident]))
        slot = max(layer.slot_bytes for layer in plan.layers)
        where = replace(plan.placement, places=places_of(resident=resident, on_disk=on_disk), slots=Slots(2, 0, slot))
        return replace(plan, placement=where)

    return place


@dataclass(frozen=True)
class Case:
    """loading: options of `Engine.load`. num_resident: layers that are not streamed; None: as planned."""

    loading: dict[str, Any]
    num_resident: int | None
    learns: bool
    way: str


WAYS = ("alone", "alone", "batch", "batch", "kept", "session", "session")


def random_case(chance: random.Random, lookup_file: Path) -> Case:
    draft = chance.choice(DRAFTS)
    loading: dict[str, Any] = {"draft": draft, "kv_cache": chance.choice(KV_CACHES), "context": CONTEXT}
    learns = draft == "builtin" and chance.random() < 0.3
    if learns:
        loading["learn"] = True
    if draft == "builtin" and chance.random() < 0.3:
        loading["draft_window"] = chance.choice((16, 40, 100))
    if draft == "self":
        loading["exit_layer"] = chance.choice((1, 3, 6))
    if chance.random() < 0.2:
        loading["lookup_files"] = [lookup_file]
    if chance.random() < 0.15 and not learns:
        loading["deterministic"] = True
    if chance.random() < 0.3:
        loading["synchronous"] = True
    loading["texts"] = chance.choice((1, 4))
    num_resident = chance.choice((None, None, 0, 1, 5))
    return Case(loading, num_resident, learns, chance.choice(WAYS))


def random_sampling(chance: random.Random) -> SamplingParams:
    """Half of them greedy, and most of the settings off in most of them."""

    def rarely(*values: Any) -> Any:
        return chance.choice(values) if chance.random() < 0.25 else None

    settings: dict[str, Any] = {
        "max_new_tokens": chance.choice((1, 2, 8, 12, 16)),
        "temperature": chance.choice((0.0, 0.0, 0.6, 1.0, 1.5)),
        "seed": chance.choice((0, 1, 2**64 - 1)),
        "top_k": rarely(1, 3, 40),
        "top_p": rarely(0.5, 0.9),
        "min_p": rarely(0.05, 0.5),
        "repetition_penalty": rarely(0.8, 1.3),
        "frequency_penalty": rarely(-1.0, 1.5),
        "presence_penalty": rarely(-0.5, 2.0),
        "logit_bias": rarely(((40, 5.0),), ((7, -100.0), (11, 3.5))),
        "stop": rarely(("\n",), ("(", "self"), ("e",)),
        "logprobs": rarely(0, 3),
    }
    settings |= {"constraint": rarely(*CONSTRAINTS)}
    if settings["constraint"] is None:
        settings["ignore_eos"] = rarely(True)
    return SamplingParams(**{name: value for name, value in settings.items() if value is not None})


def random_speculation(chance: random.Random) -> SpeculationParams:
    settings: dict[str, Any] = {"budget": chance.choice((None, None, 0, 1, 3, 8, 32, 100))}
    for name in ("lookup", "recycling", "recall", "reuse", "overlap", "forced"):
        if chance.random() < 0.5:
            settings[name] = chance.random() < 0.5
    others = {"width": (1, 4, 50), "children": (1, 3), "max_depth": (1, 2, 5)}
    others |= {"scoring": get_args(Scoring), "tree": tuple(TREES), "stopping": get_args(Stopping)}
    for name, values in others.items():
        if chance.random() < 0.2:
            settings[name] = chance.choice(values)
    return SpeculationParams(**settings)


def load(case: Case) -> Engine:
    """The case's engine; its layers are streamed from disk but for `num_resident`."""
    with ExitStack() as stack:
        stack.enter_context(patch("offspec.loading.measure_quick_rates", lambda *_: RATES))
        if case.num_resident is not None:
            stack.enter_context(patch("offspec.loading.plan_here", streamed(case.num_resident)))
        return Engine.load("builtin", device="cpu", dtype="fp32", **case.loading)


class PlainDecoding:
    """Texts of plain decoding, by the format of the KV entries. The engines are loaded when they are first needed."""

    def __init__(self) -> None:
        self._engines = dict[str, Engine]()

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def faults(
        self, case: Case, prompt: Sequence[int], params: SamplingParams, steps: Sequence[Step], asked: object
    ) -> Iterator[str]:
        """What is wrong with a text; only its beginning may be there if its last step has no finish_reason.

        Packed KV entries may differ where rounding crosses the border of two codes, so near-ties are right with them.
        """
        engine, told = self._engine(case.loading["kv_cache"]), joined(steps)
        expected = joined(list(engine.generate(prompt, params, PLAIN)))
        if told[2] is None:
            told, expected = (told[0], "", None), (expected[0][: len(told[0])], "", None)
        if told != expected and not _is_near_tie(engine, prompt, params, told[0], expected[0]):
            yield f"{told}, not {expected}, of {asked}"

    def _engine(self, kv_cache: str) -> Engine:
        if kv_cache not in self._engines:
            plain = Case({"draft": "none", "kv_cache": kv_cache, "context": CONTEXT}, None, False, "")
            self._engines[kv_cache] = load(plain)
        return self._engines[kv_cache]


def joined(steps: Sequence[Step]) -> Text:
    ids = tuple(token for step in steps for token in step.token_ids)
    return ids, "".join(step.text for step in steps), steps[-1].finish_reason if steps else None


def _is_near_tie(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, told: Sequence[int], expected: Sequence[int]
) -> bool:
    """Whether the first difference is one that `offspec verify` allows: none in fp32 without packed KV entries."""
    setting = Setting(params.temperature, params.top_p, None, "coupled", "own")
    found = list(first_difference(engine, setting, 0, prompt, params, list(expected), list(told)))
    return bool(found) and all(difference.is_near_tie for difference in found)


Ask = Callable[[Engine, Case, PlainDecoding, random.Random], Iterator[str]]


def _alone(engine: Engine, case: Case, plain: PlainDecoding, chance: random.Random) -> Iterator[str]:
    for _ in range(2):
        prompt, params, speculation = chance.choice(PROMPTS), random_sampling(chance), random_speculation(chance)
        steps = list(engine.generate(prompt, params, speculation))
        if case.learns:
            engine.learn(steps[-1].stats)
        yield from plain.faults(case, engine.encode(prompt), params, steps, (prompt, params, speculation))


def _kept(engine: Engine, case: Case, plain: PlainDecoding, chance: random.Random) -> Iterator[str]:
    """Texts on the same caches: each goes on with the last one, or with its beginning, or is another."""
    caches, text = engine.new_caches(), list[int]()
    for _ in range(3):
        prompt = text[: chance.randrange(len(text) + 1)] + engine.encode(chance.choice(PROMPTS))
        params, speculation = random_sampling(chance), random_speculation(chance)
        with closing(engine.generate(prompt, params, speculation, caches=caches)) as found:
            steps = _some(found, chance)
        yield from plain.faults(case, prompt, params, steps, (prompt, params, speculation))
        text = [*prompt, *joined(steps)[0]]


def _some(steps: Iterable[Step], chance: random.Random) -> list[Step]:
    """The steps up to where whoever asked leaves, which may be the end."""
    found = list[Step]()
    for step in steps:
        found.append(step)
        if chance.random() < 0.1:
            break
    return found


def _batch(engine: Engine, case: Case, plain: PlainDecoding, chance: random.Random) -> Iterator[str]:
    """Texts that join one another in the middle; some of them are cancelled."""
    asked = [
        (chance.choice(PROMPTS), random_sampling(chance), random_speculation(chance))
        for _ in range(chance.randint(2, 4))
    ]
    tickets, found, number = dict[Any, int](), dict[int, list[Step]](), 0
    errors, left = dict[int, OffspecError](), set[int]()
    with closing(Batch(engine.models, chance.choice((None, 2, 4)))) as batch:
        while number < len(asked) or not batch.is_idle:
            if number < len(asked) and (batch.is_idle or chance.random() < 0.5):
                try:
                    tickets[batch.add(engine.check_request(*asked[number]))] = number
                except OffspecError as exc:
                    errors[number] = exc
                number += 1
            if tickets and chance.random() < 0.03:
                ticket = chance.choice(list(tickets))
                batch.cancel(ticket)
                left.add(tickets[ticket])
            for ticket, outcome in batch.step():
                if isinstance(outcome, OffspecError):
                    errors[tickets[ticket]] = outcome
                else:
                    found.setdefault(tickets[ticket], []).append(outcome)
    for i, (prompt, params, speculation) in enumerate(asked):
        steps = found.get(i, [])
        if i in errors:
            if not isinstance(errors[i], (UsageError, ConstraintError)) or len(str(errors[i]).splitlines()) > 1:
                yield f"{errors[i]!r} of {asked[i]}"
            continue
        if i not in left and joined(steps)[2] is None:
            yield f"no end of {asked[i]}"
        yield from plain.faults(case, engine.encode(prompt), params, steps, (prompt, params, speculation))


def _session(engine: Engine, case: Case, plain: PlainDecoding, chance: random.Random) -> Iterator[str]:
    """Turns of a conversation; some are asked again, taken back or left in the middle."""
    session = Session(engine, chance.choice((None, "Be brief.")))
    for _ in range(4):
        if session.turns and chance.random() < 0.2:
            session.undo()
        again = bool(session.turns) and chance.random() < 0.3
        params, speculation = random_sampling(chance), random_speculation(chance)
        with closing(session.reply(chance.choice(MESSAGES), params, speculation, again=again)) as found:
            steps = _some(found, chance)
        turn = session.turns[-1]
        prompt = session.encode(session.turns[turn.num_dropped :])
        yield from plain.faults(case, prompt, params, steps, (turn.message, params, speculation))


ASK: dict[str, Ask] = {"alone": _alone, "batch": _batch, "kept": _kept, "session": _session}


def run_cases(numbers: range, folder: Path) -> tuple[Counter[str], list[str]]:
    """How many cases ended how, and what is wrong. folder: for a file that lookup reads."""
    (file := folder / "lookup.txt").write_text("\n".join(builtin.prompts()[:5]))
    outcomes, wrong = Counter[str](), list[str]()
    with closing(PlainDecoding()) as plain:
        for number in numbers:
            chance = random.Random(number)
            case = random_case(chance, file)
            try:
                with load(case) as engine:
                    faults = list(ASK[case.way](engine, case, plain, chance))
            except (UsageError, ConstraintError) as exc:
                faults = [] if len(str(exc).splitlines()) == 1 else [repr(exc)]
                outcomes["refused"] += 1
            except Exception as exc:  # noqa: BLE001 (it is told with the case)
                faults = [repr(exc)]
            else:
                outcomes[case.way] += 1
            wrong += [f"case {number} ({case}): {fault}" for fault in faults]
    return outcomes, wrong
