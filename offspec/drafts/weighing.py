"""Compares drafts by predicted tokens/s before anything is loaded: a draft is chosen by its latency (2402.01528)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from offspec.loaders.streaming.placement import EXPERTS_ITEM

from ..errors import OffspecError
from ..notes import Note
from ..planning.draft_forecast import Drafting, RatesOf, predict_drafting
from ..planning.plan import PROGRAM_ITEM, Plan
from .acceptance import LOOKUP
from .base import Choice, OpenedDraft, OpenRequest
from .family_drafts import FamilyDraft, family_draft
from .kinds import AUTO, automatic_names, exit_names, mtp_names, open_draft, shadow_names
from .layer_drafts import SHADOW
from .model_draft import OpenedModel
from .self_draft import NAME as SELF
from .without_model import LookupDraft

NO_DRAFT = "none"
PlanWith = Callable[[OpenedDraft], Plan]  # raises MemoryLimitError


@dataclass(frozen=True)
class Prospect:
    """What a draft is expected to bring.

    name: as `--draft` takes it. plan: None if the draft does not fit or cannot be used, and `why_not` says why; it also
    says why lookup would draft instead. draft_bytes: memory that it needs. greedy, sampled: the fastest drafting at
    temperature 0 and 1. source: where the tokens per pass come from. range_source: where their range comes from; ""
    without one. shares_vocabulary: of a small model, whether it has the target's, as far as its files tell.
    download_bytes: of a model that is not here, its weights.
    """

    name: str
    plan: Plan | None = None
    why_not: str = ""
    draft_bytes: int = 0
    greedy: Drafting | None = None
    sampled: Drafting | None = None
    source: str = ""
    range_source: str = ""
    shares_vocabulary: bool | None = None
    download_bytes: int = 0

    @property
    def tokens_per_s(self) -> float:
        """At temperature 0; 0 for a draft that cannot be used."""
        return self.greedy.tokens_per_s if self.greedy else 0.0

    def as_dict(self) -> dict[str, Any]:
        if self.why_not or self.plan is None or self.greedy is None or self.sampled is None:
            return {"draft": self.name, "why_not": self.why_not}
        return {
            "draft": self.name,
            "draft_bytes": self.draft_bytes,
            "num_resident_layers": len(self.plan.placement.resident),
            "greedy": vars(self.greedy),
            "sampled": vars(self.sampled),
            "source": self.source,
            "range_source": self.range_source,
            "shares_vocabulary": self.shares_vocabulary,
            "download_bytes": self.download_bytes,
        }


@dataclass(frozen=True)
class Scales:
    """Compares drafts of one target.

    request: opens drafts that are only planned for. plan_with: the plan with a draft.
    """

    model: str
    request: OpenRequest
    plan_with: PlanWith

    def names(self, given: Sequence[str]) -> list[str]:
        """The names without duplicates; `auto` and `shadow` become the names that they choose from.

        Raises UsageError for settings of an early exit if none is given.
        """
        if SELF not in given:
            replace(self.request.options, draft=given[0]).refuse_exit_file()
        chosen = list[str]()
        for name in given:
            chosen += self._chosen_from(name) or [name]
        return list(dict.fromkeys(chosen))

    def _chosen_from(self, name: str) -> list[str]:
        """What a name stands for, if it leaves a choice."""
        if name == AUTO:
            return automatic_names(self.model, self.request)
        if name == SELF:
            return exit_names(self.request)
        return shadow_names() if name == SHADOW else []

    def first_plan(self, names: Sequence[str]) -> Plan:
        """The plan with the first draft that can be used. Raises the first one's OffspecError if none can."""
        errors = list[OffspecError]()
        for name in names:
            try:
                return self.plan_with(self.open(name, self.request.notes))
            except OffspecError as exc:
                errors.append(exc)
        raise errors[0]

    def open(self, name: str, notes: list[Note]) -> OpenedDraft:
        """The draft of this name, only planned for: nothing is made or loaded. Raises OffspecError."""
        options = replace(self.request.options, draft=name)
        if name != SELF:  # the flag is another draft's
            options = replace(options, exit_layer=None)
        return open_draft(self.model, replace(self.request, options=options, tokenizer=None, notes=notes))

    def compare(self, names: Sequence[str], rates_of: RatesOf, plan: Plan) -> list[Prospect]:
        """What these drafts would bring; and the usual ones, if several are compared or `plan` streams layers.

        The family's small model is one of them for a dense target that is streamed, if no small model of the target's
        vocabulary is among `names`.
        """
        given = [self.prospect(name, rates_of) for name in names]
        if plan.placement.is_resident and len(names) == 1:
            return given
        others = [name for name in (*mtp_names(self.request), *usual_names(plan)) if name not in names]
        if plan.placement.streamed and not any(each.shares_vocabulary for each in given) and (family := self._family):
            opened = OpenedModel.planned(family.name, family.files, self.request)
            given.append(replace(self._with(family.name, opened, rates_of), download_bytes=family.num_bytes))
        return [*given, *(self.prospect(name, rates_of) for name in others)]

    @cached_property
    def _family(self) -> FamilyDraft | None:
        """The small model of a dense target's family: each further row of a mixture moves other experts."""
        request = self.request
        is_dense = request.target.config.is_native and request.target.config.experts is None
        return family_draft(request.target, request.dtype) if is_dense else None

    def prospect(self, name: str, rates_of: RatesOf) -> Prospect:
        """What this draft would bring, or why it cannot be used."""
        try:
            opened = self.open(name, [])
        except OffspecError as exc:
            return Prospect(name, why_not=str(exc))
        return self._with(name, opened, rates_of)

    def _with(self, name: str, opened: OpenedDraft, rates_of: RatesOf) -> Prospect:
        try:
            plan = self.plan_with(opened)
        except OffspecError as exc:
            return Prospect(name, why_not=str(exc))
        guessing = opened.guessing(plan.placement)
        greedy, sampled = (predict_drafting(plan, guessing, rates_of, greedy=greedy) for greedy in (True, False))
        taken = _item_bytes(plan) - _item_bytes(self.plan_with(self.open(NO_DRAFT, [])))
        acceptance = guessing.acceptance
        sources = (acceptance.source, acceptance.spread.source) if acceptance else ("", "")
        is_lookup = acceptance is LOOKUP and name != LookupDraft.NAME
        why_not = "all layers are resident and leave no room for a copy; lookup would draft" if is_lookup else ""
        shares = opened.shares_vocabulary if isinstance(opened, OpenedModel) else None
        return Prospect(name, plan, why_not, taken, greedy, sampled, *sources, shares)


@dataclass(frozen=True)
class Chooser:
    """Chooses a draft while a model is loaded (`base.Choose`). measure: the rates for a plan, on this machine."""

    scales: Scales
    measure: Callable[[Plan], RatesOf]

    def __call__(self, names: Sequence[str], others: Sequence[str]) -> Choice | None:
        """None if nothing is streamed, or no draft can be used: there, predictions say little."""
        try:
            plan = self.scales.first_plan([NO_DRAFT])
        except OffspecError:  # loading reports it
            return None
        if plan.placement.is_resident:
            return None
        rates_of = self.measure(plan)
        prospects = by_rate([self.scales.prospect(name, rates_of) for name in dict.fromkeys([*names, *others])])
        chosen = next((prospect.name for prospect in prospects if prospect.name in names), None)
        return None if chosen is None else Choice(chosen, {each.name: each.tokens_per_s for each in prospects})


def _item_bytes(plan: Plan) -> int:
    """Memory beside layers and experts, which take what is left, and the program, which grows as it runs."""
    others = (item for item in plan.placement.items if item.name not in (PROGRAM_ITEM, EXPERTS_ITEM))
    return sum(item.on_device + item.on_host for item in others)


def usual_names(plan: Plan) -> list[str]:
    """Drafts that need no other model, to compare others with: shadows only for targets that are streamed."""
    config = plan.inputs.target.config
    can_have = plan.placement.streamed and config.is_native and config.experts is None
    return [*(shadow_names() if can_have else []), LookupDraft.NAME, NO_DRAFT]


def by_rate(prospects: Sequence[Prospect]) -> list[Prospect]:
    """The drafts that can be used, by tokens/s at temperature 0, most first."""
    usable = [prospect for prospect in prospects if prospect.greedy is not None]
    return sorted(usable, key=lambda prospect: -prospect.tokens_per_s)
