"""States of recurrent layers, behind attention or beside it: trees, verdicts, rewinds, copies, batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offspec.checkpoints.exit_layers import check_exit_layer, refuse_states
from offspec.errors import UsageError
from offspec.model.block import Block, memory_bytes
from offspec.model.decoder import CachedDecoder, Decoder, score_together
from offspec.model.memory.recurrent_states import LEAST_COPIED, MOST_COPIES, RecurrentStates
from offspec.model.memory.request_caches import RequestCaches
from offspec.model.memory.text_pool import TextPool
from offspec.model.pass_rows import TextRows

from ....examples import examples
from ....fakes import FAMILIES, build
from ....refusals import refused
from ..test_decoder import (
    NO_NODES,
    Pass,
    Tree,
    assert_close,
    chain_logits,
    expected_logits,
    passes,
    random_tokens,
    score_in_rounds,
)

NIGHTLY = [pytest.param(family, marks=pytest.mark.nightly) for family in ("olmo-hybrid", "nemotron-h")]


@pytest.fixture(scope="module", params=["qwen3.5", "lfm2", "falcon-h1", *NIGHTLY])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return build(FAMILIES[request.param], tmp_path_factory.mktemp("hybrid") / "model").decoder()


@given(steps=st.lists(passes(), min_size=1, max_size=3))
@examples(15)
def test_a_node_of_a_tree_is_the_end_of_a_plain_chain(decoder: Decoder, steps: list[Pass]) -> None:
    text, tokens = CachedDecoder(decoder), list[int]()
    for step in steps:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("offspec.model.pass_rows.CHUNK_ROWS", step.chunk_rows)
            logits = score_in_rounds(text, step)
        tokens += step.chain
        assert_close(logits, expected_logits(decoder, tokens, step.tree))
        path = step.tree.path(step.kept)
        text.keep(path)
        tokens += [step.tree.tokens[node] for node in path]
        assert text.length == len(tokens)


def test_nodes_that_stay_pending_continue_from_the_new_root(decoder: Decoder) -> None:
    text, chain = CachedDecoder(decoder), random_tokens(5)
    tree = Tree(random_tokens(6, 2), [-1, 0, 0, 1, 2, 4])
    text.score(chain, *tree.round(0, 5))
    text.keep([0], [2, 4])  # a node, and what is below its second child
    below = Tree([*tree.tokens[2:3], *tree.tokens[4:]], [-1, 0, 1])
    found = text.score([], *below.round(2, 3))
    assert_close(found[0], chain_logits(decoder, [*chain, tree.tokens[0], *below.tokens])[-1])
    text.keep([0, 1, 2])
    assert_close(text.score([7], *NO_NODES)[0], chain_logits(decoder, [*chain, tree.tokens[0], *below.tokens, 7])[-1])


def test_an_answer_may_be_given_anew_at_the_cost_of_one_token(decoder: Decoder) -> None:
    """A prompt's state before its last token is kept; other places go back to the one before."""
    prompt, answer = random_tokens(40), random_tokens(9, 3)
    caches = RequestCaches(CachedDecoder(decoder), None)
    caches.target.score(prompt, *NO_NODES)
    for token in answer:
        caches.target.score([token], *NO_NODES)
    caches.text = [*prompt, *answer]
    assert caches.rewind(prompt) == 1
    assert_close(caches.target.score(prompt[-1:], *NO_NODES)[0], chain_logits(decoder, prompt)[-1])
    changed = [*prompt[:20], 1, 2]
    caches.text = list(prompt)
    assert caches.rewind(changed) == len(changed)
    assert_close(caches.target.score(changed, *NO_NODES)[0], chain_logits(decoder, changed)[-1])


def test_training_an_exit_layer_is_refused(decoder: Decoder) -> None:
    """It would share KV entries that some layers do not have; an untrained one reads states, too."""
    with refused(UsageError, decoder.config.model_type, "training an exit layer", "`draft=lookup`"):
        refuse_states(decoder.config, "training an exit layer")
    check_exit_layer(1, decoder.config)


def test_copies_are_few_and_far_apart(decoder: Decoder) -> None:
    text, length = CachedDecoder(decoder), 0
    memory, _ = text.cache.state_of(0)
    assert isinstance(memory, RecurrentStates)
    for count in (LEAST_COPIED, 40, 20, LEAST_COPIED, 30, 50):
        text.score(random_tokens(count), *NO_NODES)
        length += count
    lengths = {memory.restorable(number) for number in range(length)}
    assert len(lengths) == 1 + MOST_COPIES  # the beginning, too
    assert length - 1 in lengths
    assert memory.nbytes <= memory_bytes(decoder.config, length, 4)


def test_an_interrupted_pass_leaves_the_text_as_it_was(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, text = random_tokens(32), CachedDecoder(decoder)
    text.score(tokens[:14], *NO_NODES)
    forward = Block.forward

    def interrupted(self: Block, *args: Any) -> Tensor:
        if self.index == 2:
            raise KeyboardInterrupt
        return forward(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Block, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            text.score(random_tokens(20, 9), *NO_NODES)
    assert_close(text.score(tokens[14:], *NO_NODES)[0], chain_logits(decoder, tokens)[-1])


def test_texts_of_one_pass_have_states_of_their_own(decoder: Decoder) -> None:
    chains = random_tokens(20), random_tokens(5, 3)
    tree = Tree([3, 4, 5], [-1, 0, 0])
    texts = [(CachedDecoder(decoder), TextRows(chain, *tree.round(0, 3))) for chain in chains]
    for chain, found in zip(chains, score_together(texts), strict=True):
        assert_close(torch.stack([found[row] for row in range(4)]), expected_logits(decoder, chain, tree))


def test_a_parked_text_goes_on_from_its_end(decoder: Decoder) -> None:
    """Its states are copied bit by bit."""
    pool = TextPool(lambda: RequestCaches(CachedDecoder(decoder), None), 2**24)
    text, other = random_tokens(80), random_tokens(50, 7)

    def run(tokens: list[int]) -> tuple[int, Tensor]:
        caches = pool.borrow(tokens)
        count = caches.rewind(tokens)
        logits = caches.target.score(tokens[len(tokens) - count :], *NO_NODES)
        pool.give_back(caches)
        return count, logits[0]

    assert run(text)[0] == 80
    assert run(other)[0] == 50
    count, logits = run([*text, 5])
    assert count == 1
    assert_close(logits, chain_logits(decoder, [*text, 5])[-1])
