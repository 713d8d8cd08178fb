"""What texts run on: the models in memory, and the running statistics of the draft."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock

import torch

from offspec.scheduler.guessing.retrieval import SuffixIndex
from offspec.scheduler.params import AUTO_TEXTS

from ..drafts.base import Draft
from ..drafts.draft_stats import DraftStats
from ..loaded_target import LoadedTarget
from ..model.decoder import Decoder
from ..model.memory.request_caches import RequestCaches
from ..planning.out_of_memory import retry_out_of_memory
from ..text.tokenizer import Tokenizer
from .kept_costs import kept_costs_file, read_costs, write_costs


@dataclass(eq=False)
class Models:
    """A target, its tokenizer, a draft, and the estimates about the draft.

    One object for an engine and all of its requests, so that they see the same estimates, also after somebody replaced
    them. index: of other texts for n-gram lookup. stats: kept from request to request.
    """

    loaded: LoadedTarget
    tokenizer: Tokenizer
    draft: Draft
    index: SuffixIndex | None = None
    stats: DraftStats = field(init=False)
    _costs_file: Path | None = field(init=False)  # for the placement that the models were loaded with

    def __post_init__(self) -> None:
        self.stats = self._new_stats()
        self._costs_file = kept_costs_file(self.loaded, self.draft)
        read_costs(self.stats.costs, self._costs_file)
        self.draft.prepare(self.loaded.max_context)

    def keep_costs(self) -> None:
        """Keep what passes took for the next process, unless layers have moved since: then it is of two placements."""
        if kept_costs_file(self.loaded, self.draft) == self._costs_file:
            write_costs(self.stats.costs, self._costs_file)

    @property
    def target(self) -> Decoder:
        return self.loaded.decoder

    @property
    def device(self) -> torch.device:
        return self.target.device

    @property
    def turn(self) -> RLock:
        """The lock that a request holds while it uses the models."""
        return self.loaded.turn

    def estimates(self) -> DraftStats:
        """The estimates about the draft for a request: those kept from request to request, or new ones."""
        return self._new_stats() if self.loaded.is_deterministic else self.stats

    def _new_stats(self) -> DraftStats:
        target, guessing = self.loaded, self.draft.as_planned
        if target.rates is None:
            return self.draft.new_stats(target.decoder)
        predict_round_s = None if guessing is None else target.predicts_rounds(guessing)
        return self.draft.new_stats(target.decoder, target.predict_pass_s, predict_round_s)

    def max_texts(self, wanted: int | None = None) -> int:
        """The maximum number of texts that share passes. wanted: None is AUTO_TEXTS, or more if more were planned."""
        planned = 0 if self.loaded.plan is None else self.loaded.plan.reservation.texts
        return 1 if self.loaded.is_deterministic else wanted or max(AUTO_TEXTS, planned)

    def new_caches(self, num_tokens: int = 0, num_nodes: int = 0) -> RequestCaches:
        """Empty KV caches of one text, with room for `num_tokens` tokens and a tree of `num_nodes` nodes.

        They grow as needed. If device memory runs out here, the target is loaded again with fewer resident layers.
        """
        with self.turn:
            self.loaded.check()
            if num_tokens or num_nodes:
                self.loaded.spare_nothing()
            return retry_out_of_memory(
                lambda: self.draft.new_caches(self.target, num_tokens, num_nodes), self.loaded.make_room
            )
