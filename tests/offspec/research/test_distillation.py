"""An exit layer is trained on what the target says; an interrupted run gives what one that was not gives."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from offspec import Engine
from offspec.checkpoints.exit_layers import ExitFile, default_file, found_exits, save
from offspec.checkpoints.model_files import ModelFiles
from offspec.checkpoints.opening import open_model
from offspec.drafts.acceptance import EXIT_AGREEMENT
from offspec.drafts.base import Choice, DraftOptions, OpenRequest
from offspec.drafts.kinds import open_draft
from offspec.drafts.self_draft import OpenedSelf
from offspec.errors import CheckpointError, StorageError, UsageError
from offspec.loaders.streaming.placement import Limits, Placement, Slots
from offspec.model.block import layer_shapes
from offspec.model.decoder import CachedDecoder
from offspec.model.early_exit import EarlyExit
from offspec.model.pass_rows import TextRows
from offspec.research.distill_params import DistillParams
from offspec.research.distillation import Distilled, ExitModule, Teacher, distill, distill_exits
from offspec.research.target_texts import SHARD_TEXTS, Forest, Shards
from offspec.text.tokenizer import Tokenizer

from ...fakes import LendingWeights
from ...pair import build_pair, scale_weights, variant
from ...refusals import refused
from ...scheduler.fakes import build_tree
from .interruptions import Stop, stop_at

NUM_LAYERS, EXIT = 4, 2
SMALL = DistillParams(steps=24, num_texts=32, text_tokens=7, batch_texts=4, num_labels=8, learning_rate=3e-3)
BRIEF = replace(SMALL, steps=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pair(tmp_path_factory.mktemp("deep"), NUM_LAYERS).target


@pytest.fixture(scope="module")
def files(folder: Path) -> ModelFiles:
    return open_model(folder, "fp32", [])


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    loaded = Engine.load(str(folder), draft="none", device="cpu", dtype="fp32")
    yield loaded
    loaded.close()


def train(engine: Engine, files: ModelFiles, out: Path, params: DistillParams = SMALL, **more: Any) -> Distilled:
    return distill(Teacher(engine.target, files, engine.tokenizer), EXIT, params, out=out, **more)


@pytest.fixture(scope="module")
def trained(engine: Engine, files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Distilled:
    return train(engine, files, tmp_path_factory.mktemp("out") / "exit.safetensors")


def test_training_brings_the_exit_nearer_to_the_target(trained: Distilled) -> None:
    assert trained.agreement > trained.agreement_before + 0.1
    assert not list(trained.path.parent.glob("*.work"))


def test_only_the_exit_layer_is_trained(engine: Engine, files: ModelFiles, folder: Path, trained: Distilled) -> None:
    before = load_file(folder / "model.safetensors")
    for index in range(NUM_LAYERS):
        with engine.target.weights.layer(index) as layer:
            for name, weight in layer.items():
                assert torch.equal(weight, before[f"model.layers.{index}.{name}"])  # type: ignore[arg-type]
    layer, source = load_file(trained.path), f"model.layers.{NUM_LAYERS - 1}."
    assert layer.keys() == layer_shapes(files.config).keys()
    assert not any(torch.equal(layer[name], before[source + name]) for name in layer)


@pytest.mark.slow
def test_an_interrupted_run_gives_the_same_to_the_last_bit(
    engine: Engine, files: ModelFiles, trained: Distilled, tmp_path: Path
) -> None:
    out = tmp_path / "exit.safetensors"
    for number, (what, at) in enumerate([("texts written", 1), ("training steps", 9)]):
        with pytest.raises(Stop):
            train(engine, files, out, resume=number > 0, progress=stop_at(what, at), checkpoint_every_s=0)
        assert not out.exists()
    torch.rand(7)  # what else happened to the random numbers of this process does not count
    seen = list[int]()
    train(
        engine, files, out, resume=True, progress=lambda what, done, _: seen.append(done * (what == "training steps"))
    )
    assert [done for done in seen if done][:1] == [8], "it goes on"
    found, expected = load_file(out), load_file(trained.path)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture
def interrupted(stopped: Path, tmp_path: Path) -> Path:
    """Where a run would have written its file that has ended in its second step."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    return tmp_path / "exit.safetensors"


@pytest.fixture(scope="module")
def stopped(engine: Engine, files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(Stop):
        train(
            engine,
            files,
            folder / "exit.safetensors",
            progress=stop_at("training steps", 2),
            checkpoint_every_s=0,
        )
    return folder


def test_what_cannot_be_resumed_is_said(engine: Engine, files: ModelFiles, interrupted: Path) -> None:
    with refused(UsageError, "nothing", "`resume`"):
        train(engine, files, interrupted.with_name("another.safetensors"), resume=True)
    with refused(UsageError, "interrupted", "`resume`", "delete"):
        train(engine, files, interrupted)
    with refused(UsageError, "other settings"):
        train(engine, files, interrupted, replace(SMALL, steps=5), resume=True)
    (settings,) = interrupted.parent.glob("*.work/settings.json")
    settings.unlink()
    with refused(UsageError, settings.parent, "settings", "delete"):
        train(engine, files, interrupted, replace(SMALL, seed=5))


def test_a_second_run_is_told_of_the_first(engine: Engine, files: ModelFiles, tmp_path: Path) -> None:
    out, refusals = tmp_path / "exit.safetensors", list[str]()

    def meanwhile(what: str, done: int, total: int) -> None:
        for resume in (False, True) if (what, done) == ("texts written", 1) else ():
            with refused(UsageError, out, "another process", "`out`") as caught:
                train(engine, files, out, BRIEF, resume=resume)
            refusals.append(str(caught.value))

    train(engine, files, out, BRIEF, progress=meanwhile)
    assert len(refusals) == 2
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.slow
def test_a_file_of_something_else_is_not_overwritten(engine: Engine, files: ModelFiles, tmp_path: Path) -> None:
    (notes := tmp_path / "notes.txt").write_text("precious")
    with pytest.raises(UsageError, match="not overwritten"):
        train(engine, files, notes)
    assert notes.read_text() == "precious"
    assert [*tmp_path.iterdir()] == [notes]


@pytest.mark.parametrize("number", [0, NUM_LAYERS])
def test_a_layer_that_is_none_is_refused(engine: Engine, files: ModelFiles, tmp_path: Path, number: int) -> None:
    with refused(UsageError, f"`exit_layer={number}`", "4 layers", "1 to 3"):
        distill(Teacher(engine.target, files, engine.tokenizer), number, SMALL, out=tmp_path / "exit.safetensors")


def test_labels_are_what_the_target_says_of_each_text_alone(engine: Engine) -> None:
    """Of texts that grow side by side, in several passes, as of one that is read by itself."""
    texts = torch.randint(0, 300, (3, 5), generator=torch.Generator().manual_seed(0)).numpy()
    forest = Forest(engine.target, 3, [EXIT - 1])
    parts = [forest.add(texts[:, :2], 8), forest.add(texts[:, 2:3], 8), forest.add(texts[:, 3:], 8)]
    for number, text in enumerate(texts):
        chain = build_tree([text.tolist()])
        logits = CachedDecoder(engine.target).score([], chain.tokens, chain.depths, chain.parents)
        expected, labels = logits.log_softmax(-1).topk(8)
        found = {name: torch.cat([part[name][number] for part in parts]) for name in parts[0]}
        assert torch.equal(found["labels"].long(), labels)
        torch.testing.assert_close(found["log_probabilities"], expected, rtol=0, atol=1e-4)
        rows = engine.target.rows(TextRows.of_chain(text.tolist()), engine.target.new_cache())
        hidden = engine.target.through(engine.target.embed(torch.from_numpy(text)), rows, range(EXIT))
        torch.testing.assert_close(found["hidden"], hidden, rtol=0, atol=1e-4)


def test_what_is_trained_is_what_is_run(engine: Engine) -> None:
    """The layer's logits in training are those of drafting with it."""
    module = ExitModule(engine.target, EXIT, EXIT)
    hidden = torch.randn(1, 6, engine.target.config.hidden_size, generator=torch.Generator().manual_seed(0))
    exit_layer = EarlyExit(engine.target, EXIT, {name: weight.detach() for name, weight in module.weights().items()})
    rows = exit_layer.rows(TextRows.of_chain([0] * 6), exit_layer.new_cache())
    out = exit_layer.through(hidden[0].clone(), rows)
    torch.testing.assert_close(exit_layer.logits(out), module.logits(hidden)[0].detach(), rtol=0, atol=1e-4)


def test_a_streamed_target_is_walked_once_for_all_texts(engine: Engine, tmp_path: Path) -> None:
    target = engine.target
    weights = LendingWeights(target.weights)
    lent = type(target)(target.config, weights, dtype=target.dtype, device=target.device)
    Shards(tmp_path, lent, engine.tokenizer, replace(SMALL, num_texts=SHARD_TEXTS), []).make(lambda *_: None)
    assert weights.lent == [*range(NUM_LAYERS)] * SMALL.text_tokens


def test_a_text_that_does_not_end_is_refused(
    engine: Engine, files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offspec.research.target_texts.MOST_TEXT_BYTES", 1 << 20)
    with refused(UsageError, "`texts=/dev/zero`", "1 MiB"):
        train(engine, files, tmp_path / "exit.safetensors", texts=[Path("/dev/zero")])


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"ab", ("tokens", SMALL.text_tokens)), (b"\xff" * 99, ("text.txt", "UTF-8"))],
)
def test_texts_that_are_refused_leave_nothing_behind(
    engine: Engine, files: ModelFiles, tmp_path: Path, content: bytes, words: tuple[object, ...]
) -> None:
    (text := tmp_path / "text.txt").write_bytes(content)
    with refused(UsageError, *words):
        train(engine, files, tmp_path / "exit.safetensors", texts=[text])
    assert list(tmp_path.iterdir()) == [text]  # a folder would be taken for an interrupted run


# ------------------------------------------------------------------------------------------------ files


def test_it_is_found_where_it_was_put(
    folder: Path, engine: Engine, files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offspec.checkpoints.exit_layers.exits_folder", lambda: tmp_path / "exits")
    with refused(UsageError, folder, "offspec distill", "--exit-layer"):
        Engine.load(str(folder), draft="self", device="cpu")
    done = distill(Teacher(engine.target, files, engine.tokenizer), EXIT, replace(SMALL, steps=1))
    assert done.path.parent == tmp_path / "exits"
    Engine.load(str(folder), draft="self", device="cpu").close()


@pytest.mark.slow
def test_several_exits_are_trained_on_one_writing_of_the_texts(
    engine: Engine, files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted run goes on where it was."""
    monkeypatch.setattr("offspec.checkpoints.exit_layers.exits_folder", lambda: tmp_path / "exits")
    teacher, steps, params = Teacher(engine.target, files, engine.tokenizer), 0, replace(SMALL, steps=4)

    def stop_in_the_second(what: str, done: int, total: int) -> None:
        nonlocal steps
        steps += what == "training steps" and done == 2
        if steps == 2:
            raise Stop

    with pytest.raises(Stop):
        distill_exits(teacher, [1, EXIT], params, progress=stop_in_the_second, checkpoint_every_s=0)
    shards = list((tmp_path / "exits").glob("*.work/shard-*"))
    assert len(shards) == SMALL.num_texts // SHARD_TEXTS
    written = {file: file.stat().st_mtime_ns for file in shards}
    moments = list[dict[Path, int]]()

    def look(what: str, done: int, total: int) -> None:
        moments.append({file: file.stat().st_mtime_ns for file in shards})

    found = distill_exits(teacher, [1, EXIT], params, resume=True, progress=look)
    assert moments[0] == moments[-1] == written, "texts are not written again"
    assert [done.exit_layer for done in found] == [1, EXIT]
    assert sorted(path.name for path in (tmp_path / "exits").iterdir()) == sorted(done.path.name for done in found)
    assert found_exits(files) == [1, EXIT]


@pytest.mark.parametrize(("rates", "chosen"), [({"self:1": 3.0, "self:2": 2.0}, 1), ({}, None)])
def test_of_several_exits_the_fastest_is_used(
    files: ModelFiles,
    trained: Distilled,
    rates: dict[str, float],
    chosen: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By predicted tokens/s, where there is a prediction; otherwise the newest."""
    monkeypatch.setattr("offspec.checkpoints.exit_layers.exits_folder", lambda: tmp_path)
    for number in (1, 2):
        save(default_file(files, number), load_file(trained.path), files, number, agreement=0.25 * number)
    asked = list[Sequence[str]]()

    def choose(names: Sequence[str], others: Sequence[str]) -> Choice | None:
        asked.append(names)
        return Choice(next(iter(rates)), rates) if rates else None

    request = OpenRequest(DraftOptions("self"), files, Tokenizer.load(files.checkpoint.path), "fp32", [])
    found = open_draft("target", replace(request, choose=choose))
    assert isinstance(found, OpenedSelf)
    assert asked == [["self:1", "self:2"]]
    assert found.num_first == (chosen or 2)
    assert found.file is not None
    assert found.file.agreement == 0.25 * (chosen or 2)
    said = open_draft("target", replace(request, options=DraftOptions("self:1")))
    assert isinstance(said, OpenedSelf)
    placement = Placement((), Slots(0, 0, 0), (), Limits(None, 0), 0, 0)
    assert said.guessing(placement).share == pytest.approx(0.75 / (1 - EXIT_AGREEMENT)), "it errs more often"
    given = open_draft("target", replace(request, options=DraftOptions(f"self:{trained.path}")))
    assert isinstance(given, OpenedSelf)
    assert given.file is not None
    assert given.file.path == trained.path
    with refused(UsageError, "self:9", "1 to 3"):
        open_draft("target", replace(request, options=DraftOptions("self:9")))
    with refused(CheckpointError, tmp_path / "none"):
        open_draft("target", replace(request, options=DraftOptions(f"self:{tmp_path / 'none'}")))


def test_another_targets_exit_layer_is_refused(folder: Path, trained: Distilled, tmp_path: Path) -> None:
    other = scale_weights(variant(folder, tmp_path / "other"), {"model.layers.3.mlp.up_proj.weight": 1.01})
    with refused(CheckpointError, trained.path, "another target", "(target)", other):
        Engine.load(str(other), draft="self", exit_file=trained.path, device="cpu")


def test_files_that_are_no_exit_layers_are_refused(files: ModelFiles, trained: Distilled, tmp_path: Path) -> None:
    with refused(CheckpointError, tmp_path / "none.safetensors", "offspec distill"):
        ExitFile.open(tmp_path / "none.safetensors", files)
    (broken := tmp_path / "broken.safetensors").write_bytes(trained.path.read_bytes()[:200])
    with refused(CheckpointError, broken, "read"):
        ExitFile.open(broken, files)
    save_file({"a": torch.zeros(1)}, other := tmp_path / "other.safetensors")
    with refused(CheckpointError, other, "not an exit layer"):
        ExitFile.open(other, files)


@pytest.mark.parametrize("damaged", ["step-*/*.bin", "shard-*"])
def test_a_damaged_interrupted_run_is_one_line(
    damaged: str, engine: Engine, files: ModelFiles, interrupted: Path
) -> None:
    found = sorted(file for file in interrupted.parent.rglob("*") if fnmatch(str(file), f"*/{damaged}"))
    assert found
    for file in found:
        file.write_bytes(file.read_bytes()[:20])
    with refused(CheckpointError, "`resume`"):
        train(engine, files, interrupted, resume=True)


def test_a_full_disk_while_training_is_one_line(
    engine: Engine, files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **more: object) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    monkeypatch.setattr("accelerate.Accelerator.save_state", full)
    with refused(StorageError, "space"):
        train(engine, files, tmp_path / "exit.safetensors", BRIEF, checkpoint_every_s=0.0)


def test_a_disk_without_space_for_the_shards_is_said_before_they_are_made(
    engine: Engine, files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with refused(StorageError, "KiB", "`num_texts`"):
        train(engine, files, tmp_path / "exit.safetensors")
    assert not list(tmp_path.rglob("shard-*"))
