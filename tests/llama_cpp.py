"""llama.cpp as an oracle for token ids, in a process of its own: what ends it ends no tests.

It is the package `xllamacpp`, whose server answers `/tokenize`. Run as a program, this reads a line of JSON for each
question, [file, texts], and writes one with the ids of each text, without BOS, special tokens in texts included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class LlamaCpp:
    """Answers for one file after the other; all of them stay open until the end."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ids(self, file: Path, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, by the tokenizer inside of a GGUF file."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(file), texts]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"llama.cpp ended over {file}: {self._process.wait()}"
        found: list[list[int]] = json.loads(answer)
        return found


@contextmanager
def running() -> Iterator[LlamaCpp]:
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield LlamaCpp(process)
        finally:
            process.kill()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # llama.cpp writes of its own accord
    servers: dict[str, Any] = {}
    for line in sys.stdin:
        file, texts = json.loads(line)
        server = servers[file] = servers.get(file) or _server(file)
        answers.write(json.dumps([_tokenize(server.listening_address, text) for text in texts]) + "\n")
        answers.flush()


def _server(file: str) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx = params.n_batch = params.n_ubatch = 64
    params.n_parallel, params.warmup, params.verbosity, params.n_gpu_layers = 1, False, -1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    return xllamacpp.Server(params)


def _tokenize(address: str, text: str) -> list[int]:
    body = json.dumps({"content": text, "add_special": False, "parse_special": True}).encode()
    request = urllib.request.Request(address + "/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return list(json.load(answer)["tokens"])


if __name__ == "__main__":
    main()
