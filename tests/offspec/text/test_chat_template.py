"""Templates that do not end, or that write without end, are ended; the next rendering is as if they had not been."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from offspec.errors import TokenizerError
from offspec.text import chat_template, template_worker
from offspec.text.chat_template import Worker

from ...refusals import refused

SIMPLE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CHAT = [{"role": "user", "content": "the cat \ud800 😀"}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
# Each has an alarm or a limit of its own: of loops, memory, numbers, filters and lists.
ENDLESS = {
    "loops": LOOP + "{% endfor %}" * 3,
    "repeating": "{{ 'a' * 10**10 }}",
    "a power": "{{ 9 ** (9 ** 9) }}",
    "batch": "{{ [1] | batch(10**10, 'a') | list }}",
    "format": "{{ '%2000000000d' % 1 }}",
    "doubling": "{% set ns = namespace(x='aa') %}"
    "{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
}


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker(deadline_s=0.5, most_bytes=2**27)
    yield made
    made.close()


def ask(worker: Worker, source: str) -> dict[str, str]:
    return worker.ask({"source": source, "variables": {"messages": CHAT}})


@pytest.mark.slow
def test_a_template_that_does_not_end_is_ended(worker: Worker) -> None:
    for name, source in ENDLESS.items():
        try:
            answer = ask(worker, source)
        except TokenizerError as exc:
            answer = {"error": str(exc)}
        assert "\n" not in answer["error"], name
        assert ask(worker, SIMPLE) == {"text": "user: the cat \ud800 😀\n"}, name


def test_a_text_that_is_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MOST_CHARACTERS", 1000)
    worker = Worker()
    assert ask(worker, "{{ 'a' * 1000 }}")["text"] == "a" * 1000
    assert "writes 1001 characters, more than the limit of 1000" in ask(worker, "{{ 'a' * 1001 }}")["error"]
    worker.close()


def test_one_process_renders_for_many_threads(worker: Worker) -> None:
    found = list[str]()
    threads = [Thread(target=lambda: found.append(ask(worker, SIMPLE)["text"])) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == ["user: the cat \ud800 😀\n"] * 16


def test_an_interrupted_exchange_does_not_answer_the_next(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(source: object) -> None:
        raise KeyboardInterrupt

    ask(worker, SIMPLE)
    with monkeypatch.context() as patch:
        patch.setattr(template_worker, "receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ask(worker, "the answer that nobody read")
    assert ask(worker, "another") == {"text": "another"}


def test_a_process_that_cannot_be_started_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with refused(TokenizerError, "process", "started"):
        ask(Worker(), SIMPLE)


def test_a_forked_process_has_a_worker_of_its_own(worker: Worker) -> None:
    ask(worker, SIMPLE)
    if (child := os.fork()) == 0:
        try:
            os._exit(0 if ask(worker, "child") == {"text": "child"} else 1)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert ask(worker, "parent") == {"text": "parent"}
