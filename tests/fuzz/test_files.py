"""Whatever stands in files that offspec itself wrote or a user named, it is read or refused in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import click
import numpy as np
import pytest
import torch

from offspec import Engine, SamplingParams, builtin
from offspec.checkpoints.exit_layers import ExitFile, save
from offspec.checkpoints.model_files import ModelFiles
from offspec.checkpoints.opening import open_model
from offspec.cli.batch import PromptBatch, read_tasks
from offspec.cli.config import Commands
from offspec.cli.main import cli
from offspec.cli.settings import FILE_VARIABLE, Settings
from offspec.model.block import layer_shapes
from offspec.research.lora import Adapter, SavedAdapter
from offspec.session import read_saved
from offspec.text.lookup_files import open_index
from offspec.text.tokenizer import Tokenizer

from ..pair import Pair, build_pair
from .damage import fuzz, judge, special_files

if sys.platform == "win32":
    pytest.skip("named pipes and alarms as POSIX has them", allow_module_level=True)

SETTINGS = 'draft = "auto"\nmax-new-tokens = 64\nlookup-files = ["a.txt", "b.txt"]\n[chat]\ntemperature = 0.7\n'
CHAT = {
    "format": "offspec chat",
    "version": 1,
    "model": "builtin",
    "system": "Be brief.",
    "settings": {"temperature": 0.7, "stop": ["x"]},
    "turns": [{"message": "hi", "reply": "ho", "token_ids": [1, 2], "finish_reason": "eos", "num_dropped": 0}],
}
PROMPTS = '{"prompt": "hi", "id": 1}\n{"messages": [{"role": "user", "content": "sch\\u00f6n"}]}\n'
TEXT = "def area(width, height):\n    return width * height\n"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"))


Read = Callable[[Path], object]


@pytest.fixture
def read_settings() -> Read:
    def read(file: Path) -> None:
        with click.Context(cli) as context:
            settings = Settings(Commands(context), {FILE_VARIABLE: str(file)})
            for name in ("run", "chat", "serve"):
                settings.defaults(name)

    return read


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    (file := tmp_path / "prompts.jsonl").write_text(PROMPTS)
    return file


@pytest.fixture
def read_output(prompts: Path) -> Read:
    """Opens it to go on, which changes nothing of it."""

    def read(output: Path) -> None:
        before = output.read_bytes() if output.is_file() else None
        try:
            with closing(PromptBatch(prompts, output, {"model": "builtin"}, SamplingParams())) as batch:
                list(batch.open_tasks)
        finally:
            assert before is None or output.read_bytes() == before

    return read


@pytest.fixture(scope="module")
def adapter(pair: Pair) -> Iterator[Adapter]:
    with closing(Engine.load(str(pair.draft), draft="none", device="cpu", dtype="fp32")) as engine:
        yield Adapter(engine.target, rank=2)


@pytest.fixture
def read_learnt(adapter: Adapter) -> Read:
    return adapter.load


@pytest.fixture(scope="module")
def model_files(pair: Pair) -> ModelFiles:
    return open_model(pair.target, "fp32", [])


@pytest.fixture
def read_exit(model_files: ModelFiles) -> Read:
    return lambda file: ExitFile.open(file, model_files).load(torch.float32, torch.device("cpu"))


@pytest.fixture
def read_text(tmp_path: Path) -> Read:
    tokenizer = Tokenizer.load(builtin.path("target"))
    return lambda file: open_index([file], tokenizer, tmp_path / "cache")


@pytest.fixture
def reads(
    read_settings: Read, read_output: Read, read_learnt: Read, read_exit: Read, read_text: Read
) -> dict[str, Read]:
    return {
        "settings": read_settings,
        "prompts": lambda file: read_tasks(file) if file.is_file() else None,  # click lets nothing else through
        "output": read_output,
        "learn file": read_learnt,
        "exit layer": read_exit,
        "lookup file": read_text,
        "chat": read_saved,
    }


@pytest.fixture
def sound(tmp_path: Path, prompts: Path, adapter: Adapter, model_files: ModelFiles) -> dict[str, bytes]:
    """What each of these files holds where nothing is wrong with it."""
    adapter.save(learnt := tmp_path / "learnt")
    layer = {name: torch.zeros(shape) for name, shape in layer_shapes(model_files.config).items()}
    save(exit_layer := tmp_path / "exit.safetensors", layer, model_files, 1)
    answers = [
        {"line": number, **json.loads(line), "text": "x", "settings": {"model": "builtin"}}
        for number, line in enumerate(PROMPTS.splitlines(), 1)
    ]
    return {
        "settings": SETTINGS.encode(),
        "prompts": PROMPTS.encode(),
        "output": "".join(json.dumps(answer) + "\n" for answer in answers).encode(),
        "learn file": learnt.read_bytes(),
        "exit layer": exit_layer.read_bytes(),
        "lookup file": TEXT.encode(),
        "chat": json.dumps(CHAT).encode(),
    }


KINDS = ("settings", "prompts", "output", "learn file", "exit layer", "lookup file", "chat")


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files(kind: str, reads: dict[str, Read], sound: dict[str, bytes], tmp_path: Path) -> None:
    (file := tmp_path / "file").write_bytes(sound[kind])
    fuzz(kind, file, lambda: reads[kind](file))


@pytest.mark.parametrize("kind", KINDS)
def test_special_files(kind: str, reads: dict[str, Read], tmp_path: Path) -> None:
    (folder := tmp_path / "special").mkdir()
    for name, file in special_files(folder).items():
        judge(f"{kind}: {name}", lambda file=file: reads[kind](file))  # type: ignore[misc]


def test_damaged_lookup_caches_are_made_anew(read_text: Read, tmp_path: Path) -> None:
    """Never another index than the sound one: a wrong place would be an error in the middle of a text."""
    (text := tmp_path / "text").write_text(TEXT)
    expected = np.array(read_text(text).order)  # type: ignore[attr-defined]
    (cache,) = (tmp_path / "cache").iterdir()

    def read() -> None:
        np.testing.assert_array_equal(read_text(text).order, expected)  # type: ignore[attr-defined]

    fuzz("lookup cache", cache, read)


@pytest.mark.parametrize("kind", ["learn file", "exit layer"])
def test_what_was_read_does_not_change_with_the_file(
    kind: str, sound: dict[str, bytes], model_files: ModelFiles, tmp_path: Path
) -> None:
    (file := tmp_path / "file").write_bytes(sound[kind])
    device = torch.device("cpu")
    read = SavedAdapter.read(file).tensors if kind == "learn file" else None
    tensors = read or ExitFile.open(file, model_files).load(torch.float32, device)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with file.open("r+b") as opened:
        opened.write(b"\x7f" * len(sound[kind]))
    assert all(torch.equal(tensors[name], before[name]) for name in before)
