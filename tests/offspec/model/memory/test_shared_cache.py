"""A draft in its target's KV cache against its twin, which has a cache of its own and copies the target's entries."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offspec.loaders.accelerators.capture import Work, as_it_is
from offspec.loaders.streaming.weights import LayerView
from offspec.model.cuda_graphs import RoundBuffers, is_static
from offspec.model.decoder import CachedDecoder, Decoder
from offspec.model.layer_draft import LayerDraft, LayerDraftText
from offspec.model.memory.kv_cache import MakeLayerCaches, plain_layers

from ....fakes import TinyModel
from ..test_decoder import NO_NODES, random_tokens
from .kv_formats import int8_layers

GetModel = Callable[[str], TinyModel]
ROOM = 5  # nodes of the target's largest tree


class CopyingText(CachedDecoder):
    """The twin of `LayerDraftText`."""

    decoder: LayerDraft

    def __init__(self, decoder: LayerDraft, target: CachedDecoder, buffers: RoundBuffers | None = None) -> None:
        super().__init__(decoder)
        self._target, self._num_exact = target, 0

    def begin(self, room: int) -> None:
        self.truncate(min(self.length, self._target.length))

    def keep(self, path: Sequence[int], pending: Sequence[int] = ()) -> None:
        super().keep(path, pending)
        length = self._target.length
        if length > self.length:
            self.cache.extend(length - self.length)
            self.cache.append(length - self.length, 0)
        for layer, number in enumerate(self.decoder.numbers):
            parts = self._target.cache.read(number, length)
            keys, values = (part[:, self._num_exact :].transpose(0, 1) for part in parts)
            self.cache.write(layer, keys, values, self._num_exact)
        self.cache.positions[:length] = self._target.cache.positions[:length]
        self._num_exact = length

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self._num_exact = min(self._num_exact, length)


class Life:
    """A text that a random draft guesses for; the same decisions for every kind of text with one seed.

    Row r of the draft's pending region has a token, a parent (-1: the text's last token) and a depth.
    """

    def __init__(self, target: CachedDecoder, draft: LayerDraftText | CopyingText, seed: int) -> None:
        self.target, self.draft, self.random = target, draft, random.Random(seed)
        self.text = random_tokens(9)
        self.rows: list[tuple[int, int, int]] = []
        self.found: list[Tensor] = []  # the draft's logits
        self.targets: list[Tensor] = []

    def ancestors(self, row: int) -> list[int]:
        """From the first one to the row itself."""
        path = list[int]()
        while row >= 0:
            path.insert(0, row)
            row = self.rows[row][1]
        return path

    def expand(self, count: int) -> None:
        """A round of new rows."""
        first = len(self.rows)
        for _ in range(count):
            parent = self.random.randrange(-1, len(self.rows)) if first else -1
            parent = min(parent, first - 1)  # rows of a round do not hang on each other
            self.rows.append((self.random.randrange(50), parent, 1 if parent < 0 else self.rows[parent][2] + 1))
        tokens, parents, depths = np.array(self.rows, dtype=np.int64).reshape(-1, 3).T
        self.found.append(self.draft.score([], tokens[first:], depths[first:], parents))

    def a_pass(self) -> None:
        """Rounds before and during the target's pass, then a verdict."""
        if chain := self.text[self.draft.length :]:
            self.found.append(self.draft.score(chain, *NO_NODES))
        for _ in range(2):
            self.expand(self.random.randrange(1, 5))
        path = self.ancestors(self.random.randrange(len(self.rows)))[:ROOM]
        tokens, depths = np.array([self.rows[row][0] for row in path]), np.arange(1, len(path) + 1)
        tree = tokens, depths, np.arange(-1, len(path) - 1)
        self.targets.append(self.target.score(self.text[self.target.length :], *tree))
        self.expand(3)  # as during the pass: its entries are there, and not judged yet
        self.judge(path)

    def judge(self, path: list[int]) -> None:
        accepted = path[: self.random.randrange(len(path) + 1)]
        last = accepted[-1] if accepted else -1
        root = next((row for row, (_, parent, _) in enumerate(self.rows) if parent == last), None)
        self.target.keep(range(len(accepted)))
        self.text += [self.rows[row][0] for row in accepted]
        if root is None or self.random.random() < 0.3:  # a token that was not drafted
            self.text.append(self.random.randrange(50, 60))
            self.draft.keep(accepted)
            self.rows = []
            return
        self.text.append(self.rows[root][0])
        below = [row for row in range(root + 1, len(self.rows)) if root in self.ancestors(row)]
        self.draft.keep([*accepted, root], below)
        number = {root: -1} | {row: i for i, row in enumerate(below)}
        gone = len(accepted) + 1
        self.rows = [(self.rows[r][0], number[self.rows[r][1]], self.rows[r][2] - gone) for r in below]

    def take_back(self) -> None:
        """A new request after an earlier place of the text."""
        length = self.random.randrange(1, self.target.length)
        self.text = [*self.text[:length], *random_tokens(4, length)]
        self.target.truncate(length)
        self.draft.truncate(min(self.draft.length, length))
        self.draft.begin(ROOM)
        self.rows = []

    def go_on_alone(self) -> None:
        """The target scores more than the draft and the gap have slots, as a long prompt, and the draft nothing."""
        self.text += random_tokens(40, self.random.randrange(100))
        self.target.score(self.text[self.target.length :], *NO_NODES)
        self.target.truncate(len(self.text) - 1)
        self.draft.keep([])
        self.rows = []

    def run(self, *, grows: bool = False) -> None:
        """grows: the target's cache gets other memory between passes, while the draft has entries of its own."""
        self.draft.begin(ROOM)
        for step in range(14):
            if step in (5, 8):
                self.take_back()
            if step in (3, 10):
                self.go_on_alone()
            if grows:
                self.target.cache.reserve(self.target.cache.capacity + 1)
            self.a_pass()


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("make", [plain_layers, int8_layers])
@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window"])
@pytest.mark.parametrize(("seed", "grows"), [(1, False), (2, True)])
def test_it_guesses_as_its_twin(
    tiny_model: GetModel, family: str, make: MakeLayerCaches, seed: int, grows: bool
) -> None:
    """And the target does not notice the draft."""
    whole = tiny_model(family).decoder()
    target = Decoder(whole.config, whole.weights, dtype=whole.dtype, device=whole.device, make_layer_caches=make)
    numbers = (1,) if seed % 2 else (0, 1)
    draft = LayerDraft(target, numbers, LayerView(target.weights, numbers, None))
    lives = list[Life]()
    for kind in (LayerDraftText, CopyingText):
        text = CachedDecoder(target)
        text.cache.reserve(200)
        lives.append(Life(text, kind(draft, text), seed))
        lives[-1].run(grows=grows)
    shared, twin = lives
    assert shared.text == twin.text
    assert len(shared.found) == len(twin.found)
    for found, expected in zip(shared.found, twin.found, strict=True):
        torch.testing.assert_close(found, expected)
    for found, expected in zip(shared.targets, twin.targets, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("make", [plain_layers])
@pytest.mark.parametrize("embedding", ["there", "elsewhere"])
@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window"])
@pytest.mark.parametrize(("seed", "grows"), [(1, False), (2, True)])
def test_static_rounds_guess_as_others(
    tiny_model: GetModel,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    embedding: str,
    make: MakeLayerCaches,
    seed: int,
    grows: bool,
) -> None:
    """As captured on a GPU, from the second round of a shape on; a graph cannot look up an embedding in RAM."""
    monkeypatch.setattr("offspec.model.layer_draft.USES_BEFORE_RECORDING", 1)
    monkeypatch.setattr("offspec.model.cuda_graphs.MIN_KEYS", 32)
    whole, recorded = tiny_model(family).decoder(torch.float64), list[tuple[int, int]]()
    target = Decoder(whole.config, whole.weights, dtype=whole.dtype, device=whole.device, make_layer_caches=make)
    view = LayerView(target.weights, (0, 1), None)
    if embedding == "elsewhere":
        monkeypatch.setattr("offspec.model.cuda_graphs._has_ready_embedding", lambda decoder: False)
    draft = LayerDraft(target, (0, 1), view)
    assert is_static(draft)

    def record(work: Any) -> Work:
        recorded.append(work.args)
        return as_it_is(work)

    lives = list[Life]()
    for buffers in (RoundBuffers(draft, record), None):
        text = CachedDecoder(target)
        text.cache.reserve(200)
        lives.append(Life(text, LayerDraftText(draft, text, buffers), seed))
        lives[-1].run(grows=grows)
    static, plain = lives
    assert static.text == plain.text
    for found, expected in zip(static.found, plain.found, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for found, expected in zip(static.targets, plain.targets, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    if not grows:
        assert len(recorded) == len(set(recorded)) > 1, "each shape once"


def test_the_draft_never_writes_where_the_target_does(tiny_model: GetModel) -> None:
    """Neither to entries that the target made while the draft was not asked, nor to the gap."""
    target = tiny_model("llama-gqa").decoder()
    text = CachedDecoder(target, 200)
    draft = LayerDraftText(LayerDraft(target, (0, 1), LayerView(target.weights, (0, 1), None)), text)
    draft.begin(ROOM)
    draft.score(random_tokens(3), *NO_NODES)
    text.score(random_tokens(60), *NO_NODES)
    draft.keep([])
    a_node = np.array([7]), np.array([1]), np.array([-1])
    for chain, tree in ((random_tokens(1), NO_NODES), ([], a_node)):
        before = [part.clone() for part in text.cache.read(0, text.cache.size)]
        draft.score(chain, *tree)
        after = text.cache.read(0, text.cache.size)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        text.score([], *a_node)  # to the gap
