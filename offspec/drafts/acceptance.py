"""Tokens per pass by kind of draft, for predictions before anything has run: figures, their sources and their spreads.

A draft of a real model may guess better or worse; `offspec run --stats` tells tokens per pass. A spread that was
measured over prompts is written as the least and the most of them ÷ the figure: `Spread(3.4 / 5.1, 8.0 / 5.1, "…")`.
"""

from __future__ import annotations

from ..planning.drafting import Acceptance, Spread

_SOURCE = "the built-in pair, docs/drafts-results.md"
# Not measured over prompts: docs/drafts-results.md warns that real models differ from the built-in pair by half.
# SubSpec (2509.18344) has 0.68 times its tokens per pass with a small draft, 11.9 for a 1.5B draft of a 7B model, and
# as many with a shadow of 4 bits, 28.4.
_HALF = Spread(0.5, 1.5, "assumed, half less and half more, docs/drafts-results.md")

SMALL_MODEL = Acceptance({64: 13.8, 256: 17.4}, {64: 5.1, 256: 6.7}, _SOURCE, _HALF)
OTHER_VOCABULARY = Acceptance({64: 5.3}, {64: 2.6}, _SOURCE, _HALF)
SHADOWS = {
    4: Acceptance({64: 22.0, 256: 28.3}, {64: 11.3, 256: 15.0}, _SOURCE, _HALF),
    2: Acceptance({64: 12.8, 256: 16.7}, {64: 4.7, 256: 6.1}, _SOURCE, _HALF),
    3: Acceptance({64: 18.7, 256: 22.9}, {64: 8.5, 256: 10.8}, _SOURCE, _HALF),  # with 3 of 8 layers without a copy
}
_HEADS_SOURCE = "heads trained for half an hour on the built-in target, docs/drafts-results.md"
_EAGLE_3 = Acceptance({16: 5.00, 64: 6.19}, {16: 2.47, 64: 3.01}, _HEADS_SOURCE, _HALF)
_MEDUSA = Acceptance({16: 2.63, 64: 2.90}, {16: 1.73, 64: 1.96}, _HEADS_SOURCE, _HALF)
# By `HeadSpec.kind`. The others were compared after a short training only, in which each brought more than Medusa: its
# figures are the least that they should bring. FSPAD, the best of them, and EAGLE-1 have those of EAGLE-3.
HEADS = {
    "EAGLE-3": _EAGLE_3,
    "EAGLE-1": _EAGLE_3,
    **dict.fromkeys(("Medusa", "Hydra", "MLP speculator", "recurrent", "Clover", "Clover-2", "Amphista"), _MEDUSA),
    "FSPAD": _EAGLE_3,
}
_EXIT_SOURCE = "the built-in target, docs/early-exit.md"
EXIT_LAYER = Acceptance({64: 4.1}, {64: 3.3}, _EXIT_SOURCE, _HALF)
EXIT_AGREEMENT = 0.59  # of that exit layer with its target, on held-out text
EXIT = Acceptance({64: 2.0}, {64: 2.0}, _EXIT_SOURCE, _HALF)
RESIDENT_LAYERS = Acceptance({64: 1.3}, {64: 1.3}, _SOURCE, _HALF)
# On a 7B model grown from the built-in one (docs/LOG.md, 2026-11-23), and at temperature 1 on the built-in one. Greedy
# texts of the built-in target repeat themselves, so its own 5.9 would promise too much.
LOOKUP = Acceptance({64: 2.6}, {64: 1.6}, "docs/LOG.md, 2026-11-23", _HALF)


def of_agreement(share: float, source: str) -> Acceptance:
    """Of a draft whose likeliest token is the target's at this share of places: a chain until the first wrong guess."""
    tokens = min(1 / max(1 - share, 0.01), 60.0)
    return Acceptance({64: tokens}, {64: tokens}, source, _HALF)
