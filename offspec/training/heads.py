"""`offspec distill --head`: trains a head on what the target says (EAGLE-3: 2503.01840, section 3.1).

Shards store the target's states that the head reads, and its likeliest next tokens (`target_texts`). A training step
unrolls the head as drafting does: first over the target's states, then over its own features, some tokens ahead. Each
step's loss is the cross entropy with what the target says there. This module does not depend on the terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.exit_layers import fingerprint, refuse_foreign
from ..checkpoints.head_files import TARGET_KEY, head_folder, layout_of, write_head
from ..errors import UsageError
from ..model.block import Block, Projected
from ..model.decoder import Decoder
from ..model.heads.head import Head, Inputs
from ..model.rope import Rotations
from .distill_params import DistillParams
from .distillation import Teacher, run_settings
from .head_structures import STRUCTURES, Beginning
from .run_folder import run_folder, work_folder
from .target_texts import Progress, Shard, Shards
from .trainer import CHECKPOINT_EVERY_S, Student, Trainer

LATER_LOSS = 0.8  # weight of a step's loss by that of the step before (EAGLE-3's code)
HELD_OUT_TEXTS = 4
LARGEST_LOGITS = 2**24  # logits computed at once


@dataclass(frozen=True)
class DistilledHead:
    """The result of `distill_head`.

    agreement_before, agreement: how often the head's likeliest token is the target's on held-out text, by how many
    tokens it looks ahead. prompts: beginnings of held-out texts.
    """

    path: Path
    kind: str
    num_tokens: int
    num_steps: int
    agreement_before: list[float]
    agreement: list[float]
    prompts: list[list[int]]


def distill_head(
    teacher: Teacher,
    kind: str,
    params: DistillParams | None = None,
    *,
    out: Path | None = None,
    texts: Sequence[Path] = (),
    resume: bool = False,
    progress: Progress | None = None,
    checkpoint_every_s: float = CHECKPOINT_EVERY_S,
) -> DistilledHead:
    """Train a head of a structure in `STRUCTURES`, and write its folder: `out`, or where `--draft head` finds it.

    The other arguments are those of `distillation.distill`. Raises a subclass of OffspecError.
    """
    target, files = teacher.target, teacher.files
    params, progress = params or DistillParams(), progress or (lambda what, done, total: None)
    refuse_foreign(target.config, "a head")
    beginning = STRUCTURES[kind](target, params.seed)
    out = out or head_folder(files, kind)
    if out.exists():
        raise UsageError(f"`out={out}` exists already; delete it, or choose another folder")
    folder = work_folder(out)
    shards = Shards(
        folder, target, teacher.tokenizer, params, texts, beginning.layers or [target.config.num_layers - 1]
    )
    with run_folder(out, run_settings(files, params, texts, head=kind), resume=resume):
        shards.check_space()
        num_shards = shards.make(progress)
        student = HeadStudent(beginning, target)
        trainer = Trainer(student, params, folder)
        held_out = shards.load(num_shards - 1)
        before = student.agreements(held_out)
        trainer.resume()
        trainer.train(shards, range(max(1, num_shards - 1)), progress, checkpoint_every_s)
        agreement = student.agreements(held_out)
        config = {**beginning.config, TARGET_KEY: fingerprint(files)}
        write_head(out, config, student.tensors(target.dtype))
    prompts = held_out["tokens"][:HELD_OUT_TEXTS, : max(1, params.text_tokens // 2)].tolist()
    return DistilledHead(out, kind, shards.num_tokens, params.steps, before, agreement, prompts)


class HeadStudent(Student):
    """A head for accelerate: it has the parameters, and the loaded head's own code computes with them."""

    def __init__(self, beginning: Beginning, target: Decoder) -> None:
        super().__init__()
        self.width, self.device = target.config.hidden_size, target.device
        self._beginning, self._target = beginning, target
        trained = {name: tensor for name, tensor in beginning.tensors.items() if tensor.is_floating_point()}
        self._names = {name.replace(".", "/"): name for name in trained}  # a parameter's name must not contain dots
        self.parts = nn.ParameterDict({key: nn.Parameter(trained[name]) for key, name in self._names.items()})
        self._tables = {name: tensor for name, tensor in beginning.tensors.items() if name not in trained}
        self._head: Head | None = None

    @property
    def head(self) -> Head:
        """The head over the parameters, in fp32."""
        if self._head is None:  # made when accelerate has placed the parameters
            named = {name: self.parts[key] for key, name in self._names.items()} | self._tables
            layout = layout_of(self._beginning.config, named)
            assert layout is not None
            shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
            spec = layout.spec(self._beginning.config, shapes, self._target.config)
            owned = {own: tensor for name, tensor in named.items() if (own := layout.name_of(name)) is not None}
            self._head = spec.make(owned, self._target, torch.float32)
        return self._head

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The trained head by the names of its published files."""
        return {name: self.parts[key].detach().to(dtype) for key, name in self._names.items()} | self._tables

    def forward(self, batch: Shard) -> Tensor:
        losses = [_cross_entropy(self.head, states, said) for states, said in self.unrolled(batch)]
        weights = [LATER_LOSS**step for step in range(len(losses))]
        return torch.stack([w * loss for w, loss in zip(weights, losses, strict=True)]).sum() / sum(weights)

    def agreement(self, batch: Shard) -> Tensor:
        return next(self._hits(batch)).mean()

    @torch.no_grad()
    def agreements(self, shard: Shard) -> list[float]:
        """Shares of positions where the likeliest token is the target's, by step."""
        return [round(float(hits.mean()), 4) for hits in self._hits(self._some(shard))]

    def _some(self, shard: Shard) -> Shard:
        return {name: tensor[:HELD_OUT_TEXTS].to(self.device) for name, tensor in shard.items()}

    def _hits(self, batch: Shard) -> Iterator[Tensor]:
        """[B, n] for each step: 1 where the likeliest token is the target's."""
        head, size = self.head, self._target.config.vocab_size
        for states, said in self.unrolled(batch):
            found = head.vocabulary.over_target(head.head(states), size).argmax(-1)
            yield (found == said["labels"][:, 0]).float().view(len(batch["tokens"]), -1)

    def unrolled(self, batch: Shard) -> Iterator[tuple[Tensor, Shard]]:
        """For each step: the head's states [B * n, hidden], and what the target says there [B * n, K]."""
        head, tokens = self.head, batch["tokens"].long()
        num_texts, length = tokens.shape
        states = batch["hidden"]
        if not self._beginning.layers:
            states = self._target.normed(states)
        features = head.fused(states.flatten(0, 1)).view(num_texts, length, -1)
        rows = UnrolledRows(self.device, num_texts, length - 1)
        for step in range(min(self._beginning.steps, length - 2)):
            count = length - 1 - step  # row i has the token at i + 1 + step
            rows.begin(count)
            some = tokens[:, 1 + step :].cpu().numpy().reshape(-1)
            inputs = Inputs(features[:, :count].flatten(0, 1), some, np.full(len(some), step))
            found = head.advance(inputs, rows)
            features = found.features.view(num_texts, count, -1)
            said = {name: batch[name][:, 1 + step :].flatten(0, 1) for name in ("labels", "log_probabilities")}
            yield found.states, said


def _cross_entropy(head: Head, states: Tensor, said: Shard) -> Tensor:
    """Of the head's logits with the target's distribution over the kept tokens, mean over rows."""
    step = max(1, LARGEST_LOGITS // head.target.config.vocab_size)
    parts = list[Tensor]()
    for first in range(0, len(states), step):
        some = slice(first, first + step)
        logits = head.head(states[some])
        chosen = head.vocabulary.over_target(logits, head.target.config.vocab_size) - logits.logsumexp(-1, keepdim=True)
        labels, wanted = said["labels"][some].long(), said["log_probabilities"][some].exp()
        known = labels < chosen.shape[1]
        found = chosen.gather(1, labels.clamp(max=chosen.shape[1] - 1))
        known &= found.isfinite()
        parts.append(-(wanted * known * torch.where(known, found, 0)).sum())
    return torch.stack(parts).sum() / len(states)


class UnrolledRows:
    """`PassRows` of texts that a head is unrolled over: the rows of a step, after those of the steps before.

    Row i of a later step is the child of row i of the step before. It attends to the first step's rows up to i, which
    are the text, and to its ancestors.
    """

    def __init__(self, device: torch.device, num_texts: int, length: int) -> None:
        self._num_texts, self._length, self._device = num_texts, length, device
        self._step, self._count = -1, length
        self._entries: dict[int, list[tuple[Tensor, Tensor]]] = {}  # by layer: keys and values of each step

    def begin(self, count: int) -> None:
        """The next step, with the first `count` rows of each text."""
        self._step, self._count = self._step + 1, count
        positions = torch.arange(count, device=self._device) + self._step
        self.rotations = Rotations(positions.repeat(self._num_texts))
        self.chunks = [(0, self._num_texts * count)]

    def attend(self, block: Block, projected: Projected, first: int, last: int) -> Tensor:
        queries, keys, values = (
            part.view(self._num_texts, self._count, *part.shape[1:]).transpose(1, 2) for part in projected
        )
        entries = self._entries.setdefault(block.index, [])
        entries.append((keys, values))
        group = queries.shape[1] // keys.shape[1]
        seen = (
            torch.cat([part for part, _ in self._seen(entries)], 2),
            torch.cat([part for _, part in self._seen(entries)], 2),
        )
        keys, values = (part.repeat_interleave(group, 1) for part in seen)
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=self._mask(), scale=block.config.attention_scale
        )
        return out.transpose(1, 2).flatten(0, 1)

    def _seen(self, entries: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        return [(keys[:, :, : self._count], values[:, :, : self._count]) for keys, values in entries]

    def _mask(self) -> Tensor:
        """Bool [count, (step + 1) * count]."""
        text = torch.ones(self._count, self._count, dtype=torch.bool, device=self._device).tril()
        own = torch.eye(self._count, dtype=torch.bool, device=self._device)
        return torch.cat([text, *[own] * self._step], dim=1)
