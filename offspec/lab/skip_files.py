"""Files that say in which order a target's layers are best skipped, for the draft of its resident layers.

`offspec distill --skip` writes one into the user's data folder, under the target's fingerprint, and `--draft resident`
finds it there. This module neither searches nor computes with layers.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from offspec.loaders.files.small_files import parse_json, read_small_file

from ..checkpoints.atomic_files import write_atomically
from ..checkpoints.exit_layers import data_file, fingerprint, has_weights
from ..checkpoints.opening import ModelFiles
from ..errors import CheckpointError

FORMAT = "offspec skipped layers 1"


@dataclass(frozen=True)
class SkipFile:
    """An order of skipping that belongs to a target.

    order: all layers of the target, the first to skip first. agreement[n]: how often the likeliest token without the
    first n of them is the target's; it may end before all layers are skipped. num_tokens: of the measured text.
    """

    path: Path
    order: tuple[int, ...]
    agreement: tuple[float, ...]
    num_tokens: int

    @classmethod
    def open(cls, path: Path, target: ModelFiles) -> SkipFile:
        """Raises CheckpointError for anything but a file of this target."""
        remedy = "make it with offspec distill MODEL --skip"
        try:
            content = parse_json(read_small_file(path))
        except (OSError, ValueError) as exc:
            raise CheckpointError(f"{path} cannot be read as a file of skipped layers: {exc}; {remedy}") from exc
        content = content if isinstance(content, dict) else {}
        if content.get("format") != FORMAT or content.get("target") != fingerprint(target):
            raise CheckpointError(f"{path} does not list skipped layers of {target.checkpoint.path}; {remedy}")
        order, agreement, num_tokens = content.get("order"), content.get("agreement"), content.get("num_tokens")
        numbers = list(range(target.config.num_layers))
        if not _is_order(order, numbers) or not _are_shares(agreement) or not isinstance(num_tokens, int):
            raise CheckpointError(f"{path} is damaged: its layers are not the target's; {remedy}")
        return cls(path, tuple(order), tuple(map(float, agreement)), num_tokens)

    @classmethod
    def is_in(cls, path: Path) -> bool:
        """Whether `save` wrote the file, for any target."""
        try:
            content = parse_json(read_small_file(path))
        except (OSError, ValueError):
            return False
        return isinstance(content, dict) and content.get("format") == FORMAT

    @classmethod
    def find(cls, target: ModelFiles) -> SkipFile | None:
        """The file in the user's data folder; None if there is none, or the weights are not here to identify it."""
        if not has_weights(target) or not os.path.isfile(path := default_skip_file(target)):
            return None
        return cls.open(path, target)

    def agreement_without(self, num_skipped: int) -> float:
        """How often the likeliest token is the target's without so many layers; the last known value at most."""
        return self.agreement[min(num_skipped, len(self.agreement) - 1)]

    def save(self, target: ModelFiles) -> None:
        """Raises StorageError."""
        content = {
            "format": FORMAT,
            "target": fingerprint(target),
            "name": target.checkpoint.path.name,
            "order": self.order,
            "agreement": [round(share, 4) for share in self.agreement],
            "num_tokens": self.num_tokens,
        }
        write_atomically(self.path, json.dumps(content, indent=1).encode())


def default_skip_file(target: ModelFiles) -> Path:
    """The file that `--draft resident` finds."""
    return data_file(target, "skip.json")


def _is_order(said: Any, numbers: list[int]) -> TypeGuard[list[int]]:
    return isinstance(said, list) and all(type(number) is int for number in said) and sorted(said) == numbers


def _are_shares(said: Any) -> TypeGuard[list[float]]:
    return bool(
        isinstance(said, list) and said and all(type(share) in (int, float) and 0 <= share <= 1 for share in said)
    )
