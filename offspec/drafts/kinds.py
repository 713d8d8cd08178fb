"""The kinds of draft by their names in `--draft`. Any other name is a model's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..checkpoints.opening import Note
from ..checkpoints.shadows import made_shadows
from ..errors import UsageError
from .base import OpenedDraft, OpenRequest
from .layer_drafts import RESIDENT, SHADOW, OpenedLayers, OpenedShadow
from .model_draft import OpenedModel
from .self_draft import NAME as SELF
from .self_draft import OpenedSelf
from .without_model import LookupDraft, NoDraft


def _open_self(request: OpenRequest) -> OpenedDraft:
    """The target's first layers, with a trained exit layer or without. Raises OffspecError's children."""
    options = request.options
    if options.exit_layer is None:
        return OpenedSelf.open(request)
    if options.exit_file is not None:
        raise UsageError("`exit_layer` drafts without a trained exit layer, `exit_file` is one; give one of the two")
    return OpenedLayers.open_exit(request)


AUTO, BUILTIN = "auto", "builtin"
KINDS: dict[str, Callable[[OpenRequest], OpenedDraft]] = {
    "none": NoDraft.open,
    LookupDraft.NAME: LookupDraft.open,
    SELF: _open_self,
    SHADOW: OpenedShadow.open,
    RESIDENT: OpenedLayers.open_resident,
}


def open_draft(model: str, request: OpenRequest) -> OpenedDraft:
    """Open the draft that `--draft` names for the target MODEL. Raises a subclass of OffspecError."""
    options = replace(request.options, draft=_resolve(model, request))
    kind, _, _ = options.draft.partition(":")  # shadow:3
    return KINDS.get(kind, OpenedModel.open)(replace(request, options=options))


def automatic_names(model: str, request: OpenRequest) -> list[str]:
    """The drafts that `auto` chooses from: the built-in pair's own, or else shadows that are made, and lookup."""
    if model == BUILTIN:
        return [BUILTIN]
    return [*(f"{SHADOW}:{bits}" for bits in made_shadows(request.target)), LookupDraft.NAME]


def _resolve(model: str, request: OpenRequest) -> str:
    """The name of a kind or a model; `auto` becomes one of them."""
    if request.options.draft != AUTO:
        return request.options.draft
    name = automatic_names(model, request)[0]
    if name != LookupDraft.NAME:
        if name != BUILTIN:
            request.notes.append(Note(f"draft: the target's {name}, found in the cache"))
        return name
    remedy = (
        "a small model of the same family (`draft=PATH`) or a copy of the target in 4 bits (`draft=shadow`) is faster"
    )
    text = f"draft: n-gram lookup, because no draft model was given for {model}; {remedy}"
    request.notes.append(Note(text, advice=True))
    return LookupDraft.NAME
