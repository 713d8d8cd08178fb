"""A coding agent's recorded conversation, replayed: seconds to the first token of each turn, with and without reuse.

    scripts/fetch_prompts
    python -m benchmarks.agent_replay smollm2 --draft none

Each turn sends the recorded messages up to a user's one to `/v1/messages` of `offspec serve`, as a stream, and waits
for the first text. Between two turns another conversation asks. With reuse the server has its defaults; without, it has
`--parallel 1 --cache-ram 0`, so that the other conversation takes the only caches. Seconds are wall-clock and the
server's CPU seconds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from platformdirs import user_cache_path

FILE = user_cache_path("offspec", appauthor=False) / "prompts" / "agents.json"
CASE = "claude-2026-05-23-multiturn-8192-ff53ed1353"
WITHOUT_REUSE = ("--parallel", "1", "--cache-ram", "0")
OTHER = [{"role": "user", "content": "Name a colour."}]
ADDRESS = re.compile(r"http://127\.0\.0\.1:([0-9]+)/v1")
Message = dict[str, Any]


@dataclass(frozen=True)
class FirstToken:
    """tokens: of the prompt. scored: those that no cache held. Seconds until the first text."""

    tokens: int
    scored: int
    wall_s: float
    cpu_s: float


@contextmanager
def server(model: str, flags: Sequence[str]) -> Iterator[tuple[int, psutil.Process]]:
    """The port and the process of `offspec serve`."""
    command = [sys.executable, "-m", "offspec", "serve", model, "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = (ADDRESS.search(line) for line in process.stdout)
            port = next(int(line[1]) for line in lines if line is not None)
            yield port, psutil.Process(process.pid)
        finally:
            process.terminate()


def first_token(port: int, process: psutil.Process, messages: Sequence[Message], max_tokens: int) -> FirstToken:
    """Ask for an answer, and read its stream to the end."""

    def cpu_s() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    body = {"model": "any", "messages": messages, "max_tokens": max_tokens, "stream": True, "temperature": 0}
    began, began_cpu, usage, seconds = time.perf_counter(), cpu_s(), dict[str, int](), None
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=3600)) as connection:
        connection.request("POST", "/v1/messages", json.dumps(body))
        for line in connection.getresponse():
            event = json.loads(line[6:]) if line.startswith(b"data: ") else {}
            if event.get("type") == "error":
                sys.exit(f"Error: {event['error']['message']}")
            if event.get("type") == "message_start":
                usage = event["message"]["usage"]
                seconds = time.perf_counter() - began, cpu_s() - began_cpu
    if seconds is None:
        sys.exit("Error: the server refused a turn; give a smaller --turns, or a model with a longer context")
    scored = usage["input_tokens"]
    return FirstToken(scored + usage["cache_read_input_tokens"], scored, *seconds)


def turns_of(messages: Sequence[Message], most: int) -> list[list[Message]]:
    """The conversation up to each of the user's messages, the first `most` of them."""
    ends = [place for place, message in enumerate(messages) if message["role"] == "user"]
    return [[{"role": m["role"], "content": m["content"]} for m in messages[: end + 1]] for end in ends[:most]]


def replay(model: str, flags: Sequence[str], turns: Sequence[list[Message]], max_tokens: int) -> list[FirstToken]:
    results = list[FirstToken]()
    with server(model, flags) as (port, process):
        first_token(port, process, OTHER, 2)  # what is measured once, and compiled once
        for turn in turns:
            results.append(first_token(port, process, turn, max_tokens))
            first_token(port, process, OTHER, 2)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--context", default="8192")
    parser.add_argument("--file", type=Path, default=FILE)
    parser.add_argument("--case", default=CASE, help="the id of a conversation in the file")
    parser.add_argument("--turns", type=int, default=12, help="of the user; the first ones")
    parser.add_argument("--compare", help="turns to repeat without reuse, as in 4,8,11; default: all")
    parser.add_argument("--max-tokens", type=int, default=8)
    args = parser.parse_args()
    cases = json.loads(args.file.read_text(encoding="utf-8"))["cases"]
    messages = next(case["messages"] for case in cases if case["id"] == args.case)
    turns, flags = turns_of(messages, args.turns), ("--draft", args.draft, "--context", args.context)
    numbers = [int(number) for number in args.compare.split(",")] if args.compare else range(1, len(turns) + 1)
    reused = replay(args.model, flags, turns, args.max_tokens)
    compared = [turns[number - 1] for number in numbers]
    scored = dict(zip(numbers, replay(args.model, (*flags, *WITHOUT_REUSE), compared, args.max_tokens), strict=True))
    print(f"{'turn':>4} {'tokens':>7} {'new':>7} {'with s':>8} {'CPU s':>8} {'without s':>10} {'CPU s':>8}")
    for number, one in enumerate(reused, start=1):
        other = f"{scored[number].wall_s:10.2f} {scored[number].cpu_s:8.2f}" if number in scored else ""
        print(f"{number:4} {one.tokens:7} {one.scored:7} {one.wall_s:8.2f} {one.cpu_s:8.2f} {other}")
    without = {number: asdict(each) for number, each in scored.items()}
    print(json.dumps({"reused": [*map(asdict, reused)], "scored": without}))


if __name__ == "__main__":
    main()
