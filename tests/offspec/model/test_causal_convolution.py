"""A convolution along paths of a tree, beside the one of each path as a chain."""

from __future__ import annotations

import random

import pytest
import torch

from offspec.model.causal_convolution import chain_convolution, path_convolution, path_windows

from .test_recurrence import paths_of, random_parents


@pytest.mark.parametrize("seed", range(4))
def test_a_convolution_looks_along_the_path(seed: int) -> None:
    chance, made = random.Random(seed), torch.Generator().manual_seed(seed)
    parents, size, channels = random_parents(chance), 4, 6
    values = torch.randn(len(parents), channels, generator=made)
    before, weight = (torch.randn(*shape, generator=made) for shape in ((size - 1, channels), (channels, size)))
    bias = torch.randn(channels, generator=made)
    windows = path_windows(values, before, torch.tensor(parents))
    found = path_convolution(windows, weight, bias)
    for row, path in enumerate(paths_of(parents)):
        assert torch.equal(found[row], chain_convolution(values[path], before, weight, bias)[-1])
        assert torch.equal(windows[row].t(), torch.cat((before, values[path]))[-size:])
