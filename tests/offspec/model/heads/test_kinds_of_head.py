"""Heads as published: their logits are those of the reference forward, in the text and in trees; bad files are refused.

The reference is written in plain torch (`head_twins`). Files written by each project's own code agreed with its own
forward within 5e-6 (docs/LOG.md, 2026-11-23).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offspec.checkpoints.head_files import HeadFiles, is_head
from offspec.checkpoints.load import load_decoder
from offspec.checkpoints.model_files import ModelFiles
from offspec.checkpoints.opening import open_model
from offspec.errors import CheckpointError, UnsupportedModelError
from offspec.loaders.convert import convert as convert_layers
from offspec.loaders.params import ConvertParams
from offspec.model.decoder import Decoder
from offspec.model.heads.eagle import tapped_layers
from offspec.model.heads.head import Head
from offspec.model.heads.text import HeadText
from offspec.planning.plan import all_resident
from offspec.scheduler.trees.token_tree import TokenTree
from offspec.scheduler.trees.verify import TargetPass, Verdict

from ....fakes import CPU
from ....pair import build_pair
from ....refusals import refused
from ...checkpoints.test_mistral import write_mistral
from ..test_decoder import NO_NODES
from .head_twins import (
    CLOVER2_CONFIG,
    DFLASH_CONFIG,
    DSPARK_CONFIG,
    EAGLE_CONFIG,
    HYDRA_CONFIG,
    HYDRA_PREFIX_CONFIG,
    MEDUSA_CONFIG,
    MLP_CONFIG,
    EagleTwin,
    FspadTwin,
    clover2_states,
    clover2_tensors,
    dflash_states,
    dflash_tensors,
    dspark_tensors,
    eagle_tensors,
    fspad_tensors,
    hydra_logits,
    hydra_prefix,
    hydra_tensors,
    markov_logits,
    medusa_logits,
    medusa_tensors,
    mlp_logits,
    mlp_tensors,
    write_folder,
)

EAGLE_1 = EAGLE_CONFIG | {"architectures": ["LlamaForCausalLM"]}
INNER = {key: value for key, value in EAGLE_CONFIG.items() if key not in ("architectures", "draft_vocab_size")}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 96,
    "transformer_layer_config": INNER,
    "norm_before_residual": True,
    "norm_output": True,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
    "speculators_config": {"algorithm": "eagle3"},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any], str, str]] = {  # version, config, the layer's prefix, a pickle's name
    "EAGLE-1": (1, EAGLE_1, "layers.0", ""),
    "EAGLE-3": (3, EAGLE_CONFIG, "midlayer", ""),
    "EAGLE-3, pickled": (3, EAGLE_CONFIG, "midlayer", "pytorch_model.bin"),
    "Speculators": (3, SPECULATORS, "layers.0", ""),
    "FSPAD": (1, EAGLE_1, "layers.0", ""),
}


@pytest.fixture(scope="module")
def target_files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    pair = build_pair(tmp_path_factory.mktemp("pair"), num_layers=8)
    return open_model(pair.target, "fp32", [])


@pytest.fixture(scope="module")
def target(target_files: ModelFiles) -> Decoder:
    return load_decoder(target_files, all_resident(target_files), CPU)


def head_of(folder: Path, target_files: ModelFiles, target: Decoder) -> Head:
    files = HeadFiles.open(folder, target_files.config)
    return files.spec.make(files.load(torch.float32, CPU), target)


class States:
    """The states of a pass, as `HeadText.feed` reads them: rows before the root, the root, and nodes."""

    def __init__(self, states: Tensor, layers: Sequence[int], num_before: int) -> None:
        self.num_before, self._states = num_before, states
        self.layer_states = dict(zip(layers, states.chunk(max(1, len(layers)), dim=-1), strict=False))

    def states(self, rows: Sequence[int]) -> Tensor:
        return self._states[self.num_before :][list(rows)]

    def states_before(self, count: int) -> Tensor:
        return self._states[self.num_before - count : self.num_before]


def told(text: list[int], states: Tensor, layers: Sequence[int], path: list[int], tokens: list[int]) -> TargetPass:
    """A pass over the end of `text` and a chain of nodes, with these states [rows before, root, nodes]."""
    num_nodes = len(path)
    rows = States(states, layers, len(states) - 1 - num_nodes)
    tree = TokenTree.chain(tokens[:num_nodes]) if num_nodes else TokenTree.empty()
    return TargetPass(text, tree, Verdict(path, tokens), SimpleNamespace(), rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_the_reference(layout: str, tmp_path: Path, target_files: ModelFiles, target: Decoder) -> None:
    """After a text that came in two passes, and at the nodes of a tree that grew in two rounds."""
    version, config, prefix, pickled = LAYOUTS[layout]
    tensors = fspad_tensors() if layout == "FSPAD" else eagle_tensors(version, layer=prefix)
    folder = write_folder(tmp_path / "head", config, tensors, pickled=pickled)
    assert is_head(folder)
    head = head_of(folder, target_files, target)
    flags = {name: bool(config.get(name)) for name in ("norm_before_residual", "norm_output")}
    twin = FspadTwin(tensors, target) if layout == "FSPAD" else EagleTwin(version, tensors, target, **flags)
    check_logits(head, twin, 32 * (3 if version == 3 else 1))


def test_logits_of_mistrals_eagle(tmp_path: Path, target_files: ModelFiles, target: Decoder) -> None:
    """In its own layout: EAGLE-1 with a whole layer, and a norm behind it."""
    tensors = eagle_tensors(1, layer="layers.0", has_norms=True)
    del tensors["fc.bias"]
    stored = {**tensors, "eagle_linear.weight": tensors["fc.weight"]}
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    config = {**EAGLE_CONFIG, "rope_parameters": rope, "tie_word_embeddings": False, "sliding_window": None}
    folder = write_mistral(tmp_path / "head", config, {name: t for name, t in stored.items() if name != "fc.weight"})
    assert is_head(folder)
    head = head_of(folder, target_files, target)
    check_logits(head, EagleTwin(1, {**tensors, "fc.bias": torch.zeros(32)}, target), 32)


def check_logits(head: Head, twin: Any, width: int) -> None:
    """After a text that came in two passes, and in a tree. width: of the target's states that the head reads."""
    text = HeadText(head)
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(9, width, generator=generator)
    tokens = torch.randint(0, 300, (10,), generator=generator).tolist()
    text.feed(told(tokens[:6], states[:6], head.target_layers, [], tokens[6:7]))
    root = text.score(tokens[6:7], *NO_NODES)
    fused = twin.fused(states)
    torch.testing.assert_close(root, twin.logits(fused[:6], tokens[1:7])[0], atol=1e-4, rtol=1e-4)
    text.keep([])
    text.feed(told(tokens[:7], states[6:9], head.target_layers, [0, 1], tokens[7:10]))
    assert text.length == 9
    root = text.score(tokens[9:], *NO_NODES)
    expected, above = twin.logits(fused, tokens[1:])
    torch.testing.assert_close(root, expected, atol=1e-4, rtol=1e-4)
    parents, nodes = [-1, -1, 0, 2, 0], np.array([11, 12, 13, 14, 15])
    depths = np.array([1, 1, 2, 3, 2])
    rounds = [text.score([], nodes[:2], depths[:2], np.array(parents[:2]))]
    rounds.append(text.score([], nodes[2:], depths[2:], np.array(parents)))  # with a node and its child
    for node, found in enumerate(torch.cat(rounds)):
        path = _path(node, parents)
        features, last = fused, above
        for step in range(len(path)):
            features = torch.cat((features, last))
            wanted, last = twin.logits(features, [*tokens[1:], *nodes[path[: step + 1]].tolist()])
        torch.testing.assert_close(found[None], wanted, atol=1e-4, rtol=1e-4)


CHAINED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "Medusa": (MEDUSA_CONFIG, medusa_tensors, "medusa_lm_head.pt"),
    "Hydra": (HYDRA_CONFIG, hydra_tensors, "hydra_lm_head.pt"),
    "Hydra++": (HYDRA_PREFIX_CONFIG, partial(hydra_tensors, has_prefix=True), "hydra_lm_head.pt"),
    "MLP speculator": (MLP_CONFIG, mlp_tensors, ""),
}


@pytest.mark.parametrize("kind", CHAINED)
def test_logits_of_heads_without_attention(
    kind: str, tmp_path: Path, target_files: ModelFiles, target: Decoder
) -> None:
    config, make, pickled = CHAINED[kind]
    tensors: dict[str, Tensor] = make()
    head = head_of(write_folder(tmp_path, config, tensors, pickled=pickled), target_files, target)
    text, states, tokens = HeadText(head), torch.randn(5, 32), [7, 8, 9, 10, 11, 12]
    text.feed(told(tokens[:5], states, head.target_layers, [], tokens[5:]))
    assert text.max_context == len(tokens) + 3, "three tokens can be predicted"
    parents, nodes, depths = [-1, -1, 0, 1], np.array([20, 21, 22, 23]), np.array([1, 1, 2, 2])
    rounds = [text.score(tokens[5:], *NO_NODES)]
    rounds.append(text.score([], nodes[:1], depths[:1], np.array(parents[:1])))
    rounds.append(text.score([], nodes[1:], depths[1:], np.array(parents)))  # two depths in one round
    state = (hydra_prefix(tensors, states) if kind == "Hydra++" else states)[-1]
    for node, found in enumerate(torch.cat(rounds), start=-1):
        path = [tokens[5], *nodes[_path(node, parents)].tolist()] if node >= 0 else tokens[5:]
        embedded = target.embedding_rows(torch.tensor(path))
        if kind == "MLP speculator":
            wanted = mlp_logits(tensors, state, path)
        else:
            twin = medusa_logits if kind == "Medusa" else hydra_logits
            wanted = twin(tensors, state, embedded)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def test_logits_of_clover_2(tmp_path: Path, target_files: ModelFiles, target: Decoder) -> None:
    """In the text, which came in two passes, and along a branch of a tree."""
    tensors = clover2_tensors()
    folder = write_folder(tmp_path, CLOVER2_CONFIG, tensors | {"lm_head.weight": torch.zeros(300, 32)})
    assert is_head(folder)
    text = HeadText(head_of(folder, target_files, target))
    states, tokens, path = torch.randn(9, 32), [*range(20, 30)], [11, 12, 13]
    text.feed(told(tokens[:6], states[:6], (), [], tokens[6:7]))
    text.score(tokens[6:7], *NO_NODES)
    text.feed(told(tokens[:7], states[6:9], (), [0, 1], tokens[7:10]))
    found = [text.score(tokens[9:], *NO_NODES)]
    found.append(text.score([], np.array([11, 50]), np.array([1, 1]), np.array([-1, -1])))
    for depth in (2, 3):
        parents = [-1, -1, 0, 2][: depth + 1]
        found.append(text.score([], np.array([path[depth - 1]]), np.array([depth]), np.array(parents)))
    rows = torch.cat((found[0], found[1][:1], *found[2:]))
    expected = target.linear_logits(clover2_states(tensors, states, [*tokens[1:], *path]))
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=1e-4)


SPECULATORS_DFLASH = {
    "speculators_model_type": "dflash",
    "block_size": 6,
    "mask_token_id": 7,
    "aux_hidden_state_layer_ids": [0, 2, 4],
    "transformer_layer_config": {k: v for k, v in DFLASH_CONFIG.items() if not k.startswith(("dflash", "block"))},
}


WINDOWED_DFLASH = {
    **DFLASH_CONFIG,
    "use_sliding_window": True,
    "sliding_window": 3,
    "layer_types": ["full_attention", "sliding_attention"],
}
SCALES = {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 1.5}
SCALED_DFLASH = {**DFLASH_CONFIG, "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2, 4], **SCALES}}


@pytest.mark.parametrize(
    ("config", "seen"),
    [
        (DFLASH_CONFIG, {}),
        (SPECULATORS_DFLASH, {}),
        (SCALED_DFLASH, {}),
        (WINDOWED_DFLASH, {"window": 3, "is_causal": True}),
        ({**WINDOWED_DFLASH, "is_causal": False}, {"window": 3}),
    ],
    ids=["z-lab", "Speculators", "scales", "window", "window-both-ways"],
)
def test_logits_of_dflash(
    config: dict[str, Any], seen: dict[str, Any], tmp_path: Path, target_files: ModelFiles, target: Decoder
) -> None:
    """A block behind a text that came in two passes: every place of the block has its own distribution."""
    tensors = dflash_tensors()
    _, found, states, last = drafted_block(write_folder(tmp_path, config, tensors), target_files, target, 5)
    block = target.embed(torch.tensor([last, 7, 7, 7, 7, 7])) * (2 if config is SCALED_DFLASH else 1)
    expected = target.linear_logits(dflash_states(tensors, states, block, **seen)[1:])
    if config is SCALED_DFLASH:
        expected = 1.5 * torch.tanh(0.5 * expected / 1.5)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


SPECULATORS_DSPARK = {**SPECULATORS_DFLASH, "speculators_model_type": "dspark", "markov_rank": 6}


@pytest.mark.parametrize(
    ("config", "first"),
    [(DSPARK_CONFIG, 0), (SPECULATORS_DSPARK, 0), ({**SPECULATORS_DSPARK, "sample_from_anchor": False}, 1)],
    ids=["DeepSpec", "Speculators", "after-the-anchor"],
)
def test_logits_of_dspark(
    config: dict[str, Any], first: int, tmp_path: Path, target_files: ModelFiles, target: Decoder
) -> None:
    """As DFlash's, and each place is corrected by the token before it. first: the row that predicts the next token."""
    tensors = dspark_tensors()
    head, found, states, last = drafted_block(write_folder(tmp_path, config, tensors), target_files, target, 6 - first)
    block = tensors["embed_tokens.weight"][torch.tensor([last, 7, 7, 7, 7, 7])]
    expected = dflash_states(tensors, states, block)[first:] @ tensors["lm_head.weight"].T
    expected += markov_logits(tensors, [last, 41, 42, 43, 44, 45][: 6 - first])
    assert head.kind == "DSpark"
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_a_markov_head_of_another_type_is_refused(tmp_path: Path, target_files: ModelFiles) -> None:
    gated = dspark_tensors() | {"markov_head.gate_proj.weight": torch.ones(6, 38)}
    with refused(UnsupportedModelError, "markov_head.gate_proj.weight", "DSpark"):
        HeadFiles.open(write_folder(tmp_path, DSPARK_CONFIG, gated), target_files.config)


def drafted_block(
    folder: Path, target_files: ModelFiles, target: Decoder, steps: int
) -> tuple[Any, Tensor, Tensor, int]:
    """The spec of a block head, its logits [steps, vocab] along a chain of the tokens 41, 42, ... behind a text that
    came in two passes, the target's states in the text, and the text's last token.
    """
    assert is_head(folder)
    files = HeadFiles.open(folder, target_files.config)
    text = HeadText(files.spec.make(files.load(torch.float32, CPU), target))
    states, tokens = torch.randn(9, 96), [*range(20, 30)]
    text.feed(told(tokens[:6], states[:6], (0, 2, 4), [], tokens[6:7]))
    text.score(tokens[6:7], *NO_NODES)
    text.keep([])
    text.feed(told(tokens[:7], states[6:9], (0, 2, 4), [0, 1], tokens[7:10]))
    found = [text.score(tokens[9:], *NO_NODES)]
    for depth in range(1, steps):
        parents = [-1, *range(steps)][:depth]
        found.append(text.score([], np.array([40 + depth]), np.array([depth]), np.array(parents)))
    assert text.max_context == len(tokens) + steps
    return files.spec, torch.cat(found), states, tokens[9]


def _path(node: int, parents: Sequence[int]) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def test_the_text_can_be_cut(tmp_path: Path, target_files: ModelFiles, target: Decoder) -> None:
    """After another continuation, logits are those of a head that was only told of that one."""
    tensors = eagle_tensors(3)
    head = head_of(write_folder(tmp_path, EAGLE_CONFIG, tensors), target_files, target)
    states, tokens = torch.randn(8, 96), [*range(20, 29)]
    fresh, text = HeadText(head), HeadText(head)
    fresh.feed(told(tokens[:8], states, head.target_layers, [], tokens[8:]))
    text.feed(told(tokens[:5], states[:5], head.target_layers, [], [77]))
    text.score([77], *NO_NODES)
    text.truncate(5)  # the same five tokens, and then another one than 77
    assert text.max_context
    text.feed(told(tokens[:8], states[5:], head.target_layers, [], tokens[8:]))
    found = [each.score(tokens[8:], *NO_NODES) for each in (text, fresh)]
    torch.testing.assert_close(*found)
    text.truncate(3)
    assert text.max_context == 0, "the state before the next token is gone, so it waits for the target"


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({}, (1, 3, 4)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}, (0, 3, 7)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 7]}}, (1, 4, 7)),
    ],
    ids=["default", "Speculators", "SGLang"],
)
def test_which_layers_are_read(config: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert tapped_layers(config, 8) == layers


def test_unreadable_heads_are_refused(tmp_path: Path, target_files: ModelFiles) -> None:
    config, good = target_files.config, eagle_tensors(3)

    def refusal(name: str, kind: type[Exception], config_json: dict[str, Any], tensors: dict[str, Tensor]) -> str:
        with pytest.raises(kind) as caught:
            HeadFiles.open(write_folder(tmp_path / name, config_json, tensors), config)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    said = refusal("unknown", UnsupportedModelError, EAGLE_CONFIG, good | {"midlayer.gate.weight": torch.ones(2, 2)})
    assert "midlayer.gate.weight" in said
    without = {name: tensor for name, tensor in good.items() if name != "norm.weight"}
    assert "norm.weight is missing" in refusal("missing", CheckpointError, EAGLE_CONFIG, without)
    assert "fc.weight" in refusal("narrow", CheckpointError, EAGLE_CONFIG, good | {"fc.weight": torch.ones(32, 64)})
    far = EAGLE_CONFIG | {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}
    assert "layer 9" in refusal("far", UnsupportedModelError, far, good)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    (tmp_path / "damaged" / "pytorch_model.bin").write_bytes(b"PK\x03\x04 nothing of it")
    with pytest.raises(CheckpointError, match="cannot be read"):
        HeadFiles.open(tmp_path / "damaged", config)
    assert not is_head(tmp_path / "nowhere")


WRONG_TYPES = {
    "a quantised matrix": (EAGLE_CONFIG, {"midlayer.mlp.up_proj.weight": torch.ones(40, 32, dtype=torch.int8)}),
    "a table of floats": (EAGLE_CONFIG, {"d2t": torch.zeros(96)}),
    "a table of other tokens": (EAGLE_CONFIG, {"d2t": torch.full((96,), 1000)}),
    "no rows": (EAGLE_CONFIG, {"embed_tokens.weight": torch.zeros(0, 32)}),
    "a huge factor": (EAGLE_CONFIG | {"logit_scale": 10**400}, {}),
}


@pytest.mark.parametrize("what", WRONG_TYPES)
def test_wrong_numbers_are_refused(what: str, tmp_path: Path, target_files: ModelFiles, target: Decoder) -> None:
    config_json, changed = WRONG_TYPES[what]
    folder = write_folder(tmp_path, config_json, eagle_tensors(3) | changed)

    def load() -> None:
        files = HeadFiles.open(folder, target_files.config)
        files.spec.make(files.load(torch.bfloat16, CPU), target)

    with pytest.raises(CheckpointError) as caught:
        load()
    assert "\n" not in str(caught.value)


def test_a_quantised_head_stays_packed(tmp_path: Path, target_files: ModelFiles, target: Decoder) -> None:
    """Its logits are those of the unpacked matrices."""
    source = write_folder(tmp_path / "source", EAGLE_1, eagle_tensors(1, layer="layers.0"))
    convert_layers(source, tmp_path / "nf4", ConvertParams("nf4"), layer_prefix="layers.")
    files = HeadFiles.open(tmp_path / "nf4", target_files.config)
    name = "layers.0.mlp.up_proj.weight"
    packed, unpacked = (files.load(torch.float32, CPU, packed=packed) for packed in (True, False))
    assert not isinstance(packed[name], Tensor)
    assert isinstance(unpacked[name], Tensor)
    assert files.nbytes(torch.float32) < files.nbytes(torch.float32, packed=False)
    states, tokens = torch.randn(6, 32), [*range(20, 27)]
    found = list[Tensor]()
    for weights in (packed, unpacked):
        text = HeadText(files.spec.make(weights, target))
        text.feed(told(tokens[:6], states, (), [], tokens[6:]))
        found.append(text.score(tokens[6:], *NO_NODES))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_in_place_of_a_pickle_is_refused(tmp_path: Path, target_files: ModelFiles) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    os.mkfifo(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot be read"):
        HeadFiles.open(tmp_path, target_files.config)


def test_a_pickle_runs_no_code(tmp_path: Path, target_files: ModelFiles) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "touched",))

    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    torch.save({"fc.weight": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="cannot be read"):
        HeadFiles.open(tmp_path, target_files.config)
    assert not (tmp_path / "touched").exists()
