"""Kernels of one round or pass: draft rounds as CUDA graphs, a large vocabulary, tree attention in two ways."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.grow import Shape
from benchmarks.streaming import star
from offspec import SpeculationParams, builtin
from offspec.checkpoints.load import load_decoder
from offspec.checkpoints.opening import open_model
from offspec.loaders.files.containers import open_config
from offspec.loaders.streaming.tiers import TieredWeights, TierOptions
from offspec.model.config import read_config
from offspec.model.cuda_graphs import WIDTHS, TreeGraphs
from offspec.model.decoder import CachedDecoder, Decoder
from offspec.model.parts.kv_attention import attend
from offspec.planning.plan import all_resident
from offspec.scheduler.drafting.child_scores import log_normalisers
from offspec.scheduler.trees.sampling import gumbel

from .bench import Bench
from .jobs import CONTEXT, JOBS
from .results import Figures
from .timing import median_s, synchronize


def draft_rounds(bench: Bench, name: str) -> Iterator[Figures]:
    """A round of the built-in and the grown draft: launched kernel by kernel, and as a CUDA graph."""
    _, grown = bench.grown(name)
    files = open_model(builtin.path("draft"), "bf16", [])
    small = load_decoder(files, all_resident(files), bench.device)
    weights = TieredWeights(
        grown.files.stored,
        all_resident(grown.files),
        dtype=torch.bfloat16,
        device=bench.device,
        options=TierOptions(reader=grown.reader),
    )
    big = Decoder(grown.files.config, weights, dtype=torch.bfloat16, device=bench.device)
    found: dict[str, Any] = {}
    for kind, decoder in (("builtin", small), ("grown", big)):
        graphs, found[kind] = TreeGraphs(decoder, CONTEXT), {}
        for way, text in (("eager", CachedDecoder(decoder, CONTEXT)), ("graph", graphs.text(CONTEXT))):
            text.score(list(range(5, 133)), *star(0))
            found[kind][way] = {width: round_s(text, width, 4 * JOBS[name].repeats) for width in WIDTHS}
        found[kind]["graph_over_eager"] = {
            width: found[kind]["graph"][width] / found[kind]["eager"][width] for width in WIDTHS
        }
        graphs.close()
        decoder.weights.close()
    yield found


def round_s(text: CachedDecoder, width: int, repeats: int) -> float:
    """Median seconds of a draft round over `width` nodes, up to its logits."""
    return median_s(partial(text.score, [], *star(width)), text.synchronize, repeats, after=partial(text.keep, []))


def vocabulary(bench: Bench, name: str) -> Iterator[Figures]:
    """The cost of a large vocabulary for a round of WIDTHS[-1] rows at temperature 1; the grown pair's is small."""
    job, rows = JOBS[name], WIDTHS[-1]
    size = job.vocabulary or builtin_vocabulary()
    wait = partial(synchronize, bench.device)
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(0)).to(bench.device)
    states, head = (
        torch.ones(n, job.target.hidden_size, dtype=torch.bfloat16, device=bench.device) for n in (rows, size)
    )
    positions = count()
    yield {
        "vocabulary": size,
        "rows": rows,
        "noise_s_per_position": median_s(lambda: gumbel(0, next(positions), size, bench.device), wait),
        "normalisers_s": median_s(lambda: log_normalisers(logits), wait),
        "best_s": median_s(lambda: logits.topk(SpeculationParams.children), wait),
        "target_head_s": median_s(lambda: F.linear(states, head), wait),
    }


def builtin_vocabulary() -> int:
    return read_config(open_config(builtin.path("target")).config).vocab_size


def attention(bench: Bench, name: str) -> Iterator[Figures]:
    """One layer's attention of a tree, as in offspec, and with FlexAttention and a new mask per pass."""
    found, sizes = Figures(), ((CONTEXT, 64), (CONTEXT, 512), (4 * CONTEXT, 512))
    for num_keys, num_nodes in sizes if bench.device.type == "cuda" else ((64, 8),):
        found[f"{num_nodes} nodes, {num_keys} keys"] = _attention_of(bench, JOBS[name].target, num_nodes, num_keys)
        yield found


def _attention_of(bench: Bench, shape: Shape, num_nodes: int, num_keys: int) -> dict[str, Any]:
    generator, kv = torch.Generator().manual_seed(0), (shape.num_kv_heads, num_keys + num_nodes)
    queries, keys, values = (
        torch.randn(*rows, shape.head_dim, generator=generator).to(bench.device, torch.bfloat16)
        for rows in ((num_nodes, shape.num_heads), kv, kv)
    )
    mask = torch.ones(num_nodes, num_keys + num_nodes, dtype=torch.bool, device=bench.device)
    mask[:, num_keys:] = torch.eye(num_nodes, dtype=torch.bool, device=bench.device)
    sdpa, wait = partial(attend, queries, keys, values, mask), partial(synchronize, bench.device)
    found: dict[str, Any] = {"sdpa_s": median_s(sdpa, wait)}
    began = time.perf_counter()
    try:
        flex = flex_attention_over(queries, keys, values, mask)
        apart = (flex().float() - sdpa().float()).abs().max().item()
    except Exception as exc:  # noqa: BLE001 - it needs a compiler, which few machines have
        return found | {"flex_error": (str(exc).splitlines() or [type(exc).__name__])[0]}
    found["flex_first_s"] = time.perf_counter() - began
    return found | {"flex_s": median_s(flex, wait), "largest_difference": apart}


def flex_attention_over(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Callable[[], Tensor]:
    """`attend` by FlexAttention (2412.05496): compiled on a GPU, and everywhere
    with a block mask made of `mask` at each call.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compute = torch.compile(flex_attention, dynamic=False) if queries.device.type == "cuda" else flex_attention
    q, k, v = queries.transpose(0, 1)[None], keys[None], values[None]

    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return mask[row, key]

    def run() -> Tensor:
        blocks = create_block_mask(sees, None, None, *mask.shape, device=mask.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on a CPU that it is not compiled
            out = compute(q, k, v, block_mask=blocks, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out[0].transpose(0, 1)

    return run
