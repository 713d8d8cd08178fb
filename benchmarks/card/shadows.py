"""Seconds per round of a shadow: the target's layers in 4, 3 or 2 bits, beside what `offspec plan` predicts.

Every layer is the same sample in memory, so a shadow of a model of any size can be measured. Its tokens mean nothing.
Tokens/s follow from these seconds, those of passes, and tokens per pass (`docs/results/drafts.md`). Texts with a real
shadow are those of the built-in target.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.streaming import star
from offspec import Engine
from offspec.backends.device_kinds import kind_of
from offspec.backends.weights import Weight
from offspec.checkpoints.from_config import layers_from_config
from offspec.checkpoints.model_files import ModelFiles
from offspec.loaders.machine.measure import measure_fused_rows
from offspec.loaders.params import SHADOW_FORMATS
from offspec.loaders.streaming.stored_model import StoredModel, StoredUnit
from offspec.loaders.streaming.weights import LayerView, RamWeights
from offspec.model.cuda_graphs import WIDTHS, TreeGraphs, is_static
from offspec.model.decoder import CachedDecoder, Decoder
from offspec.planning.plan import LAYER_LAUNCHES, PassWork, resident_layer_s

from .bench import Bench
from .jobs import CONTEXT, JOBS
from .kernels import round_s
from .results import Figures
from .texts import texts_of


def shadow_rounds(bench: Bench, name: str) -> Iterator[Figures]:
    """For each number of bits: bytes of all layers, a round's seconds by rows in each way, and the seconds predicted.

    unpacked: each matrix is unpacked, then multiplied. packed: few rows are multiplied without unpacking, up to
    `fused_rows`. graph: these rounds as captured graphs.
    """
    files, found = bench.grown_one("target", name).files, dict[str, Any]()
    repeats = 4 * JOBS[name].repeats
    for bits, form in SHADOW_FORMATS.items():
        layers = layers_from_config(files.config, form)
        decoder = sampled(files, layers, bench.device)
        rounds = {"unpacked": _rounds(CachedDecoder(decoder, CONTEXT), repeats)}
        found[f"{bits} bits"] = figures = {
            "bytes": sum(layer.cost(files.dtype).resident_bytes for layer in layers),
            "fused_rows": _measured_limits(layers, files.dtype, bench.device),
            "predicted_s": {width: _predicted_s(bench, files, layers, width) for width in WIDTHS},
            "round_s": rounds,
        }
        if any(figures["fused_rows"].values()):
            rounds["packed"] = _rounds(CachedDecoder(decoder, CONTEXT), repeats)
        if is_static(decoder):
            rounds["graph"] = _rounds(TreeGraphs(decoder, CONTEXT).text(CONTEXT), repeats)
        yield dict(found)


def shadow_texts(bench: Bench, name: str) -> Iterator[Figures]:
    """Tokens/s and tokens per pass of held-out prompts: the built-in target in bf16, with a shadow of 4 bits."""
    engine = Engine.load("builtin", draft="shadow:4", dtype="bf16", device=str(bench.device))
    try:
        yield {"texts": texts_of(engine, JOBS[name], is_brief=False)}
    finally:
        engine.close()


def _rounds(text: CachedDecoder, repeats: int) -> dict[int, float]:
    text.score(list(range(5, 133)), *star(0))
    return {width: round_s(text, width, repeats) for width in WIDTHS}


def _measured_limits(layers: Sequence[StoredUnit], dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """Rows up to which each kind and shape of matrix is multiplied packed from now on in this process."""
    kinds = {weight.fused_kind: weight for weight in layers[0].weights.values() if weight.fused_kind is not None}
    if device.type == "cpu":
        return {}
    return {f"{w.dtype} {w.shape[0]}x{w.shape[1]}": measure_fused_rows(w, device, dtype) for w in kinds.values()}


def sampled(files: ModelFiles, layers: Sequence[StoredUnit], device: torch.device) -> Decoder:
    """A decoder of the target's shape, all of whose layers are one sample of the first of `layers`."""
    config, dtype = files.config, files.dtype

    def ones(shape: Sequence[int]) -> torch.Tensor:
        return torch.ones(*shape, dtype=dtype, device=device)

    layer: dict[str, Weight] = {
        name: weight.to(device).sample(device) if weight.is_packed else ones(weight.shape)
        for name, weight in layers[0].weights.items()
    }
    shared = {name: ones(shape) for name, shape in config.shared_shapes().items()}
    num_elements = StoredModel(list(layers), {}).scratch_elements((), dtype)
    scratch = torch.empty(num_elements, dtype=dtype, device=device)
    view = LayerView(RamWeights([], shared), [layer] * len(layers), scratch)
    return Decoder(config, view, dtype=dtype, device=device)


def _predicted_s(bench: Bench, files: ModelFiles, layers: Sequence[StoredUnit], width: int) -> float:
    shadow = replace(files, stored=replace(files.stored, layers=list(layers)))
    launch_s = LAYER_LAUNCHES * kind_of(bench.device).replay_s
    return len(layers) * (launch_s + resident_layer_s(shadow, PassWork.of(shadow), bench.rates(), width))
