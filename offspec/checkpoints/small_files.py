"""Small files that a user names, and JSON, for the terminal: bounded, as `loaders.small_files` has them."""

from offspec.loaders.small_files import MOST_TEXT_BYTES, parse_json, read_small_file

__all__ = ["MOST_TEXT_BYTES", "parse_json", "read_small_file"]
