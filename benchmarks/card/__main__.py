"""Measures offspec on a card of your own: `python -m benchmarks.card FOLDER`.

    python -m benchmarks.card /tmp/card                            # 70B in NF4, then 7B in bf16
    python -m benchmarks.card /tmp/card --device cpu --shape tiny  # the same code without a card, only as a test

The same command continues with the parts that are missing. For a lent card, use `scripts/card`.
docs/developing/card.md explains each figure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from offspec.checkpoints.opening import choose_device
from offspec.errors import UsageError

from .calls import CARD, TINY, Part, big, small, unique
from .report import tell
from .runner import Run

MODELS = "models"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.card", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder for grown models (25 GB for 70b and 7b) and results")
    parser.add_argument(
        "--shape", choices=("70b", "7b", "tiny"), action="append", help="may be repeated [70b, then 7b]"
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--ram", help="RAM for weights, e.g. 100GiB [the free RAM]")
    parser.add_argument("--minutes", type=float, default=30.0, help="end after this time")
    args = parser.parse_args(arguments)
    try:
        choose_device(args.device, [])
    except UsageError as exc:
        sys.exit(f"Error: {exc}; --device cpu --shape tiny runs the same code")
    run = Run(args.folder, args.folder / MODELS, args.device, args.minutes, args.ram)
    print(tell(run.run(parts_of(args.shape or ["70b", "7b"]))))


def parts_of(shapes: Sequence[str]) -> list[Part]:
    """The parts of the calls for these shapes, each once."""
    calls = {"70b": lambda: big(CARD), "7b": lambda: small(CARD), "tiny": lambda: [*big(TINY), *small(TINY)]}
    parts = [part for shape in shapes for part in calls[shape]()]
    return unique(parts)


if __name__ == "__main__":
    main()
