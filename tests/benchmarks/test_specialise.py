"""Making a target that knows a domain: it learns from the files that are not held out,
and what comes out is a checkpoint.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks.drafts import specialise
from offspec import Engine, SamplingParams, builtin


def test_files_follow_one_another_with_an_end_after_each(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(builtin.path("target") / "tokenizer.json"))
    files = [tmp_path / "a.h", tmp_path / "b.h"]
    for file in files:
        file.write_text(f"int {file.stem};\n")
    text = specialise.texts(files, tokenizer, end=4000)
    first, second = (tokenizer.encode(f"int {file.stem};").ids for file in files)
    np.testing.assert_array_equal(text, [*first, 4000, *second, 4000])


@pytest.mark.nightly
@pytest.mark.slow
def test_the_held_out_files_become_likelier_and_the_checkpoint_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(8):
        (tmp_path / f"{number}.h").write_text("#define ZORP_MAX(glim) ((glim) ^ 0x7fULL)\n" * 40)
    monkeypatch.setattr(specialise, "WINDOW", 32)
    monkeypatch.setattr(specialise, "ROWS", 2)
    monkeypatch.setattr(specialise, "held_out_loss", partial(specialise.held_out_loss, rows=8))
    out = tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["specialise.py", str(out), "--folder", str(tmp_path), "--steps", "6"])
    specialise.main()
    losses = [float(line.split()[2]) for line in capsys.readouterr().out.splitlines() if line.startswith("held-out")]
    assert losses[1] < 0.5 * losses[0]
    tokenizer = Tokenizer.from_file(str(builtin.path("target") / "tokenizer.json"))
    with Engine.load(str(out), draft=str(builtin.path("draft")), device="cpu") as engine:
        assert engine.encode("int a;") == tokenizer.encode("int a;").ids
        (step, *_) = engine.generate("#define ZORP_MAX(", SamplingParams(4, ignore_eos=True))
    assert step.token_ids
