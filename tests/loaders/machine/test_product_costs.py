"""What products take: measured once, kept in a file that may hold anything, and told to plans."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from offspec.backends.arithmetic import EXACT, INT8
from offspec.backends.products import (
    KERNEL,
    TILES,
    TORCH,
    MethodCosts,
    ProductCosts,
    ProductKind,
    are_rows_exact,
    are_rows_in_bytes,
)
from offspec.backends.weights import Weight
from offspec.loaders.files.checkpoint import TensorInfo
from offspec.loaders.formats import StoredWeight, format_named
from offspec.loaders.machine import product_costs as module
from offspec.loaders.machine.product_costs import (
    HOPELESS_ROWS,
    ROWS,
    costs_file,
    exact_speedup,
    forms_of,
    has_choice,
    is_plausible,
    know_products,
    measure_methods,
    methods_of,
    product_flops,
)

from ...machines import each_choice, lanes, needs_kernels

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FOUND = MethodCosts({TORCH: {1: 2e-10, 16: 4e-10}, TILES: {1: 1e-10, 16: 5e-10}})


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def costs(product_costs: ProductCosts) -> ProductCosts:
    return product_costs


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[ProductKind]:
    """What was measured, which takes no time."""
    kinds = list[ProductKind]()

    def measure(kind: ProductKind) -> MethodCosts:
        kinds.append(kind)
        return FOUND

    monkeypatch.setattr(module, "measure_methods", measure)
    return kinds


def kinds_of(form: str, dtype: torch.dtype) -> set[ProductKind]:
    return {ProductKind(form, dtype, is_large) for is_large in (False, True)}


# ------------------------------------------------------------------------------------------------ known once


def test_each_kind_is_measured_once(measured: list[ProductKind], costs: ProductCosts) -> None:
    know_products([("bf16", FP32)])
    assert set(measured) == kinds_of("bf16", FP32)
    assert all(costs.get(kind) == FOUND for kind in measured)
    know_products([("bf16", FP32)])
    assert len(measured) == 2
    costs.clear()  # as in a new process
    know_products([("bf16", FP32), ("fp16", FP32)])
    assert set(measured[2:]) == kinds_of("fp16", FP32)
    assert all(costs.get(kind) == FOUND for kind in measured)
    assert [costs.method(measured[0], rows) for rows in (1, 16)] == [TILES, TORCH]


def test_anew(measured: list[ProductKind], costs: ProductCosts, monkeypatch: pytest.MonkeyPatch) -> None:
    know_products([("bf16", FP32), ("fp16", FP32)])
    other = MethodCosts({TORCH: {1: 7e-10}, TILES: {1: 8e-10}})
    monkeypatch.setattr(module, "measure_methods", lambda kind: other)
    know_products([("bf16", FP32)], anew=True)
    assert all(costs.get(kind) == other for kind in kinds_of("bf16", FP32))
    costs.clear()
    monkeypatch.setattr(module, "measure_methods", lambda kind: pytest.fail("is in the file"))
    know_products([("bf16", FP32), ("fp16", FP32)])
    assert all(costs.get(kind) == other for kind in kinds_of("bf16", FP32))
    assert all(costs.get(kind) == FOUND for kind in kinds_of("fp16", FP32))


@each_choice
def test_forms_without_a_choice_are_not_measured(measured: list[ProductKind]) -> None:
    know_products([("F32", FP32), ("awq", BF16), ("F64", FP32)])
    know_products([])
    assert measured == []
    assert not costs_file().exists()
    assert not has_choice("awq")
    assert has_choice("bf16")
    assert has_choice("nf4") == has_choice("int8") == (lanes() > 0)


@each_choice
def test_rows_of_two_dtypes_are_compared_once(
    monkeypatch: pytest.MonkeyPatch, measured: list[ProductKind], costs: ProductCosts
) -> None:
    seconds = {BF16: {1: 1e-10, 4: 2e-10, 16: 9e-10}, FP32: {1: 1e-10, 4: 1e-10, 16: 4e-10}}

    def measure(kind: ProductKind) -> MethodCosts:
        measured.append(kind)
        return MethodCosts({KERNEL: seconds[kind.dtype]})

    monkeypatch.setattr(module, "measure_methods", measure)
    assert exact_speedup("nf4", FP32, BF16) == pytest.approx(2.0 if lanes() else 1.0)
    costs.clear()  # as in a new process
    exact_speedup("nf4", FP32, BF16)
    assert measured == [ProductKind("nf4", dtype, True, EXACT) for dtype in (BF16, FP32) if lanes()]
    costs.is_fixed = True
    assert exact_speedup("nf4", FP32, BF16) == 1.0


# ------------------------------------------------------------------------------------------------ any file

KIND = "bf16 x float32, large"
DAMAGED = {
    "empty": b"",
    "cut off": b'{"bf16 x float32, large": {"torch": {"1"',
    "no text": b"\xff\xfe\x00\x80",
    "deep": b"[" * 100_000,
    "ways in a list": json.dumps({KIND: [TORCH]}).encode(),
    "without torch's": json.dumps({KIND: {TILES: {"1": 1e-10}}}).encode(),
    "an unknown way": json.dumps({KIND: {TORCH: {"1": 1e-10}, "magic": {"1": 1e-12}}}).encode(),
    "no seconds": json.dumps({KIND: {TORCH: {"1": 0.0}}}).encode(),
    "endless seconds": json.dumps({KIND: {TORCH: {"1": math.inf}}}).encode(),
    "seconds beyond a float": b'{"bf16 x float32, large": {"torch": {"1": 1' + b"0" * 400 + b"}}}",
    "no rows": json.dumps({KIND: {TORCH: {"0": 1e-10}}}).encode(),
    "rows that are no number": json.dumps({KIND: {TORCH: {"many": 1e-10}}}).encode(),
    "rows beyond a float": json.dumps({KIND: {TORCH: {"1" + "0" * 400: 1e-10}}}).encode(),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_ignored_and_replaced(
    content: bytes, measured: list[ProductKind], costs: ProductCosts
) -> None:
    costs_file().parent.mkdir(parents=True)
    costs_file().write_bytes(content)
    know_products([("bf16", FP32)])
    assert set(measured) == kinds_of("bf16", FP32)
    costs.clear()
    know_products([("bf16", FP32)])
    assert len(measured) == 2
    assert {costs.method(kind, 1) for kind in measured} == {TILES}


def test_what_a_file_says_of_other_kinds_is_kept(measured: list[ProductKind]) -> None:
    costs_file().parent.mkdir(parents=True)
    costs_file().write_text(json.dumps({"later x float8, large": {TORCH: {"1": 1e-10}}}))
    know_products([("bf16", FP32)])
    assert len(json.loads(costs_file().read_text())) == 3


def _huge(file: Path) -> None:
    with file.open("wb") as opened:
        opened.truncate(2**40)


def _device(file: Path) -> None:
    file.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [_huge, os.mkfifo, _device], ids=["huge", "fifo", "device"])
def test_what_is_no_small_file_is_not_read(make: Callable[[Path], None], measured: list[ProductKind]) -> None:
    costs_file().parent.mkdir(parents=True)
    make(costs_file())
    know_products([("bf16", FP32)])
    assert len(measured) == 2
    assert len(json.loads(costs_file().read_text())) == 2


def test_a_place_that_cannot_be_written(measured: list[ProductKind], tmp_path: Path, costs: ProductCosts) -> None:
    costs_file().mkdir(parents=True)
    know_products([("bf16", FP32)])
    assert list(costs_file().parent.iterdir()) == [costs_file()], "nothing is left beside it"
    costs_file().rmdir()
    costs_file().parent.rmdir()
    costs_file().parent.write_text("a file in the folder's place")
    costs.clear()
    know_products([("bf16", FP32)])
    assert len(measured) == 4
    assert all(costs.get(kind) == FOUND for kind in measured)


def test_other_numbers_of_threads_have_other_files(
    set_threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set[Path]()
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    for threads in (1, 2, 3):
        set_threads(threads)
        assert costs_file() == costs_file()
        names.add(costs_file())
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    names.add(costs_file())
    assert len(names) == 4


# ------------------------------------------------------------------------------------------------ measuring

SHAPE = (64, 256)


class Machine:
    """A clock, and products that take what they are said to, in units of a second for each weight and row."""

    def __init__(self, costs: ProductCosts, **speeds: float) -> None:
        self.costs, self.speeds, self.now, self.load = costs, speeds, 0.0, 1.0
        self.asked = set[tuple[str, int]]()

    def perf_counter(self) -> float:
        return self.now

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None, scratch: Tensor) -> Tensor:
        assert tuple(weight.shape) == SHAPE
        way = self.costs.forced or TILES
        self.asked.add((way, x.shape[0]))
        self.now += self.load * self.speeds[way] * x.shape[0] * math.prod(SHAPE)
        return x


@pytest.fixture
def machine(costs: ProductCosts, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(costs, torch=1e-3, tiles=5e-4, kernel=1e-2)
    monkeypatch.setattr(module, "SHAPES", {True: SHAPE, False: SHAPE})
    monkeypatch.setattr(module, "CACHE_BYTES", 2**16)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=made.perf_counter))
    monkeypatch.setattr(module, "linear", made.linear)
    return made


@needs_kernels
def test_each_way_takes_what_it_took(machine: Machine, costs: ProductCosts) -> None:
    found = measure_methods(ProductKind("bf16", FP32, is_large=True))
    assert costs.forced is None
    for way in (TORCH, TILES):
        assert found.seconds[way] == pytest.approx({rows: machine.speeds[way] * rows for rows in ROWS})
    assert {found.method(rows) for rows in ROWS} == {TILES}
    few = [rows for rows in ROWS if rows <= HOPELESS_ROWS]
    assert found.seconds[KERNEL] == pytest.approx({rows: machine.speeds[KERNEL] * rows for rows in few})
    assert {rows for way, rows in machine.asked if way == KERNEL} == set(few), "hopeless for more"


@needs_kernels
@pytest.mark.parametrize("arithmetic", [EXACT, INT8])
def test_exact_products_are_measured_as_they_are_computed(
    arithmetic: str, machine: Machine, costs: ProductCosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def linear(*args: Any) -> None:
        assert (are_rows_exact(), are_rows_in_bytes()) == (True, arithmetic == INT8)
        machine.linear(*args)

    monkeypatch.setattr(module, "linear", linear)
    rates = product_flops("bf16", FP32, arithmetic=arithmetic)
    assert rates == pytest.approx(dict.fromkeys(ROWS, 2 / machine.speeds[KERNEL]))
    assert product_flops("bf16", FP32) == {}, "another arithmetic"
    asked = len(machine.asked)
    costs.clear()
    assert product_flops("bf16", FP32, arithmetic=arithmetic) == pytest.approx(rates)
    assert len(machine.asked) - asked < asked / 2, "read from the file, and looked at once"


@needs_kernels
def test_what_others_disturbed_is_measured_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row took longer than four: the least of both tries counts."""
    kind, plain, calls = ProductKind("bf16", FP32, is_large=True), module._seconds, list[str]()

    def seconds(way: str, form: str, rows: Tensor, *rest: Any) -> float:
        calls.append(way)
        is_disturbed = len(calls) <= len(methods_of(form))  # the first number of rows, in the first try
        return plain(way, form, rows, *rest) * (100 if is_disturbed else 1)

    undisturbed = measure_methods(kind)
    monkeypatch.setattr(module, "_seconds", seconds)
    found = measure_methods(kind)
    for way, points in undisturbed.seconds.items():
        assert found.seconds[way] == pytest.approx(points)
    assert is_plausible(found)


def test_what_stays_disturbed_is_not_kept(
    measured: list[ProductKind], costs: ProductCosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = MethodCosts({TORCH: {1: 2e-9, 4: 1e-10, 16: 4e-10}})
    assert not is_plausible(odd)
    monkeypatch.setattr(module, "measure_methods", lambda kind: odd)
    know_products([("bf16", FP32)])
    assert all(costs.get(kind) == odd for kind in kinds_of("bf16", FP32))
    assert not costs_file().exists()


def test_costs_of_a_busier_time_are_measured_again(
    measured: list[ProductKind], costs: ProductCosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = MethodCosts(
        {way: {rows: 10 * seconds for rows, seconds in FOUND.seconds[way].items()} for way in FOUND.seconds}
    )
    for kind in kinds_of("bf16", FP32):
        costs.set(kind, slow)
    monkeypatch.setattr(module, "_typical_s", lambda kind: FOUND.least(16))
    rates = product_flops("bf16", FP32)
    assert set(measured) == kinds_of("bf16", FP32)
    assert rates == {rows: pytest.approx(2 * rows / FOUND.least(rows)) for rows in ROWS}


def test_rates_of_products(machine: Machine, costs: ProductCosts) -> None:
    """By the cheapest way, divided by what the machine is slower now; never faster than at rest."""
    assert product_flops("bf16", FP32) == {}
    costs.set(ProductKind("bf16", FP32, is_large=False), FOUND)
    assert product_flops("bf16", FP32) == {}, "of large matrices"
    at_rest = {rows: 5e-4 * rows for rows in ROWS}
    costs.set(ProductKind("bf16", FP32, is_large=True), MethodCosts({TORCH: {1: 1.0}, TILES: at_rest}))
    for load, slower in ((1.0, 1.0), (3.0, 3.0), (0.8, 1.0)):
        machine.load = load
        assert product_flops("bf16", FP32, (1, 8, 256)) == pytest.approx(dict.fromkeys((1, 8, 256), 4000 / slower))
    assert product_flops("bf16", FP32).keys() == set(ROWS)


# ------------------------------------------------------------------------------------------------ forms


def stored(form: str, shape: tuple[int, ...] = (8, 64)) -> StoredWeight:
    def nowhere(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
        return TensorInfo(name, dtype, shape, Path(), 0, 0)

    found = format_named(form).sized(form, "weight", shape, nowhere)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("form", "dtype", "is_kept", "expected"),
    [
        ("BF16", BF16, True, {("bf16", BF16)}),
        ("BF16", BF16, False, {("bf16", BF16)}),
        ("BF16", FP32, False, {("bf16", FP32)}),
        ("BF16", FP32, True, set()),  # kept in fp32
        ("F16", FP16, True, {("fp16", FP16)}),
        ("F16", BF16, True, {("bf16", BF16)}),  # kept in bf16
        ("F16", BF16, False, {("fp16", BF16), ("bf16", BF16)}),  # streamed as it is, and what stays of it
        ("F32", FP32, True, {("F32", FP32)}),
        ("nf4", FP32, True, {("nf4", FP32)}),
        ("nf4", BF16, True, {("nf4", BF16), ("bf16", BF16)}),
        ("int8", FP16, False, {("int8", FP16), ("fp16", FP16)}),
    ],
)
def test_forms_of_weights(form: str, dtype: torch.dtype, is_kept: bool, expected: set[tuple[str, torch.dtype]]) -> None:
    weights = [stored(form), stored(form, (64, 64)), stored("BF16", (64,))]
    assert forms_of(weights, dtype, is_kept=is_kept) == expected
