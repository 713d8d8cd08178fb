"""Triton's kernels are compiled for a card, with the compiler that Triton brings; no GPU is needed."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from offspec.loaders.formats.on_gpu import gguf_kernels

from .test_triton_gguf import SOME, TYPES


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(t, marks=() if t in SOME else pytest.mark.nightly) for t in TYPES])
def test_they_compile_for_a_card(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For sm_89, which is an RTX 4090."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # in place of the home folder
    triton = pytest.importorskip("triton", reason="Triton is not installed; it comes with torch's CUDA wheels")
    from triton.backends.compiler import GPUTarget

    kernels = gguf_kernels()
    assert kernels is not None
    pointers = {"x": "*bf16", "blocks": "*u8", "out": "*bf16"}
    numbers = dict.fromkeys(("num_rows", "num_outputs", "row_blocks", "steps"), "i32")
    kernel, tile = kernels.multiply_kernel, kernels.TILES[0]
    constants = kernels.LAYOUTS[name].constants | {"rows": tile.rows, "outputs": tile.outputs}
    source = triton.compiler.ASTSource(
        fn=kernel,
        signature=pointers | numbers | dict.fromkeys(constants, "constexpr"),
        constexprs={(kernel.arg_names.index(key),): value for key, value in constants.items()},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = triton.compile(
            source, target=GPUTarget("cuda", 89, 32), options={"num_warps": tile.num_warps, "num_stages": 2}
        )
    assert compiled.asm["cubin"]
    assert "mma.sync" in compiled.asm["ptx"], "tensor cores multiply"
    assert compiled.metadata.shared <= 32 << 10, "several programs fit a multiprocessor"
