"""Many clients at one server that may open few files: every answer right, memory flat, /health answers throughout."""

from __future__ import annotations

import http.client
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import openai

from offspec import Engine, SamplingParams

NUM_PROMPTS, NUM_TOKENS, WARM_UP = 12, 24, 20
NUM_CLIENTS_SERVED = 8  # half of them under way, half of them in the queue
LATEST_S = 0.5  # after which impatient clients go
LEAVES = 0.15  # share of the clients that go before the end of their answer
WAIT_S = 300.0


@dataclass
class Soak:
    """What was found. bytes_before, files_before: the server's after the first requests; wrong: what must not be."""

    num_answers: int = 0
    num_left: int = 0
    num_refused: int = 0
    num_healthy: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    files_before: int = 0
    files_after: int = 0
    wrong: list[str] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock, repr=False)


def soak(
    target: object, draft: object, num_requests: int, num_clients: int, num_files: int = 256, seconds: float = 0.0
) -> Soak:
    """Ask a server of this pair so often, and at least so long, by so many of OpenAI's clients at a time.

    It may open `num_files` files. Its queue is shorter than the clients are many, so it refuses some requests.
    """
    found, expected = Soak(), plain_texts(target)
    flags = ("--draft", draft, "--parallel", NUM_CLIENTS_SERVED // 2, "--max-queue", NUM_CLIENTS_SERVED // 2)
    with serving([target, *flags], num_files, subprocess.DEVNULL) as (port, pid):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0, timeout=WAIT_S)
        for number in range(WARM_UP):
            ask(client, number % NUM_PROMPTS, streams=number % 2 == 0)
        found.bytes_before, found.files_before = resident_bytes(pid), num_open_files(pid)
        done, end_s, numbers = Event(), time.monotonic() + seconds, count()
        watcher = Thread(target=watch_health, args=(port, done, found))
        watcher.start()

        def ask_often() -> None:
            while (number := next(numbers)) < num_requests or time.monotonic() < end_s:
                one(client, number, expected, found)

        with ThreadPoolExecutor(num_clients) as pool:
            for _ in range(num_clients):
                pool.submit(ask_often)
        done.set()
        watcher.join()
        client.close()
        found.bytes_after, found.files_after = resident_bytes(pid), num_open_files(pid)
    return found


def one(client: openai.OpenAI, number: int, expected: Sequence[str], found: Soak) -> None:
    """One request: whole, streamed, or left in the middle. One that the queue refuses is repeated."""
    chance = random.Random(number)
    prompt, leaves, streams = chance.randrange(NUM_PROMPTS), chance.random() < LEAVES, chance.random() < 0.5
    while True:
        try:
            answer = None if leaves else ask(client, prompt, streams=streams)
            if leaves:
                leave(client, prompt, chance.random() * LATEST_S if streams else None)
        except openai.RateLimitError as exc:
            retry_s = exc.response.headers.get("retry-after", "")
            with found.lock:
                found.num_refused += 1
                if not retry_s.isdecimal():
                    found.wrong.append(f"request {number}: retry after {retry_s!r}")
            time.sleep(0.05)
            continue
        except Exception as exc:  # noqa: BLE001 (it is told)
            with found.lock:
                found.wrong.append(f"request {number}: {type(exc).__name__}: {exc}")
            return
        with found.lock:
            found.num_left += leaves
            found.num_answers += not leaves
            if not leaves and answer != expected[prompt]:
                found.wrong.append(f"request {number}: {answer!r}, not {expected[prompt]!r}")
        return


def watch_health(port: int, done: Event, found: Soak) -> None:
    while not done.wait(0.05):
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as connection:
                connection.request("GET", "/health")
                assert connection.getresponse().status == 200
            found.num_healthy += 1
        except Exception as exc:  # noqa: BLE001 (it is told)
            found.wrong.append(f"health: {type(exc).__name__}: {exc}")


def ask(client: openai.OpenAI, prompt: int, *, streams: bool) -> str:
    if not streams:
        return client.completions.create(**body(prompt)).choices[0].text
    return "".join(part.choices[0].text for part in client.completions.create(**body(prompt), stream=True))


def leave(client: openai.OpenAI, prompt: int, after_s: float | None) -> None:
    """After these seconds, whatever the server then does; or after the first part of a stream."""
    if after_s is not None:
        with suppress(openai.APITimeoutError):
            client.with_options(timeout=max(after_s, 0.001)).completions.create(**body(prompt))
        return
    with client.completions.create(**body(prompt), stream=True) as parts:
        next(iter(parts))


def body(prompt: int) -> dict[str, Any]:
    asked = {"model": "any", "prompt": text_of(prompt), "max_tokens": NUM_TOKENS, "temperature": 0.7, "seed": prompt}
    return {**asked, "extra_body": {"ignore_eos": True}}


def text_of(prompt: int) -> str:
    return f"def area{prompt}(x, y):"


def resident_bytes(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def num_open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def processor_s(pid: int) -> float:
    """Seconds of all cores that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(model: Sequence[object], num_files: int, errors: int | None = None) -> Iterator[tuple[int, int]]:
    """Port and process id of a server. errors: the descriptor of a file for what it says there."""
    command = [sys.executable, "-m", "offspec", "serve", *map(str, model), "--port", "0"]
    process = subprocess.Popen(
        ["bash", "-c", f'ulimit -n {num_files} && exec "$@"', "bash", *command],
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        yield int(line.partition("/v1")[0].rpartition(":")[2]), process.pid
    finally:
        process.terminate()
        process.wait(WAIT_S)
        process.stdout.close()


def plain_texts(target: object) -> list[str]:
    """What plain decoding says to each prompt, as `offspec run` does."""
    with Engine.load(str(target), draft="none", device="cpu") as engine:
        return [
            engine.complete(text_of(prompt), SamplingParams(NUM_TOKENS, temperature=0.7, seed=prompt, ignore_eos=True))
            for prompt in range(NUM_PROMPTS)
        ]


def report(found: Soak, began_s: float) -> str:
    growth = (found.bytes_after - found.bytes_before) / 2**20
    return (
        f"{found.num_answers} answers, {found.num_left} left, {found.num_refused} times refused, "
        f"{found.num_healthy} times healthy in {time.monotonic() - began_s:.0f} s; "
        f"memory grew by {growth:.1f} MiB from {found.bytes_before / 2**20:.0f} MiB, "
        f"open files from {found.files_before} to {found.files_after}; {len(found.wrong)} wrong"
    )
