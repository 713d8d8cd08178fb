"""Opens a model's files: headers, config.json, dtype and tokenizer, but no weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from offspec.backends.x86.processor import instructions
from offspec.loaders.files.checkpoint import Checkpoint, TensorInfo
from offspec.loaders.files.containers import open_checkpoint, open_config
from offspec.loaders.files.hub import resolve
from offspec.loaders.formats import blank_tensors, format_notes, plan_form
from offspec.loaders.machine.gpu_support import card_fault, gpu_fault
from offspec.loaders.machine.hardware import Gpu
from offspec.loaders.params import GGUF_MIXTURES
from offspec.loaders.streaming.stored_model import StoredModel

from ..errors import CheckpointError, MissingWeightsError, UnsupportedModelError, UsageError
from ..model.config import ModelConfig, read_config
from ..model.decoder import check_tensors, wanted_shapes
from ..model.heads.mtp import mtp_names, num_promised
from ..model.names import in_layer
from ..named_models import MODEL_NAMES, likely_name, named_path
from ..notes import Note
from ..user_folders import expand_home
from .experts import with_experts
from .from_config import stored_from_config
from .language_model import language_model
from .model_files import ModelFiles, count_parameters
from .transformers_models import read_foreign_config

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
AUTO, AUTO_ON_GPU, AUTO_WITHOUT_BF16 = "auto", "auto on a GPU", "auto without bf16"
# Families whose activations exceed 65504, fp16's largest number (vLLM's _FLOAT16_NOT_SUPPORTED_MODELS).
BEYOND_FP16 = frozenset({"gemma2", "gemma3", "gemma3_text", "gemma4_text", "glm4", "plamo2"})
SMALL_MODEL_BYTES = 2 * 2**30
COMPARED_BYTES = 2**24  # bytes compared at a time


def open_model(path: Path, dtype: str, notes: list[Note], *, headers_only: bool = False) -> ModelFiles:
    """Read headers. dtype: auto, bf16, fp16 or fp32; notes get auto's choice. Raises a subclass of OffspecError."""
    checkpoint = language_model(open_checkpoint(path, headers_only=headers_only))
    notes += [Note(text) for text in (*checkpoint.notes, *format_notes(checkpoint))]
    config = _with_stored_kernels(_config(path, checkpoint.config, checkpoint, notes), checkpoint)
    checkpoint, config = with_experts(checkpoint, config)
    tables = [checkpoint.tensors.get(name) for name in (config.own_head_name, config.embedding_name)]
    pair = [table for table in tables if table is not None]
    # transformers 5 and later does not tie a head that differs, either.
    if config.tied_head and not headers_only and len(pair) == 2 and not have_equal_bytes(*pair):
        config = replace(config, tied_head=False)
        notes.append(Note(f"{path.name} has a separate head, although config.json says that its embedding is the head"))
    ignored = {name for name in checkpoint.tensors if config.ignores(name)}
    ignored |= blank_tensors(checkpoint.tensors, wanted_shapes(config))
    if config.is_native:
        of_mtp = mtp_names(checkpoint.tensors, config.num_layers)
        ignored |= of_mtp.keys()
        if not of_mtp and num_promised(checkpoint.config):
            notes.append(Note(f"{path.name} has no MTP layer, although config.json names one; it runs without"))
    try:
        stored = StoredModel.of(
            checkpoint,
            layer_prefix=config.layer_prefix,
            ignore=ignored,
            by_expert=config.experts is not None,
            exact=config.exact_vectors,
        )
    except CheckpointError as exc:  # name the model: it may be the target or the draft
        if str(path) in str(exc):
            raise
        raise CheckpointError(f"{path}: {exc}") from exc
    check_tensors(stored.by_name, config, path)
    return ModelFiles(checkpoint, config, stored, choose_dtype(dtype, path.name, config, stored, notes))


def model_to_plan(path: Path, form: str | None, dtype: str, notes: list[Note]) -> ModelFiles:
    """A model to plan with: from headers, or from config.json alone, also in another format `form`.

    Raises a subclass of OffspecError, also for damaged weights.
    """
    why = "as asked"
    if form is None:
        try:
            return open_model(path, dtype, notes, headers_only=True)
        except MissingWeightsError:
            why = "weights are missing"
    checkpoint = language_model(open_config(path))
    notes += [Note(text) for text in checkpoint.notes]
    made = model_of_config(checkpoint, form, dtype, notes)
    as_form = form or plan_form(checkpoint.config)
    notes.append(Note(f"sizes of {path.name} as {as_form}, from config.json alone ({why})"))
    return made


def model_of_config(checkpoint: Checkpoint, form: str | None, dtype: str, notes: list[Note]) -> ModelFiles:
    """A model to plan with, of which only the config is read. form: None is the one that the config names."""
    path = checkpoint.path
    config, form = _config(path, checkpoint.config, None, notes), form or plan_form(checkpoint.config)
    if form in GGUF_MIXTURES and not config.is_native:
        description = f"{path}: GGUF files of model_type {config.model_type} are not supported"
        raise UnsupportedModelError(f"{description}; plan for another `format`, such as nf4")
    stored = stored_from_config(config, form)
    return ModelFiles(checkpoint, config, stored, choose_dtype(dtype, path.name, config, stored, notes))


def _config(path: Path, raw: Mapping[str, Any], checkpoint: Checkpoint | None, notes: list[Note]) -> ModelConfig:
    """The config for offspec's own decoder, or else for transformers' modules. checkpoint: None without weights."""
    try:
        try:
            return read_config(raw)
        except UnsupportedModelError as exc:
            foreign = read_foreign_config(raw, checkpoint, exc)
            how = f"{path.name} runs on transformers' own modules (model_type {foreign.model_type})"
            notes.append(Note(f"{how}, which are slower than offspec's decoder", advice=True))
            if foreign.has_experts:
                every = f"{path.name} has experts: a pass reads all experts of a layer, not only those in use"
                notes.append(Note(f"{every}; llama.cpp with experts on the CPU is faster", advice=True))
            return foreign
    except (CheckpointError, UnsupportedModelError) as exc:  # name the model: it may be the target or the draft
        raise type(exc)(f"{path}: {exc}") from exc


def _with_stored_kernels(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """With the channels of a delta net's kernels as they are stored.

    transformers writes a third of all channels under each of OLMo-Hybrid's three names, in their order. Releases have
    there those of queries, keys and values.
    """
    if (delta := config.delta) is None or len(delta.names.convolutions) == 1:
        return config
    layer = next((layer for layer in range(config.num_layers) if "delta net" in config.parts_of(layer)), 0)
    keys = [in_layer(layer, f"linear_attn.{name}.weight") for name in delta.names.convolutions]
    parts = tuple(rows for key in keys if key in checkpoint.tensors for rows in checkpoint.tensors[key].shape[:1])
    is_whole = len(parts) == len(keys) and sum(parts) == delta.channels  # anything else is refused, with its name
    return replace(config, delta=replace(delta, kernel_parts=parts)) if is_whole and parts != delta.inputs else config


def have_equal_bytes(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors have the same dtype, shape and content. Raises CheckpointError."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    try:
        with one.path.open("rb") as first, other.path.open("rb") as second:
            first.seek(one.offset)
            second.seek(other.offset)
            sizes = [min(COMPARED_BYTES, one.nbytes - start) for start in range(0, one.nbytes, COMPARED_BYTES)]
            return all(first.read(size) == second.read(size) for size in sizes)
    except OSError as exc:
        raise CheckpointError(f"{one.path} cannot be read ({exc.strerror})") from exc


def choose_device(wanted: str, notes: list[Note]) -> torch.device:
    """`auto` is the first CUDA device, or the CPU. Raises UsageError for a device that is missing or cannot be used."""
    if wanted == "cpu":
        return torch.device("cpu")
    if wanted == "auto":
        fault = gpu_fault() or card_fault(0)
        is_fixable = fault is not None and fault.has_driver
        notes.append(Note("device cuda:0 (found)" if fault is None else f"device cpu: {fault}", advice=is_fixable))
        return torch.device("cuda:0" if fault is None else "cpu")
    named = re.fullmatch(r"cuda(?::([0-9]{1,4}))?", wanted)
    if named is None:
        raise UsageError(f"`device={wanted}` is not a device; use auto, cpu, cuda or cuda:N")
    number, fault = int(named[1] or 0), gpu_fault()
    if fault is None and number >= (count := torch.cuda.device_count()):
        raise UsageError(
            f"`device={wanted}` does not exist: this machine has {count} CUDA devices; use cpu or another number"
        )
    if (fault := fault or card_fault(number)) is not None:
        raise UsageError(f"`device={wanted}` cannot be used: {fault}, or use `device=cpu`")
    return torch.device("cuda", number)


def dtype_on(wanted: str, gpu: Gpu | None) -> str:
    """The dtype to open models with: `auto` becomes another kind of it for a GPU, by whether the card has bf16."""
    if wanted != AUTO or gpu is None:
        return wanted
    return AUTO_ON_GPU if gpu.has_bf16 else AUTO_WITHOUT_BF16


def choose_dtype(wanted: str, name: str, config: ModelConfig, stored: StoredModel, notes: list[Note]) -> torch.dtype:
    """`auto` is the checkpoint's dtype, but fp32 for a small model on a CPU, where exact text costs little."""
    if wanted not in (AUTO, AUTO_ON_GPU, AUTO_WITHOUT_BF16):
        if wanted not in DTYPES:
            raise UsageError(f"`dtype={wanted}` is unknown; use auto, {', '.join(DTYPES)}")
        return DTYPES[wanted]
    if wanted == AUTO and 4 * count_parameters(stored) <= SMALL_MODEL_BYTES:
        notes.append(Note(f"dtype fp32 for {name} (a small model)"))
        return torch.float32
    kept = stored.shared[config.embedding_name].dtype
    chosen = {"F16": torch.float16, "F32": torch.float32}.get(kept, torch.bfloat16)
    if wanted == AUTO_WITHOUT_BF16 and chosen is torch.bfloat16:
        why = "this card does not compute bf16"
        if config.model_type in BEYOND_FP16:
            notes.append(
                Note(f"dtype fp32 for {name} ({why}, and {config.model_type} exceeds fp16's range)", advice=True)
            )
            return torch.float32
        advice = "if logits are not finite, use `dtype=fp32`"
        notes.append(Note(f"dtype fp16 for {name} ({why}; fp16 has a smaller range: {advice})", advice=True))
        return torch.float16
    is_slow = wanted == AUTO and chosen is torch.float16 and "avx512_bf16" in instructions()
    remedy = "; bf16 may be several times as fast on this CPU (`dtype=bf16`)" if is_slow else ""
    notes.append(Note(f"dtype {str(chosen).removeprefix('torch.')} for {name} (the checkpoint's own){remedy}", is_slow))
    return chosen


def open_target(model: str, revision: str | None, dtype: str) -> ModelFiles:
    """Open MODEL as a target. Raises a subclass of OffspecError."""
    return open_model(locate(model, revision, "target"), dtype, [])


def locate(
    model: str, revision: str | None, role: str, *, weights: bool = True, names: Collection[str] = MODEL_NAMES
) -> Path:
    """The path of MODEL; a hub id is downloaded first, its weights only if `weights` is true.

    role: target or draft, of `builtin`. names: what MODEL may be, beside paths and hub ids, for the message about one
    that is not there. Raises a subclass of OffspecError.
    """
    if revision is not None and (model in MODEL_NAMES or expand_home(model).is_dir()):
        raise UsageError(f"`revision={revision}` needs a hub id, and {model} is a local model; omit it")
    if (path := named_path(model, role)) is not None:
        return path
    try:
        return resolve(model, revision, weights=weights)
    except CheckpointError as exc:
        if not (likely := likely_name(model, names)):
            raise
        raise type(exc)(f"{exc}{likely}") from exc
