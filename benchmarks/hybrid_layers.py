"""Measures a gated delta net beside attention on this CPU, in Qwen3.5-27B's shapes: passes, commits, and memory.

    python benchmarks/hybrid_layers.py [--nodes 64,256] [--turns 3] [--path 8]
    python benchmarks/hybrid_layers.py --recurrences [--turns 3]

With --recurrences: only the recurrence, row by row beside products of many rows, in seconds of the clock, by turns; and
its share of an exact pass in fp32 through its layer. Mamba2 has the shape of Nemotron-H's 8B.

Two decoders of one layer each, in fp32, with the same MLP. They take turns; the table has the minimum of each in CPU
seconds of this process, which other programs change little. A commit is of all 48 delta nets of the model; the states
follow in the next pass. The last line compares the bytes that a text keeps with what a plan counts.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from offspec.loaders.streaming.weights import RamWeights
from offspec.model.block import layer_shapes, memory_layouts
from offspec.model.config import ModelConfig, read_config
from offspec.model.decoder import CachedDecoder, Decoder, pass_together
from offspec.model.memory.layer_memory import Kept
from offspec.model.memory.recurrent_states import MOST_COPIES, Nodes, RecurrentLayout, RecurrentStates, State
from offspec.model.ordered_recurrence import chain_in_order, kind_of_rows, tree_in_order
from offspec.model.pass_rows import TextRows
from offspec.model.recurrence import DeltaInputs, Inputs, SumInputs, chain_step, tree_step
from offspec.scheduler.params import MOST_STATE_NODES

CPU, FP32 = torch.device("cpu"), torch.float32
PROMPT, VOCAB_SIZE = 64, 64  # the embedding is not measured
CONFIG = {
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_value_heads": 48,
    "linear_num_key_heads": 16,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
}
MAMBA = {
    "model_type": "nemotron_h",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_hidden_layers": 2,
    "hybrid_override_pattern": "M*",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "max_position_embeddings": 8192,
}
DELTA_NET, ATTENTION = 0, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="64,256", help="sizes of trees")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--path", type=int, default=8, help="nodes that are committed")
    parser.add_argument("--recurrences", action="store_true", help="compare two ways to compute them")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.recurrences:
        _print_recurrences(args.turns)
        return
    config = read_config(CONFIG)
    mlp = {name: tensor for name, tensor in _layer(config, ATTENTION).items() if name.startswith("mlp.")}
    texts = {kind: _text(config, layer, mlp) for kind, layer in (("attention", ATTENTION), ("delta net", DELTA_NET))}
    print(f"{torch.get_num_threads()} threads; CPU seconds of a pass of one layer\n")
    print("| nodes | attention | delta net | ratio |\n|---:|---:|---:|---:|")
    for count in map(int, filter(None, args.nodes.split(","))):
        rows = _tree(count)
        seconds = _seconds({kind: partial(_pass, text, rows) for kind, text in texts.items()}, args.turns)
        times = [seconds[kind] for kind in texts]
        print(f"| {count} | {times[0]:.3f} | {times[1]:.3f} | {times[1] / times[0]:.2f} |")
    layouts = [each for layer in memory_layouts(config) for each in layer if isinstance(each, RecurrentLayout)]
    commit_s, late_s, least_s = _commit_s(layouts[0], len(layouts), args.path, args.turns)
    print(
        f"\ncommit of {args.path} nodes in all delta nets: {1000 * commit_s:.1f} ms, then {1000 * late_s:.1f} in a "
        f"pass; reading and writing the states' bytes once takes {1000 * least_s:.1f}"
    )
    _print_memory(layouts[0], len(layouts))


def _print_recurrences(turns: int) -> None:
    print(f"{torch.get_num_threads()} threads; milliseconds of a layer\n")
    print("| recurrence | rows | products | row by row | ratio | share of a pass |\n|---|---|---:|---:|---:|---:|")
    for kind, settings in (("delta net", CONFIG), ("Mamba2", MAMBA)):
        config = read_config(settings)
        text = _text(config, 0, {})
        text.decoder.is_exact = True
        for name, rows in _passes():
            state, inputs = _recurrence(config, len(rows.tokens) or len(rows.chain))
            ways: tuple[Callable[[], object], ...] = (
                partial(chain_step, state, inputs),
                partial(chain_in_order, state, inputs),
            )
            if len(rows.tokens):
                mask, parents = torch.from_numpy(rows.mask), torch.from_numpy(rows.parents)
                ways = partial(tree_step, state, inputs, mask), partial(tree_in_order, state, inputs, parents)
            times = _seconds(dict(zip(("products", "ordered"), ways, strict=True)), turns, time.perf_counter)
            pass_s = _seconds({"pass": partial(_pass, text, rows)}, 1, time.perf_counter)["pass"]
            products, ordered = (1000 * times[way] for way in ("products", "ordered"))
            figures = f"{products:.2f} | {ordered:.2f} | {ordered / products:.2f} | {ordered / 10 / pass_s:.1f} %"
            print(f"| {kind} | {name} | {figures} |", flush=True)


def _passes() -> list[tuple[str, TextRows]]:
    chains = [(f"chain of {count}", TextRows.of_chain([1] * count)) for count in (1, 64, 512)]
    return [*chains, ("tree of 64", _tree(64))]


def _recurrence(config: ModelConfig, num_rows: int) -> tuple[Tensor, Inputs]:
    """A random state, and what rows bring to it."""
    (part,) = (each for each in memory_layouts(config)[0] if isinstance(each, RecurrentLayout))
    heads, key_heads, key_size, value_size = part.num_heads, part.key_heads, part.key_size, part.value_size
    queries, keys = (F.normalize(torch.randn(num_rows, key_heads, key_size), dim=-1) for _ in range(2))
    values, decays = torch.randn(num_rows, heads, value_size), -0.1 * torch.rand(num_rows, heads)
    kind = DeltaInputs if config.delta is not None else SumInputs
    last = torch.rand(num_rows, heads) if kind is DeltaInputs else torch.zeros_like(values)
    return torch.randn(heads, key_size, value_size), kind(queries, keys, values, decays, last)


def _layer(config: ModelConfig, layer: int, known: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Random weights by short name; those in `known` are shared."""
    known = known or {}
    shapes = {name: shape for name, shape in layer_shapes(config, layer).items() if name not in known}
    return {**known, **{name: torch.empty(shape).uniform_(-0.01, 0.01) for name, shape in shapes.items()}}


def _text(config: ModelConfig, layer: int, mlp: dict[str, Tensor]) -> CachedDecoder:
    """A decoder of one of the layers, behind a prompt."""
    tables = {name: torch.zeros(shape) for name, shape in config.shared_shapes().items()}
    weights = RamWeights([_layer(config, layer, mlp)], tables)
    text = CachedDecoder(Decoder(config.only_layers([layer]), weights, dtype=FP32, device=CPU), PROMPT + 2048)
    pass_together([(text, TextRows.of_chain([1] * PROMPT))])
    return text


def _tree(count: int) -> TextRows:
    """A random tree of `count` nodes, about as deep as drafted ones."""
    chance = random.Random(0)
    parents = [chance.randrange(max(-1, node - 24), node) for node in range(count)]
    mask, depths = np.zeros((count, count), dtype=np.bool_), np.ones(count, dtype=np.int64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node], depths[node] = mask[parent], depths[parent] + 1
        mask[node, node] = True
    return TextRows([1], np.ones(count, dtype=np.int64), depths, mask)


def _pass(text: CachedDecoder, rows: TextRows) -> None:
    pass_together([(text, rows)])
    text.keep([])


def _seconds(
    ways: dict[str, Callable[[], object]], turns: int, clock: Callable[[], float] = time.process_time
) -> dict[str, float]:
    """The least seconds of each, by default of the CPU; the first turn warms up."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns + 1):
        for name, way in ways.items():
            began = clock()
            way()
            found[name].append(clock() - began)
    return {name: min(times[1:]) for name, times in found.items()}


def _commit_s(layout: RecurrentLayout, num_layers: int, path: int, turns: int) -> tuple[float, float, float]:
    """The least CPU seconds for committing a path in all delta nets, for moving their states, and for their bytes."""
    states, times = layout.new(num_layers, FP32, CPU), list[tuple[float, float, float]]()
    for _ in range(turns + 1):
        _fill(states, MOST_STATE_NODES, is_copied=False)
        began = time.process_time()
        states.keep(Kept(0, range(path), [], None))
        committed = time.process_time()
        for layer in range(num_layers):
            states.state(layer)
        moved = time.process_time()
        for layer in range(num_layers):
            states.state(layer).matrix.mul_(1.0)
        times.append((committed - began, moved - committed, time.process_time() - moved))
    commit_s, late_s, least_s = (min(each) for each in zip(*times[1:], strict=True))
    return commit_s, late_s, least_s


def _fill(states: RecurrentStates, num_nodes: int, *, is_copied: bool) -> None:
    """Append a token, and nodes that follow each other, as a pass would."""
    c = states.layout
    for layer in range(states.num_layers):
        progress = states.progress(layer, 0)
        keys = torch.ones(num_nodes, c.key_heads, c.key_size)
        updates, decays = torch.ones(num_nodes, c.num_heads, c.value_size), torch.zeros(num_nodes, c.num_heads)
        progress.nodes = Nodes(kind_of_rows(CPU)(keys, updates, decays), torch.ones(num_nodes, c.channels))
        progress.before_last = progress.state if is_copied else None
        progress.state = State(torch.ones_like(progress.state.matrix), torch.ones_like(progress.state.inputs))
    states.parents(torch.arange(-1, num_nodes - 1))
    states.append(1, num_nodes)


def _print_memory(layout: RecurrentLayout, num_layers: int) -> None:
    """With all copies, and as many nodes as may be pending; and the states that a pass is about to make."""
    states = layout.new(num_layers, FP32, CPU)
    for _ in range(MOST_COPIES + 1):
        _fill(states, 0, is_copied=True)
    _fill(states, MOST_STATE_NODES, is_copied=False)
    kept, made = states.nbytes, num_layers * sum(part.nbytes for part in vars(states.state(0)).values())
    planned = num_layers * layout.nbytes(MOST_STATE_NODES, FP32.itemsize)
    print(
        f"a text keeps {kept / 1e6:.1f} MB, and a pass makes {made / 1e6:.1f} MB; the plan has {planned / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
