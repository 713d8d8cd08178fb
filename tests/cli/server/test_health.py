"""`/health` tells of every state in which each further request fails, and of no other; the server then ends."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from unittest.mock import Mock

import pytest
import torch

from offspec import ConvertParams, Engine, convert
from offspec.checkpoints.load import WeightSettings, load_decoder
from offspec.checkpoints.opening import open_model
from offspec.cli.server.service import Service
from offspec.errors import CheckpointError, ConstraintError, HardwareError, MemoryLimitError, UsageError
from offspec.loaded_target import LoadedTarget
from offspec.loaders.streaming.placement import Limits, Placement, Slots, places_of
from offspec.running.passes import run_pass
from offspec.text.tokenizer import Tokenizer

from ...pair import Pair, variant
from ...refusals import check_message, refused
from .serving import LONG_S, Client, Reply, served, until

CPU = torch.device("cpu")
TEXT = "/v1/completions"
BODY = {"prompt": "hi", "max_tokens": 2, "ignore_eos": True}
HEALTHY = Reply(200, {"status": "ok"})


@contextmanager
def streamed(folder: Path) -> Iterator[Engine]:
    """An engine that reads all layers from disk in each pass."""
    files = open_model(folder, "fp32", [])
    costs = [layer.cost(files.dtype) for layer in files.stored.layers]
    slots = Slots(2, 0, max(cost.slot_bytes for cost in costs))
    placement = Placement(places_of(on_disk=range(len(costs))), slots, (), Limits(None, 0), 0, 0)
    target = load_decoder(files, placement, CPU, WeightSettings(has_far_embedding=True))
    with Engine(LoadedTarget(target), Tokenizer.load(folder), name=str(folder)) as engine:
        yield engine


@contextmanager
def watched(engine: Engine) -> Iterator[tuple[Client, Service, Event]]:
    """A served engine, and whether the server is told to end; it does not, so that it can be asked."""
    with served(engine) as (client, service):
        gave_up, end = Event(), service.give_up
        service.give_up = gave_up.set
        yield client, service, gave_up
        service.give_up = end


def test_a_new_time_stamp_of_the_model_is_no_change(pair: Pair, tmp_path: Path) -> None:
    folder = variant(pair.target, tmp_path / "target")
    with streamed(folder) as engine, watched(engine) as (client, _, gave_up):
        first = client.ask("POST", TEXT, BODY)
        os.utime(folder / "model.safetensors", (0, 0))
        second = client.ask("POST", TEXT, BODY)
        assert (first.status, second.status) == (200, 200)
        assert second.body["choices"] == first.body["choices"]
        assert client.ask("GET", "/health") == HEALTHY
        assert not gave_up.is_set()


def test_a_model_that_was_changed_ends_the_server(pair: Pair, tmp_path: Path) -> None:
    folder = variant(pair.target, tmp_path / "target")
    with streamed(folder) as engine, watched(engine) as (client, service, gave_up):
        assert client.ask("POST", TEXT, BODY).status == 200
        shutil.copy2(folder / "model.safetensors", tmp_path / "other")
        os.replace(tmp_path / "other", folder / "model.safetensors")
        assert client.ask("POST", TEXT, BODY).status == 500
        assert gave_up.wait(LONG_S)
        reply = client.ask("GET", "/health")
        assert (reply.status, reply.body["status"]) == (503, "error")
        check_message(reply.body["message"], "model.safetensors", "changed", "load it again")
        assert str(tmp_path) not in reply.body["message"]
        assert isinstance(service.error, CheckpointError)
        assert client.ask("POST", TEXT, BODY).status == 500  # at once, and not never


def renamed(folder: Path) -> None:
    shutil.copy2(folder / "model.safetensors", folder / "new")
    rewritten(folder, "new")
    os.replace(folder / "new", folder / "model.safetensors")


def rewritten(folder: Path, name: str = "model.safetensors") -> None:
    """Other numbers in the same bytes."""
    with (folder / name).open("r+b") as file:
        file.seek(-(size := os.path.getsize(file.name) // 2), os.SEEK_END)
        content = bytearray(file.read())
        content[::2] = bytes(size - size // 2)
        file.seek(-size, os.SEEK_END)
        file.write(content)


@pytest.mark.parametrize("change", [renamed, rewritten])
@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_file_that_changes_under_requests_gives_no_wrong_answer(
    is_streamed: bool, change: Callable[[Path], None], pair: Pair, tmp_path: Path
) -> None:
    """Resident weights go on; streamed ones end the server. `offspec quantize` changes no file of a model."""
    folder = variant(pair.target, tmp_path / "target")
    opened = streamed(folder) if is_streamed else Engine.load(str(folder), draft="none", device="cpu")
    with opened as engine, watched(engine) as (client, _, gave_up), ThreadPoolExecutor(3) as pool:
        right = client.ask("POST", TEXT, BODY).body["choices"]
        has_ended = Event()

        def ask_often() -> list[Reply]:
            replies = []
            while not has_ended.is_set() and not (replies and replies[-1].status != 200):
                replies.append(client.ask("POST", TEXT, BODY))
            return replies

        asked = [pool.submit(ask_often) for _ in range(3)]
        with refused(UsageError, folder, "not empty"):
            convert(pair.draft, folder, ConvertParams())
        change(folder)
        if is_streamed:
            assert gave_up.wait(LONG_S)
        last = client.ask("POST", TEXT, BODY)
        has_ended.set()
        replies = [reply for each in asked for reply in each.result()]
        assert all(reply.body["choices"] == right for reply in (*replies, last) if reply.status == 200)
        assert (last.status, gave_up.is_set()) == ((500, True) if is_streamed else (200, False))
        assert client.ask("GET", "/health").status == (503 if is_streamed else 200)


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Iterator[Engine]:
    with Engine.load(str(pair.target), draft="none", device="cpu") as found:
        yield found


@pytest.mark.parametrize("error", [HardwareError, ConstraintError, ZeroDivisionError])
def test_a_failure_of_one_request_is_no_state(
    error: Callable[[str], Exception], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request after it, which the server makes itself, succeeds."""
    errors = [error("once")]

    def fails_once(*args: object) -> object:
        if errors:
            raise errors.pop()
        return run_pass(*args)  # type: ignore[arg-type]

    monkeypatch.setattr("offspec.running.batch.run_pass", fails_once)
    with watched(engine) as (client, service, gave_up):
        assert client.ask("POST", TEXT, BODY).status >= 400
        assert client.ask("POST", TEXT, BODY).status == 200
        assert client.ask("GET", "/health") == HEALTHY
        assert not gave_up.is_set()
        assert service.error is None


@pytest.mark.parametrize("error", [MemoryLimitError, ZeroDivisionError])
def test_a_failure_of_each_request_is_told(
    error: Callable[[str], Exception], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = Mock(side_effect=error("always"))
    monkeypatch.setattr("offspec.running.batch.run_pass", fails)
    with watched(engine) as (client, service, gave_up):
        assert client.ask("POST", TEXT, BODY).status == 500
        assert gave_up.wait(LONG_S)
        reply = client.ask("GET", "/health")
        assert (reply.status, "always" in reply.body["message"]) == (503, True)
        assert "always" in str(service.error)


def test_a_server_that_stops_says_so(engine: Engine) -> None:
    with watched(engine) as (client, service, _):
        service.stop()
        until(lambda: client.ask("GET", "/health").status == 503)
