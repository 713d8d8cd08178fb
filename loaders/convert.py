"""Converts a checkpoint to NF4, FP4, packed bf16 or plain floats, or copies its tensors into one file per layer.

The result has one safetensors file per layer, with page-aligned data, so that one contiguous read loads a layer; the
first file contains all other tensors. It is a normal checkpoint for `transformers` and bitsandbytes. Matrices are
packed on threads while the file before is written. Memory: two layers of the result, and one tensor of the source per
thread. An interrupted conversion resumes with the first missing file, and its result is bit-identical. Until it is
complete, the folder has a marker and no index, so no reader accepts it. The conversion is independent of architectures:
it quantises the matrices inside layers. Other tensors are unchanged, unless safetensors cannot store them unchanged.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from offspec.errors import CheckpointError, StorageError, UsageError

from .files.checkpoint import DTYPE_BYTES, Checkpoint, TensorInfo, as_config_json, fault, num_bytes, reading, show
from .files.containers import open_checkpoint
from .files.file_locks import has_name, try_lock
from .files.os_errors import cannot_write, reason, remedy
from .files.records import FLOAT_DTYPES
from .files.safetensors_folder import CONFIG_FILE, INDEX_FILE, read_header
from .files.safetensors_folder import UNFINISHED_MARKER as MARKER
from .files.shards import (
    CHUNK_BYTES,
    PART_SUFFIX,
    Background,
    ShardPiece,
    forget_cached,
    removed_meanwhile,
    sync_folder,
    write_shard,
    write_verified,
)
from .formats import StoredWeight, formats_in, packer_for, stored_weights
from .formats.core import Packer
from .formats.plain import FloatPacker
from .formats.process_state import one_thread
from .machine.hardware import read_cores
from .params import FLOAT_FORMATS, LOSSLESS_FORMAT, MADE_MIXTURES, MXFP4, QUANT_TYPES, ConvertParams, Progress
from .streaming.weights import split_names
from .units import format_quantity

_SAFETENSORS_DTYPES = {torch.uint8: "U8", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_SPARE_BYTES = 2**20  # headers, config.json, tokenizer
_LAYOUT = 1  # version of the result's layout; a run may not resume a conversion with another layout
_MOST_TRIES = 100  # to lock a marker that other processes make and remove
MOST_THREADS = 8  # that pack, about as many as a layer has matrices: each holds one in memory

PackerOf = Callable[[str, tuple[int, ...]], Packer | None]  # a weight's name and shape → its packer; None: not packed
_Packed = dict[str, Future[list[ShardPiece]]]  # weight's name → its tensors in the result, when they are ready


@dataclass(frozen=True)
class MatrixChoice:
    """Which matrices of a checkpoint are packed, and how; by its tensors under the names of the result.

    kept: those in layers that are not. packers: in place of the packer for the format, also outside of layers.
    """

    kept: Callable[[Checkpoint], Collection[str]] = lambda checkpoint: ()
    packers: Callable[[Checkpoint], PackerOf] | None = None


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion. An earlier run wrote `num_resumed` of the `num_files`.

    bits_per_weight: by name, of each matrix to convert, including those that were kept unchanged.
    """

    path: Path
    format: str
    source_bytes: int
    result_bytes: int
    num_files: int
    num_resumed: int
    bits_per_weight: Mapping[str, float]


@dataclass(frozen=True)
class _Item:
    """A tensor of the source to copy, or a weight that `packer` converts."""

    name: str
    infos: tuple[TensorInfo, ...]
    stored: StoredWeight | None = None
    packer: Packer | None = None

    @property
    def source_bytes(self) -> int:
        return sum(info.nbytes for info in self.infos)

    @property
    def possible_names(self) -> tuple[frozenset[str], ...]:
        """Names of its tensors in the result: one set, or two where the content decides."""
        plain = frozenset((self.name,))
        if self.packer is None:
            return (plain,)
        packed = frozenset(self.name + suffix for suffix in self.packer.suffixes)
        return (packed, plain) if self.packer.is_lossless else (packed,)

    @property
    def result_bytes(self) -> int:
        if self.packer is None or self.stored is None:
            return self.source_bytes
        return self.packer.num_bytes(math.prod(self.stored.shape))


@dataclass(frozen=True)
class _Shard:
    """One file of the result and its items."""

    name: str
    items: tuple[_Item, ...]

    @property
    def source_bytes(self) -> int:
        return sum(item.source_bytes for item in self.items)


def convert(
    source: Path,
    target: Path,
    params: ConvertParams | None = None,
    *,
    layer_prefix: str,
    progress: Progress | None = None,
    understand: Callable[[Checkpoint], Checkpoint] = lambda checkpoint: checkpoint,
    matrices: MatrixChoice | None = None,
    is_cache: bool = False,
) -> Conversion:
    """Convert the checkpoint `source` into the checkpoint `target`, or resume the conversion.

    layer_prefix: prefix of tensor names inside layers, up to the layer's number.
    understand: maps the source checkpoint to the tensor names of the result.
    is_cache: `target` is a place of our own, where anything but an unfinished result of the same job is replaced.
    `progress(bytes_done, bytes_total)` counts bytes of the source; its first call reports the bytes of an earlier run.
    Raises UsageError, CheckpointError (the source), StorageError (the target; repeat the call to resume).
    """
    params = params or ConvertParams()
    if os.path.exists(target) and not os.path.isdir(target):
        raise UsageError(f"{target}: is a file; name a new folder for the result")
    one, other = source.resolve(), target.resolve()
    if one == other or one in other.parents or other in one.parents:
        raise UsageError(f"{target}: is inside SRC, or SRC is inside it ({source}); name a new folder elsewhere")
    checkpoint = understand(open_checkpoint(source))
    work = _Work(checkpoint, target, params, layer_prefix, matrices or MatrixChoice())
    with _claimed(target, _job(checkpoint, params), is_cache=is_cache) as check:
        finished = [shard for shard in work.shards if work.is_finished(shard)]
        rest = [shard for shard in work.shards if shard not in finished]
        _check_space(target, work.result_bytes(rest))
        counter = _Counter(num_bytes(checkpoint), progress)
        counter.add(sum(shard.source_bytes for shard in finished))
        # Each file is verified while the next one is written, and the one after that is packed.
        with one_thread(), Background() as verifying, _packing_threads() as pool:
            for shard, packed in _one_ahead(rest, partial(work.pack, pool)):
                write_shard(target / shard.name, list(work.pieces(shard, packed, counter)), verifying, check)
        tensors = work.publish(check)
    sizes = (num_bytes(checkpoint), sum(info.nbytes for info in tensors.values()), len(work.shards), len(finished))
    return Conversion(target, params.format, *sizes, work.bits_per_weight(tensors))


@dataclass
class _Counter:
    """Counts the converted bytes of the source."""

    total: int
    progress: Progress | None
    done: int = 0

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)


# ------------------------------------------------------------------------------------------------------- before work


def _job(checkpoint: Checkpoint, params: ConvertParams) -> dict[str, Any]:
    """Everything that the result depends on; runs with equal jobs write equal files."""
    # The source: a hash of its headers, its config.json, and its files' sizes and times; not of their contents.
    tensors = sorted((i.name, i.dtype, i.shape, i.path.name, i.offset) for i in checkpoint.tensors.values())
    stats = [_stamp(path) for path in sorted({info.path for info in checkpoint.tensors.values()})]
    source = hashlib.sha256(json.dumps([tensors, stats, dict(checkpoint.config)]).encode()).hexdigest()
    job: dict[str, Any] = {**asdict(params), "layout": _LAYOUT, "source": source}
    if (packer := packer_for(params)) is not None:
        job |= packer.versions
    if params.imatrix is not None:
        job["imatrix"] = _stamp(Path(params.imatrix))
    return job


def _stamp(path: Path) -> tuple[str, int, int]:
    """What tells a file from another, without its content."""
    stat = path.stat()
    return path.name, stat.st_size, stat.st_mtime_ns


@contextmanager
def _claimed(target: Path, job: Mapping[str, Any], *, is_cache: bool) -> Iterator[Callable[[], None]]:
    """Lock the folder for this job; it must be empty or contain an unfinished result of the same job.

    Yields a function that raises StorageError if the folder was removed or replaced, perhaps for another process.
    """
    try:
        marker = _locked_marker(target, is_cache=is_cache)
    except OSError as exc:
        raise cannot_write(target, exc) from exc

    def check() -> None:
        if not has_name(marker, target / MARKER):
            raise removed_meanwhile(target)

    try:
        marker.seek(0)
        begun = marker.read()
        if is_cache and _parsed(begun) != job:
            _empty(target)
        if _entries(target):
            _check_same(target, begun, job)
            for part in target.rglob(f"*{PART_SUFFIX}"):
                try:
                    part.unlink()
                except OSError as exc:
                    raise cannot_write(part, exc) from exc
        else:  # no files exist yet, so an old marker can be replaced
            _write_marker(target, marker, job)
        yield check
    finally:
        with suppress(OSError):  # close retries a write that failed
            marker.close()


def _locked_marker(target: Path, *, is_cache: bool) -> TextIO:
    """The folder's marker, opened and locked; made if the folder is empty. Raises UsageError, OSError."""
    path = target / MARKER
    for _ in range(_MOST_TRIES):
        target.mkdir(parents=True, exist_ok=True)
        is_new = not os.path.lexists(path)
        if is_new and not is_cache and _entries(target):
            raise UsageError(f"{target}: is not empty; name a new folder for the result")
        try:
            marker = path.open("x+" if is_new else "r+", encoding="utf-8", errors="replace")
        except (FileNotFoundError, FileExistsError):  # another process has just removed or made it
            continue
        is_locked = try_lock(marker.fileno())
        if is_locked and has_name(marker, path):
            return marker
        marker.close()
        if not is_locked:
            break
    raise UsageError(f"{target}: another process writes here; wait until that process ends, or stop it")


def _entries(target: Path) -> set[str]:
    return set(os.listdir(target)) - {MARKER}


def _empty(target: Path) -> None:
    """Delete everything but the marker. Raises StorageError."""
    for path in (target / name for name in _entries(target)):
        try:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        except OSError as exc:
            raise cannot_write(path, exc) from exc


def _write_marker(target: Path, marker: TextIO, job: Mapping[str, Any]) -> None:
    try:
        marker.truncate(0)
        marker.write(json.dumps(job))
        marker.flush()
        os.fsync(marker.fileno())
        sync_folder(target)
    except OSError as exc:
        raise cannot_write(target / MARKER, exc) from exc


def _check_same(target: Path, begun: str, job: Mapping[str, Any]) -> None:
    if (before := _parsed(begun)) == job:
        return
    difference = "of another kind"
    if isinstance(before, dict):
        different = [key for key in job if before.get(key) != job[key]]
        difference = (
            "of other weights" if "source" in different else ", ".join(f"{k} {show(before.get(k))}" for k in different)
        )
    raise UsageError(
        f"{target}: contains an unfinished result ({difference}); delete it, "
        "name a new folder, or repeat the first command"
    )


def _parsed(begun: str) -> Any:  # what JSON holds
    """The job in a marker; None for anything else."""
    try:
        return json.loads(begun)
    except (ValueError, RecursionError):
        return None


def _check_space(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target).free
    if needed > free:
        raise StorageError(
            f"{target}: the result needs {format_quantity(needed, 'B')} more, but the disk has only "
            f"{format_quantity(free, 'B')} free; free space and repeat the command, or choose another disk"
        )


# --------------------------------------------------------------------------------------------------------------- work


class _Work:
    """The files of the result, and their creation."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Path,
        params: ConvertParams,
        layer_prefix: str,
        matrices: MatrixChoice,
    ) -> None:
        self._checkpoint, self._target, self._packer = checkpoint, target, packer_for(params)
        companions = checkpoint.companions()  # errors come before hours of work
        self._companions = {name: path for name, path in companions.items() if not name.endswith(PART_SUFFIX)}
        if self._packer is None:
            items = {info.name: _Item(info.name, (info,)) for info in checkpoint.tensors.values()}
            for info in checkpoint.tensors.values():
                if info.dtype not in DTYPE_BYTES or info.change is not None:
                    remedy = f"use `format` {', '.join(FLOAT_FORMATS)} or {', '.join(QUANT_TYPES)}"
                    raise fault(info.path, f"tensor {show(info.name)} is {info.dtype} in GGUF's layout; {remedy}")
        else:
            weights = stored_weights(checkpoint.tensors, formats_in(checkpoint))
            done = next((weight for weight in weights.values() if weight.dtype in (*QUANT_TYPES, MXFP4)), None)
            if done and params.format in (*QUANT_TYPES, *MADE_MIXTURES):
                remedy = "use the 16-bit checkpoint, or `format=keep` to change only the layout"
                description = f"{show(done.name)} is already quantised ({done.dtype})"
                raise CheckpointError(f"{checkpoint.path}: {description}; {remedy}")
            if self._packer.is_lossless:
                _refuse_packed(checkpoint, weights)
            if matrices.packers is None:
                packers = _packers(checkpoint, weights, self._packer, layer_prefix, matrices.kept(checkpoint))
            else:
                packer_of = matrices.packers(checkpoint)
                chosen = {name: packer_of(name, stored.shape) for name, stored in weights.items()}
                packers = {name: packer for name, packer in chosen.items() if packer is not None}
            items = _items(weights, packers, self._packer)
            self._packer.prepare()  # reports missing packages before anything is written
        self._quantised = [item for item in items.values() if item.packer is not None]
        layers, shared = split_names(items, layer_prefix)
        groups = [shared, *(layer.values() for layer in layers)] if shared else [layer.values() for layer in layers]
        self.shards = [
            _Shard(f"model-{i:05d}-of-{len(groups):05d}.safetensors", tuple(items[name] for name in names))
            for i, names in enumerate(groups, start=1)
        ]

    def is_finished(self, shard: _Shard) -> bool:
        """Whether the file has the expected tensors. Its content was verified before it got its final name."""
        try:
            names_in_shard = read_header(self._target / shard.name).keys()
        except CheckpointError:
            return False
        expected = [
            next((names for names in item.possible_names if names <= names_in_shard), None) for item in shard.items
        ]
        return None not in expected and names_in_shard == frozenset[str]().union(*filter(None, expected))

    def bits_per_weight(self, tensors: Mapping[str, TensorInfo]) -> dict[str, float]:
        """Of each converted matrix, by its name. tensors: all of the result."""
        bits = dict[str, float]()
        for item in self._quantised:
            assert item.stored is not None
            names = next(names for names in item.possible_names if names <= tensors.keys())
            if len(item.stored.shape) > 1:
                bits[item.name] = 8 * sum(tensors[name].nbytes for name in names) / math.prod(item.stored.shape)
        return bits

    def result_bytes(self, shards: Iterable[_Shard]) -> int:
        """Bytes of the files, rounded up where an exact figure would be costly."""
        return sum(item.result_bytes for shard in shards for item in shard.items) + _SPARE_BYTES

    def pack(self, pool: ThreadPoolExecutor, shard: _Shard) -> _Packed:
        """Begin to pack the file's matrices on the pool's threads."""
        return {
            item.name: pool.submit(_packed, item.stored, item.packer)
            for item in shard.items
            if item.packer is not None and item.stored is not None
        }

    def pieces(self, shard: _Shard, packed: _Packed, counter: _Counter) -> Iterator[ShardPiece]:
        for item in shard.items:
            if item.name in packed:
                yield from packed.pop(item.name).result()
                counter.add(item.source_bytes)
            else:
                info = item.infos[0]
                yield ShardPiece(info.name, info.dtype, info.shape, partial(_chunks, info, counter))

    def publish(self, check: Callable[[], None]) -> dict[str, TensorInfo]:
        """Write all files except weights, the index last: it makes the folder a checkpoint. Returns its tensors.

        check: see `write_verified`.
        """
        check()
        headers = {shard.name: read_header(self._target / shard.name) for shard in self.shards}
        tensors = {name: info for infos in headers.values() for name, info in infos.items()}
        if self._quantised:
            stored_weights(tensors)  # offspec itself must be able to read the result
        for name, source in self._companions.items():
            if isinstance(source, Path):
                with reading(source):
                    source = source.read_bytes()
            self._put(name, source, check)
        self._put(CONFIG_FILE, self._config(), check)
        weight_map = {name: shard for shard, infos in headers.items() for name in infos}
        nbytes = sum(info.nbytes for info in tensors.values())
        index = {"metadata": {"total_size": nbytes}, "weight_map": dict(sorted(weight_map.items()))}
        self._put(INDEX_FILE, (json.dumps(index, indent=2) + "\n").encode(), check)
        check()
        try:
            (self._target / MARKER).unlink()
            sync_folder(self._target)
        except OSError as exc:
            raise cannot_write(self._target, exc) from exc
        return tensors

    def _put(self, name: str, content: bytes, check: Callable[[], None]) -> None:
        write_verified(self._target / name, [memoryview(content)], check=check)

    def _config(self) -> bytes:
        if self._packer is None or not self._quantised:
            return self._checkpoint.config_json()
        config = {key: value for key, value in self._checkpoint.config.items() if key != "quantization_config"}
        dtypes = {item.stored.dtype for item in self._quantised if item.stored is not None}
        if quantization := self._packer.quantization_config(min(dtypes & FLOAT_DTYPES.keys(), default="BF16")):
            config["quantization_config"] = quantization
        return as_config_json(config)


def _refuse_packed(checkpoint: Checkpoint, weights: Mapping[str, StoredWeight]) -> None:
    """Raises CheckpointError for a source that has no plain bf16 matrices, or others that are quantised."""
    if done := next((weight for weight in weights.values() if weight.plain_dtype is None), None):
        remedy = f"{LOSSLESS_FORMAT} packs bf16 without loss; for other layouts, use `format=keep`"
        raise CheckpointError(f"{checkpoint.path}: {show(done.name)} is quantised ({done.dtype}); {remedy}")
    if any(weight.dtype == LOSSLESS_FORMAT for weight in weights.values()):
        raise CheckpointError(f"{checkpoint.path}: is packed already ({LOSSLESS_FORMAT}); use `format=keep` to copy it")
    if not any(weight.dtype == "BF16" and len(weight.shape) == 2 for weight in weights.values()):
        dtypes = ", ".join(sorted({weight.dtype for weight in weights.values()}))
        description = f"has no bf16 matrices ({dtypes}), and {LOSSLESS_FORMAT} packs no others"
        raise CheckpointError(f"{checkpoint.path}: {description}; `format=bf16` rounds to bf16")


def _packers(
    checkpoint: Checkpoint,
    weights: Mapping[str, StoredWeight],
    packer: Packer,
    layer_prefix: str,
    kept: Collection[str],
) -> dict[str, Packer | None]:
    """Those of the matrices inside layers, except those `kept`; None for a matrix that stays as it is."""
    layers, _ = split_names(weights, layer_prefix)
    inner = {name: weights[name] for layer in layers for name in layer.values() if name not in kept}
    matrices = {name: stored for name, stored in inner.items() if _is_matrix(stored, checkpoint)}
    return {
        name: packer.for_shape(stored.shape)
        for name, stored in matrices.items()
        if stored.dtype == "BF16" or not packer.is_lossless
    }


def _items(
    weights: Mapping[str, StoredWeight], packers: Mapping[str, Packer | None], packer: Packer
) -> dict[str, _Item]:
    """The items: matrices with their packers; of the other weights, packed ones are unpacked."""
    items: dict[str, _Item] = {}
    for name, stored in weights.items():
        infos = stored.streamed
        if name in packers:
            items[name] = _Item(name, infos, stored, packers[name])
        elif stored.is_packed or any(info.change is not None for info in infos):
            items[name] = _Item(name, infos, stored, _beside(stored, packer))
        else:
            items[name] = _Item(name, infos)
    return items


def _beside(stored: StoredWeight, packer: Packer) -> Packer:
    """The packer of a weight that is not a matrix of a layer."""
    if not stored.is_packed:
        return FloatPacker(FLOAT_DTYPES[stored.dtype])
    return packer if isinstance(packer, FloatPacker) else FloatPacker(torch.bfloat16)


def _is_matrix(stored: StoredWeight, checkpoint: Checkpoint) -> bool:
    """Whether it is a matrix of a layer. Raises CheckpointError for shapes that no linear layer has."""
    is_norm = stored.name.endswith("norm.weight")  # norms per head are 2-D
    if len(stored.shape) == 3 and stored.shape[1] == 1 and stored.name.endswith(("conv1d.weight", ".conv.weight")):
        return False  # of a convolution of each channel by itself
    if len(stored.shape) == 2 and stored.name.endswith(".weight") and not is_norm:
        return bool(math.prod(stored.shape))
    if len(stored.shape) != 1 and not is_norm:
        where = next((info.path for info in stored.streamed), checkpoint.path)
        description = f"tensor {show(stored.name)} of shape {list(stored.shape)} does not belong to a linear layer"
        raise fault(where, f"{description}; this version does not quantise such models")
    return False


# ------------------------------------------------------------------------------------------------- source → matrices


@contextmanager
def _packing_threads() -> Iterator[ThreadPoolExecutor]:
    """One more than cores, because each also reads; at most MOST_THREADS. After an error, waiting work is dropped."""
    pool = ThreadPoolExecutor(min(read_cores()[0] + 1, MOST_THREADS), thread_name_prefix="pack")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _one_ahead(shards: Iterable[_Shard], pack: Callable[[_Shard], _Packed]) -> Iterator[tuple[_Shard, _Packed]]:
    """Each file with its matrices, which are being packed; those of the file after it are begun before."""
    before: tuple[_Shard, _Packed] | None = None
    for shard in shards:
        begun = shard, pack(shard)
        if before is not None:
            yield before
        before = begun
    if before is not None:
        yield before


def _packed(stored: StoredWeight, packer: Packer) -> list[ShardPiece]:
    weight = read_whole(stored)
    try:
        parts = packer.pack(weight)
    except CheckpointError as exc:
        where = stored.streamed[0].path
        raise fault(where, f"tensor {show(stored.name)} {exc}; use another copy of this model") from exc
    pieces = list[ShardPiece]()
    for suffix, tensor in parts.items():
        content, dtype = tensor.reshape(-1).view(torch.uint8).numpy().data, _SAFETENSORS_DTYPES[tensor.dtype]
        pieces.append(ShardPiece(stored.name + suffix, dtype, tuple(tensor.shape), partial(_once, content)))
    return pieces


def _once(content: memoryview) -> Iterable[memoryview]:
    return (content,)


def read_whole(stored: StoredWeight) -> Tensor:
    """The whole weight in its own dtype; quantised and fp64 weights in fp32. Raises CheckpointError."""
    parts = [torch.empty(info.nbytes, dtype=torch.uint8) for info in stored.streamed]
    for info, part in zip(stored.streamed, parts, strict=True):
        _fill(info, 0, part.numpy().data)
    weight = stored.bind(parts)
    if isinstance(weight, Tensor):
        return weight.float() if weight.dtype is torch.float64 else weight
    return weight.dequantize(weight.unpacked_dtype)


def _chunks(info: TensorInfo, counter: _Counter) -> Iterator[memoryview]:
    """The tensor's bytes in chunks."""
    buffer = memoryview(bytearray(min(CHUNK_BYTES, info.nbytes)))
    for first in range(0, info.nbytes, CHUNK_BYTES):
        chunk = buffer[: min(CHUNK_BYTES, info.nbytes - first)]
        _fill(info, first, chunk)
        yield chunk
        counter.add(chunk.nbytes)


def _fill(info: TensorInfo, first: int, buffer: memoryview) -> None:
    """Fill `buffer` with a tensor's bytes from `first` on."""
    try:
        with info.path.open("rb", buffering=0) as file:
            file.seek(info.offset + first)
            done = 0
            while done < buffer.nbytes and (count := file.readinto(buffer[done:])):
                done += count
            forget_cached(file.fileno(), info.offset + first, buffer.nbytes)
    except OSError as exc:
        advice = remedy(exc, "check the disk, then repeat the command")
        raise fault(info.path, f"cannot be read ({reason(exc)}); {advice}") from exc
    if done < buffer.nbytes:
        raise fault(info.path, f"ends inside tensor {show(info.name)}: the file was changed; download it again")
