"""Fixtures shared by all tests. Nothing heavy is imported before a test asks for it."""

from __future__ import annotations

import gc
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from . import smollm2 as real_model
from .each_value import spared
from .leftovers import ProcessState
from .llama_cpp import LlamaCpp, running

if TYPE_CHECKING:
    from .fakes import TinyModel

# Before torch is imported: on matrices this small, threads only wait for each other, 30 times as long on a busy
# machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The real model that some tests run, before the settings below hide where it is.
os.environ[real_model.FOUND] = str(real_model.smollm2_path())
# What the person who runs the tests has set for himself is none of their business.
for _name in [name for name in os.environ if name.startswith("OFFSPEC_")]:
    del os.environ[_name]
os.environ["OFFSPEC_CONFIG"] = ""
# No power fails here, and hundreds of files are written for good.
os.fsync = lambda descriptor: os.fstat(descriptor) and None
# The tests start many processes, each of which would compile all modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Nor what lies in his cache folder. Each test has one of its own, below this one, which fixtures of modules use.
_CACHE = tempfile.mkdtemp(prefix="offspec-test-cache-")
os.environ["XDG_CACHE_HOME"] = _CACHE
# But compiled kernels depend on nothing but their text, and each takes LLVM tenths of a second. All workers share them,
# and the processes that tests start. The process that begins without this variable removes them at the end, with what
# else of `in_own_process` lies beside them.
_KERNELS = "KERNELS_OF_TESTS"
_MADE_SHARED = None if _KERNELS in os.environ else tempfile.mkdtemp(prefix="offspec-test-shared-")
if _MADE_SHARED is not None:
    os.environ[_KERNELS] = os.path.join(_MADE_SHARED, "kernels")
    os.mkdir(os.environ[_KERNELS])


NIGHTLY = "--nightly"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(NIGHTLY, action="store_true", help="also run the tests marked nightly, and more random examples")


def pytest_configure(config: pytest.Config) -> None:
    from .examples import configure

    configure(is_nightly=config.getoption(NIGHTLY))


def pytest_unconfigure() -> None:
    gc.unfreeze()
    shutil.rmtree(_CACHE, ignore_errors=True)
    if _MADE_SHARED is not None:
        shutil.rmtree(_MADE_SHARED, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked nightly, and what `each_value` spares, unless `--nightly` asks for them."""
    if config.getoption(NIGHTLY):
        return
    left_out = {item for item in items if item.get_closest_marker("nightly") is not None}
    left_out |= spared([item for item in items if item not in left_out])
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Imports leave little garbage, and collections would look at all that is imported again and again."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What has been imported stays until the end: collections of garbage need not look at it."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, files without such tests are not imported: they may need packages that are missing there."""
    if config.option.markexpr != "gpu" or not collection_path.match("test_*.py"):
        return None
    return True if "pytest.mark.gpu" not in collection_path.read_text(encoding="utf-8") else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        from offspec.process import prepare

        torch.cuda.init()  # sets a variable of the environment
        prepare(torch.device("cuda"))  # for the whole process: no test leaves it


def seed_random_numbers() -> None:
    """Of the default generators of the modules that are imported."""
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(0)  # torch.manual_seed records a traceback for each kind of device
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True, scope="module")
def _module_leaves_nothing() -> Iterator[None]:
    """Fails the last test of a module whose fixtures leave something in the process."""
    seed_random_numbers()
    before = ProcessState.now()
    yield
    if left := before.leftovers(None):
        pytest.fail(f"left by this module's fixtures: {'; '.join(left)}", pytrace=False)


@pytest.fixture(autouse=True)
def _cache_of_its_own(_test_leaves_nothing: None) -> Iterator[None]:
    """A cache folder with nothing but kernels, unless a fixture of the module has set another."""
    if os.environ["XDG_CACHE_HOME"] != _CACHE:
        yield
        return
    os.environ["XDG_CACHE_HOME"] = _CACHE_OF_TEST
    yield
    os.environ["XDG_CACHE_HOME"] = _CACHE
    if _listed(_CACHE_OF_TEST) != _EMPTY:  # few tests use it, and a new one for each test would take milliseconds
        shutil.rmtree(_CACHE_OF_TEST, ignore_errors=True)
        _link_kernels(_CACHE_OF_TEST)


def _link_kernels(cache: str) -> None:
    """In a cache folder that is not there yet."""
    os.makedirs(os.path.join(cache, "offspec"))
    os.symlink(os.environ[_KERNELS], os.path.join(cache, "offspec", "kernels"))


def _listed(cache: str) -> list[tuple[int, list[str]]]:
    """The modes of a cache folder and of ours in it, and what lies there."""
    folders = (cache, os.path.join(cache, "offspec"))
    return [(os.stat(folder).st_mode, os.listdir(folder)) if os.path.isdir(folder) else (0, []) for folder in folders]


_link_kernels(_CACHE)
_CACHE_OF_TEST = os.path.join(_CACHE, "of-one-test")
_link_kernels(_CACHE_OF_TEST)
_EMPTY = _listed(_CACHE_OF_TEST)


@pytest.fixture(autouse=True)
def _test_leaves_nothing(request: pytest.FixtureRequest, _module_leaves_nothing: None) -> Iterator[None]:
    """Fails a test that leaves something in the process; random numbers do not depend on earlier tests."""
    seed_random_numbers()
    before = ProcessState.now()
    yield
    if left := before.leftovers(request.node.funcargs.get("tmp_path")):
        pytest.fail(f"left by this test: {'; '.join(left)}", pytrace=False)


@pytest.fixture(autouse=True)
def _held_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What earlier tests left in use in this process is no part of the memory that a test grants to an engine."""
    monkeypatch.setattr("offspec.planning.probe._held_bytes", lambda: (700 << 20, 600 << 20))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A real model's GGUF file, SmolLM2-135M-Instruct."""
    path = real_model.smollm2_path()
    if not path.is_file():
        pytest.skip(f"{path} is not there: run scripts/fetch_smollm2")
    return path


@pytest.fixture(scope="module")
def llama_cpp() -> Iterator[LlamaCpp]:
    pytest.importorskip("xllamacpp", reason="llama.cpp as an oracle: pip install xllamacpp")
    with running() as oracle:
        yield oracle


@pytest.fixture(autouse=True)
def processor(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels are made for the processor that a mark of `machines` names, or for this one."""
    if not hasattr(request, "param"):
        yield
        return
    from offspec.backends.x86.processor import using

    from .machines import PROCESSORS

    with using(PROCESSORS[request.param]):
        yield


@pytest.fixture
def learning_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft learns all that it has heard, and not for as long as the text before took:
    a busy machine learns the same.
    """
    from offspec.research.online import Aligner

    monkeypatch.setitem(Aligner.__init__.__kwdefaults__, "clock", lambda: 0.0)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """The tiny random checkpoint of a family by its name in `fakes.FAMILIES`; built once a session."""
    from .fakes import FAMILIES, build

    built: dict[str, TinyModel] = {}

    def get(name: str) -> TinyModel:
        if name not in built:
            built[name] = build(FAMILIES[name], tmp_path_factory.mktemp(name))
        return built[name]

    return get


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    from .machines import is_root

    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if not is_root() or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("cannot mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads, until the test's end."""
    import torch

    threads = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(threads)
