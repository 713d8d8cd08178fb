"""Loops of kernels, written with an `Emitter`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .compiler import Emitter


def counted(
    e: Emitter,
    name: str,
    first: str,
    last: str,
    step: int,
    body: Callable[..., Any],
    carried: Sequence[tuple[str, str]] = (),
) -> list[str]:
    """A loop over i64 first, first + step, ... below `last`, with labels that begin with `name`.

    carried: LLVM's type and first value of each value that a step takes over from the step before. body: emits a step,
    given its index, and with `carried` also the values, of which it returns the new ones. Returns the values after the
    loop.
    """
    e.do(f"br label %{name}_before")
    e.label(f"{name}_before")
    e.do(f"br label %{name}_head")
    e.label(f"{name}_head")
    e.do(f"%{name} = phi i64 [ {first}, %{name}_before ], [ %{name}_next, %{name}_end ]")
    values = [f"%{name}_value{i}" for i in range(len(carried))]
    for i, (kind, start) in enumerate(carried):
        e.do(f"{values[i]} = phi {kind} [ {start}, %{name}_before ], [ %{name}_new{i}, %{name}_end ]")
    e.do(f"br i1 {e.op(f'icmp slt i64 %{name}, {last}')}, label %{name}_body, label %{name}_done")
    e.label(f"{name}_body")
    new = body(f"%{name}", values) if carried else body(f"%{name}") or []
    e.do(f"br label %{name}_end")
    e.label(f"{name}_end")
    for i, (kind, _) in enumerate(carried):
        e.do(f"%{name}_new{i} = bitcast {kind} {new[i]} to {kind}")
    e.do(f"%{name}_next = add i64 %{name}, {step}")
    e.do(f"br label %{name}_head")
    e.label(f"{name}_done")
    return values


def taken(e: Emitter, counter: str, size: int | str, count: str, body: Callable[[str, str], Any]) -> None:
    """Parts first .. last of `count` numbers, `size` at a time, until the threads have taken all; then returns.

    counter: the address of the first number that is left, which threads count up. body: emits a part's work.
    """
    e.do("br label %take")
    e.label("take")
    first = e.op(f"atomicrmw add ptr {counter}, i64 {size} seq_cst")
    e.do(f"br i1 {e.op(f'icmp slt i64 {first}, {count}')}, label %part, label %none")
    e.label("part")
    body(first, e.least(e.i64("add", first, size), count))
    e.do("br label %take")
    e.label("none")
    e.do("ret void")
