"""Opens the files of a trained head: which kind it is, and whether its tensors are those of that kind.

Heads are published as safetensors, and many only as pickles of torch (`pytorch_model.bin`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from offspec.backends.weights import Weight, dense
from offspec.loaders.files.checkpoint import Checkpoint, TensorInfo, reading, show
from offspec.loaders.files.gguf_file import companion, is_gguf, read_model
from offspec.loaders.files.mistral_folder import MistralFolder
from offspec.loaders.files.safetensors_folder import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    SafetensorsFolder,
    read_header,
)
from offspec.loaders.files.small_files import parse_json, read_small_file
from offspec.loaders.formats import StoredWeight, WeightFormat, formats_in, stored_weights
from offspec.loaders.streaming.stored_model import StoredUnit
from offspec.loaders.streaming.tiers import load_layer

from ..errors import CheckpointError, MissingWeightsError, UnsupportedModelError, UsageError
from ..methods import research
from ..model.config import ModelConfig
from ..model.config_values import Json, mapping
from ..model.heads.assistant import assistant_name, assistant_spec
from ..model.heads.dflash import ENTRY as DFLASH_ENTRY
from ..model.heads.dflash import MARKOV_ENTRY, MARKOV_IN, dflash_name, dflash_spec
from ..model.heads.eagle import TO_TARGET, eagle_name, eagle_spec
from ..model.heads.head import LAYERS, OWN_EMBEDDING, OWN_HEAD, HeadSpec
from ..model.heads.hydra import hydra_name, hydra_spec
from ..model.heads.medusa import medusa_name, medusa_spec
from ..model.heads.mlp import mlp_name, mlp_spec
from ..model.heads.mtp import PREFIX as MTP_PREFIX
from ..model.heads.mtp import mtp_name, mtp_spec, num_promised
from . import gguf, mistral
from .atomic_files import new_folder
from .exit_layers import data_file, has_weights, refuse_foreign
from .experts import by_expert
from .from_config import weights_from_shapes
from .mistral import EAGLE_FC
from .model_files import ModelFiles
from .opening import have_equal_bytes
from .pickles import read_pickle

SAFETENSORS = (SINGLE_FILE, "medusa_lm_head.safetensors", "hydra_lm_head.safetensors")
PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")
MISTRAL = MistralFolder()
INTEGERS = {"I64": np.int64, "I32": np.int32}
TABLES = (TO_TARGET,)  # tensors of integers, by a `Head`'s names
ROW_TABLES = (OWN_EMBEDDING, MARKOV_IN)  # matrices of which single rows are read
MTP_FORM = "bf16"  # of an MTP layer in a plan without weights
Shapes = Mapping[str, tuple[int, ...]]
Listed = Mapping[str, TensorInfo | Tensor]  # of a pickle, without contents


@dataclass(frozen=True)
class StoredTensors:
    """A head's tensors in a container, in any weight format, by the head's names; none is in memory.

    tables: of integers, in safetensors.
    """

    weights: Mapping[str, StoredWeight]
    tables: Mapping[str, TensorInfo]

    @property
    def shapes(self) -> Shapes:
        stored: list[Mapping[str, StoredWeight | TensorInfo]] = [self.weights, self.tables]
        return {inner: each.shape for part in stored for inner, each in part.items()}

    @property
    def bits(self) -> float:
        """Bits per number of its layers' matrices, the smallest."""
        matrices = [each for inner, each in self.weights.items() if inner.startswith(LAYERS) and len(each.shape) > 1]
        sizes = (8 * sum(info.nbytes for info in each.streamed) / math.prod(each.shape) for each in matrices)
        return min(sizes, default=16.0)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of the loaded tensors, to compute with in `dtype`."""
        return StoredUnit(self.weights).cost(dtype).resident_bytes + sum(info.nbytes for info in self.tables.values())

    def load(self, dtype: torch.dtype, device: torch.device) -> dict[str, Weight]:
        """Tables of integers keep their dtype. Raises CheckpointError."""
        weights = {inner: each.to(device) for inner, each in self.weights.items()}
        loaded = load_layer(StoredUnit(weights), dtype, device)
        for inner, info in self.tables.items():
            if info.dtype not in INTEGERS:
                raise _wrong_type(info.path, info.name, info.dtype)
            with reading(info.path):
                numbers = np.fromfile(info.path, INTEGERS[info.dtype], math.prod(info.shape), offset=info.offset)
            table = torch.from_numpy(numbers.astype(np.int64)).view(info.shape).to(device)
            # A table has what is added to a column's number to get a token; GGUF files have the tokens.
            loaded[inner] = table - torch.arange(len(table), device=device) if is_gguf(info.path) else table
        return loaded


@dataclass(frozen=True)
class PickledTensors:
    """A head's tensors in a pickle. names: the head's → those in the file."""

    file: Path
    names: Mapping[str, str]
    shapes: Shapes

    def nbytes(self, dtype: torch.dtype) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values()) * dtype.itemsize

    def load(self, dtype: torch.dtype, device: torch.device) -> dict[str, Weight]:
        read, loaded = read_pickle(self.file, "cpu"), dict[str, Weight]()
        for inner, name in self.names.items():
            tensor, is_table = read[name], inner in TABLES
            is_plain = tensor.layout == torch.strided and not tensor.is_complex()
            if not is_plain or tensor.is_floating_point() == is_table:
                raise _wrong_type(self.file, name, str(tensor.dtype))
            loaded[inner] = tensor.to(device, tensor.dtype if is_table else dtype, copy=True)
        return loaded


HeadTensors = StoredTensors | PickledTensors


def _wrong_type(file: Path, name: str, dtype: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: tensor {show(name)} has numbers of a wrong type ({dtype}); use a head that is not quantised, or "
        "download it again"
    )


@dataclass(frozen=True)
class HeadFiles:
    """A head whose tensors fit the target.

    path: its folder, or the target's checkpoint. trained_for: the fingerprint of the target, if offspec made the head.
    stated_target: the name of the target in config.json, or "".
    """

    path: Path
    spec: HeadSpec
    tensors: HeadTensors
    trained_for: str | None = None
    stated_target: str = ""

    @classmethod
    def open(cls, path: Path, target: ModelConfig) -> HeadFiles:
        """Read config.json and headers. Raises CheckpointError, UnsupportedModelError."""
        config, listed, formats = _opened(path)
        layout = layout_of(config, listed)
        if layout is None:
            raise UnsupportedModelError(f"{path} is not a head of a known kind")
        names = {inner: name for name in listed if (inner := layout.name_of(name)) is not None}
        tensors = _tensors(path, {inner: listed[name] for inner, name in names.items()}, names, formats)
        spec = _spec(path, layout.make_spec, config, tensors, names, target)
        made_for = config.get(TARGET_KEY)
        made_for = made_for if isinstance(made_for, str) else None
        verifier = mapping(mapping(config, "speculators_config"), "verifier")
        stated_target = verifier.get("name_or_path")
        return cls(
            path,
            spec,
            tensors,
            made_for,
            stated_target.rstrip("/").rpartition("/")[2] if isinstance(stated_target, str) else "",
        )

    @classmethod
    def of_mtp(cls, target: ModelFiles) -> HeadFiles:
        """The MTP layer of a target's own checkpoint, or of a file beside it; without weights, that of config.json.

        Raises UsageError if there is none; CheckpointError, UnsupportedModelError.
        """
        path, checkpoint = target.checkpoint.path, target.checkpoint
        refuse_foreign(target.config, "an MTP layer")
        if not has_mtp(target):
            raise UsageError(f"`draft=mtp` needs an MTP layer, and {path} has none; choose another draft")
        if (file := mtp_file(target)) is not None:
            return cls.open(file, target.config)
        named = {inner: name for name, inner in target.mtp_names.items() if inner is not None}
        named = {inner: name for inner, name in named.items() if not _is_of_target(inner, named, target)}
        infos = {inner: checkpoint.tensors[name] for inner, name in named.items()}
        if infos:
            weights = stored_weights(infos, formats_in(checkpoint))
        else:
            weights = weights_from_shapes(mtp_spec({}, {}, target.config).shapes, MTP_FORM)
        tensors = StoredTensors(weights, {})
        return cls(path, _spec(path, mtp_spec, {}, tensors, named, target.config), tensors)

    def nbytes(self, dtype: torch.dtype, *, packed: bool = True) -> int:
        """Bytes of what `load` returns."""
        if packed and self.spec.takes_packed:
            return self.tensors.nbytes(dtype)
        return sum(math.prod(shape) for shape in self.spec.shapes.values()) * dtype.itemsize

    def load(self, dtype: torch.dtype, device: torch.device, *, packed: bool = True) -> dict[str, Any]:
        """Its weights by the names of `spec.shapes`; tables of integers keep their dtype. Raises CheckpointError.

        packed: quantised matrices stay as they are stored, except embeddings, if the head can multiply with these.
        """
        weights = self.tensors.load(dtype, device)
        for inner, weight in weights.items():
            if not isinstance(weight, Tensor) and (inner in ROW_TABLES or not (packed and self.spec.takes_packed)):
                weights[inner] = dense(weight, dtype)
        return weights


@dataclass(frozen=True)
class Layout:
    """How a kind of head is stored. name_of: a `Head`'s name of a file's tensor; None for one that says nothing more.

    make_spec: from config.json, the tensors' shapes by the head's names, and the target.
    """

    name_of: Callable[[str], str | None]
    make_spec: Callable[[Json, Shapes, ModelConfig], HeadSpec]

    def spec(self, config: Json, shapes: Shapes, target: ModelConfig) -> HeadSpec:
        """What a head with tensors of these `shapes`, by their names in the file, must hold.

        Raises CheckpointError, UnsupportedModelError.
        """
        present = {inner: shape for name, shape in shapes.items() if (inner := self.name_of(name)) is not None}
        return self.make_spec(config, present, target)


HYDRA_PREFIX = "hydra prefix-mlp"
LAYOUTS = {
    "eagle": Layout(eagle_name, partial(eagle_spec, 1)),
    "eagle3": Layout(eagle_name, partial(eagle_spec, 3)),
    "medusa": Layout(medusa_name, medusa_spec),
    "hydra": Layout(partial(hydra_name, False), partial(hydra_spec, False)),
    HYDRA_PREFIX: Layout(partial(hydra_name, True), partial(hydra_spec, True)),
    "mlp_speculator": Layout(mlp_name, mlp_spec),
    "mtp": Layout(mtp_name, mtp_spec),
    "dflash": Layout(dflash_name, dflash_spec),
    "assistant": Layout(assistant_name, assistant_spec),
}
MARKS = {
    "medusa_num_heads": "medusa",
    "hydra_num_heads": "hydra",
    DFLASH_ENTRY: "dflash",
    MARKOV_ENTRY: "dflash",
}  # a key of config.json → the kind
NAMED_KINDS = ("medusa", "mlp_speculator")  # named by model_type
ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")  # Gemma 4's drafts
TARGET_KEY = "offspec_target"  # the key of the target's fingerprint, in heads that offspec trained
OWN_KIND = "offspec_head"  # the key of kinds that nobody else publishes


def layout_of(config: Json, names: Iterable[str]) -> Layout | None:
    """The layout of a head's files by their config.json, or by their tensors where it says nothing; None: no head."""
    if (kind := next((kind for key, kind in MARKS.items() if key in config), None)) is not None:
        return LAYOUTS[HYDRA_PREFIX if config.get("hydra_head_arch") == "prefix-mlp" else kind]
    if OWN_KIND in config:
        return _researched(str(config[OWN_KIND]))
    named = config.get("model_type")
    if named in ASSISTANTS:
        return LAYOUTS["assistant"]
    if named in NAMED_KINDS:
        return LAYOUTS[named]
    names = set(names)
    if names and all(name.startswith(MTP_PREFIX) for name in names):  # a model may have such tensors among others
        return LAYOUTS["mtp"]
    plain = {name.removeprefix("model.") for name in names}
    if "fc.fc.weight" in plain:
        return _researched("fspad")
    if "clover_head_mlp_rnn.q.weight" in plain:
        return _researched("clover2")
    stated = config.get("architectures")
    classes = [str(name).lower() for name in stated] if isinstance(stated, list) else []
    method = config.get("speculators_model_type")
    if method in ("dflash", "dspark"):
        return LAYOUTS["dflash"]
    if method == "eagle3" or any("eagle3" in name for name in classes) or any(n.startswith("midlayer.") for n in plain):
        return LAYOUTS["eagle3"]
    if any("eagle" in name for name in classes) or "fc.weight" in plain:
        return LAYOUTS["eagle"]
    return None


def _researched(kind: str) -> Layout | None:
    """The layout of a kind of head that only research has."""
    layouts: Mapping[str, Layout] = research().LAYOUTS
    return layouts.get(kind)


def is_head(path: Path) -> bool:
    """Whether a folder or GGUF file holds a head, rather than a model; False for anything that cannot be read."""
    try:
        if is_gguf(path):
            return gguf.is_head(read_model(path, headers_only=True))
        if MISTRAL.recognises(path):
            return EAGLE_FC in mistral.translated(MISTRAL.open(path)).tensors
        config = _read_config(path)
        return (layout_of(config, ()) or layout_of(config, _listed(path)[0])) is not None
    except CheckpointError:
        return False


def has_mtp(target: ModelFiles) -> bool:
    """Whether the target's checkpoint has an MTP layer, or a file beside it; without weights, by config.json."""
    is_promised = bool(num_promised(target.checkpoint.config)) and not has_weights(target)
    return target.config.is_native and bool(target.mtp_names or is_promised or mtp_file(target))


def mtp_file(target: ModelFiles) -> Path | None:
    """The file beside a GGUF target without an MTP layer that has it, by llama.cpp's names (mtp-NAME-Q8_0.gguf)."""
    path = target.checkpoint.path
    file = None if target.mtp_names or not is_gguf(path) else companion(path, "mtp-")
    return file if file is not None and is_head(file) else None


def _is_of_target(inner: str, named: Mapping[str, str], target: ModelFiles) -> bool:
    """Whether a tensor is a copy of the target's embedding or head, or belongs to one. named: own name → full name."""
    tables = {OWN_EMBEDDING: target.config.embedding_name, OWN_HEAD: target.config.head_name}
    table = next((table for table in tables if inner.startswith(table)), None)
    tensors = target.checkpoint.tensors
    if table is None or table not in named or tables[table] not in tensors:
        return False
    return have_equal_bytes(tensors[named[table]], tensors[tables[table]])


def head_folder(target: ModelFiles, kind: str) -> Path:
    """Where `offspec distill --head` puts a head of this kind."""
    return data_file(target, f"head-{kind}")


def find_head(target: ModelFiles, kind: str = "") -> Path:
    """The newest head in that place for this target, or that of this kind. Raises UsageError if there is none."""
    pattern = head_folder(target, "*")
    places = [head_folder(target, kind)] if kind else pattern.parent.glob(pattern.name)
    heads = [path for path in places if (path / CONFIG_FILE).is_file()]
    newest = max(heads, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)
    if newest is None:
        named, wanted = (f"head:{kind}", kind) if kind else ("head", "eagle3")
        raise UsageError(
            f"`draft={named}` needs a head, and there is none for {target.checkpoint.path}; run offspec distill MODEL "
            f"--head {wanted} first, or give a head's folder (`draft=PATH`)"
        )
    return newest


# ------------------------------------------------------------------------------------------------ reading


def _opened(path: Path) -> tuple[Json, Listed, Sequence[WeightFormat] | None]:
    """config.json, all tensors by the names in the files, and the weight formats; see `_listed` for the errors."""
    checkpoint: Checkpoint
    if is_gguf(path):
        checkpoint = by_expert(gguf.translated_head(read_model(path)))
    elif MISTRAL.recognises(path):
        checkpoint = mistral.translated(MISTRAL.open(path))
    else:
        return _read_config(path), *_listed(path)
    return checkpoint.config, checkpoint.tensors, formats_in(checkpoint)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG_FILE
    try:
        config = parse_json(read_small_file(file))
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"{file} cannot be read ({exc}); download the head again") from exc
    if not isinstance(config, dict):
        raise CheckpointError(f"{file} is not a JSON object; download the head again")
    return config


def _listed(path: Path) -> tuple[Listed, Sequence[WeightFormat] | None]:
    """All tensors by the names in the files, and the weight formats by config.json; of a pickle, without contents.

    Raises CheckpointError, MissingWeightsError, UnsupportedModelError.
    """
    names = os.listdir(path) if path.is_dir() else []
    if INDEX_FILE in names or SINGLE_FILE in names:
        checkpoint = SafetensorsFolder().open(path)
        return checkpoint.tensors, formats_in(checkpoint)
    for name in SAFETENSORS:
        if name in names:
            return read_header(path / name), None
    if (pickle := _pickle(path)) is not None:
        return read_pickle(pickle, "meta"), None
    raise MissingWeightsError(f"{path} has none of {', '.join((*SAFETENSORS, *PICKLES))}; download the head again")


def _pickle(path: Path) -> Path | None:
    return next((path / name for name in PICKLES if (path / name).exists()), None)


def _tensors(
    path: Path, listed: Listed, names: Mapping[str, str], formats: Sequence[WeightFormat] | None
) -> HeadTensors:
    """The tensors by a head's names. names: those in the files. Raises CheckpointError."""
    infos = {inner: each for inner, each in listed.items() if isinstance(each, TensorInfo)}
    if len(infos) == len(listed):
        tables = {inner: info for inner, info in infos.items() if inner in TABLES}
        floats = {inner: info for inner, info in infos.items() if inner not in tables}
        return StoredTensors(stored_weights(floats, formats), tables)
    pickle = _pickle(path)
    assert pickle is not None
    return PickledTensors(pickle, names, {inner: tuple(each.shape) for inner, each in listed.items()})


def _spec(
    path: Path,
    make_spec: Callable[[Json, Shapes, ModelConfig], HeadSpec],
    config: Json,
    tensors: HeadTensors,
    names: Mapping[str, str],
    target: ModelConfig,
) -> HeadSpec:
    """What the head is, whose tensors are compared with it. names: those in the files.

    Raises CheckpointError, and UnsupportedModelError for a tensor without a meaning.
    """
    try:
        spec = make_spec(config, tensors.shapes, target)
    except (CheckpointError, UnsupportedModelError) as exc:
        raise type(exc)(f"{path}: {exc}") from exc
    for inner in tensors.shapes:
        if inner not in spec.shapes:
            raise UnsupportedModelError(
                f"{path}: tensor {show(names.get(inner, inner))} does not belong to an {spec.kind} head; the head has "
                "unsupported parts"
            )
    for inner, shape in spec.shapes.items():
        if inner not in tensors.shapes:
            raise CheckpointError(f"{path}: tensor {inner} is missing; the head does not match its config.json")
        if (there := tensors.shapes[inner]) != shape:
            description = f"tensor {show(names.get(inner, inner))} has shape {list(there)}"
            raise CheckpointError(f"{path}: {description}, and an {spec.kind} head for this target has {list(shape)}")
    return spec


def write_head(path: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor]) -> None:
    """Write a head as a folder, whole or not at all. Raises StorageError."""
    with new_folder(path) as folder:
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / SINGLE_FILE)
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
