"""Drafts are compared by plans alone: what is chosen brings the most tokens/s of what can be used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from offspec.checkpoints.model_files import ModelFiles
from offspec.checkpoints.opening import AUTO_ON_GPU, model_to_plan
from offspec.drafts.base import Choice, DraftOptions, OpenRequest
from offspec.drafts.kinds import open_draft
from offspec.drafts.weighing import Chooser, Scales, by_rate
from offspec.errors import MemoryLimitError
from offspec.loaders.machine.hardware import Rates
from offspec.loaders.streaming.placement import Limits
from offspec.planning.memory import MemoryOptions
from offspec.planning.plan import make_plan

from ...llama_configs import LLAMA_8B_IN_BF16, write_config
from ...vocabularies import CODE, EOS, PROSE, byte_level

GIB = 2**30
FAST_ROUNDS = Rates(host_to_device_bytes_per_s=25e9, matmul_flops={1: 1e13, 256: 1e15}, dequantise_elements_per_s=1e13)
SLOW_ROUNDS = replace(FAST_ROUNDS, dequantise_elements_per_s=1e9)


@pytest.fixture
def target(tmp_path: Path) -> ModelFiles:
    write_config(tmp_path, LLAMA_8B_IN_BF16)
    return model_to_plan(tmp_path, None, "bf16", [])


def scales_of(target: ModelFiles, vram: int, options: DraftOptions | None = None) -> Scales:
    request = OpenRequest(options or DraftOptions(), target, None, AUTO_ON_GPU, [], device=torch.device("cuda"))
    limits, memory = Limits(vram, 64 * GIB), MemoryOptions(context=1024)
    return Scales("target", request, lambda draft: make_plan(target, [draft], limits, memory, GIB))


def test_a_shadow_wins_where_its_rounds_are_fast(target: ModelFiles) -> None:
    scales = scales_of(target, 10 * GIB)
    names = scales.names(["shadow", "lookup"])
    assert names == ["shadow:4", "shadow:3", "shadow:2", "lookup"]
    for rates, kind in ((FAST_ROUNDS, "shadow"), (SLOW_ROUNDS, "lookup")):
        prospects = scales.compare(names, lambda model, rates=rates: rates, scales.first_plan(names))
        assert [each.name for each in prospects if not each.download_bytes] == [*names, "none"]
        prospects = [each for each in prospects if not each.download_bytes]  # of models that are here
        assert by_rate(prospects)[0].name.startswith(kind)
        choice = Chooser(scales, lambda plan, rates=rates: lambda model: rates)(names, ["none"])
        assert choice is not None
        assert choice.name == by_rate(prospects)[0].name
        assert list(choice.tokens_per_s) == [prospect.name for prospect in by_rate(prospects)]


def small_model(folder: Path, **changes: object) -> Path:
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    return write_config(folder, LLAMA_8B_IN_BF16 | shape | changes)


def test_the_family_s_draft_is_compared_if_no_other_has_the_vocabulary(target: ModelFiles, tmp_path: Path) -> None:
    small, foreign = small_model(tmp_path / "small"), small_model(tmp_path / "foreign", vocab_size=32000)
    for given, is_named in (("lookup", True), (str(foreign), True), (str(small), False)):
        scales = scales_of(target, 10 * GIB)
        prospects = scales.compare([given], lambda model: FAST_ROUNDS, scales.first_plan([given]))
        named = [each for each in prospects if each.download_bytes]
        assert [each.name for each in named] == ["meta-llama/Llama-3.2-1B-Instruct"] * is_named
    resident = scales_of(target, 40 * GIB)
    assert len(resident.compare(["lookup"], lambda model: FAST_ROUNDS, resident.first_plan(["lookup"]))) == 1


def test_another_vocabulary_costs_tokens(target: ModelFiles, tmp_path: Path) -> None:
    """A draft as large with the target's vocabulary brings more tokens per pass; config.json tells them apart."""
    folders = [small_model(tmp_path / "small"), small_model(tmp_path / "foreign", vocab_size=151936)]
    scales = scales_of(target, 10 * GIB)
    same, other = (scales.prospect(str(folder), lambda model: FAST_ROUNDS) for folder in folders)
    assert (same.shares_vocabulary, other.shares_vocabulary) == (True, False)
    assert same.greedy is not None
    assert other.greedy is not None
    assert same.greedy.tokens_per_pass > 1.3 * other.greedy.tokens_per_pass


def test_a_vocabulary_is_compared_where_tokenizers_are_there(target: ModelFiles, tmp_path: Path) -> None:
    """Of two vocabularies with as many tokens, config.json tells nothing."""
    folders = [tmp_path, small_model(tmp_path / "same"), small_model(tmp_path / "other")]
    for folder, corpus in zip(folders, (CODE, CODE, PROSE), strict=True):
        byte_level(corpus, 300, [EOS]).save(str(folder / "tokenizer.json"))
    scales = scales_of(target, 10 * GIB)
    found = [scales.prospect(str(folder), lambda model: FAST_ROUNDS).shares_vocabulary for folder in folders[1:]]
    assert found == [True, False]


def test_bits_are_those_that_fit(target: ModelFiles) -> None:
    """Copies of all layers take 3.7 GiB in 4 bits, and 2.8 in 3."""
    scales = scales_of(target, 6 * GIB)
    choice = Chooser(scales, lambda plan: lambda model: FAST_ROUNDS)(["shadow:4", "shadow:3", "shadow:2"], [])
    assert choice is not None
    assert set(choice.tokens_per_s) == {"shadow:3", "shadow:2"}
    with pytest.raises(MemoryLimitError, match="shadow"):
        scales.first_plan(["shadow:4"])
    assert scales.first_plan(["shadow:4", "none"]).placement.streamed


def test_nothing_is_chosen_for_a_target_that_stays_or_does_not_fit(target: ModelFiles) -> None:
    for vram in (40 * GIB, 2**20):
        chooser = Chooser(scales_of(target, vram), lambda plan: lambda model: FAST_ROUNDS)
        assert chooser(["shadow:4", "lookup"], []) is None
    assert Chooser(scales_of(target, 6 * GIB), lambda plan: lambda model: FAST_ROUNDS)(["shadow:4"], []) is None


@pytest.mark.parametrize(
    ("rates", "advised"),
    [
        ({"lookup": 1.5, "shadow:4": 1.2}, ["lookup 1.5, shadow:4 1.2", "offspec plan"]),
        ({"shadow:4": 3.25, "lookup": 1.5}, ["3.2 tokens/s in place of 1.5", "`draft=shadow`"]),
    ],
    ids=["lookup is faster", "a shadow would be faster"],
)
def test_advice_has_the_predicted_figures(target: ModelFiles, rates: dict[str, float], advised: list[str]) -> None:
    request = scales_of(target, 10 * GIB).request
    open_draft("target", replace(request, choose=lambda names, others: Choice("lookup", rates)))
    (note,) = request.notes
    assert note.advice
    assert all(words in note.text for words in advised)
