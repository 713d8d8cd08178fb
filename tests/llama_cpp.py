"""llama.cpp as an oracle for token ids and for greedy texts, in a process of its own: what ends it ends no tests.

It is the package `xllamacpp`, whose server answers over HTTP. Run as a program, this reads a line of JSON for each
question, [file, path, requests], and writes one with the answers to the requests to that path.
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
        """Ids of each text, by the tokenizer inside of a GGUF file, without BOS; special tokens are read as such."""
        asked = [{"content": text, "add_special": False, "parse_special": True} for text in texts]
        return [answer["tokens"] for answer in self._ask(file, "tokenize", asked)]

    def greedy(self, file: Path, prompt: Sequence[int], count: int) -> list[int]:
        """The most likely continuation of a prompt, with a KV cache in fp32; shorter where the text ends."""
        asked = {"prompt": list(prompt), "n_predict": count, "temperature": 0.0, "return_tokens": True}
        return list(self._ask(file, "completion", [asked])[0]["tokens"])

    def infill(self, file: Path, prefix: str, suffix: str) -> tuple[str, int]:
        """The prompt for a text with a gap, and the number of its tokens."""
        asked = {"input_prefix": prefix, "input_suffix": suffix, "n_predict": 1}
        (answer,) = self._ask(file, "infill", [asked])
        return answer["prompt"], answer["tokens_evaluated"]

    def _ask(self, file: Path, path: str, requests: Sequence[dict[str, Any]]) -> list[Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(file), path, requests]) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"llama.cpp ended over {file}: {self._process.wait()}"
        found: list[Any] = json.loads(answer)
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
        file, path, requests = json.loads(line)
        server = servers[file] = servers.get(file) or _server(file)
        answers.write(json.dumps([_answer(f"{server.listening_address}/{path}", asked) for asked in requests]) + "\n")
        answers.flush()


def _server(file: str) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = file
    params.n_ctx = params.n_batch = params.n_ubatch = 128
    params.n_parallel, params.warmup, params.verbosity, params.n_gpu_layers = 1, False, -1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    return xllamacpp.Server(params)


def _answer(address: str, asked: dict[str, Any]) -> Any:
    request = urllib.request.Request(address, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


if __name__ == "__main__":
    main()
