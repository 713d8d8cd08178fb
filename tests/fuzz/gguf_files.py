"""Damaged GGUF files, by number: metadata, tensors or bytes. Each is refused in one line, or writes a text."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from safetensors.torch import load_file

from offspec import Engine
from offspec.stats import peak_host_bytes

from .. import gguf_models
from ..loaders.gguf_writing import write_gguf
from ..pair import build_pair
from .checkpoints import PARAMS, PLAIN, Findings, Said, outcome_of, quick_loading
from .damage import damaged, peak_bytes_anew

KINDS = {"output.weight": "Q5_1", "token_embd": "Q8_0"}
KINDS |= {f"attn_{part}.": "Q8_0" for part in ("q", "k", "v", "output")}
KINDS |= {f"ffn_{part}.": "Q4_0" for part in ("gate", "up", "down")}
PROMPT = [5, 6, 7]
VALUES: tuple[Any, ...] = (
    *(0, 1, 2, 3, 7, 64, 2**31, 2**32 - 1, True, False, 0.0, -1.0, 1e30, float("nan"), float("inf"), 1e-30),
    *("", "llama", "gemma2", "gpt2", "yarn", "\x00", "a" * 50_000, [1], [0.5] * 3, ["a", "b"], [2**31] * 4, [True]),
)
ADDED = (
    *("attention.sliding_window", "rope.scaling.type", "rope.scaling.factor", "expert_count", "attention.key_length"),
    *("rope.scaling.original_context_length", "vocab_size", "logit_scale", "final_logit_softcapping"),
)
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0")


@dataclass
class Content:
    """The arguments of `write_gguf`."""

    arch: str
    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray]
    kinds: dict[str, str]

    def write(self, path: Path) -> Path:
        path.unlink(missing_ok=True)
        return write_gguf(path, self.arch, self.metadata, self.tensors, self.kinds)


def sound(folder: Path) -> Content:
    """The pair's target."""
    target = build_pair(folder, intermediate_size=64, head_dim=8, tie_word_embeddings=False).target
    config, written = json.loads((target / "config.json").read_text()), list[Content]()

    def keep(path: Path, arch: str, metadata: Any, tensors: Any, kinds: Any) -> Path:
        written.append(Content(arch, dict(metadata), dict(tensors), dict(kinds)))
        return path

    with patch.object(gguf_models, "write_gguf", keep):
        gguf_models.write_model(folder / "unused", config, load_file(target / "model.safetensors"), KINDS)
    return written[0]


def damage(path: Path, content: Content, chance: random.Random) -> str:
    """Write a damaged file; returns what is wrong with it."""
    metadata, tensors, kinds = dict(content.metadata), dict(content.tensors), dict(content.kinds)
    change = chance.choice((_value, _value, _tensor, _bytes))
    if change is _bytes:
        return _bytes(content.write(path), chance)
    told = change(metadata, tensors, kinds, chance)
    arch = "gemma2" if chance.random() < 0.02 else content.arch
    try:
        Content(arch, metadata, tensors, kinds).write(path)
    except Exception as exc:  # noqa: BLE001 (the writer has limits of its own: other bytes are damaged in place)
        return f"{told}, which cannot be written ({type(exc).__name__}); {_bytes(content.write(path), chance)}"
    return told


Parts = dict[str, Any]


def _value(metadata: Parts, tensors: Parts, kinds: Parts, chance: random.Random) -> str:
    key, value = chance.choice(list(metadata)), chance.choice(VALUES)
    if chance.random() < 0.1:
        key = f"llama.{chance.choice(ADDED)}"
    if chance.random() < 0.2 and key in metadata:
        del metadata[key]
        return f"{key}: taken out"
    if isinstance(before := metadata.get(key), list) and chance.random() < 0.7:
        before = list(before)
        before[chance.randrange(len(before))] = chance.choice(before)
        value = chance.choice((before, before[:-1], before + before[:1], before[:1]))
    metadata[key] = value
    return f"{key}: {str(value)[:50]}"


def _tensor(metadata: Parts, tensors: Parts, kinds: Parts, chance: random.Random) -> str:
    name = chance.choice(list(tensors))
    kind = chance.choice(("missing", "renamed", "turned", "longer", "type", "numbers", "flat"))
    tensor = tensors[name]
    if kind in ("missing", "renamed"):
        del tensors[name]
        if kind == "renamed":
            tensors[chance.choice(("blk.9.attn_q.weight", "rope_freqs.weight", "x", chance.choice(list(tensors))))] = (
                tensor
            )
    elif kind == "turned":
        tensors[name] = np.ascontiguousarray(tensor.T)
    elif kind == "longer":
        tensors[name] = np.concatenate((tensor, tensor))
    elif kind == "flat":
        tensors[name] = tensor.reshape(-1)
    elif kind == "numbers":
        tensors[name] = np.full_like(tensor, chance.choice((np.nan, np.inf, 0.0, 3e38)))
    else:
        kinds[name] = chance.choice(TYPES)
    return f"{name}: {kind}"


def _bytes(path: Path, chance: random.Random) -> str:
    content = path.read_bytes()
    size = chance.choice((64, 1000, 8000, len(content)))  # most of them in the header
    path.write_bytes(damaged(content[:size], chance) + content[size:])
    return f"bytes below {size}"


def said_by(path: Path) -> Said:
    with Engine.load(str(path), draft="none", device="cpu", dtype="fp32") as engine:
        steps = list(engine.generate(PROMPT, PARAMS, PLAIN))
        return Said(PROMPT, [token for step in steps for token in step.token_ids], steps[-1].finish_reason, [])


def run_cases(numbers: range, folder: Path) -> Findings:
    content, file = sound(folder), folder / "model.gguf"
    findings = Findings(also_right=("loaded",))
    tell: Callable[[], Said] = lambda: said_by(file)  # noqa: E731
    with quick_loading():
        expected = said_by(content.write(file))
        for number in numbers:
            told = damage(file, content, random.Random(number))
            began, before = time.perf_counter(), peak_bytes_anew()
            found = outcome_of(tell)
            outcome = found if isinstance(found, str) else "same" if found == expected else "loaded"
            grown, seconds = peak_host_bytes() - before, time.perf_counter() - began
            findings.add(f"case {number} ({told})", outcome, grown, seconds)
    return findings
