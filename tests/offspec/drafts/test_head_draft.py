"""A head as the draft: whatever it guesses, the text is the target's, alone, beside others and in conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.checkpoints.head_files import head_folder
from offspec.checkpoints.opening import open_model
from offspec.drafts.base import DraftOptions, OpenRequest
from offspec.drafts.head_draft import HeadDraft
from offspec.drafts.kinds import open_draft
from offspec.errors import CheckpointError, UsageError

from ...pair import Pair, build_pair
from ...refusals import refused
from ..model.heads.head_twins import (
    DFLASH_CONFIG,
    DSPARK_CONFIG,
    EAGLE_CONFIG,
    HYDRA_CONFIG,
    HYDRA_PREFIX_CONFIG,
    MEDUSA_CONFIG,
    MLP_CONFIG,
    RECURRENT_CONFIG,
    dflash_tensors,
    dspark_tensors,
    eagle_tensors,
    hydra_tensors,
    medusa_tensors,
    mlp_tensors,
    recurrent_tensors,
    write_folder,
)

PROMPTS = ["def area(width", "for item in", "print(1"]
GREEDY = SamplingParams(7, ignore_eos=True)
SAMPLED = SamplingParams(7, temperature=0.9, seed=3, ignore_eos=True)
# For a target of three layers.
TAPPED = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
DFLASH_TAPPED = {"num_target_layers": 3, "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 1, 2]}}
HEADS = {
    "EAGLE-1": ({**EAGLE_CONFIG, "architectures": ["LlamaForCausalLM"]}, lambda: eagle_tensors(1, layer="layers.0")),
    "EAGLE-3": (EAGLE_CONFIG | TAPPED, lambda: eagle_tensors(3)),
    "Medusa": (MEDUSA_CONFIG, medusa_tensors),
    "Hydra": (HYDRA_CONFIG, hydra_tensors),
    "Hydra++": (HYDRA_PREFIX_CONFIG, lambda: hydra_tensors(has_prefix=True)),
    "MLP speculator": (MLP_CONFIG, mlp_tensors),
    "DFlash": (DFLASH_CONFIG | DFLASH_TAPPED, dflash_tensors),
    "DSpark": (DSPARK_CONFIG | {"target_layer_ids": [0, 1, 2]}, dspark_tensors),
    "recurrent": (RECURRENT_CONFIG, recurrent_tensors),
}
# Conversations by default: KV entries, none, a block's, a state.
KEEPING = ("EAGLE-3", "Medusa", "DFlash", "recurrent")
Texts = Callable[[str, SamplingParams], list[int]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"), num_layers=3)


@pytest.fixture(scope="module")
def plain(pair: Pair) -> Iterator[Engine]:
    with Engine.load(str(pair.target), draft="none", device="cpu", dtype="fp32") as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(plain: Engine) -> Texts:
    """Plain decoding's text after a prompt."""
    return cache(
        lambda prompt, params: [
            token for step in plain.generate(prompt, params, SpeculationParams(budget=0)) for token in step.token_ids
        ]
    )


@pytest.fixture(scope="module", params=HEADS)
def engine(pair: Pair, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    config, tensors = HEADS[request.param]
    folder = write_folder(tmp_path_factory.mktemp("head"), config, tensors())
    with Engine.load(str(pair.target), draft=str(folder), device="cpu", dtype="fp32") as engine:
        yield engine


def test_the_text_is_plain_decodings(engine: Engine, expected: Texts) -> None:
    """Alone, where trees are sent, although none before the first pass, and where texts share passes."""
    assert isinstance(engine.draft, HeadDraft)
    steps = list(engine.generate(PROMPTS[0], GREEDY, SpeculationParams(budget=12, lookup=False)))
    assert [token for step in steps for token in step.token_ids] == expected(PROMPTS[0], GREEDY)
    assert steps[0].stats.num_drafted_tokens == 0
    assert steps[-1].stats.num_drafted_tokens > 12
    texts: dict[int, list[int]] = {index: [] for index in range(len(PROMPTS))}
    for index, step in engine.generate_many(PROMPTS, SAMPLED):
        texts[index] += step.token_ids
    assert [*texts.values()] == [expected(prompt, SAMPLED) for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [pytest.param(name, marks=() if name in KEEPING else pytest.mark.nightly) for name in HEADS],
    indirect=True,
)
def test_a_conversation_keeps_its_caches(engine: Engine, plain: Engine) -> None:
    """The second prompt goes on, the third goes back to an earlier place, the fourth had no speculation before it."""
    caches, text = engine.new_caches(), engine.encode(PROMPTS[0])
    for turn, budget in enumerate((12, 12, 0, 12)):
        asked = [*text[: len(text) - 5 * (turn == 2)], 70 + turn]
        speculation = SpeculationParams(budget=budget, lookup=False)
        steps = list(engine.generate(asked, SAMPLED, speculation, caches=caches))
        found = [token for step in steps for token in step.token_ids]
        steps = list(plain.generate(asked, SAMPLED, SpeculationParams(budget=0)))
        assert found == [token for step in steps for token in step.token_ids]
        text = [*asked, *found]


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_it_may_know_fewer_tokens_than_the_target(name: str, pair: Pair, expected: Texts, tmp_path: Path) -> None:
    """A target that was given tokens after its head was trained: they are read as another one."""
    tensors = {key: tensor for key, tensor in eagle_tensors(3).items() if key not in ("d2t", "t2d")}
    folder = write_folder(tmp_path, EAGLE_CONFIG | TAPPED, tensors | {name: torch.randn(9, 32)})
    with Engine.load(str(pair.target), draft=str(folder), device="cpu", dtype="fp32", learn=True) as engine:
        steps = list(engine.generate(PROMPTS[0], SAMPLED, SpeculationParams(8)))
        assert [token for step in steps for token in step.token_ids] == expected(PROMPTS[0], SAMPLED)
        assert steps[-1].stats.num_drafted_tokens > 8
        engine.learn(steps[-1].stats)


OF_ANOTHER = {
    "hidden size": ({"hidden_size": 64}, {}, CheckpointError, "hidden size 64"),
    "vocabulary": ({}, {"d2t": torch.full((96,), 1000)}, CheckpointError, "no token of this target"),
    "fingerprint": ({"offspec_target": "another"}, {}, CheckpointError, "trained for another target"),
}


@pytest.mark.parametrize("what", OF_ANOTHER)
def test_a_head_of_another_target_is_refused(what: str, pair: Pair, tmp_path: Path) -> None:
    changed, tensors, kind, text = OF_ANOTHER[what]
    folder = write_folder(tmp_path, EAGLE_CONFIG | TAPPED | changed, eagle_tensors(3) | tensors)
    with refused(kind, text):
        Engine.load(str(pair.target), draft=str(folder), device="cpu")


def test_its_memory_is_planned(engine: Engine) -> None:
    assert engine.plan is not None
    items = {item.name: item.on_device for item in engine.plan.placement.items}
    assert isinstance(engine.draft, HeadDraft)
    has_entries = engine.draft.head.reads_text
    assert items["head's weights"] > 0
    assert items["head's inputs"] > 0
    assert (items["head's KV cache"] > 0) == has_entries


def test_what_a_head_cannot_do_is_refused(pair: Pair, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, EAGLE_CONFIG | TAPPED, eagle_tensors(3))
    with Engine.load(str(pair.target), draft=str(folder), device="cpu", draft_window=64) as windowed:
        assert any("`draft_window=64` does nothing" in note.text and note.advice for note in windowed.notes)
        for speculation, word in (
            (SpeculationParams(budget=8, tree="sequoia"), "best-first"),
            (SpeculationParams(accept="joint"), "draft model"),
        ):
            with pytest.raises(UsageError, match=word):
                list(windowed.generate(PROMPTS[0], GREEDY, speculation))


def test_a_damaged_head_of_our_own_cannot_be_downloaded_again(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    files = open_model(pair.target, "fp32", [])
    folder = write_folder(head_folder(files, "medusa"), MEDUSA_CONFIG, medusa_tensors())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with refused(CheckpointError, weights, "delete", "offspec distill") as caught:
        open_draft("target", OpenRequest(DraftOptions("head"), files, None, "fp32", []))
    assert "download" not in str(caught.value)
