"""Recorded launches of kernels, repeated for other numbers, beside the function that launched them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from offspec.backends.arithmetic import EXACT
from offspec.backends.choice import CPU, backend_of
from offspec.backends.x86.compiler import LAUNCHES, gnu_openmp
from offspec.backends.x86.recording import record
from offspec.backends.x86.row_steps import add_rows, gate_rows, norm_rows

from ...machines import each_width

pytestmark = [each_width, pytest.mark.skipif(gnu_openmp() is None, reason="torch has another OpenMP than GNU's")]
WIDTH, INNER = 64, 192
SHARED = torch.empty(INNER, WIDTH, dtype=torch.bfloat16)  # such as that of matrices that are unpacked one after another
Numbers = Sequence[Tensor]
EXACT_ROWS = backend_of(CPU, EXACT)


@pytest.fixture(params=[1, 3], autouse=True)
def num_threads(request: pytest.FixtureRequest, set_threads: Callable[[int], None]) -> Iterator[None]:
    set_threads(request.param)
    with torch.inference_mode():
        yield


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def layer(x: Tensor) -> Numbers:
    """What an MLP does with rows."""
    weight = noise(WIDTH, seed=1).float()  # which a norm rounds first
    normed = norm_rows(x, weight, 1e-5)
    gate, up = (EXACT_ROWS.linear(normed, noise(INNER, WIDTH, seed=seed)) for seed in (2, 3))
    return normed, add_rows(x, EXACT_ROWS.linear(gate_rows(gate, up), noise(WIDTH, INNER, seed=4)))


def assert_equal(found: Numbers, expected: Numbers) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_launches_are_repeated_for_other_numbers() -> None:
    first, second, third = (noise(1, WIDTH, seed=seed) for seed in (5, 6, 7))
    results, recording = record(layer, [first])
    assert recording is not None
    assert LAUNCHES.kept is None
    assert_equal(results, layer(first))
    again, further = recording([second]), recording([third])
    assert_equal(again, layer(second))  # and not the third's: each call has results of its own
    assert_equal(further, layer(third))
    assert_equal(recording([first]), results)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (norm_rows(x * 2, noise(WIDTH), 1e-5),),
        lambda x: (norm_rows(x, noise(WIDTH), 1e-5).add_(1),),
        lambda x: (norm_rows(x, noise(WIDTH), 1e-5)[:, ::2].contiguous(),),
        lambda x: (norm_rows(x, noise(WIDTH), 1e-5)[:, : 8 + int(x[0, 0] > 0)],),
        lambda x: (norm_rows(torch.cat([x, x]), noise(WIDTH), 1e-5),),
        lambda x: (x[:, :8],),
        lambda x: (EXACT_ROWS.linear(x, SHARED.copy_(noise(INNER, WIDTH))),),
        lambda x: (EXACT_ROWS.linear(x, noise(2**17, WIDTH)),),
    ],
    ids=[
        "before",
        "in place",
        "a copy",
        "a number that is read",
        "a list",
        "no kernel",
        "shared memory",
        "a large copy",
    ],
)
def test_what_torch_computes_is_not_recorded(function: object) -> None:
    assert callable(function)
    x = noise(1, WIDTH)
    results, recording = record(function, [x])
    assert recording is None
    assert_equal(results, function(x))


def test_an_error_ends_the_recording() -> None:
    def broken(x: Tensor) -> Numbers:
        norm_rows(x, noise(WIDTH), 1e-5)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        record(broken, [noise(1, WIDTH)])
    assert LAUNCHES.kept is None


def test_other_matrices() -> None:
    """By their addresses: of those that the recorded launches were told."""
    matrices = [noise(INNER, WIDTH, seed=seed) for seed in range(4)]
    x = noise(1, WIDTH, seed=5)

    def products(one: Tensor, other: Tensor) -> Numbers:
        return [torch.cat([EXACT_ROWS.linear(x, one), EXACT_ROWS.linear(x, other)])]

    one, other = matrices[:2]
    addresses = [one.data_ptr(), other.data_ptr()]
    _, recording = record(lambda x: [EXACT_ROWS.linear(x, one), EXACT_ROWS.linear(x, other)], [x], addresses)
    assert recording is not None
    for one, other in ((matrices[2], matrices[3]), (matrices[3], matrices[3]), (matrices[1], matrices[0])):
        found = recording([x], [one.data_ptr(), other.data_ptr()])
        assert_equal([torch.cat(found)], products(one, other))


@pytest.mark.parametrize("reads_weights", [False, True])
def test_matrices_that_cannot_be_others(reads_weights: bool) -> None:
    """One that is used twice, or that torch has computed with."""
    matrix = noise(INNER, WIDTH)
    own = matrix if reads_weights else noise(INNER, WIDTH, seed=1)
    addresses = [matrix.data_ptr(), own.data_ptr()] if not reads_weights else [matrix.data_ptr()]
    addresses = addresses if reads_weights else [addresses[0]] * 2

    def product(x: Tensor) -> Numbers:
        weight = matrix + 0 if reads_weights else matrix
        return (EXACT_ROWS.linear(x, weight),)

    _, recording = record(product, [noise(1, WIDTH)], addresses)
    assert recording is None
