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
from offspec.scheduler.params import Trigger
from offspec.scheduler.trees.constraint import TokenConstraint, allows
from offspec.text.grammar import ConstraintCompiler
from offspec.text.thinking import CLOSE, OPEN
from offspec.text.tokenizer import Tokenizer
from offspec.text.tool_calls import PYTHON, ToolCall, ToolFormat

from ...pair import Pair
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
    for _ in range(2):
        data, ids = text.encode(), list[int]()
        while data:
            sizes = [size for size in range(1, len(data) + 1) if data[:size] in known]
            size = int(generator.choice(sizes))
            ids, data = [*ids, known[data[:size]]], data[size:]
        found.append(ids)
    return [[*before, *ids] for ids in found]


@pytest.mark.each_value
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
            assert isinstance(call, ToolCall), text
            arguments = json.loads(call.arguments)
            assert set(arguments) == set(SCHEMAS[call.name]["properties"])
            assert arguments.get("city", "Rome") in ("Rome", "Oslo")
        is_free = constraint.mask(path) is None
        assert is_free == (form.style == "hermes"), "text may follow a tag, and nothing else a list"
        ends = late(form, tokenizer, allows_several=False)
        assert ends.mask(random_call(ends, tokenizer, generator, begun)) is not None


@pytest.mark.each_value
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
    for end in generator.permutation(len(path) + 1).tolist()[:8]:
        fresh, cut = late(form, tokenizer), int(generator.integers(end + 1))
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
        path = [*begun, *tokenizer.encode_after("\n", "a")]
        masks = constraint.mask(begun), constraint.mask(path)
        assert any(mask is not None and not mask.any() for mask in masks) != yields
        if yields:
            assert constraint.mask([*path, 7, 8]) is None
        else:
            with refused(ConstraintError, "grammar", "no token"):
                raise constraint.dead_end(path)


# ------------------------------------------------------------------------------------------------ thinking

TEMPLATE, OBJECT = "{{ messages }}<think></think>", Constraint.json_schema({"enum": [[1, 2], {"a": "b"}]})
THINKING = replace(OBJECT, thinks=True)


@pytest.fixture(scope="module", params=[*backends(), "code, added", "words, special"])
def thinker(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer of a model that thinks. Its tags are texts, added tokens, or special ones."""
    name, _, kind = request.param.partition(", ")
    backend, settings = backends()[name], dict[str, Any]()
    if kind:
        first, is_special = backend.get_vocab_size(), kind == "special"
        tags = {first + i: {"content": tag, "special": is_special} for i, tag in enumerate((OPEN, CLOSE))}
        settings = {"added_tokens_decoder": tags}
    folder = tmp_path_factory.mktemp("thinker")
    return Tokenizer.load(write(folder, backend, chat_template=TEMPLATE, **settings))


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text, as if it did not begin one: sentencepiece puts a space before."""
    return tokenizer.encode_after("\n", text)


def thinking(tokenizer: Tokenizer, prompt: str, constraint: Constraint = THINKING) -> TokenConstraint:
    compiler = ConstraintCompiler(tokenizer, tokenizer.vocab_size)
    return compiler.compile(constraint, tokenizer.encode(prompt, add_special_tokens=False))


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        ("return <think>\n", "the area </thin </think>"),
        ("return <think>", "the </think>\n\n"),
        ("return", "<think>\n{it}</think>\n"),
        ("return", ""),
        ("return <think>\n\n</think>\n\n", ""),
    ],
)
def test_an_answer_obeys_after_its_thinking(thinker: Tokenizer, prompt: str, before: str) -> None:
    generator, constraint = np.random.default_rng(0), thinking(thinker, prompt)
    plain = ConstraintCompiler(thinker, thinker.vocab_size).compile(OBJECT)
    begun = ids(thinker, before) if before else []
    for size in range(len(begun)):
        assert allows(constraint.mask(begun[:size]), begun[size]), thinker.decode(begun[: size + 1])
    path = random_call(constraint, thinker, generator, begun)
    if constraint.mask(path) is None:  # it chose to think
        path = random_call(constraint, thinker, generator, begun := [*path, *ids(thinker, "so </think>")])
    said = thinker.decode(path).removeprefix(thinker.decode(begun)).strip()
    assert json.loads(said) in ([1, 2], {"a": "b"})
    constraint.accept(path[: len(begun) if before else 0])
    if before:
        assert not constraint.is_idle(np.array([], dtype=np.int64))
    elif prompt.endswith("</think>\n\n"):
        assert (constraint.mask([]) == plain.mask([])).all()  # type: ignore[union-attr]
    else:
        assert allows(constraint.mask([]), ids(thinker, "<think>")[0])
        assert not allows(constraint.mask([]), ids(thinker, "return")[0])


def test_an_answer_does_not_end_within_its_thinking(thinker: Tokenizer) -> None:
    constraint = thinking(thinker, "return <think>")
    path = ids(thinker, "the area")
    assert constraint.mask(path) is None
    assert set(constraint.barred(path)) == thinker.eos_ids
    path += ids(thinker, "</think>")
    assert constraint.mask(path) is not None
    assert not constraint.barred(path)


def test_what_does_not_fit_behind_the_end_of_thinking_is_excluded(thinker: Tokenizer) -> None:
    """Where a token may hold the end of the tag and more."""
    constraint, known = thinking(thinker, "return <think>"), thinker.token_bytes or {}
    for token, content in known.items():
        begun = ids(thinker, "the </think")
        if content.startswith(b">") and thinker.decode(begun).endswith("</think"):
            fits = content.decode(errors="replace")[1:] in ("", "\n", "\n\n", "[", "{", '{"')
            assert allows(constraint.mask(begun), token) == fits, content


@pytest.mark.each_value
@pytest.mark.parametrize("prompt", ["return <think>\n", "return", "return <think></think>"])
def test_calls_are_looked_for_after_thinking(thinker: Tokenizer, prompt: str) -> None:
    late_calls = FORMS["hermes"].late_constraint(SCHEMAS, allows_several=True, yields=True)
    constraint = thinking(thinker, prompt, replace(late_calls, thinks=True))
    call = ids(thinker, "<tool_call>")
    begins = prompt.endswith("return") * "<think>" + "so </think>\n" * (not prompt.endswith("</think>"))
    inside = ids(thinker, begins.partition("</think>")[0] + "<tool_call>")
    if begins:
        assert constraint.mask(inside) is None
        assert constraint.mask([*ids(thinker, begins), *call]) is not None
    else:
        assert constraint.mask([*ids(thinker, "so "), *call]) is not None
    if prompt == "return":
        assert constraint.mask([*ids(thinker, "so "), *call]) is not None


# ------------------------------------------------------------------------------------------------ answers


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Iterator[Engine]:
    with Engine.load(pair.target, draft=str(pair.draft), device="cpu") as engine:
        yield engine


def likely(engine: Engine, text: str) -> tuple[tuple[int, float], ...]:
    """Biases that make a text of one token likely."""
    return ((engine.encode(text)[0], 9.0),)


@pytest.mark.slow
def test_a_text_is_that_of_plain_decoding(engine: Engine) -> None:
    settings: dict[str, Any] = {"temperature": 1.0, "seed": 0, "constraint": NUMBERED}
    params = SamplingParams(30, **settings, logit_bias=likely(engine, "("))
    budgets: Sequence[SpeculationParams] = [
        SpeculationParams(budget=0),
        SpeculationParams(budget=12),
        SpeculationParams(budget=12, forced=False, reuse=False),
    ]
    texts = {engine.complete("def", params, speculation) for speculation in budgets}
    (text,) = texts
    assert text.count("(") > 2
    cut = text.rindex("(")  # the budget of tokens may cut the last one
    assert re.fullmatch(r"([^(]|\([0-9]{1,3}\))*", text[:cut]), text
    free = engine.complete("def", SamplingParams(12, temperature=1.0, seed=0))
    never = Constraint("grammar", 'start: first "x"\nfirst[lazy]: /(.|\\n)*never!/\n', Trigger(("never!",)))
    silent = SamplingParams(12, temperature=1.0, seed=0, constraint=never)
    assert engine.complete("def", silent) == free, "nothing changes where the marker does not come"
