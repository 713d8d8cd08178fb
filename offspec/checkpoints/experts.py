"""Checkpoints that store a layer's experts in one tensor, as if each expert had its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from offspec.loaders.files.checkpoint import Checkpoint, CheckpointView, TensorInfo

JOINED = re.compile(r"(.+\.experts)\.([a-z]\w*)(\.\w+)?")  # the prefix, the matrix, and perhaps ".weight"


def by_expert(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with tensors [experts, …] as tensors of each expert, such as `experts.3.down_proj.weight`."""
    tensors = {part.name: part for info in checkpoint.tensors.values() for part in _parts(info)}
    return checkpoint if tensors.keys() == checkpoint.tensors.keys() else CheckpointView(checkpoint, tensors)


def _parts(info: TensorInfo) -> Iterator[TensorInfo]:
    match = JOINED.fullmatch(info.name)
    if match is None or len(info.shape) < 2 or not info.shape[0] or info.nbytes % info.shape[0]:
        yield info
        return
    prefix, matrix, suffix = match.groups()
    nbytes = info.nbytes // info.shape[0]
    for number in range(info.shape[0]):
        name = f"{prefix}.{number}.{matrix}{suffix or '.weight'}"
        yield replace(info, name=name, shape=info.shape[1:], offset=info.offset + number * nbytes, nbytes=nbytes)
