"""One part of a call, in a process of its own: `python -m benchmarks.card.one_part --out FOLDER … NAME FUNCTION …`.

Its figures are appended to `results.jsonl` as they grow. The process that starts it (`runner.py`) has a watchdog.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from .results import Figures, Line, append

if TYPE_CHECKING:
    from .bench import Bench

Measure = Callable[[], Iterator[Figures]]
# Function → its module here, imported in this process only. Each yields its growing figures.
MEASURES = {
    "machine": "bench",
    "grow": "bench",
    "exact": "exact",
    "vocabulary": "kernels",
    "attention": "kernels",
    "draft_rounds": "kernels",
    "small_copies": "link",
    "copies_back": "link",
    "shifted_copies": "link",
    "passes": "passes",
    "halved_link": "passes",
    "baseline": "passes",
    "disk": "disk",
    "same_text": "same_text",
    "packed_bf16": "packed",
    "shadow_rounds": "shadows",
    "shadow_texts": "shadows",
    "accelerate": "accelerate",
    "mixture": "mixture",
}
WITHOUT_TORCH = {"tests": "gpu_tests", "sanitizer": "gpu_tests"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.card.one_part", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--models", type=Path, required=True, help="folder for grown models")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--ram", help="RAM for weights, e.g. 100GiB [the free RAM]")
    parser.add_argument("--limit-s", type=float, default=600.0, help="print a traceback after this time, and end")
    parser.add_argument("name", help="of the part, in the results")
    parser.add_argument("words", nargs="+", help="function and its arguments")
    args = parser.parse_args(arguments)
    faulthandler.dump_traceback_later(args.limit_s, exit=True, file=sys.__stderr__)
    try:
        write_figures(args.out, args.name, args.device, lambda: measure_of(args)())
    finally:
        faulthandler.cancel_dump_traceback_later()


def measure_of(args: argparse.Namespace) -> Measure:
    function, *words = args.words
    if function in WITHOUT_TORCH:
        measure = getattr(import_module(f".{WITHOUT_TORCH[function]}", __package__), function)
        return partial(measure, *words)
    measure = getattr(import_module(f".{MEASURES[function]}", __package__), function)
    return partial(measure, make_bench(args), *words)


def make_bench(args: argparse.Namespace) -> Bench:
    from offspec.checkpoints.opening import choose_device
    from offspec.loaders.units import parse_size

    from .bench import Bench

    ram = parse_size(args.ram) if args.ram else None
    return Bench(args.models, choose_device(args.device, []), ram, args.out)


def write_figures(out: Path, name: str, device: str, measure: Measure) -> None:
    """Append a line when the part begins, one each time its figures have grown, and one when it has ended."""
    began_s = time.monotonic()
    line: Line = {"part": name, "device": device, "is_done": False, "figures": {}, "seconds": 0.0}
    begun = {"begun": True, "error": "it was begun, and its process was ended"}
    append(out, line | begun)
    try:
        for figures in measure():
            line |= {"figures": json.loads(json.dumps(figures)), "seconds": time.monotonic() - began_s}
            append(out, line | begun)
    except Exception as exc:  # noqa: BLE001 - written among the results, where it is read
        traceback.print_exc()
        line["error"] = (str(exc).splitlines() or [type(exc).__name__])[0]
    append(out, line | {"is_done": "error" not in line, "seconds": time.monotonic() - began_s})


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # libraries' threads and the driver may hang at the end, when the figures are written
