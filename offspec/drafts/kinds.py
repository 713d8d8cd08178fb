"""The kinds of draft by their names in `--draft`, `module:Name` of other packages, or else a model's name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from offspec.loaders.params import SHADOW_FORMATS

from ..checkpoints.head_files import has_mtp, is_head
from ..checkpoints.opening import locate
from ..checkpoints.shadows import made_shadows
from ..errors import OffspecError, UsageError
from ..methods import research
from ..model.block import has_entries_alone
from ..named_models import BUILTIN, MODEL_NAMES
from ..notes import Note
from .base import Choice, OpenedDraft, OpenRequest
from .head_draft import MTP, OpenedHead
from .head_draft import NAME as HEAD
from .layer_drafts import SHADOW, OpenedShadow
from .model_draft import OpenedModel
from .self_draft import NAME as SELF
from .self_draft import OpenedSelf, trained_exits
from .without_model import LookupDraft, NoDraft

AUTO = "auto"
KINDS: dict[str, Callable[[OpenRequest], OpenedDraft]] = {
    "none": NoDraft.open,
    LookupDraft.NAME: LookupDraft.open,
    SELF: OpenedSelf.open,
    HEAD: OpenedHead.open,
    MTP: OpenedHead.open,
    SHADOW: OpenedShadow.open,
}


def open_draft(model: str, request: OpenRequest) -> OpenedDraft:
    """Open the draft that `--draft` names for the target MODEL. Raises a subclass of OffspecError."""
    if request.options.draft == AUTO:
        names = automatic_names(model, request)
        while True:
            num_notes = len(request.notes)
            name = _automatic(model, names, request)
            try:
                return _open(name, request)
            except OffspecError as exc:
                if name == names[-1]:
                    raise
                names.remove(name)
                request.notes[num_notes:] = [Note(f"the draft {name} is left out: {exc}", advice=True)]
    name = request.options.draft
    if name == SHADOW:
        name = _chosen(shadow_names(), request)
    elif name == SELF and len(names := exit_names(request)) > 1:
        name = _chosen(names, request, otherwise=SELF)
    return _open(name, request)


def _open(name: str, request: OpenRequest) -> OpenedDraft:
    options = replace(request.options, draft=name)
    kind, _, _ = name.partition(":")  # shadow:3
    if options.draft_window is not None and kind not in (HEAD, MTP, SHADOW) and kind in KINDS:
        text = f"`draft_window={options.draft_window}` does nothing: `draft={kind}` has no KV cache of its own"
        request.notes.append(Note(text, advice=True))
    request = replace(request, options=options)
    is_named = re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None and not Path(name).exists()
    opened = KINDS.get(kind, _open_named if is_named else _open_files)(request)
    if options.learns:
        opened = research().learning_draft(opened, request)
    return opened


def _open_files(request: OpenRequest) -> OpenedDraft:
    """A folder or hub id: a trained head, or a model."""
    names = (AUTO, *KINDS, *MODEL_NAMES)
    path = locate(request.options.draft, None, "draft", weights=request.tokenizer is not None, names=names)
    return (OpenedHead if is_head(path) else OpenedModel).open(request)


def _open_named(request: OpenRequest) -> OpenedDraft:
    """A kind of draft of another package, `module:Name`."""
    draft = request.options.draft
    module, _, name = draft.partition(":")
    try:
        kind = getattr(import_module(module), name)
    except ImportError as exc:
        remedy = "install its package, or set PYTHONPATH to its folder"
        raise UsageError(f"`draft={draft}`: module {module} cannot be imported ({exc}); {remedy}") from exc
    except AttributeError as exc:
        raise UsageError(f"`draft={draft}`: module {module} has no {name}; give the name of an OpenedDraft") from exc
    if not callable(getattr(kind, "open", None)):
        raise UsageError(f"`draft={draft}`: {name} is no kind of draft; it needs a class method open(request)")
    opened: OpenedDraft = kind.open(request)
    return opened


def automatic_names(model: str, request: OpenRequest) -> list[str]:
    """The drafts that `auto` chooses from: the built-in pair's own; or else the target's MTP layer, shadows that are
    made, and lookup.
    """
    if model == BUILTIN:
        return [BUILTIN]

    def tell(fault: str) -> None:
        remedy = f"`draft={SHADOW}`, or offspec quantize MODEL --shadow BITS, makes it again"
        request.notes.append(Note(f"{fault}, and is left out; {remedy}", advice=True))

    shadows = [f"{SHADOW}:{bits}" for bits in made_shadows(request.target, tell)]
    return [*mtp_names(request), *shadows, LookupDraft.NAME]


def mtp_names(request: OpenRequest) -> list[str]:
    """The draft within the target's checkpoint, if there is one.

    That of a mixture takes room from the target's experts, and each further row of a pass needs others, so it drafts
    only if it is asked for.
    """
    return [MTP] if has_mtp(request.target) and request.target.config.experts is None else []


def shadow_names() -> list[str]:
    """The drafts that `shadow` chooses from: it has as many bits as bring the most tokens/s."""
    return [f"{SHADOW}:{bits}" for bits in SHADOW_FORMATS]


def exit_names(request: OpenRequest) -> list[str]:
    """The exit layers of this target that `self` chooses from, if neither a file nor a number of layers is given."""
    options, target = request.options, request.target
    is_given = options.exit_file is not None or options.exit_layer is not None
    if is_given or target.config.shares_entries or not has_entries_alone(target.config):
        return []
    return [f"{SELF}:{number}" for number in trained_exits(target)]


def _chosen(names: Sequence[str], request: OpenRequest, otherwise: str | None = None) -> str:
    """The one of these with the most predicted tokens/s. otherwise: where nothing is predicted; None: the first."""
    choice = None if request.choose is None else request.choose(names, ())
    if choice is None:
        return otherwise or names[0]
    request.notes.append(Note(f"draft: {choice.name}, by predicted tokens/s: {choice}"))
    return choice.name


def _automatic(model: str, names: Sequence[str], request: OpenRequest) -> str:
    """The name of a kind or a model; why it was chosen is noted."""
    if names == [BUILTIN]:
        return BUILTIN
    choice = None if request.choose is None else request.choose(names, shadow_names()[:1])
    name = names[0] if choice is None else choice.name
    if name == LookupDraft.NAME:
        request.notes.append(_why_lookup(model, choice, names[:-1]))
    else:
        rates = "" if choice is None else f"; predicted tokens/s: {choice}"
        which = "MTP layer" if name == MTP else f"{name}, found in the cache"
        request.notes.append(Note(f"draft: the target's {which}{rates}"))
    return name


def _why_lookup(model: str, choice: Choice | None, others: Sequence[str]) -> Note:
    """Why lookup drafts. Advice only where there is a prediction: of a shadow that is not made yet, if it is faster."""
    why = f"no draft model was given for {model}"
    if others:
        why = f"it is predicted to be faster than {'the MTP layer' if MTP in others else 'a shadow'}"
    text = f"draft: n-gram lookup, because {why}"
    if choice is None:
        return Note(text)
    rates = choice.tokens_per_s
    best = next(iter(rates))
    if best == LookupDraft.NAME:
        text += f"; predicted tokens/s: {choice}"
    else:
        faster = f"{rates[best]:.2g} tokens/s in place of {rates[LookupDraft.NAME]:.2g}"
        text += f"; a copy of the target in 4 bits (`draft={SHADOW}`) is predicted to be faster: {faster}"
    return Note(
        f"{text}; `offspec plan` predicts what a small model of the same family brings (`draft=PATH`)", advice=True
    )
