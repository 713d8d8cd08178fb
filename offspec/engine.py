"""The engine: a target, perhaps a draft, and the loop that turns a prompt into text.

propose (scheduler, draft) → score (target) → verify (scheduler) → commit (both caches) → observe → yield.
The first pass takes the prompt together with the first tree, so that a streamed target is walked once for both.
Knows nothing of the terminal, of files' bytes, or of how trees are drafted.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import TypeGuard

import torch

from offspec.loaders.checkpoint import Checkpoint, resolve
from offspec.loaders.weights import RamWeights
from offspec.scheduler.draft import Calibration, Drafter, ModelDrafter, NoDrafter
from offspec.scheduler.params import SamplingParams, SpeculationParams
from offspec.scheduler.sampling import Sampler
from offspec.scheduler.verify import Verdict, exact_walk

from . import builtin
from .config import ModelConfig, read_config
from .errors import CheckpointError, ContextLengthError, UnsupportedModelError, UsageError, VocabularyMismatchError
from .model import LAYER_PREFIX, CachedDecoder, Decoder, check_tensors, is_ignored
from .stats import Stats, peak_host_bytes
from .tokenizer import TextStream, Tokenizer, check_vocabularies

Message = Mapping[str, str]
Prompt = str | Sequence[int] | Sequence[Message]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SMALL_MODEL_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Note:
    """Something that was chosen automatically, with its reason; `advice` when the user could do something about it."""

    text: str
    advice: bool = False


@dataclass(frozen=True)
class Step:
    """What one pass brought: new token ids, the text that is certain by now, and the counters so far.

    finish_reason is None until the last step: eos (the model ended), stop (a stop text), length (max_new_tokens, or the
    context is full). num_accepted of the token ids were the draft's guesses; the last of a pass is the target's alone.
    """

    token_ids: list[int]
    text: str
    stats: Stats
    finish_reason: str | None = None
    num_accepted: int = 0


class Engine:
    """A loaded target and, for speculation, a draft. Calibration of the draft is kept from request to request."""

    def __init__(
        self,
        target: Decoder,
        tokenizer: Tokenizer,
        draft: Decoder | None = None,
        *,
        name: str = "",
        draft_name: str | None = None,
    ) -> None:
        self.target, self.tokenizer, self.draft = target, tokenizer, draft
        self.name, self.draft_name = name, draft_name
        self.notes: list[Note] = []
        self._calibration = Calibration()

    @classmethod
    def load(
        cls,
        model: str = "builtin",
        *,
        draft: str = "auto",
        revision: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        threads: int | None = None,
    ) -> Engine:
        """Load MODEL (a folder, a hub id, or `builtin`) and its draft.

        draft: auto (the built-in pair's own; none for other models), none, or a model like MODEL. device: auto, cpu,
        cuda or cuda:N. dtype: auto, bf16, fp16, fp32. What was chosen automatically stands in `notes`, with its reason.
        Raises OffspecError's children for whatever cannot be loaded or does not fit together.
        """
        if threads is not None:
            if threads < 1:
                raise UsageError(f"threads must be at least 1, not {threads}")
            torch.set_num_threads(threads)
        notes: list[Note] = []
        place = choose_device(device, notes)
        # Headers and tokenizers of both first, so that what cannot work is refused before gigabytes are read.
        target = _Files.open(_locate(model, revision, "target"))
        tokenizer = Tokenizer.load(target.checkpoint.path)
        draft_name, guesser = _choose_draft(model, draft, notes), None
        if draft_name is not None:
            guesser = _Files.open(_locate(draft_name, None, "draft"))
            _check_draft(tokenizer, target, guesser)
        engine = cls(
            target.read(place, dtype, notes),
            tokenizer,
            guesser.read(place, dtype, notes) if guesser is not None else None,
            name=model,
            draft_name=draft_name,
        )
        engine.notes = notes
        return engine

    def with_draft(self, draft: Decoder | None, name: str | None) -> Engine:
        """The same target with another draft (or none), calibrated afresh."""
        return Engine(self.target, self.tokenizer, draft, name=self.name, draft_name=name)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: raw text, chat messages (through the chat template), or ids as they are."""
        if isinstance(prompt, str):
            ids = self.tokenizer.encode(prompt)
        elif _is_chat(prompt):
            ids = self.tokenizer.encode_chat(prompt)
        elif _is_ids(prompt):
            ids = [index(token) for token in prompt]
        else:
            raise UsageError("a prompt is a text, a list of token ids, or a list of messages with role and content")
        if not ids:
            raise UsageError("the prompt is empty; give at least one token")
        if bad := [token for token in ids if not 0 <= token < self.target.config.vocab_size]:
            raise UsageError(f"token id {bad[0]} is outside the model's vocabulary of {self.target.config.vocab_size}")
        return ids

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        speculation: SpeculationParams | None = None,
    ) -> Generator[Step, None, None]:
        """Generate text for a prompt, a step a pass; the text appears as it is accepted.

        The text is that of plain decoding (`SpeculationParams(budget=0)`) with the same seed, token for token, whatever
        the draft. Closing the iterator between steps leaves the engine ready for the next request.
        Raises ContextLengthError or UsageError at once, NumericalError while running.
        """
        began = time.perf_counter()
        params = params or SamplingParams()
        text = self.encode(prompt)
        room = self.target.config.max_context - len(text)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(text)} tokens and the model's context is {self.target.config.max_context}, "
                "which leaves no room for an answer; shorten the prompt"
            )
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(32))
        request = _Request(
            self, text, params, min(params.max_new_tokens, room), speculation or SpeculationParams(), began
        )
        return request.run()

    def drafter(self, sampler: Sampler, speculation: SpeculationParams, final: frozenset[int]) -> Drafter:
        """A drafter for one request."""
        if self.draft is None or speculation.budget == 0:
            return NoDrafter()
        return ModelDrafter(CachedDecoder(self.draft), sampler, speculation, self._calibration, final)

    def sharpness(self, *, greedy: bool) -> float:
        """The sharpness fitted so far (see `scheduler.draft`)."""
        return self._calibration.sharpness(greedy=greedy).value


class _Request:
    """One request under way. `text` is the prompt and every token emitted; the caches hold all of it but the last."""

    def __init__(
        self,
        engine: Engine,
        text: list[int],
        params: SamplingParams,
        limit: int,
        speculation: SpeculationParams,
        began: float,
    ) -> None:
        assert params.seed is not None
        self.engine, self.text, self.params, self.limit, self.began = engine, text, params, limit, began
        self.final = frozenset() if params.ignore_eos else engine.tokenizer.eos_ids
        self.target = CachedDecoder(engine.target)
        self.sampler = Sampler(params, params.seed, engine.target.config.vocab_size, engine.target.device)
        self.sampler.extend(text)
        self.drafter = engine.drafter(self.sampler, speculation, self.final)
        self.stats = Stats(num_prompt_tokens=len(text), seed=params.seed)

    def run(self) -> Generator[Step, None, None]:
        stream = self.engine.tokenizer.stream(self.params.stop, skip_special_tokens=True)
        while True:
            verdict = self._iterate()
            step = self._step(verdict, stream)
            yield step
            if step.finish_reason:
                return

    def _iterate(self) -> Verdict:
        """One iteration: propose, score, verify, commit, observe."""
        started = time.perf_counter()
        text, target, drafter = self.text, self.target, self.drafter
        tree = drafter.propose(text, max_depth=self.limit - self.stats.num_tokens - 1)
        drafted = time.perf_counter()
        logits = target.score(text[target.length :], tree.tokens, tree.depths, tree.mask())
        verdict = exact_walk(tree, logits, self.sampler, position=len(text))
        scored = time.perf_counter()  # the walk has read the logits, so the device is done
        target.keep(verdict.path)
        drafter.observe(tree, verdict)
        text += verdict.tokens
        self.sampler.extend(verdict.tokens)
        self._count(len(tree), drafted - started, scored - drafted, time.perf_counter() - started)
        return verdict

    def _count(self, num_drafted: int, draft_s: float, target_s: float, total_s: float) -> None:
        stats = self.stats
        stats.draft_s += draft_s
        stats.target_s += target_s
        stats.num_passes += 1
        stats.num_drafted_tokens += num_drafted
        if stats.num_passes == 1:
            stats.prefill_s, stats.ttft_s = total_s, time.perf_counter() - self.began
        else:
            stats.decode_s += total_s
        stats.peak_host_bytes = peak_host_bytes()
        if self.engine.target.device.type == "cuda":
            stats.peak_device_bytes = torch.cuda.max_memory_allocated(self.engine.target.device)

    def _step(self, verdict: Verdict, stream: TextStream) -> Step:
        """The tokens of a verdict up to where the text ends, as text."""
        tokens: list[int] = []
        shown, reason = "", None
        for token in verdict.tokens:
            tokens.append(token)
            if token in self.final:
                reason = "eos"
                break
            shown += stream.push(token)
            if stream.stopped is not None:
                reason = "stop"
                break
        self.stats.num_tokens += len(tokens)
        if self.stats.num_passes == 1:
            self.stats.num_first_pass_tokens = len(tokens)
        if reason is None and self.stats.num_tokens >= self.limit:
            reason = "length"
        if reason:
            shown += stream.flush()
        return Step(tokens, shown, replace(self.stats), reason, min(len(verdict.path), len(tokens)))


def _is_chat(prompt: Sequence[int] | Sequence[Message]) -> TypeGuard[Sequence[Message]]:
    return len(prompt) > 0 and all(isinstance(part, Mapping) for part in prompt)


def _is_ids(prompt: Sequence[int] | Sequence[Message]) -> TypeGuard[Sequence[int]]:
    return all(hasattr(part, "__index__") for part in prompt)  # numpy's integers too, but no float


# ------------------------------------------------------------------------------------------------ loading


def choose_device(wanted: str, notes: list[Note]) -> torch.device:
    """`auto` is the first CUDA device where there is one. Raises UsageError for a device that is not there."""
    if wanted == "auto":
        has_cuda = torch.cuda.is_available()
        notes.append(Note("device cuda:0 (found)" if has_cuda else "device cpu (no CUDA device found)"))
        return torch.device("cuda:0" if has_cuda else "cpu")
    if wanted == "cpu":
        return torch.device("cpu")
    named = re.fullmatch(r"cuda(?::([0-9]{1,4}))?", wanted)
    if named is None:
        raise UsageError(f"--device {wanted} is not a device; use auto, cpu, cuda or cuda:N")
    number, count = int(named[1] or 0), torch.cuda.device_count()
    if number >= count:
        raise UsageError(
            f"--device {wanted}: this machine has {count} CUDA devices; use --device cpu or another number"
        )
    return torch.device("cuda", number)


def choose_dtype(wanted: str, checkpoint: Checkpoint, device: torch.device, notes: list[Note]) -> torch.dtype:
    """`auto`: the checkpoint's own, but fp32 on a CPU for a model so small that exact text costs nothing."""
    if wanted != "auto":
        if wanted not in DTYPES:
            raise UsageError(f"--dtype {wanted} is not known; use auto, {', '.join(DTYPES)}")
        return DTYPES[wanted]
    num_elements = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
    if device.type == "cpu" and 4 * num_elements <= SMALL_MODEL_BYTES:
        notes.append(Note(f"dtype fp32 for {checkpoint.path.name} (small enough; text is exact to the token)"))
        return torch.float32
    stored = checkpoint.tensors["model.embed_tokens.weight"].dtype
    chosen = {"F16": torch.float16, "F32": torch.float32}.get(stored, torch.bfloat16)
    notes.append(Note(f"dtype {str(chosen).removeprefix('torch.')} for {checkpoint.path.name} (the checkpoint's own)"))
    return chosen


def _locate(model: str, revision: str | None, role: str) -> Path:
    if revision is not None and (model == "builtin" or Path(model).expanduser().is_dir()):
        raise UsageError(f"revision {revision!r} belongs to a hub id, and {model} is on this machine; leave it out")
    return builtin.path(role) if model == "builtin" else resolve(model, revision)


@dataclass(frozen=True)
class _Files:
    """A checkpoint whose headers are what its config.json calls for."""

    checkpoint: Checkpoint
    config: ModelConfig

    @classmethod
    def open(cls, path: Path) -> _Files:
        checkpoint = Checkpoint.open(path)
        try:
            config = read_config(checkpoint.config)
        except (CheckpointError, UnsupportedModelError) as exc:  # target or draft? it cannot know which file it reads
            raise type(exc)(f"{path}: {exc}") from exc
        check_tensors(checkpoint, config)
        return cls(checkpoint, config)

    def read(self, device: torch.device, dtype: str, notes: list[Note]) -> Decoder:
        checkpoint, config = self.checkpoint, self.config
        chosen = choose_dtype(dtype, checkpoint, device, notes)
        ignored = {name for name in checkpoint.tensors if is_ignored(name, config)}
        weights = RamWeights.load(checkpoint, layer_prefix=LAYER_PREFIX, dtype=chosen, device=device, ignore=ignored)
        return Decoder(config, weights, dtype=chosen, device=device)


def _choose_draft(model: str, wanted: str, notes: list[Note]) -> str | None:
    if wanted == "none":
        return None
    if wanted != "auto":
        return wanted
    if model == "builtin":
        return "builtin"
    remedy = "a small model of its family makes it faster: --draft PATH"
    notes.append(Note(f"no draft is known for {model}, so it decodes one token a pass; {remedy}", advice=True))
    return None


def _check_draft(tokenizer: Tokenizer, target: _Files, draft: _Files) -> None:
    """Refuse a draft with another vocabulary; a draft without a tokenizer must at least have as many tokens."""
    path = draft.checkpoint.path
    if (path / "tokenizer.json").is_file():
        check_vocabularies(tokenizer, Tokenizer.load(path))
    elif draft.config.vocab_size != target.config.vocab_size:
        raise VocabularyMismatchError(
            f"the draft {path} has no tokenizer.json and {draft.config.vocab_size} tokens, the target has "
            f"{target.config.vocab_size}; use a draft of the target's family"
        )
