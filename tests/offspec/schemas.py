"""Two hundred JSON schemas of the kinds that programs ask for, and a check of answers under each of them.

    python -m tests.offspec.schemas [--model builtin] [--draft auto] [--every 1]

decodes each plainly and with trees, at three temperatures. Every text must equal the plain one, and every answer that
ends must be valid by the `jsonschema` library. The last line is JSON; any failure is exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import jsonschema

from offspec import Constraint, Engine, OffspecError, SamplingParams, SpeculationParams, Step

Schema = Any
TEMPERATURES = (0.0, 0.7, 1.2)
PLAIN = SpeculationParams(budget=0)
SPECULATIVE = (SpeculationParams(budget=24), SpeculationParams(), SpeculationParams(budget=24, forced=False))
MAX_NEW_TOKENS = 64


def an_object(required: int | None = None, **properties: Schema) -> Schema:
    """An object without other properties; the first `required` ones (None: all) must be there."""
    names = list(properties)[:required]
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def array(items: Schema, most: int = 3, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def scalars() -> dict[str, Schema]:
    """Values without parts."""
    found: dict[str, Schema] = {
        "null": {"type": "null"},
        "boolean": {"type": "boolean"},
        "string": {"type": "string", "maxLength": 12},
        "long string": {"type": "string", "minLength": 5, "maxLength": 30},
        "empty string": {"type": "string", "maxLength": 0},
        "enum of strings": {"enum": ["red", "green", "blue"]},
        "enum of prefixes": {"enum": ["a", "ab", "abc", "abcd"]},
        "enum of kinds": {"enum": ["x", 1, 2.5, True, None]},
        "enum of unicode": {"type": "string", "enum": ["Zürich", "Genève", "東京", "🙂"]},
        "enum with quotes": {"enum": ['say "hi"', "back\\slash", "new\nline", "tab\t"]},
        "const": {"const": "the only answer there is"},
        "const number": {"const": -12.5},
        "const object": {"const": {"a": [1, {"b": None}]}},
        "integer": {"type": "integer", "minimum": -1000, "maximum": 1000},
        "positive": {"type": "integer", "minimum": 1, "maximum": 7},
        "exclusive": {"type": "integer", "exclusiveMinimum": 9, "exclusiveMaximum": 100},
        "share": {"type": "number", "minimum": 0, "maximum": 1},
        "below zero": {"type": "number", "exclusiveMaximum": 0, "minimum": -50},
        "even": {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 90},
        "any number": {"type": "number"},
        "two types": {"type": ["integer", "null"], "minimum": 0, "maximum": 20},
    }
    patterns = (
        "^[a-z]{2,5}$",
        "^[A-Z][a-z]{1,6}$",
        "^(yes|no|maybe)$",
        "^#[0-9a-f]{6}$",
        "^[0-9]{3}-[0-9]{4}$",
        "^a+b*$",
    )
    found |= {f"pattern {pattern}": {"type": "string", "pattern": pattern, "maxLength": 12} for pattern in patterns}
    formats = ("date", "time", "date-time", "email", "uuid", "ipv4")
    found |= {f"format {name}": {"type": "string", "format": name} for name in formats}
    return found


def unions() -> dict[str, Schema]:
    """Choices between schemas."""
    cat, dog = (an_object(kind={"const": kind}, age={"type": "integer", "minimum": 0, "maximum": 30}) for kind in "cd")
    short = {"type": "string", "maxLength": 8}
    return {
        "string or number": {"anyOf": [short, {"type": "integer", "minimum": 0, "maximum": 99}]},
        "objects by kind": {"anyOf": [cat, dog]},
        "one of kinds": {"oneOf": [cat, dog]},
        "one of types": {"oneOf": [{"type": "boolean"}, {"type": "null"}, short]},
        "nullable object": {"anyOf": [cat, {"type": "null"}]},
        "all of": {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 8}]},
        "nested union": {"anyOf": [array({"anyOf": [short, {"type": "null"}]}), cat]},
        "referenced union": {
            "$defs": {"cat": cat, "dog": dog},
            "anyOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        },
    }


def recursive() -> dict[str, Schema]:
    """Schemas that contain themselves."""
    node = an_object(1, value={"type": "integer", "minimum": 0, "maximum": 9}, next={"$ref": "#/$defs/node"})
    tree = an_object(name={"enum": ["leaf", "branch"]}, parts=array({"$ref": "#/$defs/tree"}, 2))
    sums = {
        "anyOf": [{"enum": [1, 2]}, {"type": "array", "prefixItems": [{"$ref": "#/$defs/sum"}] * 2, "items": False}]
    }
    return {
        "list of nodes": {"$defs": {"node": node}, "$ref": "#/$defs/node"},
        "tree": {"$defs": {"tree": tree}, "$ref": "#/$defs/tree"},
        "sum": {"$defs": {"sum": sums}, "$ref": "#/$defs/sum"},
        "nested arrays": {"type": "array", "maxItems": 2, "items": {"$ref": "#"}},
    }


def schemas() -> dict[str, Schema]:
    """Name → schema: scalars, unions and recursive ones, alone and within arrays and objects."""
    inner = {**scalars(), **unions()}
    found = {**inner, **recursive()}
    for name, schema in inner.items():
        if "$defs" in schema:
            continue
        found[f"array of {name}"] = array(schema, least=1)
        found[f"object with {name}"] = an_object(id={"type": "integer", "minimum": 1, "maximum": 999}, value=schema)
        found[f"optional {name}"] = an_object(1, kind={"enum": ["a", "b"]}, value=schema, note={"type": "null"})
        found[f"deep {name}"] = an_object(outer=an_object(middle=array(an_object(inner=schema), 2, 1)))
    found |= records()
    return found


def records() -> dict[str, Schema]:
    """Larger objects, and other ways to write objects and arrays."""
    text, count = {"type": "string", "maxLength": 10}, {"type": "integer", "minimum": 0, "maximum": 500}
    address = an_object(street=text, city=text, zip={"type": "string", "pattern": "^[0-9]{5}$"})
    return {
        "person": an_object(2, name=text, age=count, email={"type": "string", "format": "email"}, address=address),
        "order": an_object(id=count, lines=array(an_object(sku=text, quantity=count, gift={"type": "boolean"}), 2, 1)),
        "points": array({"type": "array", "prefixItems": [count, count], "items": False, "minItems": 2}, 3),
        "map of numbers": {"type": "object", "additionalProperties": count, "maxProperties": 3, "minProperties": 1},
        "names by pattern": {
            "type": "object",
            "patternProperties": {"^x_[a-z]{1,4}$": count},
            "additionalProperties": False,
        },
        "all optional": an_object(0, a=count, b=text, c={"type": "boolean"}, d={"type": "null"}),
        "unusual names": an_object(**{"a b": count, 'q"uote': text, "ünïcode": count, "": {"type": "null"}}),
        "described": {
            "title": "T",
            "description": "D",
            "$comment": "C",
            **an_object(a={"default": 1, "examples": [2], **count}),
        },
        "many properties": an_object(**{f"field_{number}": {"type": "boolean"} for number in range(20)}),
        "any object": {"type": "object"},
        "anything": True,
    }


# ------------------------------------------------------------------------------------------------ checks


def answer(engine: Engine, schema: Schema, temperature: float, speculation: SpeculationParams) -> list[Step]:
    params = SamplingParams(MAX_NEW_TOKENS, temperature=temperature, seed=7, constraint=Constraint.json_schema(schema))
    return list(engine.generate("def example():\n    return ", params, speculation))


def failures(
    engine: Engine, name: str, schema: Schema, temperature: float, speculations: Iterable[SpeculationParams]
) -> Iterator[str]:
    """What is wrong with the answers at one temperature: other texts than plain decoding's, and invalid JSON."""
    plain = answer(engine, schema, temperature, PLAIN)
    wanted = [token for step in plain for token in step.token_ids]
    text = "".join(step.text for step in plain)
    where = f"{name}, temperature {temperature:g}"
    if plain[-1].finish_reason == "eos":
        try:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError) as exc:
            yield f"{where}: {text!r} is invalid: {str(exc).splitlines()[0]}"
    for speculation in speculations:
        found = [token for step in answer(engine, schema, temperature, speculation) for token in step.token_ids]
        if found != wanted:
            yield f"{where}: budget {speculation.budget}, forced {speculation.forced}: {found} is not {wanted}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--every", type=int, default=1, help="check every N-th schema")
    asked = parser.parse_args()
    found, wrong = list(schemas().items())[:: asked.every], list[str]()
    with Engine.load(asked.model, draft=asked.draft, dtype="fp32") as engine:
        for (name, schema), temperature in product(found, TEMPERATURES):
            try:
                wrong += failures(engine, name, schema, temperature, SPECULATIVE)
            except OffspecError as exc:
                wrong.append(f"{name}: {exc}")
    for line in wrong:
        print(line, file=sys.stderr)
    print(json.dumps({"num_schemas": len(found), "num_failures": len(wrong)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
