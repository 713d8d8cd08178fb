"""`offspec distill`, and what it makes for `--draft self`."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from ..pair import Pair, build_pair
from ..refusals import tells
from .conftest import Offspec

SMALL = ("--steps", 2, "--num-texts", 16, "--text-tokens", 8, "--device", "cpu")


@pytest.fixture(autouse=True)
def exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's data folder for exit layers."""
    folder = tmp_path / "exits"
    monkeypatch.setattr("offspec.checkpoints.exit_layers.exits_folder", lambda: folder)
    return folder


@pytest.mark.slow
def test_what_it_makes_is_found_and_exact(pair: Pair, offspec: Offspec, exits: Path) -> None:
    made = offspec("distill", pair.target, "--exit-layer", 1, *SMALL, "--json")
    assert (made.code, made.err) == (0, "")
    said = json.loads(made.out)
    assert Path(said["path"]).parent == exits
    assert said["num_tokens"] == 16 * 8
    asked = ("run", pair.target, "def area(", "--device", "cpu", "--max-new-tokens", 8)
    told = offspec(*asked, "--draft", "self", "-v")
    assert tells(told.err, "1 of 2 layers")
    assert told.out == offspec(*asked, "--draft", "none").out


def test_it_is_said_in_a_sentence(
    pair: Pair, offspec: Offspec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft of the user's settings is not trained."""
    monkeypatch.setenv("OFFSPEC_DRAFT", str(pair.draft))
    made = offspec("distill", pair.target, "--exit-layer", 1, *SMALL, "--out", tmp_path / "exit.safetensors", "-q")
    assert made.code == 0
    assert tells(made.out, tmp_path / "exit.safetensors", "likeliest token")


def test_several_exits_have_a_file_each(pair: Pair, offspec: Offspec, exits: Path, tmp_path: Path) -> None:
    deep = build_pair(tmp_path, 4).target
    made = offspec("distill", deep, "--exit-layer", "2, 1,2", *SMALL, "--json")
    assert (made.code, made.err) == (0, "")
    said = json.loads(made.out)["exits"]
    assert [each["exit_layer"] for each in said] == [1, 2]
    assert {Path(each["path"]) for each in said} == set(exits.iterdir())
    told = offspec("run", deep, "def area(", "--draft", "self:1", "--device", "cpu", "--max-new-tokens", 4, "-v")
    assert tells(told.err, "1 of 4 layers")
    offspec("distill", deep, "--exit-layer", "1,2", "--out", tmp_path / "one.safetensors").refusal(2, "--out")
    offspec("distill", deep, "--exit-layer", "1;2").refusal(2, "--exit-layer", "1;2")


def test_mistakes_are_one_line(pair: Pair, offspec: Offspec) -> None:
    beyond = offspec("distill", pair.target, "--exit-layer", 2, *SMALL)
    beyond.refusal(2, "--exit-layer 2", "2 layers", "1 to 1")
    missing = offspec("run", pair.target, "x", "--draft", "self", "--device", "cpu")
    missing.refusal(2, "--draft self", "exit layer", "offspec distill")
    other = offspec("plan", pair.target, "--draft", "self", "--device", "cpu")
    other.refusal(2, "--draft self", "exit layer", "offspec distill")
    stray = offspec("run", pair.target, "x", "--draft", "self:none.safetensors", "--device", "cpu")
    stray.refusal(1, "none.safetensors")


def test_ctrl_c_says_how_to_go_on(pair: Pair, offspec: Offspec, exits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offspec.research.distillation import ExitModule

    asked = ("distill", pair.target, "--exit-layer", 1, *SMALL)
    with monkeypatch.context() as patch:
        patch.setattr(ExitModule, "forward", Mock(side_effect=KeyboardInterrupt))
        left = offspec(*asked)
    assert left.code == 130
    assert tells(left.err, "--resume")
    offspec(*asked).refusal(2, "interrupted", "--resume")
    assert offspec(*asked, "--resume").code == 0
    assert [file.suffix for file in exits.iterdir()] == [".safetensors"]


@pytest.mark.slow
def test_a_draft_is_trained_and_used(pair: Pair, offspec: Offspec, tmp_path: Path) -> None:
    out = tmp_path / "mine"
    made = offspec("distill", pair.target, "--draft", pair.draft, *SMALL, "--out", out, "--json")
    assert (made.code, made.err) == (0, "")
    said = json.loads(made.out)
    assert Path(said["path"]) == out
    assert min(said["tokens_per_pass"], said["tokens_per_pass_before"]) >= 1
    asked = ("run", pair.target, "def area(", "--device", "cpu", "--max-new-tokens", 8)
    assert offspec(*asked, "--draft", out).out == offspec(*asked, "--draft", "none").out
    again = offspec("distill", pair.target, "--draft", pair.draft, *SMALL, "--out", out)
    again.refusal(2, out, "exists", "--out")


@pytest.mark.slow
def test_additions_are_a_learn_file(pair: Pair, offspec: Offspec, tmp_path: Path) -> None:
    out = tmp_path / "more.safetensors"
    made = offspec("distill", pair.target, "--draft", pair.draft, "--lora", 2, *SMALL, "--out", out)
    assert made.code == 0, made
    assert tells(made.out, out, "tokens per pass", "before")
    asked = ("chat", pair.target, "--device", "cpu", "--seed", 1, "--max-new-tokens", 8)
    used = offspec(*asked, "--draft", pair.draft, "--learn-file", out, stdin=b"hi\n")
    assert (used.code, used.out) == (0, offspec(*asked, "--draft", "none", stdin=b"hi\n").out)


def test_flags_of_one_training_are_refused_by_another(pair: Pair, offspec: Offspec) -> None:
    asked = ("distill", pair.target)
    offspec(*asked, "--draft", pair.draft).refusal(2, "--out")
    offspec(*asked, "--draft", pair.draft, "--exit-layer", 1).refusal(2, "--exit-layer", "--draft")
    offspec(*asked, "--exit-layer", 1, "--lora", 2).refusal(2, "--lora", "--draft")


@pytest.mark.slow
def test_a_head_is_trained_and_drafts(pair: Pair, offspec: Offspec, exits: Path, tmp_path: Path) -> None:
    made = offspec("distill", pair.target, "--head", "medusa", *SMALL, "--json")
    assert (made.code, made.err) == (0, "")
    said = json.loads(made.out)
    assert Path(said["path"]).parent == exits
    assert said["kind"] == "medusa"
    assert len(said["agreement"]) == 5
    assert said["tokens_per_pass"] >= 1
    asked = ("run", pair.target, "x", "--device", "cpu", "--max-new-tokens", 4)
    assert offspec(*asked, "--draft", "head:medusa").code == 0
    (prompts := tmp_path / "prompts.jsonl").write_text('{"prompt": "def area("}\n')
    few = ("--prompts", prompts, "--max-new-tokens", 6, "--device", "cpu", "--draft", "head", "--json")
    verified = offspec("verify", pair.target, *few, "--budgets", "4", "--drafts", "own", "--temperatures", 1)
    assert (verified.code, json.loads(verified.out)["draft"]) == (0, "head")
    offspec("distill", pair.target, "--head", "eagle3", *SMALL).refusal(2, "4 layers")
    offspec("distill", pair.target, "--head", "medusa", *SMALL).refusal(2, "exists already", "--out")


def test_one_thing_is_trained(pair: Pair, offspec: Offspec) -> None:
    offspec("distill", pair.target).refusal(2, "--exit-layer", "--draft")
    offspec("distill", pair.target, "--exit-layer", 1, "--head", "eagle3").refusal(2, "--exit-layer", "--head")
