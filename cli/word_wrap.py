"""Wraps text that arrives piece by piece, between words at the right edge of a terminal."""

from __future__ import annotations

from wcwidth import wcwidth

FENCE = "```"  # starts and ends lines that are not wrapped


class WordWrap:
    """Called with each piece of a text, in order; returns the text to write instead.

    A word that reaches the edge is erased and written on the next line. The terminal itself breaks words longer than a
    line, and lines of code between fences.
    """

    def __init__(self, columns: int) -> None:
        """columns: the terminal's width. The last one stays free: terminals differ in the cursor's place there."""
        self._columns, self._limit = columns, max(1, columns - 1)
        self._line, self._in_code = "", False
        self._column = 0  # of the cursor
        self._word, self._word_columns = "", 0

    def __call__(self, text: str) -> str:
        return "".join(map(self._next, text))

    def _next(self, char: str) -> str:
        if char == "\n":
            self._in_code ^= self._line.lstrip().startswith(FENCE)
            self._line, self._column = "", 0
            self._end_word()
            return char
        self._line += char
        if self._in_code:
            return char
        if char.isspace():
            return self._space(char)
        columns = max(0, wcwidth(char))
        before, self._word, self._word_columns = self._word_columns, self._word + char, self._word_columns + columns
        begins_line = before == self._column
        self._column += columns
        if self._column <= self._limit or begins_line:
            return char
        self._column = self._word_columns
        return (f"\x1b[{before}D\x1b[K" if before else "") + f"\n{self._word}"

    def _space(self, char: str) -> str:
        if self._column > self._limit:  # after a word that the terminal broke
            self._column %= self._columns
        self._end_word()
        self._column += max(1, wcwidth(char))
        if self._column < self._limit:
            return char
        self._column = 0
        return "\n"

    def _end_word(self) -> None:
        self._word, self._word_columns = "", 0
