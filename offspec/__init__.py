"""offspec: runs language models far larger than the GPU's memory. The output is exactly that of plain decoding.

    from offspec import Engine, SamplingParams
    for step in Engine.load("builtin").generate("def area(", SamplingParams(max_new_tokens=64)):
        print(step.text, end="", flush=True)

Names are imported on first use (PEP 562), so that importing a subpackage does not import torch.
"""

from __future__ import annotations

import os.path
from importlib import import_module

from . import methods

TYPE_CHECKING = False  # not typing's: this package is imported before Ctrl-C is handled (`cli.entry`), so it is small

__version__ = "0.2.0"

# In a source checkout the subpackages are beside this folder; in an installed package they are inside it.
_root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
if os.path.isfile(os.path.join(_root, "pyproject.toml")) and os.path.isdir(os.path.join(_root, "loaders")):
    __path__.append(_root)

methods.RESEARCH = "offspec.research.methods"

_HOMES = {
    "AUTO_TEXTS": "offspec.scheduler.params",
    "Batch": "offspec.running.batch",
    "Conversion": "offspec.loaders.convert",
    "DEFAULT_CONTEXT": "offspec.planning.plan",
    "Message": "offspec.text.prompt",
    "MODEL_NAMES": "offspec.named_models",
    "Prompt": "offspec.text.prompt",
    "PromptCache": "offspec.prompt_cache",
    "Sequence": "offspec.running.sequence",
    "Session": "offspec.session",
    "Turn": "offspec.session",
    "memory_error": "offspec.planning.system_memory",
    "Engine": "offspec.engine",
    "LoadOptions": "offspec.load_options",
    "Step": "offspec.running.steps",
    "ACCEPTS": "offspec.scheduler.params",
    "Constraint": "offspec.scheduler.params",
    "SpeculationParams": "offspec.scheduler.params",
    "SamplingParams": "offspec.scheduler.params",
    "Scoring": "offspec.scheduler.params",
    "Stats": "offspec.stats",
    "TokenLogprob": "offspec.scheduler.trees.logprobs",
    "OffspecError": "offspec.errors",
    "CONVERT_FORMATS": "offspec.loaders.params",
    "ConvertParams": "offspec.loaders.params",
    "ARITHMETIC_NAMES": "offspec.load_options",
    "KV_CACHES": "offspec.loaders.params",
    "LOSSLESS_FORMAT": "offspec.loaders.params",
    "PLAN_FORMATS": "offspec.loaders.params",
    "convert": "offspec.checkpoints.conversion",
    "RECOMMENDED": "offspec.scheduler.params",
    "SEED_LIMIT": "offspec.scheduler.params",
    "SHADOW_FORMATS": "offspec.loaders.params",
    "TREES": "offspec.scheduler.params",
    "format_quantity": "offspec.loaders.units",
    "format_seconds": "offspec.loaders.units",
    "format_size": "offspec.loaders.units",
    "parse_size": "offspec.loaders.units",
    "with_recommended": "offspec.scheduler.params",
}
__all__ = [
    "ACCEPTS",
    "ARITHMETIC_NAMES",
    "AUTO_TEXTS",
    "CONVERT_FORMATS",
    "DEFAULT_CONTEXT",
    "KV_CACHES",
    "LOSSLESS_FORMAT",
    "MODEL_NAMES",
    "PLAN_FORMATS",
    "RECOMMENDED",
    "SEED_LIMIT",
    "SHADOW_FORMATS",
    "TREES",
    "Batch",
    "Constraint",
    "Conversion",
    "ConvertParams",
    "Engine",
    "LoadOptions",
    "Message",
    "OffspecError",
    "Prompt",
    "PromptCache",
    "SamplingParams",
    "Scoring",
    "Sequence",
    "Session",
    "SpeculationParams",
    "Stats",
    "Step",
    "TokenLogprob",
    "Turn",
    "__version__",
    "convert",
    "format_quantity",
    "format_seconds",
    "format_size",
    "memory_error",
    "parse_size",
    "with_recommended",
]

if TYPE_CHECKING:
    from typing import Any

    from offspec.loaders.params import (
        CONVERT_FORMATS,
        KV_CACHES,
        LOSSLESS_FORMAT,
        PLAN_FORMATS,
        SHADOW_FORMATS,
        ConvertParams,
    )
    from offspec.loaders.units import format_quantity, format_seconds, format_size, parse_size
    from offspec.scheduler.params import (
        ACCEPTS,
        AUTO_TEXTS,
        RECOMMENDED,
        SEED_LIMIT,
        TREES,
        Constraint,
        SamplingParams,
        Scoring,
        SpeculationParams,
        with_recommended,
    )
    from offspec.scheduler.trees.logprobs import TokenLogprob

    from .checkpoints.conversion import Conversion, convert
    from .engine import Engine
    from .errors import OffspecError
    from .load_options import ARITHMETIC_NAMES, LoadOptions
    from .named_models import MODEL_NAMES
    from .planning.plan import DEFAULT_CONTEXT
    from .planning.system_memory import memory_error
    from .prompt_cache import PromptCache
    from .running.batch import Batch
    from .running.sequence import Sequence
    from .running.steps import Step
    from .session import Session, Turn
    from .stats import Stats
    from .text.prompt import Message, Prompt


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
