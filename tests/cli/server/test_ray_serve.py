"""The deployment of docs/many-machines.md: Ray Serve answers as `offspec serve` does."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from offspec import Engine, SamplingParams
from offspec.cli.server.ray_serve import Replica
from offspec.errors import MemoryLimitError

from ...pages import ROOT, blocks
from ...refusals import refused
from ..ray_nodes import LONG_S, nodes, unchanged_process

DEPLOYS = """
import sys, ray
from ray import serve
ray.init(address=sys.argv[1], log_to_driver=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
from offspec_serve import app
serve.run(app)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_replica_whose_engine_is_lost_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Replica("builtin", device="cpu", draft="none")) as replica:
        replica.check_health()
        monkeypatch.setattr(replica._service, "error", MemoryLimitError("the target is no longer in memory"))
        with refused(MemoryLimitError, "memory"):
            replica.check_health()


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """The page's deployment on two nodes with a GPU each, as far as Ray knows."""
    with unchanged_process():
        pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'offspec[ray]'")
    (code,) = blocks(ROOT / "docs" / "many-machines.md", "python")
    (tmp_path / "offspec_serve.py").write_text(code)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        found: int = sock.getsockname()[1]
    with nodes() as cluster:
        for _ in range(2):
            cluster.add(num_gpus=1)
        command = [sys.executable, "-c", DEPLOYS, cluster.address, str(found)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
        process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                assert "ready\n" in process.stdout
                yield found
            finally:
                process.stdin.close()


def ask(port: int, path: str, body: Any = None) -> bytes:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=LONG_S)) as connection:
        connection.request("GET" if body is None else "POST", path, body and json.dumps(body))
        response = connection.getresponse()
        content = response.read()
        assert response.status == 200, content
        return content


@pytest.mark.nightly("starts Ray Serve, 20 s")
def test_the_pages_deployment(port: int) -> None:
    with Engine.load("builtin", device="cpu") as engine:
        alone = engine.complete("def area(", SamplingParams(max_new_tokens=12))
    body = {"prompt": "def area(", "max_tokens": 12, "temperature": 0}
    for _ in range(4):
        assert json.loads(ask(port, "/v1/completions", body))["choices"][0]["text"] == alone
    events = ask(port, "/v1/completions", {**body, "stream": True}).decode().split("\n\n")
    parts = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    assert "".join(part["choices"][0]["text"] for part in parts if part["choices"]) == alone
    assert [model["id"] for model in json.loads(ask(port, "/v1/models"))["data"]] == ["builtin"]
