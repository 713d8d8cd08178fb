"""Tries constraints in processes of their own: a few hundred bytes can keep the library's compiler busy for hours.

`grammar_trials.py` runs this file as a script. Its process has the vocabulary, and no threads. For each socket that it
is given it forks: the new process receives a constraint, compiles it, sends the seconds or the error, and ends. It also
ends when the other side closes the socket, which nothing could do to a thread.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from typing import Any

LIBRARY = "offspec.text.grammar_library"  # found once sys.path is right
LENGTH = struct.Struct("<I")
USUAL_S, NICE = 0.05, 10  # a trial that takes longer than usual ones leaves the processor to others


def main() -> None:
    """Fork for each socket until the input ends. argv[1]: JSON with sys.path and the limits of a trial."""
    path, most_cpu_s, most_bytes = json.loads(sys.argv[1])
    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    with socket.socket(fileno=os.dup(0)) as control:
        tokens = vocabulary(receive(control))
        control.sendall(b"r")  # ready
        while True:
            message, fds, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                return
            with socket.socket(fileno=fds[0]) as client, suppress(OSError):  # no memory for a fork: the socket closes
                if os.fork() == 0:
                    control.close()
                    run(client, tokens, most_cpu_s, most_bytes)


def run(client: socket.socket, tokens: Any, most_cpu_s: float, most_bytes: int) -> None:
    """In a fork: try the constraint that `client` sends. Does not return."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, most_cpu_s)  # SIGPROF ends the process, whatever it does
    try:
        threading.Thread(target=attempt, args=(client, receive(client), tokens), daemon=True).start()
        client.settimeout(USUAL_S)
        with suppress(TimeoutError):
            client.recv(1)  # until the other side closes
            os._exit(0)
        if sys.platform == "linux":
            for thread in os.listdir("/proc/self/task"):
                os.setpriority(os.PRIO_PROCESS, int(thread), NICE)
        client.settimeout(None)
        client.recv(1)
    finally:
        os._exit(1)


def attempt(client: socket.socket, request: dict[str, str], tokens: Any) -> None:
    """Send {"seconds": …} or {"error": …}, and end the process."""
    library = import_module(LIBRARY)
    try:
        library.new_matcher(tokens, library.Constraint(request["kind"], request["text"]), request["start"])
        send(client, {"seconds": time.process_time()})
    except library.UsageError as exc:
        send(client, {"error": str(exc)})
    finally:
        os._exit(0)


def vocabulary(described: dict[str, Any]) -> Any:
    """The library's tokenizer. described: as `ConstraintCompiler.vocabulary_for_trials` returns it."""
    from llguidance import LLTokenizer

    import_module(LIBRARY)  # once, not in each fork
    contents = [token.encode("latin-1") for token in described["tokens"]]
    ids_of, longest = {content: number for number, content in enumerate(contents)}, max(map(len, contents))

    class Tokens:
        is_tokenizer_wrapper = True
        bos_token_id = None
        eos_token_id = described["eos"]
        special_token_ids = described["special"]
        tokens = contents

        def __call__(self, text: str | bytes) -> list[int]:
            """Ids of the longest tokens: whether there are any is what matters, and the tokenizer is elsewhere."""
            rest, ids = text if isinstance(text, bytes) else text.encode(), list[int]()
            while rest:
                size = next((size for size in range(min(longest, len(rest)), 0, -1) if rest[:size] in ids_of), 0)
                if not size:
                    return []
                ids.append(ids_of[rest[:size]])
                rest = rest[size:]
            return ids

    tokens: Any = Tokens()
    return LLTokenizer(tokens, eos_token=described["final"])


def send(sink: socket.socket, message: Any) -> None:
    sink.sendall(packed(message))


def packed(message: Any) -> bytes:
    body = json.dumps(message).encode("ascii")
    return LENGTH.pack(len(body)) + body


def receive(source: socket.socket) -> Any:
    """The next message. Raises EOFError at the end."""
    (length,) = LENGTH.unpack(_exactly(source, LENGTH.size))
    return json.loads(_exactly(source, length))


def _exactly(source: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        if not (part := source.recv(size - len(content))):
            raise EOFError
        content += part
    return bytes(content)


if __name__ == "__main__":
    main()
