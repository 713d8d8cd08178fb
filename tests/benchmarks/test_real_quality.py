"""benchmarks.real.quality: fair turns, tables that say what was measured, and a run that goes on where it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="answers run within the limits of POSIX")

from benchmarks.real import quality
from benchmarks.real.answers import Answer, AnswerKey, Rate, Way, measure
from benchmarks.real.measures import rouge_l
from benchmarks.real.quality_table import EXACT, PLAIN, show
from offspec import Engine, SamplingParams, SpeculationParams
from offspec.cli.main import run as run_cli
from offspec.drafts.without_model import LookupDraft

from ..pair import Pair, build_pair
from .test_real_tasks import prompt_folder

KEY = AnswerKey("models/target", "models/draft", "fp32", PLAIN, "gsm8k", "g0", 32)
ANSWER = Answer(KEY, "It is 2.", 8, 8, 2.0, 4.0, -4.0, 0.5, "", False, Rate(8, 1.0), Rate(8, 2.0))


def answer(way: str, prompt: str = "g0", **changes: object) -> Answer:
    return replace(ANSWER, key=replace(KEY, way=way, prompt=prompt), **changes)


def cells_of(answers: list[Answer]) -> dict[str, dict[str, str]]:
    """Row → title → cell of the only table."""
    head, _, *rows = (line.strip("| ").split(" | ") for line in show(answers).splitlines() if line.startswith("|"))
    return {name: dict(zip(head, values, strict=True)) for name, *values in rows}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"), 3, max_position_embeddings=512)


def test_rates_are_compared_with_those_beside_them() -> None:
    """The machine became slower by half before the second prompt: the ratio does not see it."""
    joint = [
        answer("joint", "g0", num_passes=2, seconds=0.5, exact=Rate(8, 1.0), plain=Rate(16, 4.0)),
        answer("joint", "g1", num_passes=4, seconds=1.0, exact=Rate(8, 2.0), plain=Rate(16, 8.0)),
    ]
    (cells,) = cells_of(joint).values()
    assert cells["prompts"] == "2"
    assert cells["tokens per pass"].startswith("2.67 [2.00, 4.00]")
    assert cells["tokens/s"].startswith("10.67 ")
    assert cells["over exact"] == "2.00 [2.00, 2.00]"
    assert cells["over plain"] == "4.00 [4.00, 4.00]"


def test_quality_is_shown_beside_exact_decoding() -> None:
    wrong = "3 is not 2"
    answers = [answer(way, prompt) for way in (PLAIN, EXACT) for prompt in ("g0", "g1", "g2")]
    answers[4] = replace(answers[4], failure=wrong, text="It is 3.")
    answers += [answer("joint", "g0", failure=wrong, is_cut=True), answer("joint", "g1"), answer("joint", "g2")]
    cells = cells_of(answers)
    assert [cells[way]["right numbers"][:4] for way in cells] == ["1.00", "0.67", "0.67"]
    assert cells["joint"]["against exact"] == "+1 \N{MINUS SIGN}1"
    assert cells[EXACT]["against exact"] == "\N{EN DASH}"
    assert [cells[way]["text as plain"] for way in cells] == ["3 of 3", "2 of 3", "3 of 3"]
    assert (cells["joint"]["cut"], cells[PLAIN]["cut"]) == ("1", "0")
    assert cells[PLAIN]["nats/token"] == "-0.500 [-0.500, -0.500]"
    assert cells[PLAIN]["ROUGE-L"] == "0.500 [0.500, 0.500]"


def test_a_prompt_that_was_answered_before_is_not_recalled(pair: Pair) -> None:
    """Recycled tokens of the same text would predict it; what was learnt about costs stays."""
    with Engine.load(pair.target, draft="lookup", dtype="fp32") as engine:
        way = Way("lookup", engine.with_draft(LookupDraft()), SpeculationParams(16))
        ids, params = engine.encode("def area("), SamplingParams(24, ignore_eos=True)
        costs = way.engine.draft_stats.costs
        first, second = (measure(way, ids, params, lambda: None) for _ in range(2))
        *_, kept = way.engine.generate(ids, params, way.speculation)
        assert second.num_passes == first.num_passes > kept.stats.num_passes
        assert second.token_ids == first.token_ids
        assert way.engine.draft_stats.costs is costs


@pytest.mark.nightly("trains an exit and answers prompts; the parts are tested apart")
@pytest.mark.slow
def test_a_run_measures_what_is_missing(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exit_file = tmp_path / "exit.safetensors"
    settings = ("--steps", "1", "--num-texts", "16", "--text-tokens", "8", "--dtype", "fp32")
    assert run_cli(["distill", str(pair.target), "--exit-layer", "1", *settings, "--out", str(exit_file)]) == 0
    capsys.readouterr()
    args = ["--model", str(pair.target), "--draft", str(pair.draft), "--prompt-folder", str(prompt_folder(tmp_path))]
    args += ["--tokens", "12", "--gammas", "4", "--context", "512", "--folder", str(tmp_path / "run")]
    args += ["--exit", str(exit_file)]
    quality.main([*args, "--taus", "0.1", "--only", "joint|exit|nodes"])
    first = capsys.readouterr()
    exits = [f"exit after layer 1 (exit.safetensors){more}" for more in ("", ", `--stopping thompson`")]
    exits += [name.replace(")", "), 16 nodes") for name in exits]
    rows = [
        PLAIN,
        EXACT,
        "draft model, 32 nodes",
        "joint, tau 0.1, gamma 4",
        "lookup, 16 nodes",
        "draft model, 16 nodes",
    ]
    for table in first.out.split("\n\n")[1::2]:
        lines = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
        assert {name for name, *_ in lines} == {*rows, *exits}
        assert {line[4] for line in lines if "joint" not in line[0]} == {"1 of 1"}  # as plain decoding
    monkeypatch.setattr(quality, "measure", lambda *_: pytest.fail("measured again"))
    quality.main([*args, "--taus", "0.1", "--only", "joint|exit|nodes"])
    assert capsys.readouterr().out == first.out
    monkeypatch.undo()
    quality.main([*args, "--taus", "1", "--only", "joint"])
    assert capsys.readouterr().err.count("joint, tau 1, gamma 4") == 2  # one of each set


def test_sets_without_answers_are_refused() -> None:
    with pytest.raises(SystemExit, match="'mt_bench' has no answers to judge by; choose from humaneval, gsm8k"):
        quality.main(["--sets", "gsm8k,mt_bench", "--model", "builtin", "--draft", "auto"])


@pytest.mark.parametrize(
    ("tokens", "reference", "common"),
    [([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [3, 2, 1], 1), ([1, 5, 2, 6, 3], [1, 2, 9, 3], 3), ([1, 1], [1], 1)],
)
def test_rouge_counts_the_longest_common_subsequence(tokens: list[int], reference: list[int], common: int) -> None:
    expected = 2 * common / (len(tokens) + len(reference))
    assert rouge_l(tokens, reference) == rouge_l(reference, tokens) == pytest.approx(expected)
    assert rouge_l(tokens, []) == 0
