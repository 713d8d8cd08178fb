"""How small tensors of the host get to the device that has the logits.

This folder knows no devices. Whoever makes a `Sampler` or a `Vocabulary` gives it a transfer. An engine's transfer does
not wait for layers that are being copied (`loaders/streaming/small_transfers.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ToDevice = Callable[[Tensor, torch.device], Tensor]


def copied(values: Tensor, device: torch.device) -> Tensor:
    """The plain twin of an engine's transfer: a copy, which on a GPU waits for all copies before it."""
    return values.to(device)
