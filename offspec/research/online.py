"""Online alignment: between requests, the draft is trained on the target's predictions.

That is Online Speculative Decoding (2310.07177).

Every pass computes the target's distribution after each emitted token and each node; keeping its likeliest tokens costs
little. After a request, the draft's low-rank additions (`lora`) take some training steps: forward KL on the models' own
texts (DistillSpec, 2310.08461, section 3). The text cannot change, because the target alone decides it. A node that was
not accepted has a weight by its probability under the target: the walk is one sample of the target's text, and the
other nodes are alternatives. This module does not depend on how trees are drafted.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offspec.scheduler.trees.token_tree import ROOT, TokenTree
from offspec.scheduler.trees.verify import TargetPass, TargetStates
from offspec.scheduler.trees.vocabulary import Vocabulary

from ..drafts.base import LearningRound
from ..model.config import ModelConfig
from ..model.decoder import Decoder
from ..model.row_logits import HEAD_ROWS
from .lora import Adapter, TreeRows, adapter_bytes, hidden_states

SHARES = (1.0, 0.5, 0.0)  # candidate shares of the additions; the best one is merged
MEMORY_PLACES = 256.0  # number of new positions after which a share's earlier losses have half the weight
LEAST_LOG = -1e4  # instead of minus infinity, so that 0 times it is 0
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AlignmentParams:
    """How the draft learns.

    rank: of the additions. learning_rate: Adam's, times the hidden size (wide models need smaller steps). top_k: the
    number of tokens kept of a distribution; the rest counts as one token. buffer_bytes: memory for training data; the
    oldest is dropped first. window_tokens: tokens of a text and its nodes in one window. most_guesses: the number of
    best-scored nodes of a tree recorded beside the walk's; with the root they fill the first slice of rows, whose
    logits every verdict computes. most_prompt: the number of a prompt's last tokens that are recorded. reach_power: a
    node's weight is its probability under the target to this power (0: the same weight as the text). batch_windows:
    windows per step; half are the newest, the others are drawn from all. replays: how often each position is trained
    on, on average. most_share: maximum seconds of training per second of generation.
    """

    rank: int = 16
    learning_rate: float = 0.1
    top_k: int = 32
    buffer_bytes: int = 32 * 2**20
    window_tokens: int = 512
    most_guesses: int = HEAD_ROWS - 1
    most_prompt: int = 1024
    reach_power: float = 0.5
    batch_windows: int = 4
    replays: float = 8.0
    most_share: float = 1.0
    seed: int = 0


class Window:
    """Training data: a tree of up to W tokens, a text and nodes beside it, with the target's distribution after each.

    tokens [W]. parents [W]: the row of the previous token, lower than its own; ROOT for the first. choices, logs
    [W, K]: the likeliest next tokens and their log-probabilities. weights [W]: a row's weight, 1 in the text; 0 if the
    target's distribution is unknown. last: the row of the text's last token. said_from: the row of the prompt's last
    token; the text after it is the target's own. Memory is allocated at once, so the number of windows bounds it.
    """

    def __init__(self, context: Sequence[int], params: AlignmentParams) -> None:
        """context: the text so far; its end takes up to a quarter of the window."""
        size, k = params.window_tokens, params.top_k
        kept = context[-(size // 4) :]
        self.tokens, self.parents = np.zeros(size, dtype=np.int32), np.arange(ROOT, size + ROOT, dtype=np.int32)
        self.tokens[: len(kept)] = kept
        self.choices = np.zeros((size, k), dtype=np.int32)
        self.logs = np.zeros((size, k), dtype=np.float16)
        self.weights = np.zeros(size, dtype=np.float32)
        self.num_tokens, self.last = len(kept), len(kept) - 1
        self.said_from = self.last

    @staticmethod
    def nbytes(params: AlignmentParams) -> int:
        return params.window_tokens * (4 + 4 + 4 + params.top_k * 6)

    @property
    def room(self) -> int:
        return len(self.tokens) - self.num_tokens

    @property
    def num_places(self) -> int:
        """The number of rows to train on."""
        return int(np.count_nonzero(self.weights))

    def text(self) -> IntArray:
        """The rows of the text, ascending."""
        rows, row = list[int](), self.last
        while row != ROOT:
            rows.append(row)
            row = int(self.parents[row])
        return np.array(rows[::-1], dtype=np.int64)

    def said(self) -> IntArray:
        """The rows of the text that predict a token of the target's own, ascending."""
        rows = self.text()
        return rows[(rows >= self.said_from) & (self.weights[rows] > 0)]

    def hang(self, token: int, parent: int) -> int:
        """Add a token after row `parent`; returns its row."""
        row = self.num_tokens
        self.tokens[row], self.parents[row] = token, parent
        self.num_tokens += 1
        return row

    def tell(
        self, row: int, choices: npt.NDArray[np.int32], logs: npt.NDArray[np.float16], weight: float = 1.0
    ) -> None:
        """Set the target's distribution after a row: choices, logs [K]."""
        self.choices[row], self.logs[row], self.weights[row] = choices, logs, weight


class Listener:
    """Records the target's distributions in one request."""

    def __init__(self, aligner: Aligner, text: Sequence[int], states: TargetStates) -> None:
        """states: of the first pass; its rows before the last are those along the prompt."""
        self._aligner = aligner
        size, end = aligner.params.window_tokens, len(text) - 1  # the verdict has the distribution after the last token
        shared = size // 4  # tokens of the earlier text at a window's start
        begin = end - min(states.num_before, aligner.params.most_prompt)
        answer = max(begin, end + 1 - shared)  # the prompt from here on is in the answer's own window
        for start in range(begin, answer, size - shared):
            stop = min(start + size - shared, answer)
            window = aligner.open(text[:start])
            window.said_from = size  # all tokens are the prompt's
            first = window.num_tokens
            for token in aligner.vocabulary.text(text[start:stop]):
                window.last = window.hang(token, window.last)
            self._read(window, first, states, stop - start, end - stop)
        self._window = aligner.open(text)
        self._read(self._window, self._window.last - (end - answer), states, end - answer, 0)

    def _read(self, window: Window, row: int, states: TargetStates, count: int, num_after: int) -> None:
        """Record the distributions after `count` tokens of the prompt, in rows `row` on; num_after more follow."""
        for done in range(0, count, HEAD_ROWS):
            first = states.num_before - num_after - count + done
            logs, choices = self._aligner.likeliest([*states.before(first, first + min(HEAD_ROWS, count - done))])
            for place, (tokens, values) in enumerate(zip(choices, logs, strict=True), row + done):
                window.tell(place, tokens, values)
        self._aligner.count(count)

    def observe(self, done: TargetPass) -> None:
        """Record a pass.

        Nodes outside their parent's kept tokens are omitted with their subtrees, because they are improbable.
        """
        tree, verdict, logits = done.tree, done.verdict, done.logits
        aligner, path = self._aligner, verdict.path
        guesses = best_beside(tree, path, aligner.params.most_guesses)
        logs, choices = aligner.likeliest([logits[row] for row in (0, *(node + 1 for node in (*path, *guesses)))])
        reach = reached(tree, path, guesses, choices, logs)
        places = [(place, node) for place, node in enumerate(guesses, 1 + len(path)) if reach[node] > 0]
        if self._window.num_places and self._window.room < len(verdict.tokens) + len(places):
            self._go_on()
        row_of = {ROOT: self._window.last}
        for place, token in enumerate(aligner.vocabulary.text(verdict.tokens)):
            if not self._window.room:
                self._go_on()
                row_of = {}
            window = self._window
            window.tell(window.last, choices[place], logs[place])
            window.last = window.hang(token, window.last)
            if place < len(path):
                row_of[path[place]] = window.last
        guessed = aligner.vocabulary.inputs(tree.tokens)
        for place, node in places:
            parent = row_of.get(int(tree.parents[node]))
            if parent is None or not window.room:  # the pass does not fit one window
                continue
            row_of[node] = window.hang(int(guessed[node]), parent)
            window.tell(row_of[node], choices[place], logs[place], reach[node] ** aligner.params.reach_power)
        aligner.count(len(verdict.tokens) + len(places))

    def _go_on(self) -> None:
        """Continue the text in a new window."""
        self._window = self._aligner.open(self._window.tokens[self._window.text()].tolist())


def best_beside(tree: TokenTree, path: Sequence[int], most: int) -> list[int]:
    """The `most` best-scored nodes without those on the path, ascending: parents before children."""
    best = np.argsort(-tree.scores, kind="stable")[:most]
    return sorted(best[~np.isin(best, path)].tolist())


def reached(
    tree: TokenTree,
    path: Sequence[int],
    guesses: Sequence[int],
    choices: npt.NDArray[np.int32],
    logs: npt.NDArray[np.float16],
) -> dict[int, float]:
    """The target's probability of each node below its last ancestor on the path; 1 for the path's nodes.

    choices, logs [1 + P + G, K]: the target's distributions after the root, the path's nodes, and `guesses`
    (ascending). A token outside the choices has probability 0, and so have the descendants of missing nodes.
    """
    place_of = {node: place for place, node in enumerate((ROOT, *path, *guesses))}
    reach = dict.fromkeys((ROOT, *path), 1.0)
    for node in guesses:
        parent, reach[node] = int(tree.parents[node]), 0.0
        if reach.get(parent):
            place = place_of[parent]
            log = logs[place, choices[place] == tree.tokens[node]].astype(np.float64)
            reach[node] = reach[parent] * float(np.exp(log).sum())
    return reach


class Aligner:
    """Collects training data, and trains the draft on it. windows: the data, oldest first."""

    def __init__(
        self,
        draft: Decoder,
        params: AlignmentParams | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Raises UsageError for a draft with unchangeable weights. clock: in seconds."""
        params = params or AlignmentParams()
        self._begin(Adapter(draft, params.rank, params.seed), draft.config.vocab_size, params, clock)

    def _begin(self, adapter: Adapter, num_known: int, params: AlignmentParams, clock: Callable[[], float]) -> None:
        """num_known: the draft knows the target's tokens below it."""
        self.params = p = replace(params, top_k=min(params.top_k, num_known))
        self.adapter, self.vocabulary, self._num_known = adapter, Vocabulary(num_known), num_known
        self.num_steps, self.is_listening = 0, True
        self.windows: deque[Window] = deque(maxlen=max(1, p.buffer_bytes // Window.nbytes(p)))
        self._draws = np.random.default_rng(p.seed)
        self._clock = clock
        self._owed = self._spare_s = self._step_s = 0.0
        self._optimizer: Adam | None = None
        self._fresh: list[Window] = []
        self._worth = dict.fromkeys(SHARES, 0.0)  # decaying sum of the loss with each share

    def new_listener(self) -> Callable[[TargetPass], None]:
        """A function that receives one request's passes in order, and records the target's distributions."""
        listener: Listener | None = None

        def observe(done: TargetPass) -> None:
            nonlocal listener
            if listener is None and self.is_listening:
                listener = Listener(self, done.text, done.states)
            if listener is not None:
                listener.observe(done)

        return observe

    def open(self, context: Sequence[int]) -> Window:
        """Add a new window that continues a text."""
        window = Window(self.vocabulary.text(context[-self.params.window_tokens :]), self.params)
        self.windows.append(window)
        self._fresh.append(window)
        del self._fresh[: -self.params.batch_windows]
        return window

    @torch.inference_mode()
    def likeliest(self, logits: Sequence[Tensor]) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.int32]]:
        """Log-probabilities and tokens [R, K] of R rows of logits [V], without tokens outside the draft's vocabulary.

        It takes HEAD_ROWS rows at a time, to limit copies of a large vocabulary's logits.
        """
        logs, choices = list[npt.NDArray[np.float16]](), list[npt.NDArray[np.int32]]()
        for first in range(0, len(logits), HEAD_ROWS):
            rows = torch.stack(list(logits[first : first + HEAD_ROWS]))
            best = rows[:, : self._num_known].topk(self.params.top_k)
            values = (best.values - rows.logsumexp(-1, keepdim=True)).clamp(min=LEAST_LOG)
            logs.append(values.cpu().numpy().astype(np.float16))
            choices.append(best.indices.int().cpu().numpy())
        return np.concatenate(logs), np.concatenate(choices)

    def count(self, num_places: int) -> None:
        """Count `num_places` more recorded positions."""
        self._owed += self.params.replays * num_places

    # ------------------------------------------------------------------------------------------------ learning

    def learn(self, generated_s: float) -> LearningRound:
        """Train on the recorded positions of a request that took `generated_s` seconds, and update the draft.

        First, the new text evaluates the earlier training. The share of the additions with the lowest loss is merged;
        it may be 0, the original draft. So training on a few texts cannot harm a good draft for long. After an
        exception (also Ctrl-C), the draft is unchanged.
        """
        began, losses, judged = self._clock(), list[float](), dict[float, float]()
        self._spare_s += self.params.most_share * generated_s
        before = [parameter.detach().clone() for parameter in self.adapter.parameters]
        try:
            if self._spare_s > 0:
                judged = self._judge()
                self._spare_s -= self._clock() - began
            while (batch := self._batch()) and self._spare_s > 0 and self._spare_s >= self._step_s:
                started = self._clock()
                losses.append(self.step(batch))
                self._step_s = self._clock() - started
                self._spare_s -= self._step_s
                self._owed -= sum(window.num_places for window in batch)
            drafts_with = self.adapter.share
            if losses:
                self.adapter.merge(min(SHARES, key=self._worth.__getitem__))
        except BaseException:
            self._restore(before)
            raise
        if not all(map(math.isfinite, losses)):
            self._restore(before)  # keep the draft as it was
            losses = []
        self.num_steps += len(losses)
        loss, loss_before = judged.get(drafts_with), judged.get(0.0)
        return LearningRound(self._clock() - began, len(losses), loss, loss_before, self.adapter.share)

    def _restore(self, parameters: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, former in zip(self.adapter.parameters, parameters, strict=True):
                parameter.copy_(former)
                parameter.grad = None
        self._optimizer = None
        self.adapter.merge(self.adapter.share)

    def _judge(self) -> dict[float, float]:
        """Mean loss on the new text for each share of the additions; empty without new text."""
        fresh, self._fresh = [window for window in self._fresh if len(window.said())], []
        if not fresh:
            return {}
        with torch.no_grad():
            losses = {share: self.loss(fresh, share, said_alone=True) for share in SHARES}
        num_places = sum(len(window.said()) for window in fresh)
        for share, loss in losses.items():
            self._worth[share] = 0.5 ** (num_places / MEMORY_PLACES) * self._worth[share] + num_places * loss
        return losses

    def _batch(self) -> list[Window]:
        """The windows of the next step; none if all positions were trained on often enough."""
        ready = [window for window in self.windows if window.num_places]
        if not ready or self._owed < 1:
            return []
        count = min(self.params.batch_windows, len(ready))
        newest = ready[len(ready) - (count + 1) // 2 :]
        drawn = self._draws.choice(len(ready) - len(newest), count - len(newest), replace=False)
        return [*newest, *(ready[index] for index in drawn)]

    def step(self, batch: Sequence[Window]) -> float:
        """One step of Adam. Returns the mean loss before it, in nats per position."""
        if self._optimizer is None:
            rate = self.params.learning_rate / self.adapter.draft.config.hidden_size
            self._optimizer = Adam(self.adapter.parameters, rate)
        for parameter in self.adapter.parameters:
            parameter.grad = None  # `loss` may have left gradients
        loss = self.loss(batch)
        self._optimizer.step()
        return loss

    def loss(self, batch: Sequence[Window], share: float = 1.0, *, said_alone: bool = False) -> float:
        """Weighted mean of KL(target ‖ draft) over the windows' positions.

        If gradients are enabled, it adds its own to the additions' `grad`.

        said_alone: without nodes and prompts. Windows go forward and backward one at a time, and HEAD_ROWS rows at a
        time through the head, to limit activations and a large vocabulary's logits.
        """
        device, trainee = self.adapter.draft.device, self.adapter.trainee(share)
        parts = [(w, w.said() if said_alone else np.flatnonzero(w.weights)) for w in batch]
        whole, total = float(sum(window.weights[learnt].sum() for window, learnt in parts)), 0.0

        def put(array: npt.NDArray[np.generic], kind: torch.dtype) -> Tensor:
            return torch.from_numpy(array).to(device, kind)

        for window, learnt in parts:
            choices, logs, weights = (x[learnt] for x in (window.choices, window.logs, window.weights))
            rows = window.text() if said_alone else np.arange(window.num_tokens)
            parents = np.arange(len(rows)) + ROOT if said_alone else window.parents[rows]
            places = np.searchsorted(rows, learnt)
            hidden = hidden_states(trainee, put(window.tokens[rows], torch.long), TreeRows(trainee, parents))
            hidden = hidden[put(places, torch.long)]
            learns = hidden.requires_grad
            leaf = hidden.detach().requires_grad_(learns)
            for first in range(0, len(leaf), HEAD_ROWS):
                part = slice(first, first + HEAD_ROWS)
                apart = divergence(
                    trainee.head(trainee.normed(leaf[part])),
                    put(choices[part], torch.long),
                    put(logs[part], torch.float32),
                )
                loss = (apart * put(weights[part], torch.float32)).sum() / whole
                if learns:
                    loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
            # A sum, not hidden.backward(leaf.grad): with a gradient argument, torch first imports sympy, for seconds.
            if leaf.grad is not None:
                (hidden * leaf.grad).sum().backward()  # type: ignore[no-untyped-call]
        return total


class Adam:
    """Adam (1412.6980) for parameters with gradients.

    It replaces `torch.optim`, whose first step imports the compiler, for which a user would wait seconds.
    """

    BETAS, EPSILON = (0.9, 0.98), 1e-8

    def __init__(self, parameters: list[Tensor], rate: float) -> None:
        self._parameters, self._rate, self._num_steps = parameters, rate, 0
        self._moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Take a step, and remove the gradients."""
        self._num_steps += 1
        scales = [1 - beta**self._num_steps for beta in self.BETAS]
        for parameter, (first, second) in zip(self._parameters, self._moments, strict=True):
            assert parameter.grad is not None
            first.lerp_(parameter.grad, 1 - self.BETAS[0])
            second.lerp_(parameter.grad.square(), 1 - self.BETAS[1])
            parameter.addcdiv_(first, (second / scales[1]).sqrt() + self.EPSILON, value=-self._rate / scales[0])
            parameter.grad = None


def divergence(logits: Tensor, choices: Tensor, logs: Tensor) -> Tensor:
    """KL(p ‖ q) [R] in nats: q from logits [R, V], p by its likeliest tokens [R, K]; the others count as one token."""
    least = 1e-6
    q_logs = logits.log_softmax(-1).gather(-1, choices)
    p, q = logs.exp(), q_logs.exp()
    p_rest, q_rest = ((1 - x.sum(-1)).clamp(min=least) for x in (p, q))
    return (p * (logs - q_logs)).sum(-1) + p_rest * (p_rest.log() - q_rest.log())


def learning_bytes(config: ModelConfig, itemsize: int, params: AlignmentParams) -> int:
    """Upper bound of the bytes that training needs beside the draft, without the recorded data."""
    c, rows = config, params.window_tokens
    widths = 10 * c.hidden_size + 6 * c.num_heads * c.head_dim + 5 * c.intermediate_size
    attention = c.num_heads * rows * rows * (itemsize + 1 + (12 if c.attention_cap else 0))  # capped, in fp32
    head = 4 * HEAD_ROWS * c.vocab_size * 4
    return adapter_bytes(c, params.rank, itemsize) + c.num_layers * (rows * widths * itemsize + attention) + head
