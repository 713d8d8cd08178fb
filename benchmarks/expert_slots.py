"""How often rows find their experts in slots, by the rule for what stays, on made-up routings.

    python -m benchmarks.expert_slots

A row's experts are those of the row before, or of the last eight rows, with the shares that are reported of real
mixtures (45 % and 80 %); the rest follows a text's own taste. Prompts come between answers. Needs no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import numpy as np

from offspec.loaders.streaming.use_ranks import UseRanks

LAYERS, EXPERTS, USED = 24, 64, 4
AS_BEFORE, AS_RECENTLY, RECENT = 0.45, 0.80, 8
TEXTS, PROMPT, ANSWER = 6, 500, 150
SLOTS = (0.12, 0.2, 0.4, 0.6)  # shares of all experts
HALF_LIVES = (3.0, 16.0)
Routing = list[dict[int, int]]  # of a pass: each layer's experts, with their rows


class Slots(Protocol):
    def misses(self, units: Mapping[int, int], num_pass: int) -> int:
        """Use these units, each by so many rows; returns how many were not there."""


class Latest:
    """Those used latest (LRU)."""

    def __init__(self, num: int) -> None:
        self._num, self._held = num, dict[int, None]()

    def misses(self, units: Mapping[int, int], num_pass: int) -> int:
        missing = [unit for unit in units if unit not in self._held]
        for unit in units:
            self._held.pop(unit, None)
            self._held[unit] = None
        for unit in [*self._held][: max(0, len(self._held) - self._num)]:
            del self._held[unit]
        return len(missing)


class Ranked:
    """Those of the highest ranks (`UseRanks`)."""

    def __init__(self, num: int, half_life: float) -> None:
        self._num, self._held, self._ranks = num, set[int](), UseRanks(half_life)

    def misses(self, units: Mapping[int, int], num_pass: int) -> int:
        num_rows = sum(units.values())
        missing = [unit for unit in units if unit not in self._held]
        for unit, rows in units.items():
            self._ranks.use(unit, num_pass, rows / num_rows)
        for unit in missing:
            if len(self._held) >= self._num and (lowest := self._ranks.lowest(())) is not None:
                self._held.remove(lowest)
                self._ranks.drop(lowest)
            self._held.add(unit)
            self._ranks.hold(unit)
        return len(missing)


class Text:
    """Rows of one text and the experts that they choose."""

    def __init__(self, luck: np.random.Generator) -> None:
        self._luck = luck
        self._taste = luck.dirichlet(np.full(EXPERTS, 1.0), size=LAYERS)
        self._recent: list[list[list[int]]] = [[] for _ in range(LAYERS)]

    def row(self) -> list[list[int]]:
        """The experts of the next row, by layer."""
        return [self._of_layer(layer) for layer in range(LAYERS)]

    def _of_layer(self, layer: int) -> list[int]:
        chosen, recent = list[int](), self._recent[layer]
        while len(chosen) < USED:
            kind = self._luck.random()
            if recent and kind < AS_RECENTLY:
                row = recent[-1] if kind < AS_BEFORE else recent[self._luck.integers(len(recent))]
                number = row[self._luck.integers(USED)]
            else:
                number = int(self._luck.choice(EXPERTS, p=self._taste[layer]))
            if number not in chosen:
                chosen.append(number)
        self._recent[layer] = [*recent, chosen][-RECENT:]
        return chosen


def passes(seed: int) -> Iterator[tuple[str, Routing]]:
    """The passes of some texts: "prompt" or "answer", and what they use."""
    luck = np.random.default_rng(seed)
    for _ in range(TEXTS):
        text = Text(luck)
        yield "prompt", _joined([text.row() for _ in range(PROMPT)])
        for _ in range(ANSWER):
            yield "answer", _joined([text.row()])


def _joined(rows: list[list[list[int]]]) -> Routing:
    counts: Routing = [{} for _ in range(LAYERS)]
    for row in rows:
        for layer, numbers in enumerate(row):
            for number in numbers:
                counts[layer][number] = counts[layer].get(number, 0) + 1
    return counts


def hit_rates(slots: Slots, routings: list[tuple[str, Routing]]) -> dict[str, float]:
    """The share of a pass's experts in slots, of prompts and of answers."""
    missing, used = {"prompt": 0, "answer": 0}, {"prompt": 0, "answer": 0}
    for num_pass, (kind, routing) in enumerate(routings):
        for layer, rows in enumerate(routing):
            units = {layer * EXPERTS + number: count for number, count in rows.items()}
            missing[kind] += slots.misses(units, num_pass)
            used[kind] += len(units)
    return {kind: 1 - missing[kind] / used[kind] for kind in used}


def main() -> None:
    routings = [*passes(0)]
    for share in SLOTS:
        num = round(share * LAYERS * EXPERTS)
        rules: dict[str, Slots] = {"latest": Latest(num)}
        rules |= {f"halved every {half:g} passes": Ranked(num, half) for half in HALF_LIVES}
        for name, slots in rules.items():
            rates = hit_rates(slots, routings)
            print(f"{share:4.0%}  {name:22}  answers {rates['answer']:.3f}  prompts {rates['prompt']:.3f}", flush=True)


if __name__ == "__main__":
    main()
