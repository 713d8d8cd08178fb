"""The decoder against transformers; trees, pieces and rewinds against plain chains; checkpoints that do not fit."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from offspec.checkpoints.opening import open_model
from offspec.errors import CheckpointError, UnsupportedModelError
from offspec.loaders.files.checkpoint import TensorInfo
from offspec.loaders.formats import StoredWeight
from offspec.loaders.formats.plain import PlainWeight
from offspec.model.block import kv_layouts, layer_shapes
from offspec.model.config import ModelConfig, read_config
from offspec.model.decoder import CachedDecoder, Decoder, check_tensors, score_together
from offspec.model.pass_rows import TextRows
from offspec.model.rope import RotaryEmbedding, rotation
from offspec.notes import Note
from offspec.scheduler.trees.token_tree import ROOT, TokenTree

from ...examples import examples
from ...fakes import FAMILIES, VOCAB_SIZE, TinyModel, config_json
from ...refusals import refused

GetModel = Callable[[str], TinyModel]
TOLERANCE = 1e-4  # fp32, max abs difference of logits that lie some units apart
NO_NODES = (np.zeros(0, dtype=np.int64),) * 3
# One family for every way of seeing: all, a window in all layers, a window in some, normed queries and keys with one,
# capped scores, layers without positions.
TREE_FAMILIES = [*("llama-gqa", "mistral-window", "qwen3-biased-window", "gemma2", "cohere2", "gemma4-layer-inputs")]

# One for every kind of memory: of most families `test_families` compares tokens one by one with passes of several.
EACH_MEMORY = ("gemma4-layer-inputs", "granite-h-moe", "qwen3.5", "lfm2", "deepseek-v3", "gpt-oss", "phi3-longrope")
each_memory = pytest.mark.parametrize("family", EACH_MEMORY)


def random_tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= TOLERANCE


def chain_logits(decoder: Decoder, tokens: list[int]) -> Tensor:
    """Logits [T, vocab] after every token, all in one pass over an empty cache: the plain twin of everything here."""
    hidden = decoder.forward(torch.tensor(tokens), torch.arange(len(tokens)), decoder.new_cache())
    return decoder.logits(hidden)


def assert_holds(text: CachedDecoder, tokens: list[int]) -> None:
    """The cache is what a fresh prefill of `tokens` leaves."""
    assert (text.length, text.cache.pending) == (len(tokens), 0)
    assert text.cache.positions[: len(tokens)].tolist() == list(range(len(tokens)))
    fresh = text.decoder.new_cache()
    text.decoder.forward(torch.tensor(tokens, dtype=torch.long), torch.arange(len(tokens)), fresh)
    for layer, layout in enumerate(kv_layouts(text.decoder.config)):
        if layout is not None:
            for found, expected in zip(*(each.read(layer, len(tokens)) for each in (text.cache, fresh)), strict=True):
                torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


# ------------------------------------------------------------------------------------------------ transformers


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(tiny_model: GetModel, family: str) -> None:
    """Of a checkpoint as transformers writes it, whose tensors all have a place."""
    files = open_model(tiny_model(family).folder, "fp32", [])
    assert set(files.stored.by_name) == set(complete(files.config))
    model, tokens, decoder = tiny_model(family), torch.tensor(random_tokens(40)), tiny_model(family).decoder()
    cache, logits = decoder.new_cache(), []
    for piece in torch.arange(40).split([17, 1, 22]):
        logits.append(decoder.logits(decoder.forward(tokens[piece], piece, cache)))
        cache.append(len(piece), 0)
    with torch.no_grad():
        expected = model.reference(tokens[None]).logits[0]
    assert_close(torch.cat(logits), expected)


@pytest.mark.slow
@each_memory
def test_greedy_text_equals_transformers(tiny_model: GetModel, family: str) -> None:
    """Each token is the one that transformers finds likeliest behind those before it."""
    model, prompt, steps = tiny_model(family), random_tokens(12, seed=2), 12
    text, chain, tokens = CachedDecoder(model.decoder()), prompt, []
    for _ in range(steps):
        chain = [int(text.score(chain, *NO_NODES).argmax())]
        tokens += chain
    with torch.no_grad():
        logits = model.reference(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    assert tokens == logits.argmax(-1).tolist()
    assert len(set(tokens)) >= 5, "a text that repeats itself shows nothing"


@each_memory
def test_texts_of_one_pass_do_not_see_each_other(tiny_model: GetModel, family: str) -> None:
    """Texts of different lengths, one of them new, each with a tree; longer than windows."""
    decoder = tiny_model(family).decoder()
    tree = TokenTree.chain([7, 8, 9])
    depths, parents = np.array([1, 1, 2]), np.array([ROOT, ROOT, 0])
    ahead, chains = ([], random_tokens(23, 5), random_tokens(40, 6)), (random_tokens(30, 7), [3], [4, 5])

    def begun() -> list[tuple[CachedDecoder, TextRows]]:
        texts = []
        for before, chain in zip(ahead, chains, strict=True):
            text = CachedDecoder(decoder)
            if before:
                text.score(before, *NO_NODES)
            texts.append((text, TextRows(chain, tree.tokens, depths, parents)))
        return texts

    together = score_together(begun())
    for found, alone in zip(together, begun(), strict=True):
        (expected,) = score_together([alone])
        for row in range(4):
            assert_close(found[row], expected[row])


# As published, and the corners of the formulas.
ROPES = {
    "Llama-3.1-8B": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "DeepSeek-like": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "Phi-3-like": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1 + 0.03 * i for i in range(64)],
        "long_factor": [1 + 0.9 * i for i in range(64)],
        "original_max_position_embeddings": 128,
    },
    "shrunk": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 0.5, "original_max_position_embeddings": 4096},
    "ramp past the end": {
        "rope_type": "yarn",
        "rope_theta": 10.0,
        "factor": 4.0,
        "original_max_position_embeddings": 1216,
    },
    "ramp of no width": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 2,
        "beta_slow": 2,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_rotation_equals_transformers(name: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = config_json(FAMILIES["llama-gqa"]) | {"head_dim": 128, "rope_parameters": ROPES[name]}
    expected = LlamaRotaryEmbedding(LlamaConfig(**copy.deepcopy(config)))
    frequencies, magnitude = rotation(read_config(config).rope, 128)
    torch.testing.assert_close(frequencies, expected.inv_freq, rtol=1e-6, atol=0)
    assert magnitude == pytest.approx(expected.attention_scaling, rel=1e-9)


def test_longrope_takes_the_long_factors_where_the_context_is_longer_than_the_original() -> None:
    """As transformers does for a text of that length; up to the original context both take the short ones."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    said = config_json(FAMILIES["llama-gqa"]) | {"head_dim": 128, "rope_parameters": ROPES["Phi-3-like"]}
    theirs, config = LlamaRotaryEmbedding(LlamaConfig(**copy.deepcopy(said))), read_config(said)
    for context, length in ((40, 40), (128, 128), (129, 129), (256, 200)):
        cos, sin = theirs(torch.zeros(1), torch.arange(length)[None])
        ours = RotaryEmbedding(config.for_context(context).rope, 128, dtype=torch.float32, device=torch.device("cpu"))
        for found, expected in zip(ours.at(torch.arange(length)), (cos, sin), strict=True):
            torch.testing.assert_close(found[:, 0], expected[0], rtol=0, atol=1e-5)
    short, long = (rotation(config.for_context(context).rope, 128)[0] for context in (128, 129))
    assert torch.equal(short, rotation(config.rope, 128)[0])
    assert not torch.equal(short, long)


@pytest.mark.parametrize("family", ["gemma2", "cohere-qk-norm", "nemotron"])
def test_bf16_is_as_near_to_fp32_as_transformers_is(tiny_model: GetModel, family: str) -> None:
    model, tokens = tiny_model(family), random_tokens(40)
    with torch.no_grad():
        exact = model.reference(torch.tensor([tokens])).logits[0]
        theirs = copy.deepcopy(model.reference).bfloat16()(torch.tensor([tokens])).logits[0].float()
    ours = chain_logits(model.decoder(torch.bfloat16), tokens)
    assert ours.dtype == torch.float32
    assert ours.isfinite().all()
    error, their_error = (ours - exact).square().mean().sqrt(), (theirs - exact).square().mean().sqrt()
    assert error <= 1.5 * their_error
    assert error <= 0.1 * exact.std()


# ------------------------------------------------------------------------------------------------ trees


@dataclass(frozen=True)
class Tree:
    """A tree of guesses, written down naively: parents[i] < i, -1 for the end of the text."""

    tokens: list[int]
    parents: list[int]

    def path(self, node: int) -> list[int]:
        return [] if node < 0 else [*self.path(self.parents[node]), node]

    def round(self, first: int, last: int) -> tuple[Any, Any, Any]:
        """tokens and depths of nodes first .. last, and parents up to `last`, as `CachedDecoder.score` takes them."""
        paths = [self.path(node) for node in range(first, last)]
        depths = np.array([len(path) for path in paths], dtype=np.int64)
        tokens, parents = (np.array(some, dtype=np.int64) for some in (self.tokens[first:last], self.parents[:last]))
        return tokens, depths, parents


@dataclass(frozen=True)
class Pass:
    """What happens to a text in turn: a chain is committed, a tree grows in rounds, the path to `kept` is committed.

    rounds: ends of the rounds; the first one goes along with the chain unless `apart`.
    """

    chain: list[int]
    tree: Tree
    rounds: list[int]
    apart: bool
    kept: int
    chunk_rows: int


@st.composite
def passes(draw: st.DrawFn) -> Pass:
    tokens = st.integers(0, VOCAB_SIZE - 1)
    num_nodes = draw(st.integers(0, 12))
    tree = Tree(
        draw(st.lists(tokens, min_size=num_nodes, max_size=num_nodes)),
        [draw(st.integers(-1, node - 1)) for node in range(num_nodes)],
    )
    return Pass(
        chain=draw(st.lists(tokens, min_size=1, max_size=20)),
        tree=tree,
        rounds=sorted({num_nodes, *draw(st.lists(st.integers(0, num_nodes), max_size=3))} - {0}),
        apart=draw(st.booleans()),
        kept=draw(st.integers(-1, num_nodes - 1)),
        chunk_rows=draw(st.sampled_from([1, 2, 7, 512])),
    )


def score_in_rounds(text: CachedDecoder, step: Pass) -> Tensor:
    """Logits [1 + nodes, vocab]: after the chain, then after each node."""
    logits, chain, first = [], step.chain, 0
    if step.apart or not step.rounds:
        logits, chain = [text.score(chain, *NO_NODES)], []
    for last in step.rounds:
        logits.append(text.score(chain, *step.tree.round(first, last)))
        chain, first = [], last
    return torch.cat(logits)


def expected_logits(decoder: Decoder, text: list[int], tree: Tree) -> Tensor:
    """The same by definition: every path to a node without children is a text of its own."""
    paths = [tree.path(node) for node in range(-1, len(tree.tokens)) if node not in tree.parents]
    logits = dict[int, Tensor]()
    for path in paths:
        rows = chain_logits(decoder, text + [tree.tokens[node] for node in path])[len(text) - 1 :]
        logits |= dict(zip([-1, *path], rows, strict=True))
    return torch.stack([logits[node] for node in range(-1, len(tree.tokens))])


@pytest.mark.slow
@pytest.mark.parametrize("family", TREE_FAMILIES)
@given(steps=st.lists(passes(), min_size=1, max_size=3))
@examples(25)
def test_a_node_of_a_tree_is_the_end_of_a_plain_chain(tiny_model: GetModel, family: str, steps: list[Pass]) -> None:
    decoder = tiny_model(family).decoder()
    text, tokens = CachedDecoder(decoder), []
    for step in steps:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("offspec.model.pass_rows.CHUNK_ROWS", step.chunk_rows)
            logits = score_in_rounds(text, step)
        tokens += step.chain
        assert_close(logits, expected_logits(decoder, tokens, step.tree))
        path = step.tree.path(step.kept)
        text.keep(path)
        tokens += [step.tree.tokens[node] for node in path]
        assert_holds(text, tokens)


@pytest.mark.each_value
@pytest.mark.parametrize("family", TREE_FAMILIES)
@pytest.mark.parametrize("chunk_rows", [1, 7, 512])
def test_a_branch_longer_than_the_window(
    tiny_model: GetModel, family: str, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, text = tiny_model(family).decoder(), random_tokens(10)
    tree = Tree(random_tokens(30, seed=4), [-1, -1, *range(28)])  # two branches, their nodes in turn
    expected = expected_logits(decoder, text, tree)
    monkeypatch.setattr("offspec.model.pass_rows.CHUNK_ROWS", chunk_rows)
    assert_close(CachedDecoder(decoder).score(text, *tree.round(0, 30)), expected)


# ------------------------------------------------------------------------------------------------ the text


@pytest.mark.each_value
@pytest.mark.parametrize("family", TREE_FAMILIES)
@pytest.mark.parametrize("length", [0, 11])
def test_a_truncated_text_goes_on_as_if_the_tail_had_never_been(tiny_model: GetModel, family: str, length: int) -> None:
    decoder, tokens = tiny_model(family).decoder(), random_tokens(30)
    text = CachedDecoder(decoder)
    text.score(tokens, *Tree([3, 4], [-1, 0]).round(0, 2))
    text.truncate(length)
    assert_holds(text, tokens[:length])
    other = tokens[:length] + random_tokens(15, seed=5)
    assert_close(text.score(other[length:], *NO_NODES), chain_logits(decoder, other)[-1:])
    assert_holds(text, other)


def test_one_pass_borrows_every_layer_once_and_gives_it_back(
    tiny_model: GetModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, weights = tiny_model("qwen3-biased-window").lending_decoder()
    monkeypatch.setattr("offspec.model.pass_rows.CHUNK_ROWS", 7)
    tokens, tree = random_tokens(40), Tree([1, 2, 3], [-1, 0, 0])
    text = CachedDecoder(decoder)
    logits = text.score(tokens, *tree.round(0, 3))
    assert weights.lent == [0, 1, 2]
    text.keep([0, 2])
    weights.lent.clear()
    logits = torch.cat((logits[:1], text.score([4], *NO_NODES)))
    assert weights.lent == [0, 1, 2]
    plain = chain_logits(tiny_model("qwen3-biased-window").decoder(), [*tokens, 1, 3, 4])
    assert_close(logits, plain[[len(tokens) - 1, -1]])


# ------------------------------------------------------------------------------------------------ checkpoints


def complete(config: ModelConfig) -> dict[str, StoredWeight]:
    """Headers of a checkpoint that fits `config`."""
    shapes = dict(config.shared_shapes())
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes(config, layer).items()}
    return {name: stored(name, shape) for name, shape in shapes.items()}


def stored(name: str, shape: tuple[int, ...]) -> StoredWeight:
    return PlainWeight(name, TensorInfo(name, "F32", shape, Path("file"), 0, 0))


FOLDER = Path("folder")


LLAMA = read_config(config_json(FAMILIES["llama-gqa"]))
MISSING = (
    *("lm_head.weight", "model.layers.2.mlp.up_proj.weight", "model.embed_tokens.weight"),
    "model.layers.0.self_attn.k_proj.bias",
)


def test_tensors_that_are_missing_misshapen_or_without_a_place_are_named() -> None:
    others = (read_config(config_json(FAMILIES[family])) for family in ("llama-tied", "qwen2"))
    for config, name in zip((LLAMA, LLAMA, *others), MISSING, strict=True):
        weights = complete(config)
        del weights[name]
        with refused(CheckpointError, FOLDER, name, "missing"):
            check_tensors(weights, config, FOLDER)
    name = "model.layers.1.self_attn.k_proj.weight"
    with refused(CheckpointError, FOLDER, name, "[64, 64]", "[32, 64]"):
        check_tensors(complete(LLAMA) | {name: stored(name, (64, 64))}, LLAMA, FOLDER)
    for name in ("model.layers.0.self_attn.q_proj.bias", "model.layers.3.input_layernorm.weight", "score.weight"):
        with refused(UnsupportedModelError, FOLDER, name, "llama"):
            check_tensors(complete(LLAMA) | {name: stored(name, (64,))}, LLAMA, FOLDER)
    assert LLAMA.ignores("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not LLAMA.ignores("lm_head.weight")


@pytest.mark.parametrize("is_copy", [True, False])
def test_a_head_that_is_stored_although_the_embedding_serves_for_it(
    tiny_model: GetModel, is_copy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fine-tunes that trained the head are stored like that."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("offspec.checkpoints.opening.COMPARED_BYTES", 1000)
    folder = shutil.copytree(tiny_model("llama-tied").folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    head[-1, -1] += 0.0 if is_copy else 1.0
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    notes: list[Note] = []
    files = open_model(folder, "fp32", notes)
    assert (files.config.tied_head, len(notes)) == ((True, 0) if is_copy else (False, 1))
    reference = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    tokens = random_tokens(12)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0]
    assert_close(chain_logits(TinyModel(folder, reference).decoder(), tokens), expected)
