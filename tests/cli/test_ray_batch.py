"""`offspec run --batch ray`: the nodes of a cluster answer a file as one machine does, whichever of them dies."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from offspec import Engine
from offspec.cli.ray_batch import RESTARTS, Share, shares_of

from ..refusals import tells
from .conftest import Offspec, finish, start
from .ray_nodes import Nodes, calls_of, nodes, unchanged_process, wait_for

BUILTIN = Path(__file__).resolve().parents[2] / "offspec" / "builtin"
CPU = ("--device", "cpu", "--max-new-tokens", "24")


@pytest.fixture(autouse=True)
def _ray_changes_nothing() -> Iterator[None]:
    with unchanged_process():
        yield


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """40 short prompts; some have settings of their own."""
    file = tmp_path / "prompts.jsonl"
    own = [{}, {"temperature": 0.8, "seed": 7}, {"max_new_tokens": 9}, {"id": "x"}]
    file.write_text("".join(f"{json.dumps({'prompt': f'def f{i}(x):', **own[i % 4]})}\n" for i in range(40)))
    return file


def records(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


# ------------------------------------------------------------------------------------------------ without Ray


@pytest.mark.parametrize(
    ("resources", "device", "shares"),
    [
        ({"CPU": 8.0, "memory": 9e9}, "auto", [Share(8)]),
        ({"CPU": 8.0, "GPU": 1.0, "memory": 9e9}, "auto", [Share(8, 1)]),
        ({"CPU": 7.0, "GPU": 2.0, "memory": 9e9}, "cuda", [Share(3, 1, 4_500_000_000)] * 2),
        ({"CPU": 1.0, "memory": 9e9}, "cuda", [Share(1)]),  # the engine itself says that there is no GPU
        ({"memory": 9e9}, "auto", []),
    ],
)
def test_which_engines_a_node_gets(resources: dict[str, float], device: str, shares: list[Share]) -> None:
    assert shares_of(resources, device) == shares


def test_what_cannot_be_meant(run_args: Sequence[object], source: Path, offspec: Offspec) -> None:
    offspec(*run_args, "hi", "--batch", "ray").refusal(2, "--batch ray", "--prompt-file")
    many = (*run_args, "--prompt-file", source, "--batch", "4,ray")
    offspec(*many, "--device", "cuda:1").refusal(2, "cuda:1", "--device cuda")


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "127.0.0.1"])
def test_an_address_of_another_kind(address: str, run_args: Sequence[object], source: Path, offspec: Offspec) -> None:
    pytest.importorskip("ray")
    offspec(*run_args, "--prompt-file", source, "--batch", f"ray:{address}").refusal(2, address, "--batch", "HOST:PORT")


def test_an_address_where_nobody_listens(run_args: Sequence[object], source: Path, offspec: Offspec) -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as sock:
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    offspec(*run_args, "--prompt-file", source, "--batch", f"ray:{address}").refusal(2, address, "ray start")


def test_ray_is_not_installed(
    run_args: Sequence[object], source: Path, offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    offspec(*run_args, "--prompt-file", source, "--batch", "ray").refusal(2, "pip install 'offspec[ray]'")


def test_without_open_prompts_no_cluster_is_looked_for(
    run_args: Sequence[object], source: Path, tmp_path: Path, offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write_text('{"prompt": "hi"}\n')
    many = (*run_args, "--prompt-file", source, "--output", tmp_path / "answers.jsonl")
    assert offspec(*many).code == 0
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(Engine, "load", None)
    result = offspec(*many, "--batch", "ray", "--stats")
    assert (result.code, result.err) == (
        0,
        "offspec: 1 of 1 prompts were answered before\n"
        "cluster   0 prompts, 0 tokens in 0.0 s, - tokens/s since the first engine was ready\n",
    )


# ------------------------------------------------------------------------------------------------ a cluster


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home that has the built-in pair."""
    folder = tmp_path_factory.mktemp("home")
    for role in ("target", "draft"):
        (folder / role).symlink_to(BUILTIN / role)
    return folder


@pytest.fixture(scope="module")
def cluster(home: Path) -> Iterator[Nodes]:
    """Two nodes, beside a head without CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        with nodes() as found:
            for _ in range(2):
                found.add()
            yield found


@pytest.mark.nightly("starts a cluster of Ray, 30 s")
def test_a_node_dies_and_one_has_no_model(
    cluster: Nodes, home: Path, source: Path, tmp_path: Path, offspec: Offspec
) -> None:
    """A run begun without Ray goes on with it: every prompt is answered once, as on one machine."""
    plain, output = tmp_path / "plain.jsonl", tmp_path / "answers.jsonl"
    model = ("~/target", "--draft", "~/draft", *CPU, "--prompt-file", source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        assert offspec("run", *model, "--output", plain).code == 0
    lines = plain.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:5]) + lines[5][:30])
    able = list(cluster.nodes)
    cluster.add(HOME=str(tmp_path))
    command = ("run", *model, "--output", output, "--batch", f"ray:{cluster.address}", "--stats")
    process = start(*command, env={"HOME": str(home)})
    wait_for(lambda: process.poll() is not None or output.read_bytes().count(b"\n") >= 12)
    at_work = wait_for(lambda: [node for node in able if calls_of(node, "NodeEngine.answer")])
    cluster.kill(at_work[0])
    result = finish(process)
    assert (result.code, result.out) == (0, ""), result
    assert output.read_bytes().startswith(b"".join(lines[:5]))
    found = records(output)
    assert sorted(record["line"] for record in found) == list(range(1, 41))
    same = ("prompt", "id", "token_ids", "text", "finish_reason", "model", "draft", "settings")
    alone = {record["line"]: record for record in records(plain)}
    for record in found:
        assert [record.get(key) for key in same] == [alone[record["line"]].get(key) for key in same]
    cluster.kill(cluster.nodes[-1])
    check_said(result.err)


def check_said(said: str) -> None:
    """A line for each node that stopped, and the figures of all."""
    told = [line for line in said.splitlines() if line.startswith("offspec: node ")]
    figures = [line for line in said.splitlines() if not line.startswith("offspec: ")]
    assert any(tells(line, "cannot run", "'~/target'") for line in told)
    assert any(tells(line, "died") for line in told)
    assert [line.split()[0] for line in figures] == ["node"] * 3 + ["cluster"]
    assert tells(figures[-1], "35 prompts")


@pytest.mark.nightly("starts a cluster of Ray, 30 s")
def test_a_process_that_dies_is_started_again(cluster: Nodes, source: Path, tmp_path: Path) -> None:
    """And Ctrl-C ends the command and the engines."""
    output = tmp_path / "answers.jsonl"
    args = ("run", "builtin", *CPU, "--prompt-file", source, "--batch", f"ray:{cluster.address}", "--output", output)
    lasting, *others = cluster.nodes
    for node in others:
        cluster.kill(node)
    process = start(*args)
    wait_for(lambda: process.poll() is not None or (output.exists() and output.read_bytes().count(b"\n") >= 2))
    (call,) = calls_of(lasting, "NodeEngine")
    call.kill()
    before = output.read_bytes().count(b"\n")
    wait_for(lambda: process.poll() is not None or output.read_bytes().count(b"\n") >= before + 3)
    process.send_signal(signal.SIGINT)
    result = finish(process, 20)
    assert (result.code, result.out) == (130, ""), result
    assert tells(result.err, "its process died", "starts it again")
    assert len({record["line"] for record in records(output)}) == len(records(output)) < 40
    wait_for(lambda: not calls_of(lasting, "NodeEngine"))


@pytest.mark.nightly("starts a cluster of Ray, 60 s")
def test_an_engine_is_killed_again_and_again_and_then_the_head(source: Path, tmp_path: Path) -> None:
    """Each ends the command with one line; no answer is lost or comes twice, and the same command goes on."""
    output = tmp_path / "answers.jsonl"
    args = ("run", "builtin", *CPU, "--prompt-file", source, "--output", output, "--batch")
    impatient = "ray_batch.LOOK_S = 0.1; ray_batch.MOST_HEADLESS_S = 1; main.main()"
    program = ("-c", f"from offspec.cli import main, ray_batch; {impatient}")
    with nodes() as found:
        node = found.add()
        process = start(*args, f"ray:{found.address}")
        while process.poll() is None:
            wait_for_answer(process, output)
            for call in calls_of(node, "NodeEngine"):
                call.kill()
        result = finish(process)
        assert (result.code, result.out) == (1, ""), result
        assert result.err.count("its process died") == RESTARTS
        assert tells(result.err.splitlines()[-1], "Error", "no node", "unanswered")
        process, num_before = start(*args, f"ray:{found.address}", program=program), num_answers(output)
        wait_for_answer(process, output)
        found.kill_head()
        result = finish(process)
        assert (result.code, result.out) == (1, ""), result
        assert tells(result.err.splitlines()[-1], "Error", found.address, "gone", "repeat")
    lines = [record["line"] for record in records(output)]
    assert len(lines) == len(set(lines)) > num_before


def wait_for_answer(process: subprocess.Popen[bytes], output: Path) -> None:
    """Another one than those that are there, or the process's end."""
    num_before = num_answers(output)
    wait_for(lambda: process.poll() is not None or num_answers(output) > num_before)


def num_answers(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0
