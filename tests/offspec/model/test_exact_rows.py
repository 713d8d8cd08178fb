"""An exact decoder: a row's hidden states and logits equal, to the bit, those of a pass of its own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from offspec.backends.arithmetic import EXACT
from offspec.backends.choice import backend_of
from offspec.backends.cpu import ExactCpuBackend
from offspec.backends.on_gpu import WORKING_KERNELS
from offspec.backends.x86.processor import using
from offspec.model.config import ModelConfig, read_config
from offspec.model.decoder import CachedDecoder, Decoder, TextRows, pass_together, random_decoder, score_together
from offspec.model.exactness import is_exact_by_default, reason_against_exactness
from offspec.model.memory.kv_formats import EIGHT_BIT, KV_FORMATS
from offspec.model.norms import NORMS, normalize
from offspec.model.parts.mlp import ACTIVATIONS
from offspec.model.rope import RotaryEmbedding, Rotations, rotate
from offspec.model.transformers_config import ForeignConfig

from ...fakes import FAMILIES, VOCAB_SIZE, config_json
from ...machines import each_choice_with_kernels, needs_kernels
from .test_decoder import Tree

pytestmark = needs_kernels
CPU = torch.device("cpu")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
ROWS = (1, 2, 3, 5, 8, 64, 256)
PROMPT = 36  # tokens: more than a block of positions, and than windows


def exact_decoder(config: ModelConfig, dtype: torch.dtype, kv: str = "16") -> Decoder:
    decoder = random_decoder(config, 3, dtype=dtype, device=CPU)
    decoder.make_layer_caches = KV_FORMATS[kv].layers
    assert reason_against_exactness(config, dtype, CPU) is None
    decoder.arithmetic = EXACT
    return decoder


def random_tree(chance: random.Random, size: int) -> Tree:
    tokens = [chance.randrange(VOCAB_SIZE) for _ in range(size)]
    return Tree(tokens, [chance.randrange(-1, i) if i % 3 else i - 1 for i in range(size)])


def branches(tree: Tree) -> list[list[int]]:
    """The paths of nodes without children: each node is in one of them."""
    return [tree.path(node) for node in range(len(tree.parents)) if node not in tree.parents]


def chains_one_by_one(text: CachedDecoder, tokens: Sequence[int]) -> Tensor:
    """Hidden states [T, hidden] of tokens that each have a pass of their own: plain decoding."""
    return torch.cat([pass_together([(text, TextRows.of_chain([token]))]) for token in tokens])


def whole_chain(text: CachedDecoder, tokens: Sequence[int]) -> Tensor:
    """The same of one pass."""
    return pass_together([(text, TextRows.of_chain(tokens))])


def last_one_by_one(text: CachedDecoder, tokens: Sequence[int]) -> Tensor:
    """The same of one pass, but for the last tokens."""
    return torch.cat((whole_chain(text, tokens[:-4]), chains_one_by_one(text, tokens[-4:])))


def behind(prompt: Sequence[int], text: CachedDecoder) -> CachedDecoder:
    """The text cut behind its prompt, or another one if it cannot be cut there."""
    if text.cache.restorable(len(prompt)) == len(prompt):
        text.truncate(len(prompt))
        return text
    another = CachedDecoder(text.decoder)
    pass_together([(another, TextRows.of_chain(prompt))])
    return another


def pieces(chance: random.Random, total: int, count: int) -> list[tuple[int, int]]:
    cuts = [0, *sorted(chance.sample(range(1, total), count - 1)), total]
    return list(itertools.pairwise(cuts))


def assert_exact(decoder: Decoder, seed: int, num_nodes: int = 5) -> None:
    """A prompt in pieces, two texts' trees in passes that they share, and what follows a verdict."""
    chance = random.Random(seed)
    prompts = [[chance.randrange(VOCAB_SIZE) for _ in range(PROMPT + extra)] for extra in (1, 4)]
    trees = [random_tree(chance, num_nodes) for _ in prompts]
    texts, plain = ([CachedDecoder(decoder) for _ in prompts] for _ in range(2))
    for text, twin, prompt, decode in zip(texts, plain, prompts, (last_one_by_one, whole_chain), strict=True):
        parts = [prompt[first:last] for first, last in pieces(chance, PROMPT, 4)]
        hidden = [pass_together([(text, TextRows.of_chain(part))]) for part in parts]
        assert torch.equal(torch.cat(hidden), decode(twin, prompt[:PROMPT]))
        chains_one_by_one(twin, prompt[PROMPT:])
    last = len(trees[0].tokens)
    cut = chance.randrange(1, last)
    passes = [
        [
            (text, TextRows(prompt[PROMPT:], *tree.round(0, cut)))
            for text, tree, prompt in zip(texts, trees, prompts, strict=True)
        ],
        [(text, TextRows([], *tree.round(cut, last))) for text, tree in zip(texts, trees, strict=True)],
    ]
    scored = [score_together(each) for each in passes]
    for index, (tree, twin, prompt) in enumerate(zip(trees, plain, prompts, strict=True)):
        for branch in branches(tree):
            hidden = chains_one_by_one(behind(prompt, twin), [tree.tokens[i] for i in branch])
            for place, node in enumerate(branch):
                rows = scored[0][index] if node < cut else scored[1][index]
                number = node + 1 if node < cut else node - cut
                assert torch.equal(rows[number], decoder.logits(hidden[place : place + 1])[0]), f"node {node}"
    path = trees[0].path(last - 1)
    texts[0].keep(path)
    twin = behind(prompts[0], plain[0])
    chains_one_by_one(twin, [trees[0].tokens[i] for i in path])
    follow = [chance.randrange(VOCAB_SIZE) for _ in range(2)]
    found = pass_together([(texts[0], TextRows.of_chain(follow))])
    assert torch.equal(found, chains_one_by_one(twin, follow))


# One of each kind of operation on rows, in one dtype each, and one family in all; the others run nightly.
DAILY = {
    **dict.fromkeys(("mistral-window", "gemma2", "phi3", "cohere2", "gpt-oss", "deepseek-v3", "qwen3.5"), "bf16"),
    **dict.fromkeys(("qwen3-biased-window", "gemma4-layer-inputs", "nemotron", "mixtral", "lfm2", "olmo2"), "fp16"),
    "falcon-h1": "fp32",
}
EVERY_ONE = [
    pytest.param(
        *(name, dtype),
        id=f"{name}-{short}",
        marks=() if name == "llama-gqa" or DAILY.get(name) == short else pytest.mark.nightly,
    )
    for name, (short, dtype) in itertools.product(FAMILIES, DTYPES.items())
    if not name.startswith(("llama-linear", "llama-llama3", "llama-yarn"))  # which compute the same
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), EVERY_ONE)
def test_rows_equal_plain_decoding(family: str, dtype: torch.dtype) -> None:
    settings = config_json(FAMILIES[family])
    if settings["num_hidden_layers"] == 3 and "layer_types" not in settings:  # they are alike, or the first one differs
        settings["num_hidden_layers"] = 2
    config = read_config(settings)
    assert not isinstance(config, ForeignConfig)
    assert_exact(exact_decoder(config, dtype), seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["8", "4"])
def test_packed_entries(kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where keys are read in parts."""
    monkeypatch.setattr("offspec.model.memory.kv_formats.most_unpacked", lambda layout, device: 32)
    assert_exact(exact_decoder(read_config(config_json(FAMILIES["llama-gqa"])), torch.bfloat16, kv), seed=2)


@pytest.mark.nightly("120 random trees; the default run has one of each kind")
@each_dtype
@pytest.mark.parametrize("seed", range(20))
def test_many_trees(seed: int, dtype: torch.dtype) -> None:
    for family in ("llama-gqa", "qwen2", "mistral-window", "gemma2"):
        assert_exact(exact_decoder(read_config(config_json(FAMILIES[family])), dtype), seed, num_nodes=13)


def test_other_decoders_are_not_exact() -> None:
    """So that the tests above can fail: torch's products of one row round otherwise than those of several."""
    config = read_config(config_json(FAMILIES["llama-gqa"]))
    decoder = random_decoder(
        replace(config, hidden_size=512, intermediate_size=1024), 3, dtype=torch.float16, device=CPU
    )
    tokens = list(range(40))
    together = pass_together([(CachedDecoder(decoder), TextRows.of_chain(tokens))])
    assert not torch.equal(chains_one_by_one(CachedDecoder(decoder), tokens), together)


@each_choice_with_kernels
def test_where_decoders_are_exact() -> None:
    """On every CPU with kernels, wherever weights lie."""
    config = read_config(config_json(FAMILIES["llama-gqa"]))
    for dtype in DTYPES.values():
        for is_streamed in (False, True):
            assert is_exact_by_default(config, dtype, CPU, is_streamed=is_streamed, kv=EIGHT_BIT)
    assert "float64" in (reason_against_exactness(config, torch.float64, CPU) or "")


def test_without_vectors_no_decoder_is_exact() -> None:
    config = read_config(config_json(FAMILIES["llama-gqa"]))
    with using(()):
        assert not is_exact_by_default(config, torch.bfloat16, CPU, is_streamed=True)
        assert "processor" in (reason_against_exactness(config, torch.bfloat16, CPU) or "")


def test_where_decoders_on_a_gpu_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streamed ones, whose passes wait for weights; not those with experts or packed KV entries."""
    config, cuda = read_config(config_json(FAMILIES["llama-gqa"])), torch.device("cuda")
    monkeypatch.setattr("offspec.backends.gpu.row_kernels", lambda: object())
    assert is_exact_by_default(config, torch.bfloat16, cuda, is_streamed=True)
    assert not is_exact_by_default(config, torch.bfloat16, cuda, is_streamed=False)
    assert not is_exact_by_default(config, torch.bfloat16, cuda, is_streamed=True, kv=EIGHT_BIT)
    mixture = read_config(config_json(FAMILIES["qwen3-moe"]))
    assert not is_exact_by_default(mixture, torch.bfloat16, cuda, is_streamed=True)
    hybrid = read_config(config_json(FAMILIES["qwen3.5"]))
    assert "states" in (reason_against_exactness(hybrid, torch.bfloat16, cuda) or "")
    large = replace(config, head_dim=512)
    assert "heads" in (reason_against_exactness(large, torch.bfloat16, cuda) or "")
    monkeypatch.setattr(WORKING_KERNELS, "_works", {("exact rows", cuda): False})
    assert "C compiler" in (reason_against_exactness(config, torch.bfloat16, cuda) or "")
    monkeypatch.setattr("offspec.backends.gpu.row_kernels", lambda: None)
    assert "Triton" in (reason_against_exactness(config, torch.bfloat16, cuda) or "")


# ------------------------------------------------------------------------------------------------ parts of a layer


@cache
def noise(num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(4)).to(dtype)


@each_dtype
@pytest.mark.parametrize("width", [24, 896])
def test_norms_do_not_depend_on_other_rows(width: int, dtype: torch.dtype) -> None:
    x, weight, bias = noise(256, width, dtype), noise(1, width, dtype)[0], noise(2, width, dtype)[1]
    for kind in NORMS:
        for backend in (backend_of(CPU), backend_of(CPU, EXACT)):
            together = normalize(x, weight, bias, kind, 1e-6, backend)
            for num_rows in ROWS:
                alone = normalize(x[-num_rows:], weight, bias, kind, 1e-6, backend)
                assert torch.equal(alone, together[-num_rows:])


@each_dtype
@pytest.mark.parametrize("width", [100, 1100])
def test_activations_do_not_depend_on_other_rows(width: int, dtype: torch.dtype) -> None:
    x = noise(256, width, dtype) * 4
    each = ExactCpuBackend(EXACT).each
    for activate in (*ACTIVATIONS.values(), torch.tanh):
        together, fused = each(activate, x), each(activate, x.repeat(1, 2)[:, :width])
        for num_rows in (1, 3, 64):
            assert torch.equal(each(activate, x[-num_rows:]), together[-num_rows:])
            assert torch.equal(fused[-num_rows:], together[-num_rows:])


def test_rotations_do_not_depend_on_other_rows() -> None:
    config = read_config(config_json(FAMILIES["llama-gqa"]))
    assert config.rope is not None
    rotary = RotaryEmbedding(config.rope, 24, dtype=torch.float32, device=CPU)
    positions = torch.randint(3000, (256,), generator=torch.Generator().manual_seed(5))
    cos, sin = rotary.at(positions)
    x = noise(256, 24, torch.bfloat16)[:, None]
    together = rotate(x, cos.bfloat16(), sin.bfloat16())
    growth = Rotations(positions).growth(0.1, 512)
    for num_rows in ROWS:
        some = rotary.at(positions[:num_rows])
        assert torch.equal(some[0], cos[:num_rows])
        assert torch.equal(some[1], sin[:num_rows])
        assert torch.equal(rotate(x[:num_rows], *(each.bfloat16() for each in some)), together[:num_rows])
        assert torch.equal(Rotations(positions[:num_rows]).growth(0.1, 512), growth[:num_rows])
