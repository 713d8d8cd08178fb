"""How far draft and target agree along the target's texts: the limit of what any tree of this draft can reach."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.scheduling.replay import Recording
from offspec import Engine
from offspec.model.decoder import CachedDecoder, Decoder
from offspec.scheduler.trees.sampling import Sampler

from .estimates import Estimate, ratio_of_sums


def agreement(engine: Engine, recordings: Sequence[Recording]) -> Estimate:
    """Greedy: the share of places where both models' likeliest token is the same.

    With a temperature: the mean of 1 - TV, the sum of min(p, q) over the processed distributions.
    """
    assert engine.draft.decoder is not None
    sums, counts = [], []
    for recording in recordings:
        sampler = recording.sampler(engine.target.config.vocab_size)
        target, draft = (_processed(model, sampler, recording) for model in (engine.target, engine.draft.decoder))
        width = min(target.shape[1], draft.shape[1])
        if sampler.is_greedy:
            shared = (target.argmax(-1) == draft.argmax(-1)).double()
        else:
            shared = torch.minimum(target.softmax(-1)[:, :width], draft.softmax(-1)[:, :width]).sum(-1).double()
        sums.append(float(shared.sum()))
        counts.append(len(shared))
    return ratio_of_sums(sums, counts)


def _processed(model: Decoder, sampler: Sampler, recording: Recording) -> torch.Tensor:
    """Processed log-probabilities [T, V] of the T places of a recorded text."""
    tree = recording.chain()
    logits = CachedDecoder(model).score(recording.prompt_ids, tree.tokens, tree.depths, tree.parents)
    return sampler.process(logits[:, : sampler.vocab_size], [()] * len(logits))
