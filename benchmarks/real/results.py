"""Results on disk: one line per cell or answer, appended as it arises, read again by the next run."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from benchmarks.scheduling.replay import Recording, Replayed

from .estimates import Estimate, copied_share


@dataclass(frozen=True)
class CellKey:
    """What a cell measures. budget: nodes; None for offspec's own choice. set, num_prompts, num_tokens: the texts."""

    model: str
    draft: str
    method: str
    budget: int | None
    set: str
    num_prompts: int
    num_tokens: int
    temperature: float


@dataclass(frozen=True)
class Cell:
    """One method over the texts of one set; lists have an entry per text.

    copied: the share of the answer's 4-grams that the prompt contains. estimate: of agreement, which has no passes.
    """

    key: CellKey
    tokens: Sequence[int] = ()
    passes: Sequence[int] = ()
    copied: Sequence[float] = ()
    card_s: Sequence[float] = ()
    estimate: Estimate | None = None

    @classmethod
    def of_texts(cls, key: CellKey, recordings: Sequence[Recording], replayed: Sequence[Replayed]) -> Cell:
        return cls(
            key,
            [each.num_tokens for each in replayed],
            [each.num_passes for each in replayed],
            [copied_share(each.prompt_ids, each.token_ids) for each in recordings],
            [each.total_s for each in replayed],
        )

    @classmethod
    def of_agreement(cls, key: CellKey, estimate: Estimate) -> Cell:
        return cls(key, estimate=estimate)

    @classmethod
    def read(cls, line: dict[str, Any]) -> Cell:
        """From its fields. Raises ValueError, KeyError or TypeError for others."""
        estimate = line.pop("estimate")
        return cls(CellKey(**line.pop("key")), estimate=estimate and Estimate(**estimate), **line)

    def __str__(self) -> str:
        key = self.key
        what = f"{key.set} T={key.temperature:g} {key.method}"
        if self.estimate is not None:
            return f"{what}: {self.estimate}"
        nodes = "auto" if key.budget is None else key.budget
        return f"{what}, {nodes} nodes: {sum(self.tokens) / sum(self.passes):.2f} tokens per pass"


class HasKey(Protocol):
    """A dataclass with a key by which it is found again."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def key(self) -> Hashable: ...


Entry = TypeVar("Entry", bound=HasKey)


class Results(Generic[Entry]):
    """The entries of a file by their keys. A line that an interruption cut short is left out."""

    def __init__(self, file: Path, read: Callable[[dict[str, Any]], Entry]) -> None:
        """read: makes an entry from its fields; may raise ValueError, KeyError or TypeError."""
        self._file = file
        file.parent.mkdir(parents=True, exist_ok=True)
        self.entries: dict[Hashable, Entry] = {}
        content = file.read_text(encoding="utf-8") if file.exists() else ""
        if content and not content.endswith("\n"):
            file.write_text(content + "\n", encoding="utf-8")
        for line in content.splitlines():
            with suppress(ValueError, KeyError, TypeError):
                entry = read(json.loads(line))
                self.entries[entry.key] = entry

    def get(self, key: Hashable) -> Entry | None:
        return self.entries.get(key)

    def add(self, entry: Entry) -> Entry:
        """Store it, in memory and at the end of the file."""
        self.entries[entry.key] = entry
        with self._file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(entry)) + "\n")
        return entry
