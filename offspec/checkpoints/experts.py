"""Checkpoints that store a layer's experts in one tensor, as if each expert had its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from offspec.loaders.files.checkpoint import Change, Checkpoint, CheckpointView, TensorInfo

from ..model.config import ModelConfig

# The prefix, the matrix, and what the tensor is of it: "_bias", "_blocks" (MXFP4), ".weight" or nothing.
JOINED = re.compile(r"(.+\.experts)\.([a-z]\w*?)(_bias|_blocks|_scales|\.\w+)?")
PARTS = {None: ".weight", "_bias": ".bias", "_blocks": ".weight_blocks", "_scales": ".weight_scales"}
TRANSPOSED = Change(is_transposed=True)


def with_experts(checkpoint: Checkpoint, config: ModelConfig) -> tuple[Checkpoint, ModelConfig]:
    """The checkpoint by expert, and the config with the names of experts' tensors as they are stored."""
    experts = config.experts
    if experts is None:
        return checkpoint, config
    checkpoint = by_expert(checkpoint, are_transposed=experts.is_transposed)
    if experts.joined is None:
        return checkpoint, config
    end = f"{experts.prefix}.0.{experts.joined.up}.weight"
    is_joined = any(name.endswith(end) for name in checkpoint.tensors)
    return checkpoint, replace(config, experts=replace(experts, names=experts.joined)) if is_joined else config


def by_expert(checkpoint: Checkpoint, *, are_transposed: bool = False) -> Checkpoint:
    """The checkpoint with tensors [experts, …] as tensors of each expert, such as `experts.3.down_proj.weight`.

    are_transposed: plain matrices have inputs before outputs.
    """
    tensors = {part.name: part for info in checkpoint.tensors.values() for part in _parts(info, are_transposed)}
    return checkpoint if tensors.keys() == checkpoint.tensors.keys() else CheckpointView(checkpoint, tensors)


def _parts(info: TensorInfo, are_transposed: bool) -> Iterator[TensorInfo]:
    match = JOINED.fullmatch(info.name)
    if match is None or len(info.shape) < 2 or not info.shape[0] or info.nbytes % info.shape[0]:
        yield info
        return
    prefix, matrix, part = match.groups()
    part, nbytes = PARTS.get(part, part), info.nbytes // info.shape[0]
    change = TRANSPOSED if are_transposed and part == ".weight" else info.change
    for number in range(info.shape[0]):
        name, offset = f"{prefix}.{number}.{matrix}{part}", info.offset + number * nbytes
        yield replace(info, name=name, shape=info.shape[1:], offset=offset, nbytes=nbytes, change=change)
