"""Of several trainings of a draft, each request uses the one that predicts its prompt best."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.checkpoints.load import WeightSettings, load_decoder
from offspec.checkpoints.opening import ModelFiles
from offspec.errors import UsageError
from offspec.model.decoder import Decoder
from offspec.planning.plan import all_resident
from offspec.training.lora import Adapter, CausalTexts, hidden_states, weights_of
from offspec.training.specialists import LEAST_TOKENS, Specialists

from ...pair import Pair, build_pair
from ...refusals import refused

ONE, OTHER = list(range(40, 60)), list(range(60, 80))
NAMES = ("one.safetensors", "other.safetensors")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def draft(pair: Pair) -> Decoder:
    files = ModelFiles.open(pair.draft, "fp32", "cpu", [])
    return load_decoder(files, all_resident(files), torch.device("cpu"), WeightSettings(is_written=True))


@pytest.fixture(scope="module")
def trained(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Files of additions that were trained on one list of tokens each."""
    files = ModelFiles.open(pair.draft, "fp32", "cpu", [])
    folder, made = tmp_path_factory.mktemp("trained"), list[Path]()
    for name, tokens in zip(NAMES, (ONE, OTHER), strict=True):
        decoder = load_decoder(files, all_resident(files), torch.device("cpu"), WeightSettings(is_written=True))
        adapter = Adapter(decoder, 4)
        optimizer = torch.optim.Adam(adapter.parameters, lr=0.02)
        for _ in range(40):
            optimizer.zero_grad()
            _loss(adapter, torch.tensor(tokens)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        adapter.save(folder / name)
        made.append(folder / name)
    return made[0], made[1]


def _loss(adapter: Adapter, tokens: torch.Tensor) -> torch.Tensor:
    trainee = adapter.trainee()
    states = hidden_states(trainee, tokens, CausalTexts(trainee.device, 1, len(tokens)))
    return torch.nn.functional.cross_entropy(trainee.head(trainee.normed(states))[:-1], tokens[1:])


@pytest.fixture
def specialists(draft: Decoder, trained: tuple[Path, Path]) -> Specialists:
    return Specialists(draft, trained)


def test_the_training_on_the_prompts_text_is_used(specialists: Specialists, trained: tuple[Path, Path]) -> None:
    specialists.choose(ONE)
    assert specialists.file == trained[0]
    specialists.choose(OTHER)
    assert specialists.file == trained[1]


def test_the_weights_are_those_of_the_file_alone(
    specialists: Specialists, draft: Decoder, pair: Pair, trained: tuple[Path, Path]
) -> None:
    files = ModelFiles.open(pair.draft, "fp32", "cpu", [])
    alone = load_decoder(files, all_resident(files), torch.device("cpu"), WeightSettings(is_written=True))
    Adapter(alone, 4).load(trained[0])
    specialists.choose(OTHER)
    specialists.choose(ONE)
    found, expected = weights_of(draft), weights_of(alone)
    assert all(torch.equal(found[name], expected[name]) for name in expected)  # type: ignore[arg-type]


def test_where_none_helps_the_draft_is_as_it_came(
    specialists: Specialists, draft: Decoder, pair: Pair, trained: tuple[Path, Path]
) -> None:
    came = [weight.clone() for weight in weights_of(_fresh(pair)).values() if isinstance(weight, torch.Tensor)]
    specialists.choose(ONE)
    wanted = [80 + number % 7 for number in range(LEAST_TOKENS)]
    losses = {path: _loss_with(pair, path, wanted) for path in (None, *trained)}
    specialists.choose(wanted)
    assert specialists.file == min(losses, key=lambda path: losses[path])
    specialists.choose([5] * (LEAST_TOKENS - 1))  # too short to decide
    if specialists.file is None:
        now = [weight for weight in weights_of(draft).values() if isinstance(weight, torch.Tensor)]
        assert all(torch.equal(one, other) for one, other in zip(came, now, strict=True))


def _fresh(pair: Pair) -> Decoder:
    files = ModelFiles.open(pair.draft, "fp32", "cpu", [])
    return load_decoder(files, all_resident(files), torch.device("cpu"), WeightSettings(is_written=True))


def _loss_with(pair: Pair, path: Path | None, tokens: list[int]) -> float:
    adapter = Adapter(_fresh(pair), 4)
    if path is not None:
        adapter.load(path)
    with torch.no_grad():
        return float(_loss(adapter, torch.tensor(tokens)))


def test_the_text_is_the_same_and_the_choice_is_said(pair: Pair, trained: tuple[Path, Path]) -> None:
    params, found = SamplingParams(16, seed=0, ignore_eos=True), list[str | None]()
    with Engine.load(str(pair.target), draft=str(pair.draft), learn_file=trained, device="cpu", dtype="fp32") as engine:
        for prompt in (ONE, OTHER):
            steps = list(engine.generate(prompt, params, SpeculationParams(16)))
            plain = list(engine.generate(prompt, params, SpeculationParams(0)))
            assert [t for s in steps for t in s.token_ids] == [t for s in plain for t in s.token_ids]
            found.append(steps[-1].stats.learn_file)
    assert found == list(map(str, trained))


def test_several_files_are_for_use_only(pair: Pair, trained: tuple[Path, Path], tmp_path: Path) -> None:
    given = {"draft": str(pair.draft), "device": "cpu", "dtype": "fp32"}
    with refused(UsageError, "`learn`", "`learn_file`"):
        Engine.load(str(pair.target), learn=True, learn_file=trained, **given)  # type: ignore[arg-type]
    with refused(UsageError, tmp_path / "none", "`learn`"):
        Engine.load(str(pair.target), learn_file=[trained[0], tmp_path / "none"], **given)  # type: ignore[arg-type]
