"""Constraints that begin within an answer: found at any cut of the text into tokens, idle before, as plain decoding."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from offspec import Constraint, Engine, SamplingParams, SpeculationParams
from offspec.errors import ConstraintError
from offspec.scheduler.constraint import TokenConstraint, allows
from offspec.scheduler.params import Trigger
from offspec.text.grammar import ConstraintCompiler
from offspec.text.tokenizer import Tokenizer
from offspec.text.tool_calls import PYTHON, Call, ToolFormat

from ...pair import Pair, build_pair
from ...refusals import refused
from ...vocabularies import backends, write

SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "clock": {"type": "object", "properties": {}, "additionalProperties": False},
}
FORMS = {
    "hermes": ToolFormat("hermes", "<tool_call>"),
    "mistral": ToolFormat("mistral", "[TOOL_CALLS] "),
    "llama": ToolFormat("llama"),
    "llama, marked": ToolFormat("llama", python_id=1),
}
NUMBERED = Constraint(  # after each "(" a number, and ")"
    "grammar",
    'start: first /[0-9]{1,3}/ ")" rest\nfirst[lazy]: /(.|\\n)*\\(/\nrest: /(.|\\n)*/\n',
    Trigger(("(",), repeats=True),
)


@pytest.fixture(scope="module", params=list(backends()))
def tokenizer(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    backend = backends()[request.param]
    added = {backend.get_vocab_size(): {"content": PYTHON, "special": True}}
    return Tokenizer.load(write(tmp_path_factory.mktemp("vocabulary"), backend, added_tokens_decoder=added))


def form_of(name: str, tokenizer: Tokenizer) -> ToolFormat:
    form = FORMS[name]
    return form if form.python_id is None else replace(form, python_id=tokenizer.token_id(PYTHON))


def late(form: ToolFormat, tokenizer: Tokenizer, **settings: Any) -> TokenConstraint:
    wanted = form.late_constraint(SCHEMAS, **({"allows_several": True, "yields": False} | settings))
    return ConstraintCompiler(tokenizer, tokenizer.vocab_size).compile(wanted)


def random_call(constraint: TokenConstraint, tokenizer: Tokenizer, generator: Any, path: list[int]) -> list[int]:
    """Continue `path` at random by what the constraint allows, until everything or only the end may follow."""
    final = tokenizer.eos_ids
    while (mask := constraint.mask(path)) is not None and len(path) < 300:
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[: tokenizer.vocab_size]).tolist()
        assert allowed, tokenizer.decode(path, skip_special_tokens=False)
        if final.issuperset(allowed):
            break
        path = [*path, int(generator.choice([token for token in allowed if token not in final]))]
    return path


def beginnings(form: ToolFormat, tokenizer: Tokenizer, generator: Any) -> list[list[int]]:
    """Texts that begin a call, each in several cuts into tokens."""
    before = [] if form.style == "llama" else tokenizer.encode("We return ", add_special_tokens=False)
    if form.python_id is not None:
        return [[form.python_id]]
    text = {"hermes": "the <tool_call>", "mistral": "[TOOL_CALLS]", "llama": ' { "name" :'}[form.style]
    known = {content: token for token, content in (tokenizer.token_bytes or {}).items()}
    found = [tokenizer.encode(text, add_special_tokens=False)]
    for _ in range(3):
        data, ids = text.encode(), list[int]()
        while data:
            sizes = [size for size in range(1, len(data) + 1) if data[:size] in known]
            size = int(generator.choice(sizes))
            ids, data = [*ids, known[data[:size]]], data[size:]
        found.append(ids)
    return [[*before, *ids] for ids in found]


@pytest.mark.parametrize("name", list(FORMS))
def test_a_call_obeys_however_its_marker_is_cut_into_tokens(tokenizer: Tokenizer, name: str) -> None:
    generator, form = np.random.default_rng(0), form_of(name, tokenizer)
    for begun in beginnings(form, tokenizer, generator):
        constraint = late(form, tokenizer)
        assert all(constraint.mask(begun[:size]) is None for size in range(len(begun)))
        path = random_call(constraint, tokenizer, generator, begun)
        text = tokenizer.decode(path, skip_special_tokens=False)
        inside = text[text.index("{") : text.rindex("}") + 1]
        calls = form.reader(list(SCHEMAS)).push("[" * (form.style == "mistral") + inside, is_end=True)
        calls = calls if form.style == "llama" else ToolFormat("llama").reader(list(SCHEMAS)).push(inside, is_end=True)
        assert calls
        for call in calls:
            assert isinstance(call, Call), text
            arguments = json.loads(call.arguments)
            assert set(arguments) == set(SCHEMAS[call.name]["properties"])
            assert arguments.get("city", "Rome") in ("Rome", "Oslo")
        is_free = constraint.mask(path) is None
        assert is_free == (form.style == "hermes"), "text may follow a tag, and nothing else a list"
        ends = late(form, tokenizer, allows_several=False)
        assert ends.mask(random_call(ends, tokenizer, generator, begun)) is not None


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama"])
def test_masks_depend_on_the_tokens_alone(tokenizer: Tokenizer, name: str) -> None:
    """Not on what was asked before, nor on where the path begins: several calls, and text between them."""
    generator, form = np.random.default_rng(1), form_of(name, tokenizer)
    used = late(form, tokenizer)
    begun = beginnings(form, tokenizer, generator)[0]
    path = random_call(used, tokenizer, generator, begun)
    if form.style == "hermes":
        path = random_call(used, tokenizer, generator, [*path, *begun])
        assert used.mask([*path, 7]) is None
    for end in generator.permutation(len(path) + 1).tolist()[:40]:
        fresh, cut = late(form, tokenizer), int(generator.integers(end + 1))
        for at in sorted(generator.integers(0, cut + 1, 3).tolist()):
            fresh.accept(path[:at][len(done) :] if (done := path[:0]) else [])
        fresh.accept(path[:cut])
        masks = fresh.mask(path[cut:end]), used.mask(path[:end])
        assert (masks[0] is None) == (masks[1] is None)
        assert masks[0] is None or (masks[0] == masks[1]).all()
        forced = used.forced(path[:end], 9)
        assert fresh.forced(path[cut:end], 9) == forced
        for at, token in enumerate(forced):
            mask = used.mask([*path[:end], *forced[:at]])
            assert mask is not None
            assert np.unpackbits(mask).sum() == 1
            assert allows(mask, token)


def test_idle_before_a_marker_may_begin_and_never_after_one_that_cannot_come(tokenizer: Tokenizer) -> None:
    def is_idle(constraint: TokenConstraint, text: str) -> bool:
        return constraint.is_idle(np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int64))

    tagged, alone = late(FORMS["hermes"], tokenizer), late(FORMS["llama"], tokenizer)
    assert is_idle(tagged, "We return to it, and")
    assert not is_idle(tagged, "a < b")
    tagged.accept(tokenizer.encode("a <", add_special_tokens=False))
    assert not is_idle(tagged, "b")
    tagged.accept(tokenizer.encode("b", add_special_tokens=False))
    assert is_idle(tagged, "We")
    assert not is_idle(alone, "We")
    alone.accept(tokenizer.encode("We", add_special_tokens=False))
    assert is_idle(alone, '{"name":')
    assert alone.mask(tokenizer.encode('{"name":', add_special_tokens=False)) is None


def test_a_constraint_may_yield_at_a_dead_end(tokenizer: Tokenizer) -> None:
    text = 'start: first "a" DEAD\nDEAD: /[^\\s\\S]/\nfirst[lazy]: /(.|\\n)*\\(/\n'
    compiler = ConstraintCompiler(tokenizer, tokenizer.vocab_size)
    begun = tokenizer.encode("(", add_special_tokens=False)
    for yields in (False, True):
        constraint = compiler.compile(Constraint("grammar", text, Trigger(("(",), yields=yields)))
        path = [*begun, *tokenizer.encode("a", add_special_tokens=False)[-1:]]
        masks = constraint.mask(begun), constraint.mask(path)
        assert any(mask is not None and not mask.any() for mask in masks) != yields
        if yields:
            assert constraint.mask([*path, 7, 8]) is None
        else:
            with refused(ConstraintError, "grammar", "no token"):
                raise constraint.dead_end(path)


# ------------------------------------------------------------------------------------------------ answers


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module", params=["model", "lookup", "none"])
def engine(pair: Pair, request: Any) -> Iterator[Engine]:
    draft = str(pair.draft) if request.param == "model" else request.param
    with Engine.load(pair.target, draft=draft, device="cpu") as engine:
        yield engine


def likely(engine: Engine, text: str) -> tuple[tuple[int, float], ...]:
    """Biases that make a text of one token likely."""
    return ((engine.encode(text)[0], 9.0),)


@pytest.mark.parametrize("seed", range(3))
def test_a_text_is_that_of_plain_decoding(engine: Engine, seed: int) -> None:
    settings: dict[str, Any] = {"temperature": 1.0, "seed": seed, "constraint": NUMBERED}
    params = SamplingParams(60, **settings, logit_bias=likely(engine, "("))
    budgets: Sequence[SpeculationParams] = [
        SpeculationParams(budget=0),
        SpeculationParams(budget=12),
        SpeculationParams(budget=12, forced=False, reuse=False),
        SpeculationParams(),
    ]
    texts = {engine.complete("def", params, speculation) for speculation in budgets}
    (text,) = texts
    assert text.count("(") > 2
    cut = text.rindex("(")  # the budget of tokens may cut the last one
    assert re.fullmatch(r"([^(]|\([0-9]{1,3}\))*", text[:cut]), text
    free = engine.complete("def", SamplingParams(60, temperature=1.0, seed=seed))
    silent = SamplingParams(60, temperature=1.0, seed=seed, constraint=Constraint(*_never()))
    assert engine.complete("def", silent) == free, "nothing changes where the marker does not come"


def _never() -> tuple[Any, str, Trigger]:
    return "grammar", 'start: first "x"\nfirst[lazy]: /(.|\\n)*never!/\n', Trigger(("never!",))
