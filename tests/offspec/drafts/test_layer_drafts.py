"""Shadows: the text is plain decoding's, the KV cache is shared, memory is as planned."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.checkpoints.load import WeightSettings, load_decoder
from offspec.checkpoints.model_files import ModelFiles
from offspec.checkpoints.opening import open_model
from offspec.checkpoints.shadows import Shadow, find_shadow, made_shadows, make_shadow, shadow_folder
from offspec.drafts.base import Choice, DraftOptions, OpenRequest
from offspec.drafts.kinds import open_draft
from offspec.drafts.layer_drafts import LESS_READ, ROWS_IN_RAM, LayersOfTarget, OpenedShadow
from offspec.drafts.without_model import LookupDraft
from offspec.errors import CheckpointError, OffspecError, UsageError
from offspec.loaded_target import LoadedTarget
from offspec.loaders.files.safetensors_folder import INDEX_FILE, UNFINISHED_MARKER
from offspec.loaders.streaming.link import CopyStream
from offspec.loaders.streaming.placement import SHADOW_ITEM, Limits, Placement, Slots, places_of
from offspec.model.layer_draft import LayerDraft, LayerDraftText, WindowOfTarget
from offspec.model.memory.chunk_attention import CHUNK, NUM_SINKS, positions_of
from offspec.model.memory.draft_window import LEAST_WINDOW, most_entries
from offspec.model.memory.kv_formats import EIGHT_BIT, PLAIN, KVFormat
from offspec.model.memory.kv_in_ram import EntriesInRam
from offspec.notes import Note
from offspec.planning.memory import MemoryOptions, Reservation
from offspec.planning.plan import make_plan
from offspec.scheduler.trees.token_tree import TokenTree
from offspec.scheduler.trees.verify import Verdict
from offspec.text.tokenizer import Tokenizer

from ...killed import kill, killed
from ...pair import build_pair
from ...refusals import refused
from ..model.memory.test_shared_cache import CopyingText

CPU = torch.device("cpu")
NUM_LAYERS, RESIDENT = 4, (0, 2)
PROMPTS = ("def area(", "import os\n", "x = 1\nx = 1\nx = 1\n")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pair(tmp_path_factory.mktemp("deep"), NUM_LAYERS).target


@pytest.fixture(scope="module")
def files(folder: Path) -> ModelFiles:
    return open_model(folder, "fp32", [])


@pytest.fixture(scope="module")
def long_files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    """A target for long texts."""
    folder = build_pair(tmp_path_factory.mktemp("long"), NUM_LAYERS, max_position_embeddings=512).target
    return open_model(folder, "fp32", [])


@contextmanager
def opened(
    files: ModelFiles, draft: str, resident: tuple[int, ...] = RESIDENT, window: int | None = None
) -> Iterator[Engine]:
    """A target of which these layers stay and the others come from disk, and this draft of it."""
    tokenizer = Tokenizer.load(files.checkpoint.path)
    found = open_draft("target", OpenRequest(DraftOptions(draft, draft_window=window), files, tokenizer, "fp32", []))
    slot = max(layer.cost(files.dtype).slot_bytes for layer in files.stored.layers)
    places = places_of(resident=resident, on_disk=(i for i in range(NUM_LAYERS) if i not in resident))
    placement = Placement(places, Slots(2, 0, slot), (), Limits(None, 0), 0, 0)
    decoder = load_decoder(files, placement, CPU, WeightSettings(has_far_embedding=True))
    with Engine(LoadedTarget(decoder), tokenizer, found.load(CPU)(decoder)) as engine:
        yield engine


def said(engine: Engine, budget: int | None, **more: bool) -> list[list[int]]:
    params = SamplingParams(10, temperature=1.0, seed=3, ignore_eos=True)
    speculation = SpeculationParams(budget, **more)
    return [
        [token for step in engine.generate(prompt, params, speculation) for token in step.token_ids]
        for prompt in PROMPTS
    ]


@pytest.mark.slow
def test_the_text_is_plain_decodings(files: ModelFiles) -> None:
    """However it drafts; `test_texts` has shadows of 4 bits, placements and greedy texts."""
    with opened(files, "shadow:2") as engine:
        assert isinstance(engine.draft, LayersOfTarget)
        plain = said(engine, 0)
        assert said(engine, 16, overlap=False, reuse=False) == plain
        assert said(engine, None, recall=False, recycling=True) == plain


def conversation(engine: Engine) -> list[tuple[list[int], list[int], list[int]]]:
    """Three requests on the same caches, the last one from an earlier place: of each pass, its tree and its verdict."""
    caches, passes = engine.new_caches(), []

    def note(tree: TokenTree, verdict: Verdict) -> None:
        passes.append((tree.tokens.tolist(), tree.parents.tolist(), verdict.tokens))

    for prompt in (PROMPTS[2], PROMPTS[2] + "y = 2\n", PROMPTS[2][:6] + "z"):
        params = SamplingParams(10, temperature=1.0, seed=5, ignore_eos=True)
        speculation = SpeculationParams(16, overlap=False)
        assert sum(1 for _ in engine.generate(prompt, params, speculation, caches=caches, observer=note)) > 1
    return passes


@pytest.mark.slow
def test_trees_are_those_of_a_cache_of_its_own(files: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(files, "shadow:2") as engine:
        shared = conversation(engine)
    monkeypatch.setattr("offspec.drafts.layer_drafts.LayerDraftText", CopyingText)
    with opened(files, "shadow:2") as engine:
        assert shared == conversation(engine)


@pytest.mark.slow
def test_a_window_has_the_targets_first_last_and_chosen_entries(long_files: ModelFiles) -> None:
    """The text is plain decoding's; behind a pass, all entries but that of the last token are the target's."""
    with opened(long_files, "shadow", window=LEAST_WINDOW) as engine:
        prompt, caches, num_dropped = engine.encode(PROMPTS[0] * 24), engine.new_caches(), set[int]()
        chosen = set[int]()
        target, draft, text = caches.target, caches.draft, list[int]()
        assert isinstance(draft, WindowOfTarget)
        for length, num_tokens in ((len(prompt), 72), (len(prompt) - 9, 8)):  # the second text goes back
            params, text = SamplingParams(num_tokens, seed=3, ignore_eos=True), []
            for step in engine.generate(prompt[:length], params, SpeculationParams(16), caches=caches):
                text += step.token_ids
                num_dropped.add(draft.cache.num_dropped)
                kept = min(draft.length, target.length) - draft.cache.num_dropped
                assert LEAST_WINDOW < kept <= most_entries(LEAST_WINDOW)
                first = target.length - (kept - NUM_SINKS - LEAST_WINDOW // 2)  # of the last entries
                for layer, chunks in enumerate(draft.chunks):
                    assert len(set(chunks)) == LEAST_WINDOW // 2 // CHUNK
                    chosen.update(chunks)
                    where = [position for chunk in chunks for position in range(target.length)[positions_of(chunk)]]
                    assert len(where) == LEAST_WINDOW // 2
                    assert max(where) < first
                    places = [*range(NUM_SINKS), *where, *range(first, target.length)]
                    exact = target.cache.read(layer, target.length)
                    for mine, others in zip(draft.cache.read(layer, kept), exact, strict=True):
                        assert torch.equal(mine, others[:, places])
            plain = engine.generate(prompt[:length], params, SpeculationParams(0))
            assert text == [token for step in plain for token in step.token_ids]
        assert len(num_dropped) > 2
        assert len(chosen) > LEAST_WINDOW // 2 // CHUNK, "others than the first chunks"
        assert draft.cache.capacity == most_entries(LEAST_WINDOW) + LESS_READ + ROWS_IN_RAM


@pytest.mark.parametrize("kv", [PLAIN, EIGHT_BIT], ids=str)
def test_a_window_copies_entries_from_ram(long_files: ModelFiles, kv: KVFormat) -> None:
    """As the target stores them, to the bit."""
    with opened(long_files, "shadow", window=LEAST_WINDOW) as engine:
        target, windows = engine.target, list[list[torch.Tensor]]()
        target.make_layer_caches = kv.layers
        assert isinstance(engine.draft.decoder, LayerDraft)
        engine.draft.decoder.make_layer_caches = kv.layers
        for entries_in_ram in (None, EntriesInRam(frozenset(range(NUM_LAYERS)), kv, CopyStream(CPU))):
            target.entries_in_ram = entries_in_ram
            caches, nothing = engine.new_caches(), TokenTree.empty()
            caches.target.score([3 + i % 7 for i in range(200)], nothing.tokens, nothing.depths, nothing.parents)
            assert isinstance(caches.draft, WindowOfTarget)
            caches.draft.begin(16)
            windows.append([rows.clone() for rows in caches.draft.cache.stored(caches.draft.cache.length)])
        assert all(torch.equal(one, other) for one, other in zip(*windows, strict=True))


@pytest.mark.parametrize(("length", "read"), [(LESS_READ, {0, 1, LESS_READ}), (65, {0, 1})])
def test_a_long_prompt_is_left_to_the_target(
    files: ModelFiles, length: int, read: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = set[int]()
    whole = LayerDraftText.states

    def states(self: LayerDraftText, chain: list[int], *rest: object, **more: object) -> torch.Tensor:
        chains.add(len(chain))
        return whole(self, chain, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(LayerDraftText, "states", states)
    with opened(files, "shadow") as engine:
        for _ in engine.generate(
            [3 + i % 7 for i in range(length)], SamplingParams(12), SpeculationParams(8, lookup=False)
        ):
            pass
    assert chains == read


@pytest.mark.slow
def test_a_shadow_is_accepted_more_often_than_the_built_in_draft() -> None:
    """11 and 5 tokens per pass on the held-out prompts, whatever the CPU rounds."""
    passes = {}
    for draft in ("shadow", "builtin"):
        with Engine.load("builtin", draft=draft, device="cpu", context=256) as engine:
            params = SamplingParams(10, temperature=1.0, seed=1, ignore_eos=True)
            *_, last = engine.generate("def area(width, height):\n", params, SpeculationParams(16, overlap=False))
            passes[draft] = last.stats.num_passes
    assert passes["shadow"] < passes["builtin"]


def test_room_is_made_once_for_a_whole_request(files: ModelFiles) -> None:
    """However much is drafted, also during the pass: on a GPU the cache must not grow then."""
    with opened(files, "shadow") as engine:
        caches = engine.new_caches()
        assert caches.draft is not None
        capacities = set[int]()
        params = SamplingParams(14, ignore_eos=True)
        for _ in engine.generate(PROMPTS[0], params, SpeculationParams(256), caches=caches):
            capacities.add(caches.draft.cache.capacity)
        assert capacities == {len(engine.encode(PROMPTS[0])) + 14 + 256 + LESS_READ + ROWS_IN_RAM}


# ---------------------------------------------------------------------------------------------------------- files


def test_a_shadow_is_made_once(files: ModelFiles) -> None:
    with opened(files, "shadow:4"):
        pass
    shadow = find_shadow(files, 4)
    assert shadow is not None
    made = {path: path.stat().st_mtime_ns for path in shadow_folder(files, 4).iterdir()}
    with opened(files, "shadow"):
        pass
    assert {path: path.stat().st_mtime_ns for path in shadow_folder(files, 4).iterdir()} == made
    assert 4 in made_shadows(files)
    for size, planned in zip(shadow.layer_bytes(files), Shadow.planned(4, files).layer_bytes(files), strict=True):
        assert abs(size - planned) < 4096  # how tensors are aligned


def test_killed_it_is_resumed_to_the_same_bytes(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a part of the weights; until then nothing looks like a shadow."""
    make_shadow(files, 3, tmp_path / "whole")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    killed(lambda: make_shadow(files, 3, progress=lambda done, total: kill() if done > 0.6 * total else None))
    folder = shadow_folder(files, 3)
    assert any(folder.glob("*.safetensors*"))
    assert (made_shadows(files), find_shadow(files, 3)) == ([], None)
    with pytest.raises(OffspecError, match="unfinished"):
        Shadow.open(folder, files)
    assert make_shadow(files, 3).num_resumed > 0
    for path in (tmp_path / "whole").iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()
    assert len(list(folder.iterdir())) == len(list((tmp_path / "whole").iterdir()))


def cut_layer(folder: Path) -> None:
    layer = min(folder.glob("*.safetensors"))
    layer.write_bytes(layer.read_bytes()[:5000])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no index": lambda folder: (folder / INDEX_FILE).unlink(),
    "another's config": lambda folder: (folder / "config.json").write_text("{}"),
    "layer": cut_layer,
}


@pytest.fixture(scope="module")
def sound_cache(files: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's cache with a shadow of 3 bits."""
    cache = tmp_path_factory.mktemp("sound")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        make_shadow(files, 3)
    return cache


@pytest.fixture
def own_shadow(files: ModelFiles, sound_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a copy of that shadow in this test's cache."""
    shutil.copytree(sound_cache, tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return shadow_folder(files, 3)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shadow_in_the_cache(damage: str, files: ModelFiles, own_shadow: Path) -> None:
    """Nobody asked for an automatic one: it is left out. A named one is made again. Both are told."""
    sound = contents(own_shadow)
    DAMAGES[damage](own_shadow)
    request = OpenRequest(DraftOptions(), files, Tokenizer.load(files.checkpoint.path), "fp32", [])
    assert isinstance(open_draft("target", request), LookupDraft)
    told = [note.text for note in request.notes]
    assert sum("damaged" in text and "left out" in text for text in told) == 1
    assert not any("download" in text for text in told)
    named = replace(request, options=DraftOptions("shadow:3"), notes=[])
    assert isinstance(open_draft("target", named), OpenedShadow)
    assert [all(word in note.text for word in ("made", "3", "damaged")) for note in named.notes] == [True]
    assert contents(own_shadow) == sound


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_unfinished_shadow_of_other_weights_is_replaced(files: ModelFiles, own_shadow: Path) -> None:
    """As after a `touch` of the target's files, or an update."""
    sound = contents(own_shadow)
    (own_shadow / INDEX_FILE).unlink()
    (own_shadow / UNFINISHED_MARKER).write_text('{"source": "another"}')
    assert make_shadow(files, 3).num_resumed == 0
    assert contents(own_shadow) == sound


def test_two_processes_that_need_one_shadow(files: ModelFiles, own_shadow: Path) -> None:
    """The second one waits, and takes what the first one made."""
    shutil.rmtree(own_shadow)
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(lambda _: make_shadow(files, 3), range(2)))
    assert sorted(each.num_resumed for each in made) == [0, made[0].num_files]
    assert find_shadow(files, 3) is not None
    assert [path.name for path in own_shadow.parent.iterdir()] == [own_shadow.name]


def test_the_shadow_of_another_model_is_refused(files: ModelFiles, tmp_path: Path) -> None:
    other = build_pair(tmp_path, 2).target
    make_shadow(open_model(other, "fp32", []), 4, tmp_path / "other")
    for path in (tmp_path / "other", other):
        with refused(CheckpointError, path, "--shadow"):
            Shadow.open(path, files)


def test_drafts_that_cannot_be_made(files: ModelFiles) -> None:
    tokenizer = Tokenizer.load(files.checkpoint.path)
    for options, flag in (
        (DraftOptions("shadow:5"), "bits"),
        (DraftOptions("shadow", exit_layer=2), "`exit_layer=2`"),
        (DraftOptions("shadow:4", learn=True), "learn"),
        (DraftOptions("self", exit_layer=NUM_LAYERS), f"`exit_layer={NUM_LAYERS}`"),
        (DraftOptions("self", exit_layer=1, exit_file=Path("x")), "`exit_file`"),
    ):
        with refused(UsageError, flag):
            open_draft("target", OpenRequest(options, files, tokenizer, "fp32", []))


def test_auto_takes_the_faster_of_lookup_and_a_made_shadow(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokenizer = Tokenizer.load(files.checkpoint.path)

    def opened_by(rates: dict[str, float]) -> tuple[object, str]:
        notes, best = list[Note](), sorted(rates, key=lambda name: -rates[name])
        ordered = {name: rates[name] for name in best}

        def choose(names: Sequence[str], others: Sequence[str]) -> Choice:
            assert others == ["shadow:4"]
            return Choice(next(name for name in best if name in names), ordered)

        request = OpenRequest(DraftOptions(), files, tokenizer, "fp32", notes, choose=choose)
        return open_draft("target", request), notes[-1].text

    made_none, text = opened_by({"lookup": 1.0, "shadow:4": 2.5})
    assert isinstance(made_none, LookupDraft)
    assert "`draft=shadow`" in text
    assert "2.5 tokens/s in place of 1" in text
    _, text = opened_by({"lookup": 3.0, "shadow:4": 2.5})
    assert "draft=shadow" not in text
    make_shadow(files, 3)
    assert isinstance(opened_by({"lookup": 1.0, "shadow:3": 2.5, "shadow:4": 3.0})[0], OpenedShadow)
    slow, text = opened_by({"lookup": 3.0, "shadow:3": 2.5, "shadow:4": 2.0})
    assert isinstance(slow, LookupDraft)
    assert "faster than a shadow" in text


# --------------------------------------------------------------------------------------------------------- memory


def test_a_window_takes_memory_of_its_own_alone(files: ModelFiles) -> None:
    """Whatever the context, and the target's entries may be in RAM."""
    options = DraftOptions("shadow", draft_window=LEAST_WINDOW)
    opened = open_draft("target", OpenRequest(options, files, None, "fp32", []))
    short, long = (opened.memory_use(files, Reservation(context, 16)) for context in (64, 4096))
    assert sum(item.on_device for item in short.items) == sum(item.on_device for item in long.items)
    assert (long.reads_all_entries, long.target_entries) == (False, 0)
    with refused(UsageError, "`draft_window=8`"):
        open_draft("target", OpenRequest(replace(options, draft_window=8), files, None, "fp32", []))


def open_shadow(files: ModelFiles) -> OpenedShadow:
    return OpenedShadow.open(OpenRequest(DraftOptions("shadow"), files, None, "fp32", []))


def test_only_streamed_layers_have_a_shadow(files: ModelFiles) -> None:
    """For every amount of memory: the items and the resident layers add up, and streamed layers alone are copied."""
    feature, sizes = open_shadow(files), open_shadow(files).shadow.layer_bytes(files)
    options, seen = MemoryOptions(context=64), set[int]()
    enough = make_plan(files, [feature], Limits(None, 2**40), options, 0)
    least = enough.placement.ram_bytes - sum(layer.resident_bytes for layer in enough.layers)
    for ram in range(least - 2**18, enough.placement.ram_bytes + 2**15, 2**15):
        try:
            placement = make_plan(files, [feature], Limits(None, ram), options, 0).placement
        except OffspecError:
            continue
        shadow = sum(item.on_device for item in placement.items if item.name == SHADOW_ITEM)
        if placement.streamed:
            assert shadow == sum(sizes[i] for i in placement.streamed)
        else:
            assert shadow in (0, sum(sizes))
        kept = sum(enough.layers[i].resident_bytes for i in placement.resident)
        items = sum(item.on_device + item.on_host for item in placement.items)
        assert placement.ram_bytes == kept + items + placement.slots.num * placement.slots.nbytes <= ram
        seen.add(len(placement.streamed))
    assert {0, NUM_LAYERS} <= seen
