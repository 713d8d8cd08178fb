"""Fixtures for several folders of loaders."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads, until the test's end."""
    threads = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(threads)
