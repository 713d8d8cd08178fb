"""Trains an exit layer by self-distillation (EESD, 2406.03853, section 3.2) on the target's predictions.

First, the target generates texts (or reads given ones), many at once as branches of one tree, so that a pass streams
the weights once for all of them. Shards on disk store the hidden state after layer N and the likeliest next tokens at
each position. Then the exit layer is trained on the shards, with the target's final norm and head only. Memory is
bounded by one shard and one batch. The result depends on the settings only: a resumed run gives the same result as an
uninterrupted one. This module does not depend on the terminal.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from offspec.loaders.formats import dense
from offspec.loaders.small_files import MOST_TEXT_BYTES, read_small_file

from ..checkpoints.atomic_files import locked_name, write_atomically
from ..checkpoints.exit_layers import check_exit_layer, default_file, save
from ..checkpoints.opening import ModelFiles
from ..errors import CheckpointError, StorageError, UsageError
from ..model.block import PassRows, RowsOfText
from ..model.decoder import Decoder, IntArray, placed
from ..model.early_exit import EarlyExit
from ..model.rope import Rotations
from ..model.row_logits import HEAD_ROWS
from ..planning.out_of_memory import first_line
from ..text.tokenizer import Tokenizer
from .distill_params import DistillParams

SHARD_TEXTS = 16  # texts generated at once; more are not faster, as each one's attention masks the others' keys
CHECKPOINT_EVERY_S = 30.0
WARM_UP = 0.05  # share of the steps
PART_CHARACTERS = 1 << 20  # characters encoded at once
Progress = Callable[[str, int, int], None]


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
    if params.text_tokens > target.config.max_context:
        longest = target.config.max_context
        raise UsageError(
            f"`text_tokens={params.text_tokens}` exceeds the model's context of {longest}; choose a smaller value"
        )
    out = out or default_file(files, exit_layer)
    work = out.with_name(f"{out.name}.work")
    shards = Shards(work, target, tokenizer, exit_layer, params, texts)  # checks texts before a folder is created
    with _locked(work, out):
        _open_work(work, files, exit_layer, params, texts, resume=resume)
        num_shards = shards.make(progress)
        module = ExitModule(target, exit_layer, exit_layer if params.init == "next" else target.config.num_layers - 1)
        if teacher.close_before_training:
            target.weights.close()
        trainer = Trainer(module, params, work)
        held_out = num_shards - 1 if num_shards > 1 else 0
        before = trainer.agreement(shards.load(held_out))
        trainer.train(shards, max(1, held_out), progress, checkpoint_every_s)
        agreement = trainer.agreement(shards.load(held_out))
        layer = {name: weight.to(target.dtype).cpu() for name, weight in trainer.layer().items()}
        save(out, layer, files, exit_layer, init=params.init, steps=params.steps, agreement=round(agreement, 4))
        _remove_work(work)
    num_tokens = num_shards * SHARD_TEXTS * params.text_tokens
    return Distilled(out, exit_layer, num_tokens, params.steps, before, agreement)


@contextmanager
def _locked(work: Path, out: Path) -> Iterator[None]:
    """Lock the folder of a run. Raises UsageError if another process uses it."""
    try:
        work.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise _cannot_write(work, exc) from exc
    with locked_name(work, f"another process is making {out}; wait until it has ended, or choose another file (`out`)"):
        yield


def _cannot_write(work: Path, exc: OSError) -> StorageError:
    return StorageError(f"{work} cannot be written: {exc.strerror}; choose another file (`out`)")


def _open_work(
    work: Path, files: ModelFiles, exit_layer: int, params: DistillParams, texts: Sequence[Path], *, resume: bool
) -> None:
    """Create or reopen a run's folder.

    Raises UsageError if there is an interrupted run without `resume`, or none with it.
    """
    about = {"exit_layer": exit_layer, "model": str(files.checkpoint.path), "texts": [str(file) for file in texts]}
    wanted = json.dumps(about | asdict(params), indent=1, sort_keys=True)
    settings = work / "settings.json"
    try:
        shutil.rmtree(_deleted(work), ignore_errors=True)  # left by a run that was stopped while deleting
        found = settings.read_text(encoding="utf-8", errors="replace") if settings.is_file() else None
        if resume and found is None:
            raise UsageError(f"there is nothing to resume at {work}; omit `resume`")
        if not resume and found is not None:
            raise UsageError(f"{work} contains an interrupted run; continue it (`resume`), or delete the folder")
        if found is not None and found != wanted:
            raise UsageError(f"{work} contains a run with other settings; use the same settings, or delete the folder")
        work.mkdir(parents=True, exist_ok=True)
        if found is None and any(part.name.startswith(("shard-", "step-")) for part in work.iterdir()):
            raise UsageError(f"{work} contains parts of a run, but not its settings; delete the folder")
    except OSError as exc:
        raise _cannot_write(work, exc) from exc
    if found is None:
        write_atomically(settings, wanted.encode())


def _remove_work(work: Path) -> None:
    """Delete a run's folder. It is renamed first, so that a killed process leaves nothing like an interrupted run."""
    try:
        work.rename(_deleted(work))
    except OSError as exc:
        raise StorageError(f"{work} cannot be deleted: {exc.strerror}; delete it by hand") from exc
    shutil.rmtree(_deleted(work), ignore_errors=True)


def _deleted(work: Path) -> Path:
    return work.with_name(f".{work.name}.deleted")


# ------------------------------------------------------------------------------------------------ what is learnt from

Shard = Mapping[str, Tensor]


class Shards:
    """Texts of one length with what the target made of them, SHARD_TEXTS to a file.

    A shard holds hidden [B, T, hidden] after the first layers, and labels, log_probabilities [B, T, K]: the likeliest
    tokens at the next place and the logarithms of what the target gives them.
    """

    def __init__(
        self,
        folder: Path,
        target: Decoder,
        tokenizer: Tokenizer,
        exit_layer: int,
        params: DistillParams,
        texts: Sequence[Path],
    ) -> None:
        """Writes nothing yet.

        Raises UsageError for texts that cannot be learnt from, or where there is no way to begin one.
        """
        self._folder, self._target, self._params = folder, target, params
        self._first, self._rest = range(exit_layer), range(exit_layer, target.config.num_layers)
        self._given = text_pieces(texts, tokenizer, params.text_tokens) if texts else None
        self._start = first_token(tokenizer) if not texts else None

    def make(self, progress: Progress) -> int:
        """Make the missing shards, each atomically. Returns the number of shards."""
        given = self._given
        count = math.ceil(self._params.num_texts / SHARD_TEXTS) if given is None else len(given)
        what = "texts written" if given is None else "texts read"
        for index in range(count):
            progress(what, index, count)
            if not self._file(index).is_file():
                shard = self._written(index) if given is None else self._pass(given[index])
                unfinished = self._folder / "unfinished"
                try:
                    save_file({name: tensor.cpu().contiguous() for name, tensor in shard.items()}, unfinished)
                    unfinished.replace(self._file(index))
                except (OSError, SafetensorError) as exc:
                    raise StorageError(f"{self._folder} cannot be written: {exc}; free some space") from exc
        progress(what, count, count)
        return count

    def load(self, index: int) -> Shard:
        file = self._file(index)
        try:
            return load_file(file)
        except (OSError, SafetensorError) as exc:
            raise CheckpointError(f"{file} cannot be read ({exc}); delete it, and continue with `resume`") from exc

    def _file(self, index: int) -> Path:
        return self._folder / f"shard-{index:05}.safetensors"

    def _pass(self, texts: IntArray) -> Shard:
        """One pass over texts [B, T]."""
        num_texts, length = texts.shape
        forest = Forest(self._target, self._first, self._rest, num_texts)
        parts = forest.add(texts, self._params.num_labels)
        return {name: part.view(num_texts, length, -1) for name, part in parts.items()}

    def _written(self, index: int) -> Shard:
        """Texts that the target generates, one token of each per pass, from the token that begins texts."""
        params, forest = self._params, Forest(self._target, self._first, self._rest, SHARD_TEXTS)
        generator = torch.Generator().manual_seed(params.seed * 1_000_003 + index)
        tokens = np.full((SHARD_TEXTS, 1), self._start, dtype=np.int64)
        parts: list[Shard] = []
        for _ in range(params.text_tokens):
            parts.append(forest.add(tokens, params.num_labels))
            chances = (forest.logits[:, -1] / params.temperature).softmax(-1).cpu()
            tokens = torch.multinomial(chances, 1, generator=generator).numpy()
        return {name: torch.stack([part[name] for part in parts], dim=1) for name in parts[0]}


def text_pieces(files: Sequence[Path], tokenizer: Tokenizer, length: int) -> IntArray:
    """[shards, B, T]: the files in pieces of T = `length` tokens; the first pieces fill up the last shard."""
    ids = np.concatenate([part for file in files for part in _encoded(file, tokenizer)])
    if len(ids) < length:
        raise UsageError(
            f"the texts have {len(ids)} tokens, and at least {length} are needed; give more text (`texts`)"
        )
    pieces = ids[: len(ids) // length * length].astype(np.int64).reshape(-1, length)
    count = math.ceil(len(pieces) / SHARD_TEXTS)
    return np.resize(pieces, (count, SHARD_TEXTS, length))


def _encoded(file: Path, tokenizer: Tokenizer) -> Iterator[npt.NDArray[np.int32]]:
    """Token ids of a text file, in parts, because encoding needs about 256 bytes per character. Raises UsageError."""
    try:
        text = read_small_file(file, MOST_TEXT_BYTES, allow_pipe=True).decode()
    except OSError as exc:
        raise UsageError(f"`texts={file}` cannot be read: {exc.strerror}; give a text file") from exc
    except UnicodeDecodeError as exc:
        raise UsageError(f"`texts={file}` cannot be read as UTF-8 text: {exc}") from exc
    for first in range(0, max(1, len(text)), PART_CHARACTERS):
        part = tokenizer.encode(text[first : first + PART_CHARACTERS], add_special_tokens=first == 0)
        yield np.array(part, dtype=np.int32)


def first_token(tokenizer: Tokenizer) -> int:
    """The token before a text: BOS, or EOS of the previous text."""
    if tokenizer.bos_id is not None:
        return tokenizer.bos_id
    if not (known := [token_id for token_id in tokenizer.eos_ids if token_id < tokenizer.vocab_size]):
        raise UsageError(
            "the model has neither a token that begins texts (BOS) nor one that ends them (EOS); give texts (`texts`)"
        )
    return min(known)


class Forest:
    """Texts that grow in parallel in one KV cache; each attends to itself only."""

    def __init__(self, target: Decoder, first: range, rest: range, num_texts: int) -> None:
        self._target, self._first, self._rest, self._num_texts = target, first, rest, num_texts
        self.cache = target.new_cache()
        self._owners = np.empty(0, dtype=np.int64)  # the text of each entry in the cache
        self.logits = torch.empty(0)  # [B, 1, vocab]: after the last tokens

    @torch.inference_mode()
    def add(self, tokens: IntArray, num_labels: int) -> Shard:
        """Append tokens [B, T]. Returns the shard's parts for them, [B * T, ...]."""
        target, cache, (num_texts, length) = self._target, self.cache, tokens.shape
        owners = np.repeat(np.arange(num_texts), length)
        depths = np.tile(np.arange(length), num_texts) + len(self._owners) // num_texts
        own = (owners[:, None] == owners) & (depths[:, None] >= depths)
        mask = np.concatenate((owners[:, None] == self._owners, own), axis=1)
        positions, tree_mask = placed(cache, 0, depths + 1, mask)
        rows = target.rows(positions, cache, tree_mask)
        hidden = target.through(target.embed(torch.from_numpy(tokens.reshape(-1))), rows, self._first)
        kept = hidden.clone()
        hidden = target.through(hidden, rows, self._rest)
        cache.append(0, len(owners))
        self._owners = np.concatenate((self._owners, owners))
        best = [self._best(hidden[i : i + HEAD_ROWS], num_labels) for i in range(0, len(hidden), HEAD_ROWS)]
        log_probabilities, labels = (torch.cat(parts) for parts in zip(*best, strict=True))
        self.logits = target.logits(hidden.view(num_texts, length, -1)[:, -1:])
        return {"hidden": kept, "labels": labels.int(), "log_probabilities": log_probabilities}

    def _best(self, hidden: Tensor, num_labels: int) -> tuple[Tensor, Tensor]:
        logits = self._target.logits(hidden)
        best, labels = logits.topk(min(num_labels, logits.shape[-1]))
        return best - logits.logsumexp(-1, keepdim=True), labels


# ------------------------------------------------------------------------------------------------ learning


class _Batch(RowsOfText):
    """`PassRows` of one text: a plain causal pass without a KV cache."""

    def __init__(self, decoder: Decoder, length: int) -> None:
        self._positions = torch.arange(length, device=decoder.device)
        self.rotations = Rotations(self._positions)
        self.chunks = [(0, length)]

    def mask(self, first: int, last: int, window: int | None) -> Tensor:
        ages = self._positions[:, None] - self._positions
        return (ages >= 0) if window is None else (ages >= 0) & (ages < window)

    def exchange(self, layer: int, keys: Tensor, values: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        return keys.transpose(0, 1), values.transpose(0, 1)


class ExitModule(nn.Module):
    """The exit layer as a module for accelerate: it has the parameters, and the decoder's own code computes with them.

    The parameters are on the CPU until accelerate prepares the module.
    """

    def __init__(self, target: Decoder, exit_layer: int, source: int) -> None:
        """source: the target's layer that training starts from."""
        super().__init__()
        with target.weights.layer(source) as layer:
            weights = {name: dense(w, torch.float32).detach().clone().cpu() for name, w in layer.items()}
        self._names = {name.replace(".", "/"): name for name in weights}  # a parameter's name must not contain dots
        self.layer = nn.ParameterDict({key: nn.Parameter(weights[name]) for key, name in self._names.items()})
        self.exit = EarlyExit(target, exit_layer, {}, torch.float32)  # its weights are the parameters

    def weights(self) -> dict[str, Tensor]:
        return {name: self.layer[key] for key, name in self._names.items()}

    def forward(self, hidden: Tensor) -> Tensor:
        """fp32 logits [B, T, vocab] of hidden states [B, T, hidden] after the first layers."""
        rows: PassRows = _Batch(self.exit, hidden.shape[1])
        weights = self.weights()
        return torch.stack([self.exit.taught(weights, text, rows) for text in hidden])


class Trainer:
    """Trains the exit layer, with checkpoints in `folder`."""

    def __init__(self, module: ExitModule, params: DistillParams, folder: Path) -> None:
        device = module.exit.device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._accelerator = Accelerator(cpu=device.type == "cpu")
        self._params, self._folder = params, folder
        self._peak = params.learning_rate * math.sqrt(256 / module.exit.config.hidden_size)
        optimizer = torch.optim.AdamW(module.parameters(), lr=self._peak, betas=(0.9, 0.95), weight_decay=0.01)
        self._module, self._optimizer = self._accelerator.prepare(module, optimizer)

    def layer(self) -> dict[str, Tensor]:
        module: ExitModule = self._accelerator.unwrap_model(self._module)
        return {name: weight.detach() for name, weight in module.weights().items()}

    def train(self, shards: Shards, num_shards: int, progress: Progress, checkpoint_every_s: float) -> None:
        """Run all remaining steps, on the first `num_shards` shards."""
        first = self._resume()
        saved_at, params = time.monotonic(), self._params
        for step, batch in enumerate(self._batches(shards, num_shards, first), first):
            progress("training steps", step, params.steps)
            if step > first and time.monotonic() - saved_at >= checkpoint_every_s:
                self._save(step)
                saved_at = time.monotonic()
            for group in self._optimizer.param_groups:
                group["lr"] = self._rate(step)
            self._accelerator.backward(self._loss(batch))
            self._accelerator.clip_grad_norm_(self._module.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
        progress("training steps", params.steps, params.steps)

    @torch.no_grad()
    def agreement(self, shard: Shard) -> float:
        """How often the likeliest token is the target's."""
        same = []
        for batch in self._cut(shard, range(len(shard["hidden"]))):
            logits = self._module(batch["hidden"])
            same.append((logits.argmax(-1) == batch["labels"][..., 0]).float().mean())
        return float(torch.stack(same).mean())

    def _loss(self, batch: Shard) -> Tensor:
        """Cross entropy with the target's distribution over the kept tokens."""
        scores = self._module(batch["hidden"]).log_softmax(-1)
        chosen = scores.gather(-1, batch["labels"].long())
        loss: Tensor = -(batch["log_probabilities"].exp() * chosen).sum(-1).mean()
        return loss

    def _rate(self, step: int) -> float:
        """Learning rate: a warm-up, then a cosine decay to 0."""
        warm_up = max(1, int(WARM_UP * self._params.steps))
        if step < warm_up:
            return self._peak * (step + 1) / warm_up
        return self._peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, self._params.steps - warm_up)))

    def _batches(self, shards: Shards, num_shards: int, first: int) -> Iterator[Shard]:
        """The batches from step `first` on; the texts of a step depend on its number and the seed only."""
        per_shard = math.ceil(SHARD_TEXTS / self._params.batch_texts)
        for visit in range(first // per_shard, math.ceil(self._params.steps / per_shard)):
            order = np.random.default_rng([self._params.seed, visit // num_shards]).permutation(num_shards)
            shard = shards.load(int(order[visit % num_shards]))
            texts = np.random.default_rng([self._params.seed, visit, 1]).permutation(SHARD_TEXTS)
            steps = range(visit * per_shard, min((visit + 1) * per_shard, self._params.steps))
            for step, batch in zip(steps, self._cut(shard, texts), strict=False):
                if step >= first:
                    yield batch

    def _cut(self, shard: Shard, texts: Sequence[int] | IntArray) -> Iterator[Shard]:
        """The shard's texts in this order, in batches on the device."""
        size, device = self._params.batch_texts, self._accelerator.device
        for first in range(0, len(texts), size):
            chosen = torch.as_tensor(np.array(texts[first : first + size]))
            batch = {name: tensor[chosen].to(device) for name, tensor in shard.items()}
            yield batch | {"hidden": batch["hidden"].float()}

    # ---------------------------------------------------------------------------------------- checkpoints

    def _save(self, step: int) -> None:
        """Save the state before `step`; then delete the previous one."""
        folder, unfinished = self._folder / f"step-{step:08}", self._folder / "unfinished-step"
        before = list(self._folder.glob("step-*"))
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            self._accelerator.save_state(str(unfinished))
            unfinished.rename(folder)
            for old in before:
                if old != folder:
                    shutil.rmtree(old)
        except (OSError, RuntimeError, SafetensorError) as exc:  # torch's writer raises a RuntimeError on a full disk
            raise StorageError(f"{folder} cannot be written: {first_line(exc)}; free some space") from exc

    def _resume(self) -> int:
        """Load the last checkpoint. Returns the next step."""
        newest = max(self._folder.glob(f"step-{'[0-9]' * 8}"), default=None)
        if newest is None:
            return 0
        try:
            self._accelerator.load_state(str(newest))
        except Exception as exc:  # four kinds of files, with various exceptions if damaged
            raise CheckpointError(
                f"{newest} is damaged ({first_line(exc)}); delete it, and `resume` restarts the training"
            ) from exc
        return int(newest.name.removeprefix("step-"))
