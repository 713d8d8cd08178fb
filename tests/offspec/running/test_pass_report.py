"""A pass as people see it: sources of its tokens, and the likeliest part of its tree."""

from __future__ import annotations

import numpy as np
import pytest

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.running.pass_report import MOST_NODES, LastPass
from offspec.running.steps import Step
from offspec.scheduler.trees.token_tree import DRAFT, LOOKUP, ROOT, SOURCES, TokenTree
from offspec.scheduler.trees.verify import Verdict
from offspec.stats import Stats


def test_a_report_has_the_accepted_path_and_the_likeliest_nodes() -> None:
    count = MOST_NODES + 20
    chain = TokenTree(  # 0 → 1, and many improbable siblings of which the last is accepted
        np.arange(count) + 100,
        np.array([ROOT, 0, *[ROOT] * (count - 2)]),
        np.array([1, 2, *[1] * (count - 2)]),
        np.log(np.array([0.5, 0.25, *[0.01] * (count - 2)])),
        np.array([DRAFT, LOOKUP, *[DRAFT] * (count - 2)]),
    )
    last = LastPass()
    last(chain, Verdict([count - 1], [100 + count - 1, 7]))
    report = last.report(Step([100 + count - 1, 7], "ab", Stats(), num_accepted=1))
    assert (report.token_sources, report.num_nodes, len(report.tokens)) == (["draft", "target"], count, MOST_NODES)
    assert [report.tokens[place] for place in report.accepted] == [100 + count - 1]
    assert list(report.parents[:3]) == [ROOT, 0, ROOT]
    assert list(report.probabilities[:3]) == pytest.approx([0.5, 0.5, 0.01])
    assert list(report.sources[:3]) == ["draft", "lookup", "draft"]


def test_reports_follow_an_engines_passes() -> None:
    last, tokens = LastPass(), list[int]()
    with Engine.load("builtin", device="cpu", context=256) as engine:
        steps = engine.generate("def area(", SamplingParams(12), SpeculationParams(budget=8), observer=last)
        for step in steps:
            report = last.report(step)
            tokens += step.token_ids
            assert len(report.token_sources) == len(step.token_ids)
            accepted = [report.tokens[place] for place in report.accepted]
            assert accepted == step.token_ids[: step.num_accepted]
            assert set(report.sources) <= set(SOURCES)
            path = [ROOT, *report.accepted]
            assert [report.parents[place] for place in report.accepted] == path[:-1]
    assert len(tokens) == 12
