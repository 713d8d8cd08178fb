"""What the target makes of texts, in shards on disk: the material of every training.

The target generates texts, or reads given ones, many at once, so that a pass streams the weights once for all of them.
A shard stores the tokens, the likeliest next tokens at each position with their
probabilities, and the hidden states after chosen layers. The whole distribution of one position of a vocabulary of
128k tokens would take as much space as 16,000 likeliest ones, and the tokens after the first dozens have hardly any
probability. So the other tokens count as one, whose probability follows.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from offspec.loaders.files.small_files import MOST_TEXT_BYTES, read_small_file
from offspec.loaders.units import format_size
from offspec.scheduler.trees.token_tree import IntArray

from ..errors import CheckpointError, StorageError, UsageError
from ..model.decoder import CachedDecoder, Decoder, pass_together
from ..model.pass_rows import TextRows
from ..model.row_logits import HEAD_ROWS
from ..text.tokenizer import Tokenizer
from .distill_params import DistillParams

SHARD_TEXTS = 16  # texts generated or read at once
PART_CHARACTERS = 1 << 20  # characters encoded at once
LABEL_BYTES = 4 + 4  # of a likely token and its log-probability
Progress = Callable[[str, int, int], None]
Shard = Mapping[str, Tensor]


class Shards:
    """Texts of one length with what the target made of them, SHARD_TEXTS to a file.

    A shard holds tokens [B, T]; labels, log_probabilities [B, T, K]: the likeliest tokens at the next place and the
    logarithms of what the target gives them; and, if `layers` are given, hidden [B, T, len(layers) * hidden]: the
    states after these layers (from 0), side by side.
    """

    def __init__(
        self,
        folder: Path,
        target: Decoder,
        tokenizer: Tokenizer,
        params: DistillParams,
        texts: Sequence[Path],
        layers: Sequence[int] = (),
        num_known: int | None = None,
    ) -> None:
        """Writes nothing yet. num_known: labels and written texts have tokens below it only; None is the vocabulary.

        Raises UsageError for texts that cannot be learnt from, or where there is no way to begin one.
        """
        self._folder, self._target, self._params, self._layers = folder, target, params, tuple(layers)
        self._num_known = min(num_known or target.config.vocab_size, target.config.vocab_size)
        if params.prompt_tokens and not texts:
            raise UsageError("`prompt_tokens` takes the beginnings of given files; name some (`texts`)")
        if params.text_tokens > (longest := target.config.max_context):
            raise UsageError(
                f"`text_tokens={params.text_tokens}` exceeds the model's context of {longest}; choose a smaller value"
            )
        self._begun = self._beginnings(texts, tokenizer)

    def _beginnings(self, texts: Sequence[Path], tokenizer: Tokenizer) -> IntArray:
        """[shards, B, T]: whole texts, their prompts, or the token that begins texts."""
        params, count = self._params, math.ceil(self._params.num_texts / SHARD_TEXTS)
        if not texts:
            return np.full((count, SHARD_TEXTS, 1), first_token(tokenizer), dtype=np.int64)
        if not params.prompt_tokens:
            return text_pieces(texts, tokenizer, params.text_tokens)
        prompts = text_pieces(texts, tokenizer, params.prompt_tokens).reshape(-1, params.prompt_tokens)
        spread = np.linspace(0, len(prompts) - 1, count * SHARD_TEXTS).astype(np.int64)
        chosen: IntArray = prompts[np.random.default_rng(params.seed).permutation(spread)]
        return chosen.reshape(count, SHARD_TEXTS, -1)

    def __len__(self) -> int:
        return len(self._begun)

    @property
    def num_tokens(self) -> int:
        return len(self) * SHARD_TEXTS * self._params.text_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all shards on disk, without their headers."""
        config = self._target.config
        states = len(self._layers) * config.hidden_size * self._target.dtype.itemsize
        return self.num_tokens * (4 + min(self._params.num_labels, config.vocab_size) * LABEL_BYTES + states)

    def check_space(self) -> None:
        """Raises StorageError if the disk has no space for the shards that are missing."""
        present = sum(self._file(index).is_file() for index in range(len(self)))
        missing, free = self.nbytes * (len(self) - present) // len(self), shutil.disk_usage(self._folder).free
        if missing > free:
            raise StorageError(
                f"{self._folder} needs {format_size(missing)} for what the target says, and {format_size(free)} are "
                "free; free some space, choose another place (`out`), or fewer or shorter texts (`num_texts`, "
                "`text_tokens`)"
            )

    def make(self, progress: Progress, indices: Sequence[int] | None = None, writer: Decoder | None = None) -> int:
        """Make the missing shards, each atomically, or those of `indices`. Returns the number of shards.

        writer: the decoder that writes the texts, instead of the target; the target reads them in one pass.
        """
        indices = range(len(self)) if indices is None else indices
        is_given = self._begun.shape[-1] == self._params.text_tokens
        description = "texts read" if is_given else "texts written" if writer is None else "texts written by the draft"
        for number, index in enumerate(indices):
            progress(description, number, len(indices))
            if not self._file(index).is_file():
                self._save(index, self._read(index, writer))
        progress(description, len(indices), len(indices))
        return len(self)

    def _read(self, index: int, writer: Decoder | None) -> Shard:
        labels = self._params.num_labels
        if writer is None:
            return _joined(self._grown(index, Forest(self._target, SHARD_TEXTS, self._layers), labels))
        texts = _joined(self._grown(index, Forest(writer, SHARD_TEXTS), 1))["tokens"].cpu().numpy().astype(np.int64)
        return Forest(self._target, SHARD_TEXTS, self._layers).add(texts, labels, self._num_known)

    def _grown(self, index: int, forest: Forest, num_labels: int) -> Iterator[Shard]:
        """A shard in parts: its texts as they begin, then one token of each per pass, if there is more to write."""
        generator = torch.Generator().manual_seed(self._params.seed * 1_000_003 + index)
        tokens, length = self._begun[index], 0
        while True:
            yield forest.add(tokens, num_labels, self._num_known)
            length += tokens.shape[1]
            if length == self._params.text_tokens:
                return
            chances = (forest.logits[:, -1, : self._num_known] / self._params.temperature).softmax(-1).cpu()
            tokens = torch.multinomial(chances, 1, generator=generator).numpy()

    def _save(self, index: int, shard: Shard) -> None:
        unfinished = self._folder / "unfinished"
        try:
            save_file({name: tensor.cpu().contiguous() for name, tensor in shard.items()}, unfinished)
            unfinished.replace(self._file(index))
        except (OSError, SafetensorError) as exc:
            raise StorageError(f"{self._folder} cannot be written: {exc}; free some space") from exc

    def load(self, index: int) -> Shard:
        file = self._file(index)
        try:
            return load_file(file)
        except (OSError, SafetensorError) as exc:
            raise CheckpointError(f"{file} cannot be read ({exc}); delete it, and continue with `resume`") from exc

    def _file(self, index: int) -> Path:
        return self._folder / f"shard-{index:05}.safetensors"


def _joined(parts: Iterable[Shard]) -> Shard:
    """Consecutive parts [B, T, ...] of the same texts as one."""
    shards = list(parts)
    return {name: torch.cat([part[name] for part in shards], dim=1) for name in shards[0]}


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
    if not (eos_ids := [token_id for token_id in tokenizer.eos_ids if token_id < tokenizer.vocab_size]):
        raise UsageError(
            "the model has neither a token that begins texts (BOS) nor one that ends them (EOS); give texts (`texts`)"
        )
    return min(eos_ids)


class Forest:
    """Texts that grow in parallel, each in a KV cache of its own."""

    def __init__(self, decoder: Decoder, num_texts: int, layers: Sequence[int] = ()) -> None:
        """layers: the layers (from 0) whose states `add` returns."""
        self._decoder, self._layers = decoder, layers
        self._texts = [CachedDecoder(decoder) for _ in range(num_texts)]
        self.logits = torch.empty(0)  # [B, 1, vocab]: after the last tokens

    @torch.inference_mode()
    def add(self, tokens: IntArray, num_labels: int, num_known: int | None = None) -> Shard:
        """Append tokens [B, T], in one pass. Returns the shard's parts for them, [B, T, ...].

        num_known: labels are below it; their probabilities are those among all tokens.
        """
        kept = dict[int, Tensor]()

        def after(layer: int, states: Tensor) -> None:
            if layer in self._layers:
                kept[layer] = states.clone()

        rows = (TextRows.of_chain(row) for row in tokens.tolist())
        hidden = pass_together([*zip(self._texts, rows, strict=True)], after)
        best = list[tuple[Tensor, Tensor]]()
        for first in range(0, len(hidden), HEAD_ROWS):
            logits = self._decoder.logits(hidden[first : first + HEAD_ROWS])
            some = logits[:, :num_known]
            values, tokens_of = some.topk(min(num_labels, some.shape[-1]))
            best.append((values - logits.logsumexp(-1, keepdim=True), tokens_of))
        log_probabilities, labels = (torch.cat(parts) for parts in zip(*best, strict=True))
        self.logits = self._decoder.logits(hidden.view(*tokens.shape, -1)[:, -1:])
        flat = torch.from_numpy(tokens.reshape(-1))
        parts = {"tokens": flat.int(), "labels": labels.int(), "log_probabilities": log_probabilities}
        if self._layers:
            parts["hidden"] = torch.cat([kept[layer] for layer in self._layers], dim=-1)
        return {name: part.view(*tokens.shape, *part.shape[1:]) for name, part in parts.items()}
