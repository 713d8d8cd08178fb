"""The small files that a user names, for the terminal: regular ones of a bounded size, or pipes (`loaders.small_files`)."""

from offspec.loaders.small_files import MOST_TEXT_BYTES, read_small_file

__all__ = ["MOST_TEXT_BYTES", "read_small_file"]
