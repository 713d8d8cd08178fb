"""The kinds of draft, by the name that `--draft` gives them; any other name is a model's."""

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
    """What `--draft` asks for beside MODEL. Raises OffspecError's children."""
    options = replace(request.options, draft=_resolve(model, request))
    return KINDS.get(options.draft, OpenedModel.open)(replace(request, options=options))


def _resolve(model: str, request: OpenRequest) -> str:
    """The kind or model that `auto` stands for."""
    if request.options.draft != "auto":
        return request.options.draft
    if model == "builtin":
        return "builtin"
    remedy = "a small model of its family makes it faster: --draft PATH"
    text = f"no draft is known for {model}, so only repetitions are guessed; {remedy}"
    request.notes.append(Note(text, advice=True))
    return LookupDraft.NAME
