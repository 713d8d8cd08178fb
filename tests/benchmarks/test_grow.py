"""Grown models: the small model's function in a big model's tensors, in which nothing but what must be is zero."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.grow import SHAPES, Layout, Shape, grow, grow_exit
from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.backends.weights import dense
from offspec.checkpoints.exit_layers import save
from offspec.checkpoints.opening import open_model
from offspec.errors import UsageError
from offspec.loaders.files.containers import open_checkpoint
from offspec.loaders.formats import stored_weights
from offspec.model.config import read_config
from offspec.model.names import LAYER_PREFIX

from ..refusals import refused

SOURCE = builtin.path("target")
# As 7B: a quarter of the state, KV heads twice. As 70B: the state twice over, several query heads to a KV head, idle
# heads.
SHAPES_HERE = {
    "one copy": Shape(1024, 896, 9, 9, 9, 128),
    "two copies": Shape(512, 800, 9, 16, 4, 128),
    "same heads": Shape(256, 768, 8, 8, 4, 32),
}


MARKS = {"one copy": pytest.mark.nightly, "two copies": pytest.mark.nightly, "same heads": pytest.mark.slow}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=mark) for name, mark in MARKS.items()])
def grown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return grow(SOURCE, tmp_path_factory.mktemp("grown") / "model", SHAPES_HERE[request.param])


@cache
def texts(folder: Path, num_prompts: int = 1, num_tokens: int = 6) -> list[list[int]]:
    """Greedy token ids in fp32, decoded plainly."""
    params, plain = SamplingParams(num_tokens, ignore_eos=True), SpeculationParams(budget=0)
    with Engine.load(str(folder), draft="none", dtype="fp32", device="cpu") as engine:
        return [
            [token for step in engine.generate(prompt, params, plain) for token in step.token_ids]
            for prompt in builtin.prompts()[:num_prompts]
        ]


def passes(folder: Path, exit_file: Path) -> list[int]:
    """Tokens of each pass with an exit layer as the draft."""
    params = SamplingParams(8, ignore_eos=True)
    options = {"draft": "self", "exit_file": str(exit_file), "dtype": "fp32", "device": "cpu"}
    with Engine.load(str(folder), **options) as engine:
        steps = engine.generate(builtin.prompts()[0], params, SpeculationParams(8, lookup=False, overlap=False))
        return [len(step.token_ids) for step in steps]


def test_an_exit_layer_brings_what_it_brings_the_small_model(grown: Path, tmp_path: Path) -> None:
    """The copied last layer, without training."""
    source = open_model(SOURCE, "fp32", [])
    last = f"{LAYER_PREFIX}{source.config.num_layers - 1}."
    layer = {name.removeprefix(last): weight for name, weight in tensors(SOURCE).items() if name.startswith(last)}
    save(tmp_path / "exit.safetensors", layer, source, 4)
    found = grow_exit(tmp_path / "exit.safetensors", SOURCE, grown, shape_of(grown))
    assert passes(grown, found) == passes(SOURCE, tmp_path / "exit.safetensors")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every weight as a matrix in fp32."""
    checkpoint = open_checkpoint(folder)
    raw = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    return {
        name: dense(weight.bind([raw[i.name].reshape(-1).view(torch.uint8) for i in weight.streamed]), torch.float32)
        for name, weight in stored_weights(checkpoint.tensors).items()
    }


def test_logits_are_the_small_models(grown: Path) -> None:
    ids = torch.arange(100, 160)
    found = []
    for folder in (SOURCE, grown):
        with Engine.load(str(folder), draft="none", dtype="fp32", device="cpu") as engine:
            target = engine.target
            hidden = target.forward(ids, torch.arange(len(ids)), target.new_cache())
            found.append(target.logits(hidden))
    torch.testing.assert_close(found[1], found[0], atol=2e-3, rtol=1e-4)


def test_the_padding_of_the_state_stays_zero(grown: Path) -> None:
    ids = torch.arange(50, 60)
    with Engine.load(str(grown), draft="none", dtype="bf16", device="cpu") as engine:
        hidden = engine.target.forward(ids, torch.arange(len(ids)), engine.target.new_cache())
    layout = Layout(read_config(open_checkpoint(SOURCE).config), shape_of(grown))
    padding = torch.ones(hidden.shape[1], dtype=torch.bool)
    padding[layout.hidden] = False
    assert (hidden[:, padding] == 0).all()
    assert (hidden[:, layout.hidden] != 0).any()


def shape_of(folder: Path) -> Shape:
    config = read_config(open_checkpoint(folder).config)
    return next(s for s in SHAPES_HERE.values() if s.hidden_size == config.hidden_size)


def test_a_run_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    shape = replace(SHAPES_HERE["same heads"], num_layers=9)
    folder = grow(SOURCE, tmp_path / "model", shape)
    whole = {file.name: file.read_bytes() for file in folder.iterdir()}
    (folder / "model-00004-of-00010.safetensors").unlink()
    (folder / "config.json").unlink()
    written: list[str] = []
    grow(SOURCE, folder, shape, say=written.append)
    assert len(written) == 1
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == whole
    with refused(UsageError, folder, "another model"):
        grow(SOURCE, folder, replace(shape, num_layers=8))


@pytest.mark.nightly("writes and reads a grown model in NF4; the other forms of it are tested by default")
@pytest.mark.slow
def test_nf4_is_the_function_of_its_own_numbers(tmp_path: Path) -> None:
    """The small model of what NF4 has left of the weights writes the same text:
    the padding adds nothing in NF4 either.
    """
    shape = replace(SHAPES_HERE["two copies"], format="nf4")
    folder = grow(SOURCE, tmp_path / "nf4", shape)
    shrunk = shrink(folder, Layout(read_config(open_checkpoint(SOURCE).config), shape), tmp_path / "small")
    found = texts(folder, 8, 16)
    assert found == texts(shrunk, 8, 16)
    assert found != texts(SOURCE, 8, 16)


def shrink(folder: Path, layout: Layout, target: Path) -> Path:
    """The small model that a grown checkpoint holds (the copies of the state need not be equal any more:
    their mean).
    """
    small, source = layout.small, open_checkpoint(SOURCE)
    big, copies = tensors(folder), layout.copies

    def state(matrix: torch.Tensor) -> torch.Tensor:
        return matrix[:, layout.hidden].unflatten(1, (copies, -1)).sum(dim=1)

    result = {
        "model.embed_tokens.weight": big["model.embed_tokens.weight"][:, : small.hidden_size],
        "model.norm.weight": big["model.norm.weight"][: small.hidden_size] / layout.norm_scale,
        "lm_head.weight": state(big["lm_head.weight"]),
    }
    for at, index in layout.layers.items():
        old, new = f"model.layers.{at}.", f"model.layers.{index}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            result[f"{new}{norm}.weight"] = big[f"{old}{norm}.weight"][: small.hidden_size] / layout.norm_scale
        for kind, rows, scale in (("q", layout.q, layout.query_scale), ("k", layout.kv, 1), ("v", layout.kv, 1)):
            name = f"self_attn.{kind}_proj.weight"
            result[new + name] = state(big[old + name])[rows] / scale
        for kind in ("gate", "up"):
            name = f"mlp.{kind}_proj.weight"
            result[new + name] = state(big[old + name])[layout.neurons]
        for name, columns in (("self_attn.o_proj.weight", layout.q), ("mlp.down_proj.weight", layout.neurons)):
            written = big[old + name][layout.hidden][:, columns].unflatten(0, (copies, -1))
            result[new + name] = written[0]
    target.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in result.items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps({**source.config, "tie_word_embeddings": False}))
    (target / "tokenizer.json").write_bytes((SOURCE / "tokenizer.json").read_bytes())
    return target


@pytest.mark.parametrize("name", sorted(SHAPES.keys() - {"2b"}))
def test_the_big_shapes_hold_the_built_in_target(name: str) -> None:
    layout = Layout(read_config(open_checkpoint(SOURCE).config), SHAPES[name])
    assert len(layout.layers) == layout.small.num_layers
    for factor in (layout.norm_scale, layout.query_scale):
        mantissa, _ = torch.frexp(torch.tensor(factor))
        assert mantissa == 0.5  # a power of two: exact in bf16


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": 768}, "two"),
        ({"head_dim": 64}, "four"),
        ({"num_layers": 7}, "less than"),
        ({"num_heads": 16, "num_kv_heads": 16, "hidden_size": 100}, "two"),
    ],
)
def test_shapes_that_cannot_hold_the_model_are_refused(change: dict[str, int], said: str, tmp_path: Path) -> None:
    with refused(UsageError, said):
        grow(SOURCE, tmp_path / "model", replace(SHAPES_HERE["one copy"], **change))
