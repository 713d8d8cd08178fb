"""`offspec distill --head`: trains a head on what the target says (EAGLE-3: 2503.01840, section 3.1).

Shards store the target's states that the head reads, and its likeliest next tokens (`target_texts`). A training step
unrolls the head as drafting does: first over the target's states, then over its own features, some tokens ahead. Each
step's loss is the cross entropy with what the target says there. This module does not depend on the terminal.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from offspec.loaders.accelerators.accelerator import accelerator_of
from offspec.loaders.streaming.small_transfers import to_device
from offspec.scheduler.trees.vocabulary import Vocabulary

from ..checkpoints.exit_layers import fingerprint, refuse_foreign
from ..checkpoints.head_files import TARGET_KEY, head_folder, layout_of, write_head
from ..errors import UsageError
from ..model.decoder import Decoder
from ..model.heads.eagle import TO_TARGET
from ..model.heads.head import Advanced, Head
from ..model.parts.part import LayerWeights
from .distill_params import HeadParams
from .distillation import Teacher, run_settings
from .head_structures import Beginning, shared, structure_of
from .run_folder import run_folder, work_folder
from .target_texts import Progress, Shard, Shards
from .trainer import CHECKPOINT_EVERY_S, Student, Trainer
from .unrolling import cross_entropy, weighted

HELD_OUT_TEXTS = 4


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
    params: HeadParams | None = None,
    *,
    out: Path | None = None,
    texts: Sequence[Path] = (),
    resume: bool = False,
    progress: Progress | None = None,
    checkpoint_every_s: float = CHECKPOINT_EVERY_S,
) -> DistilledHead:
    """Train a head of a kind in `HEADS`, and write its folder: `out`, or where `--draft head` finds it.

    The other arguments are those of `distillation.distill`. Raises a subclass of OffspecError.
    """
    target, files = teacher.target, teacher.files
    params, progress = params or HeadParams(), progress or (lambda stage, done, total: None)
    refuse_foreign(target.config, "a head")
    beginning = structure_of(kind)(target, params.seed)
    if params.head_tokens and beginning.has_own_head and TO_TARGET not in beginning.tensors:
        raise UsageError(f"a {kind} head predicts all tokens (`head_tokens`); choose `head=eagle3`")
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
        columns = frequent_tokens(shards, params.head_tokens, target.config.vocab_size) if params.head_tokens else None
        if columns is not None and beginning.has_own_head:
            beginning, columns = beginning.with_tokens(columns), None
        student = HeadStudent(beginning, target, columns)
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


def frequent_tokens(shards: Shards, count: int, vocab_size: int) -> Tensor:
    """The `count` tokens that the target gives the most probability in these texts, ascending; at most all."""
    frequencies = torch.zeros(vocab_size, dtype=torch.double)
    for index in range(max(1, len(shards) - 1)):
        shard = shards.load(index)
        frequencies.index_add_(0, shard["labels"].long().flatten(), shard["log_probabilities"].double().exp().flatten())
    return frequencies.topk(min(count, vocab_size)).indices.sort().values


def with_columns(target: Decoder, columns: Tensor) -> Decoder:
    """The target whose head has the rows `columns` of its own, not packed."""
    some = copy.copy(target)
    rows = shared(target, target.config.head_name)[columns].to(target.device, target.dtype)
    some.head_weights = partial(LayerWeights, {"head.weight": rows})  # type: ignore[method-assign]
    return some


class HeadStudent(Student):
    """A head for accelerate: it has the parameters, and the loaded head's own code computes with them."""

    def __init__(self, beginning: Beginning, target: Decoder, columns: Tensor | None = None) -> None:
        """columns: a head over the target's learns to predict these tokens only, ascending, which takes less time."""
        super().__init__()
        self.width, self.device = target.config.hidden_size, target.device
        self._beginning, self._columns = beginning, columns
        self._target = target if columns is None else with_columns(target, columns)
        trained = {name: tensor for name, tensor in beginning.tensors.items() if tensor.is_floating_point()}
        self._names = {name.replace(".", "/"): name for name in trained}  # a parameter's name must not contain dots
        self.parts = nn.ParameterDict({key: nn.Parameter(trained[name]) for key, name in self._names.items()})
        self._tables = {name: tensor for name, tensor in beginning.tensors.items() if name not in trained}
        self._head: Head | None = None
        self._in_bf16 = accelerator_of(self.device).multiplies_bf16

    @property
    def rate_factor(self) -> float:
        return 256 / self.width

    @property
    def head(self) -> Head:
        """The head over the parameters, in fp32."""
        if self._head is None:  # made when accelerate has placed the parameters
            named = {name: self.parts[key] for key, name in self._names.items()} | self._tables
            layout = layout_of(self._beginning.config, named)
            assert layout is not None
            shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
            spec = layout.spec(self._beginning.config, shapes, self._target.config)
            owned = {
                own_name: tensor for name, tensor in named.items() if (own_name := layout.name_of(name)) is not None
            }
            self._head = spec.make(owned, self._target, torch.float32)
            if self._columns is not None:
                size = self._target.config.vocab_size
                self._head.vocabulary = Vocabulary.mapped(self._columns.numpy(), size, to_device)
        return self._head

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The trained head by the names of its published files."""
        return {name: self.parts[key].detach().to(dtype) for key, name in self._names.items()} | self._tables

    def forward(self, batch: Shard) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._in_bf16):
            return self._loss(batch)

    def _loss(self, batch: Shard) -> Tensor:
        losses, more_loss = list[Tensor](), self._beginning.more_loss
        for made, wanted in self.unrolled(batch):
            loss = cross_entropy(self.head, made.states, wanted)
            losses.append(loss if more_loss is None else loss + more_loss(made, wanted))
        return weighted(losses)

    @torch.no_grad()
    def agreements(self, shard: Shard) -> list[float]:
        """Shares of positions where the likeliest token is the target's, by step."""
        head, size, shares = self.head, self._target.config.vocab_size, list[float]()
        some = {name: tensor[:HELD_OUT_TEXTS].to(self.device) for name, tensor in shard.items()}
        for made, wanted in self.unrolled(some):
            likeliest = head.vocabulary.over_target(head.head(made.states), size).argmax(-1)
            shares.append(round(float((likeliest == wanted["labels"][:, 0]).float().mean()), 4))
        return shares

    def unrolled(self, batch: Shard) -> Iterator[tuple[Advanced, Shard]]:
        """For each step: the head's rows [B * n, ...], and what the target says there [B * n, K].

        Among it are the target's `states`: the final ones, or those of the layers that the head reads.
        """
        states = batch["hidden"]
        if not self._beginning.layers:
            states = self._target.normed(states)
        tokens, head = batch["tokens"].long(), self.head
        features = head.fused(states.flatten(0, 1)).view(*tokens.shape, -1)
        per_position = {"states": states, **{name: batch[name] for name in ("labels", "log_probabilities")}}
        for made, places in self._beginning.unroll(head, features, tokens, self._beginning.steps):
            yield made, {name: tensor[:, places].flatten(0, 1) for name, tensor in per_position.items()}
