"""Searches the layers that a target can best do without (`offspec distill --skip`; Draft & Verify, 2309.08168).

The target writes a text. A set of layers is as good as the share of places where the target without it has the same
likeliest token. The search is greedy: it skips one more layer at a time, the one that costs the least agreement. So the
result is one order of all layers, which serves whatever number of layers does not stay in memory. As in drafting, each
place attends to the target's own keys and values of the text before it.

A run is saved after each layer, and resumes with the same result. This module does not depend on the terminal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from offspec.loaders.files.small_files import parse_json, read_small_file
from offspec.scheduler.trees.token_tree import IntArray

from ..checkpoints.atomic_files import locked_name, refuse_replacing, write_atomically
from ..checkpoints.exit_layers import fingerprint, refuse_shared_entries, refuse_states
from ..errors import CheckpointError, StorageError, UsageError
from ..model.decoder import CachedDecoder, Decoder, pass_together
from ..model.parts.part import PassRows
from ..model.pass_rows import JoinedRows, TextRows
from ..model.row_logits import HEAD_ROWS
from ..training.distillation import Teacher
from ..training.target_texts import Forest, first_token, text_pieces
from .skip_files import SkipFile, default_skip_file

NUM_TEXTS = 16  # written at once: a streamed target is read once for a token of each
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SkipParams:
    """How layers to skip are searched.

    num_tokens: of the text, about 2000. candidates: layers that are tried for each step, the best of the step before;
    the first step tries all. least_agreement: the search ends below it, and the remaining layers follow as they were
    ranked last. temperature, seed: of the text that the target writes.
    """

    num_tokens: int = 2048
    candidates: int = 8
    least_agreement: float = 0.02
    temperature: float = 1.0
    seed: int = 0


def search_skips(
    teacher: Teacher,
    params: SkipParams | None = None,
    *,
    out: Path | None = None,
    texts: Sequence[Path] = (),
    resume: bool = False,
    progress: Progress | None = None,
) -> SkipFile:
    """Search and write the result to `out`, or to where `--draft resident` finds it.

    texts: files to use instead of a generated text. resume: continue an interrupted run with the same settings.
    progress(what, done, total) is called for tokens and layers. Raises a subclass of OffspecError.
    """
    params, progress = params or SkipParams(), progress or (lambda what, done, total: None)
    refuse_states(teacher.target.config, "skipping layers")
    refuse_shared_entries(teacher.target.config, "skipping layers")
    if teacher.target.config.num_layers < 2:
        raise UsageError("the model has one layer, and none of it can be skipped")
    out = out or default_skip_file(teacher.files)
    refuse_replacing(out, SkipFile.is_in)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise StorageError(f"{out} cannot be written: {exc.strerror}; choose another file (`out`)") from exc
    with locked_name(out, f"another process is making {out}; wait until it has ended, or choose another file (`out`)"):
        run = _Run.open(out, teacher, params, texts, resume=resume)
        if not run.tokens:
            run.tokens = _text(teacher, params, texts, progress).tolist()
            run.save()
        agreement = Agreement(teacher.target, np.array(run.tokens, dtype=np.int64))
        _search(run, agreement, params, progress)
        num_tokens = sum(map(len, run.tokens))
        skip_file = SkipFile(out, (*run.order, *run.ranked()), (1.0, *run.agreement), num_tokens)
        skip_file.save(teacher.files)
        run.file.unlink(missing_ok=True)
    return skip_file


def _search(run: _Run, agreement: Agreement, params: SkipParams, progress: Progress) -> None:
    """Skip one more layer at a time, until one is left or the agreement is too low."""
    num_layers = len(run.scores)
    while len(run.order) < num_layers - 1 and (not run.agreement or run.agreement[-1] >= params.least_agreement):
        progress("layers skipped", len(run.order), num_layers - 1)
        tried = run.ranked() if not run.order else run.ranked()[: params.candidates]
        for layer in tried:
            run.scores[layer] = agreement.without({*run.order, layer})
        best = max(tried, key=lambda layer: run.scores[layer])
        run.order.append(best)
        run.agreement.append(run.scores[best])
        run.save()
    progress("layers skipped", num_layers - 1, num_layers - 1)


@dataclass
class _Run:
    """The state of a search, in a file beside its result. scores: each layer's agreement when it was last tried."""

    file: Path
    settings: str
    tokens: list[list[int]]
    order: list[int]
    agreement: list[float]
    scores: list[float]

    @classmethod
    def open(cls, out: Path, teacher: Teacher, params: SkipParams, texts: Sequence[Path], *, resume: bool) -> _Run:
        """Raises UsageError if there is an interrupted run without `resume`, or none of these settings with it."""
        file = out.with_name(f"{out.name}.unfinished")
        about = asdict(params) | {"target": fingerprint(teacher.files), "texts": [str(text) for text in texts]}
        run = cls(file, json.dumps(about, sort_keys=True), [], [], [], [0.0] * teacher.target.config.num_layers)
        if not file.is_file():
            if resume:
                raise UsageError(f"there is nothing to resume at {file}; omit `resume`")
            return run
        if not resume:
            raise UsageError(f"{file} is an interrupted run; continue it (`resume`), or delete the file")
        return run._with_state_of(file)

    def _with_state_of(self, file: Path) -> _Run:
        try:
            content = parse_json(read_small_file(file))
            run = _Run(file, *(content[name] for name in ("settings", "tokens", "order", "agreement", "scores")))
            is_whole = len(run.order) == len(run.agreement) and len(run.scores) == len(self.scores)
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise CheckpointError(f"{file} is damaged; delete it and begin again") from exc
        if run.settings != self.settings or not is_whole:
            raise UsageError(f"{file} is a run with other settings; use the same settings, or delete the file")
        return run

    def ranked(self) -> list[int]:
        """The layers that are not skipped, the best to skip first."""
        rest = [layer for layer in range(len(self.scores)) if layer not in self.order]
        return sorted(rest, key=lambda layer: -self.scores[layer])

    def save(self) -> None:
        """Raises StorageError."""
        state = {name: value for name, value in vars(self).items() if name != "file"}
        write_atomically(self.file, json.dumps(state).encode())


class Agreement:
    """How often a target without some layers has the likeliest token of the whole target, on texts [B, T]."""

    def __init__(self, target: Decoder, texts: IntArray) -> None:
        self._target, self._tokens, length = target, torch.from_numpy(texts.reshape(-1)), texts.shape[1]
        caches, depths = [CachedDecoder(target) for _ in texts], np.arange(1, length + 1)
        whole = [TextRows([], text, depths, np.tri(length, dtype=np.bool_)) for text in texts]
        self._wanted = self._likeliest(pass_together([*zip(caches, whole, strict=True)]))
        # The rows are nodes at the places of the text's tokens: each attends to the target's entries before it.
        mask = np.concatenate((np.tri(length, k=-1, dtype=np.bool_), np.eye(length, dtype=np.bool_)), axis=1)
        nodes = (TextRows([], text, depths, mask) for text in texts)
        parts = [cache.begin_pass(rows)[1] for cache, rows in zip(caches, nodes, strict=True)]
        self._rows = JoinedRows(target.config, parts)

    @torch.inference_mode()
    def without(self, skipped: Collection[int]) -> float:
        """The share of places."""
        target = self._target
        hidden = target.embed(self._tokens)
        for layer in range(target.config.num_layers):
            hidden = self._after(layer, hidden, self._rows, is_skipped=layer in skipped)
        return float((self._likeliest(hidden) == self._wanted).float().mean())

    def _likeliest(self, hidden: Tensor) -> Tensor:
        """The likeliest token after each row, on the CPU."""
        parts = (hidden[i : i + HEAD_ROWS] for i in range(0, len(hidden), HEAD_ROWS))
        return torch.cat([self._target.logits(part).argmax(-1).cpu() for part in parts])

    def _after(self, layer: int, hidden: Tensor, rows: PassRows, *, is_skipped: bool) -> Tensor:
        if not is_skipped:
            return self._target.through(hidden, rows, range(layer, layer + 1))
        with self._target.weights.layer(layer):  # streamed layers come in their order, whether they are used or not
            return hidden


def _text(teacher: Teacher, params: SkipParams, texts: Sequence[Path], progress: Progress) -> IntArray:
    """Texts [B, T] that the target writes, or the first ones of the given files."""
    length = max(2, min(params.num_tokens // NUM_TEXTS, teacher.target.config.max_context))
    if texts:
        pieces: IntArray = text_pieces(texts, teacher.tokenizer, length)[0]
        return pieces
    forest = Forest(teacher.target, NUM_TEXTS)
    generator = torch.Generator().manual_seed(params.seed)
    written = [np.full((NUM_TEXTS, 1), first_token(teacher.tokenizer), dtype=np.int64)]
    for number in range(1, length):
        progress("tokens written", number, length)
        forest.add(written[-1], 1)
        chances = (forest.logits[:, -1] / params.temperature).softmax(-1).cpu()
        written.append(torch.multinomial(chances, 1, generator=generator).numpy())
    return np.concatenate(written, axis=1)
