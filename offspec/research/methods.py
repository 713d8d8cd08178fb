"""What the core asks this room for, by `offspec.methods.research`."""

from __future__ import annotations

from collections.abc import Callable

from offspec.scheduler.drafting.drafter import Drafter
from offspec.scheduler.pace.controllers import Controller

from ..checkpoints.head_files import Layout
from ..drafts.base import MakeDrafter
from .bild import BildDrafter
from .blend import RULES, BlendDrafter
from .clover2 import CLOVER2
from .fspad import FSPAD
from .learning import learning_draft
from .opt_tree import opt_tree_drafter
from .own_heads import AMPHISTA, CLOVER, RECURRENT
from .sequoia import sequoia_drafter
from .thompson import CalibrationSampling, ThompsonSampling

__all__ = ["LAYOUTS", "LOSSY", "STOPPING", "TREES", "learning_draft"]

LOSSY: dict[str, Callable[..., Drafter]] = {**dict.fromkeys(RULES, BlendDrafter), "bild": BildDrafter}
TREES: dict[str, MakeDrafter] = {"sequoia": sequoia_drafter, "opt-tree": opt_tree_drafter}
LAYOUTS: dict[str, Layout] = {
    "recurrent": RECURRENT,
    "clover": CLOVER,
    "amphista": AMPHISTA,
    "clover2": CLOVER2,
    "fspad": FSPAD,
}
STOPPING: dict[str, Callable[[Controller], Controller]] = {
    "thompson": ThompsonSampling,
    "thompson-calibrated": CalibrationSampling,
}
