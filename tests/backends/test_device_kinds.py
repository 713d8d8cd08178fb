"""Kinds of devices agree with what other folders assume of them."""

from __future__ import annotations

import torch

from offspec.backends.device_kinds import CPU, GPU, kind_of
from offspec.scheduler.params import MAX_NODES


def test_a_kind_is_that_of_the_device() -> None:
    assert (kind_of(torch.device("cpu")), kind_of(torch.device("cuda:1"))) == (CPU, GPU)


def test_no_tree_is_larger_than_rooms_for_trees() -> None:
    assert max(CPU.useful_rows, GPU.useful_rows) == MAX_NODES
