"""A decoder's parts: every pass begins with one embedding, and says what each layer made."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from offspec.model.block import build_blocks, layer_shapes
from offspec.model.config import read_config
from offspec.model.cuda_graphs import TreeGraphs
from offspec.model.decoder import CachedDecoder, Decoder, random_decoder, wanted_shapes
from offspec.model.early_exit import EarlyExit, shared_text
from offspec.model.names import EMBEDDING, LAYER_PREFIX
from offspec.model.parts.attention import Attention
from offspec.research.lora import Adapter, TreeRows, hidden_states

from ...fakes import FAMILIES, TinyModel, config_json
from ...refusals import refused
from .test_decoder import NO_NODES, Tree, assert_close, random_tokens

GetModel = Callable[[str], TinyModel]
CPU = torch.device("cpu")
TREE = Tree(random_tokens(5, 7), [-1, -1, 0, 2, 2])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_says_what_the_config_calls_for(family: str) -> None:
    config = read_config(config_json(FAMILIES[family]))
    blocks = build_blocks(config, dtype=torch.float32, device=CPU)
    assert [block.index for block in blocks] == list(range(config.num_layers))
    attentions = [part for block in blocks for part in block.parts if isinstance(part, Attention)]
    attending = [layer for layer in range(config.num_layers) if "attention" in config.parts_of(layer)[0]]
    assert [part.window for part in attentions] == [config.windows[layer] for layer in attending]
    whole = {f"{LAYER_PREFIX}{block.index}.{name}": s for block in blocks for name, s in block.shapes.items()}
    assert whole | config.shared_shapes() == wanted_shapes(config)
    for part in attentions:
        if config.has_fused_qkv:
            queries = config.num_heads * config.head_dim
            rows = (layer_shapes(config, part.layer)[f"{config.attention}.qkv_proj.weight"][0] - queries) // 2
        else:
            keys = "k_proj" if config.latent is None else "kv_a_proj_with_mqa"
            rows = layer_shapes(config, part.layer).get(f"{config.attention}.{keys}.weight", (0,))[0]
        assert rows == (0 if part.memory is None else part.memory.num_heads * part.memory.head_dim)
    assert [part.rotary is None for part in attentions] == [layer in config.unrotated for layer in attending]


# ------------------------------------------------------------------------------------------------ one embedding


def plain_pass(decoder: Decoder) -> Tensor:
    return CachedDecoder(decoder).score([5, 6, 7], *TREE.round(0, 5))


def static_pass(decoder: Decoder) -> Tensor:
    text = TreeGraphs(decoder, 64).text(64)
    text.score([5, 6, 7], *NO_NODES)
    return text.score([], *TREE.round(0, 5))


def trained_pass(decoder: Decoder) -> Tensor:
    trainee = Adapter(decoder, 4).trainee()
    hidden = hidden_states(trainee, torch.tensor([5, 6, 7, 8]), TreeRows(trainee, np.arange(4) - 1))
    return trainee.head(trainee.normed(hidden)).detach()


def shared_pass(decoder: Decoder) -> Tensor:
    with decoder.weights.layer(1) as layer:
        exit_layer = EarlyExit(decoder, 1, dict(layer))  # type: ignore[arg-type]
    target, draft = shared_text(decoder, exit_layer)
    return torch.cat([text.score([5, 6, 7], *TREE.round(0, 5)) for text in (draft, target)])


@pytest.mark.parametrize("run", [plain_pass, static_pass, trained_pass, shared_pass])
def test_what_is_done_to_the_embedding_is_done_in_every_pass(
    run: Callable[[Decoder], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scaled in `Decoder.embed`, a model with an untied head is one whose table is scaled."""
    config = read_config(config_json(FAMILIES["llama-gqa"]))
    assert not config.tied_head
    decoder = random_decoder(config, 0, dtype=torch.float32, device=CPU)
    before = run(decoder)
    with monkeypatch.context() as patch:
        embed = Decoder.embed
        patch.setattr(Decoder, "embed", lambda self, tokens: 4 * embed(self, tokens))
        found = run(decoder)
    table = decoder.weights.shared(EMBEDDING)
    assert isinstance(table, Tensor)
    table *= 4
    assert torch.equal(found, run(decoder))
    assert not torch.equal(found, before)


@pytest.mark.parametrize("family", ["gemma3", "phi3", "granite", "cohere-qk-norm", "youtu"])
def test_every_kind_of_pass_computes_what_a_family_changes(tiny_model: GetModel, family: str) -> None:
    """Recorded rounds, a draft that learns, and an exit layer say of the same tokens what a plain pass says."""
    decoder = tiny_model(family).decoder()
    expected = plain_pass(decoder)
    assert_close(static_pass(decoder), expected[1:])
    chain = decoder.forward(torch.tensor([5, 6, 7, 8]), torch.arange(4), decoder.new_cache())
    assert_close(trained_pass(decoder), decoder.logits(chain))
    assert_close(shared_pass(decoder)[6:], expected)


# ------------------------------------------------------------------------------------------------ states of layers


@pytest.mark.parametrize("family", ["qwen2-layer-types"])
def test_hidden_states_after_layers_equal_transformers(tiny_model: GetModel, family: str) -> None:
    """But the last, which transformers norms."""
    model, tokens = tiny_model(family), random_tokens(14)
    with torch.no_grad():
        expected = model.reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    decoder = model.decoder()
    last = decoder.config.num_layers - 1
    nodes = np.array(tokens[10:]), np.arange(1, 5), np.arange(-1, 3)  # a tree of one branch
    found = CachedDecoder(decoder).score_rows(tokens[:10], *nodes, layers=[0, last - 1, last])
    assert found.layer_states.keys() == {0, last - 1, last}
    assert found.num_before == 9
    for layer in (0, last - 1):
        assert_close(found.layer_states[layer], expected[layer + 1][0])
    assert_close(decoder.normed(found.layer_states[last]), expected[-1][0])


def test_states_are_those_of_a_pass_in_chunks(tiny_model: GetModel) -> None:
    """Where a layer writes over what the one before it made."""
    decoder, tokens = tiny_model("llama-gqa").decoder(), random_tokens(700)
    whole = CachedDecoder(decoder).score_rows(tokens, *NO_NODES, layers=[0, 1])
    assert whole.layer_states[0].shape == (700, decoder.config.hidden_size)
    text = CachedDecoder(decoder)
    for first in range(0, 700, 100):
        part = text.score_rows(tokens[first : first + 100], *NO_NODES, layers=[0, 1])
        for layer in (0, 1):
            assert_close(part.layer_states[layer], whole.layer_states[layer][first : first + 100])


def test_a_shared_target_hands_out_what_it_goes_through(tiny_model: GetModel) -> None:
    """From the trunk's last layer on; what is before it is refused."""
    decoder = tiny_model("llama-gqa").decoder()
    with decoder.weights.layer(2) as layer:
        exit_layer = EarlyExit(decoder, 2, dict(layer))  # type: ignore[arg-type]
    target, draft = shared_text(decoder, exit_layer)
    draft.score([5, 6, 7], *TREE.round(0, 3))
    found = target.score_rows([5, 6, 7], *TREE.round(0, 5), layers=[1, 2]).layer_states
    expected = CachedDecoder(decoder).score_rows([5, 6, 7], *TREE.round(0, 5), layers=[1, 2]).layer_states
    for index in (1, 2):
        assert_close(found[index], expected[index])
    with refused(ValueError, "layer 0"):
        target.score_rows([8], *NO_NODES, layers=[0])
