"""Online alignment: between requests the draft learns from what the target said.

That is Online Speculative Decoding (2310.07177).

Every pass computes what the target thinks after each token that it emits, and after each guess; it costs little more to
keep the likeliest part of it. After a request the low-rank additions of the draft (`lora`) take some steps towards
these: forward KL on texts of the models' own (DistillSpec, 2310.08461, section 3). The text cannot change, since it is
the target's whatever is guessed. A guess that was not accepted counts by how likely the target was to say it: the walk
is one draw of where the target goes, and the guesses beside it are the others. Knows nothing of how trees are drafted,
files' bytes or the terminal.
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

from offspec.scheduler.tree import ROOT, TokenTree
from offspec.scheduler.verify import TargetPass, TargetStates
from offspec.scheduler.vocabulary import Vocabulary

from ..checkpoints.atomic_files import check_writable
from ..errors import UsageError
from ..model.config import ModelConfig
from ..model.decoder import Decoder
from ..model.row_logits import HEAD_ROWS
from .lora import Adapter, SavedAdapter, TreeRows, adapter_bytes

SHARES = (1.0, 0.5, 0.0)  # of the additions, one of which is drafted with
MEMORY_PLACES = 256.0  # after so many more, what a share was worth counts half
LEAST_LOG = -1e4  # in place of minus infinity: 0 times it is 0
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AlignmentParams:
    """How the draft learns.

    rank: of the additions. learning_rate: times the hidden size (wide models need smaller steps), of Adam. top_k:
    tokens of a distribution that are kept; the rest counts as one. buffer_bytes: what is kept to learn from, the oldest
    leaving first. window_tokens: of a text and its guesses that are learnt from at once. most_guesses: the best-scored
    nodes of a tree that are taken down beside the walk's; of a tree in that order they are, with the root, the slice of
    rows that a verdict begins with, whose logits are there in any case. most_prompt: tokens of a prompt, its last ones,
    that are learnt from as well. reach_power: a guess counts as much as its probability of being said, to this power
    (0: as much as the text). batch_windows: in a step, the newest half of them, the others drawn from all that is kept.
    replays: how often a place is learnt from, on average. most_share: seconds of learning for a second of generating,
    at most.
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


@dataclass(frozen=True)
class LearningRound:
    """What one round of learning was.

    loss: mean KL(target ‖ draft) in nats a token of the text that was new, before anything was learnt from it;
    loss_before: that of the draft as it came. None where nothing was new, or no time was allowed. share: of the
    additions, now drafted with.
    """

    seconds: float
    num_steps: int
    loss: float | None
    loss_before: float | None
    share: float


class Window:
    """Up to W tokens, each hung on the one before it: a text and the guesses beside it.

    With them goes what the target thought after each.

    tokens [W]. parents [W]: the row of the token before, lower than its own; ROOT for the first. choices, logs [W, K]:
    the likeliest next tokens and their log-probabilities. weights [W]: what a row counts, 1 in the text; 0 where what
    the target thought is not known. last: the row that the text has come to. said_from: the row of the prompt's last
    token; from there on the text is the target's own. Memory is taken at once, so that a count of windows bounds it.
    """

    def __init__(self, context: Sequence[int], params: AlignmentParams) -> None:
        """context: what the text begins with; a quarter of the window is for the end of it."""
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
        """Rows that can be learnt from."""
        return int(np.count_nonzero(self.weights))

    def text(self) -> IntArray:
        """The rows of the text, ascending."""
        rows, row = list[int](), self.last
        while row != ROOT:
            rows.append(row)
            row = int(self.parents[row])
        return np.array(rows[::-1], dtype=np.int64)

    def said(self) -> IntArray:
        """The rows of the text after which the target went on with the next one of it, ascending."""
        rows = self.text()
        return rows[(rows >= self.said_from) & (self.weights[rows] > 0)]

    def hang(self, token: int, parent: int) -> int:
        """Add a token behind row `parent`; returns its row."""
        row = self.num_tokens
        self.tokens[row], self.parents[row] = token, parent
        self.num_tokens += 1
        return row

    def tell(
        self, row: int, choices: npt.NDArray[np.int32], logs: npt.NDArray[np.float16], weight: float = 1.0
    ) -> None:
        """What the target thought after a row: choices, logs [K]."""
        self.choices[row], self.logs[row], self.weights[row] = choices, logs, weight


class Listener:
    """Takes down what the target thinks in one request."""

    def __init__(self, aligner: Aligner, text: Sequence[int], states: TargetStates) -> None:
        """states: of the pass that took in what is new of the text.

        Its rows before the last say what was thought along it.
        """
        self._aligner = aligner
        size, end = aligner.params.window_tokens, len(text) - 1  # what follows the last token is the verdict's to tell
        shared = size // 4  # of the text before, with which a window begins
        begin = end - min(states.num_before, aligner.params.most_prompt)
        answer = max(begin, end + 1 - shared)  # from here on, the prompt is what the answer's own window begins with
        for start in range(begin, answer, size - shared):
            stop = min(start + size - shared, answer)
            window = aligner.open(text[:start])
            window.said_from = size  # nowhere: all of it is the prompt's
            first = window.num_tokens
            for token in aligner.vocabulary.text(text[start:stop]):
                window.last = window.hang(token, window.last)
            self._read(window, first, states, stop - start, end - stop)
        self._window = aligner.open(text)
        self._read(self._window, self._window.last - (end - answer), states, end - answer, 0)

    def _read(self, window: Window, row: int, states: TargetStates, count: int, num_after: int) -> None:
        """Take down what was thought after `count` of the prompt's tokens.

        They stand from `row` on; num_after more follow.
        """
        for done in range(0, count, HEAD_ROWS):
            first = states.num_before - num_after - count + done
            logs, choices = self._aligner.likeliest([*states.before(first, first + min(HEAD_ROWS, count - done))])
            for place, (tokens, values) in enumerate(zip(choices, logs, strict=True), row + done):
                window.tell(place, tokens, values)
        self._aligner.count(count)

    def observe(self, done: TargetPass) -> None:
        """Take a pass down.

        A guess that is not among the likeliest tokens kept is left out, with all that hangs on it: the target hardly
        goes there.
        """
        tree, verdict, logits = done.tree, done.verdict, done.logits
        aligner, path = self._aligner, verdict.path
        guesses = best_beside(tree, path, aligner.params.most_guesses)
        logs, choices = aligner.likeliest([logits[row] for row in (0, *(node + 1 for node in (*path, *guesses)))])
        reach = reached(tree, path, guesses, choices, logs)
        said = [(place, node) for place, node in enumerate(guesses, 1 + len(path)) if reach[node] > 0]
        if self._window.num_places and self._window.room < len(verdict.tokens) + len(said):
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
        for place, node in said:
            parent = row_of.get(int(tree.parents[node]))
            if parent is None or not window.room:  # the pass took more than a window
                continue
            row_of[node] = window.hang(int(guessed[node]), parent)
            window.tell(row_of[node], choices[place], logs[place], reach[node] ** aligner.params.reach_power)
        aligner.count(len(verdict.tokens) + len(said))

    def _go_on(self) -> None:
        """A new window, where the text of this one ends."""
        self._window = self._aligner.open(self._window.tokens[self._window.text()].tolist())


def best_beside(tree: TokenTree, path: Sequence[int], most: int) -> list[int]:
    """Those of the `most` best-scored nodes that are not on the path, ascending: parents before children."""
    best = np.argsort(-tree.scores, kind="stable")[:most]
    return sorted(best[~np.isin(best, path)].tolist())


def reached(
    tree: TokenTree,
    path: Sequence[int],
    guesses: Sequence[int],
    choices: npt.NDArray[np.int32],
    logs: npt.NDArray[np.float16],
) -> dict[int, float]:
    """How likely the target is to say the guesses, from where each leaves the path; 1 for the path's nodes.

    choices, logs [1 + P + G, K]: what the target thinks after the root, the path's nodes, the guesses (ascending). A
    token that is not among the choices has no chance, nor has what hangs on a node that is not here.
    """
    place_of = {node: place for place, node in enumerate((ROOT, *path, *guesses))}
    found = dict.fromkeys((ROOT, *path), 1.0)
    for node in guesses:
        parent, found[node] = int(tree.parents[node]), 0.0
        if found.get(parent):
            place = place_of[parent]
            log = logs[place, choices[place] == tree.tokens[node]].astype(np.float64)
            found[node] = found[parent] * float(np.exp(log).sum())
    return found


class Aligner:
    """What has been heard, and the draft that learns from it. windows: what is learnt from, the oldest first."""

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
        self.adapter, self.vocabulary = Adapter(draft, p.rank, p.seed), Vocabulary(draft.config.vocab_size)
        self.num_steps, self.is_listening = 0, True
        self.windows: deque[Window] = deque(maxlen=max(1, p.buffer_bytes // Window.nbytes(p)))
        self._draws = np.random.default_rng(p.seed)
        self._clock = clock
        self._owed = self._spare_s = self._step_s = 0.0
        self._optimizer: Adam | None = None
        self._fresh: list[Window] = []
        self._worth = dict.fromkeys(SHARES, 0.0)  # loss with each share, summed over places, the older counting less

    def new_listener(self) -> Callable[[TargetPass], None]:
        """For one request: told of its passes one after the other, it takes down what the target thinks."""
        listener: Listener | None = None

        def observe(done: TargetPass) -> None:
            nonlocal listener
            if listener is None and self.is_listening:
                listener = Listener(self, done.text, done.states)
            if listener is not None:
                listener.observe(done)

        return observe

    def open(self, context: Sequence[int]) -> Window:
        """A window that goes on from a text, among those that are learnt from."""
        window = Window(self.vocabulary.text(context[-self.params.window_tokens :]), self.params)
        self.windows.append(window)
        self._fresh.append(window)
        del self._fresh[: -self.params.batch_windows]
        return window

    @torch.inference_mode()
    def likeliest(self, logits: Sequence[Tensor]) -> tuple[npt.NDArray[np.float16], npt.NDArray[np.int32]]:
        """Log-probabilities and tokens [R, K] of R rows of logits [V]; what the draft does not know is not among them.

        HEAD_ROWS rows at a time, so that copies of a large vocabulary's stay few.
        """
        logs, choices = list[npt.NDArray[np.float16]](), list[npt.NDArray[np.int32]]()
        for first in range(0, len(logits), HEAD_ROWS):
            rows = torch.stack(list(logits[first : first + HEAD_ROWS]))
            best = rows[:, : self.adapter.draft.config.vocab_size].topk(self.params.top_k)
            values = (best.values - rows.logsumexp(-1, keepdim=True)).clamp(min=LEAST_LOG)
            logs.append(values.cpu().numpy().astype(np.float16))
            choices.append(best.indices.int().cpu().numpy())
        return np.concatenate(logs), np.concatenate(choices)

    def count(self, num_places: int) -> None:
        """So many places more have been heard."""
        self._owed += self.params.replays * num_places

    # ------------------------------------------------------------------------------------------------ learning

    def learn(self, generated_s: float) -> LearningRound:
        """Learn from what was heard in a request of so many seconds, and let the draft draft with it.

        First what is new judges what was learnt before: the share of the additions that foretold it best is merged,
        none of them where the draft was best as it came, so that learning from a few texts cannot spoil a good draft
        for long. Left by an exception, Ctrl-C too, the draft is as it was before.
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
            self._restore(before)  # the draft is worth more as it was
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
        """Mean loss on the text that is new, by the share of the additions; empty where none is."""
        fresh, self._fresh = [window for window in self._fresh if len(window.said())], []
        if not fresh:
            return {}
        with torch.no_grad():
            found = {share: self.loss(fresh, share, said_alone=True) for share in SHARES}
        num_places = sum(len(window.said()) for window in fresh)
        for share, loss in found.items():
            self._worth[share] = 0.5 ** (num_places / MEMORY_PLACES) * self._worth[share] + num_places * loss
        return found

    def _batch(self) -> list[Window]:
        """Windows to learn from next; none where every place has had its share."""
        ready = [window for window in self.windows if window.num_places]
        if not ready or self._owed < 1:
            return []
        count = min(self.params.batch_windows, len(ready))
        newest = ready[len(ready) - (count + 1) // 2 :]
        drawn = self._draws.choice(len(ready) - len(newest), count - len(newest), replace=False)
        return [*newest, *(ready[index] for index in drawn)]

    def step(self, batch: Sequence[Window]) -> float:
        """One step of Adam; the mean loss before it, in nats a place."""
        if self._optimizer is None:
            rate = self.params.learning_rate / self.adapter.draft.config.hidden_size
            self._optimizer = Adam(self.adapter.parameters, rate)
        for parameter in self.adapter.parameters:
            parameter.grad = None  # whoever asked for a loss before left its gradient there
        loss = self.loss(batch)
        self._optimizer.step()
        return loss

    def loss(self, batch: Sequence[Window], share: float = 1.0, *, said_alone: bool = False) -> float:
        """Weighted mean of KL(target ‖ draft) over the windows' places.

        Where gradients are kept, its own is left with the additions.

        said_alone: without guesses and prompts. One window after the other goes forwards and back, and of its rows
        HEAD_ROWS through the head at a time, so that activations and a large vocabulary's logits stay few.
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
            hidden = trainee.hidden(put(window.tokens[rows], torch.long), TreeRows(trainee, parents))
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
            # A sum, not hidden.backward(leaf.grad): given a gradient, torch imports sympy first, which takes seconds.
            if leaf.grad is not None:
                (hidden * leaf.grad).sum().backward()  # type: ignore[no-untyped-call]
        return total


class Adam:
    """Adam (1412.6980), for parameters whose gradients are there. `torch.optim` would do, but its first step imports
    the compiler, which takes seconds that a user would wait for.
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
    """The draft's aligner, with what `file` says it has learnt.

    Raises UsageError for a file that is another draft's.
    """
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
    c, rows = config, params.window_tokens
    widths = 10 * c.hidden_size + 6 * c.num_heads * c.head_dim + 5 * c.intermediate_size
    attention = c.num_heads * rows * rows * (itemsize + 1 + (12 if c.attention_cap else 0))  # capped, in fp32
    head = 4 * HEAD_ROWS * c.vocab_size * 4
    return adapter_bytes(c, params.rank, itemsize) + c.num_layers * (rows * widths * itemsize + attention) + head
