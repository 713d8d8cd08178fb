"""The first token of a prompt with and without its KV entries in a file (`run --cache-prompt`).

    python -m benchmarks.prompt_cache builtin --prompt-tokens 2000 --file /usr/lib/python3.11/argparse.py

The same request runs twice, with new caches; the first writes the file, the second reads it. Seconds are wall-clock and
CPU seconds of the process until the first pass has ended, and those of a later pass. The texts are compared. The goal:
the second takes at most 5 % of the first, and one pass. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from offspec import Engine, SamplingParams
from offspec.prompt_cache import PromptCache

MOST_SHARE = 0.05


def timed(cached: PromptCache, prompt: list[int], num_tokens: int) -> tuple[dict[str, float], list[int]]:
    """Seconds of a request's first pass and of a later one, and its tokens."""
    params = SamplingParams(num_tokens, ignore_eos=True)
    tokens, marks = list[int](), [(time.perf_counter(), time.process_time())]
    for step in cached.generate(prompt, params):
        tokens += step.token_ids
        marks.append((time.perf_counter(), time.process_time()))
    (wall, cpu), (first_wall, first_cpu), *_ = marks
    before, last = marks[-2:]
    return {
        "first_s": first_wall - wall,
        "first_cpu_s": first_cpu - cpu,
        "pass_s": last[0] - before[0],
        "pass_cpu_s": last[1] - before[1],
        "prefilled": step.stats.num_prefilled_tokens,
    }, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="builtin")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=None)
    parser.add_argument("--file", type=Path, required=True, help="the text whose first tokens are the prompt")
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    engine = Engine.load(args.model, draft=args.draft, dtype=args.dtype, context=args.context)
    prompt = engine.tokenizer.encode(args.file.read_text())[: args.prompt_tokens]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompt.kv"
        found = [timed(PromptCache(engine, file), prompt, args.tokens) for _ in range(2)]
        size = file.stat().st_size
    (first, one), (second, other) = found
    print(f"{len(prompt)} tokens, file {size / 2**20:.1f} MiB, texts {'equal' if one == other else 'DIFFER'}")
    for name, row in (("without", first), ("with", second)):
        print(f"{name:8}", *(f"{key} {value:9.3f}" for key, value in row.items()))
    share = (second["first_cpu_s"] - second["pass_cpu_s"]) / first["first_cpu_s"]
    print(f"CPU beside one pass: {100 * share:.2f} % of the first request's (goal: {100 * MOST_SHARE:.0f} %)")
    print(json.dumps({"first": first, "second": second, "share": share, "file_bytes": size, "equal": one == other}))


if __name__ == "__main__":
    main()
