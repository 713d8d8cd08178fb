"""A prompt's KV entries in a file: a prompt that begins as an earlier one is scored from where they differ.

The file belongs to a model, its dtype and the format of its KV cache (`checkpoints.kv_files`). With any other, with a
damaged file, or without one, the prompt is scored as usual; the text is the same in any case.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable, Generator
from contextlib import closing
from functools import cached_property
from pathlib import Path

import numpy as np

from offspec.backends.device_kinds import kind_of
from offspec.loaders.units import format_size
from offspec.scheduler.params import SamplingParams, SpeculationParams, tree_room

from .checkpoints.kv_files import (
    CachePart,
    KVFile,
    Owner,
    check_replaceable,
    free_disk_bytes,
    model_identity,
    write_kv_file,
)
from .engine import Engine
from .errors import CheckpointError, StorageError, UsageError
from .model.memory.request_caches import RequestCaches
from .model.memory.sequence_cache import SequenceCache
from .model.memory.text_pool import WORTHWHILE, has_all_entries, num_common, own_cache
from .running.batch import steps_alone
from .running.sequence import Sequence
from .running.steps import Step
from .text.prompt import Prompt

TARGET, DRAFT = "target", "draft"  # the parts of a file
# The file is written again if more than 1/REWRITTEN_SHARE of a prompt was not in it: not for each new question behind
# a long text, and again and again while a text grows.
REWRITTEN_SHARE = 4


class PromptCache:
    """A file with the KV entries of a text's beginning, used by one engine at a time."""

    def __init__(self, engine: Engine, path: Path, notify: Callable[[str], None] = lambda text: None) -> None:
        """notify(text): gets a line when the file is used, written or ignored.

        Raises UsageError for a file of something else, and for an engine without files or with an early exit.
        """
        if engine.plan is None:
            raise UsageError("KV entries are kept in files only for a model that was loaded from files")
        if not engine.draft.keeps_target_whole:
            raise UsageError(
                "with an early exit (`draft=self`) the target's KV entries are not in one cache, and are not kept in "
                "files; choose another draft"
            )
        check_replaceable(path)
        self.path = path
        self._engine, self._notify = engine, notify

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, speculation: SpeculationParams | None = None
    ) -> Generator[Step, None, None]:
        """`Engine.generate` that begins with the file's entries.

        After the prompt's pass it writes the file, unless most of the prompt was in it. Raises the same errors.
        """
        return self._run(self._engine.check_request(prompt, params, speculation))

    def _run(self, sequence: Sequence) -> Generator[Step, None, None]:
        engine, text = self._engine, sequence.prompt
        num_nodes = tree_room(sequence.speculation, kind_of(engine.target.device).useful_rows)
        caches = engine.new_caches(len(text) + sequence.sampling.max_new_tokens, num_nodes)
        engine.loaded.make_kv_room(caches.target.cache, caches.target.cache.capacity)
        num_in_file = self.read(caches, text)
        with closing(steps_alone(sequence, caches)) as steps:
            step, message = next(steps), None
            try:
                yield step
            finally:  # also if nobody wants the rest: the prompt's pass was the longest
                if REWRITTEN_SHARE * (len(text) - num_in_file) > len(text):
                    message = self._written(caches, len(text))
            yield from steps
        if message is not None:
            self._notify(message)  # not in the middle of the text

    def read(self, caches: RequestCaches, text: abc.Sequence[int]) -> int:
        """Begin `caches` with the longest beginning of `text` in the file; returns its number of tokens, or 0."""
        if not self.path.exists():
            return 0
        try:
            return self._read(caches, text)
        except CheckpointError as exc:
            self._notify(f"{exc}; it is ignored")
            return 0

    def _read(self, caches: RequestCaches, text: abc.Sequence[int]) -> int:
        engine, kept = self._engine, self._caches(caches)
        file = KVFile.open(self.path, engine.max_context, engine.target.config.vocab_size)
        if TARGET not in file.owners:
            raise CheckpointError(f"{self.path} has no entries of a target")
        self._owner(TARGET, kept[TARGET]).check(file.owners[TARGET], self.path)
        stored_tokens = file.tokens[: file.lengths[TARGET]]
        number = num_common(stored_tokens, np.asarray(text[:-1], dtype=np.int64))  # the last token is always scored
        if number < kept[TARGET].least_cut(len(stored_tokens)):
            number = 0
        if number < WORTHWHILE:
            self._notify(
                f"{self.path} has {len(stored_tokens)} tokens, and the prompt begins otherwise; it is scored as usual"
            )
            return 0
        if DRAFT in kept and file.owners.get(DRAFT) != self._owner(DRAFT, kept[DRAFT]):
            del kept[DRAFT]  # another draft's: this one reads the text again
        caches.rewind(text[:1])
        file.load(kept, number)
        caches.text = list(text[:number])
        self._notify(f"{number} of the prompt's {len(text)} tokens are in {self.path}")
        return number

    def write(self, caches: RequestCaches, num_tokens: int) -> None:
        """Write the first entries of a text, unless it is short. A file that cannot be written is told."""
        if (note := self._written(caches, num_tokens)) is not None:
            self._notify(note)

    def _written(self, caches: RequestCaches, num_tokens: int) -> str | None:
        """`write`; returns what there is to tell."""
        if num_tokens < WORTHWHILE:
            return None
        parts = {
            name: CachePart(self._owner(name, cache), cache, length)
            for name, cache in self._caches(caches).items()
            if (length := _num_restorable(cache, num_tokens))
        }
        if TARGET not in parts:
            return None
        try:
            nbytes = write_kv_file(self.path, caches.text[:num_tokens], parts)
            sizes = f"{format_size(nbytes)}; {format_size(free_disk_bytes(self.path))} of its disk are free"
            return f"the KV entries of {num_tokens} tokens are in {self.path} ({sizes})"
        except (StorageError, UsageError) as exc:
            return f"the KV entries of {num_tokens} tokens are not kept: {exc}"

    def _caches(self, caches: RequestCaches) -> dict[str, SequenceCache]:
        """The caches whose entries a file can hold, by part."""
        assert has_all_entries(caches)
        drafts = own_cache(caches.draft)
        return {TARGET: caches.target.cache} | ({} if drafts is None or self._draft_id is None else {DRAFT: drafts})

    def _owner(self, part: str, cache: SequenceCache) -> Owner:
        engine = self._engine
        if part == TARGET:
            return Owner.of(self._target_id, engine.target, cache)
        assert engine.draft.decoder is not None
        assert self._draft_id is not None
        return Owner.of(self._draft_id, engine.draft.decoder, cache)

    @cached_property
    def _target_id(self) -> str:
        assert self._engine.plan is not None
        return model_identity(self._engine.plan.inputs.target, self._engine.target.config)

    @cached_property
    def _draft_id(self) -> str | None:
        files, decoder = self._engine.draft.files, self._engine.draft.decoder
        return None if files is None or decoder is None else model_identity(files, decoder.config)


def _num_restorable(cache: SequenceCache, num_tokens: int) -> int:
    """How many of a prompt's first tokens can be kept: all, or those before the last one, which is scored again."""
    most = num_tokens - 1 if cache.least_cut(num_tokens) else num_tokens
    return cache.copyable(min(cache.length, most))
