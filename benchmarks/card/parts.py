"""A run: parts in order of importance, each once, with figures written to disk as they arrive."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from offspec.loaders.cuda import release_memory

from .bench import Bench, machine
from .exact import exact
from .jobs import JOBS, Figures
from .kernels import attention, draft_rounds, vocabulary
from .link import small_copies
from .models import say
from .packed import packed_bf16
from .passes import baseline, passes
from .report import tell
from .shadows import shadow_rounds, shadow_texts

LEAST_S = 45.0  # least time left to start a part; it also needs the time of a similar part


def parts_of(bench: Bench, names: Sequence[str]) -> dict[str, Callable[[], Iterator[Figures]]]:
    """All parts in order of importance, by name; each yields its growing figures."""
    parts = {
        "machine": partial(machine, bench),
        "small copies": partial(small_copies, bench),
        "exact": partial(exact, bench),
    }
    parts[f"draft {names[0]}"] = partial(draft_rounds, bench, names[0])
    parts[f"vocabulary {names[0]}"] = partial(vocabulary, bench, names[0])
    parts[f"shadow {names[-1]}"] = partial(shadow_rounds, bench, names[-1])
    parts[f"shadow texts {names[-1]}"] = partial(shadow_texts, bench, names[-1])
    rounds = zip_longest(*([(name, cap) for cap in JOBS[name].caps] for name in names))
    for i, (name, cap) in enumerate(one for each in rounds for one in each if one is not None):
        where = f"{name} half" if cap is None else f"{name} {cap}GB"
        parts[where] = partial(passes, bench, name, cap)
        if i == 0:
            parts[f"{where} as SpecExec"] = partial(baseline, bench, name, cap)
    parts[f"packed bf16 {names[0]}"] = partial(packed_bf16, bench, names[0])
    parts[f"attention {names[0]}"] = partial(attention, bench, names[0])
    return parts


def run(bench: Bench, names: Sequence[str], minutes: float) -> dict[str, Any]:
    """Run the missing parts while time is left; returns all results by name."""
    began, file = time.monotonic(), bench.folder / "results.jsonl"
    about = f"{bench.device} {'+'.join(names)}"
    results = {line["part"]: line for line in _lines(file) if line["about"] == about}
    parts = parts_of(bench, names)
    for part in sorted(
        parts, key=lambda part: "error" in results.get(part, {})
    ):  # a failed part may fail again, or end the process
        if results.get(part, {}).get("is_done"):
            continue
        left_s = 60 * minutes - (time.monotonic() - began)
        if left_s < max(
            LEAST_S, *(line["seconds"] for line in results.values() if _kind(line["part"]) == _kind(part)), 0
        ):
            say(f"{part}: no time left; the same command continues with it")
            continue
        say(f"{part} ({left_s:.0f} s left)")
        for line in _measured(part, parts[part]):
            with file.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"about": about, **line}) + "\n")
            results[part] = json.loads(json.dumps(line))  # as a resumed run would read it
            (bench.folder / "card.json").write_text(json.dumps(list(results.values()), indent=1), encoding="utf-8")
            (bench.folder / "card.txt").write_text(
                tell(results), encoding="utf-8"
            )  # written before the next part, which may hang
        with suppress(RuntimeError):  # if a part left the device in error, the next parts report it
            release_memory(bench.device)
    return results


def _kind(part: str) -> str:
    return part.split()[0]


def _measured(part: str, measure: Callable[[], Iterator[Figures]]) -> Iterator[dict[str, Any]]:
    """A part's growing figures, then the final ones, or its error."""
    began, line = time.monotonic(), dict[str, Any](part=part, is_done=False, figures={}, seconds=0.0)
    begun = {"error": "it was begun, and the process ended in it"}
    yield line | begun
    try:
        for figures in measure():
            line |= {"figures": figures, "seconds": time.monotonic() - began}
            yield line | begun
    except Exception as exc:  # noqa: BLE001 - a failed part must not stop the others
        traceback.print_exc()
        line["error"] = (str(exc).splitlines() or [type(exc).__name__])[0]
    yield line | {"is_done": "error" not in line, "seconds": time.monotonic() - began}


def _lines(file: Path) -> list[dict[str, Any]]:
    """The stored lines, without an incomplete last one; the next entry then starts on a new line."""
    content, whole = file.read_text(encoding="utf-8") if file.exists() else "", []
    for line in content.splitlines():
        with suppress(ValueError):
            whole.append(json.loads(line))
    if content and not content.endswith("\n"):
        file.write_text(content + "\n", encoding="utf-8")
    return whole
