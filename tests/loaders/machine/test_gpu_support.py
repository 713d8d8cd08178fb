"""Each reason why torch cannot use a card is told with its own remedy, in torch's words of versions 2.5 to 2.13."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from offspec.loaders.machine.gpu_support import card_fault, fault_of, gpu_fault, has_kernels_for

from ...refusals import tells

TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12080). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: "
    "https://pytorch.org to install a PyTorch version that has been compiled with your version of the CUDA driver."
)
NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from "
    "http://www.nvidia.com/Download/index.aspx"
)
MIXED = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that "
    "might have already set an error? Error 803: system has unsupported display driver / cuda driver combination"
)
UNKNOWN = (
    "CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable "
    "CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero."
)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes torch a build for some CUDA that finds no card, and fails like this when CUDA is initialised."""

    def make(cuda: str | None, failure: Exception | None) -> None:
        def is_available() -> bool:
            warnings.warn(f"CUDA initialization: {failure}", stacklevel=1)
            return False

        def init() -> None:
            if failure is not None:
                raise failure

        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "is_available", is_available)
        monkeypatch.setattr(torch.cuda, "init", init)

    return make


@pytest.mark.parametrize(
    ("cuda", "message", "words", "has_driver"),
    [
        ("13.0", TOO_OLD, ("12.8", "13.0", "580", "https://pytorch.org/get-started/locally"), True),
        ("12.6", TOO_OLD.replace("12080", "11040"), ("11.4", "12.6", "525"), True),
        ("14.1", TOO_OLD, ("12.8", "14.1", "update the driver"), True),
        ("13.0", NO_DRIVER, ("no NVIDIA driver", "WSL", "container"), False),
        ("13.0", MIXED, ("different versions", "restart"), True),
        ("13.0", UNKNOWN, ("restart", "nvidia_uvm"), True),
        ("13.0", "CUDA error: out of memory\nCUDA kernel errors might be", ("out of memory", "close"), True),
        ("13.0", "Something new. And more.\nLines", ("Something new", "nvidia-smi"), True),
    ],
    ids=["too old", "12", "14", "no driver", "mixed", "unknown", "full", "new"],
)
def test_each_fault_has_its_remedy(
    build: Any, cuda: str, message: str, words: tuple[str, ...], has_driver: bool, recwarn: pytest.WarningsRecorder
) -> None:
    build(cuda, RuntimeError(message))
    fault = gpu_fault()
    assert fault is not None
    assert tells(str(fault), *words)
    assert "\n" not in str(fault)
    assert fault.has_driver == has_driver
    assert len(recwarn) == 0  # torch's warning is what is told


def test_a_torch_for_cpus_is_told(build: Any) -> None:
    build(None, AssertionError("Torch not compiled with CUDA enabled"))
    fault = gpu_fault()
    assert fault is not None
    assert tells(str(fault), torch.__version__, "CPUs only", "https://pytorch.org/get-started/locally")
    assert not fault.has_driver


@pytest.mark.parametrize(("visible", "words"), [("", ("CUDA_VISIBLE_DEVICES",)), (None, ("nvidia-smi -L",))])
@pytest.mark.parametrize("failure", [RuntimeError("No CUDA GPUs are available"), None])
def test_hidden_cards_are_told(
    build: Any, monkeypatch: pytest.MonkeyPatch, visible: str | None, words: tuple[str, ...], failure: Exception | None
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    build("13.0", failure)
    fault = gpu_fault()
    assert fault is not None
    assert tells(str(fault), *words)


def test_a_card_that_is_found_has_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu_fault() is None


def test_an_error_without_words_is_told_by_its_name() -> None:
    assert fault_of(AssertionError()).reason == "AssertionError"


CU130 = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
CU121 = ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"]


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((12, 0), CU130, True),
        ((12, 0), CU121, False),
        ((12, 0), [*CU121, "compute_90"], True),
        ((12, 0), [*CU121, "sm_90a", "compute_90a"], False),
        ((12, 0), ["sm_100", "compute_100f"], False),
        ((12, 1), ["sm_120"], True),
        ((10, 3), ["sm_100f"], True),
        ((10, 3), ["sm_100a"], False),
        ((8, 9), ["sm_80", "sm_90"], True),
        ((8, 0), ["sm_86", "compute_86"], False),
        ((6, 1), CU130, False),
        ((9, 0), ["sm_90a"], True),
        ((9, 0), [], True),
        ((9, 0), ["gfx90a"], True),
    ],
)
def test_kernels_that_run_on_a_card(capability: tuple[int, int], built: list[str], runs: bool) -> None:
    assert has_kernels_for(capability, built) == runs


@pytest.mark.parametrize(
    ("name", "capability", "built", "words"),
    [
        ("RTX 5090", (12, 0), CU121, ("RTX 5090", "sm_120", "sm_90", "12.8")),
        ("GTX 1080", (6, 1), CU130, ("GTX 1080", "sm_61", "12.6")),
        ("RTX 4090", (8, 9), CU130, ()),
    ],
)
def test_a_card_without_kernels_is_told(
    monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int], built: list[str], words: tuple[str, ...]
) -> None:
    for attribute, answer in (("get_device_capability", capability), ("get_device_name", name)):
        monkeypatch.setattr(torch.cuda, attribute, lambda index, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    fault = card_fault(0)
    assert (fault is None) == (not words)
    assert fault is None or tells(str(fault), *words)
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm's names are others
    assert card_fault(0) is None


@pytest.mark.gpu
def test_this_card_has_kernels() -> None:
    assert gpu_fault() is None
    assert card_fault(0) is None
