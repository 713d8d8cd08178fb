"""Online alignment: the draft learns, between requests, from what the target said (Online Speculative Decoding, 2310.07177).

Every pass computes the target's distribution after each token that it emits; it costs nothing more to keep the likeliest part
of it. After a request the low-rank additions of the draft (`lora`) take some steps towards these: forward KL on texts of the
target's own (DistillSpec, 2310.08461, section 3). The text cannot change, since it is the target's whatever is guessed. What is
learnt from are the rows on the walk alone: they are computed in any case, where a large vocabulary's others are not, and what
hangs on the draft's guess is decided there. Knows nothing of trees, files' bytes or the terminal.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offspec.scheduler.verify import Logits, Verdict

from .config import ModelConfig
from .errors import UsageError
from .lora import Adapter, Packed, SavedAdapter, adapter_bytes
from .model import HEAD_ROWS, Decoder
from .storage import check_writable

SHARES = (1.0, 0.5, 0.0)  # of the additions, one of which is drafted with
MEMORY_PLACES = 256.0  # after so many more, what a share was worth counts half
LEAST_LOG = -1e4  # in place of minus infinity: 0 times it is 0


@dataclass(frozen=True)
class AlignmentParams:
    """How the draft learns.

    rank: of the additions. learning_rate: times the hidden size (wide models need smaller steps), of Adam. top_k: tokens of a
    distribution that are kept; the rest counts as one. buffer_bytes: what is kept to learn from, the oldest leaving first.
    window_tokens: of a text that is learnt from at once. batch_windows: in a step, the newest half of them, the others drawn from
    all that is kept. replays: how often a place is learnt from, on average. most_share: seconds of learning for a second
    of generating, at most.
    """

    rank: int = 16
    learning_rate: float = 0.1
    top_k: int = 32
    buffer_bytes: int = 32 * 2**20
    window_tokens: int = 256
    batch_windows: int = 4
    replays: float = 8.0
    most_share: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Learnt:
    """What one round of learning was.

    loss: mean KL(target ‖ draft) in nats on what was new in it, before anything was learnt from that; loss_before: that of the
    draft as it came. None where nothing was new, or no time was granted. share: of the additions, now drafted with.
    """

    seconds: float
    num_steps: int
    loss: float | None
    loss_before: float | None
    share: float


class Window:
    """Up to W tokens of a text, and what the target thought after some of them.

    tokens [W]; `first` .. `num_tokens` - 2 are the rows whose next token's distribution is known: choices, logs [W, K],
    its likeliest tokens and their log-probabilities. Memory is taken at once, so that a count of windows bounds it.
    """

    def __init__(self, context: Sequence[int], params: AlignmentParams) -> None:
        size, k = params.window_tokens, params.top_k
        self.tokens = np.zeros(size, dtype=np.int32)
        self.choices = np.zeros((size, k), dtype=np.int32)
        self.logs = np.zeros((size, k), dtype=np.float16)
        kept = context[-(size // 2) :]
        self.tokens[: len(kept)] = kept
        self.num_tokens, self.first = len(kept), len(kept) - 1

    @staticmethod
    def nbytes(params: AlignmentParams) -> int:
        return params.window_tokens * (4 + params.top_k * 6)

    @property
    def num_places(self) -> int:
        return self.num_tokens - 1 - self.first

    def add(self, tokens: Sequence[int], choices: npt.NDArray[np.int32], logs: npt.NDArray[np.float16]) -> int:
        """Append tokens, each drawn from its row of choices and logs; returns how many there was room for."""
        count = min(len(tokens), len(self.tokens) - self.num_tokens)
        rows = slice(self.num_tokens - 1, self.num_tokens - 1 + count)
        self.choices[rows], self.logs[rows] = choices[:count], logs[:count]
        self.tokens[self.num_tokens : self.num_tokens + count] = tokens[:count]
        self.num_tokens += count
        return count


class Listener:
    """Takes down what the target thinks in one request."""

    def __init__(self, aligner: Aligner, text: Sequence[int]) -> None:
        self._aligner = aligner
        self._window = aligner.open(text)

    def observe(self, verdict: Verdict, logits: Logits) -> None:
        """logits: the root's row, then the nodes'."""
        rows = torch.stack([logits[row] for row in (0, *(node + 1 for node in verdict.path))])
        logs, choices = self._aligner.likeliest(rows)
        done = 0
        while done < len(verdict.tokens):
            count = self._window.add(verdict.tokens[done:], choices[done:], logs[done:])
            done += count
            if not count:
                self._window = self._aligner.open(self._window.tokens.tolist())
        self._aligner.count(done)


class Aligner:
    """What has been heard, and the draft that learns from it."""

    def __init__(
        self,
        draft: Decoder,
        params: AlignmentParams | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Raises UsageError for a draft whose weights cannot be changed. clock: in seconds."""
        params = params or AlignmentParams()
        self.params = p = replace(params, top_k=min(params.top_k, draft.config.vocab_size))
        self.adapter = Adapter(draft, p.rank, p.seed)
        self.num_steps, self.is_listening = 0, True
        self._windows: deque[Window] = deque(maxlen=max(1, p.buffer_bytes // Window.nbytes(p)))
        self._draws = np.random.default_rng(p.seed)
        self._clock = clock
        self._owed = self._spare_s = self._step_s = 0.0
        self._optimizer: Adam | None = None
        self._fresh: list[Window] = []
        self._worth = dict.fromkeys(SHARES, 0.0)  # loss with each share, summed over places, the older counting less

    def listen(self, text: Sequence[int]) -> Listener | None:
        """For a request that begins with `text`; None where nothing is to be taken down."""
        return Listener(self, text) if self.is_listening else None

    def open(self, context: Sequence[int]) -> Window:
        """A window that goes on from a text, among those that are learnt from."""
        most = self.adapter.draft.config.vocab_size - 1
        window = Window([min(token, most) for token in context[-self.params.window_tokens :]], self.params)
        self._windows.append(window)
        self._fresh.append(window)
        del self._fresh[: -self.params.batch_windows]
        return window

    @torch.inference_mode()
    def likeliest(self, logits: Tensor) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.int32]]:
        """Log-probabilities and tokens [R, K] of logits [R, V]; what the draft does not know is not among them."""
        logs = logits.log_softmax(-1)[:, : self.adapter.draft.config.vocab_size]
        best = logs.topk(self.params.top_k)
        return best.values.clamp(min=LEAST_LOG).cpu().numpy().astype(np.float16), best.indices.int().cpu().numpy()

    def count(self, num_places: int) -> None:
        """So many places more have been heard."""
        self._owed += self.params.replays * num_places

    # ------------------------------------------------------------------------------------------------ learning

    def learn(self, generated_s: float) -> Learnt:
        """Learn from what was heard in a request of so many seconds, and let the draft draft with it.

        First what is new judges what was learnt before: the share of the additions that foretold it best is merged, none of
        them where the draft was best as it came, so that learning from a few texts cannot spoil a good draft for long.
        Left by an exception, Ctrl-C too, the draft is as it was before.
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
                losses.append(self._step(batch))
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
            self._restore(before)  # the draft is worth more as it was
            losses = []
        self.num_steps += len(losses)
        loss, loss_before = judged.get(drafts_with), judged.get(0.0)
        return Learnt(self._clock() - began, len(losses), loss, loss_before, self.adapter.share)

    def _restore(self, parameters: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, former in zip(self.adapter.parameters, parameters, strict=True):
                parameter.copy_(former)
                parameter.grad = None
        self._optimizer = None
        self.adapter.merge(self.adapter.share)

    def _judge(self) -> dict[float, float]:
        """Mean loss on what is new, by the share of the additions; empty where nothing is."""
        fresh, self._fresh = [window for window in self._fresh if window.num_places], []
        if not fresh:
            return {}
        with torch.no_grad():
            found = {share: self.loss(fresh, share) for share in SHARES}
        num_places = sum(window.num_places for window in fresh)
        for share, loss in found.items():
            self._worth[share] = 0.5 ** (num_places / MEMORY_PLACES) * self._worth[share] + num_places * loss
        return found

    def _batch(self) -> list[Window]:
        """Windows to learn from next; none where every place has had its share."""
        ready = [window for window in self._windows if window.num_places]
        if not ready or self._owed < 1:
            return []
        count = min(self.params.batch_windows, len(ready))
        newest = ready[len(ready) - (count + 1) // 2 :]
        drawn = self._draws.choice(len(ready) - len(newest), count - len(newest), replace=False)
        return [*newest, *(ready[index] for index in drawn)]

    def _step(self, batch: Sequence[Window]) -> float:
        """One step of Adam; the mean loss before it, in nats a place."""
        if self._optimizer is None:
            rate = self.params.learning_rate / self.adapter.draft.config.hidden_size
            self._optimizer = Adam(self.adapter.parameters, rate)
        for parameter in self.adapter.parameters:
            parameter.grad = None  # whoever asked for a loss before left its gradient there
        loss = self.loss(batch)
        self._optimizer.step()
        return loss

    def loss(self, batch: Sequence[Window], share: float = 1.0) -> float:
        """Mean KL(target ‖ draft) over the windows' places; where gradients are kept, its own is left with the additions.

        The head goes over HEAD_ROWS rows at a time, forwards and back, so that a large vocabulary's logits stay few.
        """
        device, trainee = self.adapter.draft.device, self.adapter.trainee(share)
        lengths = [window.num_tokens for window in batch]

        def put(parts: list[npt.NDArray[np.generic]], kind: torch.dtype) -> Tensor:
            return torch.from_numpy(np.concatenate(parts)).to(device, kind)

        tokens = put([window.tokens[:length] for window, length in zip(batch, lengths, strict=True)], torch.long)
        text_of = torch.repeat_interleave(torch.arange(len(batch)), torch.tensor(lengths)).to(device)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        starts = np.cumsum([0, *lengths[:-1]])
        rows = [start + np.arange(w.first, w.num_tokens - 1) for w, start in zip(batch, starts, strict=True)]
        choices = put([w.choices[w.first : w.num_tokens - 1] for w in batch], torch.long)
        logs = put([w.logs[w.first : w.num_tokens - 1] for w in batch], torch.float32)
        hidden = trainee.hidden(tokens, Packed(trainee, text_of, positions))[put([*rows], torch.long)]
        learns, total = hidden.requires_grad, 0.0
        leaf = hidden.detach().requires_grad_(learns)
        for first in range(0, len(leaf), HEAD_ROWS):
            part = slice(first, first + HEAD_ROWS)
            loss = divergence(trainee.head(leaf[part]), choices[part], logs[part]).sum() / len(leaf)
            if learns:
                loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        # A sum, not hidden.backward(leaf.grad): given a gradient, torch imports sympy first, which takes seconds.
        if leaf.grad is not None:
            (hidden * leaf.grad).sum().backward()  # type: ignore[no-untyped-call]
        return total


class Adam:
    """Adam (1412.6980), for parameters whose gradients are there. `torch.optim` would do, but its first step imports the
    compiler, which takes seconds that a user would wait for.
    """

    BETAS, EPSILON = (0.9, 0.98), 1e-8

    def __init__(self, parameters: list[Tensor], rate: float) -> None:
        self._parameters, self._rate, self._num_steps = parameters, rate, 0
        self._moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Take the step, and the gradients away."""
        self._num_steps += 1
        scales = [1 - beta**self._num_steps for beta in self.BETAS]
        for parameter, (first, second) in zip(self._parameters, self._moments, strict=True):
            assert parameter.grad is not None
            first.lerp_(parameter.grad, 1 - self.BETAS[0])
            second.lerp_(parameter.grad.square(), 1 - self.BETAS[1])
            parameter.addcdiv_(first, (second / scales[1]).sqrt() + self.EPSILON, value=-self._rate / scales[0])
            parameter.grad = None


def check_learning(file: Path | None, *, has_draft: bool, writes: bool) -> None:
    """Refuse what cannot work before anything is loaded. Raises UsageError or StorageError."""
    if not has_draft:
        raise UsageError("only a draft model can learn, and there is none; give one with --draft PATH")
    if file is None:
        return
    if writes:
        check_writable(file)
    if file.exists():
        SavedAdapter.read(file)
    elif not writes:
        raise UsageError(f"there is no {file} to draft with; give --learn, too, to have it made")


def open_aligner(draft: Decoder, file: Path | None, *, listens: bool) -> Aligner:
    """The draft's aligner, with what `file` says it has learnt. Raises UsageError for a file that is another draft's."""
    aligner = Aligner(draft)
    aligner.is_listening = listens
    if file is not None and file.exists():
        aligner.adapter.load(file)
    return aligner


def divergence(logits: Tensor, choices: Tensor, logs: Tensor) -> Tensor:
    """KL(p ‖ q) [R] in nats, q from logits [R, V], p known by its likeliest tokens [R, K]; the others count as one."""
    least = 1e-6
    q_logs = logits.log_softmax(-1).gather(-1, choices)
    p, q = logs.exp(), q_logs.exp()
    p_rest, q_rest = ((1 - x.sum(-1)).clamp(min=least) for x in (p, q))
    return (p * (logs - q_logs)).sum(-1) + p_rest * (p_rest.log() - q_rest.log())


def learning_bytes(config: ModelConfig, itemsize: int, params: AlignmentParams) -> int:
    """Upper bound of what learning takes beside the draft, what is heard aside, in bytes."""
    c, rows = config, params.window_tokens * params.batch_windows
    widths = 10 * c.hidden_size + 6 * c.num_heads * c.head_dim + 5 * c.intermediate_size
    attention = c.num_heads * rows * rows * (itemsize + 1)
    head = 4 * HEAD_ROWS * c.vocab_size * 4
    return adapter_bytes(c, params.rank, itemsize) + c.num_layers * (rows * widths * itemsize + attention) + head
