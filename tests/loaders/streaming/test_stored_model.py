"""Units of stored weights: their bytes in either form, whatever the format is called."""

from __future__ import annotations

import pytest
import torch

from offspec.loaders.formats import format_named
from offspec.loaders.machine.product_rates import of_no_file
from offspec.loaders.streaming.stored_model import StoredModel, StoredUnit

SHAPE = (64, 256)


def model(form: str) -> StoredModel:
    weight = format_named(form).sized(form, "mix.weight", SHAPE, of_no_file)
    assert weight is not None
    return StoredModel([StoredUnit({"mix.weight": weight})], {})


@pytest.mark.parametrize(("form", "has_two"), [("bf16", False), ("bf16-packed", True), ("nf4", False), ("Q8_0", False)])
def test_what_is_packed_without_loss_has_two_forms(form: str, has_two: bool) -> None:
    stored = model(form)
    assert stored.has_two_forms == has_two
    packed, unpacked = (stored.keeping(packed=packed).layers[0].cost(torch.bfloat16) for packed in (True, False))
    assert packed.read_bytes == unpacked.read_bytes
    assert (packed.resident_bytes < unpacked.resident_bytes) == has_two
    if has_two:
        assert unpacked.resident_bytes == 2 * SHAPE[0] * SHAPE[1]


def test_another_dtype_unpacks_for_each_use() -> None:
    stored = model("bf16-packed").keeping(packed=False)
    assert not stored.layers[0].is_converted(torch.float16)
    assert stored.scratch_elements((), torch.float16) == SHAPE[0] * SHAPE[1]
    assert stored.scratch_elements((), torch.bfloat16) == 0
