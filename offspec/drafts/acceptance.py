"""Tokens per pass by kind of draft, for predictions before anything has run: measured on the built-in pair.

A draft of a real model may guess better or worse; `offspec run --stats` tells tokens per pass.
"""

from __future__ import annotations

from ..planning.drafting import Acceptance

_SOURCE = "the built-in pair, docs/drafts-results.md"

# SubSpec (2509.18344) has 11.9 for a 1.5B draft of a 7B model, and 28.4 for a shadow of 4 bits.
SMALL_MODEL = Acceptance({64: 13.8, 256: 17.4}, {64: 5.1, 256: 6.7}, _SOURCE)
OTHER_VOCABULARY = Acceptance({64: 5.3}, {64: 2.6}, _SOURCE)
SHADOWS = {
    4: Acceptance({64: 22.0, 256: 28.3}, {64: 11.3, 256: 15.0}, _SOURCE),
    2: Acceptance({64: 12.8, 256: 16.7}, {64: 4.7, 256: 6.1}, _SOURCE),
    3: Acceptance({64: 18.7, 256: 22.9}, {64: 8.5, 256: 10.8}, _SOURCE),  # with 3 of 8 layers without a copy
}
_HEADS_SOURCE = "heads trained for half an hour on the built-in target, docs/drafts-results.md"
_EAGLE_3 = Acceptance({16: 5.00, 64: 6.19}, {16: 2.47, 64: 3.01}, _HEADS_SOURCE)
_MEDUSA = Acceptance({16: 2.63, 64: 2.90}, {16: 1.73, 64: 1.96}, _HEADS_SOURCE)
# By `HeadSpec.kind`. The others were compared after a short training only, in which each brought more than Medusa: its
# figures are the least that they should bring. FSPAD, the best of them, and EAGLE-1 have those of EAGLE-3.
HEADS = {
    "EAGLE-3": _EAGLE_3,
    "EAGLE-1": _EAGLE_3,
    **dict.fromkeys(("Medusa", "Hydra", "MLP speculator", "recurrent", "Clover", "Clover-2", "Amphista"), _MEDUSA),
    "FSPAD": _EAGLE_3,
}
EXIT_LAYER = Acceptance({64: 4.1}, {64: 3.3}, "the built-in target, docs/early-exit.md")
EXIT_AGREEMENT = 0.59  # of that exit layer with its target, on held-out text
EXIT = Acceptance({64: 2.0}, {64: 2.0}, "the built-in target, docs/early-exit.md")
RESIDENT_LAYERS = Acceptance({64: 1.3}, {64: 1.3}, _SOURCE)
# On a 7B model grown from the built-in one (docs/LOG.md, 2026-11-23), and at temperature 1 on the built-in one. Greedy
# texts of the built-in target repeat themselves, so its own 5.9 would promise too much.
LOOKUP = Acceptance({64: 2.6}, {64: 1.6}, "docs/LOG.md, 2026-11-23")


def of_agreement(share: float, source: str) -> Acceptance:
    """Of a draft whose likeliest token is the target's at this share of places: a chain until the first wrong guess."""
    tokens = min(1 / max(1 - share, 0.01), 60.0)
    return Acceptance({64: tokens}, {64: tokens}, source)
