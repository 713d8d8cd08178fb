"""How `offspec serve` behaves towards those who wait: signs of life, the queue, whose turn it is, what is counted."""

from __future__ import annotations

import http.client
import json
import re
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from threading import Event
from typing import Any

import pytest

from offspec import Engine, SamplingParams
from offspec.cli.server.metrics import BOUNDS_S, Metrics, Times, log_line, one_line, progress_line
from offspec.cli.server.service import Service
from offspec.errors import NumericalError
from offspec.running.passes import run_pass
from offspec.running.sequence import Sequence
from offspec.stats import Stats

from ...pair import Pair, variant
from ...refusals import check_message
from ..conftest import finish, start
from .serving import LONG_S, Client, gauge, port_of, served, until

TEXT = "/v1/completions"
SHORT = {"prompt": "hi", "max_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Iterator[Engine]:
    with Engine.load(str(pair.target), draft=str(pair.draft), device="cpu", cache_ram="1MiB") as found:
        yield found


class Gate:
    """Lets passes through only while it is open."""

    def __init__(self) -> None:
        self.is_open, self.reached, self.error = Event(), Event(), list[Exception]()
        self.prompts: list[Any] = []


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Generator[Gate, None, None]:
    gate, begin = Gate(), Service._begin

    def noted(self: Service, ticket: Sequence) -> None:
        gate.prompts.append(ticket.prompt)
        begin(self, ticket)

    def held(*args: Any) -> Any:
        gate.reached.set()
        assert gate.is_open.wait(LONG_S)
        if gate.error:
            raise gate.error.pop()
        return run_pass(*args)

    monkeypatch.setattr(Service, "_begin", noted)
    monkeypatch.setattr("offspec.running.batch.run_pass", held)
    yield gate
    gate.is_open.set()


@contextmanager
def asked(client: Client, **fields: Any) -> Iterator[http.client.HTTPResponse]:
    with closing(client.open("POST", TEXT, {**SHORT, **fields})) as connection:
        yield connection.getresponse()


# ------------------------------------------------------------------------------------------------ signs of life


@pytest.mark.usefixtures("_often")
def test_a_stream_shows_life_while_it_waits_and_while_the_prompt_is_read(engine: Engine, gate: Gate) -> None:
    with (
        served(engine, parallel=1) as (client, _),
        asked(client, stream=True) as running,
        asked(client, stream=True) as waiting,
    ):
        for response, told in ((running, b": running\n"), (waiting, b": waiting\n")):
            assert (response.status, response.getheader("x-accel-buffering")) == (200, "no")
            until(lambda response=response, told=told: response.readline() == told)
            assert [response.readline() for _ in range(2)] == [b"\n", told]
        gate.is_open.set()
        for response in (running, waiting):
            *_, last, done, end = response.read().decode().split("\n\n")
            assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
            assert (done, end) == ("data: [DONE]", "")


@pytest.mark.usefixtures("_often")
def test_a_whole_answer_that_takes_long_begins_with_white_space(engine: Engine, gate: Gate) -> None:
    with served(engine) as (client, _):
        with asked(client) as response:
            assert (response.status, response.getheader("content-type")) == (200, "application/json")
            assert response.read(3) == b"\n\n\n"
            gate.is_open.set()
            content = response.read()
        assert content.startswith((b"\n", b"{"))
        late = json.loads(content)
        with asked(client) as response:
            assert json.loads(response.read())["choices"] == late["choices"]


@pytest.mark.usefixtures("_often")
def test_a_late_failure_is_no_answer(engine: Engine, gate: Gate) -> None:
    """The status is sent, so that the connection ends in the middle of the body, which says why."""
    gate.error.append(NumericalError("not a number"))
    with served(engine) as (client, _):
        with asked(client) as response:
            assert response.read(1) == b"\n"
            gate.is_open.set()
            with pytest.raises(http.client.IncompleteRead) as caught:
                response.read()
        assert json.loads(caught.value.partial)["error"]["message"] == "not a number"
        assert client.ask("POST", TEXT, SHORT).status == 200


# ------------------------------------------------------------------------------------------------ the queue


def test_a_full_queue_refuses_and_has_room_when_one_has_ended(engine: Engine, gate: Gate) -> None:
    with served(engine, most_waiting=1, parallel=1) as (client, _), asked(client, stream=True) as first:
        assert gate.reached.wait(LONG_S)
        with asked(client, stream=True, seed=1) as second:
            with asked(client) as third:
                assert (third.status, third.getheader("retry-after")) == (429, "5")
                error = json.loads(third.read())["error"]
            check_message(error["message"], "queue", "full", 5)
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert client.ask("POST", TEXT, {**SHORT, "prompt": ""}).status == 429  # nothing is read before
            gate.is_open.set()
            assert first.read().endswith(b"[DONE]\n\n")
            assert second.read().endswith(b"[DONE]\n\n")
        assert client.ask("POST", TEXT, SHORT).status == 200
        assert client.ask("POST", TEXT, {**SHORT, "n": 3}).status == 400  # never so many
        assert gauge(client, 'requests_total{outcome="refused"}') == 2


def test_a_client_that_leaves_the_queue_frees_its_place(engine: Engine, gate: Gate) -> None:
    with served(engine, most_waiting=1, parallel=1) as (client, _), asked(client, stream=True) as first:
        assert gate.reached.wait(LONG_S)
        with closing(client.open("POST", TEXT, {**SHORT, "prompt": "of one who leaves"})):
            until(lambda: gauge(client, "requests_waiting") == 1)
        until(lambda: gauge(client, "requests_waiting") == 0)
        with asked(client, stream=True) as third:
            gate.is_open.set()
            assert first.read().endswith(b"[DONE]\n\n")
            assert third.read().endswith(b"[DONE]\n\n")
    assert len(gate.prompts) == 2


def test_users_take_turns(engine: Engine, gate: Gate) -> None:
    """One with many requests does not hold up another; a user's own are in the order of arrival."""
    order = ["a1", "a2", "a3", "b1", "c1", "b2"]
    with served(engine, parallel=1) as (client, service), asked(client, stream=True, user="a") as first:
        assert gate.reached.wait(LONG_S)
        opened = []
        for number, name in enumerate(order, 1):
            opened.append(client.open("POST", TEXT, {**SHORT, "prompt": name, "user": name[0], "stream": True}))
            until(lambda number=number: gauge(client, "requests_waiting") == number)
        # Requests whose prompts are being encoded count as waiting, too.
        until(lambda: service._num_encoding == 0 and gauge(client, "requests_waiting") == len(order))
        gate.is_open.set()
        first.read()
        for connection in opened:
            with closing(connection):
                assert connection.getresponse().read().endswith(b"[DONE]\n\n")
    begun = [engine.tokenizer.decode(prompt) for prompt in gate.prompts[1:]]
    assert begun == ["a1", "b1", "c1", "a2", "b2", "a3"]


# ------------------------------------------------------------------------------------------------ what is kept


def test_a_request_between_two_turns_does_not_cost_the_conversation(pair: Pair, tmp_path_factory: Any) -> None:
    folder = variant(pair.target, tmp_path_factory.mktemp("long") / "target", max_position_embeddings=512)
    loaded = Engine.load(str(folder), draft="none", device="cpu", cache_ram=None)
    chat = [{"role": "user", "content": "tell me of the width and the height of rooms, and of doors"}]
    title = {"role": "user", "content": "a title of three words for a conversation that begins with: tell me of the"}
    with loaded as engine, served(engine) as (client, _):
        before = client.chat(*chat, max_tokens=24, ignore_eos=True).body
        client.chat(title)
        chat += [before["choices"][0]["message"], {"role": "user", "content": "and then?"}]
        usage = client.chat(*chat).body["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= before["usage"]["total_tokens"] - 2
        assert gauge(client, "parked_texts") == 2
        assert gauge(client, "parked_bytes") > 0


# ------------------------------------------------------------------------------------------------ several answers


def test_several_answers_are_those_of_their_seeds(engine: Engine) -> None:
    prompt = " ".join(f"def area{number}(width, height): return width" for number in range(4))
    body = {"prompt": prompt, "max_tokens": 8, "n": 3, "temperature": 1.0, "seed": 7, "ignore_eos": True}
    said = ["".join(step.text for step in engine.generate(prompt, params(seed))) for seed in (7, 8, 9)]
    assert len(set(said)) > 1
    with served(engine) as (client, _):
        reply = client.ask("POST", TEXT, body).body
        *parts, last = client.stream(TEXT, {**body, "stream_options": {"include_usage": True}})
    assert [choice["text"] for choice in reply["choices"]] == said
    assert [figures["seed"] for figures in reply["offspec"]] == [7, 8, 9]
    assert [figures["num_prefilled_tokens"] for figures in reply["offspec"]][1:] == [1, 1]  # the prompt is scored once
    texts = ["", "", ""]
    for part in parts:
        texts[part["choices"][0]["index"]] += part["choices"][0]["text"]
    assert texts == said
    assert reply["usage"]["completion_tokens"] == last["usage"]["completion_tokens"] == 24


def params(seed: int) -> SamplingParams:
    return SamplingParams(8, temperature=1.0, seed=seed, ignore_eos=True)


@pytest.mark.usefixtures("_often")
def test_of_several_answers_none_is_left_behind(engine: Engine, gate: Gate) -> None:
    body = {**SHORT, "prompt": "def area(width, height): return width\n" * 4, "n": 3, "stream": True}  # worth copying
    with served(engine) as (client, _):
        with closing(client.open("POST", TEXT, body)) as connection:
            connection.getresponse()
            assert gate.reached.wait(LONG_S)
            until(lambda: gauge(client, "requests_waiting") == 2)  # the others, which may be encoded meanwhile
            assert gauge(client, "requests_running") == 1
        until(lambda: gauge(client, "requests_waiting") == 0)  # by now the server knows that the client has gone
        gate.is_open.set()
        until(lambda: gauge(client, "requests_running") + gauge(client, "requests_waiting") == 0)
        until(lambda: gauge(client, 'requests_total{outcome="left"}') == 3)
        assert len(gate.prompts) == 1


# ------------------------------------------------------------------------------------------------ what is counted


def test_the_figures_are_in_prometheus_format() -> None:
    metrics, stats = Metrics(), Stats(num_prompt_tokens=9, num_prefilled_tokens=4, num_tokens=3, num_passes=2)
    metrics.ended("stop", stats, Times(0.5, 1.5, 4.5))
    metrics.ended("stop", stats, Times(0.0, None, 1000.0))
    metrics.ended("left", None, Times(1.0, None, 1.0))
    lines = metrics.text({"requests_running": ("Now.", 2)}).splitlines()
    assert metrics.usual_answer_s == (4.0 + 1000.0) / 2
    assert {'offspec_requests_total{outcome="stop"} 2.0', 'offspec_requests_total{outcome="left"} 1.0'} <= set(lines)
    assert {"offspec_requests_running 2.0", "offspec_cached_tokens_total 10.0", "offspec_passes_total 4.0"} <= set(
        lines
    )
    buckets = [line for line in lines if line.startswith("offspec_request_seconds_bucket")]
    assert len(buckets) == len(BOUNDS_S) + 1
    assert buckets[-2:] == [
        'offspec_request_seconds_bucket{le="900.0"} 1.0',
        'offspec_request_seconds_bucket{le="+Inf"} 2.0',
    ]
    shape = r"# (HELP|TYPE) offspec_\w+ .+|offspec_\w+(\{\w+=\"[^\"]+\"\})? [\d.e+]+"
    assert [line for line in lines if not re.fullmatch(shape, line)] == []


def test_the_log_has_a_line_an_answer() -> None:
    stats = Stats(num_prompt_tokens=9, num_prefilled_tokens=4, num_tokens=8, num_passes=2)
    line = log_line("chat", "stop", stats, Times(1.0, 1.5, 5.0))
    for told in ("chat: stop", "9 tokens (5 cached)", "8 tokens at 2.00 tokens/s", "waited 1.0 s", "after 1.5 s"):
        assert told in line
    assert "waited 2.0 s" in log_line("text", "left", None, Times(2.0, None, 2.0))
    assert one_line("a\x1b[31m\nb" + "c" * 300) == "a [31m b" + "c" * 192 + "…"


def test_the_log_tells_of_answers_under_way(engine: Engine, gate: Gate) -> None:
    """When they begin, every 30 s, and at their end; never of their text."""
    lines, now = list[str](), [1000.0]
    body = {**SHORT, "prompt": "a secret", "stream": True}
    with served(engine, notify=lines.append, clock=lambda: now[0]) as (client, service):
        with asked(client, **body) as response:
            assert gate.reached.wait(LONG_S)
            now[0] += 29.9
            service.tell_progress()
            num_prompt = len(gate.prompts[0])
            assert lines == [f"text 1: begins, prompt {num_prompt} tokens, waited 0.0 s"]
            for seconds in (30, 60):
                now[0] = 1000.0 + seconds
                until(lambda seconds=seconds: lines[-1] == f"text 1: running for {seconds} s, no token yet")
                service.tell_progress()
            gate.is_open.set()
            response.read()
        until(lambda: len(lines) == 4)
        now[0] += 60
        service.tell_progress()
    assert lines[3:] == [line for line in lines if line.startswith("text 1: length, ")]
    assert "60.0 s in all" in lines[3]
    assert "secret" not in "".join(lines)
    assert progress_line("chat 2", Stats(num_tokens=12), Times(2.0, 3.0, 62.0)).endswith(
        "running for 60 s, answer 12 tokens so far at 0.20 tokens/s"
    )


def test_the_context_is_told_in_other_servers_words(engine: Engine) -> None:
    with served(engine) as (client, _):
        (model,) = client.ask("GET", "/v1/models").body["data"]
    assert model["max_model_len"] == model["context_length"] == model["meta"]["n_ctx"] == engine.max_context
    assert model["meta"]["n_ctx_train"] >= engine.max_context


# ------------------------------------------------------------------------------------------------ the end

SLOW_PASS = """
import sys, time
from offspec.cli import main
from offspec.errors import HardwareError
from offspec.running import batch
def wait(*args):
    time.sleep(10**6)  # as a pass that streams a large model
def fail(*args):
    raise HardwareError("the disk is gone")
batch.run_pass = wait
assert main.run(sys.argv[1:]) == 130
batch.run_pass = fail
assert main.run(sys.argv[1:]) == 1
batch.run_pass = wait
main.main()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
def test_the_end_does_not_wait_for_a_pass_and_a_supervisor_learns_of_a_failure(pair: Pair) -> None:
    """Servers one after the other in one process end by SIGINT, of themselves, and by SIGTERM."""
    args = ("serve", pair.target, "--draft", "none", "--device", "cpu", "--port", 0, "--parallel", 1)
    process = start(*args, program=("-c", SLOW_PASS))
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            client = Client(port_of(process))
            with closing(client.open("POST", TEXT, SHORT)) as whole, asked(client, stream=True) as stream:
                assert stream.readline().startswith(b": ")
                until(lambda client=client: gauge(client, "requests_running") == 1)
                process.send_signal(number)
                reply = whole.getresponse()
                assert (reply.status, json.loads(reply.read())["error"]["type"]) == (503, "server_error")
                *_, event, _, _ = stream.read().decode().split("\n\n")
                check_message(json.loads(event.strip().removeprefix("data: "))["error"]["message"], "stopping")
            if number == signal.SIGINT:
                assert Client(port_of(process)).ask("POST", TEXT, SHORT).status == 500
    finally:
        if sys.exc_info()[0] is not None:
            process.kill()
        result = finish(process, LONG_S)
    assert (result.code, "Traceback" in result.err) == (0, False), result.err
    assert "Error: the disk is gone" in result.err
    assert "text 1: begins, prompt 2 tokens" in result.err
