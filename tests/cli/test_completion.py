"""What the shell is told to complete."""

from __future__ import annotations

import pytest

from .conftest import Offspec


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        ("plan ./nf", ["dir,./nf"]),
        ("plan buil", ["dir,buil", "plain,builtin"]),
        ("run x --draft lo", ["dir,lo", "plain,lookup"]),
        ("bench x --tree op", ["plain,opt-tree"]),
        ("run x --help", ["plain,--help", "plain,--help-all"]),
    ],
)
def test_models_flags_and_choices_are_completed(
    words: str, completions: list[str], offspec: Offspec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_OFFSPEC_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"offspec {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    assert offspec().out.splitlines() == completions
