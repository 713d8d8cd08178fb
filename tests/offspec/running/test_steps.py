"""What the steps of an answer show of its text."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from offspec import SamplingParams, Stats
from offspec.running.logprob_report import LogprobReport
from offspec.running.steps import StepMaker
from offspec.scheduler.trees.verify import Verdict
from offspec.text.tokenizer import Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
EOS = len(ALPHABET)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """A token for each byte, and one that ends a text."""
    backend = tokenizers.Tokenizer(models.BPE({**{c: i for i, c in enumerate(ALPHABET)}, "<end>": EOS}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return Tokenizer.load(tmp_path)


@pytest.mark.parametrize(("is_ended", "shown"), [(False, "a"), (True, "a\ufffd")])
def test_half_a_character_is_left_out_where_a_limit_cuts_the_answer(
    is_ended: bool, shown: str, tokenizer: Tokenizer
) -> None:
    """Not where the model ended its text there: that is what it wrote."""
    ids = [*tokenizer.encode("a😀")[:3], *([EOS] * is_ended)]
    sampling = SamplingParams(3 + is_ended)
    maker = StepMaker(cast(Any, SimpleNamespace(tokenizer=tokenizer, index=None)), sampling, frozenset())
    step = maker.step(Verdict([], ids), ids, Stats(), LogprobReport(sampling, 0))
    assert (step.text, step.token_ids, step.finish_reason) == (shown, ids, "eos" if is_ended else "length")
