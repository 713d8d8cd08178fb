"""Quantising to GGUF's types: what is written decodes to numbers near the weights, by the decoder of these types."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offspec.backends.x86.group_quantising import can_run
from offspec.errors import CheckpointError
from offspec.loaders.formats.gguf_blocks import UNPACK
from offspec.loaders.formats.gguf_pack import PACK, TILE, TYPES, GgufPacker, pack_rows

from ...examples import examples

# Relative root mean square errors on normally distributed weights, a little above what was measured.
MOST_ERROR = {"Q4_K": 0.076, "Q4_1": 0.077, "Q3_K": 0.150, "Q2_K": 0.280}


def unpacked(rows: torch.Tensor, name: str) -> torch.Tensor:
    kind = TYPES[name]
    return UNPACK[name](rows.reshape(-1, kind.num_bytes)).view(len(rows), -1)


def normal(*shape: int) -> torch.Tensor:
    return 0.02 * torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", PACK)
def test_the_error_is_small(name: str) -> None:
    weights = normal(64, 1024)
    error = (unpacked(pack_rows(weights, name), name) - weights).norm() / weights.norm()
    assert error < MOST_ERROR[name]


@pytest.mark.parametrize("name", PACK)
def test_numbers_already_quantised_hardly_change(name: str) -> None:
    assert not unpacked(pack_rows(torch.zeros(3, 256), name), name).any()
    once = unpacked(pack_rows(normal(16, 512), name), name)
    twice = unpacked(pack_rows(once, name), name)
    assert (twice - once).norm() / once.norm() < MOST_ERROR[name] / 3


@pytest.mark.skipif(not can_run(), reason="no kernels on this CPU")
@pytest.mark.parametrize("name", PACK)
def test_kernels_and_plain_torch_write_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for weights of all sizes, for one sign, for few values, and next to the least number there is."""
    random = torch.Generator().manual_seed(2)
    noise, some = torch.randn(64, 512, generator=random), torch.rand(64, 512, generator=random)
    cases = [normal(600, 1024), noise * torch.logspace(-12, 3, 64)[:, None], some, -some, (5 * some).round() - 2]
    cases += [torch.zeros(4, 256), noise * 1e-30, noise * 1e-38, noise.bfloat16()]
    packed = [pack_rows(case, name) for case in cases]
    monkeypatch.setattr("offspec.loaders.formats.gguf_pack.can_run", lambda: False)
    for case, found in zip(cases, packed, strict=True):
        assert torch.equal(found, pack_rows(case, name))


@pytest.mark.parametrize("name", PACK)
def test_a_row_is_packed_alike_in_every_matrix(name: str) -> None:
    weights = normal(2 * TILE // 4096 + 3, 4096)
    packed = pack_rows(weights, name)
    for row in (0, len(weights) // 2, len(weights) - 1):
        assert torch.equal(packed[row : row + 1], pack_rows(weights[row : row + 1], name))


@pytest.mark.parametrize("name", PACK)
@given(data=st.data())
@examples(25)
def test_numbers_stay_within_a_step_of_the_weights(name: str, data: st.DataObject) -> None:
    """Outliers, one sign, constants: whatever the weights, decoded numbers are finite and near them."""
    numbers = st.sampled_from([0.0, 1e-6, -1e-6, 0.01, -0.02, 0.5, -3.0, 40.0, -41.0, 1000.0])
    weights = torch.tensor([data.draw(st.lists(numbers, min_size=256, max_size=256))])
    decoded = unpacked(pack_rows(weights, name), name)
    assert bool(decoded.isfinite().all())
    largest = float(weights.abs().max())
    step = 2 * largest / (2 ** int(name[1]) - 1)
    assert float((decoded - weights).abs().max()) <= 1.6 * step + 1e-6


@pytest.mark.parametrize("name", PACK)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e5])
def test_weights_that_no_scale_reaches_are_refused(name: str, value: float) -> None:
    weights = normal(4, 256)
    weights[2, 17] = value
    with pytest.raises(CheckpointError, match="fp16"):
        pack_rows(weights, name)


def test_a_type_for_every_shape() -> None:
    packer = GgufPacker("Q3_K")
    assert packer.for_shape((8, 512)) == packer
    assert packer.for_shape((8, 576)) == GgufPacker("Q4_1")
    assert packer.for_shape((8, 100)) is None
