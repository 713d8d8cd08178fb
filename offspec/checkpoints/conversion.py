"""`offspec.convert`: converts a checkpoint to another weight format, under Hugging Face's names.

An importance matrix of llama.cpp (`llama-imatrix`) has the mean square of each input of a matrix, over texts. A GGUF
file has `NAME.in_sum2` [experts, K], sums of squares, and `NAME.counts` [experts, 1], how many tokens they are of.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from os import PathLike, fspath
from pathlib import Path

import torch
from torch import Tensor

from offspec.loaders.convert import Conversion as Conversion
from offspec.loaders.convert import MatrixChoice, PackerOf, read_whole
from offspec.loaders.convert import convert as convert_layers
from offspec.loaders.files.checkpoint import Checkpoint, show, without
from offspec.loaders.files.gguf_file import is_gguf, read_model
from offspec.loaders.files.hub import resolve
from offspec.loaders.formats import blank_tensors, stored_weights
from offspec.loaders.formats.core import Packer
from offspec.loaders.formats.gguf_pack import GgufPacker
from offspec.loaders.formats.gguf_search import search_rows
from offspec.loaders.params import MADE_MIXTURES, ConvertParams, Progress

from ..errors import CheckpointError, UnsupportedModelError, UsageError
from ..model.config import ModelConfig, read_config
from ..model.decoder import wanted_shapes
from ..model.heads.mtp import mtp_names
from ..model.names import LAYER_PREFIX, in_layer, split_name
from ..named_models import named_path
from .experts import with_experts
from .gguf import names_of
from .gguf_mixtures import MIXTURES
from .language_model import language_model

SUMS, COUNTS = ".in_sum2", ".counts"  # of importance matrices


def convert(
    source: str | PathLike[str],
    target: str | PathLike[str],
    params: ConvertParams | None = None,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Convert the checkpoint `source` (a path, a hub id or a name) to the checkpoint `target`; resumes if interrupted.

    `progress(bytes_done, bytes_total)` counts bytes of the source; its first call reports the bytes done before.
    Raises UsageError, CheckpointError (the source), StorageError (the target; repeat the call to resume).
    """
    params = params or ConvertParams()
    understand = language_model if params.format == "keep" else without_blanks
    name = fspath(source)
    return convert_layers(
        named_path(name) or resolve(name, revision),
        Path(target),
        params,
        layer_prefix=LAYER_PREFIX,
        progress=progress,
        understand=understand,
        matrices=MatrixChoice(_kept, partial(_packers, params) if params.format in MADE_MIXTURES else None),
    )


def _packers(params: ConvertParams, checkpoint: Checkpoint) -> PackerOf:
    """The packers of a mixture of GGUF's types, as llama.cpp chooses these by a matrix's name, layer and shape."""
    config, kept = _config(checkpoint), _kept(checkpoint)
    if config is None:
        description = f"{checkpoint.path}: the matrices of this model have no types in {params.format}"
        raise UnsupportedModelError(f"{description}; choose another `format`, such as nf4")
    mixture = MIXTURES[params.format]
    importances = {} if params.imatrix is None else _importances(Path(params.imatrix), config)

    def packer_of(name: str, shape: tuple[int, ...]) -> Packer | None:
        layer, inner = split_name(name)
        kind = mixture.type_of(config, inner, shape, layer)
        if name in kept or kind in ("F32", "F16") or not name.endswith(".weight"):
            return None
        importance = importances.get(name)
        if importance is not None and len(importance) != shape[1]:
            description = f"{params.imatrix}: has {len(importance)} inputs of {show(name)}, which has {shape[1]}"
            raise UsageError(f"{description}; take the importance matrix of this very model")
        return GgufPacker(kind, partial(search_rows, importance=importance))

    return packer_of


def _importances(path: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The importance fp32 [K] of each matrix's inputs, by offspec's names; of each expert's matrices by itself.

    Inputs that no text reached count alike. Raises UsageError, CheckpointError.
    """
    if not path.is_file() or not is_gguf(path):
        raise UsageError(f"{path}: is no importance matrix in GGUF; write one with llama-imatrix -o FILE.gguf")
    stored = stored_weights(read_model(path).tensors)
    importances = dict[str, Tensor]()
    matrices = [name.removesuffix(SUMS) for name in stored if name.endswith(SUMS)]
    for matrix, name in names_of(matrices, config.model_type, config.num_layers).items():
        if matrix + COUNTS not in stored:
            raise CheckpointError(f"{path}: {matrix} has no {COUNTS[1:]}; the file is damaged, write it again")
        counts = read_whole(stored[matrix + COUNTS]).view(-1, 1)
        sums = read_whole(stored[matrix + SUMS]).view(len(counts), -1)
        means = torch.where(counts > 0, sums / counts, 1.0)
        if not bool(((means >= 0) & means.isfinite()).all()):
            raise CheckpointError(f"{path}: {matrix} has numbers below 0, or none; the file is damaged, write it again")
        base, of_experts, short = name.rpartition(".experts.")
        importances |= {f"{base}{of_experts}{i}.{short}": row for i, row in enumerate(means) if of_experts}
        if not of_experts:
            importances[name] = means[0]
    if not importances:
        raise UsageError(f"{path}: has no importances for a model of type {config.model_type}; take that of this model")
    return importances


def _kept(checkpoint: Checkpoint) -> Collection[str]:
    """The tensors of MTP layers, which in 4 bits accept little, and small matrices that choose and weigh experts."""
    config = _config(checkpoint)
    if config is None:
        count = checkpoint.config.get("num_hidden_layers")
        return mtp_names(checkpoint.tensors, count).keys() if isinstance(count, int) else ()
    names = set(mtp_names(checkpoint.tensors, config.num_layers))
    if (experts := config.experts) is not None:
        small = [f"{name}.weight" for name in (experts.router, experts.shared_gate) if name is not None]
        names |= {in_layer(layer, name) for layer in range(config.num_layers) for name in small}
    return names


def _config(checkpoint: Checkpoint) -> ModelConfig | None:
    """None for a model that offspec's own decoder does not run; other programs may still support the result."""
    try:
        return read_config(checkpoint.config)
    except (CheckpointError, UnsupportedModelError):
        return None


def without_blanks(checkpoint: Checkpoint) -> Checkpoint:
    """`language_model` by expert, without blank tensors, which have no place in a plain checkpoint."""
    named = language_model(checkpoint)
    config = _config(named)
    if config is None:
        return named
    named, config = with_experts(named, config)
    blank = blank_tensors(named.tensors, wanted_shapes(config))
    return without(named, blank) if blank else named
