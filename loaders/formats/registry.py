"""Which formats there are, and what the tensors of a checkpoint are in them.

`stored_weights` groups the tensors of a checkpoint into logical weights and disbelieves all of them first. Reads the
few bytes of constants that formats ask for, and nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ..checkpoint import Checkpoint, TensorInfo
from ..params import ConvertParams
from ..registry import Registry
from .changed import changed
from .compressed_tensors import CompressedTensorsFormat
from .core import Packer, StoredWeight, TensorGroup, WeightFormat, read_small
from .four_bit import FourBitFormat
from .fp8 import Fp8Format
from .gguf import GgufFormat
from .grouped import GroupedFormat
from .int8 import Int8Format
from .plain import PlainFormat

# In the order in which they are asked; the last one takes what nobody else recognises, or refuses it.
FORMATS = Registry[WeightFormat](
    GroupedFormat(), Fp8Format(), CompressedTensorsFormat(), FourBitFormat(), Int8Format(), GgufFormat(), PlainFormat()
)


def formats_in(checkpoint: Checkpoint) -> list[WeightFormat]:
    """The formats as this checkpoint's config sets them. Raises UnsupportedModelError, CheckpointError."""
    found = (known.in_checkpoint(checkpoint) for known in FORMATS)
    return [known for known in found if known is not None]


def format_notes(checkpoint: Checkpoint) -> list[str]:
    """What the formats of this checkpoint have to tell somebody who loads it. Raises as `formats_in` does."""
    return [told for known in formats_in(checkpoint) for told in known.notes]


def stored_weights(
    infos: Mapping[str, TensorInfo], formats: Sequence[WeightFormat] | None = None
) -> dict[str, StoredWeight]:
    """Groups tensors into logical weights, by the keys of `infos`; reads the constants of the quantised ones.

    formats: what `formats_in` says of their checkpoint; None is what every checkpoint may hold.
    Raises CheckpointError for whatever is incomplete, contradicts itself, or lies in a form that is not read.
    """
    formats = tuple(FORMATS) if formats is None else formats
    read_by = [(group, _format_of(group, formats)) for group in _grouped(infos, formats)]
    most = {
        info: nbytes
        for group, known in read_by
        for part, info in group.parts.items()
        if (nbytes := known.constant_bytes(part))
    }
    contents = read_small(most)
    for group, _ in read_by:
        group.contents = {part: contents[info] for part, info in group.parts.items() if info in contents}
    return {group.name: changed(group, known.read(group)) for group, known in read_by}


def _grouped(infos: Mapping[str, TensorInfo], formats: Sequence[WeightFormat]) -> Iterable[TensorGroup]:
    groups: dict[str, TensorGroup] = {}
    for key, info in infos.items():
        found = (known.companion(key) for known in formats)
        base, part = next((names for names in found if names is not None), (key, ""))
        groups.setdefault(base, TensorGroup(base)).parts[part] = info
    return groups.values()


def _format_of(group: TensorGroup, formats: Sequence[WeightFormat]) -> WeightFormat:
    return next(known for known in formats if known.recognises(group))


def blank_tensors(infos: Mapping[str, TensorInfo], wanted: Collection[str]) -> set[str]:
    """Names of tensors that are not `wanted`, and hold nothing; some formats' tools write such."""
    return {name for known in FORMATS for name in known.blank_tensors(infos, wanted)}


def format_named(form: str) -> WeightFormat:
    """The format whose weights, or whose sizes in a plan, are called so; `form` is a name that there is."""
    return next(known for known in FORMATS if form in (*known.names, *known.plan_forms))


def plan_form(config: Mapping[str, object]) -> str:
    """The form (of `params.PLAN_FORMATS`) by which a checkpoint with this config.json is sized."""
    return next(form for known in FORMATS if (form := known.plan_form(config)) is not None)


def packer_for(params: ConvertParams) -> Packer | None:
    """What writes `params.format`; None for `keep`, which packs nothing."""
    return next((packer for known in FORMATS if (packer := known.packer(params)) is not None), None)
