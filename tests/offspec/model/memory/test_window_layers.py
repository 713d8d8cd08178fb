"""Layers with a window that drop KV entries outside of it, beside the same texts with all entries."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.checkpoints.model_files import ModelFiles
from offspec.checkpoints.opening import open_model
from offspec.drafts.model_draft import ModelDraft
from offspec.drafts.without_model import LookupDraft, NoDraft
from offspec.errors import UsageError
from offspec.loaded_target import LoadedTarget
from offspec.loaders.streaming.link import CopyStream
from offspec.loaders.streaming.placement import KV_ITEM, WINDOWS_ITEM, Limits
from offspec.model.block import memory_bytes
from offspec.model.config import read_config
from offspec.model.cuda_graphs import TreeGraphs
from offspec.model.decoder import CachedDecoder, Decoder, score_together
from offspec.model.memory import window_layers
from offspec.model.memory.kv_formats import EIGHT_BIT, PLAIN, KVFormat
from offspec.model.memory.kv_in_ram import EntriesInRam, LayersInRam
from offspec.model.memory.request_caches import RequestCaches
from offspec.model.memory.sequence_cache import SequenceCache
from offspec.model.memory.text_pool import TextPool
from offspec.model.memory.window_layers import WindowLayers, most_pending, most_rows
from offspec.model.parts.kv_attention import Visibility
from offspec.model.pass_rows import TextRows
from offspec.model.row_attention import moved_to, visible_slots
from offspec.planning.memory import MemoryOptions, MemoryUse, Reservation
from offspec.planning.plan import make_plan
from offspec.planning.report import explain_plan
from offspec.prompt_cache import PromptCache
from offspec.running.kv_reservation import PlannedEntries
from offspec.text.tokenizer import Tokenizer

from .... import pretended_rows
from ....fakes import CPU, FAMILIES, VOCAB_SIZE, TinyModel, config_json
from ....pair import build_pair
from ....refusals import refused
from ..families.test_families import perturbed, streamed
from ..test_decoder import NO_NODES, Tree, assert_close, chain_logits, random_tokens
from ..test_exact_rows import exact_decoder

GetModel = Callable[[str], TinyModel]
WINDOWED = ["mistral-window", "gemma2", "gpt-oss"]
ROWS, WHOLE, NODES = 64, 16, 8


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text's entries go round and round."""
    for name, number in (("WHOLE", WHOLE), ("CUT", 6), ("CHUNK_ROWS", 8), ("MAX_NODES", NODES)):
        monkeypatch.setattr(window_layers, name, number)
    monkeypatch.setattr("offspec.model.pass_rows.CHUNK_ROWS", 8)
    assert most_rows(9) == ROWS


def forgetting(decoder: Decoder) -> Decoder:
    decoder.forgets = True
    return decoder


def random_tree(chance: random.Random, size: int) -> Tree:
    return Tree([chance.randrange(VOCAB_SIZE) for _ in range(size)], [chance.randrange(-1, i) for i in range(size)])


def live(texts: list[CachedDecoder], seed: int, num_passes: int) -> list[list[Tensor]]:
    """Logits of all passes of equal texts: chains, trees in two rounds, verdicts that skip nodes."""
    chance, passes = random.Random(seed), list[list[Tensor]]()
    for _ in range(num_passes):
        chain, tree = random_tokens(chance.choice((1, 30, 37)), chance.randrange(10**6)), random_tree(chance, NODES)
        cut, path = chance.randrange(1, NODES), tree.path(chance.randrange(NODES))
        for arguments in ((chain, *tree.round(0, cut)), ([], *tree.round(cut, NODES))):
            passes.append([text.score(*arguments) for text in texts])
        for text in texts:
            text.keep(path)
    return passes


@pytest.mark.each_value
@pytest.mark.parametrize("kv", [PLAIN, EIGHT_BIT], ids=lambda kv: kv.name)
@pytest.mark.parametrize("family", WINDOWED)
def test_logits_are_those_of_all_entries(tiny_model: GetModel, family: str, kv: KVFormat) -> None:
    decoder = tiny_model(family).decoder(torch.float32 if kv.is_plain else torch.float64)
    decoder.make_layer_caches = kv.layers
    texts = [CachedDecoder(forgetting(decoder)), CachedDecoder(decoder, keeps_all=True)]
    for logits, expected in live(texts, 1, 7):
        assert_close(logits, expected)
    assert texts[0].length > 2 * ROWS
    assert texts[0].cache.nbytes < texts[1].cache.nbytes


@pytest.mark.parametrize(("family", "kv"), [("gemma2", "8")])
def test_exact_rows_have_the_same_bits(family: str, kv: str) -> None:
    """In passes that two texts share, too."""
    decoder = exact_decoder(read_config(config_json(FAMILIES[family])), torch.bfloat16, kv)
    texts = [CachedDecoder(forgetting(decoder)), CachedDecoder(decoder, keeps_all=True)]
    assert all(torch.equal(logits, expected) for logits, expected in live(texts, 2, 4))
    rows = TextRows(random_tokens(7), *random_tree(random.Random(3), NODES).round(0, NODES))
    together = score_together([(texts[0], rows), (CachedDecoder(decoder), rows)])
    (alone,) = score_together([(texts[1], rows)])
    assert all(torch.equal(together[0][row], alone[row]) for row in range(NODES + 1))


def test_a_gpus_kernel_gets_slots_that_count_from_the_first_key() -> None:
    start = 70
    visibility = Visibility(start, torch.arange(start, start + 8), torch.arange(start + 8), np.arange(-1, 4), 5)
    visible = visible_slots(visibility, 0, 8, 9, 2)
    queries, (keys, values) = torch.randn(8, 4, 16), torch.randn(2, 2, visible.end, 16)
    expected = pretended_rows.attend(queries, keys, values, visible.rows, visible.slots, scale=1.0)
    assert visible.begin == 32
    rows, slots = moved_to(visible, CPU).from_begin.moved[CPU]
    assert_close(pretended_rows.attend(queries, keys[:, 32:], values[:, 32:], rows, slots, scale=1.0), expected)


@pytest.mark.parametrize("length", [71, 70])
def test_a_rewound_text_is_read_again_if_entries_are_missing(tiny_model: GetModel, length: int) -> None:
    decoder, tokens = forgetting(tiny_model("gemma2").decoder()), random_tokens(130)
    caches = RequestCaches(CachedDecoder(decoder), None)
    caches.target.score(tokens[:101], *NO_NODES)
    caches.text = tokens[:101]
    changed = [*tokens[:length], 1, 2]
    num_new = caches.rewind(changed)
    assert num_new == (2 if length > 70 else length + 2)
    assert_close(caches.target.score(changed[-num_new:], *NO_NODES)[0], chain_logits(decoder, changed)[-1])


def test_an_interrupted_prompt_is_read_again(tiny_model: GetModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first layers had overwritten what the text needs."""
    decoder, tokens = forgetting(tiny_model("gemma2").decoder()), random_tokens(180)
    caches = RequestCaches(CachedDecoder(decoder), None)
    caches.target.score(tokens[:60], *NO_NODES)
    caches.text = tokens[:60]
    with monkeypatch.context() as patch:
        patch.setattr(decoder.blocks[-1], "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            caches.target.score(tokens[60:], *NO_NODES)
    assert caches.rewind(tokens) == len(tokens)
    assert_close(caches.target.score(tokens, *NO_NODES)[0], chain_logits(decoder, tokens)[-1])


def interrupt(*args: object) -> Tensor:
    raise KeyboardInterrupt


@pytest.mark.parametrize("num_entries", [30, 200])
def test_bytes_are_those_that_plans_count(tiny_model: GetModel, num_entries: int) -> None:
    decoder = forgetting(tiny_model("gemma2").decoder())
    text = CachedDecoder(decoder, num_entries)
    assert text.cache.nbytes == memory_bytes(decoder.config, num_entries, 4, forgets=True)
    whole = memory_bytes(decoder.config, num_entries, 4)
    assert text.cache.nbytes == (whole if num_entries <= ROWS else whole * (ROWS + num_entries) // (2 * num_entries))
    text.score(random_tokens(20), *NO_NODES)
    text.cache.shrink()
    assert text.cache.nbytes == memory_bytes(decoder.config, 20, 4, forgets=True)
    assert most_pending(9) >= NODES


def test_entries_of_layers_that_keep_all_may_lie_in_ram(tiny_model: GetModel) -> None:
    decoder = tiny_model("gemma2").decoder()
    decoder.entries_in_ram = EntriesInRam(frozenset(range(decoder.config.num_layers)), PLAIN, CopyStream(CPU))
    texts = [CachedDecoder(forgetting(decoder)), CachedDecoder(decoder, keeps_all=True)]
    kinds = {type(texts[0].cache.kv_of(layer)[0]) for layer in range(decoder.config.num_layers)}
    assert kinds == {WindowLayers, LayersInRam}
    for logits, expected in live(texts, 3, 5):
        assert_close(logits, expected)


# ------------------------------------------------------------------------------------------------ whole requests


PROMPTS = [random_tokens(count, seed) for seed, count in enumerate((90, 40, 12))]
SHORT = SamplingParams(4, ignore_eos=True)
LONG = {"sliding_window": 9, "max_position_embeddings": 4096}
GREEDY, SAMPLED = (SamplingParams(12, temperature=temperature, seed=1, ignore_eos=True) for temperature in (0.0, 1.0))
PLAINLY, TREES = SpeculationParams(0), SpeculationParams(NODES)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(build_pair(tmp_path_factory.mktemp("pair")).target)


def answer(engine: Engine, params: SamplingParams, prompt: list[int], caches: RequestCaches | None = None) -> list[int]:
    steps = engine.generate(prompt, params, TREES, caches=caches)
    return [token for step in steps for token in step.token_ids]


def plain_answer(decoder: Decoder, tokenizer: Tokenizer, params: SamplingParams, prompt: list[int]) -> list[int]:
    """Plain decoding with all entries."""
    decoder.forgets = False
    engine = Engine(LoadedTarget(decoder), tokenizer, NoDraft())
    return [token for step in engine.generate(prompt, params, PLAINLY) for token in step.token_ids]


@pytest.mark.parametrize("family", ["gemma2", pytest.param("gpt-oss", marks=pytest.mark.nightly)])
def test_texts_are_plain_decodings(tiny_model: GetModel, tokenizer: Tokenizer, family: str) -> None:
    """Streamed, in shared passes."""
    model = tiny_model(family)
    expected = [plain_answer(model.decoder(), tokenizer, SAMPLED, prompt) for prompt in PROMPTS]
    answers = [list[int]() for _ in PROMPTS]
    with closing(LoadedTarget(forgetting(streamed(model.folder)))) as from_disk:
        engine = Engine(from_disk, tokenizer, ModelDraft(perturbed(model.decoder()), "draft"))
        for number, step in engine.generate_many(PROMPTS, SAMPLED, TREES):
            answers[number] += step.token_ids
    assert answers == expected


def test_a_conversation_goes_back_on_and_into_other_caches(tiny_model: GetModel, tokenizer: Tokenizer) -> None:
    """An answer given anew, an earlier place, a text that was parked, and one that begins as a running one does."""
    model = tiny_model("gemma2")
    engine = Engine(LoadedTarget(forgetting(model.decoder())), tokenizer, LookupDraft())
    pool = TextPool(engine.new_caches, 2**30)

    def check(prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
        caches = pool.borrow(prompt)
        tokens = answer(engine, params, prompt, caches)
        assert tokens == plain_answer(model.decoder(), tokenizer, params, prompt)
        pool.give_back(caches)
        return tokens

    tokens = check(PROMPTS[0])
    assert check(PROMPTS[0], SAMPLED) != tokens
    longer = [*PROMPTS[0], *tokens[:-2], 5, 6]
    again = [*longer, *check(longer), 7]
    check(PROMPTS[1])
    assert pool.num_parked
    running = pool.borrow([*again[:-4], 8, 9])
    assert running.target.length == len(again) - 4
    check([*longer, 9])


def test_a_prompts_entries_are_kept_in_a_file(tmp_path: Path) -> None:
    """For the same prompt, and for one that begins with all of it; a shorter text serves any beginning."""
    pair = build_pair(tmp_path, model_type="mistral", sliding_window=9, max_position_embeddings=256)
    with Engine.load(str(pair.target), draft="lookup", device="cpu", dtype="fp32") as engine:
        assert engine.target.forgets
        for long, reused in (([7] * 5 + PROMPTS[0], [0, 94, 94, 91]), (PROMPTS[2] * 3, [0, 35, 36, 32])):
            told, prompts = list[int](), (long, long, [*long, 3, 4], [*long[:-4], 3, 4])
            for prompt in prompts:
                caches = engine.new_caches()
                told.append(PromptCache(engine, tmp_path / f"{len(long)}.kv").read(caches, prompt))
                steps = PromptCache(engine, tmp_path / f"{len(long)}.kv").generate(prompt, SHORT, TREES)
                tokens = [token for step in steps for token in step.token_ids]
                assert tokens == [t for step in engine.generate(prompt, SHORT, PLAINLY) for t in step.token_ids]
            assert told == reused


def test_plans_count_what_windows_keep(tmp_path: Path) -> None:
    """Beside texts that share passes, too; a draft that reads the target's entries needs all of them."""
    target = open_model(build_pair(tmp_path, model_type="mistral", **LONG).target, "fp32", [])
    limits, entry = Limits(None, 2**30), target.kv_bytes(1)
    options = MemoryOptions(context=4000, kv_cache="16")
    plan = make_plan(target, (), limits, options, 0)
    assert plan.window_rows == ROWS
    assert {item.name: item.on_device for item in plan.placement.items}[WINDOWS_ITEM] == ROWS * entry
    assert any("64 KV entries" in note.text for note in explain_plan(plan))
    shared = PlannedEntries.by(plan.with_texts(3))
    assert (shared.of_windows, shared.entries) == (3 * ROWS, plan.with_texts(3).kv_entries)
    texts = [SequenceCache([], CPU) for _ in range(2)]
    for text in texts:
        text.reserve(100)
    assert shared.holds(texts, 5000)
    assert not shared.holds([*texts, texts[0]], 5000)
    assert shared.holds([*texts, texts[0]], 5000, now=100)
    with_draft = make_plan(target, (ReadsEntries(),), limits, options, 0)
    assert {item.name: item.on_device for item in with_draft.placement.items}[KV_ITEM] > 4000 * entry


class ReadsEntries:
    def memory_use(self, target: ModelFiles, room: Reservation) -> MemoryUse:
        return MemoryUse(target_entries=100)


def test_a_draft_keeps_all_entries(tiny_model: GetModel) -> None:
    """Its rounds have static shapes, and its own window drops entries by moving others."""
    decoder = forgetting(tiny_model("gemma2").decoder())
    for text in (TreeGraphs(decoder, 100).text(100), ModelDraft(decoder, "draft").new_text(100)):
        assert isinstance(text, CachedDecoder)
        assert not any(isinstance(text.cache.kv_of(layer)[0], WindowLayers) for layer in range(2))


def test_a_tree_that_is_too_large_for_the_entries_is_refused(tiny_model: GetModel, tokenizer: Tokenizer) -> None:
    engine = Engine(LoadedTarget(forgetting(tiny_model("gemma2").decoder())), tokenizer, LookupDraft())
    with refused(UsageError, "48 nodes", f"at most {most_pending(8)}"):
        engine.generate([1, 2], GREEDY, SpeculationParams(48))
