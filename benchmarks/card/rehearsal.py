"""All three calls on the CPU, from a copy of what travels, in an environment with only the lent machine's packages."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from .calls import CALLS, ROOT, TINY
from .results import MAX_FILE_BYTES, MAX_FILES, RESULTS_FILE, Line, latest, read
from .travel import CARRIED, MAX_BYTES, PACKAGES_THERE, SITE, prepare, working_tree

DEVICE = "cpu"
KILLED_CALL, KILL_DURING = "small", "copies back"  # a part that comes early
WAIT_S = 120.0


def rehearse() -> list[str]:
    """Faults of the three calls; none is []. What is run and what came of it is printed."""
    with tempfile.TemporaryDirectory(prefix="card-") as name:
        folder = Path(name)
        tree = copy_tree(folder / "tree")
        num_bytes = sum(file.stat().st_size for file in tree.rglob("*") if file.is_file())
        print(f"{num_bytes / 2**20:.0f} of at most {MAX_BYTES // 2**20} MiB travel", flush=True)
        faults = ["more travels than may"] if num_bytes > MAX_BYTES else []
        python = bare_environment(folder / "environment", PACKAGES_THERE)
        for call in CALLS:
            out = folder / f"out-{call}"
            status = start(python, tree, call, out).wait()
            faults += [f"{call}: {fault}" for fault in (*faults_of(call, out), *([f"status {status}"] * (status != 0)))]
        return faults + faults_after_a_kill(python, tree, folder)


def copy_tree(tree: Path) -> Path:
    """The working tree, with the carried packages for this Python."""
    for file in working_tree():
        (copy := tree / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)
    prepare(f"{sys.version_info.major}.{sys.version_info.minor}", tree / SITE.relative_to(ROOT))
    return tree


def bare_environment(folder: Path, packages: Sequence[str], alone: Sequence[str] = ()) -> Path:
    """The Python of a virtual environment with links to these packages and what they need, and to those `alone`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    site = next(folder.glob("lib/python*/site-packages"))
    for each in (*with_requirements(packages), *map(distribution, alone)):
        for name in {file.parts[0] for file in each.files or ()} - {"..", "__pycache__"}:
            if not (site / name).exists():
                (site / name).symlink_to(Path(str(each.locate_file(name))).resolve())
    return folder / "bin" / "python"


def with_requirements(names: Sequence[str]) -> list[Distribution]:
    """Installed packages and what they need, without their extras; missing ones are left out (a CPU has no Triton)."""
    from packaging.requirements import Requirement

    found, waiting = dict[str, Distribution | None](), list(names)
    while waiting:
        if (name := waiting.pop().lower().replace("_", "-")) in found:
            continue
        try:
            found[name] = each = distribution(name)
        except PackageNotFoundError:
            found[name] = None
            continue
        needed = (Requirement(text) for text in each.requires or ())
        waiting += [need.name for need in needed if need.marker is None or need.marker.evaluate({"extra": ""})]
    return [each for each in found.values() if each is not None]


def start(python: Path, tree: Path, call: str, out: Path, *options: str) -> subprocess.Popen[bytes]:
    """Begin a call as on the machine, on the CPU, in a process group of its own."""
    words = ["--out", str(out), "--models", str(out.parent / "models"), "--device", DEVICE, "--shape", "tiny"]
    command = [str(python), "scripts/card", call, *words, *options]
    print(f"\n$ scripts/card {call} {' '.join(options)}", flush=True)
    # One thread: on matrices this small, threads only wait for each other.
    environment = {"PATH": os.environ["PATH"], "HOME": str(out.parent), "OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}
    return subprocess.Popen(command, cwd=tree, env=environment, start_new_session=True)


def faults_of(call: str, out: Path) -> list[str]:
    """What a machine could not give back, and parts without a complete result."""
    files = list(out.iterdir())
    faults = [f"{file.name} is too large" for file in files if file.stat().st_size > MAX_FILE_BYTES]
    faults += [f"{len(files)} files"] if len(files) > MAX_FILES else []
    results = latest(read(out / RESULTS_FILE), DEVICE)
    return faults + [
        f"{part.name}: {told(results.get(part.name))}" for part in CALLS[call](TINY) if not done(results, part.name)
    ]


def done(results: dict[str, Line], name: str) -> bool:
    return bool(results.get(name, {}).get("is_done"))


def told(line: Line | None) -> str:
    return "no result" if line is None else str(line.get("error", "is not done"))


def faults_after_a_kill(python: Path, tree: Path, folder: Path) -> list[str]:
    """Kill a call during a part; the same call with its results must run this part and later ones only."""
    out, again = folder / "out-killed", folder / "out-again"
    process = start(python, tree, KILLED_CALL, out)
    deadline_s = time.monotonic() + WAIT_S
    while KILL_DURING not in latest(read(out / RESULTS_FILE), DEVICE) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    print(f"killed during {KILL_DURING!r}", flush=True)
    killed = latest(read(out / RESULTS_FILE), DEVICE)
    carried = tree / CARRIED.relative_to(ROOT) / RESULTS_FILE
    shutil.copy(out / RESULTS_FILE, carried)
    status = start(python, tree, KILLED_CALL, again, "--done", str(carried)).wait()
    faults = [f"after a kill: status {status}"] if status else []
    lost = [name for name in killed if not done(killed, name)]
    if lost != [KILL_DURING]:
        faults.append(f"after a kill: lost {lost}")
    begun = {line["part"] for line in read(again / RESULTS_FILE) if "begun" in line}
    each_call = {part.name for part in CALLS[KILLED_CALL](TINY) if part.each_call}
    if repeated := [name for name in killed if done(killed, name) and name in begun - each_call]:
        faults.append(f"after a kill: done twice: {repeated}")
    return faults + [f"after a kill: {fault}" for fault in faults_of(KILLED_CALL, again)]
