"""Rows with equal bits on a CUDA device: texts equal plain decoding's in 16 bits, too (`backends.triton.rows`)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.backends.arithmetic import EXACT
from offspec.backends.on_gpu import row_kernels

from .test_pretended_cuda import FORMS, Move, build, in_ram, load, resident

pytestmark = pytest.mark.gpu
PLAIN = SpeculationParams(budget=0)
PROMPTS = ("def area(", "for i in range(10):\n    print(i)\n" * 8, "x = 1", "class Stack:\n    def push(self, ")
PARAMS = [SamplingParams(24, temperature=temperature, seed=3, ignore_eos=True) for temperature in (0.0, 1.0)]


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    if row_kernels() is None:
        pytest.skip("Triton is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pair"), max_position_embeddings=512)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_what_torch_computes_depends_on_no_other_row(dtype: torch.dtype) -> None:
    """Norms, activations and probabilities, which have no kernels of their own."""
    x = torch.randn(512, 8192, generator=torch.Generator().manual_seed(0)).to("cuda:0", dtype)
    weight = torch.rand(8192, generator=torch.Generator().manual_seed(1)).to("cuda:0", dtype)
    functions = {
        "rms": lambda rows: F.rms_norm(rows, (8192,), weight, 1e-6),
        "layer": lambda rows: F.layer_norm(rows, (8192,), weight, None, 1e-6),
        "heads": lambda rows: F.rms_norm(rows.view(-1, 64, 128), (128,), weight[:128], 1e-6),
        "silu": F.silu,
        "gelu": F.gelu,
        "tanh": torch.tanh,
        "softmax": lambda rows: torch.softmax(rows.float(), -1),
        "log_softmax": lambda rows: torch.log_softmax(rows.float(), -1),
    }
    wrong = []
    for name, function in functions.items():
        together = function(x)
        for num_rows in (1, 2, 3, 7, 64, 255):
            if not torch.equal(function(x[-num_rows:].contiguous()), together[-num_rows:]):
                wrong.append(f"{name}: {num_rows}")
    assert not wrong


def exact(folder: Path, form: str, dtype: str, move: Move = resident, **options: object) -> Engine:
    engine = load(folder, form, "cuda:0", move, dtype=dtype, **options)
    engine.target.arithmetic = EXACT
    return engine


def text(engine: Engine, prompt: str, params: SamplingParams, speculation: SpeculationParams) -> list[int]:
    return [token for step in engine.generate(prompt, params, speculation) for token in step.token_ids]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("form", FORMS)
def test_nothing_changes_a_token(folder: Path, form: str, dtype: str) -> None:
    """Neither drafts, nor the sizes of trees, nor texts that share passes, nor where layers lie."""
    with exact(folder, form, dtype) as engine:
        plain = [[text(engine, prompt, params, PLAIN) for prompt in PROMPTS] for params in PARAMS]
        for params, expected in zip(PARAMS, plain, strict=True):
            for budget in (3, 64, 256):
                assert [text(engine, prompt, params, SpeculationParams(budget)) for prompt in PROMPTS] == expected
            together: list[list[int]] = [[] for _ in PROMPTS]
            for index, step in engine.generate_many(PROMPTS, params):
                together[index] += step.token_ids
            assert together == expected
    with exact(folder, form, dtype, in_ram) as engine:
        for params, expected in zip(PARAMS, plain, strict=True):
            assert [text(engine, prompt, params, SpeculationParams(64)) for prompt in PROMPTS] == expected
