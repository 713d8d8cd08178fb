"""The package works however it was installed: from a checkout, and as a wheel beside the user's own modules."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from .test_structure import MODULES, ROOT


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """A folder whose owner has modules named like ours, which must not be imported instead."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for name in ("scheduler", "cli", "loaders", "errors", "config"):
        (folder / f"{name}.py").write_text(f"raise ImportError('this {name}.py is the user\\'s own')\n")
    return folder


def site_packages() -> list[str]:
    """Where this interpreter's dependencies lie."""
    return sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def output(*command: object, cwd: Path, **env: str) -> str:
    """What a command prints; its failure is the test's. It sees what is installed, and PYTHONPATH only where given."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**inherited, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_source_checkout_runs_from_another_folder(crowded: Path) -> None:
    """-S: no .pth files, so that an editable install beside it cannot help."""
    path = os.pathsep.join([str(ROOT), *site_packages()])
    shown = output(sys.executable, "-S", "-m", "offspec", "--version", cwd=crowded, PYTHONPATH=path)
    assert re.fullmatch(r"offspec, version \S+\n", shown)
    where = (
        "import offspec.cli.run, offspec.scheduler.params as p; print(offspec.cli.run.__file__, p.__file__, sep='\\n')"
    )
    files = output(sys.executable, "-S", "-c", where, cwd=crowded, PYTHONPATH=path).splitlines()
    assert files == [str(ROOT / "cli" / "run.py"), str(ROOT / "scheduler" / "params.py")]


def build_wheel(folder: Path) -> Path:
    """Built from a copy, so that nothing is written into the checkout and nothing built earlier gets in."""
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "source", ignore=unwanted)
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(folder)!r})"  # as `pip wheel` does
    output(sys.executable, "-c", build, cwd=folder / "source")
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_a_wheel_holds_everything_and_runs_beside_the_users_own_modules(crowded: Path, tmp_path: Path) -> None:
    """Its files lie in one folder, as pip would place them, without the checkout."""
    wheel, home = build_wheel(tmp_path / "wheel"), tmp_path / "home"
    assert_whole(wheel)
    zipfile.ZipFile(wheel).extractall(home)
    path = os.pathsep.join([str(home), *site_packages()])
    asked = ["run", "builtin", "def area(", "--max-new-tokens", "2", "--device", "cpu", "--json"]
    source = "import sys, offspec.cli.run, offspec.loaders\nprint(offspec.cli.run.__file__, *offspec.__path__)\n"
    source += f"from offspec.cli.entry import main\nsys.argv = {['offspec', *asked]}\nmain()"
    where, *said = output(sys.executable, "-S", "-c", source, cwd=crowded, PYTHONPATH=path).splitlines()
    assert where == f"{home / 'offspec' / 'cli' / 'run.py'} {home / 'offspec'}"
    assert '"finish_reason"' in "".join(said)
    (entry_points,) = home.glob("*.dist-info/entry_points.txt")
    assert "offspec = offspec.cli.entry:main" in entry_points.read_text()


def assert_whole(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"offspec"}
    files = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    assert names >= {f"offspec/builtin/{role}/{file}" for role in ("target", "draft") for file in files}
    assert names >= {"offspec/builtin/prompts.jsonl", "offspec/builtin/NOTICE", "offspec/py.typed"}
    assert names >= {f"offspec/cli/server/page/{file.name}" for file in (ROOT / "cli" / "server" / "page").iterdir()}
    for file in MODULES:
        inside = file.relative_to(ROOT / "offspec" if file.is_relative_to(ROOT / "offspec") else ROOT)
        assert f"offspec/{inside.as_posix()}" in names
