"""Which units are worth their memory: those that were used most and latest.

The rank of a unit is the sum of its uses, each of which counts half as much after HALF_LIFE passes: "LRFU" (Lee et al.,
IEEE Transactions on Computers 50(12), 2001). A use counts by the share of a pass's rows that chose the unit. So a pass
over a long prompt, which uses every unit, drops few of those that single rows use again and again.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection

from .stream import Unit

HALF_LIFE = 3.0  # passes, measured on replayed routings (docs/LOG.md)


class UseRanks:
    """The ranks of units, and the lowest of those that are held. Ranks of units that are not held are kept, too."""

    def __init__(self, half_life: float = HALF_LIFE) -> None:
        self._per_pass = 1 / half_life
        self._ranks: dict[Unit, float] = {}  # log2 of the sum as it was at pass 0: comparable without its age
        self._held: set[Unit] = set()
        self._heap: list[tuple[float, Unit]] = []  # held units; entries with an earlier rank are skipped

    def use(self, unit: Unit, num_pass: int, share: float) -> None:
        """Count a use by a share of the rows of pass number `num_pass`."""
        new, old = math.log2(share) + num_pass * self._per_pass, self._ranks.get(unit, -math.inf)
        high, low = max(new, old), min(new, old)
        self._ranks[unit] = high + math.log2(1 + 2 ** (low - high))
        if unit in self._held:
            self._push(unit)

    def hold(self, unit: Unit) -> None:
        self._held.add(unit)
        self._push(unit)

    def drop(self, unit: Unit) -> None:
        self._held.discard(unit)

    def lowest(self, but: Collection[Unit]) -> Unit | None:
        """The held unit of the lowest rank that is not in `but`; None if there is none."""
        aside, lowest = [], None
        while self._heap and lowest is None:
            rank, unit = heapq.heappop(self._heap)
            if unit not in self._held or rank != self.rank(unit):
                continue
            aside.append((rank, unit))
            lowest = None if unit in but else unit
        for entry in aside:
            heapq.heappush(self._heap, entry)
        return lowest

    def rank(self, unit: Unit) -> float:
        return self._ranks.get(unit, -math.inf)

    def _push(self, unit: Unit) -> None:
        heapq.heappush(self._heap, (self.rank(unit), unit))
        if len(self._heap) > 8 * len(self._held) + 64:
            self._heap = [(self.rank(held), held) for held in self._held]
            heapq.heapify(self._heap)
