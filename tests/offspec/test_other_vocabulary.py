"""Engines whose draft has another vocabulary: the text is plain decoding's, and guesses come true all the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.errors import UsageError
from offspec.session import Session

from ..pair import Pair, build_pair, variant
from ..refusals import refused, tells
from ..vocabularies import EOS, backends
from .test_smollm2 import loaded

PROMPT = "def area("
PLAIN = SpeculationParams(budget=0)
SAMPLING = {
    "greedy": SamplingParams(10, seed=0),
    "warm": SamplingParams(10, temperature=1.0, seed=2, ignore_eos=True),
    "everything": SamplingParams(10, temperature=1.3, top_k=40, top_p=0.95, repetition_penalty=0.8, seed=4),
}
SPECULATION = {
    "auto": SpeculationParams(),
    "small": SpeculationParams(budget=8),
    "large": SpeculationParams(budget=64, recycling=True),
    "specexec": SpeculationParams(budget=32, scoring="specexec", recall=False),
    "sequoia": SpeculationParams(budget=32, tree="sequoia"),
    "opt-tree": SpeculationParams(budget=32, tree="opt-tree", reuse=False),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"), max_position_embeddings=256)


def reordered(pair: Pair, folder: Path) -> Path:
    """The draft with its tokens in another order: as good as it was."""
    variant(pair.draft, folder)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    order = torch.randperm(len(vocabulary), generator=torch.Generator().manual_seed(3)).tolist()
    content["model"]["vocab"] = {token: order[token_id] for token, token_id in vocabulary.items()}
    for token in content["added_tokens"]:
        token["id"] = order[token["id"]]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = tensors[name].clone()
        rows[order] = tensors[name][: len(order)]
        tensors[name] = rows
    save_file(tensors, folder / "model.safetensors")
    return folder


def with_tokenizer(pair: Pair, folder: Path, name: str) -> Path:
    """The draft's weights with a tokenizer that they were not made for."""
    variant(pair.draft, folder)
    backends()[name].save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    return folder


def load(pair: Pair, draft: Path | str, **options: Any) -> Engine:
    return Engine.load(str(pair.target), draft=str(draft), device="cpu", dtype="fp32", **options)


@pytest.fixture(scope="module")
def engines(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    root = tmp_path_factory.mktemp("drafts")
    drafts: dict[str, Path | str] = {"none": "none", "own": pair.draft, "reordered": reordered(pair, root / "order")}
    drafts |= {name: with_tokenizer(pair, root / name, name) for name in ("prose", "spaces")}
    with ExitStack() as opened:
        yield {name: opened.enter_context(load(pair, draft)) for name, draft in drafts.items()}


def ids(engine: Engine, sampling: SamplingParams, speculation: SpeculationParams, **options: Any) -> list[int]:
    prompt = options.pop("prompt", PROMPT)
    return [t for step in engine.generate(prompt, sampling, speculation, **options) for t in step.token_ids]


def tokens_per_pass(engine: Engine, sampling: SamplingParams) -> float:
    """Of a fresh engine, which drafts by no clock."""
    speculation = SpeculationParams(budget=32, lookup=False, recall=False, overlap=False)
    fresh = engine.with_draft(engine.draft)
    return list(fresh.generate(PROMPT, sampling, speculation))[-1].stats.tokens_per_pass


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("draft", ["reordered", "prose", "spaces"])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("speculation", SPECULATION)
def test_the_text_is_plain_decodings(draft: str, sampling: str, speculation: str, engines: dict[str, Engine]) -> None:
    expected = ids(engines["none"], SAMPLING[sampling], PLAIN)
    assert ids(engines[draft], SAMPLING[sampling], SPECULATION[speculation]) == expected


def test_a_draft_with_its_tokens_in_another_order_guesses_as_well(engines: dict[str, Engine]) -> None:
    params = replace(SAMPLING["warm"], max_new_tokens=16)
    own, reordered = (tokens_per_pass(engines[name], params) for name in ("own", "reordered"))
    assert own > 1.5
    assert reordered > 0.8 * own  # what the random target says is not always encoded as it said it


@pytest.mark.slow
def test_a_conversation_is_plain_decodings(engines: dict[str, Engine]) -> None:
    """Turns go on from the caches, one is cut short, and one is taken back."""

    def replies(engine: Engine, speculation: SpeculationParams) -> list[str]:
        session, sampling = Session(engine), SamplingParams(10, seed=1)
        for message in ("print the items", "and the width"):
            list(session.reply(message, sampling, speculation))
        interrupted = session.reply("never mind", sampling, speculation)
        next(interrupted)
        interrupted.close()
        session.undo()
        list(session.reply("return it", sampling, speculation))
        return [turn.reply for turn in session.turns]

    found = replies(engines["spaces"], SpeculationParams(budget=16))
    assert len(found) == 3
    assert found == replies(engines["none"], PLAIN)


def test_learning_from_the_target_needs_its_vocabulary(pair: Pair, tmp_path: Path) -> None:
    with refused(UsageError, "vocabulary", "`learn`"):
        load(pair, with_tokenizer(pair, tmp_path / "prose", "prose"), learn=True)


def test_what_is_shared_is_said(pair: Pair, tmp_path: Path) -> None:
    engine = load(pair, with_tokenizer(pair, tmp_path / "prose", "prose"))
    shared = [note for note in engine.notes if tells(note.text, "vocabulary", "share", tmp_path / "prose")]
    assert len(shared) == 1
    assert "%" in shared[0].text


def test_a_larger_draft_is_asked_where_layers_are_streamed_or_with_a_budget(pair: Pair, tmp_path: Path) -> None:
    large = build_pair(tmp_path, num_layers=4).draft
    engine = load(pair, large)
    assert any(tells(note.text, "larger", large, "`budget`") for note in engine.notes)
    sampling = SamplingParams(12, ignore_eos=True)
    expected = ids(engine, sampling, PLAIN)
    auto = SpeculationParams(lookup=False)
    last = list(engine.generate(PROMPT, sampling, auto))[-1]
    assert last.stats.num_drafted_tokens == 0
    assert ids(engine, sampling, SpeculationParams(budget=16, lookup=False)) == expected


@pytest.mark.nightly("a real model; the default run has tiny ones of other vocabularies")
@pytest.mark.slow
@pytest.mark.parametrize("direction", ["it drafts", "it is drafted for"])
def test_a_real_models_text_is_plain_decodings(direction: str, smollm2: Path) -> None:
    """SmolLM2, of 49,152 tokens, and the built-in pair's models, of 4096."""
    models = ("builtin", str(smollm2)) if direction == "it drafts" else (str(smollm2), "builtin")
    prompt = "def mean(values):\n    return "
    sampling = SamplingParams(10) if direction == "it drafts" else SamplingParams(8, temperature=1.0, seed=1)
    with loaded(*models, context=256) as engine:
        expected = ids(engine, sampling, PLAIN, prompt=prompt)
        steps = list(engine.generate(prompt, sampling, SpeculationParams(budget=16, lookup=False)))
        assert [token for step in steps for token in step.token_ids] == expected
        assert len(steps) < len(expected), "some guesses come true"
