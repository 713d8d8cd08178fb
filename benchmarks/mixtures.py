"""Compares offspec with llama.cpp on a mixture of experts in GGUF: one text, several texts, a long prompt; CPU only.

    python -m benchmarks.mixtures --shape qwen3-30b-a3b --layers 12 --work /data            # the file is in RAM
    python -m benchmarks.mixtures --shape gpt-oss-20b --layers 24 --work /data --ram 6GiB   # it comes from disk

The file has random weights in the shape of a published model, with as many layers as --layers says: gpt-oss-20b with
experts in MXFP4 and the rest in Q8_0 (0.42 GiB a layer and 1.15 GiB beside them), or Qwen3-30B-A3B in Q4_K_M (0.35 GiB
a layer and 0.4 GiB). It is written tensor by tensor, once, to the folder --work.

Random routers choose their experts evenly, and anew for each token. This is the hard case for a cache of experts: in
published models some experts are used more than others, and often for several tokens in a row. Texts are random tokens,
so nothing can be drafted for them; --draft names a draft all the same.

The programs take turns, --rounds times. Each turn is a process that opens the file and answers the tasks in their
order: a first text, in whose seconds caches are filled and kernels compiled; one text of --tokens tokens; --texts
texts at once; and a prompt of --prompt-tokens. With --ram, a process is in a memory control group of this size (which
needs root), and the page cache is empty when it starts: llama.cpp maps the file, without its copies in another order,
and offspec keeps the experts used most and latest. Without --ram, the RAM should hold the file twice: in the page
cache, and in offspec's memory.

The table has medians over rounds, and the bytes that were read from disk for each generated token (of a prompt: in
all). Texts may differ after some tokens: llama.cpp rounds the other factor of packed matrices to 8 bits, and
offspec with `--arithmetic int8`. The last line
is JSON. llama.cpp is the package xllamacpp, in this environment.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from offspec import format_size, parse_size
from offspec.checkpoints.gguf_mixtures import MIXTURES
from offspec.loaders.files.gguf_types import GGUF_TYPES
from offspec.model.config import read_config

from .peers import cells
from .peers.prepare import HERE
from .streaming import drop_page_cache, memory_group

WORKER = HERE / "workers" / "mixtures_worker.py"
PROGRAMS = ("llama.cpp", "offspec")
SHORT_PROMPT = 8  # tokens
BLOCKS = {kind.name: kind for kind in GGUF_TYPES.values()}
# The standard deviation of a block's weights with scales of 1: its codes, and for Q4_K and Q6_K its inner scales, too.
SPREAD = {"Q8_0": 74.0, "Q4_K": 254.0, "Q6_K": 1369.0, "MXFP4": 5.85}
HALVES = {"Q8_0": {0: 1.0}, "Q4_K": {0: 1.0, 2: 7.5}, "Q6_K": {208: 1.0}}  # fp16 scales: byte → factor
QK_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")
OTHER_NAMES = {  # Hugging Face's, of tensors whose types differ from the usual one
    "output.weight": "lm_head.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "ffn_down_exps.weight": "mlp.experts.0.down_proj.weight",
}

Sizes = dict[str, tuple[int, ...]]  # a tensor's name in GGUF → its shape, outputs first


# ------------------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class MixtureShape:
    """A published model's shape. arch: llama.cpp's name. config: Hugging Face's. metadata: llama.cpp's further keys."""

    arch: str
    config: Mapping[str, Any]
    metadata: Mapping[str, Any]

    def layer(self) -> Sizes:
        """The tensors of a layer."""
        c = self.config
        hidden, inner, experts = c["hidden_size"], c["moe_intermediate_size"], c["num_experts"]
        queries, keys = (c[name] * c["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
        sizes: Sizes = {
            "attn_norm.weight": (hidden,),
            "attn_q.weight": (queries, hidden),
            "attn_k.weight": (keys, hidden),
            "attn_v.weight": (keys, hidden),
            "attn_output.weight": (hidden, queries),
            "ffn_gate_inp.weight": (experts, hidden),
            "ffn_gate_exps.weight": (experts, inner, hidden),
            "ffn_up_exps.weight": (experts, inner, hidden),
            "ffn_down_exps.weight": (experts, hidden, inner),
        }
        if self.arch == "qwen3moe":
            return {**sizes, "ffn_norm.weight": (hidden,), **dict.fromkeys(QK_NORMS, (c["head_dim"],))}
        matrices = [name for name in sizes if name != "attn_norm.weight"]
        biases = {name.replace("weight", "bias"): sizes[name][:-1] for name in matrices}
        sinks = {"attn_sinks.weight": (c["num_attention_heads"],), "post_attention_norm.weight": (hidden,)}
        return {**sizes, **biases, **sinks}

    def type_of(self, name: str, shape: tuple[int, ...], layer: int | None, num_layers: int) -> str:
        """As in published files."""
        if len(shape) < 2 or name.endswith("bias") or "ffn_gate_inp" in name:
            return "F32"
        if self.arch == "gpt-oss":
            return "MXFP4" if "_exps" in name else "Q8_0"
        config = read_config({**self.config, "num_hidden_layers": num_layers})
        return MIXTURES["q4_k_m"].type_of(config, OTHER_NAMES.get(name, name), shape[-2:], layer)


SHAPES = {
    "qwen3-30b-a3b": MixtureShape(
        "qwen3moe",
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
        },
        {"rope.freq_base": 1000000.0, "attention.layer_norm_rms_epsilon": 1e-6},
    ),
    "gpt-oss-20b": MixtureShape(
        "gpt-oss",
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "moe_intermediate_size": 2880,
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "vocab_size": 201088,
            "max_position_embeddings": 131072,
        },
        {
            "rope.freq_base": 150000.0,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 32.0,
            "rope.scaling.original_context_length": 4096,
            "attention.sliding_window": 128,
            "attention.layer_norm_rms_epsilon": 1e-5,
        },
    ),
}


def write_file(path: Path, shape: MixtureShape, num_layers: int, seed: int = 0) -> None:
    """A GGUF file of random weights; the memory that this takes is that of the largest tensor."""
    part, generator = path.with_suffix(".part"), np.random.default_rng(seed)
    writer = gguf.GGUFWriter(part, shape.arch)
    for key, value in {**metadata(shape, num_layers), **vocabulary(shape.config["vocab_size"])}.items():
        add(writer, key, value)
    tensors = list(tensors_of(shape, num_layers))
    for name, kind, sizes in tensors:
        packed = np.empty(0, np.float32 if kind == "F32" else np.uint8)
        stored = (*sizes[:-1], num_bytes(kind, sizes[-1])) if kind != "F32" else sizes
        raw = gguf.GGMLQuantizationType[kind]
        writer.add_tensor_info(name, stored, packed.dtype, num_bytes(kind, int(np.prod(sizes))), raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, kind, sizes in tensors:
        writer.write_tensor_data(content(generator, name, kind, sizes))
    writer.close()
    part.rename(path)


def tensors_of(shape: MixtureShape, num_layers: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, type and shape of each tensor."""
    hidden, vocab = shape.config["hidden_size"], shape.config["vocab_size"]
    for name in ("token_embd.weight", "output.weight"):
        yield name, shape.type_of(name, (vocab, hidden), None, num_layers), (vocab, hidden)
    yield "output_norm.weight", "F32", (hidden,)
    for layer in range(num_layers):
        for name, sizes in shape.layer().items():
            yield f"blk.{layer}.{name}", shape.type_of(name, sizes, layer, num_layers), sizes


def num_bytes(kind: str, num_weights: int) -> int:
    return num_weights // BLOCKS[kind].num_weights * BLOCKS[kind].num_bytes


def content(generator: np.random.Generator, name: str, kind: str, sizes: tuple[int, ...]) -> np.ndarray:
    """Numbers, or blocks: weights with a standard deviation of 1 / sqrt(inputs), so that products keep their size."""
    if "norm" in name:
        return np.ones(sizes, np.float32)
    deviation = sizes[-1] ** -0.5
    if kind == "F32":
        return generator.standard_normal(sizes, np.float32) * np.float32(deviation)
    stored = (*sizes[:-1], num_bytes(kind, sizes[-1]))
    blocks = generator.integers(0, 256, stored, np.uint8)
    by_block, scale = blocks.reshape(-1, BLOCKS[kind].num_bytes), deviation / SPREAD[kind]
    if kind == "MXFP4":
        by_block[:, 0] = round(np.log2(scale)) + 128
    for place, factor in HALVES.get(kind, {}).items():
        by_block[:, place : place + 2] = np.array([scale * factor], np.float16).view(np.uint8)
    return blocks


def metadata(shape: MixtureShape, num_layers: int) -> dict[str, Any]:
    c = shape.config
    keys = {
        "block_count": num_layers,
        "context_length": c["max_position_embeddings"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_count": c["num_experts"],
        "expert_used_count": c["num_experts_per_tok"],
        "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.key_length": c["head_dim"],
        "attention.value_length": c["head_dim"],
        "vocab_size": c["vocab_size"],
        **shape.metadata,
    }
    return {f"{shape.arch}.{key}": value for key, value in keys.items()}


def vocabulary(size: int) -> dict[str, Any]:
    """Two letters and their merge, and names for the other ids; only ids are used."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<end>", "a", "b", "ab", *(f"<{number}>" for number in range(4, size))],
        "tokenizer.ggml.token_type": [3] + [1] * (size - 1),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        by_type = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        by_type[type(value)](key, value)


# ------------------------------------------------------------------------------------------------------ measurement


def main() -> None:
    args = arguments()
    shape = SHAPES[args.shape]
    num_layers = args.layers or shape.config["num_hidden_layers"]
    args.work.mkdir(parents=True, exist_ok=True)
    path = args.work / f"{args.shape}-{num_layers}.gguf"
    if not path.exists():
        print(f"writing {path}", file=sys.stderr)
        write_file(path, shape, num_layers)
    tasks = tasks_of(args, shape.config["vocab_size"])
    turns: dict[str, list[dict[str, Any]]] = {program: [] for program in args.programs}
    for _ in range(args.rounds):
        for program in args.programs:
            turns[program].append(turn(program, path, tasks, args))
    where = f"in a group of {format_size(args.ram)}" if args.ram else "in RAM"
    threads = f"{args.threads} threads"
    print(f"{path.name}, {format_size(path.stat().st_size)}, {where}, {threads}, medians of {args.rounds}")
    print_table(tasks, turns)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    print(json.dumps({"settings": settings, "bytes": path.stat().st_size, "turns": turns}))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mixtures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=tuple(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, help="of the file [the published model's]")
    parser.add_argument("--work", type=Path, required=True, help="folder for the file")
    parser.add_argument("--ram", type=parse_size, help="memory of each process, e.g. 6GiB [no limit]")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--tokens", type=int, default=64, help="of each text [64]")
    parser.add_argument("--texts", type=int, default=16, help="at once [16]")
    parser.add_argument("--prompt-tokens", type=int, default=2000, help="of the long prompt [2000]")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft", default="none", help="offspec's draft [none]")
    parser.add_argument("--arithmetic", default="exact", help="offspec's: exact, int8 or fast [exact]")
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument("--timeout", type=float, default=3600, metavar="SECONDS", help="of a process [3600]")
    return parser.parse_args()


def tasks_of(args: argparse.Namespace, vocab_size: int) -> list[dict[str, Any]]:
    generator = np.random.default_rng(1)

    def prompts(count: int, num_tokens: int) -> list[list[int]]:
        return [[int(token) for token in row] for row in generator.integers(1, vocab_size, (count, num_tokens))]

    return [
        {"name": "first text", "prompts": prompts(1, SHORT_PROMPT), "num_tokens": args.tokens},
        {"name": "one text", "prompts": prompts(1, SHORT_PROMPT), "num_tokens": args.tokens},
        {"name": f"{args.texts} texts", "prompts": prompts(args.texts, SHORT_PROMPT), "num_tokens": args.tokens},
        {"name": f"prompt of {args.prompt_tokens}", "prompts": prompts(1, args.prompt_tokens), "num_tokens": 1},
    ]


def turn(program: str, path: Path, tasks: list[dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """The result of one process (see the worker). Exits with its last words if it fails."""
    context = max(len(task["prompts"][0]) + task["num_tokens"] for task in tasks) + 1
    together = [len(task["prompts"]) * (len(task["prompts"][0]) + task["num_tokens"]) for task in tasks]
    job = {
        "program": program,
        "model": str(path),
        "draft": args.draft,
        "arithmetic": args.arithmetic,
        "threads": args.threads,
        "ram": args.ram,
        "context": context,
        "context_of_all": max(context, *together) + args.texts,
        "texts": args.texts,
        "tasks": tasks,
    }
    if args.ram:
        drop_page_cache()
    with tempfile.TemporaryDirectory() as folder, memory_group(args.ram) if args.ram else nullcontext() as group:
        job_file, result, log = (Path(folder) / name for name in ("job.json", "result.json", "log.txt"))
        job_file.write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, str(WORKER), str(job_file), str(result)]
        with log.open("wb") as out:
            process = cells.start(command, args.threads, group, out, folder)
            try:
                status, peak = cells.wait(process, group, args.timeout)
            finally:
                cells.end(process)
        if status != "ok" or not result.exists():
            sys.exit(f"Error: {program}: {status}: {' '.join(log.read_text(errors='replace').splitlines()[-3:])}")
        return {**json.loads(result.read_text(encoding="utf-8")), "peak_anonymous_bytes": peak}


def print_table(tasks: list[dict[str, Any]], turns: Mapping[str, list[dict[str, Any]]]) -> None:
    print(f"{'task':<16}{'program':<12}{'tokens/s':>10}{'seconds':>10}{'MB read':>10}  texts equal to the first's")
    for index, task in enumerate(tasks):
        base = next(iter(turns.values()))[0]["tasks"][index]["token_ids"]
        num_tokens = len(task["prompts"]) * task["num_tokens"]
        is_prompt = task["num_tokens"] == 1
        for program, results in turns.items():
            runs = [result["tasks"][index] for result in results]
            seconds = statistics.median(run["seconds"] for run in runs)
            read = statistics.median(run["read_bytes"] for run in runs) / (1 if is_prompt else num_tokens)
            rate = (len(task["prompts"][0]) if is_prompt else num_tokens) / seconds
            equal = sum(a == b for a, b in zip(runs[0]["token_ids"], base, strict=True))
            line = f"{task['name']:<16}{program:<12}{rate:>10.2f}{seconds:>10.2f}{read / 1e6:>10.1f}"
            print(f"{line}  {equal} of {len(base)}", flush=True)


if __name__ == "__main__":
    main()
