"""Trains a copy of a model further on a folder's texts, as a specialised target for `benchmarks/drafts/alignment.py`.

    python -m benchmarks.drafts.specialise OUT --folder /usr/include/linux --pattern '*.h' [--minutes 20 | --steps N]

`--learn` helps if draft and target were trained on different texts. The built-in pair was trained on the same texts, so
this script creates such a case: it continues the target's training with next-token loss (AdamW, windows of 512 tokens),
on the files that `alignment.py` does not hold out. OUT is a checkpoint; give it as --model and the built-in draft as
--draft. Needs the extra `train` (transformers).
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from offspec import builtin

from .alignment import split

WINDOW = 512
ROWS = 16  # windows a step
WARM_UP = 0.03  # of the whole
IntArray = npt.NDArray[np.int64]


def texts(files: list[Path], tokenizer: Tokenizer, end: int) -> IntArray:
    """The concatenated files, with an end-of-text token after each."""
    ids: list[int] = []
    for file in files:
        ids += [*tokenizer.encode(file.read_text(encoding="utf-8", errors="ignore").strip()).ids, end]
    return np.array(ids, dtype=np.int64)


def batch(text: IntArray, draws: np.random.Generator, rows: int = ROWS) -> torch.Tensor:
    """Token ids [rows, WINDOW + 1], from random places."""
    starts = draws.integers(0, len(text) - WINDOW, rows)
    return torch.from_numpy(np.stack([text[start : start + WINDOW + 1] for start in starts]))


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss in nats."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def train(
    model: LlamaForCausalLM, text: IntArray, learning_rate: float, minutes: float, num_steps: int | None = None
) -> None:
    """Train for a number of steps, or of minutes. The learning rate warms up, then falls to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    draws, began, steps = np.random.default_rng(0), time.perf_counter(), 0

    def passed() -> float:
        return steps / num_steps if num_steps is not None else (time.perf_counter() - began) / (60 * minutes)

    while (share := passed()) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (share + 1e-3) / WARM_UP, 1 - share)
        loss = loss_of(model, batch(text, draws))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
        if steps % 20 == 0:
            rate = steps * ROWS * WINDOW / (time.perf_counter() - began)
            print(f"step {steps}, {share:.0%}: loss {loss.item():.3f}, {rate:,.0f} tokens/s", flush=True)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, text: IntArray, rows: int = 128) -> float:
    ids = batch(text, np.random.default_rng(1), rows)
    return sum(loss_of(model, part).item() for part in ids.split(ROWS)) * ROWS / rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, default=builtin.path("target"), help="checkpoint in Llama's layout")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--pattern", default="*.h")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=20)
    length.add_argument("--steps", type=int, help="training steps, instead of minutes, for a reproducible model")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    end = model.config.eos_token_id
    learnt_from, held_out = split(sorted(file for file in args.folder.rglob(args.pattern) if file.is_file()))
    text, exam = texts(learnt_from, tokenizer, end), texts(held_out, tokenizer, end)
    print(f"{len(text):,} training tokens, {len(exam):,} held out", flush=True)
    print(f"held-out loss {held_out_loss(model, exam):.3f} nats per token", flush=True)
    train(model, text, args.learning_rate, args.minutes, args.steps)
    print(f"held-out loss {held_out_loss(model, exam):.3f} nats per token", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    for file in args.model.glob("*.json"):
        shutil.copyfile(file, args.out / file.name)
    model.to(torch.bfloat16).save_pretrained(args.out)


if __name__ == "__main__":
    main()
