"""The kinds of draft by their names in `--draft`. Any other name is a model's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..checkpoints.opening import Note
from .base import OpenedDraft, OpenRequest
from .model_draft import OpenedModel
from .self_draft import NAME as SELF
from .self_draft import OpenedSelf
from .without_model import LookupDraft, NoDraft

KINDS: dict[str, Callable[[OpenRequest], OpenedDraft]] = {
    "none": NoDraft.open,
    LookupDraft.NAME: LookupDraft.open,
    SELF: OpenedSelf.open,
}


def open_draft(model: str, request: OpenRequest) -> OpenedDraft:
    """Open the draft that `--draft` names for the target MODEL. Raises a subclass of OffspecError."""
    options = replace(request.options, draft=_resolve(model, request))
    return KINDS.get(options.draft, OpenedModel.open)(replace(request, options=options))


def _resolve(model: str, request: OpenRequest) -> str:
    """The name of a kind or a model; `auto` becomes one of them."""
    if request.options.draft != "auto":
        return request.options.draft
    if model == "builtin":
        return "builtin"
    remedy = "a small model of the same family is faster (--draft PATH)"
    text = f"draft: n-gram lookup, because no draft model was given for {model}; {remedy}"
    request.notes.append(Note(text, advice=True))
    return LookupDraft.NAME
