"""Measures offspec on a CUDA card, in one run of less than ten minutes on a machine with only PyTorch.

    python -m benchmarks.card /tmp/card [--minutes 9] [--device cuda:0]
    python -m benchmarks.card /tmp/card --device cpu --shape tiny  # the same code without a card, only as a test

The run measures the card and its link. It grows the built-in target (benchmarks/grow.py) to 70B in NF4 and 7B in bf16,
and the built-in draft to 1B. It limits torch's memory to that of cards with 24, 16 and 12 GB, measures passes, drafts
and texts, and compares results with the CPU. docs/card.md explains each figure.

Layers without a counterpart in the small model share one file, but each is held and moved separately. The run consists
of parts, the most important first; each appends lines to `results.jsonl`. The same command skips finished parts, so
that an interrupted run can be resumed, and reports the parts without enough time. `card.json` contains all results.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
from collections.abc import Sequence
from pathlib import Path

from offspec.checkpoints.opening import choose_device
from offspec.errors import UsageError
from offspec.loaders.units import parse_size

from .bench import Bench
from .jobs import JOBS
from .parts import run
from .report import tell


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.card", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder for grown models (10 GB for 70b and 7b) and results")
    parser.add_argument("--shape", choices=JOBS, action="append", help="shape to run; may be repeated [70b, then 7b]")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--ram", help="RAM for weights, e.g. 100GiB [the free RAM]")
    parser.add_argument("--minutes", type=float, default=9.0, help="start no part after this time")
    args = parser.parse_args(arguments)
    try:
        device, ram = choose_device(args.device, []), args.ram and parse_size(args.ram)
    except UsageError as exc:
        sys.exit(f"Error: {exc}; --device cpu --shape tiny runs the same code")
    args.folder.mkdir(parents=True, exist_ok=True)
    # A part that hangs prints a traceback and ends.
    faulthandler.dump_traceback_later(60 * args.minutes + 50, exit=True, file=sys.__stderr__)
    try:
        print(tell(run(Bench(args.folder, device, ram), args.shape or ["70b", "7b"], args.minutes)))
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
