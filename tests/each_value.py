"""Which runs of a test marked `each_value` are left out: all but a few in which each value of each parameter occurs.

`each_value(together=2)`: in which each value of a parameter occurs with each value of each other one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import combinations
from typing import TypeVar

import pytest

Item = TypeVar("Item")
Value = tuple[tuple[int, str], ...]  # which `parametrize` or fixture, and the name of one of its values; of each


def spared(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Of the tests marked `each_value`, the runs whose values all occur in others of the same test."""
    runs = defaultdict[str, dict[pytest.Item, set[Value]]](dict)
    for item in items:
        if (marker := item.get_closest_marker("each_value")) is not None:
            runs[item.nodeid.partition("[")[0]][item] = values_of(item, **marker.kwargs)
    return {item for values in runs.values() for item in values.keys() - covering(values)}


def values_of(item: pytest.Item, together: int = 1) -> set[Value]:
    """Parameters that are set together count as one."""
    callspec = getattr(item, "callspec", None)
    return set() if callspec is None else set(combinations(enumerate(callspec._idlist), together))


def covering(values: dict[Item, set[Value]]) -> set[Item]:
    """Runs in which each value occurs: again and again the first one with the most values that are still missing."""
    missing, chosen = set().union(*values.values()), set[Item]()
    if not missing:  # no parameters, one run
        return set(values)
    while missing:
        best = max(values, key=lambda item: len(values[item] & missing))
        chosen.add(best)
        missing -= values[best]
    return chosen
