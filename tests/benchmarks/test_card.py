"""The card's benchmark without a card: every part runs, a killed one costs itself only, and it starts on a machine with
few packages.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.card import bench, disk, exact, gpu_tests, kernels, link, one_part, packed, passes, shadows
from benchmarks.card.__main__ import parts_of
from benchmarks.card.calls import CALLS, CARD, MAIN, TINY, Part, gpu_test_files
from benchmarks.card.jobs import JOBS, Job
from benchmarks.card.link import link_bytes_per_s
from benchmarks.card.models import pack_plainly
from benchmarks.card.rehearsal import bare_environment, rehearse
from benchmarks.card.report import tell, verdicts
from benchmarks.card.results import LOG_FILE, MAX_FILES, RESULTS_FILE, append, end_last_line, latest, read
from benchmarks.card.runner import Run
from benchmarks.card.texts import said, texts_of
from benchmarks.card.timing import median_s
from benchmarks.card.travel import PACKAGES_CARRIED, PACKAGES_THERE
from offspec import Engine, SpeculationParams
from offspec.loaders.formats.four_bit import Layout4bit, Matrix4bit, dequantize_reference, pack_4bit

from ..pages import ROOT

CPU = torch.device("cpu")
TINY_JOB = JOBS["tiny"]
SMALLEST = replace(
    TINY_JOB,
    target=replace(TINY_JOB.target, hidden_size=256, intermediate_size=768, num_heads=8, head_dim=32),
    repeats=1,
    num_tokens=6,
    num_plain_tokens=2,
)
PARTS = parts_of(["tiny"])


RUNS = [pytest.param(name, marks=pytest.mark.nightly) for name in ("once", "as on a card")]


@pytest.fixture(scope="module", params=RUNS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the parts of the calls wrote, each figure measured once, or as often as on a card."""
    made = tmp_path_factory.mktemp("card")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(made / "inductor"))  # or torch sets it
        if request.param == "once":
            patch.setitem(JOBS, "tiny", SMALLEST)
            measure_once(patch)
        for part in PARTS:
            run_here(part, made)
        yield made


def run_here(part: Part, folder: Path) -> None:
    """As the process of a part does."""
    one_part.main(["--out", str(folder), "--models", str(folder), "--device", "cpu", part.name, *part.words])


def measure_once(patch: pytest.MonkeyPatch) -> None:
    """All parts of a run, with few widths and tokens, and no repeats."""

    def brief(measure: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return lambda *args, **others: measure(*args, **(others | options))

    def brief_text(engine: Engine, job: Job, temperature: float, speculation: SpeculationParams, *_: int) -> Any:
        return said(engine, job, temperature, speculation, 8, 1)

    for module in (kernels, link, packed, passes):
        patch.setattr(module, "median_s", lambda work, wait, *_, after=None, **__: measured_once(work, wait, after))
    for module in (kernels, shadows):
        patch.setattr(module, "WIDTHS", (4,))
    for module in (packed, disk):
        patch.setattr(module, "WIDTHS", (1,))
    for name in ("measure_dequantise", "measure_memory", "measure_matmul"):
        patch.setattr(bench, name, brief(getattr(bench, name), seconds=0.001))
    patch.setattr(bench, "link_bytes_per_s", lambda device, *_: link_bytes_per_s(device, 2**16, 0.01))
    patch.setattr(exact, "said", brief_text)
    for module in (passes, shadows):
        patch.setattr(module, "texts_of", lambda engine, job, **_: texts_of(engine, job, is_brief=True))


def measured_once(work: Callable[[], object], wait: Callable[[], object], after: Callable[[], object] | None) -> float:
    return median_s(work, wait, 1, warm_ups=0, after=after or wait)


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return latest(read(folder / RESULTS_FILE), "cpu")


def test_every_part_has_figures(results: dict[str, Any]) -> None:
    assert list(results) == [part.name for part in PARTS]
    assert {name: line["error"] for name, line in results.items() if "error" in line} == {}
    assert all(line["is_done"] and line["figures"] for line in results.values())
    assert results["exact"]["figures"]["texts_equal"]
    assert 0 < results["exact"]["figures"]["num_resident_layers"] < JOBS["tiny"].target.num_layers
    assert results["exact"]["figures"]["largest_logit_difference"] < 1e-3


def test_passes_stand_beside_their_bounds(results: dict[str, Any]) -> None:
    figures, job = results["tiny half"]["figures"], JOBS["tiny"]
    assert 0 < figures["num_resident"] < figures["num_layers"] == job.target.num_layers
    assert figures["planned_bytes"] <= figures["allowed_bytes"]
    for width in job.widths:
        p = figures["passes"][str(width)]
        assert p["over_bound"] == pytest.approx(p["seconds"] / max(p["link_s"], p["compute_s"]))
        assert p["link_share"] == pytest.approx(p["link_s"] / p["seconds"])
    texts = figures["texts"]
    assert (
        texts["greedy"]["tokens_per_pass"] >= texts["greedy, plain"]["tokens_per_pass"] == 1
    )  # budgets follow a clock
    assert "token_ids" not in texts["greedy"]


# ------------------------------------------------------------------------------------------- processes and watchdogs


@pytest.fixture
def fake_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """A run whose parts are Python sources, which write their lines with `append`, in processes of their own."""

    def start(self: Run, part: Part, limit_s: float) -> subprocess.Popen[bytes]:
        source = "from benchmarks.card.one_part import write_figures; from pathlib import Path; import os, sys, time\n"
        source += f"out = Path({str(self.folder)!r})\n{part.words[0]}\n"
        source += f"write_figures(out, {part.name!r}, 'cpu', measure)"
        process = subprocess.Popen(
            [sys.executable, "-c", source],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._processes.add(process)
        return process

    monkeypatch.setattr(Run, "_start", start)
    return Run(tmp_path / "out", tmp_path / "models", "cpu", minutes=10)


def part(name: str, source: str, **settings: Any) -> Part:
    return Part(name, (f"def measure():\n    {source}",), **{"limit_s": 60.0, "least_s": 0.0, **settings})


FINE, HANGS = "yield {'good': 1}", "yield {'half': 1}; print('here it hangs', flush=True); time.sleep(600)"
FAILS, DIES = "yield {'half': 1}; raise ValueError('no such device\\nand more')", "yield {'half': 1}; os._exit(7)"


@pytest.mark.nightly("waits for a watchdog of 8 s")
def test_each_part_that_ends_badly_costs_itself(fake_parts: Run, capsys: pytest.CaptureFixture[str]) -> None:
    parts = [part("hangs", HANGS, limit_s=8.0), part("fails", FAILS), part("dies", DIES), part("fine", FINE)]
    results = fake_parts.run(parts)
    errors = {name: line.get("error", "") for name, line in results.items()}
    assert "stopped by its watchdog" in errors["hangs"]
    assert errors["fails"] == "no such device"
    assert "ended with status 7" in errors["dies"]
    assert results["fine"]["is_done"]
    assert [line["figures"] for line in results.values()] == [{"half": 1}] * 3 + [{"good": 1}]
    assert "[hangs] here it hangs" in (fake_parts.folder / LOG_FILE).read_text()
    assert "fails: failed: no such device" in tell(results)
    assert len(list(fake_parts.folder.iterdir())) <= MAX_FILES
    capsys.readouterr()


def test_earlier_results_are_kept_and_failures_come_last(
    fake_parts: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    line = {"device": "cpu", "seconds": 1.0, "figures": {"old": 1}}
    for name, is_done in (("done", True), ("machine", True), ("broken", False)):
        append(earlier, {**line, "part": name, "is_done": is_done})
    append(fake_parts.folder.parent, line)  # another folder is not read
    fake_parts.folder.mkdir()
    append(fake_parts.folder, {**line, "part": "failed", "is_done": False, "error": "before"})
    parts = [part("failed", FINE), part("machine", FINE, each_call=True), part("done", FINE), part("broken", FINE)]
    results = fake_parts.run(parts, [earlier / RESULTS_FILE])
    assert {name: line["figures"] for name, line in results.items()} == {
        "failed": {"good": 1},
        "done": {"old": 1},
        "machine": {"good": 1},
        "broken": {"good": 1},
    }
    begun = [line["part"] for line in read(fake_parts.folder / RESULTS_FILE) if line["figures"] == {}]
    assert begun == ["machine", "broken", "failed"]
    capsys.readouterr()


def test_lanes_run_together_and_wait_for_each_other(fake_parts: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """`waits` begins after `slow`, which runs in another lane at the same time as `first`."""
    meet = "\n    ".join(
        (
            "(out / '{here}').touch()",
            "while not (out / '{there}').exists(): time.sleep(0.01)",
            "yield {{'met': 1}}",
        )
    )
    first, slow = meet.format(here="a", there="b"), meet.format(here="b", there="a")
    parts = [part("first", first), part("waits", FINE, after=("slow",)), part("slow", slow, lane="models")]
    results = fake_parts.run(parts)
    assert all(line["is_done"] for line in results.values())
    names = [line["part"] for line in read(fake_parts.folder / RESULTS_FILE) if line["is_done"]]
    assert names.index("slow") < names.index("waits")
    capsys.readouterr()


def test_an_incomplete_last_line_does_not_spoil_the_next(tmp_path: Path) -> None:
    line = {"part": "a", "device": "cpu", "is_done": True, "figures": {}, "seconds": 0.0}
    append(tmp_path, line)
    with (tmp_path / RESULTS_FILE).open("a") as out:
        out.write('{"part": "cut o')
    end_last_line(tmp_path / RESULTS_FILE)
    append(tmp_path, {**line, "part": "b"})
    assert [line["part"] for line in read(tmp_path / RESULTS_FILE)] == ["a", "b"]


def test_the_program_runs_a_call(tmp_path: Path) -> None:
    """`scripts/card` with one process for each part; nothing is left to do but what needs no model."""
    done = tmp_path / RESULTS_FILE
    for each in CALLS["small"](TINY):
        if each.name != "copies back":
            append(tmp_path, {"part": each.name, "device": "cpu", "is_done": True, "figures": {}, "seconds": 0.0})
    out = tmp_path / "out"
    done.rename(tmp_path / "out.jsonl")
    out.mkdir()
    (tmp_path / "out.jsonl").rename(out / RESULTS_FILE)
    options = ["--out", str(out), "--models", str(tmp_path / "models"), "--device", "cpu", "--shape", "tiny"]
    run = subprocess.run([sys.executable, "scripts/card", "small", *options], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert latest(read(out / RESULTS_FILE), "cpu")["copies back"]["figures"]["65536_bytes_s"] > 0
    assert "copies back" in run.stdout


def test_calls_have_what_they_wait_for() -> None:
    """Each part's predecessors are in the same call, before it or in another lane; names are of one part each."""
    for shapes in (CARD, TINY):
        for call in CALLS.values():
            parts = call(shapes)
            lanes = {each.name: each.lane for each in parts}
            assert len(lanes) == len(parts)
            for index, each in enumerate(parts):
                assert set(each.after) <= lanes.keys()
                before = {other.name for other in parts[:index]}
                assert all(name in before or lanes[name] != each.lane for name in each.after)
                assert each.words[0] in {*one_part.MEASURES, *one_part.WITHOUT_TORCH}
            assert parts[0].lane == MAIN


# --------------------------------------------------------------------------------------- on a machine with few packages


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with the packages of the lent machine, and those that are carried there."""
    return bare_environment(tmp_path_factory.mktemp("bare") / "environment", PACKAGES_THERE, PACKAGES_CARRIED)


@pytest.mark.nightly("makes an environment with few packages")
@pytest.mark.slow
def test_gpu_tests_are_collected_with_few_packages(bare_python: Path) -> None:
    run = bare(
        bare_python, "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-q", "--collect-only", "-m", "gpu", "tests"
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert set(gpu_test_files()) == {line.partition("::")[0] for line in run.stdout.splitlines() if "::" in line}


def test_what_starts_parts_does_not_import_torch() -> None:
    """Or an error of the device would reach it."""
    source = "import sys, runpy; runpy.run_path('scripts/card'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], cwd=ROOT).returncode == 0


def bare(python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.nightly("runs every part of scripts/card, minutes")
def test_the_calls_can_be_rehearsed(capfd: pytest.CaptureFixture[str]) -> None:
    """Downloads what travels."""
    assert rehearse() == []
    capfd.readouterr()


# ----------------------------------------------------------------------------------------------------- tests as parts


def test_outcomes_of_tests_are_read(tmp_path: Path) -> None:
    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="a" time="1.5"/><testcase name="b" time="0.1"><skipped/></testcase>'
        '<testcase name="c"><failure message="assert 1 == 2">long</failure></testcase></testsuite></testsuites>'
    )
    figures = gpu_tests.read_report(report)
    assert figures == {"passed": 1, "failed": 1, "skipped": 1, "slowest_s": 1.5, "failures": {"c": "assert 1 == 2"}}
    line = {"figures": figures, "seconds": 2.0}
    assert verdicts({"tests x": line}) == ["NO   tests x: 1 GPU tests passed, 1 failed, 1 were skipped"]
    nothing_ran = {"figures": {"passed": 0, "failed": 0, "skipped": 3}}
    assert verdicts({"tests x": nothing_ran}) == ["NO   tests x: 0 GPU tests passed, 0 failed, 3 were skipped"]


def test_a_sanitizers_reports_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a program that writes what compute-sanitizer would."""
    program = tmp_path / "compute-sanitizer"
    text = (
        "========= COMPUTE-SANITIZER\n========= Invalid __global__ write of size 4\n========= ERROR SUMMARY: 1 error\n"
    )
    source = tmp_path / "sanitizer.py"
    source.write_text(f"import sys\nopen(sys.argv[sys.argv.index('--log-file') + 1], 'w').write({text!r})\n")
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(source))} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    (figures,) = gpu_tests.sanitizer("memcheck", "tests/none.py")
    assert figures["summary"] == ["1 error"]
    assert figures["reports"] == ["Invalid __global__ write of size 4"]


def test_packing_without_bitsandbytes() -> None:
    matrix = torch.randn(96, 128, generator=torch.Generator().manual_seed(0))
    ours, theirs = pack_plainly(matrix, "nf4"), pack_4bit(matrix, "nf4", nested=False)
    assert ours.keys() == theirs.keys()
    for suffix in (".absmax", ".quant_map", ".quant_state.bitsandbytes__nf4"):
        assert torch.equal(ours[suffix], theirs[suffix])
    layout, found = Layout4bit((96, 128), "nf4", 64), list[torch.Tensor]()
    for packing in (ours, theirs):
        out = torch.empty(96 * 128)
        packed = Matrix4bit(layout, packing[""][:, 0], packing[".absmax"])
        dequantize_reference(packed.codes, packed.absmax, layout, out)
        found.append((out - matrix.view(-1)).abs())
    assert (found[0] <= found[1] + 1e-6).all()  # never further from the matrix than bitsandbytes' own
