"""`offspec doctor`: this machine's hardware, its measured rates, and advice."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import click

from offspec import __version__, format_quantity, format_size

from .flag_declarations import OffspecCommand, option, with_flags
from .options import output_options
from .terminal import ProgressLine, columns

if TYPE_CHECKING:
    from offspec.tools.diagnosis import Diagnosis

Fact = tuple[str, str, str]  # label, value, source
MAX_COLUMNS, NARROW = 100, 50
FIRST_COMMAND = 'offspec run builtin "def area("'


@click.command(
    cls=OffspecCommand,
    name="doctor",
    help="""Show this machine's hardware and its measured rates with their sources, advice on what to improve, and
whether this machine is ready.

The measurement takes some seconds. It writes a temporary file if the folder contains no checkpoint to read.

\b
Examples:
  offspec doctor
  offspec doctor --path ./Llama-3.1-8B --json
""",
)
@option(
    "--device",
    default="auto",
    metavar="auto|cpu|cuda[:N]",
    help="Device that computes. [default: auto, the first CUDA device or the CPU]",
)
@option(
    "--path",
    type=click.Path(exists=True, path_type=Path),
    help="Folder of models, or a large file, on the disk to measure. [default: the hub's cache]",
)
@option("--quick", is_flag=True, help="Skip the measurement; show only what the system reports.")
@output_options("Print one JSON object instead of the table.", "", "Print no progress to stderr.", "Show tracebacks.")
def command(device: str, path: Path | None, quick: bool, as_json: bool, quiet: bool, verbose: bool) -> None:
    from offspec.tools.diagnosis import diagnose

    line = ProgressLine(quiet=quiet or quick)
    try:
        diagnosis = diagnose(device, path, quick=quick, progress=lambda step: line.show(f"measuring {step} ..."))
    finally:
        line.show()
    if as_json:
        click.echo(json.dumps({"version": __version__, **diagnosis.as_dict()}))
    else:
        click.echo(table(diagnosis, min(columns(), MAX_COLUMNS)))


def table(diagnosis: Diagnosis, columns: int) -> str:
    """Facts, rates and advice, then the verdict, in lines of at most `columns` columns (but at least 20)."""
    facts, rates = _facts(diagnosis), _rates(diagnosis)
    label_columns = max(len(label) for label, *_ in facts + rates) + 2
    lines = [line for row in facts for line in _lines(row, label_columns, columns)]
    if diagnosis.hardware.rates.sources:
        lines += ["", "Measured"]
        lines += [line for row in rates for line in _lines(row, label_columns, columns)]
    if diagnosis.advice:
        lines += ["", "Advice"]
        lines += [line for text in diagnosis.advice for line in _wrapped("- ", with_flags(text), 2, columns)]
    verdict = ["Ready. Next:", *_wrapped("  ", FIRST_COMMAND, 4, columns)]
    if diagnosis.to_do:
        verdict = [line for text in diagnosis.to_do for line in _wrapped("To do: ", with_flags(text), 2, columns)]
    return "\n".join([*lines, "", *verdict])


def _lines(row: Fact, label_columns: int, columns: int) -> list[str]:
    label, value, source = row
    text = f"{value} ({source})" if source else value
    if columns < NARROW:  # too narrow for a column of labels
        return [label, *_wrapped("  ", text, 2, columns)]
    return _wrapped(f"{label:<{label_columns}}", text, label_columns, columns)


def _wrapped(start: str, text: str, indent: int, columns: int) -> list[str]:
    return textwrap.wrap(
        text, max(columns, 20), initial_indent=start, subsequent_indent=" " * indent, break_on_hyphens=False
    )


def _facts(diagnosis: Diagnosis) -> list[Fact]:
    h = diagnosis.hardware
    ram = f"{format_size(h.ram.total_bytes)}, {format_size(h.ram.available_bytes)} available"
    cores = f"{h.num_cores} core{'s' if h.num_cores > 1 else ''}"
    bitsandbytes = f"bitsandbytes {diagnosis.bitsandbytes_version or 'missing'}"
    rows = [
        ("RAM", ram, h.ram.limit),
        ("CPU", ", ".join(filter(None, (h.cpu_name, cores, diagnosis.instructions))), h.cores_limit),
        _gpu(diagnosis),
    ]
    if (disk := diagnosis.disk) is not None:
        free = f"{format_size(disk.free_bytes)} free"
        rows.append(("disk", f"{disk.file_system} on {disk.device}, {free}", str(disk.path)))
    else:
        rows.append(("disk", "unknown", diagnosis.disk_reason))
    return [*rows, ("software", f"offspec {__version__}, torch {diagnosis.torch_version}, {bitsandbytes}", "")]


def _gpu(diagnosis: Diagnosis) -> Fact:
    gpu = diagnosis.hardware.gpu
    if gpu is None:
        return "GPU", "none used", "--device cpu" if diagnosis.device_reason == "as asked" else diagnosis.device_reason
    capability = "compute capability {}.{}".format(*gpu.capability)
    memory = f"{format_size(gpu.total_bytes)}, {format_size(gpu.free_bytes)} free"
    return "GPU", f"{gpu.name}, {memory}, {capability}", f"{diagnosis.device}, {diagnosis.device_reason}"


def _rates(diagnosis: Diagnosis) -> list[Fact]:
    rates, sources = diagnosis.hardware.rates, diagnosis.hardware.rates.sources
    how = sources.get("matmul_flops", "")
    matmul = ", ".join(f"{format_quantity(flops, 'FLOP/s')} at {n}" for n, flops in rates.matmul_flops.items())
    return [
        ("disk", _rate(rates.disk_bytes_per_s, "B/s"), sources.get("disk_bytes_per_s", "")),
        ("link", _rate(rates.host_to_device_bytes_per_s, "B/s"), sources.get("host_to_device_bytes_per_s", "")),
        ("memory", _rate(rates.memory_bytes_per_s, "B/s"), sources.get("memory_bytes_per_s", "")),
        ("matmul", matmul or "-", f"tokens at once; {how}" if matmul else how),
        *(
            (
                f"{each.form} x {each.rows}",
                f"{format_quantity(each.flops, 'FLOP/s')}, {format_quantity(each.bytes_per_s, 'B/s')} of weights",
                "",
            )
            for each in diagnosis.products
        ),
        ("NF4", _rate(rates.dequantise_elements_per_s, " weights/s"), sources.get("dequantise_elements_per_s", "")),
    ]


def _rate(value: float | None, unit: str) -> str:
    return "-" if value is None else format_quantity(value, unit)
