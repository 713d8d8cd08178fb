"""A draft may know other tokens than the target: its guesses are the target's tokens, and so is the text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offspec.research.opt_tree import OptTreeDrafter
from offspec.research.sequoia import MeasuredAcceptance, SequoiaDrafter
from offspec.scheduler.drafting.drafter import Drafter, DraftRequest
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.joint import BeamDrafter
from offspec.scheduler.params import SamplingParams, SpeculationParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import FloatArray, TokenTree
from offspec.scheduler.trees.vocabulary import Vocabulary

from ...refusals import refused
from ..fakes import (
    RuleModel,
    Transfers,
    estimates_of,
    few,
    generate,
    paths,
    plain_text,
    random_rule,
    resembling,
    sampling_params,
)

VOCAB_SIZE, PROMPT, SEED = 9, [3, 8, 2, 5], 4
TARGET = random_rule(VOCAB_SIZE, seed=0)
CLOSE = resembling(TARGET, seed=1, error=0.4)
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=1.0)
TABLES = (
    st.permutations(range(VOCAB_SIZE + 3))
    .flatmap(lambda order: st.integers(1, len(order)).map(lambda count: order[:count]))
    .filter(lambda table: min(table) < VOCAB_SIZE)
)


class MappedModel(RuleModel):
    """A draft with a column of its own for each of the target's tokens `columns`, in their order.

    It says of them what CLOSE says, of the text as it reads it. num_inputs: as `Vocabulary.mapped`'s.
    """

    def __init__(self, columns: Sequence[int], num_inputs: int | None) -> None:
        self.columns = list(columns)

        def rule(prefix: tuple[int, ...]) -> FloatArray:
            read = prefix if num_inputs is not None else tuple(self.columns[column] for column in prefix)
            logits = CLOSE(tuple(min(token, VOCAB_SIZE - 1) for token in read))
            return np.array([logits[token] if token < VOCAB_SIZE else -3.0 for token in self.columns])

        super().__init__(rule, num_inputs or len(self.columns))
        self.vocabulary = Vocabulary.mapped(columns, num_inputs)


def drafters(model: RuleModel, sampler: Sampler) -> dict[str, Callable[[], Drafter]]:
    """Every way of drafting on a model."""
    budget = SpeculationParams(12, children=6)
    return {
        "best-first": lambda: ModelDrafter(model, DraftRequest(sampler), budget, estimates_of()),
        "sequoia": lambda: SequoiaDrafter(model, sampler, budget, MeasuredAcceptance()),
        "sequoia-coupled": lambda: SequoiaDrafter(model, sampler, budget, MeasuredAcceptance(), coupled=True),
        "opt-tree": lambda: OptTreeDrafter(model, sampler, budget),
    }


KINDS = ["best-first", "sequoia", "sequoia-coupled", "opt-tree"]


@pytest.mark.slow
@few
@given(
    columns=TABLES,
    has_targets_inputs=st.booleans(),
    params=sampling_params(),
    kind=st.sampled_from(KINDS),
    rounds_ahead=st.sampled_from([0, 2]),
)
def test_text_is_plain_decodings_whatever_the_draft_knows(
    columns: list[int], has_targets_inputs: bool, params: SamplingParams, kind: str, rounds_ahead: int
) -> None:
    model = MappedModel(columns, VOCAB_SIZE if has_targets_inputs else None)
    sampler = Sampler(params, SEED, VOCAB_SIZE)
    drafter, target = drafters(model, sampler)[kind](), RuleModel(TARGET, VOCAB_SIZE)
    assert generate(target, drafter, sampler, PROMPT, 20, rounds_ahead) == plain_text(TARGET, params, SEED, PROMPT, 20)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_only_tokens_that_the_draft_knows_are_guessed_and_they_come_true(params: SamplingParams, kind: str) -> None:
    known = [7, 2, 11, 0, 5, 3]
    sampler, target = Sampler(params, SEED, VOCAB_SIZE), RuleModel(TARGET, VOCAB_SIZE)
    drafter = drafters(MappedModel(known, VOCAB_SIZE), sampler)[kind]()
    sampler.extend(PROMPT)
    tokens = drafter.propose(PROMPT, 4).tokens
    assert set(tokens.tolist()) <= set(known) - {11}
    assert len(tokens) > 4
    sampler = Sampler(params, SEED, VOCAB_SIZE)
    generate(target, drafters(MappedModel(known, VOCAB_SIZE), sampler)[kind](), sampler, PROMPT, 36)
    assert len(target.batches) < 30


@pytest.mark.each_value
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "params", [GREEDY, SAMPLED, SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.3)]
)
@pytest.mark.parametrize("size", [VOCAB_SIZE, VOCAB_SIZE - 3, VOCAB_SIZE + 3])
def test_an_identity_table_guesses_what_a_plain_vocabulary_does(size: int, params: SamplingParams, kind: str) -> None:
    """To the digit, scores too, from pass to pass."""

    def model() -> RuleModel:
        return RuleModel(lambda prefix: np.resize(CLOSE(prefix), size), size)

    plain = proposed(model(), params, kind)
    for vocabulary in (Vocabulary.mapped(range(size)), Vocabulary.from_offsets([0] * size)):
        mapped = model()
        mapped.vocabulary = vocabulary
        assert proposed(mapped, params, kind) == plain


def proposed(model: RuleModel, params: SamplingParams, kind: str) -> list[tuple[list[tuple[int, ...]], list[float]]]:
    """The paths and scores of all the trees of a text."""
    sampler, found = Sampler(params, SEED, VOCAB_SIZE), list[tuple[list[tuple[int, ...]], list[float]]]()
    drafter = drafters(model, sampler)[kind]()
    propose = drafter.propose

    def noted(text: Sequence[int], max_depth: int) -> TokenTree:
        tree = propose(text, max_depth)
        found.append((paths(tree), tree.scores.tolist()))
        return tree

    drafter.propose = noted  # type: ignore[method-assign]
    generate(RuleModel(TARGET, VOCAB_SIZE), drafter, sampler, PROMPT, 15)
    return found


def test_a_beam_of_a_mapped_draft_is_one_of_the_targets_tokens() -> None:
    sampler, known = Sampler(GREEDY, SEED, VOCAB_SIZE), [4, 1, 7]
    sampler.extend(PROMPT)
    speculation = SpeculationParams(accept="joint", beam=2, gamma=3)
    tree = BeamDrafter(MappedModel(known, None), sampler, speculation).propose(PROMPT, 5)
    assert set(tree.tokens.tolist()) <= set(known)
    assert tree.depths.max() == 3


# ------------------------------------------------------------------------------------------------ the table itself


@few
@given(columns=TABLES)
def test_a_cut_embedding_reads_its_own_tokens_and_a_stand_in(columns: list[int]) -> None:
    vocabulary = Vocabulary.mapped(columns)
    last = len(columns) - 1
    expected = [columns.index(token) if token in columns else last for token in range(40)]
    assert vocabulary.inputs(np.arange(40)).tolist() == vocabulary.text(range(40)) == expected


def test_an_embedding_of_the_targets_ids_reads_them_as_they_are() -> None:
    for vocabulary in (Vocabulary(5), Vocabulary.mapped([7, 1], num_inputs=5)):
        assert vocabulary.inputs(np.array([0, 4, 5, 9])).tolist() == [0, 4, 4, 4]


@few
@given(columns=TABLES, target_size=st.integers(1, 14))
def test_logits_are_the_targets_and_tokens_that_are_not_known_are_excluded(
    columns: list[int], target_size: int
) -> None:
    vocabulary, logits = Vocabulary.mapped(columns), torch.randn(2, len(columns))
    found = vocabulary.over_target(logits, target_size)
    known = [token for token in columns if token < target_size]
    assert vocabulary.num_known(target_size) == len(known)
    assert found.shape == (2, max(known, default=-1) + 1)
    for token in range(found.shape[1]):
        expected = logits[:, columns.index(token)] if token in columns else torch.full((2,), -math.inf)
        torch.testing.assert_close(found[:, token], expected, rtol=0, atol=0)


@pytest.mark.parametrize("columns", [None, [7, 0, 5, 2]])
def test_columns_of_tokens(columns: list[int] | None) -> None:
    vocabulary, known = (Vocabulary(6), list(range(6))) if columns is None else (Vocabulary.mapped(columns), columns)
    tokens = torch.tensor([[0, 5, 7], [9, 2, 6]])
    expected = [[known.index(token) if token in known else -1 for token in row] for row in tokens.tolist()]
    assert vocabulary.columns_of(tokens).tolist() == expected


@pytest.mark.parametrize("target_size", [3, 6, 9])
def test_the_targets_logits_are_added_where_both_know_a_token(target_size: int) -> None:
    target = torch.randn(2, target_size)
    for vocabulary, columns in ((Vocabulary(6), list(range(6))), (Vocabulary.mapped([7, 0, 5, 2]), [7, 0, 5, 2])):
        logits = torch.randn(2, len(columns))
        found = logits.clone()
        vocabulary.add_target(found, target)
        for column, token in enumerate(columns):
            added = target[:, token] if token < target_size else 0.0
            torch.testing.assert_close(found[:, column], logits[:, column] + added)


def test_tables_reach_the_device_once_by_the_transfer_that_was_given() -> None:
    transfers = Transfers()
    vocabulary = Vocabulary.mapped([7, 1, 4], to_device=transfers)
    for _ in range(2):
        vocabulary.over_target(torch.zeros(1, 3), 6)
    assert transfers.sent == [[1, 2], [1, 4]]
    assert vocabulary.columns_of(torch.tensor([4, 7])).tolist() == [2, 0]
    assert transfers.sent[2:] == [[7, 1, 4]]


@pytest.mark.parametrize("columns", [[], [1, 1], [0, -1], [[0, 1]]])
def test_a_table_that_is_none_is_refused(columns: list[int]) -> None:
    with refused(ValueError, "token ids"):
        Vocabulary.mapped(columns)
