"""Where a model's weights come from: the `WeightSource` protocol, and `RamWeights`, which holds everything in memory.

A source hands out one layer at a time, as a model of any size consumes it. Knows which tensors belong to layer i, from
their names, and nothing of what a layer is made of. Does not decide what fits where.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from offspec.errors import CheckpointError

from .checkpoint import Checkpoint, TensorInfo, fault, show

LAYER_PREFIX = "model.layers."

# fp8 is missing on purpose: without the scales that lie beside it, its numbers are plausible and wrong.
_READ_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})


class WeightSource(Protocol):
    """The weights of one model, layer by layer, on the compute device."""

    @property
    def num_layers(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the source holds."""
        ...

    def layer(self, index: int) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        """Layer `index`'s tensors by their short name ("model.layers.3.x.weight" is "x.weight").

        They are valid inside the `with` block only: a streaming source reuses their memory afterwards.
        """
        ...

    def shared(self, name: str) -> torch.Tensor:
        """A tensor outside the layers by its full name, valid until `close`. Raises CheckpointError if missing."""
        ...

    def close(self) -> None:
        """Lets go of the memory; nothing may be asked for afterwards."""
        ...


class RamWeights:
    """The simplest tier: every tensor in the memory of one device, for as long as the source lives."""

    def __init__(self, layers: list[dict[str, torch.Tensor]], shared: dict[str, torch.Tensor]) -> None:
        self._layers = layers
        self._shared = shared

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        layer_prefix: str = LAYER_PREFIX,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        ignore: Collection[str] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> RamWeights:
        """Reads all tensors but those named in `ignore`, converted to `dtype`. Peak memory: weights + one tensor.

        `progress(bytes_done, bytes_total)` counts bytes of the files. What cannot work is refused before the first
        tensor is read. Raises CheckpointError.
        """
        infos = [info for name, info in checkpoint.tensors.items() if name not in ignore]
        _refuse_quantised(infos)
        _split_names((info.name for info in infos), layer_prefix)
        bytes_total, bytes_done = sum(info.nbytes for info in infos), 0
        tensors = {}
        for info, stored in _read(infos):
            # copy: what safetensors hands out is a view of the mapped file, which changes when the file does.
            tensors[info.name] = stored.to(device=device, dtype=dtype, copy=True)
            bytes_done += info.nbytes
            if progress is not None:
                progress(bytes_done, bytes_total)
        return cls.from_tensors(tensors, layer_prefix=layer_prefix)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor], *, layer_prefix: str = LAYER_PREFIX) -> RamWeights:
        """Takes the tensors as they are, under their full names; nothing is copied. Raises CheckpointError."""
        layers, shared = _split_names(tensors, layer_prefix)
        return cls(
            [{short: tensors[name] for short, name in layer.items()} for layer in layers],
            {name: tensors[name] for name in shared},
        )

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def nbytes(self) -> int:
        tensors = [*self._shared.values(), *(tensor for layer in self._layers for tensor in layer.values())]
        storages = [tensor.untyped_storage() for tensor in tensors]
        # By address: tensors that share their memory (tied ones) are held once.
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def layer(self, index: int) -> AbstractContextManager[Mapping[str, torch.Tensor]]:
        return nullcontext(self._layers[index])

    def shared(self, name: str) -> torch.Tensor:
        if name not in self._shared:
            raise CheckpointError(f"tensor {show(name)} is missing; the checkpoint is incomplete or of another kind")
        return self._shared[name]

    def close(self) -> None:
        self._layers, self._shared = [], {}


def _split_names(names: Iterable[str], layer_prefix: str) -> tuple[list[dict[str, str]], list[str]]:
    """Per layer its {short name: full name}, and the names outside the layers. Refuses a gap in the layers."""
    pattern = re.compile(re.escape(layer_prefix) + r"(0|[1-9][0-9]{0,5})\.(.+)", re.DOTALL)
    layers: dict[int, dict[str, str]] = {}
    shared = []
    for name in names:
        if match := pattern.fullmatch(name):
            layers.setdefault(int(match[1]), {})[match[2]] = name
        else:
            shared.append(name)
    _refuse_gaps(layers, layer_prefix)
    return [layers[index] for index in range(len(layers))], shared


def _refuse_gaps(layers: Collection[int], layer_prefix: str) -> None:
    if not layers:
        raise CheckpointError(f"no tensor is named {layer_prefix}0.*; the checkpoint is of another kind")
    missing = next((index for index in range(len(layers)) if index not in layers), None)
    if missing is not None:
        have = f"there are tensors up to layer {max(layers)}"
        raise CheckpointError(f"layer {missing} is missing ({layer_prefix}{missing}.*), but {have}; download it again")


def _refuse_quantised(infos: Iterable[TensorInfo]) -> None:
    for info in infos:
        if info.dtype not in _READ_DTYPES:
            what = "quantised checkpoints are not read by this version"
            raise fault(info.path, f"tensor {show(info.name)} is {info.dtype}: {what}; use the bf16, fp16 or fp32 one")


def _read(infos: Iterable[TensorInfo]) -> Iterator[tuple[TensorInfo, torch.Tensor]]:
    """The tensors as they are stored, file by file in the order of their bytes, so that a disk reads straight on."""
    ordered = sorted(infos, key=lambda info: (info.path, info.offset))
    for path, group in groupby(ordered, key=lambda info: info.path):
        with _reading(path), safe_open(path, framework="pt", device="cpu") as file:
            for info in group:
                yield info, file.get_tensor(info.name)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    # The header was valid when the checkpoint was opened, so the file has changed or gone since.
    try:
        yield
    except (OSError, SafetensorError) as exc:
        raise fault(path, f"cannot be read ({exc}); check that nothing changed it, or download it again") from exc
