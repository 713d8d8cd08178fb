"""What a CUDA card makes of offspec, in one go of under ten minutes on a machine with nothing but PyTorch.

    python -m benchmarks.card /tmp/card [--minutes 9] [--device cuda:0]
    python -m benchmarks.card /tmp/card --device cpu --shape tiny  # the same code without a card: only that it runs

The card and its link are measured; the built-in target is grown on the spot (benchmarks/grow.py) to 70B in NF4 and 7B
in bf16, with the built-in draft grown to 1B beside it; the memory that torch may take is cut to what cards of 24, 16
and 12 GB leave; passes, drafts and texts are timed, and what is computed is compared with the CPU. docs/card.md says
what each figure means.

Layers to which the small model has nothing to say share one file, but each is held and moved on its own. The work comes
in parts, most telling first; each writes lines of `results.jsonl` as its figures come. The same command leaves out what
is there, so that a run that was cut goes on; what there is no time left for is told. `card.json` has it all.
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
    parser.add_argument("folder", type=Path, help="for grown models (10 GB for 70b and 7b) and results")
    parser.add_argument("--shape", choices=JOBS, action="append", help="only this one; may be repeated (70b, then 7b)")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--ram", help="for weights, e.g. 100GiB; without it what is free now")
    parser.add_argument("--minutes", type=float, default=9.0, help="no part is begun after these")
    args = parser.parse_args(arguments)
    try:
        device, ram = choose_device(args.device, []), args.ram and parse_size(args.ram)
    except UsageError as exc:
        sys.exit(f"Error: {exc}; --device cpu --shape tiny runs the same code")
    args.folder.mkdir(parents=True, exist_ok=True)
    # A part that hangs says where, and ends.
    faulthandler.dump_traceback_later(60 * args.minutes + 50, exit=True, file=sys.__stderr__)
    try:
        print(tell(run(Bench(args.folder, device, ram), args.shape or ["70b", "7b"], args.minutes)))
    finally:
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
