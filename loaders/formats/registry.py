"""The list of weight formats, and the conversion of a checkpoint's tensors to stored weights.

`stored_weights` groups the tensors of a checkpoint into logical weights and checks all of them. It reads only the few
bytes of constants that formats request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ..files.checkpoint import Checkpoint, TensorInfo
from ..params import ConvertParams
from ..registry import Registry
from .changed import changed
from .core import Packer, StoredWeight, TensorGroup, WeightFormat, read_small

# In the order in which they are tried; the last one accepts or refuses all other weights.
FORMATS = Registry[WeightFormat](
    __package__,
    "grouped.GroupedFormat",
    "fp8.Fp8Format",
    "mxfp4.Mxfp4Format",
    "compressed_tensors.CompressedTensorsFormat",
    "four_bit.FourBitFormat",
    "int8.Int8Format",
    "bf16_packed.PackedBf16Format",
    "gguf.GgufFormat",
    "plain.PlainFormat",
)


def formats_in(checkpoint: Checkpoint) -> list[WeightFormat]:
    """The formats with the settings of this checkpoint's config. Raises UnsupportedModelError, CheckpointError."""
    weight_formats = (weight_format.in_checkpoint(checkpoint) for weight_format in FORMATS)
    return [weight_format for weight_format in weight_formats if weight_format is not None]


def format_notes(checkpoint: Checkpoint) -> list[str]:
    """The notes of this checkpoint's formats for the user. Raises the errors of `formats_in`."""
    return [note for weight_format in formats_in(checkpoint) for note in weight_format.notes]


def stored_weights(
    infos: Mapping[str, TensorInfo], formats: Sequence[WeightFormat] | None = None
) -> dict[str, StoredWeight]:
    """Group tensors into logical weights by the keys of `infos`, and read the constants of quantised ones.

    formats: the result of `formats_in` for their checkpoint; None for all formats without settings.
    Raises CheckpointError for incomplete, contradictory or unsupported weights.
    """
    formats = tuple(FORMATS) if formats is None else formats
    read_by = [(group, _format_of(group, formats)) for group in _grouped(infos, formats)]
    most = {
        info: nbytes
        for group, weight_format in read_by
        for part, info in group.parts.items()
        if (nbytes := weight_format.constant_bytes(part))
    }
    contents = read_small(most)
    for group, _ in read_by:
        group.contents = {part: contents[info] for part, info in group.parts.items() if info in contents}
    return {group.name: changed(group, weight_format.read(group)) for group, weight_format in read_by}


def _grouped(infos: Mapping[str, TensorInfo], formats: Sequence[WeightFormat]) -> Iterable[TensorGroup]:
    groups: dict[str, TensorGroup] = {}
    for key, info in infos.items():
        companions = (weight_format.companion(key) for weight_format in formats)
        base, part = next((names for names in companions if names is not None), (key, ""))
        groups.setdefault(base, TensorGroup(base)).parts[part] = info
    return groups.values()


def _format_of(group: TensorGroup, formats: Sequence[WeightFormat]) -> WeightFormat:
    return next(weight_format for weight_format in formats if weight_format.recognises(group))


def blank_tensors(infos: Mapping[str, TensorInfo], wanted: Collection[str]) -> set[str]:
    """Names of tensors without content, which some formats' tools write, except those in `wanted`."""
    return {name for weight_format in FORMATS for name in weight_format.blank_tensors(infos, wanted)}


def format_named(form: str) -> WeightFormat:
    """The format with this name or plan form; `form` must exist."""
    return next(weight_format for weight_format in FORMATS if form in (*weight_format.names, *weight_format.plan_forms))


def plan_form(config: Mapping[str, object]) -> str:
    """The form (of `params.PLAN_FORMATS`) for a plan of a checkpoint with this config.json."""
    return next(form for weight_format in FORMATS if (form := weight_format.plan_form(config)) is not None)


def packer_for(params: ConvertParams) -> Packer | None:
    """The packer for `params.format`; None for `keep`."""
    return next((packer for weight_format in FORMATS if (packer := weight_format.packer(params)) is not None), None)
