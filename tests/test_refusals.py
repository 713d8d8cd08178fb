"""The helper that tests of errors share can fail."""

from __future__ import annotations

import pytest

from offspec.errors import CheckpointError, MissingWeightsError

from .refusals import check_message, refused, tells


@pytest.mark.parametrize("word", [1000, 8, 5, "--draft", "a.json", "[2, 3]", "Sound", "8 bytes", -1])
def test_a_word_is_told_whole_or_not_at_all(word: object) -> None:
    assert tells("/tmp/a.json is not sound: 1,000 of [2, 3], 8 bytes, 5.0, not -1; give --draft.", word)
    assert not tells(
        "a.jsonl is unsound: 10000, 8000, 18, 8.5, 0.8, 5.01, [2, 30], 18 bytes; give --draft-scoring", word
    )


def test_an_empty_word_is_refused() -> None:
    with pytest.raises(AssertionError):
        tells("anything", "")


@pytest.mark.parametrize("message", ["", "a word in\ntwo lines", "of a word: RuntimeError", "one line"])
def test_a_message_is_one_line_that_tells_the_words(message: str) -> None:
    with pytest.raises(AssertionError):
        check_message(message, "word")
    check_message("the word", "word")


def test_a_class_is_not_its_base() -> None:
    def fail() -> None:
        raise MissingWeightsError("the weights are not there")

    with refused(MissingWeightsError, "weights"):
        fail()
    for kind, word in ((CheckpointError, "weights"), (MissingWeightsError, "tokenizer")):
        with pytest.raises(AssertionError), refused(kind, word):
            fail()
