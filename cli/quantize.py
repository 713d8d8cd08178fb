"""`offspec quantize`: converts a checkpoint to 4 bit, packed bf16 or plain floats, or only to a fast layout."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from offspec import CONVERT_FORMATS, LOSSLESS_FORMAT, SHADOW_FORMATS, ConvertParams, format_quantity
from offspec.errors import OffspecError
from offspec.user_files import expand_home

from .flag_declarations import OffspecCommand, option, with_flags
from .options import A_MODEL, MODEL, output_options
from .terminal import ProgressLine, TimeLeft

PLAIN_BITS = 16  # a weight

if TYPE_CHECKING:
    from offspec import Conversion


@click.command(
    cls=OffspecCommand,
    name="quantize",
    help=f"""Convert SRC into the checkpoint DST. SRC is {A_MODEL}.

nf4 and fp4 convert the matrices inside the layers to bitsandbytes' 4-bit format, as transformers saves it. Embeddings,
norms and lm_head keep 16 or 32 bits. bf16, fp16 and fp32 unpack packed matrices. keep changes no tensor, only the
layout. Every layer gets its own file, which is read in one piece.

With bf16-packed, bf16 matrices inside the layers take 12 bits a weight, and results keep every bit. The format bf16
restores the original tensors.

SRC may have any format that offspec runs: 16 or 32 bits, AWQ, GPTQ, GGUF, fp8, compressed-tensors. Conversion cannot
recover the precision that a quantised SRC has lost.

With --shadow BITS the result is a copy of the layers for --draft shadow. Without DST it goes to the user's cache.

The conversion needs memory for one layer. The same command resumes an interrupted run. Until the run is complete, DST
has no index and cannot be loaded.

\b
Examples:
  offspec quantize ./Llama-3.1-70B-Instruct ./Llama-3.1-70B-nf4
  offspec quantize ./Qwen2.5-32B-Instruct ./Qwen2.5-32B-q4_k_m --format q4_k_m
  offspec quantize meta-llama/Llama-3.1-8B ./Llama-3.1-8B-packed --format keep
  offspec quantize ./Qwen2.5-32B-Instruct ./Qwen2.5-32B-packed --format bf16-packed
  offspec quantize ./SmolLM2-135M-Instruct.Q4_1.gguf ./SmolLM2-135M --format bf16
  offspec quantize ./Qwen2.5-32B-Instruct --shadow 4
""",
)
@click.argument("src", type=MODEL)
@click.argument("dst", required=False, type=click.Path(path_type=Path))
@option(
    "--format",
    "form",
    type=click.Choice(CONVERT_FORMATS),
    default=ConvertParams.format,
    show_default=True,
    help="4-bit floats, llama.cpp's mixtures, bf16 in 12 bits without loss, plain floats, or unchanged tensors.",
)
@option(
    "--double-quant/--no-double-quant",
    default=ConvertParams.double_quant,
    show_default=True,
    help="Also quantise the scales: 4.13 bits per weight instead of 4.5.",
)
@option(
    "--imatrix",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="llama.cpp's importance matrix, for its mixtures.",
)
@option(
    "--shadow",
    type=click.Choice([str(bits) for bits in SHADOW_FORMATS]),
    metavar="4|3|2",
    help="Bits per weight of a shadow of SRC, for --draft shadow.",
)
@output_options("Print one JSON object instead of a sentence.", "", "Print no progress to stderr.", "Show tracebacks.")
def command(
    src: str,
    dst: Path | None,
    form: str,
    double_quant: bool,
    imatrix: Path | None,
    shadow: str | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    if shadow is not None and (form != ConvertParams.format or not double_quant or imatrix is not None):
        raise click.UsageError("--shadow has a format of its own; leave out --format, --no-double-quant and --imatrix.")
    start = time.monotonic()
    bar = ConversionLine(quiet=quiet)
    try:
        target = dst and expand_home(dst)
        if shadow is None:
            if target is None:
                raise click.UsageError("Missing argument 'DST': the folder for the result.")
            from offspec import convert

            file = None if imatrix is None else str(expand_home(imatrix))
            done = convert(src, target, ConvertParams(form, double_quant, file), progress=bar)
        else:
            from offspec.tools.quantizing import make_shadow

            done = make_shadow(src, int(shadow), target, progress=bar)
    finally:
        bar.show()
    if shadow is None:
        _warn_of_a_model_not_run(done.path)
    if form in ("nf4", "fp4") and done.result_bytes > done.source_bytes and not quiet:
        click.echo("offspec: the result is larger than the source, and its weights are rounded twice", err=True)
    if as_json:
        same = ("format", "num_files", "num_resumed", "source_bytes", "result_bytes")
        summary = {"source": src, "target": str(done.path), **{name: getattr(done, name) for name in same}}
        summary["bits_per_weight"] = {name: round(bits, 3) for name, bits in done.bits_per_weight.items()}
        click.echo(json.dumps(summary | {"seconds": round(time.monotonic() - start, 3)}))
    else:
        before, after = (format_quantity(nbytes, "B") for nbytes in (done.source_bytes, done.result_bytes))
        resumed = f", {done.num_resumed} of them from the earlier run" if done.num_resumed else ""
        click.echo(f"{done.path}: {before} → {after} in {done.num_files} files{resumed}, each verified after writing")
        for line in _ratios(done, each=verbose):
            click.echo(line)


def _ratios(done: Conversion, *, each: bool) -> list[str]:
    """The bits a weight of the matrices that were packed without loss, as their content allows; of each one if asked.

    Other formats have the same for all.
    """
    if done.format != LOSSLESS_FORMAT:
        return []
    packed = [bits for bits in done.bits_per_weight.values() if bits < PLAIN_BITS]
    lines = [f"  {bits:6.3f} bits  {name}" for name, bits in done.bits_per_weight.items()] if each else []
    ratios = (
        f"{min(packed):.2f} to {max(packed):.2f} bits a weight instead of {PLAIN_BITS}" if packed else "none smaller"
    )
    left = len(done.bits_per_weight) - len(packed)
    stayed = f"; {left} would not shrink and stayed as they were" if left else ""
    return [*lines, f"{len(packed)} matrices packed: {ratios}, the same bits when unpacked again (compared){stayed}"]


def _warn_of_a_model_not_run(folder: Path) -> None:
    """Print a note if offspec cannot run the result. That is not an error: transformers may run it."""
    from offspec.tools.quantizing import check_runs

    try:
        check_runs(folder)
    except OffspecError as exc:
        why = " ".join(with_flags(str(exc)).split())
        click.echo(f"offspec: the conversion is complete, but offspec cannot run this model: {why}", err=True)


class ConversionLine(ProgressLine):
    """The share converted and the time left."""

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(quiet=quiet)
        self._left, self._shown = TimeLeft(), 0.0

    def __call__(self, bytes_done: int, bytes_total: int) -> None:
        now = time.monotonic()
        left = self._left(now, bytes_done, bytes_total)
        if now - self._shown < 0.1:
            return
        self._shown = now
        percent, total = 100 * bytes_done // max(1, bytes_total), format_quantity(bytes_total, "B")
        self.show(f"{percent} % of {total}{left}")
