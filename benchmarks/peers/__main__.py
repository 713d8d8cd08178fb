"""Compares offspec with other programs (peers) on the same work: table, JSON and chart.

    python -m benchmarks.peers --work /data/peers --shape 7b --ram 6GiB     # the built-in pair, grown
    python -m benchmarks.peers --work /data/peers --shape real --ram 3GiB   # Qwen2.5-Coder 1.5B and 0.5B, in bf16

Every row (a peer with settings) runs every prompt greedily. Each cell has a new process in a memory control group of
--ram, and an empty page cache (both need root on Linux; otherwise a note says so). All rows run one prompt before the
next prompt starts, so that other load on the machine affects all of them. A run can be interrupted at any time: the
same command continues with the missing cells, and --report only shows the results so far. Rows whose tokens cost the
same in every text generate only --steady-tokens for --steady-prompts. The work folder needs four times the checkpoint's
bytes; see docs/results/benchmarks.md.
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
from benchmarks.real import models
from benchmarks.streaming import best_raw
from offspec import builtin, parse_size
from offspec.errors import OffspecError
from offspec.loaders.files.containers import open_checkpoint
from offspec.loaders.files.readers import READ_BYTES
from offspec.loaders.files.records import Record
from offspec.model.names import LAYER_PREFIX

from . import cells, report
from .catalog import PEERS, ROWS, Row
from .cells import Terms
from .prepare import HERE, Files, GrownPair, Pair, RealPair, Workshop, tell
from .truth import Truth

REAL = "real"
REAL_NEEDS = "scripts/fetch_real_pair and scripts/fetch_prompts"
RAW_BYTES = 2**30
ROOM_BYTES = 2 * 2**30  # needed in addition to the weights for a model in RAM


def main() -> None:
    args = arguments()
    rows = [row for row in ROWS if any(fnmatch(row.name, pattern) for pattern in args.only)]
    if not rows:
        sys.exit(f"Error: --only matches no row; choose from: {'; '.join(row.name for row in ROWS)}")
    results = args.results or args.work / f"results-{args.shape}-{args.ram // 2**20}MiB.jsonl"
    steady = (args.steady_tokens, args.steady_prompts)
    terms = Terms(args.shape, args.ram, args.threads, args.tokens, *steady, args.timeout)
    if not args.report:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the running cell ends too
        try:
            shop = Workshop(args.work, pair_of(args))
            measure(rows, args.prompts, shop, terms, Truth(shop.pair.truth), results, retry=args.retry)
        except OffspecError as exc:
            sys.exit(f"Error: {exc}")
        except KeyboardInterrupt:
            tell(f"interrupted; the same command continues; the results so far are in {results}")
    wanted = {cells.blank(row, number, terms).key for row in ROWS for number in range(args.prompts)}
    report.publish([cell for cell in cells.stored(results) if cell.key in wanted], results, args.title or args.shape)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder for environments, models and results")
    parser.add_argument("--shape", choices=(*SHAPES, REAL), required=True, help=f"{REAL}: a real pair, {REAL_NEEDS}")
    parser.add_argument("--ram", type=parse_size, required=True, help="memory of each cell, e.g. 6GiB")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="ROW", help="rows by name, e.g. 'llama*' offspec")
    parser.add_argument("--prompts", type=int, default=12, help="number of held-out prompts [12]")
    parser.add_argument("--tokens", type=int, default=128, help="greedy tokens per prompt [128]")
    parser.add_argument("--steady-tokens", type=int, default=12, help="tokens per prompt for rows without a draft [12]")
    parser.add_argument("--steady-prompts", type=int, default=4, help="prompts for rows without a draft [4]")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--timeout", type=float, default=1800, metavar="SECONDS", help="time limit per cell [1800]")
    parser.add_argument("--source", type=Path, help="the small target [built-in; real: the fetched one]")
    parser.add_argument("--draft", type=Path, help="the draft [built-in; real: the fetched one]")
    parser.add_argument("--checkpoint", type=Path, help="grown checkpoint [WORK/SHAPE]; created if it is missing")
    parser.add_argument("--results", type=Path, help="file of JSON lines [WORK/results-SHAPE-RAM.jsonl]")
    parser.add_argument("--retry", action="store_true", help="run failed cells again")
    parser.add_argument("--report", action="store_true", help="measure nothing; show the results so far")
    parser.add_argument("--title", help="what the chart calls the model [the shape]")
    return parser.parse_args()


def pair_of(args: argparse.Namespace) -> Pair:
    if args.shape != REAL:
        source, draft = args.source or builtin.path("target"), args.draft or builtin.path("draft")
        return GrownPair(args.shape, source, draft, args.checkpoint or args.work / args.shape)
    files = Files(args.source or models.TARGET, args.draft or models.DRAFT)
    if missing := [each for each in (files.model, files.draft, models.PROMPTS) if not each.exists()]:
        sys.exit(f"Error: {missing[0]} is not there: run {REAL_NEEDS}")
    return RealPair(REAL, files, args.work, models.PROMPTS)


def measure(
    rows: list[Row], num_prompts: int, shop: Workshop, terms: Terms, truth: Truth, results: Path, *, retry: bool
) -> None:
    """Run the missing cells, prompt by prompt."""
    done = {cell.key for cell in cells.stored(results) if cell.status == "ok" or not retry}
    fits = terms.ram >= report.folder_bytes(shop.pair.checkpoint) + ROOM_BYTES
    ready = {row.peer: prepared(row.peer, shop) for row in rows}
    for number, prompt in enumerate(shop.pair.prompts()[:num_prompts]):
        ids = truth.encode(prompt)
        due = [row for row in rows if number < terms.num_steady_prompts or not row.is_steady]
        missing = [row for row in due if cells.blank(row, number, terms).key not in done]
        raw = raw_disk_bytes_per_s(shop.pair.checkpoint) if missing else 0.0
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
    """The disk's current rate: O_DIRECT reads of 1 GiB of the checkpoint."""
    infos = [info for info in open_checkpoint(checkpoint).tensors.values() if info.name.startswith(LAYER_PREFIX)]
    return best_raw(Record.of(infos).reads[: RAW_BYTES // READ_BYTES])


def prepared(name: str, shop: Workshop) -> tuple[str, Files | None]:
    """(interpreter, files), or (reason, None) if the peer cannot be installed here."""
    peer = PEERS[name]
    try:
        return str(shop.python(name, peer)), shop.files(name, peer)
    except subprocess.CalledProcessError as exc:
        return f"preparation failed: {' '.join(map(str, exc.cmd))[:200]} exited with {exc.returncode}", None


if __name__ == "__main__":
    main()
