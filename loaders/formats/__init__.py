"""Weight formats: from stored bytes to a matrix. Each format has one file and is registered once, in `registry`.

`core` defines the interface of a format; `process_state` contains all process-wide state of formats.
"""

from .core import (
    PackedWeight,
    StoredTable,
    StoredWeight,
    Weight,
    WeightFormat,
    as_table,
    dense,
    linear,
    linear_each,
    linear_fp32,
    linears,
    take_rows,
)
from .expert_table import Chosen, ExpertTable, PlacedExpert
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
    "Chosen",
    "ExpertTable",
    "PackedWeight",
    "PlacedExpert",
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
    "linear_each",
    "linear_fp32",
    "linears",
    "packer_for",
    "plan_form",
    "stored_weights",
    "take_rows",
]
