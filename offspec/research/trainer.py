"""Trains a module on shards of what the target says, with checkpoints: accelerate's loop, AdamW, a cosine decay.

The result depends on the settings and the shards only: a resumed run gives the same result as an uninterrupted one, to
the bit. Memory is bounded by one shard and one batch. This module does not depend on what is trained.
"""

from __future__ import annotations

import math
import shutil
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor, nn

from offspec.backends.device_kinds import kind_of
from offspec.loaders.accelerators.accelerator import accelerator_of
from offspec.loaders.machine.hardware import read_hardware
from offspec.loaders.units import format_count, format_size
from offspec.scheduler.trees.token_tree import IntArray

from ..errors import CheckpointError, MemoryLimitError, NumericalError, StorageError
from ..planning.out_of_memory import first_line
from .distill_params import DistillParams
from .target_texts import SHARD_TEXTS, Progress, Shard, Shards

CHECKPOINT_EVERY_S = 30.0
NUM_COPIES = 3  # of trained weights: their gradient, and AdamW's two moments
WARM_UP = 0.05  # share of the steps


class Student(nn.Module):
    """What is trained. width: its hidden size, which sets the learning rate. device: where it computes.

    Its parameters are on the CPU until accelerate prepares the module.
    """

    width: int
    device: torch.device

    @property
    def rate_factor(self) -> float:
        """Of the learning rate, by the hidden size."""
        return math.sqrt(256 / self.width)

    @abstractmethod
    def forward(self, batch: Shard) -> Tensor:
        """The loss of a batch, some texts of a shard on the device."""


def check_memory(student: Student) -> None:
    """Raises MemoryLimitError if there is no room to train `student`: the kernel would end the program later."""
    trained = [weights for weights in student.parameters() if weights.requires_grad]
    own_bytes = sum(weights.nbytes for weights in trained)
    hardware = read_hardware(student.device)
    if hardware.gpu is None:
        needed, free = NUM_COPIES * own_bytes, hardware.ram.available_bytes
    else:  # where the weights themselves are not yet
        needed, free = (1 + NUM_COPIES) * own_bytes, hardware.gpu.free_bytes
    if needed > free:
        count = format_count(sum(weights.numel() for weights in trained))
        raise MemoryLimitError(
            f"training {count} weights takes {format_size(needed)} more, and {format_size(free)} are free: train a "
            "smaller draft, such as an EAGLE head of few tokens (`head_tokens`)"
        )


class Trainer:
    """Trains `student`, with checkpoints in `folder`. step: the next one."""

    def __init__(self, student: Student, params: DistillParams, folder: Path) -> None:
        """Raises MemoryLimitError before anything is trained that does not fit."""
        device = student.device
        check_memory(student)
        accelerator_of(device).make_current()
        self._accelerator = Accelerator(cpu=not kind_of(device).has_own_memory)
        self._params, self._folder, self.step = params, folder, 0
        self._peak = params.learning_rate * student.rate_factor
        optimizer = torch.optim.AdamW(student.parameters(), lr=self._peak, betas=(0.9, 0.95), weight_decay=0.01)
        self._module, self._optimizer = self._accelerator.prepare(student, optimizer)

    def train(
        self,
        shards: Shards,
        pool: Sequence[int],
        progress: Progress,
        checkpoint_every_s: float,
        until: int | None = None,
    ) -> None:
        """Run the steps from `step` to `until`, or all remaining ones, on the shards with these numbers.

        Raises NumericalError if weights are not finite then.
        """
        first, last = self.step, self._params.steps if until is None else until
        saved_at, params = time.monotonic(), self._params
        for batch in self._batches(shards, pool, first, last):
            progress("training steps", self.step, params.steps)
            if self.step > first and time.monotonic() - saved_at >= checkpoint_every_s:
                self._save(self.step)
                saved_at = time.monotonic()
            for group in self._optimizer.param_groups:
                group["lr"] = self._rate(self.step)
            self._accelerator.backward(self._module(batch))
            self._accelerator.clip_grad_norm_(self._module.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.step += 1
        progress("training steps", self.step, params.steps)
        if not all(bool(weights.isfinite().all()) for weights in self._module.parameters()):
            raise NumericalError(
                f"the training diverged: weights are not finite (NaN or infinity); delete {self._folder}, and choose a "
                "smaller `learning_rate`"
            )

    @torch.no_grad()
    def mean(self, shard: Shard, measure: Callable[[Shard], Tensor]) -> float:
        """The mean of what `measure` gives for the shard's batches."""
        batches = self._cut(shard, range(len(shard["tokens"])))
        return float(torch.stack([measure(batch) for batch in batches]).mean())

    def _rate(self, step: int) -> float:
        """Learning rate: a warm-up, then a cosine decay to 0."""
        warm_up = max(1, int(WARM_UP * self._params.steps))
        if step < warm_up:
            return self._peak * (step + 1) / warm_up
        return self._peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, self._params.steps - warm_up)))

    def _batches(self, shards: Shards, pool: Sequence[int], first: int, last: int) -> Iterator[Shard]:
        """The batches of steps `first` .. `last`; the texts of a step depend on its number, the seed and the pool."""
        per_shard, num_shards = steps_per_shard(self._params), len(pool)
        for visit in range(first // per_shard, math.ceil(last / per_shard)):
            order = np.random.default_rng([self._params.seed, visit // num_shards]).permutation(num_shards)
            shard = shards.load(pool[int(order[visit % num_shards])])
            texts = np.random.default_rng([self._params.seed, visit, 1]).permutation(SHARD_TEXTS)
            steps = range(visit * per_shard, min((visit + 1) * per_shard, last))
            for step, batch in zip(steps, self._cut(shard, texts), strict=False):
                if step >= first:
                    yield batch

    def _cut(self, shard: Shard, texts: Sequence[int] | IntArray) -> Iterator[Shard]:
        """The shard's texts in this order, in batches on the device."""
        size, device = self._params.batch_texts, self._accelerator.device
        for first in range(0, len(texts), size):
            chosen = torch.as_tensor(np.array(texts[first : first + size]))
            yield {name: tensor[chosen].to(device) for name, tensor in shard.items()}

    # ---------------------------------------------------------------------------------------- checkpoints

    def _save(self, step: int) -> None:
        """Save the state before `step`; then delete the previous one."""
        folder, unfinished = self._folder / f"step-{step:08}", self._folder / "unfinished-step"
        before = list(self._folder.glob("step-*"))
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            self._accelerator.save_state(str(unfinished))
            unfinished.rename(folder)
            for old in before:
                if old != folder:
                    shutil.rmtree(old)
        except (OSError, RuntimeError, SafetensorError) as exc:  # torch's writer raises a RuntimeError on a full disk
            raise StorageError(f"{folder} cannot be written: {first_line(exc)}; free some space") from exc

    def resume(self) -> None:
        """Load the last checkpoint, if there is one. Raises CheckpointError for a damaged one."""
        newest = max(self._folder.glob(f"step-{'[0-9]' * 8}"), default=None)
        if newest is None:
            return
        try:
            self._accelerator.load_state(str(newest))
        except Exception as exc:  # four kinds of files, with various exceptions if damaged
            raise CheckpointError(
                f"{newest} is damaged ({first_line(exc)}); delete it, and `resume` restarts the training"
            ) from exc
        self.step = int(newest.name.removeprefix("step-"))


def steps_per_shard(params: DistillParams) -> int:
    """Steps on the texts of one shard, before the next shard is loaded."""
    return math.ceil(SHARD_TEXTS / params.batch_texts)
