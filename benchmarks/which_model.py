"""Which model for which card: predicted tokens/s of usual targets and their small drafts, as Markdown tables.

    python -m benchmarks.which_model [--gpus rtx3060,rtx4090] [--forms nf4,bf16]

Everything follows from shapes (config.json) and data sheets, as in `offspec plan --gpu CARD --ram SIZE`; nothing is
measured. A cell is tokens/s with the draft, then without, both greedy; in italics if layers are streamed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offspec import LoadOptions
from offspec.errors import MemoryLimitError
from offspec.loaders.machine.gpus import find_gpu
from offspec.loaders.units import GIB
from offspec.tools.forecast import Assumptions, make_forecast

QWEN = {"model_type": "qwen2", "torch_dtype": "bfloat16", "max_position_embeddings": 32768, "vocab_size": 152064}
LLAMA = {"model_type": "llama", "torch_dtype": "bfloat16", "max_position_embeddings": 131072, "vocab_size": 128256}
NAMES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
SHAPES: dict[str, dict[str, Any]] = {
    "32b": QWEN | dict(zip(NAMES, (5120, 27648, 40, 8, 64), strict=True)),
    "7b": QWEN | dict(zip(NAMES, (3584, 18944, 28, 4, 28), strict=True)),
    "0.5b": QWEN | dict(zip(NAMES, (896, 4864, 14, 2, 24), strict=True)) | {"tie_word_embeddings": True},
    "70b": LLAMA | dict(zip(NAMES, (8192, 28672, 64, 8, 80), strict=True)),
    "1b": LLAMA | dict(zip(NAMES, (2048, 8192, 32, 8, 16), strict=True)) | {"tie_word_embeddings": True},
}
TARGETS: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": SHAPES["7b"],
    "Llama-3.1-8B": LLAMA | dict(zip(NAMES, (4096, 14336, 32, 8, 32), strict=True)),
    "Qwen2.5-14B": QWEN | dict(zip(NAMES, (5120, 13824, 40, 8, 48), strict=True)),
    "Qwen2.5-32B": SHAPES["32b"],
    "Llama-3.1-70B": SHAPES["70b"],
}
DRAFTS = {name: "0.5b" if name.startswith("Qwen") else "1b" for name in TARGETS}
RAMS_GIB = {"nf4": (16, 32), "bf16": (128,)}
NONE, TOO_LARGE = "none", "-"


class Shapes:
    """Folders with a config.json each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name, config in (TARGETS | SHAPES).items():
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))

    def cell(self, target: str, gpu: str, ram: int, form: str) -> str:
        """Predicted tokens/s of a target on a card beside `ram` bytes of RAM."""
        draft = str(self._folder / DRAFTS[target])
        options = LoadOptions(str(self._folder / target), draft, ram=ram)
        assumptions = Assumptions(gpu, None if form == "bf16" else form)
        try:
            forecast = make_forecast(options, assumptions, drafts=(draft, NONE))
        except MemoryLimitError:
            return TOO_LARGE
        rates = {prospect.name: prospect.tokens_per_s for prospect in forecast.prospects}
        text = f"{_number(rates[draft])} / {_number(rates[NONE])}"
        return f"*{text}*" if forecast.plan.placement.streamed else text


def _number(rate: float) -> str:
    return f"{rate:.1f}" if rate < 10 else f"{rate:.0f}"


def table(shapes: Shapes, gpus: Sequence[str], form: str) -> list[str]:
    """Rows of cards and RAM, columns of targets; sizes of RAM that change nothing share a row."""
    lines = [f"| card | RAM | {' | '.join(TARGETS)} |", f"|---|---|{'---|' * len(TARGETS)}"]
    for gpu in gpus:
        rams: dict[tuple[str, ...], list[str]] = {}
        for ram in RAMS_GIB[form]:
            cells = tuple(shapes.cell(target, gpu, ram * GIB, form) for target in TARGETS)
            rams.setdefault(cells, []).append(f"{ram} GiB")
        lines += [f"| {' | '.join((find_gpu(gpu).name, ' or '.join(rams[cells]), *cells))} |" for cells in rams]
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="rtx3060,rtx4060ti-16,rtx4090,rtx5090")
    parser.add_argument("--forms", default=",".join(RAMS_GIB))
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        shapes = Shapes(Path(folder))
        for form in args.forms.split(","):
            print("\n".join(["", f"**{form}**", "", *table(shapes, args.gpus.split(","), form)]), flush=True)


if __name__ == "__main__":
    main()
