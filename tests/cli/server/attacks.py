"""Sequences by which one client harmed another, for a server on this machine; `scripts/replay_attacks` runs them."""

from __future__ import annotations

import http.client
import json
import random
import secrets
import select
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil

from ...offspec.text.hard_constraints import ENDLESS_TEXT
from .serving import USER, Client

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NUM_REPLIES, NUM_CONSTRAINTS, NUM_REFUSED, NUM_PROMPTS = 8, 40, 32, 6
REGEX_BYTES = 250_000  # of a hard regex; a server refuses longer ones than 256 KiB
NUM_ATTACKERS, NUM_PARAMETERS, NUM_DIGITS = 16, 2000, 20
BEFORE_S, LEAST_S = 2.0, 0.05  # until attackers have begun; what is no delay
MOST_GROWTH = 50 * 2**20
MOST_TOKENS = 1024
# A pass may take half a second more, or twice as long (docs/developing/serving.md); twice that here.
LATE_FACTOR, LATE_S = 4.0, 1.0


@dataclass(frozen=True)
class Finding:
    """What an attack did. figure: measured, with its unit. holds: whether the server withstood it."""

    attack: str
    figure: str
    holds: bool

    def __str__(self) -> str:
        return f"{self.attack}: {self.figure}: {'holds' if self.holds else 'FAILS'}"


def replay(client: Client, pid: int) -> Iterator[Finding]:
    """All attacks on the server, which is the process `pid`."""
    yield changed_prompts(client)
    yield refused_constraints(client, pid)
    yield hard_constraints(client)
    yield from blocked_constraints(client)
    yield long_prompts(client)


def pid_of(port: int) -> int:
    """The process that listens on this port. Raises LookupError."""
    for found in psutil.net_connections("tcp"):
        if found.status == psutil.CONN_LISTEN and found.laddr.port == port and found.pid is not None:
            return found.pid
    raise LookupError(f"no process of this user listens on port {port}; start the server, or give its port")


# ------------------------------------------------------------------------------------------------ another's reply


def changed_prompts(client: Client) -> Finding:
    """A client lets the server reply with texts of another's chats, in other tokens than the texts have by themselves.

    A high temperature draws them, so that words are cut anywhere.
    """
    num_changed = 0
    drawn = {"regex": "[a-z][a-z ]{28}[a-z]", "temperature": 50.0, "max_tokens": 64, "user": "attacker"}
    for _ in range(NUM_REPLIES):
        body = {"messages": [USER], **drawn, "seed": secrets.randbits(32)}
        reply = _checked(client.ask("POST", CHAT, body))["choices"][0]["message"]["content"]
        num_changed += _num_prompt_tokens(client, reply) != _num_prompt_tokens(client, reply, is_plain=False)
    figure = f"{num_changed} of {NUM_REPLIES} prompts changed"
    return Finding("replies to one client change another's prompts", figure, num_changed == 0)


def _num_prompt_tokens(client: Client, reply: str, *, is_plain: bool = True) -> int:
    """Of a chat with this reply. Servers remember tokens for plain chats only: without variables of the template."""
    messages = [USER, {"role": "assistant", "content": reply}, USER]
    more = {} if is_plain else {"chat_template_kwargs": {"variable_of_no_template": True}}
    body = {"messages": messages, "max_tokens": 1, "user": "victim", **more}
    return int(_checked(client.ask("POST", CHAT, body))["usage"]["prompt_tokens"])


# ------------------------------------------------------------------------------------------------ constraints


def hard_regex() -> str:
    """A new one that takes long to compile: thousands of random words."""
    chance = random.Random(secrets.randbits(64))
    return "|".join(f"{chance.getrandbits(64):016x}" for _ in range(REGEX_BYTES // 17))


def hard_constraints(client: Client) -> Finding:
    """A client asks for many answers with hard regexes, while another one asks for two tokens."""
    alone_s = _two_tokens_s(client)
    bodies = [_body(regex=hard_regex(), max_tokens=1, user="attacker") for _ in range(NUM_CONSTRAINTS)]
    with ExitStack() as stack:
        for body in bodies:
            stack.enter_context(closing(client.open("POST", TEXT, body)))
        under_s = _two_tokens_s(client)
    return _timed(f"{NUM_CONSTRAINTS} hard regexes delay two tokens of another client", alone_s, under_s)


def large_tools() -> dict[str, Any]:
    """A chat with tools whose schemas are too large, which the model may call."""
    parameters = {f"p{number}": {"type": "string"} for number in range(NUM_PARAMETERS)}
    schema = {"type": "object", "properties": parameters}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(128)]
    return {"messages": [USER], "max_tokens": 1, "tools": tools}


def endless_grammar() -> str:
    """A new one of a kilobyte that keeps the compiler busy for hours."""
    return f"{ENDLESS_TEXT}\n// {secrets.token_hex(8)}"


def blocked_constraints(client: Client) -> Iterator[Finding]:
    """NUM_ATTACKERS clients ask with constraints that are large or hard, and ask again, while one asks for digits."""
    tools = json.dumps(large_tools())
    makers: dict[str, Callable[[], tuple[str, Any]]] = {
        "tools of 7 MB": lambda: (CHAT, tools),
        "endless grammars": lambda: (TEXT, _body(grammar=endless_grammar(), max_tokens=1, user=secrets.token_hex(4))),
        "hard regexes": lambda: (TEXT, _body(regex=hard_regex(), max_tokens=1, user=secrets.token_hex(4))),
    }
    for name, make in makers.items():
        alone_s = _digits_s(client)
        with _attackers(client, make):
            under_s = _digits_s(client)
        figure = f"{alone_s:.3f} s alone, {under_s:.3f} s under attack"
        attack = f"{NUM_ATTACKERS} clients with {name} delay another one's digits"
        yield Finding(attack, figure, under_s <= 2 * alone_s + LEAST_S)


@contextmanager
def _attackers(client: Client, make: Callable[[], tuple[str, Any]]) -> Iterator[None]:
    """Clients that send such requests again and again; their connections end with the body."""
    is_over = threading.Event()

    def attack() -> None:
        while not is_over.is_set():
            path, body = make()
            with suppress(OSError, http.client.HTTPException), closing(client.open("POST", path, body)) as connection:
                while not is_over.is_set() and not select.select([connection.sock], [], [], 0.1)[0]:
                    pass

    threads = [threading.Thread(target=attack) for _ in range(NUM_ATTACKERS)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(BEFORE_S)
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _digits_s(client: Client) -> float:
    """The median seconds of an answer of some digits, by a regex that is new each time."""
    seconds = list[float]()
    for _ in range(NUM_DIGITS):
        began = time.monotonic()
        _checked(client.ask("POST", TEXT, _body(regex=f"[0-9]+|x{secrets.token_hex(4)}", max_tokens=16)))
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds)


def refused_constraints(client: Client, pid: int) -> Finding:
    """A client asks with many constraints that no text can satisfy. pid: the server's."""

    def refuse(number: int) -> None:
        for _ in range(number):
            reply = client.ask("POST", TEXT, _body(regex=f"({hard_regex()})[^\\s\\S]", user="attacker"))
            if reply.status != 400:
                raise ValueError(f"a regex that allows no text got status {reply.status}: {reply.body}")

    refuse(2)  # the compiler's own memory
    before = psutil.Process(pid).memory_info().rss
    refuse(NUM_REFUSED)
    growth = psutil.Process(pid).memory_info().rss - before
    figure = f"memory grew by {growth / 2**20:.1f} MiB"
    return Finding(f"{NUM_REFUSED} refused constraints keep memory", figure, growth <= MOST_GROWTH)


# ------------------------------------------------------------------------------------------------ long prompts


def long_prompts(client: Client) -> Finding:
    """A client sends long prompts, while another one's answer is under way. Measured: the longest wait for its text."""
    model = _checked(client.ask("GET", "/v1/models"))["data"][0]
    length, most = model["max_model_len"] - 2, model["meta"]["n_vocab"]
    chance = random.Random(secrets.randbits(64))
    prompts = [[chance.randrange(most // 2) for _ in range(length)] for _ in range(NUM_PROMPTS)]
    num_tokens = min(MOST_TOKENS, length // 2)
    alone_s = _longest_wait_s(client, num_tokens, [])
    under_s = _longest_wait_s(client, num_tokens, [_body(prompt=ids, max_tokens=1, user="attacker") for ids in prompts])
    attack = f"{NUM_PROMPTS} prompts of {length} tokens hold up another client's answer"
    return _timed(attack, alone_s, under_s)


def _longest_wait_s(client: Client, num_tokens: int, others: Sequence[Any]) -> float:
    """The longest time between two parts of a stream, after whose first part the other requests are sent.

    Once they are answered, the stream is left.
    """
    with ExitStack() as stack:
        stream = stack.enter_context(closing(client.open("POST", TEXT, _body(max_tokens=num_tokens, stream=True))))
        parts = _parts(stream.getresponse())
        next(parts)
        before, longest_s = time.monotonic(), 0.0
        waiting = [stack.enter_context(closing(client.open("POST", TEXT, body))) for body in others]
        for _ in parts:
            now = time.monotonic()
            longest_s, before = max(longest_s, now - before), now
            answered = select.select([connection.sock for connection in waiting], [], [], 0)[0] if waiting else []
            if waiting and len(answered) == len(waiting):
                break
        for connection in waiting:
            if (status := connection.getresponse().status) != 200:
                raise ValueError(f"a long prompt got status {status}, so the attack means nothing")
    return longest_s


def _parts(response: http.client.HTTPResponse) -> Iterator[Any]:
    """The events of a stream, without signs of life. Raises ValueError for an error."""
    while line := response.readline():
        if not line.startswith(b"data: {"):
            continue
        part = json.loads(line.removeprefix(b"data: "))
        if "error" in part:
            raise ValueError(f"the stream ended with an error: {part['error']['message']}")
        yield part


# ------------------------------------------------------------------------------------------------ measured


def _timed(attack: str, alone_s: float, under_s: float) -> Finding:
    return Finding(attack, f"{alone_s:.2f} s alone, {under_s:.2f} s under attack", not is_late(alone_s, under_s))


def is_late(alone_s: float, under_s: float) -> bool:
    return under_s > LATE_FACTOR * alone_s + LATE_S


def _two_tokens_s(client: Client) -> float:
    """Seconds until a request for two tokens is answered."""
    began = time.monotonic()
    _checked(client.ask("POST", TEXT, _body(max_tokens=2)))
    return time.monotonic() - began


def _body(**fields: Any) -> dict[str, Any]:
    body = {"prompt": "def area(", "ignore_eos": True, "user": "victim", **fields}
    return {name: body[name] for name in body if name != "ignore_eos" or fields.keys().isdisjoint({"regex", "grammar"})}


def _checked(reply: Any) -> Any:
    """The body of an answer. Raises ValueError for an error."""
    if reply.status != 200:
        raise ValueError(f"the server answered with status {reply.status}: {reply.body}")
    return reply.body


def report(findings: Iterator[Finding], show: Callable[[str], object]) -> int:
    """Show a line for each finding; 1 if an attack succeeded, else 0."""
    status = 0
    for finding in findings:
        show(str(finding))
        status |= not finding.holds
    return status
