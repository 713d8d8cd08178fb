"""Joint decoding against brute force: what the beam holds, how its paths are judged, which text comes of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offspec.errors import NumericalError, UsageError
from offspec.scheduler.joint import SLICE_ROWS, BeamDrafter, JointDrafter, log_likelihoods, verify_jointly
from offspec.scheduler.params import MAX_JOINT_NODES, SamplingParams, SpeculationParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import FloatArray, TokenTree
from offspec.scheduler.trees.verify import TargetPass

from ..refusals import refused
from .fakes import (
    Rule,
    RuleModel,
    build_tree,
    few,
    log_softmax,
    many,
    paths,
    plain_text,
    processed,
    random_rule,
    resembling,
    trees,
)

Path = tuple[int, ...]

VOCAB_SIZE, PROMPT = 4, [3, 0, 2]
TARGET = random_rule(VOCAB_SIZE, seed=0)
DRAFT = resembling(TARGET, seed=1)
GREEDY, PENALTY = SamplingParams(), SamplingParams(repetition_penalty=1.4)
EVERYTHING = VOCAB_SIZE**3  # a beam that holds every path of three tokens


def uneven_rule(seed: int) -> Rule:
    """Here all but certain, there undecided, so that the likeliest token often leads to where nothing is likely."""
    rule = random_rule(VOCAB_SIZE, seed)
    return lambda prefix: rule(prefix) * (0.2 if np.random.default_rng([seed, *prefix]).random() < 0.5 else 3.0)


# ------------------------------------------------------------------------------------------------ twins


def joint(rule: Rule, text: Path, block: Path, params: SamplingParams = GREEDY) -> float:
    """log p(block | text), a token at a time."""
    total = 0.0
    for place, token in enumerate(block):
        before = text + block[:place]
        total += float(log_softmax(processed(rule(before), params, before))[token])
    return total


def greedy_token(rule: Rule, text: Path, params: SamplingParams = GREEDY) -> int:
    return plain_text(rule, params, 0, text, 1)[0]


def likeliest_block(
    rule: Rule, text: Path, gamma: int, final: Collection[int] = (), params: SamplingParams = GREEDY
) -> Path:
    """Exact MJGD: of all blocks of gamma tokens, or that end before, the likeliest."""
    blocks = {
        next((block[: end + 1] for end, token in enumerate(block) if token in final), block)
        for block in itertools.product(range(VOCAB_SIZE), repeat=gamma)
    }
    return max(blocks, key=lambda block: joint(rule, text, block, params))


def joint_text(
    rule: Rule, gamma: int, num_tokens: int, final: Collection[int] = (), params: SamplingParams = GREEDY
) -> list[int]:
    """Blocks of exact MJGD with a greedy token behind each, gamma less where fewer tokens are left."""
    text, end = tuple(PROMPT), len(PROMPT) + num_tokens
    while len(text) < end:
        block = likeliest_block(rule, text, min(gamma, end - len(text) - 1), final, params)
        text += (*block, greedy_token(rule, text + block, params))
        if block and block[-1] in final:
            return list(text[len(PROMPT) : -1])
    return list(text[len(PROMPT) :])


def plain_beam(rule: Rule, text: Path, width: int, gamma: int, final: Collection[int]) -> tuple[set[Path], list[Path]]:
    """Beam search with lists: every hypothesis that was ever in the beam, and those in it at the end, best first."""
    beam, seen = [()], set[Path]()
    for _ in range(gamma):
        if all(path and path[-1] in final for path in beam):
            break
        longer = [
            hypothesis
            for path in beam
            for hypothesis in ([path] if path and path[-1] in final else [(*path, t) for t in range(VOCAB_SIZE)])
        ]
        beam = sorted(longer, key=lambda path: -joint(rule, text, path))[:width]
        seen |= set(beam)
    return seen, beam


def accepted(candidates: dict[Path, float], likelihoods: dict[Path, float], tau: float, final: Collection[int]) -> Path:
    """Of paths with their log q and log p: the accepted one, by the words of the method."""
    passed = [path for path, q in candidates.items() if min(1.0, math.exp(likelihoods[path] - q)) >= tau]
    if not passed:
        return ()
    longest = max(map(len, passed))
    equals = [path for path in passed if len(path) == longest or path[-1] in final]
    return max(equals, key=lambda path: likelihoods[path])


def generate(
    target: RuleModel,
    draft: RuleModel,
    speculation: SpeculationParams,
    num_tokens: int,
    final: Collection[int] = (),
    params: SamplingParams = GREEDY,
    prompt: Sequence[int] = PROMPT,
) -> list[int]:
    """The engine's loop without the engine, up to a final token."""
    sampler = Sampler(params, 0, target.vocab_size)
    drafter = JointDrafter(draft, sampler, speculation, final)
    text, end = list(prompt), len(prompt) + num_tokens
    sampler.extend(text)
    while len(text) < end:
        tree = drafter.propose(text, max_depth=end - len(text) - 1)
        logits = target.score(text[target.length :], tree.tokens, tree.depths, tree.parents)
        verdict = drafter.verify(tree, logits, sampler, len(text))
        target.keep(verdict.path)
        drafter.observe(TargetPass(text, tree, verdict, logits))
        if verdict.path and verdict.tokens[-2] in final:
            return (text + verdict.tokens[:-1])[len(prompt) :]
        text += verdict.tokens
        sampler.extend(verdict.tokens)
    return text[len(prompt) :]


def settings(tau: float, beam: int, gamma: int) -> SpeculationParams:
    return SpeculationParams(accept="joint", tau=tau, beam=beam, gamma=gamma)


# ------------------------------------------------------------------------------------------------ text


@pytest.mark.each_value(together=2)
@pytest.mark.parametrize("final", [(), (1,), (0, 2)])
@pytest.mark.parametrize("params", [GREEDY, PENALTY], ids=["greedy", "penalty"])
@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_where_nothing_is_left_out_or_refused_it_is_exact_joint_decoding(
    seed: int, gamma: int, params: SamplingParams, final: Collection[int]
) -> None:
    """Whatever the draft thinks: with every block in the beam and a tau that all pass, the target alone chooses."""
    target = uneven_rule(seed)
    models = RuleModel(target, VOCAB_SIZE), RuleModel(random_rule(VOCAB_SIZE, seed + 100), VOCAB_SIZE)
    text = generate(*models, settings(1e-30, EVERYTHING, gamma), 10, final, params)
    assert text == joint_text(target, gamma, 10, final, params)


def test_joint_decoding_is_not_greedy_decoding() -> None:
    """Else the test above would say nothing."""
    rules = [uneven_rule(seed) for seed in range(4)]
    differ = [joint_text(rule, 3, 10) != plain_text(rule, GREEDY, 0, PROMPT, 10) for rule in rules]
    assert sum(differ) >= 2


@few
@given(seed=st.integers(0, 99), beam=st.integers(1, 6), gamma=st.integers(1, 4), tau=st.sampled_from([0.5, 0.99]))
def test_a_target_that_drafts_for_itself_says_what_its_own_beam_search_says(
    seed: int, beam: int, gamma: int, tau: float
) -> None:
    """Every ratio is 1, so each pass takes the best hypothesis of gamma tokens, and one greedy token."""
    rule, text = uneven_rule(seed), tuple(PROMPT)
    found = generate(RuleModel(rule, VOCAB_SIZE), RuleModel(rule, VOCAB_SIZE), settings(tau, beam, gamma), 10)
    while len(text) < len(PROMPT) + 10:
        _, best = plain_beam(rule, text, beam, min(gamma, len(PROMPT) + 9 - len(text)), ())
        text += (*best[0], greedy_token(rule, text + best[0]))
    assert found == list(text[len(PROMPT) :])


def test_a_draft_that_is_refused_leaves_plain_decoding() -> None:
    """It is all but certain of what the target all but excludes."""

    def wrong(prefix: Path) -> FloatArray:
        return -20.0 * TARGET(prefix)

    models = RuleModel(lambda prefix: 20.0 * TARGET(prefix), VOCAB_SIZE), RuleModel(wrong, VOCAB_SIZE)
    assert generate(*models, settings(0.5, 1, 4), 12) == plain_text(TARGET, GREEDY, 0, PROMPT, 12)


@few
@given(max_context=st.integers(1, 12), vocab_size=st.sampled_from([1, 3, 9]))
def test_drafts_of_another_shape(max_context: int, vocab_size: int) -> None:
    """Where the draft's context ends, plain decoding goes on; no vocabulary brings a token that the target lacks."""
    draft = RuleModel(random_rule(vocab_size, 1), vocab_size, max_context)
    text = generate(RuleModel(TARGET, VOCAB_SIZE), draft, settings(0.2, 3, 4), 14)
    assert len(text) == 14
    assert all(0 <= token < VOCAB_SIZE for token in text)
    if max_context <= len(PROMPT):
        assert text == plain_text(TARGET, GREEDY, 0, PROMPT, 14)


# ------------------------------------------------------------------------------------------------ the beam


@many
@given(
    seed=st.integers(0, 99),
    beam=st.integers(1, 8),
    gamma=st.integers(1, 5),
    final=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=2),
)
def test_the_tree_is_all_that_was_in_the_beam(seed: int, beam: int, gamma: int, final: set[int]) -> None:
    rule, sampler = random_rule(VOCAB_SIZE, seed), Sampler(GREEDY, 0, VOCAB_SIZE)
    draft = RuleModel(rule, VOCAB_SIZE)
    tree = BeamDrafter(draft, sampler, settings(0.1, beam, gamma), final).propose(PROMPT, max_depth=9)
    seen, _ = plain_beam(rule, tuple(PROMPT), beam, gamma, final)
    assert sorted(paths(tree)) == sorted(seen)
    assert len(tree) <= beam * gamma
    np.testing.assert_allclose(tree.scores, [joint(rule, tuple(PROMPT), path) for path in paths(tree)], atol=1e-5)
    assert len(draft.batches) <= gamma
    assert not {token for path in paths(tree) for token in path[:-1]} & final


# ------------------------------------------------------------------------------------------------ the verdict


def scored(tree: TokenTree) -> Tensor:
    return RuleModel(TARGET, VOCAB_SIZE).score(PROMPT, tree.tokens, tree.depths, tree.parents)


def sampler_at_prompt(params: SamplingParams) -> Sampler:
    sampler = Sampler(params, 0, VOCAB_SIZE)
    sampler.extend(PROMPT)
    return sampler


@many
@given(
    guesses=trees(VOCAB_SIZE),
    tau=st.sampled_from([1e-9, 0.01, 0.1, 0.5, 0.9, 1.0]),
    final=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=2),
    params=st.sampled_from([GREEDY, PENALTY]),
    seed=st.integers(0, 50),
)
def test_the_verdict_is_that_of_the_words(
    guesses: TokenTree, tau: float, final: set[int], params: SamplingParams, seed: int
) -> None:
    kept = {path for path in paths(guesses) if not set(path[:-1]) & final}
    shape, rule = build_tree(sorted(kept)), resembling(TARGET, seed, error=2.0)
    scores = np.array([joint(rule, tuple(PROMPT), path, params) for path in paths(shape)])
    tree = TokenTree(shape.tokens, shape.parents, shape.depths, scores)
    likelihoods = {path: joint(TARGET, tuple(PROMPT), path, params) for path in paths(tree)}
    verdict = verify_jointly(tree, scored(tree), sampler_at_prompt(params), len(PROMPT), tau=tau, final=final)
    best = accepted(dict(zip(paths(tree), scores, strict=True)), likelihoods, tau, final)
    assert tuple(verdict.tokens[:-1]) == best
    assert tree.tokens[verdict.path].tolist() == list(best)
    assert verdict.tokens[-1] == greedy_token(TARGET, (*PROMPT, *best), params)


@pytest.mark.parametrize("num_nodes", [1, SLICE_ROWS - 1, 3 * SLICE_ROWS])
def test_likelihoods_of_a_long_chain(num_nodes: int) -> None:
    tokens = plain_text(DRAFT, GREEDY, 0, PROMPT, num_nodes)
    tree = TokenTree.chain(tokens)
    found = log_likelihoods(tree, scored(tree), sampler_at_prompt(GREEDY), len(PROMPT))
    expected = [joint(TARGET, tuple(PROMPT), tuple(tokens[: n + 1])) for n in range(num_nodes)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_logits_that_are_no_numbers_are_told() -> None:
    tree = build_tree([[0, 1], [2]])
    logits = scored(tree)
    logits[1] = math.nan  # behind node 0
    with refused(NumericalError, f"position {len(PROMPT) + 1}"):
        verify_jointly(tree, logits, sampler_at_prompt(GREEDY), len(PROMPT), tau=0.1)


# ------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tree": "sequoia"}, "tree sequoia"),
        ({"budget": 64}, "budget 64"),
        ({"budget": 0}, "budget 0"),
        ({"scoring": "specexec"}, "scoring specexec"),
        ({"stopping": "thompson"}, "stopping thompson"),
        ({"width": 4}, "width 4"),
        ({"beam": 0}, "beam 1 0"),
        ({"gamma": 0}, "gamma 1 0"),
        ({"beam": MAX_JOINT_NODES, "gamma": 2}, f"beam gamma {MAX_JOINT_NODES} {2 * MAX_JOINT_NODES}"),
    ],
)
def test_what_does_not_go_with_a_beam_is_refused(changes: dict[str, object], said: str) -> None:
    with refused(UsageError, *said.split()):
        SpeculationParams(accept="joint", **changes)  # type: ignore[arg-type]


def test_joint_acceptance_is_greedy() -> None:
    warm = SamplingParams(temperature=0.6)
    SpeculationParams().check_sampling(warm)
    SpeculationParams(accept="joint").check_sampling(GREEDY)
    with refused(UsageError, "joint", "temperature", 0, 0.6, "exact"):
        SpeculationParams(accept="joint").check_sampling(warm)
    with refused(UsageError, "accept", "exact", "joint", "'lossy'"):
        SpeculationParams(accept="lossy")  # type: ignore[arg-type]
