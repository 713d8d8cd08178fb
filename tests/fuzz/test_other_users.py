"""Commands of a user who is not root, whose home and cache cannot be written or do not exist: they work, or say why."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..machines import is_root
from ..other_users import reachable_python
from ..pages import ROOT
from ..refusals import check_message

USER = 54321  # without an entry in /etc/passwd, as in many containers
PROGRAM = """
import contextlib, io, json, sys
from offspec.cli.main import run

class Stdin(io.TextIOWrapper):
    def isatty(self):
        return not typed  # nobody types anything

found = []
for command, typed in json.loads(sys.argv[1]):
    sys.stdin = Stdin(io.BytesIO(typed.encode()), encoding="utf-8")
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = run(command)
    found.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that everybody may read, and nobody but root may write."""
    if not is_root() or not _can_mount():
        pytest.skip("only root can become another user, and make mounts for that user")
    with tempfile.TemporaryDirectory(prefix="offspec-users-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def _can_mount() -> bool:
    tools = all(map(shutil.which, ("unshare", "setpriv", "mount")))
    mount = ["unshare", "--mount", "mount", "--bind", "/tmp", "/tmp"]
    return tools and subprocess.run(mount, capture_output=True).returncode == 0


def ran(commands: list[tuple[list[str], str]], environment: dict[str, str], folder: Path) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of commands with what is typed, run by USER in /. folder: for mounts."""
    program = [sys.executable, "-c", PROGRAM, json.dumps(commands)]
    as_user = ["setpriv", "--reuid", str(USER), "--regid", str(USER), "--clear-groups", *program]
    script = "\n".join((*reachable_python(folder), f"cd / && exec {shlex.join(as_user)}"))
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "OMP_NUM_THREADS") if name in os.environ}
    found = subprocess.run(
        ["unshare", "--mount", "bash", "-ec", script],
        env=kept | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"} | environment,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    return [(code, out, err) for code, out, err in json.loads(found.stdout)]


HOMES = {
    "cannot be opened": lambda folder: {"HOME": str(folder / "closed")},
    "is not named": lambda folder: {},
    "cannot be written, nor the cache opened": lambda folder: {
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "closed" / "cache"),
        "XDG_CONFIG_HOME": str(folder / "closed"),
        "XDG_STATE_HOME": str(folder / "closed"),
    },
}


@pytest.mark.parametrize(
    "home",
    [
        pytest.param("cannot be opened", marks=pytest.mark.nightly),
        pytest.param("is not named", marks=pytest.mark.nightly),
        "cannot be written, nor the cache opened",
    ],
)
def test_a_home_that_is_no_use(home: str, shared: Path) -> None:
    (shared / "closed").mkdir(0o700)
    (text := shared / "text.py").write_text("def area(width):\n    return width\n")
    asked = ["--device", "cpu", "--max-new-tokens", "4"]
    run, chat = ["run", "builtin", "def area(", *asked], ["chat", "builtin", *asked]
    commands: dict[str, tuple[list[str], str]] = {
        "run": (run, ""),
        "a shadow": ([*run, "--draft", "shadow:4"], ""),
        "lookup": ([*run, "--lookup-files", str(text)], ""),
        "settings": (["config"], ""),
        "chat": (chat, f"hi\n/save {shared / 'talk.json'}\n/save ~/talk.json\n/export ~nobody-of-this-name/talk.md\n"),
        "learning": ([*chat, "--learn", "--learn-file", str(shared / "learnt")], ""),
    }
    results = dict(zip(commands, ran(list(commands.values()), HOMES[home](shared), shared), strict=True))
    for name in ("run", "settings"):
        assert results[name][0] == 0, (name, results[name])
    for name, words in (
        ("a shadow", "cannot be written"),
        ("lookup", "XDG_CACHE_HOME"),
        ("learning", "cannot be written"),
    ):
        code, _, err = results[name]
        (line,) = [line for line in err.splitlines() if line.startswith("Error: ")]
        assert code == 1, (name, results[name])
        check_message(line, words)
    code, out, err = results["chat"]
    assert out.strip()
    assert sum(line.startswith("Error: ") for line in err.splitlines()) == 3 + (code != 0), err
    for name, (_, _, err) in results.items():
        assert "Traceback" not in err, (name, err)
        assert "RuntimeError" not in err, (name, err)
