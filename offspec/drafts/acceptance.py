"""Tokens per pass by kind of draft, for predictions before anything has run: figures, their sources and their spreads.

A draft of a real model may guess better or worse; `offspec run --stats` tells tokens per pass. A spread that was
measured over prompts is written as the least and the most of them ÷ the figure: `Spread(3.4 / 5.1, 8.0 / 5.1, "…")`.
"""

from __future__ import annotations

from ..planning.draft_forecast import Acceptance, Spread

_SOURCE = (
    "Qwen2.5-Coder 1.5B with a 0.5B draft on MT-Bench, docs/results/benchmarks.md; "
    "256 nodes by the built-in pair's ratio; other sizes by a fit, docs/results/drafts.md"
)
_SHADOW_SOURCE = (
    "shadows of Qwen2.5-Coder 1.5B on two prompts, docs/results/benchmarks.md; {scaled} by the built-in pair's ratios"
)
_BUILT_IN = "the built-in pair, docs/results/drafts.md"
_SPREAD = Spread(0.6, 1.9, "eight questions of MT-Bench without the least and the most, docs/results/benchmarks.md")
# Not measured over prompts: real models differ from the built-in pair by half (docs/results/drafts.md).
_HALF = Spread(0.5, 1.5, "assumed, half less and half more, docs/results/drafts.md")

# SubSpec (2509.18344) has 11.9 for a 1.5B draft of a 7B model, and 28.4 for a shadow of 4 bits.
SMALL_MODEL = Acceptance({64: 9.4, 256: 11.8}, {64: 7.3, 256: 9.6}, _SOURCE, _SPREAD)
OTHER_VOCABULARY = Acceptance({64: 5.3}, {64: 2.6}, _BUILT_IN, _HALF)
# Weights of the pair of SMALL_MODEL, draft and target; and the powers with which wrong guesses become fewer with the
# draft's weights, and more with the target's: a fit by eye to published speeds (docs/results/drafts.md).
_PAIR, _BY_DRAFT, _BY_TARGET = (0.49e9, 1.54e9), 0.3, 0.1
_LEAST_FITTED = 1e8  # weights of a target; below, nothing was compared
# On its two prompts the small draft has 6.9 and 4.8. 3 bits: with 9 of 28 layers without a copy.
SHADOWS = {
    4: Acceptance({64: 19.7, 256: 25.3}, {64: 15.1, 256: 20.0}, _SHADOW_SOURCE.format(scaled="256 nodes"), _HALF),
    3: Acceptance({64: 12.2, 256: 14.9}, {64: 10.7, 256: 13.6}, _SHADOW_SOURCE.format(scaled="256 nodes"), _HALF),
    2: Acceptance({64: 8.4, 256: 10.9}, {64: 5.9, 256: 7.7}, _SHADOW_SOURCE.format(scaled="2 bits"), _HALF),
}
_HEADS_SOURCE = "heads trained for half an hour on the built-in target, docs/results/drafts.md"
_EAGLE_3 = Acceptance({16: 5.00, 64: 6.19}, {16: 2.47, 64: 3.01}, _HEADS_SOURCE, _HALF)
_MEDUSA = Acceptance({16: 2.63, 64: 2.90}, {16: 1.73, 64: 1.96}, _HEADS_SOURCE, _HALF)
_SHORTLY = "trained for some minutes on the built-in target, docs/results/drafts.md"
_MTP = Acceptance({16: 3.37, 64: 4.34, 256: 5.33}, {16: 2.44, 64: 2.82, 256: 3.51}, f"an MTP layer {_SHORTLY}", _HALF)
# Published heads have learnt from a thousand times as many texts.
_DFLASH = Acceptance(
    {16: 2.32, 64: 2.62, 256: 2.88},
    {16: 1.89, 64: 2.29, 256: 2.57},
    f"a DFlash head {_SHORTLY}",
    Spread(0.5, 6.1 / 2.62, "assumed half less; 6.1 is published for MT-Bench (DDTree, 2604.12989)"),
)
# The others were compared after a short training only, in which each brought more than Medusa: its figures are the
# least that they should bring. FSPAD, the best of them, and EAGLE-1 have those of EAGLE-3.
_LIKE_EAGLE_3 = ("EAGLE-1", "EAGLE-3", "FSPAD")
_EXIT_SOURCE = "the built-in target, docs/results/early-exit.md"
EXIT_LAYER = Acceptance({64: 4.1}, {64: 3.3}, _EXIT_SOURCE, _HALF)
EXIT_AGREEMENT = 0.59  # of that exit layer with its target, on held-out text
EXIT = Acceptance({64: 2.0}, {64: 2.0}, _EXIT_SOURCE, _HALF)
_LOOKUP_SOURCE = "Qwen2.5-Coder 1.5B on MT-Bench, docs/results/benchmarks.md; at temperature 1 the built-in target"
LOOKUP = Acceptance(
    {64: 2.1}, {64: 1.6}, _LOOKUP_SOURCE, Spread(0.75, 1.3, "eight questions of MT-Bench, docs/results/benchmarks.md")
)


def wrong_guesses(draft_weights: int, target_weights: int) -> float:
    """Wrong guesses of a small model as a share of those of the measured pair."""
    if target_weights < _LEAST_FITTED:
        return 1.0
    draft, target = draft_weights / _PAIR[0], target_weights / _PAIR[1]
    return float(draft**-_BY_DRAFT * target**_BY_TARGET)


def of_head(kind: str) -> Acceptance:
    """Of a trained head. kind: `HeadSpec.kind`."""
    if kind in (measured := {"MTP": _MTP, "DFlash": _DFLASH, "DSpark": _DFLASH}):
        return measured[kind]
    return _EAGLE_3 if kind in _LIKE_EAGLE_3 else _MEDUSA
