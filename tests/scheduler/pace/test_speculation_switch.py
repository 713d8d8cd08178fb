"""Speculation is switched off where plain passes are faster, trials cost little, and what pays off later is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from offspec.scheduler.drafting.drafter import DraftRequest
from offspec.scheduler.drafting.model_drafter import ModelDrafter
from offspec.scheduler.drafting.pricing import PassPricing
from offspec.scheduler.pace.calibration import Calibration
from offspec.scheduler.pace.controllers import FixedBudget
from offspec.scheduler.pace.costs import Costs
from offspec.scheduler.pace.shared_pass import SharedPass
from offspec.scheduler.pace.speculation_switch import SpeculationSwitch
from offspec.scheduler.params import SamplingParams, SpeculationParams
from offspec.scheduler.trees.sampling import Sampler
from offspec.scheduler.trees.token_tree import TokenTree
from offspec.scheduler.trees.verify import TargetPass

from ..fakes import TimedModel, VirtualClock, estimates_of, generate, plain_text, random_rule

PLAIN_S = 2.0


class Text:
    """A text whose plain passes take PLAIN_S, and what it took with the switch."""

    def __init__(self, switch: SpeculationSwitch | None = None) -> None:
        self.switch = switch or SpeculationSwitch()
        self.switch.begin_text()
        self.seconds = self.num_tokens = 0.0
        self.speculated: list[bool] = []

    def run(self, num_passes: int, seconds: float, accepted: Sequence[int], predicted_s: float = PLAIN_S) -> Text:
        """An iteration with speculation takes `seconds`; of its nodes, so many are accepted by turns."""
        expected = float(np.mean(accepted))
        for number in range(num_passes):
            speculates = self.switch.speculates(is_first=False)
            self.speculated.append(speculates)
            if speculates:
                now = accepted[number % len(accepted)]
                self.switch.observe(seconds, expected, now, lambda: predicted_s)
                self.seconds, self.num_tokens = self.seconds + seconds, self.num_tokens + 1 + now
            else:
                self.switch.observe_plain(PLAIN_S)
                self.seconds, self.num_tokens = self.seconds + PLAIN_S, self.num_tokens + 1
        return self

    @property
    def rate(self) -> float:
        """Over plain decoding's."""
        return self.num_tokens * PLAIN_S / self.seconds


@pytest.mark.parametrize("predicted_s", [0.5 * PLAIN_S, PLAIN_S, 1.5 * PLAIN_S])
@pytest.mark.parametrize(("seconds", "accepted"), [(2.2, [0]), (3.0, [0, 1, 0, 0]), (9.0, [1, 2, 0])])
def test_what_costs_more_than_it_brings_loses_little(
    seconds: float, accepted: Sequence[int], predicted_s: float
) -> None:
    assert Text().run(256, seconds, accepted, predicted_s).rate > 0.96
    text = Text().run(2000, seconds, accepted, predicted_s)
    assert text.rate > 0.98
    assert sum(text.speculated[-1000:]) < 30
    assert any(text.speculated[-1000:]), "it is still tried"


def test_short_texts_lose_as_little_as_a_long_one() -> None:
    """Each has a trial, if earlier ones have cost little enough."""
    texts, switch = list[Text](), SpeculationSwitch()
    for _ in range(40):
        texts.append(Text(switch).run(32, 4.0, [0]))
    assert sum(text.num_tokens for text in texts) * PLAIN_S / sum(text.seconds for text in texts) > 0.985


def test_what_pays_off_later_is_found_and_kept() -> None:
    text = Text().run(1000, 3.0, [0])
    assert not all(text.speculated[-1000:])
    text.run(300, 3.0, [0, 4])
    assert all(text.speculated[-10:])


def test_what_stops_paying_is_switched_off_again() -> None:
    text = Text().run(500, 3.0, [0, 4])
    assert sum(text.speculated) > 485, "plain passes are measured, but seldom"
    assert not all(text.run(100, 3.0, [0]).speculated[-80:])


@pytest.mark.parametrize("predicted_s", [0.8 * PLAIN_S, 2 * PLAIN_S])
def test_where_plain_passes_cannot_win_none_is_spent_on_measuring(predicted_s: float) -> None:
    """On a large target each of them would cost a tree."""
    assert all(Text().run(1000, 2.4, [2, 6], predicted_s).speculated)


def test_a_wrong_prediction_alone_switches_nothing_off() -> None:
    text = Text().run(200, 3.0, [2], predicted_s=PLAIN_S / 10)
    assert sum(text.speculated) > 190


def test_a_first_pass_is_never_a_trial() -> None:
    """It is not observed, and would cost a tree beside the prompt each time."""
    text = Text().run(5, 9.0, [0])
    while not text.switch.is_catching_up:
        text.run(1, 9.0, [0])
    assert text.switch.speculates(is_first=False)
    assert not text.switch.speculates(is_first=True)
    assert SpeculationSwitch().speculates(is_first=True)


def test_passes_of_several_texts_neither_obey_the_switch_nor_teach_it() -> None:
    """Their seconds are not one text's."""
    text = Text().run(20, 9.0, [0])
    calibration, costs = Calibration().of(greedy=True), Costs(lambda _: 1.0)
    shared, clock = SharedPass(costs, 16), VirtualClock()
    pricing = PassPricing(FixedBudget(4), costs, calibration, clock, switch=text.switch, shared=shared)
    pricing.begin_plain()
    pricing.end_plain()
    for chains, speculates in (([1], False), ([1, 1], True)):
        shared.begin(chains)
        assert pricing.speculates == speculates
    before = text.switch.plain_tokens_per_s
    pricing.begin(1)
    clock.now += 50.0
    pricing.send()
    pricing.judged(0)
    pricing.end(1)
    assert text.switch.is_resting
    assert text.switch.plain_tokens_per_s == before


# ------------------------------------------------------------------------------------------------ in a drafter

VOCAB_SIZE, PROMPT = 40, [1, 2]
TARGET, GREEDY = random_rule(VOCAB_SIZE, seed=0), SamplingParams()


class Oracle:
    """Guesses the next token of a text, right or wrong. What its guesses cost shows only when they were judged."""

    def __init__(self, text: Sequence[int], clock: VirtualClock, hidden_s: float, right: range) -> None:
        """right: lengths of the text at which it is right."""
        self.text, self.clock, self.hidden_s, self.right = [*PROMPT, *text], clock, hidden_s, right
        self.asked = list[int]()

    def guess(self, text: Sequence[int], sampler: Sampler, max_nodes: int, max_depth: int) -> TokenTree:
        self.asked.append(len(text))
        is_right = len(text) in self.right
        tokens = self.text[len(text) : len(text) + 3] if is_right else [(self.text[len(text)] + 1) % VOCAB_SIZE]
        tree = TokenTree.chain(tokens[:max_depth])
        return replace(tree, scores=np.full(len(tree), -0.2 if is_right else -1.2))

    def observe(self, done: TargetPass) -> None:
        self.clock.now += self.hidden_s if len(done.tree) else 0.0


class Speech:
    """A text of `num_tokens` with an oracle, on the virtual clock."""

    def __init__(self, budget: int | None, num_tokens: int, right: range) -> None:
        clock, plain = VirtualClock(), plain_text(TARGET, GREEDY, 1, PROMPT, num_tokens)
        self.oracle = Oracle(plain, clock, 0.8, right)
        target, sampler = TimedModel(TARGET, VOCAB_SIZE, clock, lambda rows: 1.0), Sampler(GREEDY, 1, VOCAB_SIZE)
        request, estimates = DraftRequest(sampler), estimates_of(costs=Costs(lambda _: 1.0))
        speculation = SpeculationParams(budget)
        drafter = ModelDrafter(None, request, speculation, estimates, guessers=[self.oracle], clock=clock)
        assert generate(target, drafter, sampler, PROMPT, num_tokens) == plain
        self.passes, self.asked = target.lengths, self.oracle.asked


def test_costs_that_nobody_can_price_switch_a_drafter_off_until_guesses_are_worth_them() -> None:
    text = Speech(None, 600, right=range(400, 600))
    assert sum(length < 100 for length in text.asked) < 20, "a few to find out"
    assert sum(100 <= length < 400 for length in text.asked) <= 0.03 * 300, "then trials"
    assert sum(length >= 550 for length in text.passes) < 20, "four tokens come from a pass again"


def test_with_a_given_budget_trees_do_not_depend_on_times() -> None:
    text = Speech(3, 60, right=range(0))
    assert len(text.asked) == len(text.passes) - 1 == 59, "the last pass has no room for guesses"
