"""Trains an exit layer by self-distillation (EESD, 2406.03853, section 3.2) on the target's predictions.

The target's hidden states after layer N and its likeliest next tokens are stored in shards (`target_texts`). Then the
exit layer is trained on the shards, with the target's final norm and head only. This module does not depend on the
terminal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offspec.backends.weights import dense

from ..checkpoints.atomic_files import refuse_replacing
from ..checkpoints.exit_layers import (
    check_exit_layer,
    data_file,
    default_file,
    is_exit_file,
    refuse_experts,
    refuse_states,
    save,
)
from ..checkpoints.model_files import ModelFiles
from ..checkpoints.opening import DTYPES, open_target
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

    @classmethod
    def of(cls, model: str, target: Decoder, tokenizer: Tokenizer) -> Teacher:
        """The target that was loaded as MODEL, to be freed before training. Raises a subclass of OffspecError."""
        dtype = next(name for name, dtype in DTYPES.items() if dtype is target.dtype)
        return cls(target, open_target(model, None, dtype), tokenizer, close_before_training=True)


def distill(
    teacher: Teacher, exit_layer: int, params: DistillParams | None = None, *, out: Path | None = None, **more: Any
) -> Distilled:
    """`distill_exits` for one exit layer. Writes it to `out`, or to the default of `--draft self`."""
    (done,) = distill_exits(teacher, [exit_layer], params, out=out, **more)
    return done


def distill_exits(
    teacher: Teacher,
    exit_layers: Sequence[int],
    params: DistillParams | None = None,
    *,
    out: Path | None = None,
    texts: Sequence[Path] = (),
    resume: bool = False,
    progress: Progress | None = None,
    checkpoint_every_s: float = CHECKPOINT_EVERY_S,
) -> list[Distilled]:
    """Train an exit layer after the first N layers, for each N of `exit_layers`, on the same texts.

    out: the result of a single one; None: the defaults of `--draft self`. texts: files to learn from, instead of
    generated texts. resume: continue an interrupted run with the same settings. progress(what, done, total) is called
    for shards and steps. The shards and the last checkpoints stay in a folder beside the result until the run is
    complete. Raises a subclass of OffspecError.
    """
    target, files, tokenizer = teacher.target, teacher.files, teacher.tokenizer
    params, progress = params or DistillParams(), progress or (lambda stage, done, total: None)
    refuse_states(target.config, "training an exit layer")
    refuse_experts(target.config, "training an exit layer")
    for number in exit_layers:
        check_exit_layer(number, target.config)
    if out is not None:
        refuse_replacing(out, is_exit_file)
    name = "-".join(map(str, exit_layers))
    place = out or data_file(files, f"{name}.safetensors")
    folder, is_one = work_folder(place), len(exit_layers) == 1
    layers = [number - 1 for number in exit_layers]
    shards = Shards(folder, target, tokenizer, params, texts, layers)  # checks texts before there is a folder
    which = exit_layers[0] if is_one else list(exit_layers)
    with run_folder(place, run_settings(files, params, texts, exit_layer=which), resume=resume):
        shards.check_space()
        shards.make(progress)
        modules = _modules(target, exit_layers, params)
        if teacher.close_before_training:
            target.weights.close()
        distilled = list[Distilled]()
        for number, module in zip(exit_layers, modules, strict=True):
            exit_folder = folder if is_one else folder / f"exit-{number}"
            exit_folder.mkdir(exist_ok=True)
            trainer = Trainer(module, params, exit_folder)
            before, agreement = _trained(trainer, module, shards, progress, checkpoint_every_s)
            file = out or default_file(files, number)
            layer = {name: weight.detach().to(target.dtype).cpu() for name, weight in module.weights().items()}
            save(file, layer, files, number, init=params.init, steps=params.steps, agreement=round(agreement, 4))
            distilled.append(Distilled(file, number, shards.num_tokens, params.steps, before, agreement))
    return distilled


def _modules(target: Decoder, exit_layers: Sequence[int], params: DistillParams) -> list[ExitModule]:
    """The exit layers before training: copies of the target's last layer, or of those that follow."""
    last = target.config.num_layers - 1
    return [
        ExitModule(target, number, number if params.init == "next" else last, part)
        for part, number in enumerate(exit_layers)
    ]


def _trained(
    trainer: Trainer, module: ExitModule, shards: Shards, progress: Progress, checkpoint_every_s: float
) -> tuple[float, float]:
    """Train to the end. Returns the agreement on held-out text before and after."""
    num_shards = len(shards)
    held_out = num_shards - 1 if num_shards > 1 else 0
    before = trainer.mean(shards.load(held_out), module.agreement)
    trainer.resume()
    trainer.train(shards, range(max(1, held_out)), progress, checkpoint_every_s)
    return before, trainer.mean(shards.load(held_out), module.agreement)


def run_settings(files: ModelFiles, params: DistillParams, texts: Sequence[Path], **more: object) -> dict[str, object]:
    """What the result of a run depends on, see `run_folder`. more: what is trained."""
    about = {"layout": LAYOUT, "model": str(files.checkpoint.path), "texts": [str(file) for file in texts]}
    return about | asdict(params) | more


class ExitModule(Student):
    """The exit layer for accelerate: it has the parameters, and the decoder's own code computes with them."""

    def __init__(self, target: Decoder, exit_layer: int, source: int, part: int = 0) -> None:
        """source: the target's layer that training starts from. part: of the shards' states, in order of the exits."""
        super().__init__()
        self._first = part * target.config.hidden_size
        self.width, self.device = target.config.hidden_size, target.device
        with target.weights.layer(source) as layer:
            weights = {name: dense(w, torch.float32).detach().clone().cpu() for name, w in layer.items()}
        self._names = {name.replace(".", "/"): name for name in weights}  # a parameter's name must not contain dots
        self.layer = nn.ParameterDict({key: nn.Parameter(weights[name]) for key, name in self._names.items()})
        self.exit = EarlyExit(target, exit_layer, {}, torch.float32)  # its weights are the parameters

    def weights(self) -> dict[str, Tensor]:
        return {name: self.layer[key] for key, name in self._names.items()}

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [B, T, vocab] of the shards' hidden states [B, T, hidden of all exits]."""
        hidden = hidden[..., self._first : self._first + self.width]
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
