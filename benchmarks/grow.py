"""Grows a small trained checkpoint to a large model's shape: the same function with the large model's costs.

    python -m benchmarks.grow /data/grown-7b --shape 7b [--source FOLDER or GGUF file] [--exit EXIT.safetensors]

Acceptance is that of the small model; all costs are those of the large one. Method:

- The hidden state is padded with dimensions that stay zero. Its mean square falls by h·c/H (h, H: hidden sizes, c:
  copies), so RMSNorm's eps is multiplied by that factor, and its weights by the root of it. If H/h is twice a power of
  four (70B: 8192/256), the state is stored twice (c = 2), each reader takes half of both, and the root is again a power
  of two.
- A head of d dimensions becomes one of D. Rotary frequency i of d is frequency i·D/d of D, in the same halves. The
  divisor of attention grows by the root of D/d, so the queries are multiplied by it.
- Additional heads, neurons and layers read only zeros, or only zeros read them.
- Every weight that meets only zeros is random. A weight is zero only if it would bring a nonzero number into a padding
  dimension (2 to 7 % of a matrix at 7B), or if it is in the padding of the embedding, of which a pass reads one row per
  token.

All factors are powers of two, so bf16 weights stay exact. In NF4 the grown model has the usual error of NF4. The
vocabulary is the small model's: rows that can never win would need a bias. The checkpoint is written layer by layer,
with one layer in memory; an interrupted run resumes with the first missing file. `--exit` also grows an exit layer of
the small model, beside the folder: /data/grown-7b-exit.safetensors.
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
from offspec.checkpoints.exit_layers import ExitFile, save
from offspec.checkpoints.language_model import language_model
from offspec.checkpoints.opening import open_model
from offspec.errors import OffspecError, UsageError
from offspec.loaders.convert import read_whole
from offspec.loaders.files.checkpoint import Checkpoint
from offspec.loaders.files.containers import open_checkpoint
from offspec.loaders.files.safetensors_folder import INDEX_FILE, read_header
from offspec.loaders.files.shards import ShardPiece, write_shard
from offspec.loaders.formats import formats_in, stored_weights
from offspec.loaders.formats.bf16_packed import Bf16Packer
from offspec.loaders.formats.four_bit import pack_4bit, quantization_config
from offspec.loaders.params import LOSSLESS_FORMAT, QUANT_TYPES, ConvertParams
from offspec.model.block import layer_shapes
from offspec.model.config import ModelConfig, read_config
from offspec.model.names import EMBEDDING, HEAD, LAYER_PREFIX, in_layer

SPREAD = 0.02  # standard deviation of random weights, as at initialisation
COMPANIONS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
JOB_FILE = "grown.json"
Pack = Callable[[Tensor, str], Mapping[str, Tensor]]  # a matrix and a format → suffix of its name → tensor
_SAFETENSORS_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8"}


@dataclass(frozen=True)
class Shape:
    """Dimensions of a large model. format: bf16, bf16-packed or nf4 (double-quantised, in bitsandbytes' layout).

    context: the longest text, for which the small model need not be trained; None: the small model's.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 128
    format: str = "bf16"
    context: int | None = None


SHAPES = {
    "1b": Shape(2048, 8192, 16, 16, 8, context=131072),  # Llama 3.2 1B with 16 heads of 128 instead of 32 of 64
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
    """Write the checkpoint `target`: `source` in `shape`. Returns `target`; `say` gets one line per file.

    layers: write only these, without an index, as a part of a checkpoint. pack: creates 4-bit tensors.
    num_threads: number of files written at the same time; each needs several times its layer's bytes in bf16.
    Raises UsageError if the shape cannot contain the model or `target` has other content, CheckpointError for an
    unreadable source, StorageError if the disk is full (repeat the call to resume).
    """
    checkpoint = language_model(open_checkpoint(source))
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


def grow_exit(exit_file: Path, source: Path, grown: Path, shape: Shape) -> Path:
    """Write an exit layer of `source` for `grown`, which is `source` in `shape`. Returns its path.

    It stands behind the large layer that computes what the small layer before it does. Raises an OffspecError.
    """
    small, big = (open_model(path, "bf16", []) for path in (source, grown))
    file, layout = ExitFile.open(exit_file, small), Layout(small.config, shape)
    weights = file.load(torch.bfloat16, torch.device("cpu"))
    before = next(large for large, small_layer in layout.layers.items() if small_layer == file.exit_layer - 1)
    as_layer = {in_layer(file.exit_layer - 1, name): weight for name, weight in weights.items()}
    layer = {
        name: layout.tensor(in_layer(before, name), size, as_layer) for name, size in layer_shapes(big.config).items()
    }
    path = grown.with_name(f"{grown.name}-exit.safetensors")
    save(path, layer, big, before + 1)
    return path


def _claim(target: Path, job: Mapping[str, Any]) -> None:
    """Check that the folder is empty, or from an earlier run of this job."""
    target.mkdir(parents=True, exist_ok=True)
    marker = target / JOB_FILE
    if marker.exists():
        if json.loads(marker.read_text()) != job:
            raise UsageError(f"{target}: contains another model; delete it, or name a new folder")
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
    if shape.context is not None:
        config["max_position_embeddings"] = shape.context
    if shape.format in QUANT_TYPES:
        config["quantization_config"] = quantization_config(ConvertParams(shape.format), "BF16")
    return config


def _load(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """All tensors of the small model in bf16, from any format."""
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
) -> Iterator[ShardPiece]:
    """The tensors of a file; bf16 tensors are created one at a time, when they are written."""
    for name, shape in group.items():
        make = partial(layout.tensor, name, shape, small)
        if layout.shape.format == "bf16" or not (name.startswith(LAYER_PREFIX) and len(shape) == 2):
            yield ShardPiece(name, "BF16", shape, partial(_made, make))
            continue
        form = layout.shape.format
        parts = Bf16Packer().pack(make()) if form == LOSSLESS_FORMAT else pack(make(), form)
        for suffix, part in parts.items():
            yield ShardPiece(name + suffix, _SAFETENSORS_DTYPES[part.dtype], tuple(part.shape), partial(_once, part))


def _made(make: Callable[[], Tensor]) -> Iterator[memoryview]:
    return _once(make())


def _once(tensor: Tensor) -> Iterator[memoryview]:
    yield tensor.reshape(-1).view(torch.uint8).numpy().data


# ------------------------------------------------------------------------------------------------ where things go


class Layout:
    """The places of the small model's numbers in the large model's tensors, and their factors.

    hidden: [c·h], the places of the hidden state's c copies. dims: [d], a head's dimensions within D. q, kv: rows of
    the queries and of the keys and values. attended: nonzero outputs of attention, including additional
    heads that share the values of a small head. neurons: [m]. layers: big layer → small
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
        """Pair (i, i + d/2) of a small head, with frequency theta^(-2i/d), is pair i·D/d of a large one."""
        pairs = torch.arange(self.small.head_dim // 2) * (self.shape.head_dim // self.small.head_dim)
        return torch.cat((pairs, pairs + self.shape.head_dim // 2))

    def _rows(self, heads: Tensor) -> Tensor:
        return (heads[:, None] * self.shape.head_dim + self.dims).view(-1)

    def tensor(self, name: str, shape: tuple[int, ...], small: Mapping[str, Tensor]) -> Tensor:
        """The large model's tensor `name` (bf16, of `shape`), from the small model's tensors."""
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
        """The small layer (-1: the large layer adds nothing; None: outside the layers) and the short name."""
        if not name.startswith(LAYER_PREFIX):
            return None, name
        index, short = name.removeprefix(LAYER_PREFIX).split(".", 1)
        return self.layers.get(int(index), -1), short

    def _matrix(self, kind: str, weight: Tensor | None, result: Tensor) -> Tensor:
        """Write `weight` (or None) into the random `result`, and zeros where others would meet nonzero numbers."""
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
        """The large rows of a matrix that reads the hidden state, and their content."""
        if kind == "q_proj":
            return self.q, weight * self.query_scale
        if kind in ("k_proj", "v_proj"):
            heads = weight.view(self.small.num_kv_heads, self.small.head_dim, -1)
            return self.kv, heads.repeat_interleave(self.spread, dim=0).flatten(0, 1)
        if kind in ("gate_proj", "up_proj"):
            return self.neurons, weight
        return torch.arange(self.small.vocab_size), weight  # lm_head


def _random(shape: tuple[int, ...], name: str) -> Tensor:
    """Random weights that depend only on the name, so that a resumed run gives the same result."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, SPREAD, generator=generator)


def _refuse(small: ModelConfig, shape: Shape) -> None:
    """Raises UsageError for shapes that cannot compute the same function."""
    if small.qkv_bias or small.o_bias or small.mlp_bias or small.qk_norm or any(small.windows) or small.differences():
        raise UsageError(f"{small.model_type}: only models in Llama's layout without biases can be grown")
    if small.rope.kind == "yarn":
        raise UsageError("YaRN's frequencies depend on the head size, so models with YaRN cannot be grown")
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
    parser.add_argument("--exit", type=Path, metavar="FILE", help="an exit layer of the source, by offspec distill")
    args = parser.parse_args()
    try:
        grow(args.source, args.folder, SHAPES[args.shape], say=lambda line: print(line, file=sys.stderr))
        if args.exit is not None:
            print(grow_exit(args.exit, args.source, args.folder, SHAPES[args.shape]), file=sys.stderr)
    except OffspecError as exc:
        sys.exit(f"Error: {exc}")


if __name__ == "__main__":
    main()
