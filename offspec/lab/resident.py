"""`--draft resident`: the target's resident layers draft, without the streamed ones (Draft & Verify, 2309.08168).

A file of `offspec distill --skip` says which layers are best streamed, so that they are not missed.
"""

from __future__ import annotations

from offspec.loaders.files.user_folders import expand_home

from ..checkpoints.exit_layers import refuse_shared_entries
from ..checkpoints.opening import Note
from ..drafts.base import OpenRequest
from ..drafts.layer_drafts import OpenedLayers, check_own_layers
from .skip_files import SkipFile


def open_resident(request: OpenRequest) -> OpenedLayers:
    """All layers that stay, by a skip file if there is one. Raises UsageError, CheckpointError."""
    check_own_layers(request)
    refuse_shared_entries(request.target.config, "`draft=resident`")
    target, (_, _, file) = request.target, request.options.draft.partition(":")
    skips = SkipFile.open(expand_home(file), target) if file else SkipFile.find(target)
    if skips is not None:
        request.notes.append(Note(f"draft: layers are skipped by {skips.path}"))
    return OpenedLayers(target, None, request.notes, request.device_type, skips=skips)
