"""The compared programs and their settings, with reasons; and programs that cannot be compared here, with reasons.

A *peer* is a program in its own environment; a *row* is a peer with settings, a line of the table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Peer:
    """A program. requirements: for pip; none means this environment. form: its model format (`prepare.FORMS`)."""

    worker: str
    form: str
    requirements: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """A peer with settings. is_steady: a token costs the same in every text, so a few tokens suffice."""

    name: str
    peer: str
    says: str
    settings: dict[str, Any] = field(default_factory=dict)
    is_steady: bool = False


TORCH = "torch==2.13.0"
PEERS = {
    "offspec": Peer("offspec_worker.py", "small draft"),
    "transformers": Peer(
        "transformers_worker.py", "safetensors", (TORCH, "transformers==5.24.0", "accelerate==1.15.0")
    ),
    "airllm": Peer("airllm_worker.py", "airllm", (TORCH, "airllm==4.0.0")),
    "llama.cpp": Peer("llama_cpp_worker.py", "gguf", ("xllamacpp==2026.10.11549", "gguf==0.19.0", "numpy")),
    "openvino": Peer("openvino_worker.py", "openvino", ("openvino-genai==2026.4.1.0", "gguf==0.19.0", "numpy")),
}

# accelerate: its layers in RAM must leave memory for a streamed layer and for torch itself.
_ACCELERATE = "if it does not fit: half of the memory, less the draft, by device_map; the rest from the safetensors"
_SHARE = {"resident_share": 0.5}


def _assisted(number: int) -> Row:
    says = f"{_ACCELERATE}; assistant_model with num_assistant_tokens={number}, constant, no confidence threshold"
    return Row(f"transformers, assistant, {number}", "transformers", says, {**_SHARE, "assistant_tokens": number})


def _drafted(number: int, p_min: float = 0.0) -> Row:
    says = f"mmap, speculative type draft-simple, n_max={number}, p_min={p_min:g}, AVX2 build"
    name = f"llama.cpp, draft, {number}" + (f", p_min {p_min:g}" if p_min else "")
    return Row(name, "llama.cpp", says, {"draft_max": number, "draft_p_min": p_min})


def _guessed(kind: str, **settings: int) -> Row:
    says = f"mmap, speculative type {kind}, " + ("its defaults" if not settings else f"{settings}") + ", AVX2 build"
    return Row(f"llama.cpp, {kind}", "llama.cpp", says, {"ngram": kind.replace("-", "_"), **settings})


_OPENVINO = (
    "LLMPipeline of openvino-genai on the CPU, from GGUF in fp16 (its reader does not support bf16), "
    "its own precision (bf16 here)"
)

OURS = "offspec"
ROWS = (
    Row(OURS, "offspec", "the defaults (the budget is found at run time), ram= the limit"),
    Row("offspec, plain", "offspec", "budget 0: no draft", {"budget": 0}, is_steady=True),
    Row("transformers", "transformers", _ACCELERATE, _SHARE, is_steady=True),
    _assisted(5),
    _assisted(10),
    _assisted(20),
    _assisted(32),
    Row(
        "transformers, lookup",
        "transformers",
        f"{_ACCELERATE}; prompt_lookup_num_tokens=10",
        {**_SHARE, "lookup_tokens": 10},
    ),
    Row("airllm", "airllm", "AutoModel on the CPU, bf16, split by layers beforehand", is_steady=True),
    Row("llama.cpp", "llama.cpp", "mmap (the default), AVX2 build", is_steady=True),
    _drafted(4),
    _drafted(8),
    _drafted(16),
    _drafted(16, 0.5),
    _guessed("ngram-cache"),
    _guessed("ngram-simple", size_n=4),
    _guessed("ngram-map-k", size_n=4),
    _guessed("ngram-mod"),
    Row("openvino", "openvino", _OPENVINO, is_steady=True),
    Row("openvino, draft, 8", "openvino", f"{_OPENVINO}; draft_model, num_assistant_tokens=8", {"draft_tokens": 8}),
)

# Programs that are not in ROWS, and the reasons.
LEFT_OUT: dict[str, str] = {}
