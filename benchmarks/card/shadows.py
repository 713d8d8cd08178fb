"""Seconds per round of a shadow: the target's layers in 4, 3 or 2 bits, beside what `offspec plan` predicts.

Every layer is the same sample in memory, so a shadow of a model of any size can be measured. Its tokens mean nothing.
Tokens/s follow from these seconds, those of passes, and tokens per pass (`docs/drafts.md`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.streaming import star
from offspec.checkpoints.from_config import layers_from_config
from offspec.checkpoints.opening import ModelFiles
from offspec.loaders.formats import Weight
from offspec.loaders.layer_view import LayerView
from offspec.loaders.params import SHADOW_FORMATS
from offspec.loaders.tiers import StoredLayer, StoredModel
from offspec.loaders.weights import RamWeights
from offspec.model.cuda_graphs import WIDTHS
from offspec.model.decoder import CachedDecoder, Decoder
from offspec.planning.drafting import EAGER_LAYER_S
from offspec.planning.plan import Work, layer_s

from .bench import Bench
from .jobs import CONTEXT, Figures
from .kernels import round_s


def shadow_rounds(bench: Bench, name: str) -> Iterator[Figures]:
    """For each number of bits: bytes of all layers, a round's seconds by rows, and the seconds as predicted."""
    files, found = bench.grown(name)[0].files, dict[str, Any]()
    for bits, form in SHADOW_FORMATS.items():
        layers = layers_from_config(files.config, form)
        text = CachedDecoder(sampled(files, layers, bench.device), CONTEXT)
        text.score(list(range(5, 133)), *star(0))
        found[f"{bits} bits"] = {
            "bytes": sum(layer.cost(files.dtype).resident_bytes for layer in layers),
            "round_s": {width: round_s(text, width) for width in WIDTHS},
            "predicted_s": {width: _predicted_s(bench, files, layers, width) for width in WIDTHS},
        }
        yield dict(found)


def sampled(files: ModelFiles, layers: Sequence[StoredLayer], device: torch.device) -> Decoder:
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


def _predicted_s(bench: Bench, files: ModelFiles, layers: Sequence[StoredLayer], width: int) -> float:
    work = Work.of(replace(files, stored=replace(files.stored, layers=list(layers))))
    launch_s = EAGER_LAYER_S if bench.device.type == "cuda" else 0.0
    return len(layers) * (launch_s + layer_s(work, bench.rates(), width, work.kept_elements))
