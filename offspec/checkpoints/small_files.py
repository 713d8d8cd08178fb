"""Bounded reading of small files and JSON, re-exported from `loaders.files.small_files` for the CLI."""

from offspec.loaders.files.small_files import MOST_TEXT_BYTES, parse_json, read_small_file

__all__ = ["MOST_TEXT_BYTES", "parse_json", "read_small_file"]
