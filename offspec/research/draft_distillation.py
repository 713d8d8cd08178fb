"""Distils a draft model on a target (DistillSpec, 2310.08461): `offspec distill TARGET --draft SMALL`.

The texts are the target's own (off-policy), the draft's (on-policy), or some of each. An off-policy text takes a pass
of the target for each token, which 16 texts share; an on-policy one is read in one pass. On-policy texts are written in
rounds, so that later ones show the faults of the draft as it is then. The whole draft is trained, or low-rank
additions, whose file `--learn-file` reads. This module does not depend on the terminal.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from offspec.backends.weights import dense
from offspec.loaders.streaming.weights import RamWeights

from ..checkpoints.atomic_files import refuse_replacing
from ..checkpoints.exit_layers import refuse_foreign
from ..checkpoints.load import load_decoder
from ..checkpoints.opening import locate, open_model
from ..checkpoints.saving import NewCheckpoint
from ..errors import UsageError, VocabularyMismatchError
from ..model.config import ModelConfig
from ..model.decoder import Decoder
from ..model.names import LAYER_PREFIX
from ..planning.plan import all_resident
from ..text.tokenizer import Tokenizer, check_vocabularies
from .distill_params import DraftParams
from .distillation import Teacher, run_settings
from .draft_losses import forward_kl, outcomes
from .lora import Adapter, CausalTexts, SavedAdapter, hidden_states, weights_of
from .run_folder import run_folder, work_folder
from .target_texts import Progress, Shard, Shards
from .trainer import CHECKPOINT_EVERY_S, Student, Trainer, steps_per_shard

NUM_PROMPTS = 8  # of the held-out texts


@dataclass(frozen=True)
class DistilledDraft:
    """The result of `distill_draft`.

    path: a checkpoint's folder, or a file of additions for `--learn-file`. agreement: how often the draft's likeliest
    token is the target's, on held-out text; divergence: KL(target ‖ draft) there, in nats per token. prompts: the first
    halves of held-out texts, which nothing was learnt from.
    """

    path: Path
    num_tokens: int
    num_steps: int
    agreement_before: float
    agreement: float
    divergence_before: float
    divergence: float
    prompts: list[list[int]]


@dataclass(frozen=True)
class Untrained:
    """A draft before its training: weights fp32 by full names, on the device, and how its checkpoint is written.

    decoder: whose weights they are.
    """

    name: str
    config: ModelConfig
    tensors: Mapping[str, Tensor]
    checkpoint: NewCheckpoint
    decoder: Decoder

    @classmethod
    def of_model(cls, model: str | Path, tokenizer: Tokenizer, device: torch.device) -> Untrained:
        """A draft model with the target's vocabulary. Raises a subclass of OffspecError."""
        path = locate(str(model), None, "draft")
        files = open_model(path, "fp32", [])
        refuse_foreign(files.config, "distilling a draft")
        tokenizer_path = files.checkpoint.tokenizer_path
        if tokenizer_path is not None:
            check_vocabularies(tokenizer, Tokenizer.load(tokenizer_path))
        elif files.config.vocab_size < tokenizer.vocab_size:
            raise VocabularyMismatchError(
                f"the draft {path} has {files.config.vocab_size} tokens and no tokenizer.json, the target has "
                f"{tokenizer.vocab_size} tokens; use a draft of the target's family"
            )
        decoder = load_decoder(files, all_resident(files), device)
        tensors = {name: dense(weight, torch.float32) for name, weight in weights_of(decoder).items()}
        return cls(str(path), files.config, tensors, NewCheckpoint.like(files), decoder)


def distill_draft(
    teacher: Teacher,
    draft: Untrained,
    params: DraftParams,
    out: Path,
    *,
    texts: Sequence[Path] = (),
    resume: bool = False,
    progress: Progress | None = None,
    checkpoint_every_s: float = CHECKPOINT_EVERY_S,
) -> DistilledDraft:
    """Train a draft on what the target says. Write it to `out`: a new folder, or with low-rank additions, a file.

    The other arguments are those of `distillation.distill`. The target's weights stay loaded while the draft writes
    texts. Raises a subclass of OffspecError.
    """
    target, files = teacher.target, teacher.files
    refuse_foreign(target.config, "distilling a draft")
    progress = progress or (lambda stage, done, total: None)
    if params.on_policy and texts and not params.prompt_tokens:
        raise UsageError("`on_policy` needs beginnings that the draft continues; give `prompt_tokens`, or no `texts`")
    _check_out(out, draft, params)
    folder = work_folder(out)
    shards = Shards(folder, target, teacher.tokenizer, params, texts, num_known=draft.config.vocab_size)
    with run_folder(out, run_settings(files, params, texts, draft=draft.name), resume=resume):
        shards.check_space()
        student: DraftStudent = (AdditionsStudent if params.lora_rank else WholeStudent)(draft, params)
        schedule = _Schedule(len(shards), params)
        shards.make(progress, schedule.by_target)
        if teacher.close_before_training and not schedule.by_draft:
            target.weights.close()
        trainer, exam = Trainer(student, params, folder), shards.load(schedule.held_out)
        before = trainer.mean(exam, student.agreement), trainer.mean(exam, student.divergence)
        trainer.resume()
        for until, by_draft in schedule.rounds():
            if trainer.step < until:
                shards.make(progress, by_draft, student.decoder)  # of the draft as it is at the round's first step
                pool = [*schedule.lessons, *by_draft]
                trainer.train(shards, pool, progress, checkpoint_every_s, until)
        after = trainer.mean(exam, student.agreement), trainer.mean(exam, student.divergence)
        student.save(out)
    prompts = exam["tokens"][:NUM_PROMPTS, : max(1, params.text_tokens // 2)].tolist()
    return DistilledDraft(out, shards.num_tokens, params.steps, before[0], after[0], before[1], after[1], prompts)


def _check_out(out: Path, draft: Untrained, params: DraftParams) -> None:
    """Raises UsageError if the result could not be made, or put there."""
    if params.text_tokens > (longest := draft.config.max_context):
        raise UsageError(
            f"`text_tokens={params.text_tokens}` exceeds the draft's context of {longest}; choose a smaller value"
        )
    if params.lora_rank > (hidden := draft.config.hidden_size):
        raise UsageError(
            f"`lora_rank={params.lora_rank}` exceeds the draft's hidden size of {hidden}; choose a smaller one"
        )
    if params.lora_rank and out.is_dir():
        raise UsageError(f"{out} is a folder, and low-rank additions are one file; choose another name (`out`)")
    if params.lora_rank:
        refuse_replacing(out, SavedAdapter.is_in)
    if not params.lora_rank and out.exists():
        raise UsageError(f"{out} exists; choose a new folder (`out`), or delete it")


class _Schedule:
    """Which shards the target writes, which ones the draft writes and when, and which one is held out (the last)."""

    def __init__(self, num_shards: int, params: DraftParams) -> None:
        self._params = params
        self.held_out = num_shards - 1
        lessons = range(max(1, num_shards - 1))
        num_drafted = min(round(params.on_policy * len(lessons)), num_shards - 1)
        self.lessons, self.by_draft = lessons[: len(lessons) - num_drafted], lessons[len(lessons) - num_drafted :]
        self.by_target = sorted({*self.lessons, self.held_out})

    def rounds(self) -> list[tuple[int, range]]:
        """For each round: the step that ends it, and the shards by the draft so far, this round's included."""
        params, count = self._params, min(self._params.rounds, max(1, len(self.by_draft)))
        size = steps_per_shard(params)
        stages = list[tuple[int, range]]()
        for number in range(1, count + 1):
            until = params.steps if number == count else params.steps * number // count // size * size
            stages.append((until, self.by_draft[: len(self.by_draft) * number // count]))
        return stages


class DraftStudent(Student):
    """A draft in training. decoder: computes with the parameters."""

    decoder: Decoder

    def __init__(self, draft: Untrained, params: DraftParams) -> None:
        super().__init__()
        self.draft = draft
        self.width = draft.config.hidden_size

    def forward(self, batch: Shard) -> Tensor:
        return self.divergence(batch)

    def agreement(self, batch: Shard) -> Tensor:
        """How often the likeliest token is the target's."""
        return (self.logits(batch["tokens"]).argmax(-1) == batch["labels"].flatten(0, 1)[:, 0]).float().mean()

    def divergence(self, batch: Shard) -> Tensor:
        """KL(target ‖ draft) in nats per token."""
        labels, log_probabilities = (batch[name].flatten(0, 1) for name in ("labels", "log_probabilities"))
        return forward_kl(*outcomes(self.logits(batch["tokens"]), labels, log_probabilities)).mean()

    def logits(self, tokens: Tensor) -> Tensor:
        """fp32 [B * T, vocab] of texts [B, T]."""
        token_ids = tokens.long().clamp(max=self.draft.config.vocab_size - 1)
        states = hidden_states(self.decoder, token_ids.flatten(), CausalTexts(self.device, *tokens.shape))
        return self.decoder.head(self.decoder.normed(states))

    @abstractmethod
    def save(self, out: Path) -> None:
        """Write the result. Raises StorageError."""


class WholeStudent(DraftStudent):
    """All weights are trained."""

    def __init__(self, draft: Untrained, params: DraftParams) -> None:
        super().__init__(draft, params)
        keys = {name.replace(".", "/"): name for name in draft.tensors}  # a parameter's name must not contain dots
        self.weights = nn.ParameterDict(
            {key: nn.Parameter(draft.tensors[name].detach().clone()) for key, name in keys.items()}
        )
        tensors = {name: self.weights[key] for key, name in keys.items()}
        self.device = next(iter(tensors.values())).device
        source = RamWeights.from_tensors(tensors, layer_prefix=LAYER_PREFIX)
        self.decoder = Decoder(draft.config, source, dtype=torch.float32, device=self.device)

    def save(self, out: Path) -> None:
        tensors = {key.replace("/", "."): weight.detach().cpu() for key, weight in self.weights.items()}
        self.draft.checkpoint.write(out, tensors)


class AdditionsStudent(DraftStudent):
    """Low-rank additions to the matrices are trained."""

    def __init__(self, draft: Untrained, params: DraftParams) -> None:
        super().__init__(draft, params)
        self._adapter = Adapter(draft.decoder, params.lora_rank, params.seed)
        self.device = draft.decoder.device
        self.additions = nn.ParameterDict()
        for name, pair in self._adapter.pairs.items():
            a, b = (nn.Parameter(part.detach()) for part in pair)
            stem = name.replace(".", "/")
            self.additions[f"{stem}/a"], self.additions[f"{stem}/b"] = a, b
            self._adapter.pairs[name] = (a, b)
        self.decoder = self._adapter.trainee()

    def save(self, out: Path) -> None:
        self._adapter.save(out)
