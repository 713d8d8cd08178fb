"""The options of `Engine.load`, as one record. The CLI reads its defaults from here, so nothing here imports torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from offspec.backends.arithmetic import EXACT, FAST, INT8
from offspec.loaders.params import KV_CACHES
from offspec.loaders.units import parse_size
from offspec.scheduler.params import check_names

from .errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack

AUTO = "auto"
ARITHMETIC_NAMES = (AUTO, EXACT, INT8, FAST)
SIZES = {"vram", "ram", "cache_ram"}
AnyPath = str | PathLike[str]


class LoadSettings(TypedDict, total=False):
    """The keyword arguments of `Engine.load`: the fields of `LoadOptions`, which says what they mean.

    Sizes may also be texts such as "4GiB".
    """

    draft: AnyPath
    revision: str | None
    device: str
    dtype: str
    threads: int | None
    vram: int | str | None
    ram: int | str | None
    cache_ram: int | str | None
    context: int | None
    prompt: Callable[[Any], Any] | None
    answer_tokens: int
    kv_cache: str | int
    tree: int | None
    texts: int
    lookup_files: AnyPath | Sequence[AnyPath]
    learn: bool
    learn_file: AnyPath | None
    exit_file: AnyPath | None
    exit_layer: int | None
    draft_window: int | None
    chats: bool
    think: bool | None
    special_in_text: bool
    needs_draft_model: bool
    deterministic: bool
    arithmetic: str
    synchronous: bool
    progress: Callable[[int, int], None] | None


@dataclass(frozen=True)
class LoadOptions:
    """A model to load, and how. `of` makes it from what `Engine.load` accepts.

    model: a folder, a `.gguf` file, a hub id, or a name of `named_models`. draft: `auto` (the built-in draft for the
    built-in target, otherwise the faster of lookup and a shadow that was made), `none`, `lookup` (n-gram lookup and
    token recycling, no model), `self` (early exit: the target's first layers and an exit layer; `self:N` and
    `self:FILE` name one), `shadow` (the target
    in fewer bits), `head` (a trained head), or a model or a head like `model`.
    exit_file: the exit layer for `self`; None is the newest one for this target. exit_layer: the number of first layers
    with which `self` drafts without an exit layer. revision: branch, tag or commit of a hub id.
    device: auto, cpu, cuda or cuda:N. dtype: auto, bf16, fp16, fp32. threads: CPU threads; None keeps torch's number.
    vram, ram: limits in bytes; None is all that is free. context: maximum number of tokens of prompt and answer; None
    is what costs no speed, up to the model's own, and about `planning.plan.DEFAULT_CONTEXT` at least. prompt,
    answer_tokens: a request that will come, if it is known: the default context holds it. `prompt` gives a
    `text.prompt.Prompt` for a `Tokenizer`. tree: nodes to reserve memory for, if requests will use a larger budget
    than the automatic one. texts: the number of texts that will share passes (`Engine.generate_many`), for which memory
    is reserved. kv_cache: the format of the target's KV entries, `auto` or one of KV_CACHES.
    synchronous: no read-ahead; read each streamed layer when the pass needs it.
    progress(bytes_done, bytes_total) is called while resident weights load. lookup_files: text files for n-gram lookup.
    draft_window: how many tokens of a text a draft model keeps in its KV cache; None: what fits its context if the
    target's is longer, otherwise all, or fewer if requests with long texts find that to bring as many tokens per pass.
    A shadow copies as many of the target's entries; None: it reads all of them where they are, or copies 512 on a card
    with a context of at least 8,192.
    learn: the draft may learn between requests (`Engine.learn`). learn_file: what it learnt before; without `learn`,
    the file must exist.
    chats: prompts will be messages; a model without a chat template is refused before its weights are read.
    think: let the model think before its answers to chats, or not; None is the template's own default; a template that
    cannot choose is refused equally early. special_in_text: texts of messages that look like special tokens become
    such tokens. needs_draft_model: requests will use lossy acceptance; a draft without a model is refused equally
    early. cache_ram: bytes of RAM for the KV caches of earlier conversations (`TextPool`); None is
    `planning.parked_texts`' default. deterministic: nothing depends on measured times, so that the same request gives
    the same text where it is not exact, too, if weights and KV entries lie where they did: trees of a given size, no
    drafting during passes, one text at a time, kernels chosen by rules (for the whole process: `process.fix_choices`).
    arithmetic: one of ARITHMETIC_NAMES. EXACT: the text equals plain decoding's; refused where there are no kernels for
    that (`model.exactness`). INT8: so it does, but on a CPU rows are rounded to 8 bits before they multiply GGUF's
    quantised matrices, as llama.cpp does, which is faster; refused where it would change nothing. FAST: rows are
    computed in the fastest way, whatever rows share their pass, and the text is plain decoding's up to near-ties. AUTO:
    EXACT where there are kernels on a CPU, and on a GPU for streamed targets; elsewhere FAST.
    Raises UsageError for values that contradict each other.
    """

    model: str = "builtin"
    draft: str = AUTO
    revision: str | None = None
    device: str = AUTO
    dtype: str = AUTO
    threads: int | None = None
    vram: int | None = None
    ram: int | None = None
    context: int | None = None
    prompt: Callable[[Any], Any] | None = None
    answer_tokens: int = 0
    tree: int | None = None
    texts: int = 1
    kv_cache: str = AUTO
    synchronous: bool = False
    progress: Callable[[int, int], None] | None = None
    lookup_files: Sequence[Path] = ()
    learn: bool = False
    learn_file: Path | None = None
    exit_file: Path | None = None
    exit_layer: int | None = None
    draft_window: int | None = None
    chats: bool = False
    think: bool | None = None
    needs_draft_model: bool = False
    cache_ram: int | None = 0
    deterministic: bool = False
    arithmetic: str = AUTO
    special_in_text: bool = False

    def __post_init__(self) -> None:
        if self.arithmetic not in ARITHMETIC_NAMES:
            raise UsageError(f"`arithmetic` is one of {', '.join(ARITHMETIC_NAMES)}, not {self.arithmetic!r}")
        if self.deterministic and self.learn:
            raise UsageError("`learn` trains for as long as a text took; omit it, or `deterministic`")
        if self.deterministic:
            object.__setattr__(self, "cache_ram", 0)  # later texts would use entries that other passes computed

    @classmethod
    def of(cls, model: AnyPath = "builtin", **settings: Unpack[LoadSettings]) -> LoadOptions:
        """The record of these settings. Raises UsageError for an unknown setting, or a value of another kind."""
        check_names("Engine.load", settings, [field.name for field in fields(cls) if field.name != "model"])
        values: dict[str, Any] = dict(settings)
        for name in SIZES & values.keys():
            values[name] = _num_bytes(name, values[name])
        if "kv_cache" in values:
            value = values["kv_cache"]
            values["kv_cache"] = str(value)
            if str(value) not in (AUTO, *KV_CACHES):
                names = f"{AUTO}, {', '.join(KV_CACHES[:-1])} or {KV_CACHES[-1]}"
                raise UsageError(f"`kv_cache` must be {names}, not {value!r}")
        lookup_files: Any = values.get("lookup_files") or ()
        is_one = not isinstance(lookup_files, (list, tuple))
        values["lookup_files"] = tuple(map(Path, (lookup_files,) if is_one else lookup_files))
        for name in ("learn_file", "exit_file"):
            if values.get(name) is not None:
                values[name] = Path(path_text(name, values[name]))
        draft = path_text("draft", values.pop("draft", AUTO))
        return cls(path_text("model", model), draft, **values)


def path_text(name: str, value: Any) -> str:
    """A model's name or path as text. name: of the argument. Raises UsageError for something else."""
    try:
        return os.fsdecode(value)
    except TypeError as exc:
        raise UsageError(f"{name} must be a path or a name, not {value!r}") from exc


def _num_bytes(name: str, size: Any) -> int | None:
    """A size as bytes. Raises UsageError."""
    if isinstance(size, str):
        return parse_size(size)
    if not (size is None or isinstance(size, Integral)):
        raise UsageError(f'{name} must be a number of bytes or a text like "4GiB", not {size!r}')
    return None if size is None else int(size)
