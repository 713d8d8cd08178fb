"""Weight formats: from stored bytes to a matrix. Each format has one file and is registered once, in `registry`.

`core` defines the interface of a format; `process_state` contains all process-wide state of formats.
"""

from .core import StoredTable, StoredWeight, WeightFormat
from .registry import (
    FORMATS,
    blank_tensors,
    format_named,
    format_notes,
    formats_in,
    packer_for,
    plan_form,
    stored_weights,
)

__all__ = [
    "FORMATS",
    "StoredTable",
    "StoredWeight",
    "WeightFormat",
    "blank_tensors",
    "format_named",
    "format_notes",
    "formats_in",
    "packer_for",
    "plan_form",
    "stored_weights",
]
