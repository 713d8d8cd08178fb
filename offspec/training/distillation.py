"""Trains an exit layer by self-distillation (EESD, 2406.03853, section 3.2) on the target's predictions.

The target's hidden states after layer N and its likeliest next tokens are stored in shards (`target_texts`). Then the
exit layer is trained on the shards, with the target's final norm and head only. This module does not depend on the
terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from offspec.loaders.formats import dense

from ..checkpoints.exit_layers import check_exit_layer, default_file, save
from ..checkpoints.opening import ModelFiles
from ..model.decoder import Decoder
from ..model.early_exit import EarlyExit
from ..text.tokenizer import Tokenizer
from .distill_params import DistillParams
from .lora import CausalTexts
from .run_folder import run_folder, work_folder
from .target_texts import Progress, Shard, Shards
from .trainer import CHECKPOINT_EVERY_S, Student, Trainer

LAYOUT = 2  # version of a run's folder; a run may not resume one with another layout


@dataclass(frozen=True)
class Distilled:
    """The result of `distill`.

    agreement_before, agreement: how often the exit's likeliest token is the target's, on held-out text.
    """

    path: Path
    exit_layer: int
    num_tokens: int
    num_steps: int
    agreement_before: float
    agreement: float


@dataclass(frozen=True)
class Teacher:
    """The loaded target, its files, and its tokenizer.

    close_before_training: free its weights before training, which needs only its final norm and head.
    """

    target: Decoder
    files: ModelFiles
    tokenizer: Tokenizer
    close_before_training: bool = False


def distill(
    teacher: Teacher,
    exit_layer: int,
    params: DistillParams | None = None,
    *,
    out: Path | None = None,
    texts: Sequence[Path] = (),
    resume: bool = False,
    progress: Progress | None = None,
    checkpoint_every_s: float = CHECKPOINT_EVERY_S,
) -> Distilled:
    """Train an exit layer after the first `exit_layer` layers. Write it to `out`, or to the default of `--draft self`.

    texts: files to learn from, instead of generated texts. resume: continue an interrupted run with the same settings.
    progress(what, done, total) is called for shards and steps. The shards and the last checkpoint stay in a folder
    beside `out` until the run is complete. Raises a subclass of OffspecError.
    """
    target, files, tokenizer = teacher.target, teacher.files, teacher.tokenizer
    params, progress = params or DistillParams(), progress or (lambda what, done, total: None)
    check_exit_layer(exit_layer, target.config)
    out = out or default_file(files, exit_layer)
    folder = work_folder(out)
    shards = Shards(folder, target, tokenizer, params, texts, [exit_layer - 1])  # checks texts before there is a folder
    with run_folder(out, run_settings(files, params, texts, exit_layer=exit_layer), resume=resume):
        shards.check_space()
        num_shards = shards.make(progress)
        module = ExitModule(target, exit_layer, exit_layer if params.init == "next" else target.config.num_layers - 1)
        if teacher.close_before_training:
            target.weights.close()
        trainer = Trainer(module, params, folder)
        held_out = num_shards - 1 if num_shards > 1 else 0
        before = trainer.mean(shards.load(held_out), module.agreement)
        trainer.resume()
        trainer.train(shards, range(max(1, held_out)), progress, checkpoint_every_s)
        agreement = trainer.mean(shards.load(held_out), module.agreement)
        layer = {name: weight.detach().to(target.dtype).cpu() for name, weight in module.weights().items()}
        save(out, layer, files, exit_layer, init=params.init, steps=params.steps, agreement=round(agreement, 4))
    return Distilled(out, exit_layer, shards.num_tokens, params.steps, before, agreement)


def run_settings(files: ModelFiles, params: DistillParams, texts: Sequence[Path], **more: object) -> dict[str, object]:
    """What the result of a run depends on, see `run_folder`. more: what is trained."""
    about = {"layout": LAYOUT, "model": str(files.checkpoint.path), "texts": [str(file) for file in texts]}
    return about | asdict(params) | more


class ExitModule(Student):
    """The exit layer for accelerate: it has the parameters, and the decoder's own code computes with them."""

    def __init__(self, target: Decoder, exit_layer: int, source: int) -> None:
        """source: the target's layer that training starts from."""
        super().__init__()
        self.width, self.device = target.config.hidden_size, target.device
        with target.weights.layer(source) as layer:
            weights = {name: dense(w, torch.float32).detach().clone().cpu() for name, w in layer.items()}
        self._names = {name.replace(".", "/"): name for name in weights}  # a parameter's name must not contain dots
        self.layer = nn.ParameterDict({key: nn.Parameter(weights[name]) for key, name in self._names.items()})
        self.exit = EarlyExit(target, exit_layer, {}, torch.float32)  # its weights are the parameters

    def weights(self) -> dict[str, Tensor]:
        return {name: self.layer[key] for key, name in self._names.items()}

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [B, T, vocab] of hidden states [B, T, hidden] after the first layers."""
        rows, weights = CausalTexts(self.device, 1, hidden.shape[1]), self.weights()
        return torch.stack([self.exit.taught(weights, text, rows) for text in hidden.float()])

    def forward(self, batch: Shard) -> Tensor:
        """Cross entropy with the target's distribution over the kept tokens."""
        chosen = self.logits(batch["hidden"]).log_softmax(-1).gather(-1, batch["labels"].long())
        loss: Tensor = -(batch["log_probabilities"].exp() * chosen).sum(-1).mean()
        return loss

    def agreement(self, batch: Shard) -> Tensor:
        """How often the likeliest token is the target's."""
        return (self.logits(batch["hidden"]).argmax(-1) == batch["labels"][..., 0]).float().mean()
