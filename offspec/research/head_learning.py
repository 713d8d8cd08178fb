"""A head that learns between requests (`--learn`), as a draft model does (`online`).

A head's row needs the target's state at the place before it. So each place of a text is recorded with that state
beside the target's likeliest next tokens. Training unrolls the head over these texts (`unrolling`). It changes the
head's inner matrices by low-rank additions, and leaves matrices as large as the vocabulary as they are. Nodes beside
the text are not learnt from.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offspec.scheduler.trees.token_tree import IntArray
from offspec.scheduler.trees.verify import TargetPass

from ..model.config import ModelConfig
from ..model.heads.head import Head, HeadSpec
from ..model.heads.text import target_states
from .lora import Adapter
from .online import Aligner, AlignmentParams, Window
from .unrolling import cross_entropy, unroll, weighted

UNROLLED = 4  # tokens ahead that a head learns to predict, or as many as it has steps
HEAD_PARAMS = AlignmentParams(window_tokens=128)  # short, as training keeps the logits of all steps
NUM_WINDOWS = 32  # in memory
SHORTEST = 3  # places from which something can be learnt


class HeadAdapter(Adapter):
    """Additions to the matrices of a head, without those that have a row or column for each token."""

    def __init__(self, head: Head, spec: HeadSpec, tensors: Mapping[str, Tensor], rank: int, seed: int = 0) -> None:
        """tensors: the head's own, by the names of `spec.shapes`."""
        self._head, self._spec = head, spec
        shapes = adapted_head_shapes(spec, head.target.config.vocab_size)
        self._tables = {name: tensor for name, tensor in tensors.items() if not tensor.is_floating_point()}
        self._begin(head, {name: t for name, t in tensors.items() if name not in self._tables}, shapes, rank, seed)

    def trainee(self, share: float = 1.0) -> Head:
        """The head with `share` times the additions, in fp32. Keeps gradients."""
        vectors = {name: tensor.float() for name, tensor in self._others.items() if tensor.dim() == 1}  # of norms
        tensors = {**self._tables, **self._others, **vectors}
        for name, (a, b) in self.pairs.items():
            tensors[name] = torch.addmm(self.originals[name].float(), b, a, alpha=share)
        return self._spec.make(tensors, self._head.target, torch.float32)


def adapted_head_shapes(spec: HeadSpec, vocab_size: int) -> dict[str, tuple[int, int]]:
    """Name → [N, K] of the head's matrices that learn."""
    sizes = {spec.num_columns, vocab_size}
    return {
        name: (shape[0], shape[1])
        for name, shape in spec.shapes.items()
        if name.endswith(".weight") and len(shape) == 2 and shape[0] not in sizes
    }


class LearntToken(NamedTuple):
    """A token of a text, the target's state after it [S], and its likeliest next tokens [K]."""

    token: int
    state: Tensor
    choices: npt.NDArray[np.int32]
    logs: npt.NDArray[np.float16]


class HeadWindow(Window):
    """Consecutive places of one text. states [W, S]: the target's states after each token, which the head reads.

    said_from: the first place whose next token is the target's own.
    """

    def __init__(self, params: AlignmentParams, width: int, dtype: torch.dtype) -> None:
        super().__init__([], params)
        self.states = torch.zeros(params.window_tokens, width, dtype=dtype)
        self.said_from = 0

    @property
    def num_places(self) -> int:
        return self.num_tokens if self.num_tokens >= SHORTEST else 0

    def said(self) -> IntArray:
        """The places that the head predicts the target's own token after; it needs the state of the place before."""
        return np.arange(max(1, self.said_from), self.num_tokens) if self.num_places else np.empty(0, dtype=np.int64)

    def add(self, place: LearntToken) -> None:
        row = self.num_tokens
        self.hang(place.token, row - 1)
        self.tell(row, place.choices, place.logs)
        self.states[row].copy_(place.state)

    def place(self, row: int) -> LearntToken:
        return LearntToken(int(self.tokens[row]), self.states[row], self.choices[row], self.logs[row])


class HeadAligner(Aligner):
    """Records texts with the target's states, and trains the head on them."""

    def __init__(self, head: Head, spec: HeadSpec, tensors: Mapping[str, Tensor]) -> None:
        adapter = HeadAdapter(head, spec, tensors, HEAD_PARAMS.rank, HEAD_PARAMS.seed)
        self._begin(adapter, head.target.config.vocab_size, HEAD_PARAMS, time.perf_counter)
        self.head, self._trainable, self._steps = head, adapter, head.num_steps or UNROLLED
        self._width = states_width(spec, head.target.config.hidden_size)
        self.windows = deque(maxlen=NUM_WINDOWS)

    def new_listener(self) -> Callable[[TargetPass], None]:
        """A function that receives one request's passes in order, and records the text's places."""
        window: HeadWindow | None = None

        def observe(done: TargetPass) -> None:
            nonlocal window
            if not self.is_listening:
                return
            num_before = min(done.states.num_before, self.params.most_prompt) if window is None else 0
            places = self._places(done, num_before)
            window = window or self._open()
            window.said_from = window.said_from if window.num_tokens else num_before
            for place in places:
                if not window.room:
                    new, shared = self._open(), len(window.tokens) // 4
                    for row in range(len(window.tokens) - shared, len(window.tokens)):
                        new.add(window.place(row))
                    new.said_from = max(shared, window.said_from - len(window.tokens) + shared)
                    window = new
                window.add(place)
            self.count(len(places))

        return observe

    def _open(self) -> HeadWindow:
        window = HeadWindow(self.params, self._width, self.head.target.dtype)
        self.windows.append(window)
        self._fresh.append(window)
        del self._fresh[: -self.params.batch_windows]
        return window

    def _places(self, done: TargetPass, num_before: int) -> list[LearntToken]:
        """The last `num_before` places before the pass's root, the root, and the accepted nodes."""
        rows, states = [0, *(node + 1 for node in done.verdict.path)], done.states
        end = len(done.text) - 1
        tokens = [*done.text[end - num_before :], *done.verdict.tokens[: len(done.verdict.path)]]
        features = target_states(states, self.head.target_layers, num_before, rows).cpu()
        first = states.num_before - num_before
        logits = [*states.before(first, states.num_before)] if num_before else []
        logs, choices = self.likeliest([*logits, *(done.logits[row] for row in rows)])
        return [LearntToken(*each) for each in zip(tokens, features, choices, logs, strict=True)]

    def loss(self, batch: Sequence[Window], share: float = 1.0, *, said_alone: bool = False) -> float:
        """Mean cross entropy of the head with the target, minus the target's entropy, in nats per place.

        If gradients are enabled, it adds its own to the additions' `grad`. said_alone: one token ahead, after the
        prompt; otherwise mean over all steps, weighted as in `distill --head`.
        """
        parts = [window for window in batch if isinstance(window, HeadWindow) and window.num_places]
        total = 0.0
        for window in parts:
            loss = self._window_loss(self._trainable.trainee(share), window, said_alone) / len(parts)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        if torch.is_grad_enabled():
            for parameter in self.adapter.parameters:  # a short text does not reach the matrices of the last steps
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        return total

    def _window_loss(self, head: Head, window: HeadWindow, said_alone: bool) -> Tensor:
        count, device = window.num_tokens, head.device
        inputs = head.vocabulary.inputs(window.tokens[None, :count].astype(np.int64))
        tokens = torch.from_numpy(inputs).to(device)
        features = head.fused(window.states[:count].to(device))[None]
        losses = list[Tensor]()
        for step, (made, _) in enumerate(unroll(head, features, tokens, 1 if said_alone else self._steps)):
            first = max(1 + step, window.said_from) if said_alone else 1 + step
            logs = torch.from_numpy(window.logs[first:count]).to(device, torch.float32)
            wanted = {"labels": torch.from_numpy(window.choices[first:count]).to(device), "log_probabilities": logs}
            entropy = -(logs.exp() * logs).sum(-1).mean()
            losses.append(cross_entropy(head, made.states[first - 1 - step :], wanted) - entropy)
        return weighted(losses)


def states_width(spec: HeadSpec, hidden: int) -> int:
    """Numbers of the target's states at a place that a head reads."""
    return max(1, len(spec.target_layers)) * hidden


def learning_bytes(spec: HeadSpec, target: ModelConfig, itemsize: int) -> tuple[int, int]:
    """Upper bounds of the bytes that learning needs beside the head, on its device and in RAM (the texts)."""
    params, hidden = HEAD_PARAMS, target.hidden_size
    shapes = adapted_head_shapes(spec, target.vocab_size).values()
    matrix_bytes = sum(
        rows * columns * (itemsize + 8) + 16 * params.rank * (rows + columns) for rows, columns in shapes
    )
    logits = (UNROLLED + 2) * params.window_tokens * spec.num_columns * 4
    inner = UNROLLED * params.window_tokens * 4 * (40 * hidden + params.window_tokens * target.num_heads)
    texts = NUM_WINDOWS * params.window_tokens * (states_width(spec, hidden) * itemsize + params.top_k * 6 + 12)
    return matrix_bytes + logits + inner, texts
