"""The record of what `Engine.load` takes: one name per setting, and values of one kind, whatever was given."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from offspec import Engine, LoadOptions
from offspec.drafts.base import DraftOptions
from offspec.errors import UsageError
from offspec.load_options import LoadSettings
from offspec.planning.memory import MemoryOptions

from ..refusals import refused


def names(record: type[Any]) -> set[str]:
    return {field.name for field in fields(record)}


def test_the_typed_arguments_are_the_fields() -> None:
    assert set(LoadSettings.__annotations__) | {"model"} == names(LoadOptions)


def test_a_setting_has_one_name_down_to_its_use() -> None:
    below = names(DraftOptions) | names(MemoryOptions)
    assert below <= names(LoadOptions)


def test_values_become_those_of_the_record() -> None:
    options = LoadOptions.of(Path("big"), draft=Path("a"), ram="2GiB", kv_cache=8)
    assert (options.model, options.draft) == ("big", "a")
    assert (options.ram, options.vram, options.kv_cache) == (2**31, None, "8")
    files = LoadOptions.of(lookup_files="notes.txt", learn_file=Path("learnt"), exit_file="exit")
    assert (files.lookup_files, files.learn_file, files.exit_file) == (
        (Path("notes.txt"),), Path("learnt"), Path("exit")
    )  # fmt: skip
    assert LoadOptions.of(learn_file=None) == LoadOptions()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"drafft": "none"}, ("Engine.load", "'drafft'", "draft")),
        ({"draft": ["a", "b"]}, ("draft", "path")),
        ({"draft": 3}, ("draft",)),
        ({"draft": None}, ("draft",)),
        ({"ram": "plenty"}, ("plenty",)),
        ({"vram": 4.5}, ("vram",)),
        ({"vrm": "4GiB"}, ("vram",)),
        ({"kv_cache": 5}, ("`kv_cache`", 5)),
        ({"learn_file": ["a", "b"]}, ("learn_file", "path")),
        ({"learn": True, "deterministic": True}, ("`learn`", "`deterministic`")),
    ],
)
def test_what_is_refused(settings: dict[str, Any], words: tuple[object, ...]) -> None:
    with refused(UsageError, *words):
        LoadOptions.of(**settings)


def test_the_record_is_given_once() -> None:
    options = LoadOptions.of("builtin", draft="none", device="cpu", special_in_text=True)
    with Engine.load(options) as engine:
        assert (engine.name, engine.draft_name) == ("builtin", None)
        assert engine.tokenizer.special_in_text
    with refused(UsageError, "LoadOptions"):
        Engine.load(options, dtype="fp32")


def test_the_record_needs_no_torch() -> None:
    """So that `offspec --help` is fast."""
    code = (
        "import sys; from offspec import LoadOptions; LoadOptions.of(draft='none'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
