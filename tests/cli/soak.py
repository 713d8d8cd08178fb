"""Many clients at one server that may open few files: every answer right, memory flat, /health answers throughout."""

from __future__ import annotations

import http.client
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread

NUM_PROMPTS, NUM_TOKENS, WARM_UP = 12, 24, 20
LEAVES = 0.15  # share of the clients that go in the middle of their answer
WAIT_S = 300.0


@dataclass
class Soak:
    """What was found. bytes_before: of the server's memory after the first requests; wrong: what must not be."""

    num_answers: int = 0
    num_left: int = 0
    num_healthy: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    wrong: list[str] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock, repr=False)


def soak(target: object, draft: object, num_requests: int, num_clients: int, num_files: int = 256) -> Soak:
    """Ask a server of this pair so often, by so many clients at a time; it may open `num_files` files."""
    found, expected = Soak(), plain_texts(target)
    with serving([target, "--draft", draft], num_files) as (port, pid):
        for number in range(WARM_UP):
            ask(port, number % NUM_PROMPTS)
        found.bytes_before = resident_bytes(pid)
        done = Event()
        watcher = Thread(target=watch_health, args=(port, done, found))
        watcher.start()
        with ThreadPoolExecutor(num_clients) as pool:
            for number in range(num_requests):
                pool.submit(one, port, number, expected, found)
        done.set()
        watcher.join()
        found.bytes_after = resident_bytes(pid)
    return found


def one(port: int, number: int, expected: Sequence[str], found: Soak) -> None:
    chance = random.Random(number)
    prompt = chance.randrange(NUM_PROMPTS)
    try:
        if chance.random() < LEAVES:
            leave(port, prompt)
            with found.lock:
                found.num_left += 1
            return
        answer = ask(port, prompt)
        with found.lock:
            found.num_answers += 1
            if answer != expected[prompt]:
                found.wrong.append(f"request {number}: {answer!r}, not {expected[prompt]!r}")
    except Exception as exc:  # noqa: BLE001 (it is told)
        with found.lock:
            found.wrong.append(f"request {number}: {type(exc).__name__}: {exc}")


def watch_health(port: int, done: Event, found: Soak) -> None:
    while not done.wait(0.05):
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as connection:
                connection.request("GET", "/health")
                assert connection.getresponse().status == 200
            found.num_healthy += 1
        except Exception as exc:  # noqa: BLE001 (it is told)
            found.wrong.append(f"health: {type(exc).__name__}: {exc}")


def ask(port: int, prompt: int) -> str:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as connection:
        connection.request("POST", "/v1/completions", body(prompt, stream=False))
        reply = json.loads(connection.getresponse().read())
        text: str = reply["choices"][0]["text"]
        return text


def leave(port: int, prompt: int) -> None:
    """After the first part of a stream."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as connection:
        connection.request("POST", "/v1/completions", body(prompt, stream=True))
        connection.getresponse().read(20)


def body(prompt: int, *, stream: bool) -> str:
    asked = {"prompt": f"def area{prompt}(x, y):", "max_tokens": NUM_TOKENS, "temperature": 0.7, "seed": prompt}
    return json.dumps({**asked, "stream": stream, "ignore_eos": True})


def resident_bytes(pid: int) -> int:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


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
    """What plain decoding says to each prompt."""
    with serving([target, "--draft", "none", "--budget", "0"], 256) as (port, _):
        return [ask(port, number) for number in range(NUM_PROMPTS)]


def report(found: Soak, began_s: float) -> str:
    growth = (found.bytes_after - found.bytes_before) / 2**20
    return (
        f"{found.num_answers} answers, {found.num_left} left, {found.num_healthy} times healthy in "
        f"{time.monotonic() - began_s:.0f} s; memory grew by {growth:.1f} MiB; {len(found.wrong)} wrong"
    )
