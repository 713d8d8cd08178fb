"""A recurrent state as a kind of memory, in layers beside others with KV entries: trees, verdicts, rewinds, copies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from offspec.checkpoints.exit_layers import check_exit_layer, refuse_states
from offspec.errors import UsageError
from offspec.loaders.streaming.link import CopyStream
from offspec.model.block import has_entries_alone, layer_shapes, memory_bytes, memory_layouts
from offspec.model.config import ModelConfig, read_config
from offspec.model.cuda_graphs import is_static
from offspec.model.decoder import CachedDecoder, Decoder, random_decoder, wanted_shapes
from offspec.model.memory.kv_cache import KVLayout
from offspec.model.memory.kv_formats import EIGHT_BIT, PLAIN
from offspec.model.memory.kv_in_ram import EntriesInRam, LayersInRam
from offspec.model.memory.text_caches import TextCaches
from offspec.model.parts.kinds import PARTS

from ....fakes import FAMILIES, config_json
from ....refusals import refused
from ..averages import DECAY, WIDTH, Average, AverageLayout, Averages
from ..test_decoder import NO_NODES, assert_close, chain_logits, random_tokens

CPU = torch.device("cpu")
HYBRID = (("attention", "mlp"), ("average", "mlp"), ("average",), ("attention beside mlp",))


@pytest.fixture(scope="module", autouse=True)
def average_is_a_kind_of_part() -> Iterator[None]:
    PARTS["average"] = Average
    yield
    del PARTS["average"]


def hybrid(parts: tuple[tuple[str, ...], ...] = HYBRID) -> ModelConfig:
    config = read_config(config_json(FAMILIES["llama-gqa"]))
    return replace(config, num_layers=len(parts), windows=(None,) * len(parts), parts=parts)


@pytest.fixture(scope="module")
def decoder(average_is_a_kind_of_part: None) -> Decoder:
    return random_decoder(hybrid(), 0, dtype=torch.float32, device=CPU)


def test_layers_of_one_model_may_have_different_parts(decoder: Decoder) -> None:
    config = decoder.config
    layouts = memory_layouts(config)
    assert [type(layout) for layer in layouts for layout in layer] == [KVLayout, AverageLayout, AverageLayout, KVLayout]
    assert "average.in_proj.weight" in layer_shapes(config, 1)
    assert "self_attn.q_proj.weight" not in layer_shapes(config, 1)
    assert wanted_shapes(config)["model.layers.2.average.out_proj.weight"] == (config.hidden_size, WIDTH)
    assert config.only_layers([2, 3]).parts == HYBRID[2:]
    assert not is_static(decoder)


def test_a_part_may_be_all_of_a_model() -> None:
    """Against a plain loop over the tokens, which has no memory."""
    decoder, tokens = random_decoder(hybrid((("average",),)), 0, dtype=torch.float32, device=CPU), random_tokens(9)
    (part,) = decoder.blocks[0].parts
    assert isinstance(part, Average)
    x, state, outputs = decoder.embed(torch.tensor(tokens)), torch.zeros(WIDTH), list[Tensor]()
    with decoder.weights.layer(0) as tensors:
        weights = decoder.layer_weights(tensors)
        for number, row in zip(part.numbers(x, weights), x, strict=True):
            state = DECAY * state + (1 - DECAY) * number
            outputs.append(row + weights.linear("average.out_proj", state[None])[0])
    assert_close(chain_logits(decoder, tokens), decoder.logits(torch.stack(outputs)))


def test_a_text_goes_back_to_where_a_state_was_kept(decoder: Decoder) -> None:
    """So more tokens are scored again, and the logits are those of a text that was never longer."""
    tokens = random_tokens(20)
    caches = TextCaches(CachedDecoder(decoder), None)
    for piece in (tokens[:7], tokens[7:12], tokens[12:]):
        caches.target.score(piece, *NO_NODES)
    caches.text = list(tokens)
    changed = [*tokens[:11], 1, 2, 3]
    assert caches.rewind(changed) == len(changed) - 7
    assert caches.target.length == 7
    assert_close(caches.target.score(changed[7:], *NO_NODES)[0], chain_logits(decoder, changed)[-1])
    caches.rewind([5])
    assert caches.target.length == 0


def test_equal_layouts_share_a_memory(decoder: Decoder) -> None:
    cache = decoder.new_cache(range(1, 3))
    (memory, first), (other, second) = cache.state_of(1), cache.state_of(2)
    assert isinstance(memory, Averages)
    assert (memory is other, first, second) == (True, 0, 1)


def test_training_its_own_layers_is_refused() -> None:
    """A trained exit layer would share KV entries that some layers do not have; an untrained one reads states, too."""
    config = hybrid()
    assert not has_entries_alone(config)
    assert has_entries_alone(config.only_layers([0, 3]))
    with refused(UsageError, "llama", "training an exit layer", "`draft=lookup`"):
        refuse_states(config, "training an exit layer")
    check_exit_layer(1, config)


def test_formats_and_places_concern_kv_entries_alone(decoder: Decoder) -> None:
    config, states = decoder.config, 2 * WIDTH * 4
    sizes = [memory_bytes(config, 64, 4, kv=kv) for kv in (PLAIN, EIGHT_BIT)]
    assert sizes[0] == 64 * 2 * 2 * config.num_kv_heads * config.head_dim * 4 + states
    assert states < sizes[1] < sizes[0]
    spilled = Decoder(config, decoder.weights, dtype=torch.float32, device=CPU)
    spilled.entries_in_ram = EntriesInRam(frozenset(range(4)), PLAIN, CopyStream(CPU))
    tokens = random_tokens(10)
    assert isinstance(spilled.new_cache().kv_of(0)[0], LayersInRam)
    assert_close(chain_logits(spilled, tokens), chain_logits(decoder, tokens))
