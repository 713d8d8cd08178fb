"""Predicted tokens/s of targets that do not fit a card: with a small draft, with shadows, with lookup, without.

    python -m benchmarks.drafts.card_model [--gpu rtx4090] [--cases 32b,7b,70b] [--context 2048]

Everything follows from shapes (config.json) and the card's data sheet; nothing is measured. Each row has tokens/s,
greedy and at temperature 1, for three kinds of rounds:

    unpacked   a packed matrix is unpacked into memory, then multiplied; kernels are launched one by one
    as built   a kernel multiplies with packed weights, and reads them at half of the memory's rate; captured graphs
    hidden     as if passes hid all drafting: the limit

Small drafts appear twice: with the tokens per pass of the built-in pair, and with those of a 1.5B draft of a 7B model
in SubSpec (2509.18344: 11.9, taken for both temperatures; a shadow of 4 bits has 28.4 there). The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from offspec.checkpoints.opening import ModelFiles
from offspec.drafts.base import DraftOptions, OpenRequest
from offspec.drafts.weighing import Scales, usual_names
from offspec.errors import MemoryLimitError
from offspec.loaders.machine.gpus import KnownGpu, find_gpu
from offspec.loaders.machine.hardware import Rates
from offspec.loaders.streaming.placement import Limits
from offspec.loaders.units import GIB
from offspec.planning.draft_forecast import Acceptance, Drafting, Guessing, predict_drafting
from offspec.planning.memory import MemoryOptions
from offspec.planning.plan import SPARE, Plan, make_plan

QWEN = {"model_type": "qwen2", "torch_dtype": "bfloat16", "max_position_embeddings": 32768, "vocab_size": 152064}
LLAMA = {"model_type": "llama", "torch_dtype": "bfloat16", "max_position_embeddings": 131072, "vocab_size": 128256}
NAMES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
SHAPES: dict[str, dict[str, Any]] = {
    "32b": QWEN | dict(zip(NAMES, (5120, 27648, 40, 8, 64), strict=True)),
    "7b": QWEN | dict(zip(NAMES, (3584, 18944, 28, 4, 28), strict=True)),
    "1.5b": QWEN | dict(zip(NAMES, (1536, 8960, 12, 2, 28), strict=True)) | {"tie_word_embeddings": True},
    "0.5b": QWEN | dict(zip(NAMES, (896, 4864, 14, 2, 24), strict=True)) | {"tie_word_embeddings": True},
    "70b": LLAMA | dict(zip(NAMES, (8192, 28672, 64, 8, 80), strict=True)),
    "1b": LLAMA | dict(zip(NAMES, (2048, 8192, 32, 8, 16), strict=True)) | {"tie_word_embeddings": True},
}
SUBSPEC_SMALL = Acceptance({256: 11.9}, {256: 11.9}, "SubSpec, 2509.18344")


@dataclass(frozen=True)
class Case:
    """A target on a card. vram: bytes, None is all of the card."""

    target: str
    form: str | None
    drafts: tuple[str, ...]
    vram: int | None
    ram: int


CASES = {
    "32b": Case("32b", None, ("0.5b", "1.5b"), None, 128 * GIB),
    "7b": Case("7b", None, ("0.5b", "1.5b"), 8 * GIB, 64 * GIB),
    "70b": Case("70b", "nf4", ("1b",), None, 64 * GIB),
}


@dataclass(frozen=True)
class Row:
    """One draft of one case. rates: kind of rounds → tokens/s, greedy and at temperature 1. greedy: as built."""

    case: str
    draft: str
    resident: int
    greedy: Drafting
    rates: dict[str, tuple[float, float]]

    def __str__(self) -> str:
        cells = [f"{greedy:.1f} / {sampled:.1f}" for greedy, sampled in self.rates.values()]
        g = self.greedy
        seconds = (f"{g.pass_s:.2f}", f"{1e3 * g.round_s:.0f}" if g.round_s else "")
        return f"| {' | '.join((self.draft, str(self.resident), *seconds, f'{g.tokens_per_pass:.1f}', *cells))} |"


class Model:
    """Plans and predictions of one case on one card."""

    def __init__(self, case: Case, gpu: KnownGpu, folder: Path, context: int) -> None:
        self.case, self.gpu, self.rates = case, gpu, gpu.rates()
        for name in (case.target, *case.drafts):
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "config.json").write_text(json.dumps(SHAPES[name]))
        self.target = ModelFiles.from_config(folder / case.target, case.form, "auto", "cuda", [])
        free = int(gpu.gpu().free_bytes * (1 - SPARE))
        limits, options = Limits(free if case.vram is None else case.vram, case.ram), MemoryOptions(context=context)
        request = OpenRequest(DraftOptions(), self.target, None, "auto", "cuda", [])
        self.scales = Scales(
            case.target, request, lambda draft: make_plan(self.target, [draft], limits, options, GIB // 2)
        )
        self.names = {str(folder / name): name for name in case.drafts}

    def rows(self) -> Iterator[Row | str]:
        """The drafts that fit; of the others, the reason."""
        plain = self.scales.first_plan(["none"])
        for name in (*self.names, *usual_names(plain)):
            opened = self.scales.open(name, [])
            try:
                plan = self.scales.plan_with(opened)
            except MemoryLimitError as exc:
                yield f"{name}: {str(exc).partition(' (')[0]}"
                continue
            guessing, said = opened.guessing(plan.placement), self.names.get(name, name)
            is_small = name in self.names
            yield self._row(said, plan, guessing, is_small=is_small)
            if is_small:
                subspec = replace(guessing, acceptance=SUBSPEC_SMALL, share=1.0)
                yield self._row(f"{said}, as SubSpec's", plan, subspec, is_small=True)

    def _row(self, name: str, plan: Plan, guessing: Guessing, *, is_small: bool = False) -> Row:
        def built(model: ModelFiles) -> Rates:
            return self.rates

        def unpacked(model: ModelFiles) -> Rates:
            return replace(self.rates, packed_bytes_per_s=None)

        eager = guessing if is_small else replace(guessing, is_captured=False)
        ways = {
            "unpacked": (eager, unpacked),
            "as built": (guessing, built),
            "hidden": (replace(guessing, layers=()), built),
        }
        found = {
            way: tuple(predict_drafting(plan, *how, greedy=greedy) for greedy in (True, False))
            for way, how in ways.items()
        }
        rates = {way: (greedy.tokens_per_s, sampled.tokens_per_s) for way, (greedy, sampled) in found.items()}
        return Row(self.case.target, name, len(plan.placement.resident), found["as built"][0], rates)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="rtx4090")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--context", type=int, default=2048)
    args = parser.parse_args(arguments)
    gpu, found = find_gpu(args.gpu), list[Row]()
    for name in args.cases.split(","):
        case = CASES[name]
        card = gpu.name if case.vram is None else f"{case.vram // GIB} GiB of an {gpu.name}"
        print(f"\n{case.target}, {case.form or 'bf16'}, {card}, {case.ram // GIB} GiB of RAM; greedy / temperature 1\n")
        print("| draft | resident layers | pass s | round ms | tokens per pass | unpacked | as built | hidden |")
        print("|---|---|---|---|---|---|---|---|")
        refused = list[str]()
        with tempfile.TemporaryDirectory() as folder:
            for row in Model(case, gpu, Path(folder), args.context).rows():
                if isinstance(row, str):
                    refused.append(row)
                else:
                    found.append(row)
                    print(row)
        print("\n".join(["", *refused]))
    print(json.dumps([asdict(row) for row in found]))


if __name__ == "__main__":
    main()
