"""Creates the table, the JSON summary and the chart from stored cells."""

from __future__ import annotations

import json
import math
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from offspec import format_quantity, format_size

from .catalog import LEFT_OUT, OURS, ROWS
from .cells import Cell
from .chart import chart


@dataclass(frozen=True)
class Line:
    """A row of the table over its prompts.

    tokens_per_s: all decoded tokens over all seconds of decoding; worst and best are single prompts. first_token_s: the
    median. read_bytes: bytes read from disk per generated token.
    """

    row: str
    says: str
    num_prompts: int
    num_tokens: int
    tokens_per_s: float
    worst_tokens_per_s: float
    best_tokens_per_s: float
    times_slower: float | None  # than offspec on the same prompts; for steady rows, on all prompts
    tokens_per_pass: float
    first_token_s: float
    worst_first_token_s: float
    load_s: float
    peak_bytes: int
    peak_anonymous_bytes: int
    read_bytes: float
    text: str
    version: str
    failures: list[str]


def lines(found: Sequence[Cell]) -> list[Line]:
    """One line per row with at least one successful cell; the newest cell of each key counts."""
    newest = {cell.key: cell for cell in found}
    by_row: dict[str, list[Cell]] = {}
    for cell in newest.values():
        by_row.setdefault(cell.row, []).append(cell)
    ours = [cell for cell in by_row.get(OURS, []) if cell.status == "ok"]
    order = {row.name: number for number, row in enumerate(ROWS)}
    return [_line(by_row[name], ours) for name in sorted(by_row, key=lambda name: order.get(name, len(order)))]


def _line(some: list[Cell], ours: list[Cell]) -> Line:
    good = [cell for cell in some if cell.status == "ok"]
    known = next((row for row in ROWS if row.name == some[0].row), None)
    failures = sorted({f"{cell.status}: {cell.error}" for cell in some if cell.status != "ok"})
    rates = [_rate([cell]) for cell in good] or [math.nan]
    firsts = [cell.first_token_s for cell in good] or [math.nan]
    rate = _rate(good)
    prompts = {cell.prompt for cell in good}
    beside = [cell for cell in ours if cell.prompt in prompts or (prompts and known is not None and known.is_steady)]
    num_tokens = sum(len(cell.token_ids) for cell in good)
    return Line(
        row=some[0].row,
        says="" if known is None else known.says,
        num_prompts=len(good),
        num_tokens=some[0].num_tokens,
        tokens_per_s=rate,
        worst_tokens_per_s=min(rates),
        best_tokens_per_s=max(rates),
        times_slower=_rate(beside) / rate if beside else None,
        tokens_per_pass=num_tokens / max(1, sum(cell.num_passes for cell in good)),
        first_token_s=statistics.median(firsts),
        worst_first_token_s=max(firsts),
        load_s=statistics.median([cell.load_s for cell in good] or [math.nan]),
        peak_bytes=max((cell.peak_bytes for cell in some), default=0),
        peak_anonymous_bytes=max((cell.peak_anonymous_bytes for cell in some), default=0),
        read_bytes=sum(cell.read_bytes for cell in good) / max(1, num_tokens),
        text=_text(good),
        version=good[0].version if good else "",
        failures=failures,
    )


def _rate(some: Sequence[Cell]) -> float:
    tokens, seconds = (sum(part) for part in zip(*(cell.decode for cell in some), strict=True)) if some else (0, 0)
    return tokens / seconds if seconds else math.nan


def _text(good: Sequence[Cell]) -> str:
    judged = [cell.judgement for cell in good if cell.judgement is not None]
    if not judged:
        return "-"
    wrong = [j for j in judged if not j.is_exact]
    if wrong:
        return f"differs in {len(wrong)} of {len(judged)} (by {max(j.worst_gap for j in wrong):.2g})"
    ties = sum(j.num_ties for j in judged)
    return "equal" if not ties else f"equal but {ties} near-ties"


def line(cell: Cell) -> str:
    """A cell as a progress line."""
    if cell.status != "ok":
        return f"{cell.row}: {cell.status}: {cell.error}"
    judged = cell.judgement
    text = (
        ""
        if judged is None
        else f", {judged.num_equal} of {judged.num_tokens} tokens equal (gap {judged.worst_gap:.2g})"
    )
    return (
        f"{cell.row}: {_rate([cell]):.3g} tokens/s, first after {cell.first_token_s:.2f} s, "
        f"{len(cell.token_ids) / cell.num_passes:.2f} tokens per pass, peak {format_size(cell.peak_bytes)}{text}"
    )


# ------------------------------------------------------------------------------------------------ table, JSON, chart


def publish(found: Sequence[Cell], results: Path, title: str) -> None:
    """Print the table; write it, JSON and a chart beside the results. title: what the chart calls the model."""
    if not found:
        sys.exit("Error: no results yet")
    all_lines = lines(found)
    said = terms(found)
    table = markdown(all_lines, said)
    summary = {"machine": machine(), "terms": said, "rows": [asdict(one) for one in all_lines]}
    results.with_suffix(".json").write_text(json.dumps(summary, indent=1))
    results.with_suffix(".md").write_text(table)
    where = f"{title}, {format_size(found[-1].ram)} of RAM, {found[-1].threads} CPU cores, SSD"
    results.with_suffix(".svg").write_text(chart(bars(all_lines), where), encoding="utf-8")
    print(table)
    print(f"{results.with_suffix('.json')}, .md, .svg")


def bars(all_lines: Sequence[Line]) -> list[tuple[str, float]]:
    """(row, tokens/s) of each program: plain, and its fastest row with a draft of those with the most prompts."""
    fastest: dict[tuple[str, bool], Line] = {}
    for one in all_lines:
        row = next((row for row in ROWS if row.name == one.row), None)
        if row is not None and one.num_prompts:
            kind = (row.peer, row.is_steady)
            fastest[kind] = max(one, fastest.get(kind, one), key=lambda line: (line.num_prompts, line.tokens_per_s))
    ordered = sorted(fastest.values(), key=lambda line: (line.row != OURS, -line.tokens_per_s))
    return [(line.row, line.tokens_per_s) for line in ordered]


def machine() -> dict[str, Any]:
    models = [text.split(":")[1].strip() for text in _cpuinfo() if text.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": psutil.cpu_count(logical=True),
        "ram_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _cpuinfo() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def terms(found: Sequence[Cell]) -> dict[str, Any]:
    last = found[-1]
    return {
        "shape": last.shape,
        "ram_bytes": last.ram,
        "threads": last.threads,
        "memory_is_limited": all(cell.is_limited for cell in found if cell.status == "ok"),
        "raw_disk_bytes_per_s": sorted({cell.raw_disk_bytes_per_s for cell in found}),
        "load_average": max(cell.load_average for cell in found),
        "from": min(cell.date for cell in found),
        "to": max(cell.date for cell in found),
    }


def conditions(said: dict[str, Any]) -> str:
    """The conditions of the cells, in one line."""
    raw = said["raw_disk_bytes_per_s"]
    limit = "in a memory control group" if said["memory_is_limited"] else "NOT limited (no control group)"
    return (
        f"{said['shape']}, {format_size(said['ram_bytes'])} of RAM {limit}, {said['threads']} threads, raw disk "
        f"{format_quantity(raw[0], 'B/s')} to {format_quantity(raw[-1], 'B/s')}, load average up to "
        f"{said['load_average']:.1f}, {said['from']} to {said['to']}"
    )


def markdown(all_lines: Sequence[Line], said: dict[str, Any]) -> str:
    head = (
        "| | prompts x tokens | tokens/s (worst, best prompt) | times slower than offspec | tokens per pass "
        "| first token s (worst) | peak memory (without page cache) | read per token | text |\n"
        "|---|---|---|---|---|---|---|---|---|\n"
    )
    body = "".join(_markdown(one) for one in all_lines if one.num_prompts)
    failed = "".join(f"\n- {one.row}: {'; '.join(one.failures)}" for one in all_lines if one.failures)
    left_out = "".join(f"\n- {name}: {why}" for name, why in LEFT_OUT.items())
    settings = "".join(f"\n- {one.row} ({one.version}): {one.says}" for one in all_lines if one.num_prompts)
    parts = [head + body, conditions(said), f"Settings:\n{settings}"]
    parts += [f"Failed:\n{failed}"] if failed else []
    parts += [f"Not compared:\n{left_out}"] if left_out else []
    return "\n".join(part + "\n" for part in parts)


def _markdown(one: Line) -> str:
    slower = "" if one.times_slower is None or one.row == OURS else f"{one.times_slower:.3g}"
    return (
        f"| {one.row} | {one.num_prompts} x {one.num_tokens} | {one.tokens_per_s:.3g} "
        f"({one.worst_tokens_per_s:.3g}, {one.best_tokens_per_s:.3g}) | {slower} | {one.tokens_per_pass:.2f} "
        f"| {one.first_token_s:.1f} ({one.worst_first_token_s:.1f}) | {format_size(one.peak_bytes)} "
        f"({format_size(one.peak_anonymous_bytes)}) | {one.read_bytes / 1e9:.2f} GB | {one.text} |\n"
    )


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
