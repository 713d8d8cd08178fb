"""Constrained text is that of plain decoding with a mask; no forbidden node is sent, and what is forced always is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offspec.errors import ConstraintError, UsageError
from offspec.scheduler.drafting.candidate_tree import CandidateTree
from offspec.scheduler.drafting.drafter import Drafter, DraftRequest, NoDrafter
from offspec.scheduler.drafting.forced import ForcedDrafter, allowed_part, prepare_masks
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.guessing.lookup import PromptLookup
from offspec.scheduler.joint import BeamDrafter
from offspec.scheduler.params import Constraint, SamplingParams, SpeculationParams
from offspec.scheduler.trees.constraint import MaskBits, allows
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import ROOT, TokenTree
from offspec.scheduler.trees.vocabulary import Vocabulary

from ...refusals import refused
from ..fakes import (
    RuleModel,
    assert_well_formed,
    build_tree,
    count_down,
    estimates_of,
    few,
    generate,
    guesses_of,
    noise,
    paths,
    processed,
    random_rule,
    resembling,
    sampling_params,
)

VOCAB_SIZE, PROMPT, SEED, NUM_TOKENS = 11, [3, 0, 2], 5, 24
TARGET = random_rule(VOCAB_SIZE, seed=1)
DRAFT = resembling(TARGET, seed=2)


class HashedConstraint:
    """Allows some tokens by a hash of all tokens of the answer; often only one. Records what was asked and accepted."""

    def __init__(self, seed: int, dead_at: int = 1 << 30) -> None:
        self._seed, self._dead_at = seed, dead_at
        self.text: list[int] = []
        self.asked: set[tuple[int, ...]] = set()

    def allowed(self, answer: Sequence[int]) -> list[int]:
        if len(answer) >= self._dead_at:
            return []
        generator = np.random.default_rng([self._seed, len(answer), *answer])
        count = int(generator.choice([1, 1, 1, 2, 5, VOCAB_SIZE]))
        return sorted(generator.permutation(VOCAB_SIZE)[:count].tolist())

    def mask(self, path: Sequence[int]) -> MaskBits:
        answer = (*self.text, *path)
        self.asked.add(answer)
        bits = np.zeros(VOCAB_SIZE, dtype=np.bool_)
        bits[self.allowed(answer)] = True
        return np.packbits(bits, bitorder="little")

    def is_idle(self, tokens: Any) -> bool:
        return False

    def barred(self, path: Sequence[int]) -> Sequence[int]:
        return ()

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        found = list[int]()
        while len(found) < most and len(only := self.allowed([*self.text, *path, *found])) == 1:
            found += only
        return found

    def accept(self, tokens: Sequence[int]) -> None:
        self.text += tokens

    def dead_end(self, path: Sequence[int]) -> ConstraintError:
        return ConstraintError(f"nothing may follow token {len(self.text) + len(path)}; change it")


class Prompted(Sampler):
    """A sampler whose constraint begins after the prompt, as a request's does."""

    def __init__(self, params: SamplingParams, constraint: HashedConstraint) -> None:
        super().__init__(params, SEED, VOCAB_SIZE)
        self.extend(PROMPT)
        self.constrain(constraint)

    def extend(self, tokens: Sequence[int]) -> None:
        if self.constraint is None or tokens != PROMPT:
            super().extend(tokens)


def masked_text(params: SamplingParams, constraint: HashedConstraint) -> list[int]:
    """Plain decoding in numpy: forbidden tokens get no probability, then everything else happens."""
    text = list(PROMPT)
    for _ in range(NUM_TOKENS):
        allowed = constraint.allowed(text[len(PROMPT) :])
        logits = np.full(VOCAB_SIZE, -math.inf)
        logits[allowed] = TARGET(tuple(text))[allowed]
        values = processed(logits, params, text)
        if params.temperature > 0:
            values = values + noise(SEED, len(text), VOCAB_SIZE)
        text.append(int(values.argmax()))
    return text[len(PROMPT) :]


class Watched:
    """A drafter, whose trees must hold no forbidden node."""

    def __init__(self, drafter: Drafter, constraint: HashedConstraint) -> None:
        self._drafter, self._constraint = drafter, constraint
        self.trees: list[TokenTree] = []

    def propose(self, text: Sequence[int], max_depth: int) -> TokenTree:
        tree = self._drafter.propose(text, max_depth)
        self.trees.append(tree)
        for path in paths(tree):
            assert path[-1] in self._constraint.allowed([*self._constraint.text, *path[:-1]]), path
        return tree

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)


def drafters(sampler: Sampler, budget: int, width: int) -> dict[str, Drafter]:
    def model_drafter(model: RuleModel | None, **params: Any) -> ModelDrafter:
        speculation = SpeculationParams(budget, width=width, **params)
        guessers = [PromptLookup()]
        return ModelDrafter(model, DraftRequest(sampler), speculation, estimates_of(), guessers=guessers)

    assert sampler.constraint is not None
    return {
        "plain": NoDrafter(),
        "forced": ForcedDrafter(sampler.constraint, budget),
        "lookup": model_drafter(None),
        "model": model_drafter(RuleModel(DRAFT, VOCAB_SIZE)),
        "no reuse": model_drafter(RuleModel(DRAFT, VOCAB_SIZE), reuse=False),
        "specexec": model_drafter(RuleModel(DRAFT, VOCAB_SIZE), scoring="specexec"),
        "small vocabulary": model_drafter(RuleModel(random_rule(6, 3), 6)),
        "table": model_drafter(knowing(range(0, VOCAB_SIZE, 3))),
    }


def knowing(tokens: Sequence[int]) -> RuleModel:
    """A draft that knows some of the target's tokens, as EAGLE-3's heads do."""
    model = RuleModel(random_rule(len(tokens), 3), len(tokens))
    model.vocabulary = Vocabulary.mapped(np.array(tokens))
    return model


@pytest.mark.slow
@few
@given(
    params=sampling_params(),
    seed=st.integers(0, 1000),
    budget=st.sampled_from([3, 12, 40]),
    width=st.sampled_from([1, 4]),
    name=st.sampled_from(["plain", "forced", "lookup", "model", "no reuse", "specexec", "small vocabulary", "table"]),
    rounds_ahead=st.sampled_from([0, 2]),
)
def test_text_is_that_of_masked_plain_decoding(
    params: SamplingParams, seed: int, budget: int, width: int, name: str, rounds_ahead: int
) -> None:
    constraint = HashedConstraint(seed)
    sampler = Prompted(params, constraint)
    drafter = drafters(sampler, budget, width)[name]
    checked: Any = Watched(drafter, constraint)
    found = generate(RuleModel(TARGET, VOCAB_SIZE), checked, sampler, PROMPT, NUM_TOKENS, rounds_ahead)
    assert found[:NUM_TOKENS] == masked_text(params, HashedConstraint(seed))
    assert constraint.text == found
    for tree in checked.trees:
        assert_well_formed(tree)


@pytest.mark.parametrize("name", ["forced", "lookup", "model"])
def test_forced_tokens_lead_every_tree(name: str) -> None:
    constraint = HashedConstraint(seed=4)
    sampler = Prompted(SamplingParams(temperature=1.0), constraint)
    checked: Any = Watched(drafters(sampler, budget=12, width=4)[name], constraint)
    propose, num_forced = checked.propose, 0

    def watched(text: Sequence[int], max_depth: int) -> TokenTree:
        nonlocal num_forced
        wanted = constraint.forced([], min(max_depth, 12))
        tree = propose(text, max_depth)
        assert not wanted or tuple(wanted) in paths(tree)
        num_forced += len(wanted)
        return tree

    checked.propose = watched
    generate(RuleModel(TARGET, VOCAB_SIZE), checked, sampler, PROMPT, NUM_TOKENS)
    assert num_forced > 0


def test_forced_tokens_need_no_round_of_the_draft() -> None:
    """Below a likely node the draft would need a round for each; here one round expands them all."""
    rounds = dict[bool, int]()
    for forces in (False, True):
        constraint, model = HashedConstraint(seed=4), RuleModel(DRAFT, VOCAB_SIZE)
        if not forces:
            constraint.forced = lambda path, most: []  # type: ignore[method-assign]
        sampler = Prompted(SamplingParams(), constraint)
        drafter = ModelDrafter(model, DraftRequest(sampler), SpeculationParams(16, width=8), estimates_of())
        generate(RuleModel(TARGET, VOCAB_SIZE), drafter, sampler, PROMPT, NUM_TOKENS)
        rounds[forces] = len(model.batches)
    assert rounds[True] < rounds[False]


def test_what_is_forced_after_the_text_is_scored_with_it() -> None:
    constraint, model = HashedConstraint(seed=4), RuleModel(DRAFT, VOCAB_SIZE)
    constraint.allowed = lambda answer: [len(answer)] if len(answer) < 6 else [1, 2, 3]  # type: ignore[method-assign]
    sampler = Prompted(SamplingParams(), constraint)
    drafter = ModelDrafter(model, DraftRequest(sampler), SpeculationParams(16, width=8), estimates_of())
    tree = drafter.propose(PROMPT, 20)
    assert (0, 1, 2, 3, 4, 5) in paths(tree)
    assert model.batches[0] == 6, "nodes beside the text"


def test_a_draft_that_knows_no_allowed_token_proposes_none() -> None:
    """Its logits of them are -inf, though its vocabulary spans them."""
    constraint = HashedConstraint(seed=0)
    constraint.allowed = lambda answer: [4, 5]  # type: ignore[method-assign]
    sampler = Prompted(SamplingParams(temperature=0.7, top_p=0.9), constraint)
    drafter = ModelDrafter(knowing([0, 3, 10]), DraftRequest(sampler), SpeculationParams(8), estimates_of())
    assert len(drafter.propose(PROMPT, 20)) == 0


def test_a_dead_end_is_an_error_at_the_target_only() -> None:
    """The draft looks past it, the target's text does not reach it."""
    constraint = HashedConstraint(seed=0, dead_at=6)
    sampler = Prompted(SamplingParams(), constraint)
    drafter = drafters(sampler, budget=40, width=4)["model"]
    with refused(ConstraintError, "nothing may follow token 6"):
        generate(RuleModel(TARGET, VOCAB_SIZE), drafter, sampler, PROMPT, NUM_TOKENS)
    assert max(map(len, constraint.asked)) == 6


def test_joint_decoding_obeys_as_well() -> None:
    constraint = HashedConstraint(seed=7)
    sampler = Prompted(SamplingParams(), constraint)
    drafter = Watched(BeamDrafter(RuleModel(DRAFT, VOCAB_SIZE), sampler, SpeculationParams(accept="joint")), constraint)
    for _ in range(2):
        assert len(drafter.propose(PROMPT, 5))
        sampler.extend(constraint.allowed(constraint.text)[:1])
        drafter = Watched(
            BeamDrafter(RuleModel(DRAFT, VOCAB_SIZE), sampler, SpeculationParams(accept="joint")), constraint
        )


# ------------------------------------------------------------------------------------------------ parts


def test_masks_are_prepared_in_the_trees_order_until_the_pass_is_over() -> None:
    constraint = HashedConstraint(seed=1)
    tree = build_tree([(1, 2, 3), (1, 4), (5,)])
    prepare_masks(constraint, tree, count_down(3))
    assert constraint.asked == {(), *paths(tree)[:3]}


@given(seed=st.integers(0, 100))
@few
def test_allowed_part_keeps_whole_paths(seed: int) -> None:
    constraint = HashedConstraint(seed)
    every = build_tree([(a, b, c) for a in range(4) for b in range(4) for c in range(4)])
    wanted = [path for path in paths(every) if all(path[i] in constraint.allowed(path[:i]) for i in range(len(path)))]
    assert sorted(paths(allowed_part(every, constraint))) == sorted(wanted)
    assert allowed_part(TokenTree.empty(), constraint) is not None


def test_forced_nodes_have_their_parents_score_also_when_others_proposed_them() -> None:
    tree = CandidateTree()
    tree.add(np.array([ROOT]), guesses_of(np.array([0.0, 1.0, -1.0, 0.5]), 4), 3)
    best = int(tree.best(1, 9)[0])
    tree.add_guesses(build_tree([(int(tree.nodes["token"][best]), 2)]), 3)
    chain = tree.add_forced(best, [2, 0, 1], 3)
    assert tree.path_tokens(np.array(chain[-1:])) == [[1, 2, 0, 1]]
    assert set(tree.nodes["score"][chain].tolist()) == {tree.nodes["score"][best]}
    assert not tree.is_certain(np.array(chain)).any(), "the node above is a guess"
    tree.rescore(0)
    assert set(tree.nodes["score"][chain].tolist()) == {tree.nodes["score"][best]}
    certain = CandidateTree()
    assert certain.is_certain(np.array(certain.add_forced(ROOT, [1, 3], 3))).all()


def test_bits() -> None:
    bits = np.packbits(np.arange(VOCAB_SIZE) % 3 == 0, bitorder="little")
    assert [token for token in range(VOCAB_SIZE) if allows(bits, token)] == [0, 3, 6, 9]


def test_refusals() -> None:
    assert Constraint.json_schema({"type": "null"}).text == '{"type": "null"}'
    with refused(UsageError, "JSON"):
        Constraint.json_schema({"a": {1, 2}})  # type: ignore[dict-item]
