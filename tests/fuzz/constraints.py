"""Random schemas, regexes and grammars, valid, invalid or hostile: refused in one line, or followed, in time.

    python -m tests.fuzz.constraints [--count 500] [--seed 0]

follows each for 30 random tokens of the built-in vocabulary, and moves back and forth on the way.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from offspec import Constraint, builtin
from offspec.errors import ConstraintError, UsageError
from offspec.text.grammar import ConstraintCompiler
from offspec.text.tokenizer import Tokenizer
from offspec.text.tool_calls import ToolFormat

FORMS = (ToolFormat("hermes", "<tool_call>"), ToolFormat("mistral", "[TOOL_CALLS] "), ToolFormat("llama"))
MOST_S = 15.0  # of CPU time for one constraint
KEYWORDS: dict[str, Any] = {
    "type": ["string", "integer", "object", "array", "number", "null", "boolean", "banana", 5],
    "const": [1, "a", [{}]],
    "minimum": [0, -1e300, 5],
    "maximum": [10, -3, 1e18],
    "multipleOf": [0, 0.1, 3],
    "pattern": ["^a+$", "(", "[", "(?=x)"],
    "minItems": [0, 3, -1, 10**9],
    "maxItems": [2, 10**6],
    "minLength": [0, 5, 10**7],
    "maxLength": [3, -2, 10**9],
    "format": ["date", "uuid", "email", "nonsense"],
    "enum": [[], [1, "x", None], ["é" * 300]],
    "uniqueItems": [True],
    "$ref": ["#", "#/$defs/a", "#/nothing", "https://example.com/x"],
    "required": [["a"], ["missing"], "a", [1]],
    "additionalProperties": [False, True],
    "minProperties": [1, 10**6],
    "not": [{}],
    "default": [1],
}
NESTING = ("items", "additionalProperties", "contains")
LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")


def random_schema(rng: random.Random, depth: int = 0) -> Any:
    if rng.random() < 0.05:
        return rng.choice([True, False, None, [], "text", 7])
    schema: dict[str, Any] = {
        name: rng.choice(KEYWORDS[name]) for name in rng.sample(list(KEYWORDS), rng.randint(0, 3))
    }
    if depth < 4:
        for name in rng.sample(NESTING, rng.choice([0, 0, 1])):
            schema[name] = random_schema(rng, depth + 1)
        for name in rng.sample(LISTS, rng.choice([0, 0, 1])):
            schema[name] = [random_schema(rng, depth + 1) for _ in range(rng.choice([0, 1, 3, 8]))]
        for name in rng.sample(("properties", "$defs", "patternProperties"), rng.choice([0, 1, 1])):
            schema[name] = {
                rng.choice(["a", "b", "", '"', "x" * 99, "^a("]): random_schema(rng, depth + 1) for _ in range(3)
            }
    return schema


def random_regex(rng: random.Random, depth: int = 0) -> str:
    if depth > 5 or rng.random() < 0.3:
        return rng.choice(["a", "bc", "[a-z]", ".", r"\d", r"\p{L}", "é", "[^x]", "", "(", ")", r"\b", "^", "$", r"\1"])
    inner = random_regex(rng, depth + 1)
    kind = rng.choice(["*", "+", "?", "{3}", "{0,200}", "{50,}", "|", "join", "group", "{1000}"])
    if kind in ("|", "join"):
        return f"({inner}{'|' if kind == '|' else ''}{random_regex(rng, depth + 1)})"
    return f"(?:{inner})" if kind == "group" else f"({inner}){kind}"


def random_grammar(rng: random.Random) -> str:
    names, sign = [f"r{i}" for i in range(rng.choice([1, 3, 10, 200]))], rng.choice([":", ": ", " ::= "])
    start = "root" if "=" in sign else "start"

    def part() -> str:
        atom = rng.choice(
            [rng.choice(names), '"a"', '"bc"', "[a-z]", '"é"', f"({rng.choice(names)} | )", "(", '""', "nothing"]
        )
        return atom + rng.choice(["", "", "*", "+", "?", "{2,9}"])

    rules = [
        " | ".join(" ".join(part() for _ in range(rng.randint(0, 3))) for _ in range(rng.randint(1, 4))) for _ in names
    ]
    return "\n".join([f"{start}{sign}r0", *(f"{name}{sign}{rule}" for name, rule in zip(names, rules, strict=True))])


def random_constraint(rng: random.Random) -> Constraint:
    kind = rng.choice(["schema", "schema", "regex", "grammar", "noise"])
    if kind == "schema":
        return Constraint.json_schema(json.dumps(random_schema(rng)))
    if kind == "regex":
        return Constraint.regex(random_regex(rng))
    if kind == "grammar":
        return Constraint.grammar(random_grammar(rng))
    text = "".join(rng.choice('{}[]()"\\:;|*+?ar0é\n \x00\ud800') for _ in range(rng.choice([0, 5, 60])))
    return rng.choice([Constraint.json_schema, Constraint.regex, Constraint.grammar])(text)


def random_hostile(rng: random.Random) -> Constraint:
    """One that takes far more steps or memory than its text has bytes, if nothing limits it; of a random size."""
    size = int(10 ** rng.uniform(0.5, 4.2))
    depth, count = rng.randint(2, 6), rng.choice((3, 30, 300))
    deep: Any = {"type": "integer"}
    for _ in range(min(size, 900)):
        deep = {rng.choice(NESTING[:2]): deep}
    repeated = "a"
    for _ in range(depth):
        repeated = f"({repeated}{{1,{count}}})"
    kinds = {
        "chain": lambda: Constraint.grammar(
            "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(size)), f'r{size}: "a"'])
        ),
        "ambiguous": lambda: Constraint.grammar(f'start: e\ne: {" | ".join(["e e"] * depth)} | "a" |\n'),
        "repetitions": lambda: Constraint.regex(repeated),
        "states": lambda: Constraint.regex(f"[ab]*a[ab]{{{min(size, 60)}}}"),
        "alternatives": lambda: Constraint.regex("|".join(f"w{i}" for i in range(size))),
        "references": lambda: Constraint.json_schema(
            {"$defs": {f"a{i}": {"$ref": f"#/$defs/a{(i + 1) % (size + 1)}"} for i in range(size)} | {f"a{size}": {}},
             "$ref": "#/$defs/a0"}
        ),
        "depth": lambda: Constraint.json_schema(deep),
        "unions": lambda: Constraint.json_schema(
            {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(depth)]} for i in range(depth + 3)]}
        ),
        "values": lambda: Constraint.json_schema({"enum": [f"{i:x}" * 3 for i in range(size)]}),
        "names": lambda: Constraint.json_schema(
            {"properties": {f"n{i}": {"type": "integer"} for i in range(size)},
             "required": [f"n{i}" for i in range(size)]}
        ),
    }  # fmt: skip
    return kinds[rng.choice(list(kinds))]()


def random_calls(rng: random.Random) -> Constraint:
    """Calls of a function with a random schema, from the model's marker on."""
    form, schema = rng.choice(FORMS), random_schema(rng)
    schemas = {"f": schema if isinstance(schema, dict) else {}, "g": {"type": "object"}}
    return form.late_constraint(schemas, allows_several=rng.random() < 0.5, yields=rng.random() < 0.5)


def follow(
    compiler: ConstraintCompiler, constraint: Constraint, begun: list[int], generator: np.random.Generator
) -> str:
    """What became of it: `refused`, `dead end`, or `followed`. An AssertionError tells what is wrong.

    begun: the tokens that the text begins with.
    """
    try:
        found = compiler.compile(constraint)
        found.accept(begun)
        for _ in range(30):
            mask = found.mask([])
            allowed = np.arange(9, 300) if mask is None else np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            if not len(allowed):
                raise found.dead_end([])
            path = [int(generator.choice(allowed))]
            found.forced(path, 8)
            found.mask([*path, *found.forced(path, 3)])
            found.accept(path)
    except (UsageError, ConstraintError) as exc:
        message, ended = str(exc), "refused" if isinstance(exc, UsageError) else "dead end"
    else:
        message, ended = "", "followed"
    assert len(message.splitlines()) <= 1, message
    assert len(message) < 1000, message
    return ended


def maker(number: int) -> Callable[[random.Random], Constraint]:
    if number % 20 == 7:
        return random_hostile
    return random_calls if number % 5 == 4 else random_constraint


def fuzz(count: int, seed: int) -> dict[str, int]:
    """The number of constraints by what became of them. Raises AssertionError, which names the constraint."""
    tokenizer = Tokenizer.load(builtin.path("target"))
    compiler, counts = ConstraintCompiler(tokenizer, tokenizer.vocab_size), dict[str, int]()
    for number in range(seed, seed + count):
        constraint, began = maker(number)(random.Random(number)), time.thread_time()
        begun = tokenizer.encode(constraint.trigger.texts[0]) if constraint.trigger is not None else []
        try:
            ended = follow(compiler, constraint, begun, np.random.default_rng(number))
        except Exception as exc:
            raise AssertionError(f"constraint {number}, {constraint!r:.2000}: {exc!r}") from exc
        seconds = time.thread_time() - began
        assert seconds < MOST_S, f"constraint {number} took {seconds:.1f} s: {constraint!r:.2000}"
        counts[ended] = counts.get(ended, 0) + 1
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    print(json.dumps(fuzz(asked.count, asked.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
