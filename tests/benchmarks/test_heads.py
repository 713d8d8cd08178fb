"""The table of heads: its texts are plain decoding's, and it says what it counts."""

from __future__ import annotations

import re

import pytest

from benchmarks.drafts.heads import main


@pytest.mark.slow
def test_a_line_for_each_setting(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--max-prompts", "1", "--max-new-tokens", "10", "--budgets", "4,auto", "--temperatures", "0"]
    main(["--draft", "builtin", "--draft", "lookup", *small])
    out = capsys.readouterr().out
    assert re.search(r"builtin: \d+\.\d MB", out)
    lines = re.findall(r"(\S+) +T 0 +(4|auto) nodes +(\d+\.\d\d) +levels +(\d+\.\d)", out)
    assert [line[:2] for line in lines] == [(d, b) for d in ("builtin", "lookup") for b in ("4", "auto")]
    assert float(lines[0][2]) > 1.5
    assert 1 <= float(lines[0][3]) <= 4


@pytest.mark.nightly
@pytest.mark.slow
def test_chains_and_trees_by_depth(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--max-prompts", "1", "--max-new-tokens", "24", "--temperatures", "0", "--no-recall"]
    main(["--draft", "builtin", "--depths", "1,3", *small])
    found = dict(re.findall(r"T 0 +(.+ of \d|tree, \d deep) +(\d+\.\d\d)", capsys.readouterr().out))
    assert list(found) == ["chain of 1", "chain of 3", "tree, 1 deep", "tree, 3 deep"]
    chains, trees = (
        [float(found[f"{name}{depth}{end}"]) for depth in (1, 3)]
        for name, end in (("chain of ", ""), ("tree, ", " deep"))
    )
    assert 1 < chains[0] <= 2
    assert chains[0] < chains[1] <= 4
    assert trees[0] >= chains[0]
    assert trees[1] >= chains[1]
