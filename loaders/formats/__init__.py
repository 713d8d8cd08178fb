"""How a weight lies in bytes and becomes a matrix. One file a format: each is registered once, in `registry`.

`core` says what a format has to answer; `process_state` holds all that formats change in the process.
"""

from .core import PackedWeight, StoredTable, StoredWeight, Weight, WeightFormat, as_table, dense, linear, take_rows
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
    "PackedWeight",
    "StoredTable",
    "StoredWeight",
    "Weight",
    "WeightFormat",
    "as_table",
    "blank_tensors",
    "dense",
    "format_named",
    "format_notes",
    "formats_in",
    "linear",
    "packer_for",
    "plan_form",
    "stored_weights",
    "take_rows",
]
