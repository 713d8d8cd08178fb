"""llama.cpp's importance matrices: the mean square of each input of a matrix, over texts (`llama-imatrix`).

Source: tools/imatrix of llama.cpp. A GGUF file has `NAME.in_sum2` [experts, K], sums of squares, and `NAME.counts`
[experts, 1], how many tokens they are of.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from offspec.loaders.convert import read_whole
from offspec.loaders.files.gguf_file import is_gguf, read_model
from offspec.loaders.formats import stored_weights

from ..errors import CheckpointError, UsageError
from ..model.config import ModelConfig
from .gguf import names_of

SUMS, COUNTS = ".in_sum2", ".counts"


def read_importances(path: Path, config: ModelConfig) -> dict[str, Tensor]:
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
