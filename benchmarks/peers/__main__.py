"""Side by side with the peers, on the same work: table, JSON and plot.

    python -m benchmarks.peers --work /data/peers --shape 7b --ram 6GiB

Every row (a peer with settings) runs every prompt greedily, each in a fresh process in a memory control group of --ram,
with the page cache dropped before (both as root on Linux only; it says so where not). All rows run a prompt before the
next prompt comes, so that what the machine does meanwhile meets all of them. A run can be stopped at any time: the same
command goes on with the cells that are missing, --report only shows what there is. Rows whose tokens cost the same
whatever the text write --steady-tokens to --steady-prompts only. The work folder takes four times the checkpoint's
bytes; see docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

from benchmarks.grow import SHAPES
from benchmarks.streaming import best_raw
from offspec import builtin, parse_size
from offspec.errors import OffspecError
from offspec.loaders.containers import open_checkpoint
from offspec.loaders.readers import READ_BYTES
from offspec.loaders.records import Record
from offspec.model.names import LAYER_PREFIX

from . import cells, report
from .catalog import PEERS, ROWS, Row
from .cells import Terms
from .prepare import HERE, Files, Workshop, tell
from .truth import Truth

RAW_BYTES = 2**30
ROOM_BYTES = 2 * 2**30  # beside the weights, for a model that is to lie in RAM


def main() -> None:
    args = arguments()
    rows = [row for row in ROWS if any(fnmatch(row.name, pattern) for pattern in args.only)]
    if not rows:
        sys.exit(f"Error: --only names no row; there are: {'; '.join(row.name for row in ROWS)}")
    checkpoint = args.checkpoint or args.work / args.shape
    results = args.results or args.work / f"results-{args.shape}-{args.ram // 2**20}MiB.jsonl"
    steady = (args.steady_tokens, args.steady_prompts)
    terms = Terms(args.shape, args.ram, args.threads, args.tokens, *steady, args.timeout)
    if not args.report:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a cell that is running ends as well
        try:
            shop = Workshop(args.work, args.shape, args.source, args.draft, checkpoint)
            measure(rows, args.prompts, shop, terms, Truth(args.source), results, retry=args.retry)
        except OffspecError as exc:
            sys.exit(f"Error: {exc}")
        except KeyboardInterrupt:
            tell(f"stopped; the same command goes on, what there is stands in {results}")
    wanted = {cells.blank(row, number, terms).key for row in ROWS for number in range(args.prompts)}
    report.publish([cell for cell in cells.stored(results) if cell.key in wanted], results)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for environments, models and results")
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--ram", type=parse_size, required=True, help="memory of each cell, e.g. 6GiB")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="ROW", help="rows by name, e.g. 'llama*' offspec")
    parser.add_argument("--prompts", type=int, default=12, help="how many of the held-out prompts [12]")
    parser.add_argument("--tokens", type=int, default=128, help="greedy tokens of each prompt [128]")
    parser.add_argument("--steady-tokens", type=int, default=12, help="of rows without a draft [12]")
    parser.add_argument("--steady-prompts", type=int, default=4, help="of rows without a draft [4]")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--timeout", type=float, default=1800, metavar="SECONDS", help="limit of each cell [1800]")
    parser.add_argument("--source", type=Path, default=builtin.path("target"), help="the small target")
    parser.add_argument("--draft", type=Path, default=builtin.path("draft"))
    parser.add_argument("--checkpoint", type=Path, help="the grown checkpoint [WORK/SHAPE]; made if it is not there")
    parser.add_argument("--results", type=Path, help="the JSON lines [WORK/results-SHAPE-RAM.jsonl]")
    parser.add_argument("--retry", action="store_true", help="run cells again that did not end well")
    parser.add_argument("--report", action="store_true", help="measure nothing, show what there is")
    return parser.parse_args()


def measure(
    rows: list[Row], num_prompts: int, shop: Workshop, terms: Terms, truth: Truth, results: Path, *, retry: bool
) -> None:
    """Run the cells that are missing, prompt by prompt."""
    done = {cell.key for cell in cells.stored(results) if cell.status == "ok" or not retry}
    fits = terms.ram >= report.folder_bytes(shop.grown) + ROOM_BYTES
    ready = {row.peer: prepared(row.peer, shop) for row in rows}
    for number, prompt in enumerate(builtin.prompts()[:num_prompts]):
        ids = truth.encode(prompt)
        due = [row for row in rows if number < terms.num_steady_prompts or not row.is_steady]
        missing = [row for row in due if cells.blank(row, number, terms).key not in done]
        raw = raw_disk_bytes_per_s(shop.grown) if missing else 0.0
        for row in missing:
            cell = cells.blank(row, number, terms)
            cell.raw_disk_bytes_per_s = raw
            python, files = ready[row.peer]
            if files is None:
                cell.status, cell.error = "failed", python
            else:
                worker = HERE / "workers" / PEERS[row.peer].worker
                cells.run(cell, Path(python), worker, files, list(ids), terms, fits=fits)
            if cell.status == "ok":
                cell.judgement = truth.judge(ids, cell.token_ids)
            cells.append(results, cell)
            tell(f"prompt {number + 1} of {num_prompts}, {report.line(cell)}")


def raw_disk_bytes_per_s(checkpoint: Path) -> float:
    """O_DIRECT reads of a GB of the checkpoint: what the disk gives just now."""
    infos = [info for info in open_checkpoint(checkpoint).tensors.values() if info.name.startswith(LAYER_PREFIX)]
    return best_raw(Record.of(infos).reads[: RAW_BYTES // READ_BYTES])


def prepared(name: str, shop: Workshop) -> tuple[str, Files | None]:
    """(interpreter, files); (why not, None) where the peer cannot be had here."""
    peer = PEERS[name]
    try:
        return str(shop.python(name, peer)), shop.files(name, peer)
    except subprocess.CalledProcessError as exc:
        return f"cannot be prepared here: {' '.join(map(str, exc.cmd))[:200]} ended with {exc.returncode}", None


if __name__ == "__main__":
    main()
