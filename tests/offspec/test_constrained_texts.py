"""Constrained answers are valid, equal to masked plain decoding, and what cannot be obeyed is refused in one line."""

from __future__ import annotations

import gc
import itertools
import json
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from offspec import Constraint, Engine, SamplingParams, SpeculationParams
from offspec.errors import ConstraintError, UsageError
from offspec.scheduler.trees.constraint import allows
from offspec.text import grammar, grammar_library
from offspec.text.grammar import ConstraintCompiler
from offspec.text.grammar_constraint import GrammarConstraint
from offspec.text.grammar_library import MAX_BYTES

from ..pair import Pair
from ..refusals import refused
from .schemas import TEMPERATURES, an_object, array, failures, schemas
from .test_streaming import behind, stream

PLAIN = SpeculationParams(budget=0)
PERSON = an_object(name={"type": "string", "maxLength": 8}, tags=array({"enum": ["red", "green"]}))


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Iterator[Engine]:
    with Engine.load(pair.target, draft=str(pair.draft), device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def compiler(engine: Engine) -> ConstraintCompiler:
    return ConstraintCompiler(engine.tokenizer, engine.target.config.vocab_size)


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("name", list(schemas())[::60])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_answers_are_valid_and_those_of_plain_decoding(engine: Engine, name: str, temperature: float) -> None:
    """Some of the schemas; `python -m tests.offspec.schemas` checks all of them, with the built-in pair."""
    assert list(failures(engine, name, schemas()[name], temperature, [SpeculationParams(budget=12)])) == []


def test_every_schema_compiles(compiler: ConstraintCompiler) -> None:
    assert len(schemas()) > 200
    for schema in schemas().values():
        compiler.compile(Constraint.json_schema(schema))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("constraint", "is_right"),
    [
        (Constraint.json_object(), lambda text: isinstance(json.loads(text), dict)),
        (Constraint.regex("(ab?){2,6}[0-9]{3}"), re.compile("(ab?){2,6}[0-9]{3}").fullmatch),
        (Constraint.grammar('root ::= "x" [a-c]+ ("," | "!") "é"\n'), re.compile("x[a-c]+[,!]é").fullmatch),
        (Constraint.grammar('start: "x" LETTER+ ("," | "!")\nLETTER: /[a-c]/\n'), re.compile("x[a-c]+[,!]").fullmatch),
    ],
    ids=["object", "regex", "gbnf", "lark"],
)
def test_other_constraints_are_obeyed(engine: Engine, constraint: Constraint, is_right: Any) -> None:
    for temperature, seed in zip((0.0, 1.5), range(2), strict=True):
        params = SamplingParams(24, temperature=temperature, seed=seed, constraint=constraint)
        texts = list[str]()
        for speculation in (PLAIN, SpeculationParams(budget=12)):
            *steps, last = engine.generate("def", params, speculation)
            texts.append("".join(step.text for step in (*steps, last)))
            assert last.finish_reason == "length" or is_right(texts[-1]), texts
        assert len(set(texts)) == 1


@pytest.mark.parametrize("draft", ["none", "lookup"])
def test_forced_tokens_save_passes_without_a_draft(pair: Pair, draft: str) -> None:
    params = SamplingParams(32, constraint=Constraint.json_schema(PERSON))
    passes = list[int]()
    with Engine.load(pair.target, draft=draft, device="cpu") as engine:
        for speculation in (PLAIN, SpeculationParams(budget=16)):
            *_, last = engine.generate("def", params, speculation)
            passes.append(last.stats.num_passes)
    assert passes[1] < 0.75 * passes[0]


def test_masks_are_computed_during_the_pass_where_layers_stream(
    engine: Engine, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, compute = Counter[str](), GrammarConstraint._new_mask

    def counted(self: GrammarConstraint, path: Sequence[int]) -> Any:
        made[threading.current_thread().name] += 1
        return compute(self, path)

    monkeypatch.setattr(GrammarConstraint, "_new_mask", counted)
    params = SamplingParams(20, constraint=Constraint.json_schema(PERSON))
    target = stream(pair.target)
    with closing(target.weights):
        *_, last = behind(engine, target).generate("def", params, PLAIN)
    assert last.stats.stream_bytes_per_pass
    assert made["offspec-draft"] == last.stats.num_passes - 1, "all but that of the first pass"


# ------------------------------------------------------------------------------------------------ the parser


def walk_at_random(constraint: GrammarConstraint, generator: Any, size: int, final: frozenset[int]) -> list[int]:
    path = list[int]()
    for _ in range(12):
        allowed = [token for token in range(size) if allows(constraint.mask(path), token) and token not in final]
        if not allowed:
            break
        path.append(int(generator.choice(allowed)))
    return path


@pytest.mark.parametrize("schema", [PERSON, {"type": "object"}, {"enum": ["é🙂", "é!"]}], ids=["a", "b", "c"])
def test_masks_depend_on_the_tokens_alone(compiler: ConstraintCompiler, engine: Engine, schema: Any) -> None:
    """Not on what was asked before, nor on where the path begins. Forced tokens are the only ones of their masks."""
    generator, final = np.random.default_rng(0), engine.tokenizer.eos_ids
    size, asked = engine.target.config.vocab_size, Constraint.json_schema(schema)
    used = compiler.compile(asked)
    for _ in range(6):
        path = walk_at_random(used, generator, size, final)
        for end in generator.permutation(len(path) + 1).tolist():
            fresh, cut = compiler.compile(asked), int(generator.integers(end + 1))
            fresh.accept(path[:cut])
            assert (fresh.mask(path[cut:end]) == used.mask(path[:end])).all()
            for at, token in enumerate(forced := used.forced(path[:end], 9)):
                mask = used.mask([*path[:end], *forced[:at]])
                assert np.unpackbits(mask).sum() == 1
                assert allows(mask, token)
            assert fresh.forced(path[cut:end], 9) == forced


def test_the_end_of_the_text_is_forced_and_nothing_follows_it(compiler: ConstraintCompiler, engine: Engine) -> None:
    constraint = compiler.compile(Constraint.regex("ab"))
    eos = engine.tokenizer.eos_id
    forced = constraint.forced([], 9)
    assert forced[-1] == eos
    assert engine.tokenizer.decode(forced) == "ab"
    assert constraint.forced(forced, 9) == []
    constraint.accept([*forced, 7])
    assert np.flatnonzero(np.unpackbits(constraint.mask([]), bitorder="little")).tolist() == [eos]


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (Constraint.json_schema('{"type":'), ["JSON schema", "line 1"]),
        (Constraint.json_schema("[1]"), ["JSON schema", "object"]),
        (Constraint.json_schema(False), ["JSON schema", "true"]),
        (Constraint.json_schema({"type": "banana"}), ["JSON schema", "banana"]),
        (Constraint.json_schema({"type": "array", "uniqueItems": True}), ["JSON schema", "uniqueItems"]),
        (Constraint.json_schema({"not": {"type": "null"}}), ["JSON schema", "not"]),
        (Constraint.json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}), ["oneOf"]),
        (Constraint.json_schema({"$ref": "https://example.com/s"}), ["https://example.com/s"]),
        (Constraint.json_schema({"type": "integer", "minimum": 5, "maximum": 4}), ["minimum", "5", "4"]),
        (Constraint.json_schema({"$ref": "#"}), ["no token", "first"]),
        (Constraint.json_schema('{"a":' * 5000 + "1" + "}" * 5000), ["JSON schema"]),
        (Constraint.regex("a("), ["regex", "unclosed group"]),
        (Constraint.regex("(?=a)b"), ["regex", "look-around"]),
        (Constraint.regex(r"[^\s\S]"), ["regex", "no token"]),
        (Constraint.regex("a" * (MAX_BYTES + 1)), ["regex", MAX_BYTES]),
        (Constraint.grammar("root ::= ("), ["grammar", "line 1"]),
        (Constraint.grammar(""), ["grammar"]),
        (Constraint.grammar("start: nothing"), ["grammar", "nothing"]),
        (Constraint.grammar("root ::= " + "(" * 5000 + '"a"' + ")" * 5000), ["grammar"]),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_is_refused(engine: Engine, constraint: Constraint, words: list[Any]) -> None:
    with refused(UsageError, *words):
        engine.generate("def", SamplingParams(4, constraint=constraint))


def test_settings_that_contradict_a_constraint() -> None:
    with refused(UsageError, "ignore_eos", "constraint"):
        SamplingParams(constraint=Constraint.json_object(), ignore_eos=True)
    with refused(UsageError, "constraint"):
        SamplingParams(constraint="json")  # type: ignore[arg-type]
    with refused(UsageError, "constraint", "xml"):
        Constraint("xml")  # type: ignore[arg-type]


def chain(most: int) -> str:
    return "\n".join(["start: r0", *(f"r{i}:r{i + 1}" for i in range(most)), f'r{most}: "a"'])


HOSTILE = {
    "chain of rules": Constraint.grammar(chain(18_000)),
    "ambiguous": Constraint.grammar('start: e\ne: e e | e e e | "a" | \n'),
    "repetitions": Constraint.regex("((((a{1,100}){1,100}){1,100}){1,100}){1,100}"),
    "many states": Constraint.regex("[ab]*a[ab]{28}"),
    "alternatives": Constraint.regex("|".join(f"w{i}" for i in range(20_000))),
    "references": Constraint.json_schema(
        {"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(6000)} | {"a6000": {}}, "$ref": "#/$defs/a0"}
    ),
    "unions": Constraint.json_schema(
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(5)]} for i in range(9)]}
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_end(compiler: ConstraintCompiler, name: str) -> None:
    """With a text or an error, in bounded time, and without overflowing a stack."""
    began, generator = time.thread_time(), np.random.default_rng(0)
    message = ""
    try:
        constraint = compiler.compile(HOSTILE[name])
        for _ in range(40):
            mask = np.unpackbits(constraint.mask([]), bitorder="little")
            if not mask.any():
                raise constraint.dead_end([])
            constraint.accept([int(generator.choice(np.flatnonzero(mask)))])
    except (ConstraintError, UsageError) as exc:
        message = str(exc)
    assert len(message.splitlines()) <= 1
    assert len(message) < 1000
    assert time.thread_time() - began < 10


class Compiled:
    """The library's matcher; notes when it is made, and may be watched."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


@pytest.fixture
def matchers(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Compiled]]:
    """All matchers that are compiled from here on."""
    made, matcher = list[weakref.ref[Compiled]](), grammar_library._with_deep_stack

    def noted(*args: Any) -> Compiled:
        compiled = Compiled(matcher(*args))
        made.append(weakref.ref(compiled))
        return compiled

    monkeypatch.setattr(grammar_library, "_with_deep_stack", noted)
    return made


@pytest.mark.parametrize("text", [r"[^\s\S]", "a("])
def test_of_a_refused_constraint_the_message_alone_is_kept(
    engine: Engine, matchers: list[weakref.ref[Compiled]], text: str
) -> None:
    compiler = ConstraintCompiler(engine.tokenizer, engine.target.config.vocab_size)
    messages = list[str]()
    for _ in range(3):
        with pytest.raises(UsageError) as caught:
            compiler.compile(Constraint.regex(text))
        messages.append(str(caught.value))
        del caught
    gc.collect()
    assert len(set(messages)) == 1
    assert len(matchers) == 1, "it is compiled once"
    assert [ref() for ref in matchers] == [None]


def test_compiled_constraints_are_kept_up_to_a_number_of_bytes(
    engine: Engine, matchers: list[weakref.ref[Compiled]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = itertools.count(0, 100)
    monkeypatch.setattr(grammar, "_resident_bytes", lambda: next(sizes))
    monkeypatch.setattr(grammar, "MOST_COMPILED_BYTES", 250)
    compiler = ConstraintCompiler(engine.tokenizer, engine.target.config.vocab_size)
    for number in range(4):
        compiler.compile(Constraint.regex(f"a{number}"))
    gc.collect()
    assert [ref() is not None for ref in matchers] == [False, False, True, True]


def test_a_constraint_in_use_is_not_compiled_again(engine: Engine, matchers: list[weakref.ref[Compiled]]) -> None:
    compiler = ConstraintCompiler(engine.tokenizer, engine.target.config.vocab_size)
    used = compiler.compile(Constraint.regex("a"))
    for number in range(grammar.MOST_COMPILED + 1):
        compiler.compile(Constraint.regex(f"b{number}"))
    before = len(matchers)
    again = compiler.compile(Constraint.regex("a"))
    assert len(matchers) == before
    np.testing.assert_array_equal(used.mask([]), again.mask([]))


def test_every_slow_step_counts(compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the many that take little: they may be thousands in a tree. A further call of a tool has no new budget."""
    clock = itertools.count(0.0, 0.02)
    monkeypatch.setattr("time.thread_time", lambda: next(clock))
    constraint = compiler.compile(Constraint.regex("[ab]{4000}"))
    (token,) = compiler._tokenizer.encode("a", add_special_tokens=False)
    with refused(ConstraintError, "complex"):
        for _ in range(2000):
            if not constraint.mask([]).any():
                raise constraint.dead_end([])
            constraint.accept([token])
