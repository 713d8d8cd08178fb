"""Renders chat templates in a separate process: a template is an untrusted program, which may not end.

jinja2's sandbox denies access to files and attributes, but allows endless loops and texts of terabytes, and C code in
it cannot be interrupted. So the system ends this process if a rendering takes too long or needs too much memory.
`chat_template.py` runs this file as a script that does not import offspec. Requests come on standard input, answers go
to standard output, each as four bytes of length and that many bytes of JSON.
"""

from __future__ import annotations

import json
import signal
import struct
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO

LENGTH = struct.Struct("<I")


def main() -> None:
    """Answer requests until the input ends. argv[1]: JSON with sys.path and the limits."""
    path, deadline_s, most_bytes, most_characters = json.loads(sys.argv[1])
    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))  # larger allocations raise MemoryError
    environment()  # outside the deadline: on a busy machine, importing jinja2 takes longer than most renderings
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while (request := receive(requests)) is not None:
        limit_time(deadline_s)
        answer = rendered(request, most_characters)
        limit_time(0)
        send(answers, answer)


def limit_time(seconds: float) -> None:
    """Let the system end this process (SIGALRM) after `seconds`; 0 removes the limit."""
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_REAL, seconds)


def receive(source: BinaryIO) -> Any:
    """The next message, None at the end."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    body = source.read(length)
    return json.loads(body) if len(body) == length else None


def send(sink: BinaryIO, message: Any) -> None:
    body = json.dumps(message).encode("ascii")
    sink.write(LENGTH.pack(len(body)) + body)
    sink.flush()


def rendered(request: dict[str, Any], most_characters: int) -> dict[str, str]:
    """{"text": …}, or {"error": …} with one line. request: the template's source and its variables."""
    try:
        text = template(request["source"]).render(request["variables"])
        if len(text) > most_characters:
            return {"error": f"it writes {len(text)} characters, more than the limit of {most_characters}"}
        return {"text": text}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as exc:  # noqa: BLE001 (a template is a program: it can raise anything)
        return {"error": " ".join(str(exc)[:2000].split()) or type(exc).__name__}


@lru_cache(maxsize=4)
def template(source: str) -> Any:  # jinja2.Template; jinja2 is imported once sys.path is right
    return environment().from_string(source)


@lru_cache(maxsize=1)
def environment() -> Any:  # jinja2.Environment
    """The environment that templates on the Hub expect: that of transformers' `utils/chat_template_utils.py`."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}…{% endgeneration %}` marks answers for training; rendering keeps its content."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return made


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter writes <, >, & and ' as escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


if __name__ == "__main__":
    main()
