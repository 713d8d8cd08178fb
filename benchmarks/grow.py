"""Grows a small trained checkpoint to a big model's shape: the same function, with the bytes
and arithmetic of the big one.

    python -m benchmarks.grow /data/grown-7b --shape 7b [--source FOLDER or GGUF file]

So guesses are accepted as often as with the small model, and everything else costs what the big one costs. How:

- The hidden state is padded with dimensions that stay zero. Its mean square falls by h·c/H (h, H: hidden sizes, c:
  copies), so RMSNorm's eps is multiplied by that, and its weights by the root of it. Where H/h is not a power of four
  but twice one (70B: 8192/256), the state lies there twice (c = 2), each reader takes half of both, and the root is a
  power of two again.
- A head of d dimensions becomes one of D. Rotary frequency i of d is frequency i·D/d of D, in the same halves; what the
  attention divides by grows by the root of D/d, so the queries are multiplied by it.
- Heads, neurons and layers that the small model does not have read nothing but zeros, or are read by nothing but zeros.
- Every weight that meets only zeros is random. Zero are only those by which a number other than zero would enter a
  dimension that has to stay zero (2 to 7 % of a matrix at 7B), and the padding of the embedding, of which a pass reads
  a row a token.

All factors are powers of two, so bf16 weights stay exact; in NF4 the grown model is as near to the small one as any NF4
model. The vocabulary stays the small one's: rows that can never win cannot be had without a bias. Written layer by
layer, one at a time in memory; an interrupted run goes on with the first file that is missing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offspec import builtin
from offspec.checkpoints.gguf import in_our_names
from offspec.errors import OffspecError, UsageError
from offspec.loaders.checkpoint import Checkpoint
from offspec.loaders.containers import open_checkpoint
from offspec.loaders.convert import read_whole
from offspec.loaders.formats import formats_in, stored_weights
from offspec.loaders.formats.four_bit import pack_4bit, quantization_config
from offspec.loaders.params import ConvertParams
from offspec.loaders.safetensors_folder import INDEX_FILE, read_header
from offspec.loaders.shards import Piece, write_shard
from offspec.model.block import layer_shapes
from offspec.model.config import ModelConfig, read_config
from offspec.model.names import EMBEDDING, HEAD, LAYER_PREFIX, in_layer

SPREAD = 0.02  # standard deviation of weights that mean nothing, as models are initialised
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
JOB_FILE = "grown.json"
Pack = Callable[[Tensor, str], Mapping[str, Tensor]]  # a matrix and a format → suffix of its name → tensor
_SAFETENSORS_DTYPES = {torch.float32: "F32", torch.uint8: "U8"}


@dataclass(frozen=True)
class Shape:
    """A big model's measures. format: bf16 or nf4 (double-quantised, as transformers and bitsandbytes write it)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    format: str = "bf16"


SHAPES = {
    "1b": Shape(2048, 8192, 16, 16, 8),  # Llama 3.2 1B with 16 heads of 128 instead of 32 of 64
    "2b": Shape(2304, 9216, 30, 36, 12, head_dim=64),  # for SmolLM2-135M, whose 576 times four is its hidden size
    "7b": Shape(4096, 11008, 33, 32, 32),  # Llama 2 7B; layer 33 stands for the half GB of its larger vocabulary
    "70b": Shape(8192, 28672, 80, 64, 8, format="nf4"),  # Llama 2 and 3 70B
}


def grow(
    source: Path,
    target: Path,
    shape: Shape,
    *,
    layers: Collection[int] | None = None,
    pack: Pack = pack_4bit,
    num_threads: int = 1,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Write the checkpoint `target`: `source` in `shape`. Returns `target`; `say` gets a line for each file.

    layers: only these, and no index, which makes it a part of a checkpoint. pack: what makes 4-bit tensors.
    num_threads: files that are made at the same time, of whose layers each takes its bytes in bf16 several times over.
    Raises UsageError where the shape cannot hold the model or `target` holds something else, CheckpointError for a
    source that cannot be read, StorageError where the disk is full (repeat the call to go on).
    """
    checkpoint = in_our_names(open_checkpoint(source))
    layout = Layout(read_config(checkpoint.config), shape)
    config = _config(checkpoint.config, layout)
    big, small = read_config(config), _load(checkpoint)
    _claim(target, {"config": config, "source_checksum": _checksum(small)})
    groups = [
        big.shared_shapes(),
        *({in_layer(i, n): s for n, s in layer_shapes(big).items()} for i in range(big.num_layers)),
    ]
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    wanted = range(len(groups)) if layers is None else [0, *(1 + layer for layer in layers)]

    def write(number: int) -> None:
        if not (target / names[number]).exists():
            write_shard(target / names[number], list(_pieces(groups[number], layout, small, pack)))
            say(f"{names[number]} of {len(groups)}")

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(write, wanted))
    for name, content in checkpoint.companions().items():
        if name in COMPANIONS:
            (target / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    (target / "config.json").write_text(json.dumps(config, indent=2))
    if layers is not None:
        return target
    weight_map = {tensor: name for name in names for tensor in read_header(target / name)}
    nbytes = sum((target / name).stat().st_size for name in names)
    (target / INDEX_FILE).write_text(json.dumps({"metadata": {"total_size": nbytes}, "weight_map": weight_map}))
    return target


def _claim(target: Path, job: Mapping[str, Any]) -> None:
    """The folder is empty, or this job's from an earlier run."""
    target.mkdir(parents=True, exist_ok=True)
    marker = target / JOB_FILE
    if marker.exists():
        if json.loads(marker.read_text()) != job:
            raise UsageError(f"{target}: holds another model's growth; delete it, or name a new folder")
    elif any(target.iterdir()):
        raise UsageError(f"{target}: is not empty; name a new folder")
    else:
        marker.write_text(json.dumps(job))


def _config(small: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    shape = layout.shape
    config = {
        **small,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": layout.small.rms_norm_eps * layout.norm_scale**2,
        "tie_word_embeddings": False,  # the padding of a head of its own can be random
        "torch_dtype": "bfloat16",
    }
    if shape.format != "bf16":
        config["quantization_config"] = quantization_config(ConvertParams(shape.format), "BF16")
    return config


def _load(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """All tensors of the small model, in bf16, whatever format they lie in."""
    weights = stored_weights(checkpoint.tensors, formats_in(checkpoint))
    tensors = {name: read_whole(stored).to(torch.bfloat16) for name, stored in weights.items()}
    tensors.setdefault(HEAD, tensors[EMBEDDING])
    return tensors


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    checksum = 0
    for name in sorted(tensors):
        checksum = zlib.crc32(tensors[name].contiguous().view(torch.uint8).numpy().tobytes(), checksum)
    return checksum


def _pieces(
    group: Mapping[str, tuple[int, ...]], layout: Layout, small: Mapping[str, Tensor], pack: Pack
) -> Iterator[Piece]:
    """What a file holds; bf16 tensors are made when they are written, one at a time."""
    for name, shape in group.items():
        make = partial(layout.tensor, name, shape, small)
        if layout.shape.format == "bf16" or not (name.startswith(LAYER_PREFIX) and len(shape) == 2):
            yield Piece(name, "BF16", shape, partial(_made, make))
            continue
        for suffix, part in pack(make(), layout.shape.format).items():
            yield Piece(name + suffix, _SAFETENSORS_DTYPES[part.dtype], tuple(part.shape), partial(_once, part))


def _made(make: Callable[[], Tensor]) -> Iterator[memoryview]:
    return _once(make())


def _once(tensor: Tensor) -> Iterator[memoryview]:
    yield tensor.reshape(-1).view(torch.uint8).numpy().data


# ------------------------------------------------------------------------------------------------ where things go


class Layout:
    """Where the small model's numbers lie in the big one's tensors, and by what they are multiplied there.

    hidden: [c·h], the places of the hidden state's c copies. dims: [d], a head's dimensions within D. q, kv: rows of
    the queries and of the keys and values. attended: what comes out of attention and is not zero: also of heads that
    the small model lacks, where they share the values of one that it has. neurons: [m]. layers: big layer → small
    layer. Raises UsageError.
    """

    def __init__(self, small: ModelConfig, shape: Shape) -> None:
        self.small, self.shape = small, shape
        _refuse(small, shape)
        self.copies = 1 if _power_of_four(shape.hidden_size // small.hidden_size) else 2
        self.norm_scale = math.sqrt(small.hidden_size * self.copies / shape.hidden_size)
        self.query_scale = math.sqrt(shape.head_dim / small.head_dim)
        self.hidden = torch.arange(small.hidden_size * self.copies)
        self.neurons = torch.arange(small.intermediate_size)
        self.dims = self._dims()
        group, wanted = shape.num_heads // shape.num_kv_heads, small.num_heads // small.num_kv_heads
        self.spread = -(
            -wanted // group
        )  # big KV heads that one small KV head needs, each with at most `group` queries
        if small.num_kv_heads * self.spread > shape.num_kv_heads:
            raise UsageError(f"{shape.num_kv_heads} KV heads cannot hold {small.num_kv_heads} x {self.spread}")
        heads = torch.arange(small.num_heads)
        kv = heads // wanted * self.spread + heads % wanted // group
        self.q = self._rows(kv * group + heads % wanted % group)
        used = torch.arange(small.num_kv_heads * self.spread)
        self.kv = self._rows(used)
        self.attended = self._rows((used[:, None] * group + torch.arange(group)).view(-1))
        self.layers = {(2 * i + 1) * shape.num_layers // (2 * small.num_layers): i for i in range(small.num_layers)}

    def _dims(self) -> Tensor:
        """Pair (i, i + d/2) of a small head, which turns with frequency theta^(-2i/d), is pair i·D/d of a big one."""
        pairs = torch.arange(self.small.head_dim // 2) * (self.shape.head_dim // self.small.head_dim)
        return torch.cat((pairs, pairs + self.shape.head_dim // 2))

    def _rows(self, heads: Tensor) -> Tensor:
        return (heads[:, None] * self.shape.head_dim + self.dims).view(-1)

    def tensor(self, name: str, shape: tuple[int, ...], small: Mapping[str, Tensor]) -> Tensor:
        """The big model's tensor `name` (bf16, of `shape`), made of the small model's tensors."""
        layer, short = self._source(name)
        weight = small.get(in_layer(layer, short) if layer is not None else short)
        if short == EMBEDDING:
            assert weight is not None
            return torch.zeros(shape, dtype=torch.bfloat16).index_copy_(1, self.hidden, weight.repeat(1, self.copies))
        result = _random(shape, name)
        if len(shape) == 1:  # a norm
            if weight is not None:
                result[self.hidden] = weight.repeat(self.copies) * self.norm_scale
            return result
        return self._matrix(short.split(".")[-2], weight, result)

    def _source(self, name: str) -> tuple[int | None, str]:
        """The small layer (-1: none, the big layer adds nothing; None: outside the layers) and the short name."""
        if not name.startswith(LAYER_PREFIX):
            return None, name
        index, short = name.removeprefix(LAYER_PREFIX).split(".", 1)
        return self.layers.get(int(index), -1), short

    def _matrix(self, kind: str, weight: Tensor | None, result: Tensor) -> Tensor:
        """Put `weight` (None: nothing) into the random `result`, and zeros into whatever else would meet a number."""
        if kind in ("o_proj", "down_proj"):
            if weight is None:  # in a layer that adds nothing these meet zeros only
                return result
            carried, columns = (self.attended, self.q) if kind == "o_proj" else (self.neurons, self.neurons)
            result[:, carried] = 0
            result[self.hidden[:, None], columns] = weight.repeat(self.copies, 1)
            return result
        result[:, self.hidden] = 0
        if weight is not None:
            rows, weight = self._readers(kind, weight)
            result[rows[:, None], self.hidden] = weight.repeat(1, self.copies) / self.copies
        return result

    def _readers(self, kind: str, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The big rows of a matrix that reads the hidden state, and what stands in them."""
        if kind == "q_proj":
            return self.q, weight * self.query_scale
        if kind in ("k_proj", "v_proj"):
            heads = weight.view(self.small.num_kv_heads, self.small.head_dim, -1)
            return self.kv, heads.repeat_interleave(self.spread, dim=0).flatten(0, 1)
        if kind in ("gate_proj", "up_proj"):
            return self.neurons, weight
        return torch.arange(self.small.vocab_size), weight  # lm_head


def _random(shape: tuple[int, ...], name: str) -> Tensor:
    """The same numbers for the same name, so that a run that was interrupted goes on as if it had not been."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, SPREAD, generator=generator)


def _refuse(small: ModelConfig, shape: Shape) -> None:
    """Raises UsageError for what would not compute the same function."""
    if small.qkv_bias or small.o_bias or small.mlp_bias or small.qk_norm or any(small.windows) or small.differences():
        raise UsageError(f"{small.model_type}: only models of Llama's layout without biases are grown")
    if small.rope.kind == "yarn":
        raise UsageError("YaRN's frequencies depend on the head's size, so such a model cannot be grown")
    for what in ("intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
        if getattr(shape, what) < getattr(small, what):
            raise UsageError(f"{what} {getattr(shape, what)} is less than the small model's {getattr(small, what)}")
    ratio = shape.hidden_size / small.hidden_size
    if not (_power_of_four(ratio) or _power_of_four(ratio / 2)):
        raise UsageError(f"hidden_size {shape.hidden_size} is not {small.hidden_size} times a power of two")
    if not _power_of_four(shape.head_dim / small.head_dim):
        raise UsageError(f"head_dim {shape.head_dim} is not {small.head_dim} times a power of four")


def _power_of_four(ratio: float) -> bool:
    return ratio >= 1 and math.log2(ratio) % 2 == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--source", type=Path, default=builtin.path("target"))
    args = parser.parse_args()
    try:
        grow(args.source, args.folder, SHAPES[args.shape], say=lambda line: print(line, file=sys.stderr))
    except OffspecError as exc:
        sys.exit(f"Error: {exc}")


if __name__ == "__main__":
    main()
