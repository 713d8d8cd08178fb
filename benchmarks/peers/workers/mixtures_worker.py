"""Times a program on several tasks with one file, one task after the other.

    PYTHON mixtures_worker.py JOB.json RESULT.json

The job: program ("llama.cpp" or "offspec"), model, draft, arithmetic, threads, ram (bytes, or null), texts (at once),
context (of one text), context_of_all, and tasks, each with prompts (token ids) and num_tokens (of each text). The
result: load_s, version, and for each task the seconds, the bytes read from disks and the token ids of each text.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common

Answer = Callable[[list[list[int]], int], list[list[int]]]  # prompts, tokens of each text → token ids


def llama_cpp(job: dict[str, Any]) -> tuple[Answer, str]:
    from llama_cpp_worker import load

    settings = {"context": job["context_of_all"], "texts": job["texts"], "only_mapped": job["ram"] is not None}
    generate, version = load(common.Job(job["model"], "", [], 0, job["threads"], 0, False, settings))

    def one(prompt: list[int], num_tokens: int) -> list[int]:
        token_ids = list[int]()
        generate(prompt, num_tokens, token_ids.extend)
        return token_ids

    def answer(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: one(prompt, num_tokens), prompts))

    return answer, version


def offspec(job: dict[str, Any]) -> tuple[Answer, str]:
    from offspec import Engine, SamplingParams, __version__

    options = {key: job[key] for key in ("draft", "threads", "ram", "context", "texts", "arithmetic")}
    engine = Engine.load(job["model"], device="cpu", **options)

    def answer(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        texts: list[list[int]] = [[] for _ in prompts]
        for index, step in engine.generate_many(prompts, SamplingParams(num_tokens, ignore_eos=True)):
            texts[index] += step.token_ids
        return texts

    return answer, __version__


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    began = time.perf_counter()
    answer, version = {"llama.cpp": llama_cpp, "offspec": offspec}[job["program"]](job)
    load_s, results = time.perf_counter() - began, []
    for task in job["tasks"]:
        began, read_before = time.perf_counter(), common.disk_bytes()
        texts = answer(task["prompts"], task["num_tokens"])
        seconds, read_bytes = time.perf_counter() - began, common.disk_bytes() - read_before
        results.append({"seconds": seconds, "read_bytes": read_bytes, "token_ids": texts})
    result = {"load_s": load_s, "version": version, "tasks": results}
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
