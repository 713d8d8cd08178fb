"""A pass of the target over the texts of one or several requests.

propose (draft) → score (target) → verify (scheduler) → commit (both caches) → observe.
The first pass takes the prompt and the first tree together, so that the weights are streamed once for both. A prompt
of more than PASS_ROWS tokens takes several passes, the last of which has the tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from offspec.loaders.accelerators.cuda import span
from offspec.scheduler.drafting.drafter import Drafting
from offspec.scheduler.drafting.score_calls import run_together
from offspec.scheduler.pace.costs import CostCurve
from offspec.scheduler.pace.shared_pass import SharedPass
from offspec.scheduler.trees.token_tree import FloatArray
from offspec.scheduler.trees.verify import Verdict

from ..background import in_background
from ..drafts.shared_rounds import SharedRounds
from ..errors import OffspecError
from ..model.decoder import score_together
from ..model.pass_rows import PASS_ROWS, TextRows
from ..model.row_logits import RowLogits
from ..planning.out_of_memory import retry_out_of_memory
from .sequence import Sequence

# Rows of prompts in a pass that texts past their prompts share: a long prompt may not delay them long. At most
# PREFILL_ROWS, and so few that the pass takes PREFILL_S more than one without, or PREFILL_SLOWDOWN times as long.
PREFILL_ROWS, PREFILL_S, PREFILL_SLOWDOWN = 512, 0.5, 2.0
FEWEST_PREFILL_ROWS = 16
MEASURED = 0.02  # weight of measured passes from which on they count as measured


def run_pass(
    sequences: list[Sequence], shared: SharedPass, begin_again: Callable[[str], None]
) -> list[Verdict | OffspecError | None]:
    """One pass of the target over these texts: propose, score, verify, commit, observe.

    Returns each one's verdict: None after a part of its prompt, an error if logits are not finite or its constraint
    allows no token. Each text is the same as in passes of its own, whatever else shares the pass. begin_again: called
    with torch's message after device memory ran out; it frees some, and starts all texts again.
    """
    started = time.perf_counter()
    passed = retry_out_of_memory(lambda: _score(sequences, shared), begin_again)
    verdicts = passed.verdicts
    if not passed.logits:
        return verdicts
    of_all = zip(sequences, verdicts, passed.logits, strict=True)
    messages = [each.commit(verdict, logits) for each, verdict, logits in of_all if isinstance(verdict, Verdict)]
    if any(messages):
        begin_again(max(messages))
    num_rows = sum(sequence.num_rows for sequence in sequences)
    num_tokens = max(len(sequence.text) for sequence in sequences)
    sequences[0].models.loaded.observe_pass(num_rows, num_tokens, passed.target_s)
    ended = time.perf_counter()
    for sequence in sequences:
        sequence.count(passed.drafted_s, passed.target_s, ended - started)
    good = [verdict for verdict in verdicts if isinstance(verdict, Verdict)]
    shared.end(passed.num_nodes, sum(len(verdict.tokens) for verdict in good), passed.target_s, ended - started)
    for sequence, verdict in zip(sequences, verdicts, strict=True):
        if isinstance(verdict, Verdict):
            sequence.observe(verdict)
    return verdicts


@dataclass(frozen=True)
class ScoredPass:
    """A pass before anything of it is kept. logits: of each text. Seconds: of drafting, of the pass with verdicts."""

    verdicts: list[Verdict | OffspecError | None]
    logits: list[RowLogits]
    num_nodes: int
    drafted_s: float
    target_s: float


def _score(sequences: list[Sequence], shared: SharedPass) -> ScoredPass:
    """Propose, score and verify. If drafting failed for all texts, there is no pass."""
    started = time.perf_counter()
    with span("draft"):
        rows = _propose(sequences, shared)
    drafted = time.perf_counter()
    if all(sequence.fault is not None for sequence in sequences):
        return ScoredPass([sequence.fault for sequence in sequences], [], 0, drafted - started, 0.0)
    with span("pass"), _drafting_ahead(sequences, shared):
        texts = [(sequence.target, text_rows) for sequence, text_rows in zip(sequences, rows, strict=True)]
        logits = score_together(texts, sequences[0].models.draft.target_layers)
        sequences[0].target.synchronize()
    with span("verify"):
        verdicts = [sequence.verdict(text_logits) for sequence, text_logits in zip(sequences, logits, strict=True)]
    num_nodes = sum(len(text_rows.tokens) for text_rows in rows)
    return ScoredPass(verdicts, logits, num_nodes, drafted - started, time.perf_counter() - drafted)


def _propose(sequences: list[Sequence], shared: SharedPass) -> list[TextRows]:
    """Draft for all texts, and share the pass among their trees."""
    began = time.perf_counter()
    num_beside = prefill_rows(sequences[0].models.stats.costs.target, len(sequences))
    chains = _chains([sequence.num_unscored for sequence in sequences], num_beside)
    shared.begin(chains)
    draftings = [_drafting(sequence, num_chain, shared) for sequence, num_chain in zip(sequences, chains, strict=True)]
    drafted = run_together(draftings, SharedRounds(shared).score)
    competing = [tree for tree in drafted if tree is not None]
    sizes = iter(shared.sizes(competing, time.perf_counter() - began))
    return [
        sequence.send(None if tree is None else next(sizes)) for sequence, tree in zip(sequences, drafted, strict=True)
    ]


def _drafting(sequence: Sequence, num_chain: int, shared: SharedPass) -> Drafting[FloatArray | None]:
    shared.next_text()
    return (yield from sequence.draft(num_chain))


def prefill_rows(costs: CostCurve, num_texts: int) -> int:
    """How many rows of prompts may join a pass of `num_texts` texts; costs: of passes by number of rows.

    At most twice as many as in measured passes, whose rows are taken to cost as much again.
    """
    if not costs.is_known:
        return PREFILL_ROWS

    def seconds(num_rows: int) -> float:
        return float(costs.seconds(np.array([num_texts + num_rows]))[0])

    plain_s, rows = seconds(0), FEWEST_PREFILL_ROWS
    most_s, pass_s = max(plain_s * PREFILL_SLOWDOWN, plain_s + PREFILL_S), seconds(rows)
    while rows < PREFILL_ROWS and costs.weight(num_texts + rows) > MEASURED:
        more = min(2 * rows, PREFILL_ROWS)
        more_s = seconds(more)
        if costs.weight(num_texts + more) <= MEASURED:
            more_s = max(more_s, plain_s + (pass_s - plain_s) * more / rows)
        if more_s > most_s:
            break
        rows, pass_s = more, more_s
    return rows


def _chains(unscored: list[int], num_beside: int) -> list[int]:
    """How many of its unscored tokens each text scores in the next pass: of all prompts PASS_ROWS or `num_beside`.

    num_beside: of prompts beside texts past theirs. Prompts have equal shares, and what shorter ones leave goes to
    longer ones: so none waits for another to end.
    """
    chains = [1] * len(unscored)
    prompts = sorted((number, place) for place, number in enumerate(unscored) if number > 1)
    left = num_beside if 1 in unscored else PASS_ROWS
    for rank, (number, place) in enumerate(prompts):
        chains[place] = max(1, min(number, left // (len(prompts) - rank)))
        left -= chains[place]
    return chains


def _drafting_ahead(sequences: list[Sequence], shared: SharedPass) -> AbstractContextManager[None]:
    """Computes masks and drafts for these texts in the background, as far as their drafters want to."""
    sound = [sequence for sequence in sequences if sequence.fault is None]
    drafting = [text for text in sound if text.drafter.wants_overlap]
    constrained = [text for text in sound if text.prepares_masks]
    if not drafting and not constrained:
        return nullcontext()

    def work(is_over: Callable[[], bool]) -> None:
        for text in constrained:
            text.prepare_masks(is_over)
        run_together([text.extending(is_over) for text in drafting], SharedRounds(shared).score)

    return in_background(work, sequences[0].models.device)
