"""Folders in Mistral's own layout: params.json instead of config.json, consolidated*.safetensors, tekken.json.

Names, settings and the order of rows are Mistral's; `offspec.checkpoints.mistral` translates them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .checkpoint import as_config_json
from .safetensors_folder import CONFIG_FILE, SafetensorsCheckpoint, find_tensors, list_folder, read_json_object

PARAMS_FILE, TEKKEN_FILE = "params.json", "tekken.json"
WEIGHTS_FILE, WEIGHTS_INDEX = "consolidated.safetensors", "consolidated.safetensors.index.json"
FILES = (PARAMS_FILE, TEKKEN_FILE, "consolidated*.safetensors", WEIGHTS_INDEX)  # patterns


@dataclass(frozen=True)
class MistralCheckpoint(SafetensorsCheckpoint):
    """A folder of weights with consistent headers (a `checkpoint.Checkpoint`). config: params.json."""

    @property
    def tokenizer_path(self) -> Path | None:
        file = self.path / TEKKEN_FILE
        return file if file.is_file() else super().tokenizer_path

    def config_json(self) -> bytes:
        return as_config_json(self.config)


class MistralFolder:
    """The container of such folders. A folder with a config.json, too, is read as Hugging Face's."""

    def recognises(self, path: Path) -> bool:
        return path.is_dir() and (path / PARAMS_FILE).is_file() and not (path / CONFIG_FILE).exists()

    def open(self, path: Path, *, headers_only: bool = False) -> MistralCheckpoint:
        names = list_folder(path)
        tensors = find_tensors(path, names, headers_only=headers_only, single=WEIGHTS_FILE, index=WEIGHTS_INDEX)
        return MistralCheckpoint(path, read_json_object(path / PARAMS_FILE), {}, tensors)

    def open_config(self, path: Path) -> MistralCheckpoint:
        return MistralCheckpoint(path, read_json_object(path / PARAMS_FILE), {}, {})

    def weight_files(self, path: Path) -> list[Path]:
        return [file for file in path.glob("consolidated*.safetensors") if file.is_file()]
