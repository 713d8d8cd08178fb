"""Who copies from the host to a device: one copy beside the ring's waits until a layer has arrived.

A GPU has one engine for these copies and takes them in order. So what runs while texts run sends tensors through
`loaders/streaming/small_transfers.py`. This test reads the source; `tests/offspec/test_pretended_cuda.py` runs it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("loaders", "scheduler", "offspec")
FROM_HOST_DATA = {"tensor", "as_tensor", "asarray", "from_numpy", "frombuffer", "scalar_tensor"}
# Parsing takes longer than to look for these.
SUSPECT = re.compile(rf"\.({'|'.join(sorted(FROM_HOST_DATA))}|to|cuda|new_tensor)\(|non_blocking")
# A module, or a folder → why it copies.
MAY_COPY = {
    "loaders/accelerators/cuda.py": "a view of page-locked memory",
    "loaders/streaming/small_transfers.py": "is the other way; copies where memory cannot be shared",
    "loaders/streaming/link.py": "the ring's filler, and KV entries in RAM: these are the large copies",
    "loaders/streaming/device_experts.py": "experts on their way to slots: these are large copies, too",
    "loaders/machine/measure.py": "measures before texts run",
    "loaders/streaming/stored_model.py": "loads formats' tables",
    "loaders/streaming/tiers.py": "loads resident weights",
    "loaders/formats/changed.py": "loads small parts of weights, as the next four",
    "loaders/formats/core.py": "makes samples to measure",
    "loaders/formats/four_bit.py": "scales of scales",
    "loaders/formats/grouped.py": "the columns of groups",
    "loaders/formats/scaled.py": "the columns of groups",
    "scheduler/trees/transfer.py": "the plain twin",
    "offspec/checkpoints/": "loads heads, exit layers and KV entries of files",
    "offspec/model/cuda_graphs.py": "a round's inputs where memory cannot be shared",
    "offspec/model/decoder.py": "makes random weights",
    "offspec/model/transformers_modules.py": "loads tables of foreign modules",
    "offspec/model/memory/kv_in_ram.py": "KV entries in RAM, copied beside the layer before",
    "offspec/model/rope.py": "loads a model's frequencies",
    "offspec/research/": "learns between texts, or beforehand",
}


def copies_in(source: str) -> Iterator[int]:
    """The lines of calls that copy from the host to a device, as far as source can tell.

    A function with `@cache` copies once in a process.
    """
    if SUSPECT.search(source) is None:
        return
    tree = ast.parse(source)
    cached = {inner for node in ast.walk(tree) if _is_cached(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node not in cached:
            name, keywords = node.func.attr, {keyword.arg: keyword.value for keyword in node.keywords}
            moves = name == "to" and ("device" in keywords or any(map(_is_device, node.args)))
            makes = name in FROM_HOST_DATA and "device" in keywords
            if moves or makes or name in ("cuda", "new_tensor") or "non_blocking" in keywords:
                yield node.lineno


def _is_cached(node: ast.AST) -> bool:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return any(isinstance(each, ast.Name) and each.id == "cache" for each in decorators)


def _is_device(value: ast.expr) -> bool:
    """Whether it is called a device, or is the name of one."""
    if isinstance(value, ast.Constant):
        return isinstance(value.value, str) and value.value.startswith("cuda")
    if isinstance(value, ast.Call):
        value = value.func
    name = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
    return "device" in name


@cache
def copies() -> dict[str, list[int]]:
    """Module → lines of copies."""
    files = (file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")))
    lines = {str(file.relative_to(ROOT)): list(copies_in(file.read_text(encoding="utf-8"))) for file in files}
    return {module: numbers for module, numbers in lines.items() if numbers}


def is_of(module: str, place: str) -> bool:
    return module.startswith(place) if place.endswith("/") else module == place


@pytest.mark.parametrize(
    "line",
    [
        "x.to(device)",
        "x.to(self._device, dtype)",
        "x.to(rows.device)",
        "x.to(device=there)",
        "x.to('cuda:0')",
        "x.cuda()",
        "torch.tensor([1], device=rows.device)",
        "torch.as_tensor(numbers, device=device)",
        "rows.new_tensor([1])",
        "rows.copy_(host, non_blocking=True)",
    ],
)
def test_copies_are_seen(line: str) -> None:
    assert list(copies_in(line)) == [1]


@pytest.mark.parametrize(
    "line",
    [
        "x.to(torch.float32)",
        "x.to('cpu')",
        "torch.arange(8, device=device)",
        "to_device(x, device)",
        "@cache\ndef table(device):\n    return torch.tensor([1], device=device)",
    ],
)
def test_nothing_else_is(line: str) -> None:
    assert list(copies_in(line)) == []


def test_small_tensors_go_through_small_transfers() -> None:
    wrong = [
        f"{module}:{line}"
        for module, lines in copies().items()
        if not any(is_of(module, place) for place in MAY_COPY)
        for line in lines
    ]
    assert wrong == [], "use `to_device` of loaders/streaming/small_transfers.py; in scheduler/, what is handed in"


def test_exceptions_are_needed() -> None:
    assert [place for place in MAY_COPY if not any(is_of(module, place) for module in copies())] == []
