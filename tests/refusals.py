"""What an error tells, apart from its wording: its class, and the names, values and flags that it holds.

Sentences may be rewritten. What a test holds is what a reader needs: what is wrong, where, and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

Kind = TypeVar("Kind", bound=Exception)


def tells(message: str, *words: object) -> bool:
    """Whether all of these stand in `message`, each whole and in any case.

    "1" is not told by "10" or "1.5", nor "--draft" by "--draft-scoring"; 1000 is told by "1,000", and by "1000.0".
    """
    return not _missing(message, words)


def check_message(message: str, *words: object) -> None:
    """Fails unless this is one line, more than an exception's name, that tells all of these words."""
    assert len(message.splitlines()) == 1, repr(message)
    assert not message.endswith("Error"), repr(message)
    assert not (missing := _missing(message, words)), f"{message!r} does not tell {missing}"


@contextmanager
def refused(kind: type[Kind], *words: object) -> Iterator[pytest.ExceptionInfo[Kind]]:
    """Expects an error of this very class, whose message passes `check_message` and is not long."""
    with pytest.raises(kind) as caught:
        yield caught
    assert caught.type is kind, f"{caught.type.__name__}, not {kind.__name__}: {caught.value}"
    check_message(str(caught.value), *words)
    assert len(str(caught.value)) < 1000, repr(str(caught.value)[:1000])


def _missing(message: str, words: tuple[object, ...]) -> list[str]:
    plain = re.sub(r"(?<=\d),(?=\d{3}\b)", "", message)  # 1,000 is 1000
    patterns = {str(word): _pattern(str(word)) for word in words}
    return [word for word, pattern in patterns.items() if not (pattern.search(message) or pattern.search(plain))]


def _pattern(word: str) -> re.Pattern[str]:
    assert word, "an empty word is told by everything"
    before = r"(?<!\w)(?<!\d\.)" if re.match(r"\w", word) else ""
    after = r"(?!\w|\.(?!0+\b)\d)" if re.search(r"\w$", word) else ""
    after += "(?!-)" if word.startswith("-") else ""
    return re.compile(f"{before}{re.escape(word)}{after}", re.IGNORECASE)
