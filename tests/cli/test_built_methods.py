"""Each method that docs/developing/methods.md calls built: a command that a user can type, on the built-in pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..house.test_methods import ROWS
from .conftest import Offspec

# Method → flags of `offspec bench builtin`.
BENCHED: dict[str, tuple[str, ...]] = {
    "SpecExec": ("--draft-scoring", "specexec"),
    "Drafter-invariant coupling": ("--draft-scoring", "coupled", "--temperature", "1"),
    "Sequoia": ("--tree", "sequoia"),
    "OPT-Tree": ("--tree", "opt-tree"),
    "PEARL": (),
    "Inference with reference": ("--draft", "lookup"),
    "Token Recycling": ("--draft", "lookup"),
    "REST": ("--lookup-files", "{text}", "--draft", "lookup"),
    "MagicDec": ("--draft", "shadow:4", "--draft-window", "64"),
    "SubSpec": ("--draft", "shadow:4"),
    "ShadowSpec (2026)": ("--draft", "shadow:4"),
}
LOSSY = {
    "MJSD (later MTAD)": "joint",
    "Speculative cascades": "cascade",
    "FS-GEN": "mix",
    "Speculative contrastive decoding": "contrastive",
    "BiLD": "bild",
}
# Method → flags of `offspec run builtin`, beside a prompt or a file of prompts.
RUN: dict[str, tuple[str, ...]] = {
    "SmartSpec": ("--prompt-file", "{prompts}", "--batch", "2"),
    "BASS": ("--prompt-file", "{prompts}", "--batch", "2"),
    "EMS-SD": ("--prompt-file", "{prompts}", "--batch", "2"),
    "Batching synergy": ("--prompt-file", "{prompts}", "--batch", "2"),
    "DOMINO": ("def area(", "--grammar", "/[a-z]{2,5}/"),
}
# Method → flags of `offspec distill builtin`, and the draft of the run after it; {out} is what it makes.
TRAINED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "EESD": (("--exit-layer", "2"), ("--draft", "self:{out}", "--stopping", "thompson-calibrated")),
    "DistillSpec": (("--draft", "builtin"), ("--draft", "{out}")),
    **{
        method: (("--head", kind), ("--draft", "{out}"))
        for method, kind in {
            "EAGLE-3": "eagle3",
            "Medusa": "medusa",
            "Hydra": "hydra",
            "Clover": "clover",
            "Clover-2": "clover2",
            "Amphista": "amphista",
            "ReDrafter": "recurrent",
            "Token/embedding speculators": "mlp",
            "FSPAD": "fspad",
            "MTP": "mtp",
        }.items()
    },
}
# Drafts that this project does not train or with another vocabulary, hybrids, and learning: tests of their own.
ELSEWHERE = {
    "EAGLE-1": "tests/offspec/model/heads/test_kinds_of_head.py",
    "EAGLE-2": "tests/offspec/model/heads/test_kinds_of_head.py",
    "Universal assisted generation": "tests/offspec/test_other_vocabulary.py",
    "Token-level intersection": "tests/offspec/test_other_vocabulary.py",
    "STree": "tests/offspec/test_hybrid_models.py",
    "TreeWY": "tests/offspec/test_hybrid_models.py",
    "Online speculative decoding": "tests/cli/test_learn.py",
    "Specialised drafters": "tests/cli/test_learn.py",
}
SMALL = ("--steps", "2", "--num-texts", "16", "--text-tokens", "8")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """The files that commands name."""
    (tmp_path / "text.py").write_text("def area(width, height):\n    return width * height\n")
    (tmp_path / "prompts.txt").write_text("def area(\ndef main(\nclass Point(\n")
    (tmp_path / "prompt.txt").write_text("def area(a, b): return a * b; def area(a, b):")
    return {
        "text": tmp_path / "text.py",
        "prompts": tmp_path / "prompts.txt",
        "prompt": tmp_path / "prompt.txt",
        "out": tmp_path / "trained",
    }


def placed(flags: tuple[str, ...], files: dict[str, Path]) -> list[str]:
    return [flag.format(**files) if flag.endswith("}") and "{2" not in flag else flag for flag in flags]


def test_every_method_that_is_built_has_a_command() -> None:
    built = {row.name for row in ROWS if row.state == "built"}
    assert built == {*BENCHED, *LOSSY, *RUN, *TRAINED, *ELSEWHERE}


@pytest.mark.parametrize("flags", sorted(set(BENCHED.values())), ids=" ".join)
def test_texts_equal_plain_decoding(flags: tuple[str, ...], files: dict[str, Path], offspec: Offspec) -> None:
    budgets = "auto" if "sequoia" in flags else "32"
    short = ("--budgets", budgets, "--repeats", "0+1", "--max-new-tokens", 6, "--ignore-eos")
    result = offspec(
        "bench", "builtin", "--prompts", files["prompt"], *placed(flags, files), *short, "--device", "cpu", "--json"
    )
    assert result.code == 0, result
    report = json.loads(result.out)
    drafted = next(row for row in report["rows"] if row["budget"] != 0)
    assert report["num_different_texts"] == 0
    if budgets != "auto":  # the best size for this machine may be none
        assert drafted["tokens_per_pass"]["median"] > 1


# Nightly, those whose rule for a token has tests of its own and that draft as another one does.
@pytest.mark.parametrize(
    "method",
    [pytest.param(method, marks=() if accept == "joint" else pytest.mark.nightly) for method, accept in LOSSY.items()],
)
def test_lossy_methods_accept_more_than_a_token(method: str, files: dict[str, Path], offspec: Offspec) -> None:
    flags = ("--accept", LOSSY[method], "--beam", 4, "--gamma", 4, "--max-new-tokens", 12, "--device", "cpu")
    short = ("--repeats", "0+1", "--budgets", "8")
    result = offspec("bench", "builtin", "--prompts", files["prompt"], *flags, *short, "--json")
    assert result.code == 0, result
    (lossy,) = [row for row in json.loads(result.out)["rows"] if row["is_lossy"]]
    assert lossy["tokens_per_pass"]["median"] > 1


@pytest.mark.parametrize("flags", sorted(set(RUN.values())), ids=" ".join)
def test_it_runs(flags: tuple[str, ...], files: dict[str, Path], offspec: Offspec) -> None:
    result = offspec("run", "builtin", *placed(flags, files), "-n", 8, "--device", "cpu", "-q")
    assert result.code == 0, result
    assert result.out.strip()


@pytest.mark.nightly("trains a head of each kind; formats and drafting are tested by default")
@pytest.mark.parametrize("method", TRAINED)
def test_what_is_trained_drafts(method: str, files: dict[str, Path], offspec: Offspec) -> None:
    training, drafting = TRAINED[method]
    if method == "EESD":
        files["out"] = files["out"].with_suffix(".safetensors")
    made = offspec("distill", "builtin", *training, *SMALL, "--out", files["out"], "--device", "cpu", "-q")
    assert made.code == 0, made
    asked = ("run", "builtin", "def area(", "-n", 8, "--device", "cpu", "-q")
    drafted = offspec(*asked, *placed(drafting, files))
    assert drafted.code == 0, drafted
    assert drafted.out == offspec(*asked, "--draft", "none").out
