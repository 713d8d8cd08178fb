"""A draft with a window (`--draft-window N`): tokens per pass behind long texts, and CPU seconds of a round by length.

    python -m benchmarks.drafts.window --model MODEL --draft DRAFT --prompt-tokens 7600 --windows 0,512 --texts FILE ...
    python -m benchmarks.drafts.window --draft builtin --rounds 1024,4096,32768

The first compares windows (0: none, all entries are kept) on the last --prompt-tokens tokens of each text: the target
and its text are the same for each, trees have a fixed number of nodes, so times do not matter. The target's entries are
computed once and kept in --folder, so that a run can be repeated. The second fills the draft's cache with made-up
entries and times rounds of 16 nodes by turns. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.drafts.model_draft import ModelDraft
from offspec.model.decoder import CachedDecoder, Decoder
from offspec.model.memory.draft_window import WindowedText
from offspec.prompt_cache import PromptCache

ROUND_NODES = 16
REPEATS = 7


def tokens_per_pass(engine: Engine, window: int, prompt: list[int], args: argparse.Namespace, kept: Path) -> float:
    """Tokens per pass behind one prompt. window: 0 keeps all entries."""
    draft = engine.draft
    assert isinstance(draft, ModelDraft)
    draft.window = window or None
    own = engine.with_draft(draft)  # without estimates of an earlier run
    params = SamplingParams(args.tokens, temperature=args.temperature, seed=1, ignore_eos=True)
    speculation = SpeculationParams(budget=args.budget, lookup=False, recycling=False, recall=False, overlap=False)
    last = list(PromptCache(own, kept).generate(prompt, params, speculation))[-1]
    return last.stats.tokens_per_pass


def compare(args: argparse.Namespace) -> dict[str, list[float]]:
    engine = Engine.load(args.model, draft=args.draft, device="cpu", context=args.context, dtype=args.dtype)
    windows, found = [int(window) for window in args.windows.split(",")], dict[str, list[float]]()
    for file in args.texts:
        prompt = engine.tokenizer.encode(file.read_text())[-args.prompt_tokens :]
        kept = args.folder / f"{file.name}-{len(prompt)}.kv"
        found[file.name] = [tokens_per_pass(engine, window, prompt, args, kept) for window in windows]
        print(f"{file.name:24} {len(prompt):6} tokens", *(f"{rate:7.3f}" for rate in found[file.name]), flush=True)
    sums = np.array(list(found.values())).mean(axis=0)
    print(f"{'mean, by window ' + args.windows:38}", *(f"{rate:7.3f}" for rate in sums))
    return found


def filled(decoder: Decoder, length: int, window: int) -> CachedDecoder | WindowedText:
    """A text of so many tokens, with made-up entries."""
    own = CachedDecoder(decoder)
    text = WindowedText(own, window) if window else own
    number = min(length, window) if window else length
    own.cache.reserve(number + 4 * ROUND_NODES)
    for view in own.cache.stored(number):
        view.normal_()
    own.cache.begin(number)
    own.cache.num_dropped = length - number
    return text


def round_s(text: CachedDecoder | WindowedText) -> float:
    """CPU seconds of a round of siblings."""
    nodes = np.arange(5, 5 + ROUND_NODES)
    began = time.thread_time()
    text.score([], nodes, np.ones(ROUND_NODES, dtype=np.int64), np.eye(ROUND_NODES, dtype=np.bool_))
    taken = time.thread_time() - began
    text.keep([])
    return taken


def time_rounds(args: argparse.Namespace, lengths: Sequence[int]) -> dict[str, float]:
    torch.set_num_threads(1)  # a thread's time counts only its own work
    engine = Engine.load(args.model, draft=args.draft, device="cpu", dtype=args.dtype)
    decoder = engine.draft.decoder
    assert decoder is not None
    windows = [int(window) for window in args.windows.split(",")]
    texts = {(window, length): filled(decoder, length, window) for window in windows for length in lengths}
    times: dict[tuple[int, int], list[float]] = {key: [] for key in texts}
    for _ in range(REPEATS):
        for key, text in texts.items():
            times[key].append(round_s(text))
    found = {f"{window} {length}": 1e3 * median(taken[1:]) for (window, length), taken in times.items()}
    print("CPU ms of a round, by window (0: none) and text")
    print("        ", *(f"{length:8}" for length in lengths))
    for window in windows:
        print(f"{window:8} ", *(f"{found[f'{window} {length}']:8.2f}" for length in lengths))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", nargs="+", type=Path, default=[], metavar="FILE")
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=None)
    parser.add_argument("--windows", default="0,512")
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--budget", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--rounds", default=None, help="lengths of texts whose rounds are timed")
    args = parser.parse_args()
    if args.rounds is None:
        print(json.dumps(compare(args)))
    else:
        print(json.dumps(time_rounds(args, [int(length) for length in args.rounds.split(",")])))


if __name__ == "__main__":
    main()
