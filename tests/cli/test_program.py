"""What only a process of its own can show: exit codes, pipes, signals, and what an import brings in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from offspec import __version__

from ..pair import Pair, variant
from ..refusals import check_message
from .conftest import Offspec, Result, finish, start

ROOT = Path(__file__).resolve().parents[2]
FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")
needs_signals = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")


@pytest.fixture
def endless(pair: Pair, tmp_path: Path) -> Sequence[object]:
    """A request that would go on for hours, but for its prompt."""
    folder = variant(pair.target, tmp_path / "target", max_position_embeddings=10**6)
    flags = ("--draft", "none", "--device", "cpu", "--arithmetic", "fast", "--max-new-tokens", 10**6)
    return ("run", folder, *flags)


def in_python(code: str, *args: str) -> Result:
    """What a process of this code leaves behind that runs the program with these arguments."""
    command = [sys.executable, "-c", f"import sys\nsys.argv = {['offspec', *args]}\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return Result(done.returncode, done.stdout, done.stderr)


LISTENING = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
IMPORTING = """
class Interrupting:
    def find_spec(*args):
        signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
"""
ENDING = """
class Unloaded:
    def __del__(self, interrupt=signal.raise_signal, number=signal.SIGINT):
        interrupt(number)
unloaded = Unloaded()
"""
RUNNING = """
import atexit
from offspec.cli import main
ctrl_c = lambda *args: signal.raise_signal(signal.SIGINT)
main.cli.invoke = main._show = ctrl_c
atexit.register(ctrl_c)
"""


@needs_signals
@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        (IMPORTING, Result(130, "", "")),
        (ENDING, Result(0, f"offspec, version {__version__}\n", "")),  # when Python has given up its handlers
        (RUNNING, Result(130, "", "")),  # and again, while the first is handled and while Python ends
    ],
    ids=["importing", "ending", "running"],
)
def test_ctrl_c_before_and_after_the_command(code: str, wanted: Result) -> None:
    asked = "doctor" if code == RUNNING else "--version"
    assert in_python(f"from offspec.cli import entry\n{LISTENING}{code}entry.main()", asked) == wanted


def test_little_is_imported_before_ctrl_c_is_handled() -> None:
    code = f"import sys; sys.path.append({str(ROOT)!r}); import offspec.cli.entry; print('enum' in sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("False\n", "")


@needs_full
def test_notes_that_cannot_be_written_do_not_end_the_program() -> None:
    code = """
from offspec.cli import main
main.cli.invoke = lambda context: (main.click.echo("note", err=True), main.click.echo("text"))
main.main()
"""
    assert in_python(f"import os\nos.dup2(os.open('/dev/full', os.O_WRONLY), 2)\n{code}", "doctor") == Result(
        0, "text\n", ""
    )


@pytest.mark.skipif(sys.platform == "win32", reason="Windows removes no folder that a process works in")
def test_a_working_folder_that_was_removed(tmp_path: Path) -> None:
    (folder := tmp_path / "gone").mkdir()
    code = (
        f"import os\nos.chdir({str(folder)!r})\nos.rmdir({str(folder)!r})\nfrom offspec.cli.entry import main\nmain()"
    )
    in_python(code, "doctor").refusal(1, "working folder", "removed", "cd")


def test_a_long_name_is_shortened(offspec: Offspec) -> None:
    result = offspec("run", "/".join(["folder"] * 1000), "hi")
    assert len(result.refusal(1, "too long", "…")) < 1100


def test_a_reader_that_is_gone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as output:
        result = finish(start("--help", stdout=output))
    assert (result.code, result.err) == (0, "")


@needs_full
def test_output_that_cannot_be_written(
    run_args: Sequence[object], offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a text whose prompt came through a pipe."""
    with FULL.open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        offspec(*run_args, stdin=b"hi").refusal(1, "standard output", "No space left", "free")


@needs_full
def test_help_that_cannot_be_written() -> None:
    """What stays in a buffer must not fail once more when the process ends."""
    with FULL.open("wb") as full:
        finish(start("--help", stdout=full)).refusal(1, "standard output", "No space left", "free")
        result = finish(start("run", "--no-such-flag", stderr=full))
    assert (result.code, result.out) == (2, "")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize(
    ("redirection", "code", "stream"), [(">&-", 1, "standard output"), ("<&-", 2, "prompt")], ids=["output", "input"]
)
def test_a_stream_that_is_closed(redirection: str, code: int, stream: str) -> None:
    shell = subprocess.Popen(
        ["/bin/sh", "-c", f'"{sys.executable}" -m offspec run {redirection}'],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    finish(shell).refusal(code, stream)


@pytest.mark.slow
@needs_signals
def test_ctrl_c_at_a_terminal_that_knows_ascii_only_and_a_pipe_through_which_nothing_comes(
    endless: Sequence[object],
) -> None:
    env = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    flags = ("--temperature", "3", "--seed", "1")  # half characters: U+FFFD
    prompt = os.fsdecode("schön".encode())  # these bytes, whatever this process's locale is
    impatient = ("-c", "from offspec.cli import main, reading; reading.IDLE_S = 0.1; main.main()")
    process = start(*endless, prompt, *flags, env=env, stdin=subprocess.PIPE, program=impatient)
    assert process.stderr is not None
    assert process.stdin is not None
    assert process.stdout is not None
    assert b"/dev/null" in process.stderr.readline()
    process.stdin.close()
    process.stdin = None  # else communicate() would flush it
    while process.stdout.read(1) != b"?":
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    result = finish(process)  # which waits for minutes at most, and the request would take hours
    assert result.code == 130
    assert result.err.strip() == ""


LIGHT = (
    "import offspec",
    "import offspec.errors",
    "import offspec.scheduler.params",
    "from offspec import SamplingParams, SpeculationParams",
    "import offspec.cli.main",
    "import offspec.cli.run, offspec.cli.verify, offspec.cli.chat, offspec.cli.bench, offspec.cli.config",
    "from offspec.cli.main import run; assert run(['--help']) == 0 == run(['run', '--help'])",
    "from offspec.cli.main import run; assert run(['verify', '--budgets', 'x']) == 2",
)


def test_heavy_modules_are_left_alone() -> None:
    """By each statement after those before it."""
    heavy = {"torch", "numpy", "tokenizers", "jinja2", "transformers", "huggingface_hub"}
    heavy |= {"rich", "prompt_toolkit", "matplotlib"}
    show = f"import sys; print('loaded:', *({heavy} & sys.modules.keys()))"
    shown = in_python("\n".join(line for statement in LIGHT for line in (statement, show)))
    loaded = [line for line in shown.out.splitlines() if line.startswith("loaded:")]
    assert dict(zip(LIGHT, loaded, strict=True)) == dict.fromkeys(LIGHT, "loaded:")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce this limit")
def test_a_limit_on_addresses_ends_in_one_line() -> None:
    """`ulimit -v`, with room for the libraries and little more."""
    code = (
        "import psutil, resource, offspec.engine; from offspec.cli.main import run\n"
        "most = psutil.Process().memory_info().vms + 2**20\n"
        "resource.setrlimit(resource.RLIMIT_AS, (most, most))\n"
        "raise SystemExit(run(['run', 'builtin', 'hi', '--device', 'cpu']))\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (shown.returncode, shown.stdout, len(shown.stderr.splitlines())) == (1, "", 1), shown
    check_message(shown.stderr.strip(), "memory", "ulimit -v", "--context")
