"""The program in this process and in one of its own, and the tiny pair it runs on."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from offspec.cli.main import run

from ..assumed_rates import assumed_rates  # noqa: F401 (for engines of this process)
from ..refusals import check_message

if TYPE_CHECKING:
    from offspec import Engine

    from ..pair import Pair
    from .sandbox import Sandbox, Shelf
    from .server.serving import Client


@dataclass(frozen=True)
class Result:
    """What one command line left behind."""

    code: int
    out: str
    err: str

    def refusal(self, code: int, *words: object) -> str:
        """The one line on stderr, which tells `words`; fails unless it is all that was said, with this exit code."""
        lines = self.err.splitlines()
        assert (self.code, self.out, len(lines)) == (code, "", 1), self
        assert lines[0].startswith("Error: "), self
        message = lines[0].removeprefix("Error: ")
        check_message(message, *words)
        return message


class Stdin(io.TextIOWrapper):
    """Standard input as a pipe, or as a terminal at which nobody types, or has typed."""

    def __init__(self, content: bytes | None, *, is_terminal: bool = False) -> None:
        super().__init__(io.BytesIO(content or b""), encoding="utf-8")
        self._is_terminal = content is None or is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


Offspec = Callable[..., Result]


@pytest.fixture
def offspec(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Offspec:
    """Runs a command line in this process; `stdin` is what a pipe brings, None is a terminal."""

    def call(*args: object, stdin: bytes | None = None) -> Result:
        monkeypatch.setattr(sys, "stdin", Stdin(stdin))
        code = run([str(arg) for arg in args])
        return Result(code, *capsys.readouterr())

    return call


@pytest.fixture
def offspec_at_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Offspec:
    """`offspec` with three streams that are terminals; `typed` are its lines. What it keeps of them is this test's."""
    from offspec.cli import chat
    from offspec.cli.line_input import read_from_pipe

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(chat, "line_editor", lambda history, complete: read_from_pipe)
    for stream in {type(sys.stdout), type(sys.stderr)}:
        monkeypatch.setattr(stream, "isatty", lambda self: True)

    def call(*args: object, typed: Sequence[str] = ()) -> Result:
        monkeypatch.setattr(sys, "stdin", Stdin("".join(f"{line}\n" for line in typed).encode(), is_terminal=True))
        code = run([str(arg) for arg in args])
        return Result(code, *capsys.readouterr())

    return call


class Keyboard:
    """Types at the terminal that is standard input."""

    def __init__(self, descriptor: int, terminal: int) -> None:
        self._descriptor, self._terminal = descriptor, terminal

    def type(self, keys: bytes) -> None:
        """Returns when the terminal has them, and has echoed them if it does."""
        from fcntl import ioctl
        from termios import FIONREAD

        os.write(self._descriptor, keys)
        while int.from_bytes(ioctl(self._terminal, FIONREAD, bytes(4)), sys.byteorder) < len(keys):
            pass

    def echo(self) -> bytes:
        """What the terminal has shown."""
        shown = b""
        while select.select([self._descriptor], [], [], 0)[0]:
            shown += os.read(self._descriptor, 4096)
        return shown


@pytest.fixture
def keyboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Keyboard]:
    if sys.platform == "win32":
        pytest.skip("needs a pseudo-terminal")
    descriptor, terminal = os.openpty()
    with open(terminal, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield Keyboard(descriptor, terminal)
    os.close(descriptor)


@pytest.fixture(autouse=True, scope="session")
def _signals_are_heard() -> None:
    """A shell in the background, or nohup, ignores signals; programs that are started here would inherit that."""
    handlers = {"SIGINT": signal.default_int_handler, "SIGHUP": signal.SIG_DFL}
    for name, handler in handlers.items():
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def start(*args: object, **settings: Any) -> subprocess.Popen[bytes]:
    """The program in a process of its own, its streams piped unless told otherwise.

    It compiles no kernels, which would take longer than what most tests ask of it, unless `has_kernels` is set.
    program: what Python is to run instead of `-m offspec`.
    """
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    hidden = {} if settings.pop("has_kernels", False) else {"ATEN_CPU_CAPABILITY": "default"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **hidden, **settings.pop("env", {})}
    command = [sys.executable, *settings.pop("program", ("-m", "offspec")), *map(str, args)]
    return subprocess.Popen(command, env=environment, **{**pipes, **settings})


def finish(process: subprocess.Popen[bytes], seconds: float = 300) -> Result:
    """Wait for the end; the process does not outlive a test that fails."""
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return Result(process.returncode, (out or b"").decode(), (err or b"").decode())


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    from ..pair import build_pair

    return build_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Iterator[Engine]:
    from offspec import Engine

    with Engine.load(str(pair.target), draft=str(pair.draft), device="cpu") as found:
        yield found


@pytest.fixture(scope="module")
def client(engine: Engine) -> Generator[Client, None, None]:
    """Asks a server of the module's `engine`."""
    from .server.serving import served

    with served(engine, tries=True) as (found, _):
        yield found


@pytest.fixture(scope="module")
def asker(client: Client) -> Any:
    """OpenAI's own client, for the same server."""
    openai = pytest.importorskip("openai", reason="OpenAI's client is not installed: pip install 'offspec[test]'")
    return openai.OpenAI(base_url=f"http://127.0.0.1:{client.port}/v1", api_key="-", max_retries=0)


@pytest.fixture
def run_args(pair: Pair) -> Sequence[object]:
    """A short request to the pair, but for its prompt."""
    return ("run", pair.target, "--draft", pair.draft, "--device", "cpu", "--max-new-tokens", "6")


def with_draft(args: Sequence[object], draft: object) -> list[object]:
    """The same arguments with another draft; a further --draft would name a second one."""
    place = args.index("--draft") + 1
    return [*args[:place], draft, *args[place + 1 :]]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """The models of the sandbox, which stand for those that the pages name."""
    from .sandbox import Shelf

    return Shelf(tmp_path_factory.mktemp("shelf"))


@pytest.fixture
def sandbox(tmp_path: Path, shelf: Shelf, offspec: Offspec, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """Runs commands of README and docs."""
    from .sandbox import Sandbox

    return Sandbox(tmp_path, shelf, offspec, monkeypatch)
