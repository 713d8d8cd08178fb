"""`offspec serve`: a server on a real socket, asked as its clients ask."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from threading import Event, Thread
from typing import Any
from unittest.mock import Mock
from urllib.parse import quote

import click
import pytest
import uvicorn

from offspec import RECOMMENDED, Engine, SamplingParams, SpeculationParams
from offspec.cli.serve import _checked_key
from offspec.cli.server.connections import Bodies, protocol
from offspec.cli.server.privacy import public_name, without_paths
from offspec.cli.server.reply_tokens import ReplyTokens
from offspec.cli.server.routes import StoppableServer, is_loopback
from offspec.cli.server.service import Service
from offspec.errors import NumericalError
from offspec.running.batch import Batch
from offspec.running.passes import run_pass
from offspec.session import Turn, turns_of
from offspec.text.tokenizer import Tokenizer

from ..pair import CONTEXT, Pair, variant
from ..refusals import check_message, tells
from .conftest import Offspec
from .server.serving import LONG_S, USER, Client, Reply, gauge, served, until


def test_what_neither_request_nor_flag_gives_is_as_the_model_recommends(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    recommended = SamplingParams(temperature=0.9, top_k=20, repetition_penalty=1.3)
    monkeypatch.setattr(engine.loaded, "recommended_sampling", recommended)
    asked = {"prompt": "def area(", "seed": 3, "ignore_eos": True}
    expected = {
        ("top_k",): SamplingParams(16, temperature=0.9, repetition_penalty=1.3),
        ("temperature",): SamplingParams(16),
    }
    for given, params in expected.items():
        with served(engine, given=given) as (client, _):
            (described,) = client.ask("GET", "/v1/models").body["data"]
            texts = [
                client.ask("POST", "/v1/completions", {**asked, **fields}).body["choices"][0]["text"]
                for fields in ({}, {"temperature": 0}, {"temperature": 0.5, "top_k": 3})
            ]
        wanted = [params, SamplingParams(16), replace(recommended, max_new_tokens=16, temperature=0.5, top_k=3)]
        assert texts == [engine.complete("def area(", replace(each, seed=3, ignore_eos=True)) for each in wanted]
        shown = described["sampling"]
        assert (shown.pop("max_tokens"), shown) == (16, {name: getattr(params, name) for name in RECOMMENDED})


def test_best_of_keeps_the_likeliest(client: Client) -> None:
    asked = {"prompt": ["def area(", "x ="], "max_tokens": 8, "seed": 3, "temperature": 1.5}
    every = client.ask("POST", "/v1/completions", {**asked, "n": 4, "logprobs": 0}).body["choices"]
    best = client.ask("POST", "/v1/completions", {**asked, "n": 2, "best_of": 4}).body
    wanted = list[str]()
    for found in (every[:4], every[4:]):
        found.sort(key=lambda choice: -fmean(choice["logprobs"]["token_logprobs"]))
        wanted += [choice["text"] for choice in found[:2]]
    assert [choice["text"] for choice in best["choices"]] == wanted
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert {choice["logprobs"] for choice in best["choices"]} == {None}
    assert best["usage"]["completion_tokens"] == 2 * 4 * 8


@pytest.mark.parametrize("kind", ["chat/completions", "completions"])
def test_a_stream_is_the_same_text_in_parts(client: Client, kind: str) -> None:
    body = {"max_tokens": 12, "stream_options": {"include_usage": True}, "ignore_eos": True}
    body |= {"messages": [USER]} if kind.startswith("chat") else {"prompt": "hi"}
    *parts, last = client.stream(f"/v1/{kind}", body)
    whole = client.ask("POST", f"/v1/{kind}", body).body
    (choice,) = whole["choices"]
    texts = [part["choices"][0].get("delta", {}).get("content", part["choices"][0].get("text")) for part in parts]
    assert "".join(texts) == (choice["message"]["content"] if kind.startswith("chat") else choice["text"])
    assert len(parts) > 1
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 12)


def test_a_conversation_scores_only_what_is_new(client: Client) -> None:
    asked: list[dict[str, str]] = [{"role": "user", "content": "first of all"}]
    before = client.chat(*asked)
    asked += [before.body["choices"][0]["message"], {"role": "user", "content": "and then"}]
    after = client.chat(*asked).body["usage"]
    held = before.body["usage"]["prompt_tokens"] + before.body["usage"]["completion_tokens"]
    # All but the last token, unless it was a guess; and the end of the text is no part of a reply.
    assert held - 2 <= after["prompt_tokens_details"]["cached_tokens"] <= held


def test_a_continued_answer_is_the_uncut_one(client: Client) -> None:
    question = {"role": "user", "content": "first of all"}
    whole = client.chat(question, max_tokens=24, ignore_eos=True).body["choices"][0]["message"]["content"]
    text = ""
    for fields in ({}, {"continue_final_message": True}, {"continue_final_message": True}):
        begun = [{"role": "assistant", "content": text}] if text else []
        reply = client.chat(question, *begun, ignore_eos=True, **fields)
        text += reply.body["choices"][0]["message"]["content"]
        assert reply.body["choices"][0]["finish_reason"] == "length"
    assert text == whole
    next_turn = client.chat(question, {"role": "assistant", "content": text}, USER).body["usage"]
    assert next_turn["prompt_tokens_details"]["cached_tokens"] > 24  # they are the original tokens


def test_a_begun_answer_of_another_client_is_continued(client: Client, engine: Engine) -> None:
    messages = [USER, {"role": "assistant", "content": "def area("}]
    reply = client.chat(*messages, continue_final_message=True, add_generation_prompt=False)
    ids = engine.tokenizer.encode_chat(messages, continues=True)
    assert engine.tokenizer.decode(ids, skip_special_tokens=False).endswith("<|assistant|>def area(")
    assert reply.body["choices"][0]["message"]["content"] == engine.complete(ids, SamplingParams(8))


def test_a_conversation_keeps_the_tokens_of_its_replies() -> None:
    kept, asked, reply = ReplyTokens(most=2), [USER], {"role": "assistant", "content": "yes"}
    kept.add("A", asked, "yes", [7])
    assert kept.of("A", [USER, reply, USER]) == [[7]]
    assert kept.of("B", [USER, reply, USER]) == kept.of("A", [{**USER, "content": "ho"}, reply, USER]) == [[]]
    kept.add("A", [USER, reply, USER], "yes", [8])
    assert kept.of("A", [USER, reply, USER, reply, USER]) == [[7], [8]]
    kept.add("A", asked, "no", [9])
    assert kept.of("A", [USER, reply, USER]) == [[]]


def test_a_client_that_leaves_ends_its_request(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, begin = Event(), Service._begin

    def told(self: Service, ticket: Any) -> None:
        begun.set()
        begin(self, ticket)

    monkeypatch.setattr(Service, "_begin", told)
    folder = variant(pair.target, tmp_path / "target", max_position_embeddings=10**6)
    body = {"prompt": "hi", "max_tokens": 10**5, "ignore_eos": True, "stream": True}
    with Engine.load(str(folder), draft="none", device="cpu", context=10**5) as endless, served(endless) as (client, _):
        with closing(client.open("POST", "/v1/completions", body)) as connection:
            assert connection.getresponse().read(1)
        begun.clear()
        with closing(client.open("POST", "/v1/completions", {**body, "stream": False})) as connection:
            assert begun.wait(LONG_S)
        assert client.ask("POST", "/v1/completions", {"prompt": "hi", "max_tokens": 2}).status == 200


@pytest.mark.usefixtures("learning_takes_no_time")
def test_the_draft_learns_between_requests(pair: Pair) -> None:
    loaded = Engine.load(str(pair.target), draft=str(pair.draft), device="cpu", learn=True)
    with loaded as engine, served(engine) as (client, _):
        assert engine.aligner is not None
        before = client.chat(USER, max_tokens=16, ignore_eos=True).body["choices"]
        assert client.chat(USER, max_tokens=16, ignore_eos=True).body["choices"] == before
        assert engine.aligner.num_steps > 0


def test_a_server_whose_passes_ended_does_not_let_requests_wait(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it was that ended them."""

    monkeypatch.setattr(
        "offspec.cli.server.service.Service._end_left", Mock(side_effect=ZeroDivisionError("unexpected"))
    )
    with served(engine) as (client, service):
        service.give_up = service.stop  # as the program does
        assert client.chat(USER).status == 503
        check_message(str(service.error), "ZeroDivisionError", "start")


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("chat/completions", {"messages": [USER], "best_of": 2}, ("best_of", "text completions")),
        ("completions", {"prompt": "hi", "best_of": 2, "stream": True}, ("best_of", "stream")),
        ("chat/completions", {"messages": [USER], "n": 17}, ("n", 16, 17)),
        ("chat/completions", "{", ("JSON",)),
        ("completions", {"prompt": [10**6]}, (10**6, "vocabulary")),
        ("completions", {"prompt": "x" * 500}, ("context", CONTEXT)),
        ("completions", {"prompt": "x", "logit_bias": {str(10**6): 1}}, ("logit_bias", 10**6, "vocabulary")),
        ("completions", "[" + "1," * 3_000_000 + "1]", ("JSON", 2_000_000)),
        ("completions", {"prompt": "x", "stop": ["a"] * 65}, ("stop", 64)),
    ],
)
def test_a_bad_request_is_told_why(client: Client, path: str, body: Any, words: tuple[object, ...]) -> None:
    reply = client.ask("POST", f"/v1/{path}", body)
    assert reply.status == 400
    check_message(reply.body["error"]["message"], *words)
    assert reply.body["error"]["code"] == ("context_length_exceeded" if "context" in words else None)


def test_a_request_that_is_too_large_is_told_so(client: Client) -> None:
    reply = client.ask("POST", "/v1/completions", " " * (33 << 20))
    assert reply.status == 413
    check_message(reply.body["error"]["message"], "32 MiB")


def test_no_answer_names_folders_of_this_machine(client: Client, engine: Engine) -> None:
    folder = str(engine.tokenizer.folder)
    reply = client.chat({"role": "user", "content": "a \ud800"})
    assert reply.status == 400
    assert "tokenizer.json" in reply.body["error"]["message"]
    told = [
        reply.body,
        client.ask("GET", "/v1/models").body,
        client.ask("GET", "/v1/models/none").body,
        client.chat(USER).body,
    ]
    assert not [said for said in told if folder in json.dumps(said) or str(Path(folder).parent) in json.dumps(said)]


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("cannot read /home/me/model-1/a.json: gone", "cannot read a.json: gone"),
        ("[Errno 2] gone: '/my models/a b/c d.bin'", "[Errno 2] gone: 'c d.bin'"),
        ("/srv/my models (old)/one/a.json and /srv/my models (old)/one: x", "a.json and one: x"),
        ("see https://huggingface.co/org/name, and/or this", "see https://huggingface.co/org/name, and/or this"),
    ],
)
def test_paths_lose_their_folders(message: str, told: str) -> None:
    assert without_paths(message, [Path("/srv/my models (old)/one")]) == told


def test_of_an_error_of_others_a_client_learns_the_kind_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("at /home/me, my models/x")
    monkeypatch.setattr("offspec.scheduler.drafting.drafter.verify_exactly", Mock(side_effect=error))
    with served(engine) as (client, _):
        reply = client.chat(USER)
    assert reply.status == 500
    check_message(reply.body["error"]["message"], "RuntimeError", "unexpected")
    assert "/home/me" not in reply.body["error"]["message"]
    assert "my models" not in reply.body["error"]["message"]


def read_all(sock: socket.socket) -> str:
    sock.settimeout(LONG_S)
    parts = list[bytes]()
    while part := sock.recv(65536):
        parts.append(part)
    return b"".join(parts).decode()


def asked_until(where: tuple[str, int], status: int) -> str:
    """The first answer to /health that has this status: the server learns of connections in its own time."""
    while True:
        with socket.create_connection(where) as sock, suppress(ConnectionResetError):
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            if (answer := read_all(sock)).startswith(f"HTTP/1.1 {status}"):
                return answer


def test_connections_beyond_the_limit_are_refused(engine: Engine) -> None:
    with served(engine, protocol(3)) as (client, _):
        where = ("127.0.0.1", client.port)
        kept = [socket.create_connection(where) for _ in range(2)]
        assert client.ask("GET", "/health").status == 200
        kept.append(socket.create_connection(where))
        answer = asked_until(where, 503)
        check_message(json.loads(answer.partition("\r\n\r\n")[2])["error"]["message"], "connections")
        kept.pop().close()
        assert '"ok"' in asked_until(where, 200)
        for sock in kept:
            sock.close()


def test_requests_that_do_not_come_are_not_waited_for(engine: Engine) -> None:
    every = (
        b"",
        b"GET /health HT",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{",
    )
    with served(engine, protocol(10, headers_s=0.3, body_s=0.3)) as (client, _), ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection(("127.0.0.1", client.port))) for _ in every]
        for sock, sent in zip(socks, every, strict=True):
            sock.sendall(sent)
        for sock, sent in zip(socks, every, strict=True):
            *_, last = read_all(sock).rpartition("HTTP/1.1")
            assert last.startswith(" 408"), sent
            assert tells(last, "time")


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (
            b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            ("Content-Length",),
        ),
        (b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", ("chunk",)),
    ],
    ids=["two lengths", "chunk"],
)
def test_what_is_no_valid_http_is_refused_in_json(client: Client, sent: bytes, words: Sequence[str]) -> None:
    with socket.create_connection(("127.0.0.1", client.port)) as sock:
        sock.sendall(sent)
        head, _, body = read_all(sock).partition("\r\n\r\n")  # to the end: the connection closes
    assert head.startswith("HTTP/1.1 400 ")
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    check_message(error["message"], "HTTP", *words)


def test_one_client_leaves_memory_for_the_bodies_of_others() -> None:
    bodies = Bodies(10, 6)
    assert [bodies.take("a", 6), bodies.take("a", 1), bodies.take("b", 4), bodies.take("b", 1)] == [1, 0, 1, 0]
    bodies.give_back("a", 6)
    assert [bodies.take("b", 3), bodies.take("b", 2)] == [0, 1]


def test_bodies_that_do_not_come_take_bounded_memory(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offspec.cli.server.routes.MOST_CLIENT_BYTES", 1000)
    with served(engine) as (client, _), socket.create_connection(("127.0.0.1", client.port)) as stalled:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\n"
        stalled.sendall(head + b" " * 800)
        while client.ask("POST", "/v1/completions", " " * 300).status != 503:
            pass  # until the server has read what is stalled
        stalled.close()
        while client.ask("POST", "/v1/completions", " " * 300).status == 503:
            pass
        assert client.ask("POST", "/v1/completions", {"prompt": "hi" + " " * 300, "max_tokens": 1}).status in (200, 400)


def test_of_a_prompt_far_too_long_little_is_encoded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, encode = list[int](), Tokenizer._encode

    def counted(self: Tokenizer, text: str) -> Any:
        seen.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "_encode", counted)
    long = "def " * 100_000
    reply = client.chat({**USER, "content": long})
    assert (reply.status, reply.body["error"]["code"]) == (400, "context_length_exceeded")
    assert 0 < sum(seen) < 10_000


def test_an_answer_without_a_limit_ends_with_the_context(client: Client) -> None:
    usage = client.chat(USER, max_tokens=-1, seed=-1, top_k=-1, ignore_eos=True).body["usage"]
    assert usage["total_tokens"] == CONTEXT


def test_limits_are_as_the_page_says(client: Client, engine: Engine) -> None:
    """Any temperature from 0 on; without max_tokens, the server's limit."""
    asked = {"prompt": "hi", "temperature": 50, "seed": 3, "ignore_eos": True, "max_tokens": None}
    reply = client.ask("POST", "/v1/completions", asked)
    assert reply.body["usage"]["completion_tokens"] == 16
    wanted = SamplingParams(16, temperature=50, seed=3, ignore_eos=True)
    assert reply.body["choices"][0]["text"] == engine.complete("hi", wanted)
    assert client.ask("POST", "/v1/completions", {**asked, "temperature": -0.1}).status == 400


def test_other_paths(client: Client) -> None:
    assert client.ask("GET", "/health") == Reply(200, {"status": "ok"})
    assert client.ask("GET", "/v1/embeddings").status == 404
    assert client.ask("GET", "/v1/completions").body["error"]["message"].startswith("Method Not Allowed")


def test_models_are_described(client: Client, engine: Engine) -> None:
    (model,) = client.ask("GET", "/v1/models").body["data"]
    name = Path(engine.name).name
    assert (model["id"], model["object"], type(model["created"])) == (name, "model", int)
    assert client.ask("GET", f"/v1/models/{name}") == Reply(200, model)
    for other in ("other", "org/other", ""):
        unknown = client.ask("GET", f"/v1/models/{other}")
        assert (unknown.status, unknown.body["error"]["code"]) == (404, "model_not_found")


def test_a_file_is_named_by_its_stem(tmp_path: Path) -> None:
    for name, shown in (("SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"), ("big-00001-of-00003.gguf", "big")):
        (tmp_path / name).touch()
        assert public_name(str(tmp_path / name)) == shown
    (tmp_path / "Llama-3.1-8B").mkdir()
    assert public_name(str(tmp_path / "Llama-3.1-8B")) == "Llama-3.1-8B"
    assert public_name("org/Llama-3.1-8B") == "org/Llama-3.1-8B"


def test_no_message_names_the_folder_of_a_file(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "my models" / "small.gguf"
    file.parent.mkdir()
    file.touch()
    monkeypatch.setattr(engine, "name", str(file))
    with served(engine) as (client, service):
        (model,) = client.ask("GET", "/v1/models").body["data"]
        assert model["id"] == "small"
        for asked in ("small", str(file)):
            assert client.ask("GET", f"/v1/models/{quote(asked)}") == Reply(200, model)
        assert without_paths(f"cannot read {file}: gone", service._folders) == "cannot read small.gguf: gone"


def test_an_alias_names_the_model(engine: Engine) -> None:
    with served(engine, alias="house/model") as (client, _):
        (model,) = client.ask("GET", "/v1/models").body["data"]
        assert model["id"] == client.chat(USER, model="house/model").body["model"] == "house/model"
        for name, status in (("house/model", 200), (Path(engine.name).name, 200), ("model", 404)):
            assert client.ask("GET", f"/v1/models/{name}").status == status


def test_an_error_while_running_is_told_and_the_next_request_is_served(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each failure the server makes a request itself, which succeeds."""
    error = NumericalError("not a number")
    errors = iter([error, None, error, None, TypeError("not callable")])

    def fail(*args: Any) -> Any:
        if (error := next(errors, None)) is not None:
            raise error
        return run_pass(*args)

    with served(engine) as (client, _):
        with monkeypatch.context() as patch:
            patch.setattr("offspec.running.batch.run_pass", fail)
            reply = client.chat(USER)
            (event,) = client.stream("/v1/chat/completions", {"messages": [USER]})
            broken = client.chat(USER)
        assert (reply.status, reply.body["error"]["message"]) == (500, "not a number")
        assert event["error"]["message"] == "not a number"
        assert (broken.status, broken.body["error"]["type"]) == (500, "server_error")
        assert client.chat(USER).status == 200


def test_a_key_is_asked_for(engine: Engine) -> None:
    with served(engine, api_key="secret") as (client, _):
        assert client.ask("GET", "/v1/models").status == 401
        assert client.ask("GET", "/v1/models", Authorization="Bearer wrong").status == 401
        for borne, status in (("Bearer secret", 200), ("BEARER   secret  ", 200), ("secret", 401)):
            assert client.ask("GET", "/v1/models", Authorization=borne).status == status, borne
        assert client.ask("GET", "/health").status == 200


def test_web_pages_are_not_answered(engine: Engine) -> None:
    with served(engine, is_private=True) as (client, _):
        for headers, status in (
            ({}, 200),
            ({"Host": "localhost:8080"}, 200),
            ({"Host": "[::1]:8080"}, 200),
            ({"Origin": "http://localhost:3000"}, 200),
            ({"Host": "evil.example"}, 403),
            ({"Origin": "https://evil.example"}, 403),
            ({"Origin": "null"}, 403),
        ):
            assert client.ask("GET", "/v1/models", **headers).status == status, headers


def test_pages_of_named_origins_are_answered(engine: Engine) -> None:
    page, other = "https://chat.example", "https://else.example"
    with served(engine, origins=[page]) as (client, _):
        for origin, allowed, status in ((page, page, 200), (other, None, 403)):
            asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
            with closing(client.open("OPTIONS", "/v1/chat/completions", Origin=origin, **asks)) as connection:
                response = connection.getresponse()
                assert response.getheader("access-control-allow-origin") == allowed
                assert (response.status == 200) == (origin == page)
            with closing(client.open("GET", "/v1/models", Origin=origin)) as connection:
                response = connection.getresponse()
                assert (response.status, response.getheader("access-control-allow-origin")) == (status, allowed)


def test_web_pages_are_answered_by_no_server_without_a_key(engine: Engine) -> None:
    foreign, body = {"Origin": "http://evil.example", "Content-Type": "text/plain"}, {"prompt": "hi", "max_tokens": 2}
    with served(engine) as (client, _):
        refused = client.ask("POST", "/v1/completions", body, **foreign)
        assert refused.status == 403
        check_message(refused.body["error"]["message"], "web pages")
        assert client.ask("POST", "/v1/completions", body, Host="a.example").status == 200
        assert client.ask("POST", "/v1/completions", body, Origin="http://localhost:3000").status == 200
    with served(engine, api_key="secret") as (client, _):
        assert client.ask("POST", "/v1/completions", body, **foreign).status == 401
        assert client.ask("POST", "/v1/completions", body, Authorization="Bearer secret", **foreign).status == 200


def test_turns_are_found_in_messages() -> None:
    system, reply = {"role": "system", "content": "brief"}, {"role": "assistant", "content": "yes"}
    assert turns_of([system, USER, reply, USER], [[7]]) == ("brief", [Turn("hi", "yes", [7]), Turn("hi")])
    assert turns_of([USER], []) == (None, [Turn("hi")])
    for other in ([USER, reply], [system], [USER, USER], [reply, USER], [USER, system, USER]):
        assert turns_of(other, [[7]]) is None


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture
def serving(pair: Pair) -> Sequence[object]:
    return ("serve", pair.target, "--draft", pair.draft, "--device", "cpu", "--port", 0)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGHUP")
@pytest.mark.parametrize("is_ignored", [False, True], ids=["terminal", "nohup"])
def test_a_terminal_that_closes_stops_the_server_as_sigterm_does(is_ignored: bool, engine: Engine) -> None:
    """With an error for each answer under way; under nohup not at all."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        with closing(Service(engine, SpeculationParams(), most_waiting=1)) as service:
            server = StoppableServer(uvicorn.Config(lambda: None), service)
            with server.capture_signals():
                signal.raise_signal(signal.SIGHUP)
                assert server.should_exit != is_ignored
        assert signal.getsignal(signal.SIGHUP) is (signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("streams", [True, False])
def test_who_waits_is_told_that_the_server_stops(streams: bool, pair: Pair, tmp_path: Path) -> None:
    folder = variant(pair.target, tmp_path / "target", max_position_embeddings=10**6)
    body = {"prompt": "hi", "max_tokens": 10**5, "ignore_eos": True}
    with (
        Engine.load(str(folder), draft="none", device="cpu", context=10**5) as endless,
        served(endless, parallel=1) as (client, service),
        closing(client.open("POST", "/v1/completions", {**body, "stream": True})) as first,
        closing(client.open("POST", "/v1/completions", {**body, "stream": streams})) as second,
    ):
        under_way = first.getresponse()
        until(lambda: gauge(client, "requests_waiting") == 1)
        service.give_up()  # as by a signal
        *_, event, done, end = under_way.read().decode().split("\n\n")
        waiting = second.getresponse()
        *_, answer = (part for part in waiting.read().decode().split("\n\n") if part not in ("", "data: [DONE]"))
        told = [json.loads(text.removeprefix("data: ")) for text in (event, answer)]
    assert (under_way.status, waiting.status) == (200, 200 if streams else 503)
    assert (done, end) == ("data: [DONE]", "")
    assert told[0] == told[1]
    assert "stopping" in told[0]["error"]["message"]


def test_an_answer_under_way_is_refused_when_the_server_stops(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    began, may_go_on = Event(), Event()

    def held(self: Batch) -> Any:
        began.set()
        assert may_go_on.wait(LONG_S)
        return []

    monkeypatch.setattr(Batch, "step", held)
    with (
        served(engine) as (client, service),
        closing(client.open("POST", "/v1/completions", {"prompt": "hi"})) as asked,
    ):
        assert began.wait(LONG_S)
        service.give_up()
        response = asked.getresponse()
        may_go_on.set()
        assert (response.status, json.loads(response.read())["error"]["type"]) == (503, "server_error")


def test_a_server_of_a_model_that_cannot_chat_says_so(
    pair: Pair, tmp_path: Path, offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = variant(pair.target, tmp_path / "model")
    (folder / "tokenizer_config.json").unlink()

    def ask(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        asking = Thread(target=asked, args=(server, sockets[0].getsockname()[1]))
        asking.start()
        try:
            run(server, sockets)
        finally:
            asking.join()

    def asked(server: uvicorn.Server, port: int) -> None:
        try:
            client = Client(port)
            statuses.append(client.chat(USER).status)
            statuses.append(client.ask("POST", "/v1/completions", {"prompt": "hi", "max_tokens": 2}).status)
        finally:
            server.should_exit = True

    statuses, run = list[int](), uvicorn.Server.run
    monkeypatch.setattr(uvicorn.Server, "run", ask)
    result = offspec("serve", folder, "--draft", "none", "--device", "cpu", "--port", 0)
    assert statuses == [400, 200]
    note, refused, _, _ = result.err.splitlines()
    assert tells(refused, "chat", "refused", "template")
    assert tells(note, folder, "chat template", "completions")


@pytest.mark.parametrize(
    ("flag", "value", "word"),
    [
        ("--cors", "*", "--api-key"),
        ("--cors", "https://chat.example/path", "https://chat.example/path"),
        ("--alias", "a\nb", "--alias"),
        ("--api-key", "  ", "--api-key"),
        ("--api-key", "schlüssel", "--api-key"),
    ],
)
def test_a_flag_that_cannot_be_meant_is_refused(offspec: Offspec, flag: str, value: str, word: str) -> None:
    offspec("serve", "no-such-folder", "--port", 0, flag, value).refusal(2, flag, word)


def test_what_only_this_machine_can_mean() -> None:
    named = ("127.0.0.1", "::1", "127.0.0.2", "0.0.0.0", "a.b", "a.internal")
    assert [is_loopback(host) for host in named] == [True, True, True, False, False, False]


@pytest.mark.parametrize("variable", ["OFFSPEC_API_KEY", "OFFSPEC_SERVE_API_KEY"])
def test_an_empty_variable_opens_no_server(offspec: Offspec, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "")
    offspec("serve", "no-such-folder", "--port", 0).refusal(2, variable, "empty")
    assert _checked_key(" hush\n") == "hush"  # a flag takes precedence


def test_a_port_that_is_taken_is_refused_before_anything_is_loaded(offspec: Offspec) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = offspec("serve", "no-such-folder", "--port", port)
    result.refusal(2, port, "--port")


@pytest.mark.parametrize("key", [(), ("--api-key", "hush")], ids=["open", "key"])
def test_a_server_for_other_machines_warns_and_can_be_found(
    key: Sequence[str], offspec: Offspec, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = list[bool]()

    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        host, port = address()
        with socket.create_connection((host, port), timeout=LONG_S):
            reached.append(host != "0.0.0.0")

    def address() -> tuple[str, int]:
        found = re.search(r"http://([\d.]+):(\d+)/v1", "".join(told))
        assert found is not None
        return found[1], int(found[2])

    told, echo = list[str](), click.echo
    monkeypatch.setattr("offspec.cli.serve.click.echo", lambda text, **more: (told.append(text), echo(text, **more)))
    monkeypatch.setattr(uvicorn.Server, "run", run)
    result = offspec("serve", pair.target, "--draft", "none", "--host", "0.0.0.0", "--port", 0, *key)
    assert (result.code, reached) == (0, [True])
    assert ("OFFSPEC_API_KEY" in result.err) == (not key)
