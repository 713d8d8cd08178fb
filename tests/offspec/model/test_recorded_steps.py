"""Passes of one row with recorded steps, beside passes without them: the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

import pytest
import torch
from torch import Tensor

from offspec.backends.arithmetic import EXACT, FAST
from offspec.backends.choice import backend_of
from offspec.backends.x86.compiler import gnu_openmp
from offspec.backends.x86.row_steps import norm_rows
from offspec.model import recorded_steps
from offspec.model.config import read_config
from offspec.model.decoder import CachedDecoder, Decoder, TextRows, pass_together, random_decoder
from offspec.model.parts.part import NativePart
from offspec.model.recorded_steps import RecordedSteps

from ...fakes import FAMILIES, config_json
from ...machines import this_processor

pytestmark = [this_processor, pytest.mark.skipif(gnu_openmp() is None, reason="torch has another OpenMP than GNU's")]
CPU = torch.device("cpu")
TOKENS = [3, 5, 7, 11, 13, 17]
WIDTH = 64


def decoder_of(family: str) -> Decoder:
    sizes = {"head_dim": 32, "intermediate_size": 128, "moe_intermediate_size": 64}  # in whole vectors and steps
    config = read_config({**config_json(FAMILIES[family]), **sizes})
    decoder = random_decoder(config, 3, dtype=torch.bfloat16, device=CPU)
    decoder.arithmetic = EXACT
    return decoder


def one_by_one(decoder: Decoder) -> Tensor:
    text = CachedDecoder(decoder)
    return torch.cat([pass_together([(text, TextRows.of_chain([token]))]) for token in TOKENS])


def recorded(decoder: Decoder) -> set[str]:
    """The names of recorded steps; each of them is recorded in all layers or in none."""
    parts = [part for block in decoder.blocks for part in block.parts]
    found = set[str]()
    for part in parts:
        assert isinstance(part, NativePart)
        found |= set(part.steps.recorded)
    return found


@pytest.mark.parametrize(
    ("family", "steps"),
    [
        ("llama-gqa", {"before attention", "after attention", "mlp"}),
        ("llama-biased", {"before attention", "after attention", "mlp"}),
        ("qwen2", {"before attention", "after attention", "mlp"}),
        ("qwen3", {"before attention", "after attention", "mlp"}),
        ("qwen3-moe", {"before attention", "after attention", "router", "experts", "mlp"}),
        ("gemma2", set()),  # torch computes its norms
    ],
)
def test_families(monkeypatch: pytest.MonkeyPatch, family: str, steps: set[str]) -> None:
    decoder, plain = decoder_of(family), decoder_of(family)
    found = one_by_one(decoder)
    assert recorded(decoder) == steps
    monkeypatch.setattr(recorded_steps, "can_record", lambda: False)
    assert torch.equal(found, one_by_one(plain))
    assert not recorded(plain)


class Layer:
    """A step that counts how often it is computed."""

    def __init__(self) -> None:
        self.steps, self.calls = RecordedSteps(), 0

    def run(self, x: Tensor, weight: Tensor, *, is_exact: bool = True) -> Sequence[Tensor]:
        def function(x: Tensor) -> Sequence[Tensor]:
            self.calls += 1
            return (backend.linear(norm_rows(x, weight[0], 1e-5), weight),)

        backend = backend_of(CPU, EXACT if is_exact else FAST)
        with torch.inference_mode():
            return self.steps.run(backend, "step", function, (x,), {"weight": weight})


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_the_second_use_is_recorded() -> None:
    layer, weight = Layer(), noise(WIDTH, WIDTH)
    results = [layer.run(noise(1, WIDTH, seed=seed), weight)[0] for seed in (1, 2, 3, 4)]
    assert layer.calls == 2
    assert torch.equal(results[3], Layer().run(noise(1, WIDTH, seed=4), weight)[0])


def test_other_weights_begin_anew() -> None:
    """As in a layer that is streamed, or a draft that has learnt."""
    layer, x = Layer(), noise(1, WIDTH)
    for seed in range(4):
        weight = noise(WIDTH, WIDTH, seed=seed)
        for _ in range(3):
            assert torch.equal(layer.run(x, weight)[0], Layer().run(x, weight)[0])
    assert layer.calls == 8
    weight.mul_(2)  # in place
    assert torch.equal(layer.run(x, weight)[0], Layer().run(x, weight)[0])


def test_weights_are_not_kept() -> None:
    """After an engine was closed, its memory is free."""
    layer, weight = Layer(), noise(WIDTH, WIDTH)
    for _ in range(3):
        layer.run(noise(1, WIDTH), weight)
    assert layer.steps.recorded
    watched = ref(weight)
    del weight
    assert watched() is None


def test_other_rows_are_computed() -> None:
    layer, weight = Layer(), noise(WIDTH, WIDTH)
    for _ in range(3):
        layer.run(noise(2, WIDTH), weight)
        layer.run(noise(1, WIDTH), weight, is_exact=False)
    assert layer.calls == 6
    assert not layer.steps.recorded


def test_each_number_of_threads_has_its_own() -> None:
    layer, weight, before = Layer(), noise(WIDTH, WIDTH), torch.get_num_threads()
    try:
        for num_threads in (1, 2, 1, 2, 1, 2):
            torch.set_num_threads(num_threads)
            layer.run(noise(1, WIDTH), weight)
    finally:
        torch.set_num_threads(before)
    assert layer.calls == 4
