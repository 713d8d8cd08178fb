"""Several models behind one server: the one that a request names is loaded, after the other's answers."""

from __future__ import annotations

import http.client
import json
import shutil
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from offspec import Engine, SpeculationParams
from offspec.cli.serve import listening
from offspec.cli.server.connections import protocol
from offspec.cli.server.model_manager import ModelManager
from offspec.cli.server.service import Service

from ...pair import CONTEXT, Pair
from ...refusals import tells
from ..conftest import Offspec
from .serving import USER, Client, running, until


@pytest.fixture
def folder(pair: Pair, tmp_path: Path) -> Path:
    found = tmp_path / "models"
    shutil.copytree(pair.target, found / "large")
    shutil.copytree(pair.draft, found / "small")
    shutil.copytree(pair.draft, found / "later-broken")
    return found


@pytest.fixture
def manager(folder: Path) -> Generator[ModelManager, None, None]:
    def load(path: Path) -> Service:
        return Service(Engine.load(str(path), draft="none", device="cpu"), SpeculationParams(), most_waiting=8)

    paths = {path.name: path for path in sorted(folder.iterdir())}
    with closing(ModelManager(paths, load, lambda line: None)) as found:
        yield found


@pytest.fixture
def client(manager: ModelManager) -> Generator[Client, None, None]:
    with running(manager, listening("127.0.0.1", 0), protocol(100)) as found:
        yield found


def chat(client: Client, model: str | None, **fields: Any) -> Any:
    named = {} if model is None else {"model": model}
    return client.chat(USER, max_tokens=4, ignore_eos=True, **named, **fields)


def test_the_named_model_answers(client: Client, manager: ModelManager) -> None:
    listed = client.ask("GET", "/v1/models").body["data"]
    assert [model["id"] for model in listed] == ["large", "later-broken", "small"]
    assert not any("context_length" in model for model in listed)  # none is loaded
    for name in ("small", "large"):
        reply = chat(client, name)
        assert (reply.status, reply.body["model"]) == (200, name)
        assert manager.loaded is not None
        assert manager.loaded.name == name
        assert client.ask("GET", f"/v1/models/{name}").body["context_length"] > 0
    assert chat(client, None).body["model"] == "large"  # the loaded one


def test_models_are_described_before_they_are_loaded(client: Client, manager: ModelManager) -> None:
    """As Ollama's clients ask; llama.cpp's properties are those of a loaded model."""
    models = client.ask("GET", "/api/tags").body["models"]
    assert [model["name"] for model in models] == ["large", "later-broken", "small"]
    shown = client.ask("POST", "/api/show", {"model": "small"}).body
    assert shown["model_info"]["llama.context_length"] == CONTEXT
    assert manager.loaded is None
    unknown = client.ask("POST", "/api/show", {"model": "medium"})
    assert (unknown.status, tells(unknown.body["error"], "medium", "small")) == (404, True)
    assert client.ask("GET", "/props?model=small").body["model_alias"] == "small"
    assert client.ask("POST", "/tokenize", {"content": "a"}).status == 200
    assert manager.loaded is not None
    assert manager.loaded.name == "small"


def test_an_unknown_model_is_refused_by_name(client: Client) -> None:
    reply = chat(client, "huge")
    assert (reply.status, reply.body["error"]["code"]) == (404, "model_not_found")
    assert "large, later-broken, small" in reply.body["error"]["message"]
    assert client.ask("GET", "/v1/models/huge").status == 404


def test_answers_under_way_end_before_another_model_is_loaded(client: Client, manager: ModelManager) -> None:
    long = {"messages": [USER], "model": "large", "max_tokens": 100, "ignore_eos": True, "stream": True}
    replies = list[Any]()
    with closing(client.open("POST", "/v1/chat/completions", long)) as connection:
        response = connection.getresponse()
        response.readline()
        other = Thread(target=lambda: replies.append(chat(client, "small")))
        other.start()
        events = response.read().decode()
        other.join()
    assert '"finish_reason": "length"' in events
    assert (replies[0].status, replies[0].body["model"]) == (200, "small")
    until(lambda: manager.loaded is not None and manager.loaded.service.is_idle)


def test_a_model_that_cannot_be_loaded_is_the_requests_error(client: Client, folder: Path) -> None:
    (folder / "later-broken" / "model.safetensors").unlink()
    reply = chat(client, "later-broken")
    assert reply.status == 400
    assert str(folder) not in reply.body["error"]["message"]
    assert chat(client, "small").status == 200


@pytest.fixture
def gate(manager: ModelManager, _often: None, monkeypatch: pytest.MonkeyPatch) -> Generator[Event, None, None]:
    """Models are loaded when it is set."""
    load, opened = manager._load, Event()

    def slow(path: Path) -> Service:
        opened.wait()
        return load(path)

    monkeypatch.setattr(manager, "_load", slow)
    yield opened
    opened.set()


@contextmanager
def asked(client: Client, model: str, *, stream: bool) -> Iterator[http.client.HTTPResponse]:
    body = {"messages": [USER], "model": model, "max_tokens": 4, "ignore_eos": True, "stream": stream}
    with closing(client.open("POST", "/v1/chat/completions", body)) as connection:
        yield connection.getresponse()


def test_a_client_hears_from_the_server_while_its_model_is_loaded(client: Client, gate: Event) -> None:
    with asked(client, "small", stream=False) as response:
        assert (response.status, response.read(3)) == (200, b"\n\n\n")
        gate.set()
        assert json.loads(response.read())["choices"][0]["finish_reason"] == "length"


def test_a_model_that_cannot_be_loaded_after_all_is_an_event(client: Client, gate: Event, folder: Path) -> None:
    (folder / "later-broken" / "model.safetensors").unlink()
    with asked(client, "later-broken", stream=True) as response:
        assert response.readline() == b": waiting\n"
        gate.set()
        *_, event, end = response.read().decode().split("\n\n")
    kind, data = event.strip().split("\n")
    assert (kind, end) == ("event: error", "")
    assert "later-broken cannot be loaded" in json.loads(data.removeprefix("data: "))["error"]["message"]


def test_the_command_refuses_what_contradicts_itself(offspec: Offspec, folder: Path, tmp_path: Path) -> None:
    offspec("serve", "builtin", "--models", folder).refusal(2, "--models", "MODEL")
    offspec("serve", "--models", folder, "--alias", "a").refusal(2, "--models", "--alias")
    (tmp_path / "empty").mkdir()
    offspec("serve", "--models", tmp_path / "empty").refusal(2, "no model")
