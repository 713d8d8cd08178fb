"""Tokens per pass of JSON under schemas, with forced tokens and without, by turns; and the CPU time of masks per pass.

    python -m benchmarks.constraints [--model builtin] [--drafts none,lookup,auto] [--budget 32] [--temperatures 0,0.7]

Tokens per pass do not depend on the machine's speed. Masks are timed by this thread's CPU time, forced tokens included.
The last column is the CPU time, in ms per pass, of tools that the answer could call and does not: a constraint that
waits for its marker. Every text is compared with plain decoding's. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

from offspec import Constraint, Engine, SamplingParams, SpeculationParams
from offspec.text.grammar_constraint import GrammarConstraint
from offspec.text.late_constraint import LateConstraint
from offspec.text.tool_calls import ToolFormat

SMALL = {"type": "integer", "minimum": 0, "maximum": 999}
PERSON = {
    "name": {"type": "string", "maxLength": 12},
    "age": SMALL,
    "email_verified": {"type": "boolean"},
    "favourite_colour": {"enum": ["red", "green", "blue"]},
    "address": {
        "city": {"type": "string", "maxLength": 12},
        "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
    },
}
CALL = {
    "function": {"const": "get_current_weather"},
    "arguments": {"location": {"type": "string", "maxLength": 16}, "unit": {"enum": ["celsius", "fahrenheit"]}},
}
REVIEW = {
    "sentiment": {"enum": ["positive", "neutral", "negative"]},
    "confidence_percent": SMALL,
    "contains_personal_data": {"type": "boolean"},
    "summary": {"type": "string", "maxLength": 40},
}
PROMPTS = ("def example():\n    return ", "config = ", '"""An example of JSON."""\n')


class Clock:
    """Adds up the CPU time of a class's methods."""

    def __init__(self, kind: Any, *names: str) -> None:
        self.seconds = 0.0
        self._kind, self._methods = kind, {name: getattr(kind, name) for name in names}
        for name, method in self._methods.items():
            setattr(kind, name, self._timed(method))

    def stop(self) -> None:
        for name, method in self._methods.items():
            setattr(self._kind, name, method)

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - began

        return timed


def schema_of(properties: dict[str, Any]) -> dict[str, Any]:
    """An object with these properties and no others; a dict without "type", "enum" or "const" is an object again."""
    found = {
        name: value if value.keys() & {"type", "enum", "const"} else schema_of(value)
        for name, value in properties.items()
    }
    return {"type": "object", "properties": found, "required": list(found), "additionalProperties": False}


def texts(engine: Engine, temperature: float, speculation: SpeculationParams) -> tuple[list[list[int]], int]:
    """The token ids of every prompt under every schema, and the number of passes."""
    found, num_passes = list[list[int]](), 0
    for seed, prompt in enumerate(PROMPTS):
        for properties in (PERSON, CALL, REVIEW):
            constraint = Constraint.json_schema(schema_of(properties))
            params = SamplingParams(160, temperature=temperature, seed=seed, constraint=constraint)
            steps = list(engine.generate(prompt, params, speculation))
            found.append([token for step in steps for token in step.token_ids])
            num_passes += steps[-1].stats.num_passes
    return found, num_passes


def waiting_ms(engine: Engine, temperature: float, speculation: SpeculationParams) -> float:
    """CPU time per pass of a constraint on calls of tools, in answers that call none."""
    tools = {name: schema_of(properties) for name, properties in (("person", PERSON), ("review", REVIEW))}
    form = ToolFormat("hermes", "<tool_call>")
    constraint = form.late_constraint(tools, allows_several=True, yields=False)
    clock, num_passes = Clock(LateConstraint, "mask", "forced", "accept", "is_idle", "barred"), 0
    for seed, prompt in enumerate(PROMPTS):
        params = SamplingParams(80, temperature=temperature, seed=seed, constraint=constraint)
        *_, last = engine.generate(prompt, params, speculation)
        num_passes += last.stats.num_passes
    clock.stop()
    return 1e3 * clock.seconds / num_passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--drafts", default="none,lookup,auto")
    parser.add_argument("--budget", type=int, default=32)
    parser.add_argument("--temperatures", default="0,0.7")
    asked = parser.parse_args()
    clock, rows = Clock(GrammarConstraint, "mask", "forced", "accept"), list[dict[str, Any]]()
    head = f"{'draft':<8} {'temperature':>11} {'without':>8} {'forced':>8} {'factor':>7}"
    print(f"{head} {'masks, ms per pass':>19} {'waiting':>8}")
    for draft in asked.drafts.split(","):
        with Engine.load(asked.model, draft=draft, dtype="fp32") as engine:
            for temperature in map(float, asked.temperatures.split(",")):
                wanted, num_tokens = texts(engine, temperature, SpeculationParams(budget=0))
                row: dict[str, Any] = {"draft": draft, "temperature": temperature, "num_tokens": num_tokens}
                for name, forced in (("without", False), ("forced", True)):
                    clock.seconds = 0.0
                    fresh = engine.with_draft(engine.draft)  # neither learns from the other's texts
                    found, num_passes = texts(fresh, temperature, SpeculationParams(asked.budget, forced=forced))
                    assert found == wanted, "the text is not plain decoding's"
                    row |= {name: num_tokens / num_passes, f"{name}_mask_ms": 1e3 * clock.seconds / num_passes}
                row["factor"] = row["forced"] / row["without"]
                row["waiting_ms"] = waiting_ms(engine, temperature, SpeculationParams(asked.budget))
                print(
                    f"{draft:<8} {temperature:>11g} {row['without']:>8.2f} {row['forced']:>8.2f} {row['factor']:>7.2f}"
                    f" {row['forced_mask_ms']:>19.2f} {row['waiting_ms']:>8.2f}"
                )
                rows.append(row)
    print(json.dumps({"model": asked.model, "budget": asked.budget, "rows": rows}))


if __name__ == "__main__":
    main()
