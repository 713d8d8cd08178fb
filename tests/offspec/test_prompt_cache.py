"""Prompts whose KV entries are in a file: the same text, and a clean miss for whatever else the file is."""

from __future__ import annotations

import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.checkpoints import kv_files
from offspec.checkpoints.atomic_files import locked_name
from offspec.checkpoints.kv_files import FORMAT
from offspec.drafts.self_draft import SelfDraft
from offspec.errors import UsageError
from offspec.model.early_exit import EarlyExit
from offspec.model.memory.kv_cache import KVLayout, plain_layers
from offspec.model.memory.sequence_cache import SequenceCache
from offspec.prompt_cache import PromptCache
from offspec.session import Session, entries_path

from ..killed import kill, killed
from ..machines import lanes
from ..pair import Pair, build_pair

PROMPT = [40 + (number * 7) % 90 for number in range(120)]
QUESTION = [*PROMPT[:100], *range(60, 80)]  # the same beginning, then another end
OLDER_FORMAT = b"offspec KV entries 0"
PARAMS = SamplingParams(7, ignore_eos=True, seed=3, temperature=1)
DRAFTS = SpeculationParams(budget=8)  # whatever passes take, so that the draft has entries, too


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def engine(pair: Pair) -> Iterator[Engine]:
    with loaded(pair) as engine:
        yield engine


def loaded(pair: Pair, **options: object) -> Engine:
    return Engine.load(str(pair.target), **{"draft": str(pair.draft), "device": "cpu", **options})


def answer(engine: Engine, file: Path | None, prompt: list[int]) -> tuple[list[int], int, list[str]]:
    """The answer's tokens, how many of the prompt's tokens were in the file, and what was told."""
    told = list[str]()
    source = engine if file is None else PromptCache(engine, file, told.append)
    steps = list(source.generate(prompt, PARAMS, DRAFTS))
    return (
        [token for step in steps for token in step.token_ids],
        len(prompt) - steps[-1].stats.num_prefilled_tokens,
        told,
    )


@pytest.mark.slow
def test_the_text_is_that_of_a_prompt_without_a_file(pair: Pair, tmp_path: Path) -> None:
    engine, other = (loaded(pair) for _ in range(2))
    file = tmp_path / "prompt.kv"
    for prompt, expected in ((PROMPT, 0), (PROMPT, len(PROMPT) - 1), (QUESTION, 100), ([*PROMPT, *QUESTION], 120)):
        plain, _, _ = answer(engine, None, prompt)
        found, cached, told = answer(engine, file, prompt)
        assert (found, cached) == (plain, expected)
        assert len(told) == 1 + (prompt == [*PROMPT, *QUESTION])  # read or written; the longer prompt is both
        engine, other = other, engine  # as another process
    assert answer(engine, file, [*PROMPT, *QUESTION])[1] == len(PROMPT) + len(QUESTION) - 1


@pytest.mark.slow
def test_a_file_of_another_model_dtype_or_draft_is_not_used(pair: Pair, engine: Engine, tmp_path: Path) -> None:
    file, other = tmp_path / "prompt.kv", Pair(tmp_path / "target", pair.draft)
    answer(engine, file, PROMPT)
    before = file.read_bytes()
    shutil.copytree(pair.target, other.target)
    weights = load_file(other.target / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][3, -1] += 0.5
    save_file(weights, other.target / "model.safetensors")
    for changed, word in (
        (loaded(other), "another model"),
        (loaded(pair, dtype="bf16"), "another dtype"),
        *([(loaded(pair, arithmetic="fast"), "another arithmetic")] if lanes() else []),
    ):
        file.write_bytes(before)
        found, cached, told = answer(changed, file, PROMPT)
        assert (found, cached) == (answer(changed, None, PROMPT)[0], 0)
        assert word in told[0]
        assert answer(changed, file, PROMPT)[1] == len(PROMPT) - 1  # it is this one's now
    file.write_bytes(before)
    assert answer(loaded(pair, draft="none"), file, PROMPT)[1] == len(PROMPT) - 1


def test_packed_entries_are_kept_as_they_are(pair: Pair, engine: Engine, tmp_path: Path) -> None:
    packed, file = loaded(pair, kv_cache="8"), tmp_path / "prompt.kv"
    plain, _, _ = answer(packed, None, PROMPT)
    assert answer(packed, file, PROMPT)[:2] == (plain, 0)
    assert answer(packed, file, PROMPT)[:2] == (plain, len(PROMPT) - 1)
    found, cached, told = answer(engine, file, PROMPT)
    assert (found, cached) == (answer(engine, None, PROMPT)[0], 0)
    assert "another KV format" in told[0]


def bit_flipped(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


def with_header(content: bytes, change: Callable[[bytes], bytes]) -> bytes:
    size = struct.unpack("<Q", content[:8])[0]
    header = change(content[8 : 8 + size])
    return struct.pack("<Q", len(header)) + header + content[8 + size :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[: len(content) * 2 // 3],
    "an entry": lambda content: bit_flipped(content, len(content) * 2 // 3),
    "another shape": lambda content: with_header(content, lambda h: h.replace(b"[2,2,120,8]", b"[2,2,8,120]")),
    "a version": lambda content: with_header(content, lambda h: h.replace(FORMAT.encode(), OLDER_FORMAT)),
    "empty": lambda content: b"",
}


@pytest.fixture(scope="module")
def written(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[int], bytes]:
    """An answer, and the file that it leaves."""
    file = tmp_path_factory.mktemp("written") / "prompt.kv"
    return answer(engine, file, PROMPT)[0], file.read_bytes()


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_ignored_with_one_note(
    engine: Engine, written: tuple[list[int], bytes], damage: str, tmp_path: Path
) -> None:
    file, (plain, whole) = tmp_path / "prompt.kv", written
    file.write_bytes(DAMAGES[damage](whole))
    assert file.read_bytes() != whole
    found, cached, told = answer(engine, file, PROMPT)
    assert (found, cached) == (plain, 0)
    assert [text for text in told if "is ignored" in text] == told[:1]
    assert "\n" not in told[0]
    assert file.read_bytes() == whole, "it is written again"


def test_what_is_no_such_file_is_not_overwritten(engine: Engine, tmp_path: Path) -> None:
    for content in (b"precious", (engine.plan and (Path(engine.name) / "model.safetensors").read_bytes()) or b""):
        file = tmp_path / "notes"
        file.write_bytes(content)
        with pytest.raises(UsageError, match="not overwritten"):
            PromptCache(engine, file)
        assert file.read_bytes() == content
    with pytest.raises(UsageError, match="cannot be read"):
        PromptCache(engine, tmp_path)


def test_it_is_written_by_one_process_and_only_where_there_is_room(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.kv"
    with locked_name(file, "locked"):
        assert "another process writes" in answer(engine, file, PROMPT)[2][0]
    assert not file.exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 5, 2**15))
    assert "free some space" in answer(engine, file, PROMPT)[2][0]
    monkeypatch.undo()
    assert "missing/prompt.kv cannot be written" in answer(engine, tmp_path / "missing" / "prompt.kv", PROMPT)[2][0]
    assert list(tmp_path.iterdir()) == []
    answer(engine, file, PROMPT)
    assert [path.name for path in tmp_path.iterdir()] == ["prompt.kv"]
    assert file.stat().st_mode & 0o077 == 0


def write_and_die(file: Path) -> None:
    """In the middle of its blocks."""
    cache = SequenceCache(plain_layers([KVLayout(2, 8)] * 2, torch.float32, torch.device("cpu")), torch.device("cpu"))
    cache.reserve(4000)
    cache.begin(4000)
    exactly, blocks = kv_files._bytes, list[Any]()

    def counted(block: Any) -> Any:
        blocks.append(block)
        if len(blocks) == 3:
            kill()
        return exactly(block)

    kv_files._bytes = counted
    parts = {"target": kv_files.CachePart(kv_files.Owner("model", "float32", "", cache.format), cache, 4000)}
    kv_files.write_kv_file(file, range(4000), parts)


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_after_a_kill_in_the_middle_of_writing_the_file_is_as_before(engine: Engine, tmp_path: Path) -> None:
    file, part = tmp_path / "prompt.kv", tmp_path / ".prompt.kv.part"
    answer(engine, file, PROMPT)
    killed(lambda: write_and_die(file))
    assert part.stat().st_size > 0
    _, cached, told = answer(engine, file, PROMPT)
    assert cached == len(PROMPT) - 1
    assert not any("ignored" in text for text in told)
    answer(engine, file, [*QUESTION, *PROMPT])
    assert not part.exists()


def test_an_early_exit_keeps_none(engine: Engine, tmp_path: Path) -> None:
    with engine.target.weights.layer(0) as layer:
        draft = SelfDraft(EarlyExit(engine.target, 1, dict(layer)))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="early exit"):
        PromptCache(engine.with_draft(draft), tmp_path / "prompt.kv")
    told = list[str]()
    session = Session(engine.with_draft(draft), notify=told.append)
    list(session.reply("def area(width, height):", PARAMS))
    session.save_entries(tmp_path / "talk.json")  # the conversation itself is saved without them
    assert len(told) == 1
    assert "not kept" in told[0]


def test_a_saved_conversation_is_not_scored_again(pair: Pair, engine: Engine, tmp_path: Path) -> None:
    file, told = tmp_path / "talk.json", list[str]()
    session = Session(engine, notify=told.append)
    for message in ("def area(width, height):", "for item in self.items:"):
        list(session.reply(message, PARAMS))
    session.save(file, {})
    session.save_entries(file)
    assert entries_path(file).name == "talk.json.kv"
    assert "KiB" in told[-1]
    replies = list[str]()
    for entries in (True, False):
        if not entries:
            entries_path(file).unlink()
        other = Session(loaded(pair), notify=told.append)
        other.load(file)
        last = list(other.reply("print(", PARAMS))[-1]
        assert (last.stats.num_prefilled_tokens < 30) == entries
        replies.append(other.turns[-1].reply)
    assert replies[0] == replies[1]


def test_entries_of_16_bits_come_back_bit_by_bit(pair: Pair, tmp_path: Path) -> None:
    """bf16 entries, which numpy has no type for."""
    engine, file = loaded(pair, dtype="bf16"), tmp_path / "prompt.kv"
    answer(engine, file, PROMPT)
    caches = engine.new_caches()
    PromptCache(engine, file).read(caches, PROMPT)
    expected = engine.new_caches()
    list(engine.generate(PROMPT, PARAMS, caches=expected))
    for found, scored in zip(caches.target.cache.stored(119), expected.target.cache.stored(119), strict=True):
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, scored)
