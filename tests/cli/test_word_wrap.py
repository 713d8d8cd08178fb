"""Lines of a reply break between words, whatever pieces the reply comes in, and nothing else of it changes."""

from __future__ import annotations

import re

import pytest
from wcwidth import wcwidth

from offspec.cli.word_wrap import WordWrap

TEXT = (
    "Speculative decoding drafts several tokens with a small model, and one pass of the target judges all of them.\n"
    "\n"
    "- A list item that is longer than the line is broken, too.\n"
    "Grüße aus Köln, 你好世界 and Incomprehensibilities.\n"
)


def screen(written: str, columns: int) -> list[str]:
    """What a terminal of so many columns shows of it."""
    lines, cells = list[str](), list[str]()
    for part in re.findall(r"\x1b\[\d*[A-Z]|.|\n", written):
        if part == "\n":
            lines.append("".join(cells))
            cells = []
        elif part.endswith("D") and part.startswith("\x1b"):
            del cells[len(cells) - int(part[2:-1]) :]
        elif part != "\x1b[K":
            if len(cells) + wcwidth(part) > columns:
                lines.append("".join(cells))
                cells = []
            cells += [part, *[""] * (wcwidth(part) - 1)]
    return [*lines, "".join(cells)]


@pytest.mark.parametrize("columns", [26, 200])
@pytest.mark.parametrize("piece", [3, 1000])
def test_words_stay_whole(columns: int, piece: int) -> None:
    wrap = WordWrap(columns)
    lines = screen("".join(wrap(TEXT[at : at + piece]) for at in range(0, len(TEXT), piece)), columns)
    assert max(sum(map(wcwidth, line)) for line in lines) < columns
    assert " ".join(lines).split() == TEXT.split()
    assert len(lines) == 5 if columns == 200 else len(lines) > 5


def test_a_line_is_as_full_as_can_be() -> None:
    assert screen(WordWrap(11)("aaaa bbbbb cccc"), 11) == ["aaaa bbbbb", "cccc"]
    assert screen(WordWrap(10)("aaaa bbbbb cccc"), 10) == ["aaaa ", "bbbbb ", "cccc"]


def test_a_word_longer_than_a_line_is_left_to_the_terminal() -> None:
    assert WordWrap(10)("x" * 25 + " y") == "x" * 25 + " y"


def test_code_stays_as_it_is() -> None:
    code = "```python\nreturn [a_long_name for a_long_name in names]\n```\n"
    wrap = WordWrap(20)
    assert wrap(code) == code
    assert wrap("and then words are broken again") != "and then words are broken again"
