"""`DeviceKind`: how kinds of devices differ, for arithmetic, plans and policies.

Who chooses by a device reads a trait of its kind, which says why; only `kind_of` compares types. Plans are also made
for machines that are not here, so a kind needs no device. `loaders.accelerators` has what a device does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DeviceKind:
    """The traits of a kind of device, by default a CPU's. Attention is that of torch's operators for parts of keys."""

    has_own_memory: bool = False  # weights reach it through a link; else it computes in RAM
    has_streams: bool = False  # work of several runs at once
    records: bool = False  # a recorded round takes less time than its operations
    multiplies_stored: bool = True  # by exact kernels (`x86`) with matrices as they are stored, in most formats
    converts_in_kernels: bool = False  # operators convert numbers while they compute, without a copy
    launch_s: float = 0.0  # the host's time for an operation
    replay_s: float = 0.0  # the same in a recorded round
    timed_side: int = 2048  # of square matrices whose product takes longer than its launch
    fp32_share: float = 1.0  # of the rate of products in 16 bits
    workspace_bytes: int = 0  # of its libraries
    # Rows of a pass for which arithmetic takes longer than reading 16-bit weights from any disk (512 operations per
    # weight: 1 TFLOP/s for 4 GB/s). KV entries of more would take memory from resident layers.
    useful_rows: int = 256
    unpacked_numbers: int = 2**21  # of keys and values, at once: they fit the caches
    attended_itemsize: int = 8  # of the largest numbers in attention
    attended_alignment: int = 1  # bytes of which a head's row has to be a multiple there
    split_bytes: int = 0  # that attention holds beside its result
    repeats_masks: bool = True  # for each head


CPU = DeviceKind()
GPU = DeviceKind(
    has_own_memory=True,
    has_streams=True,
    records=True,
    multiplies_stored=False,
    converts_in_kernels=True,
    launch_s=5e-6,
    replay_s=1.5e-6,
    timed_side=4096,
    fp32_share=0.5,  # of a GeForce card (`loaders.machine.gpus`)
    workspace_bytes=300 * 2**20,
    useful_rows=1024,  # `scheduler.params.MAX_NODES`
    unpacked_numbers=2**24,  # a dozen kernels are launched for each part of the keys
    # Limits of torch's CUDA kernels (aten/src/ATen/native/transformers/cuda: flash_attn/flash_api.cpp, sdp_utils.cpp,
    # mem_eff_attention/kernel_forward.h). FlashAttention splits the keys among processors that few rows leave idle, in
    # as many tiles of 64 rows as they run at once, with results in fp32.
    attended_itemsize=4,
    attended_alignment=16,
    split_bytes=2**24,
    repeats_masks=False,
)


def kind_of(device: torch.device) -> DeviceKind:
    """A GPU's for CUDA's type (ROCm's builds of torch use this name too); all others compute as a CPU does."""
    return GPU if device.type == "cuda" else CPU
