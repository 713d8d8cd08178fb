"""A test that leaves something in its process fails by its own name, and no other test does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from .pages import ROOT

TESTS = """
import os, subprocess, sys, threading
import pytest
import torch
from tests import leftovers

leftovers.WAIT_S = 0.2
kept = []

def test_thread():
    kept.append(threading.Event())
    threading.Thread(target=kept[-1].wait, name="offspec-left", daemon=True).start()

def test_file(tmp_path):
    kept.append((tmp_path / "left.bin").open("w"))

def test_variable():
    os.environ["LEFT_BEHIND"] = "1"

def test_process():
    kept.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))

def test_working_directory(tmp_path):
    os.chdir(tmp_path)

def test_torch():
    torch.set_num_threads(3)

def test_dtype():
    torch.set_default_dtype(torch.float64)

def test_dropped(tmp_path):
    '''What nobody refers to is no leftover; nor is a thread that ends soon.'''
    (tmp_path / "dropped.bin").open("w")
    threading.Thread(target=threading.Event().wait, args=(0.1,)).start()

def test_undone(monkeypatch, tmp_path):
    monkeypatch.setenv("LEFT_BEHIND", "2")
    monkeypatch.chdir(tmp_path)
"""
FIXTURE = """
import threading
import pytest
from tests import leftovers

leftovers.WAIT_S = 0.2
event = threading.Event()

@pytest.fixture(scope="module")
def service():
    threading.Thread(target=event.wait, name="offspec-service", daemon=True).start()

def test_of_the_service(service):
    pass
"""


# The tests that fail → what of the message tells why.
FAILURES = {
    "thread": "test: thread 'offspec-left'",
    "file": "left.bin",
    "variable": "environment: changed LEFT_BEHIND",
    "process": "input()",
    "working_directory": "working directory",
    "torch": "torch's threads: was 1, is 3",
    "dtype": "torch.float64",
    "of_the_service": "module's fixtures: thread 'offspec-service'",
}


def test_what_leaves_something_fails_by_its_name(tmp_path: Path) -> None:
    files = {"test_tests.py": TESTS, "test_fixture.py": FIXTURE}
    for name, source in files.items():
        (tmp_path / name).write_text(source)
    options = ("-p", "tests.conftest", "-p", "no:cacheprovider", "-c", os.devnull, "-rA")
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", tmp_path, *(tmp_path / name for name in files)]
    # pytest cuts the lines of its summary to a width; other plugins take seconds to import.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "1000", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    passed = set(re.findall(r"^PASSED \S*::test_(\w+)$", done.stdout, re.MULTILINE))
    failed = dict(re.findall(r"^ERROR \S*::test_(\w+) - Failed: left by this (.*)$", done.stdout, re.MULTILINE))
    assert failed.keys() == FAILURES.keys(), done.stdout
    assert [name for name, told in FAILURES.items() if told not in failed[name]] == []
    assert passed == {*FAILURES, "dropped", "undone"}
