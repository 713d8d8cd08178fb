"""All process-wide settings that offspec changes, with their reasons.

- `set_num_threads`: torch's number of threads, if `--threads` sets it (`loading.py`).
- `prepare`: before a model is loaded on a GPU, torch's allocator gets segments that grow. torch does not compute
  attention with cuDNN there, and sums of products are fp32 throughout.
- `fix_choices`: nothing is chosen by measured times, after a model was loaded with `deterministic`.
- `loaders.accelerators.Accelerator.limit_memory`: a limit for torch's allocator on a GPU, if `--vram` sets one.
- `loaders.formats.process_state`: settings changed during bitsandbytes' import, and blocks with one thread.
- `backends.on_gpu`: on a GPU, which kernels run, and up to which number of rows fused ones were measured to be faster.
- `model.transformers_modules`: transformers logs errors only, after a model was loaded through its modules.
- `cli.serve`: while it runs, SIGTERM ends the server as Ctrl-C does, and asyncio's messages are filtered.
"""

from __future__ import annotations

import os
import sys

import torch

from offspec.backends.device_kinds import kind_of
from offspec.backends.on_gpu import FUSED_ROWS


def set_num_threads(threads: int) -> None:
    """Set torch's number of CPU threads."""
    torch.set_num_threads(threads)


def disable_cudnn_attention() -> None:
    """Stop torch from computing attention with cuDNN on a GPU.

    torch prefers cuDNN on the newest cards. cuDNN makes a plan for each shape, which takes tenths of a second, and the
    number of keys changes with each pass. (https://github.com/modelscope/FunASR/issues/3704 measured it with torch
    2.11.)
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def disable_reduced_precision() -> None:
    """Make torch's products on a GPU sum in fp32 throughout.

    By default cuBLAS may add the parts of a split sum in bf16 or fp16, which depends on the number of rows: a near-tie
    of two tokens would then be decided differently more often. (https://docs.pytorch.org/docs/stable/notes/cuda.html,
    "Reduced Precision Reduction in BF16 GEMMs".) TF32 has 10 bits in place of fp32's 23: with it, fp32 would have
    near-ties, too. torch leaves it off for products, unless another part of the program or an environment variable
    switches it on, and on for cuDNN.
    """
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def let_segments_grow() -> None:
    """Let torch's allocator on a GPU grow its segments, unless the user has settings of their own for it.

    Otherwise a small tensor that stays may lie in the memory of a KV cache that has been freed, and the next text's
    cache finds no room: on an H200, 0.9 of 1.0 GiB were left of a piece, and a planned pass ran out of memory.
    (https://docs.pytorch.org/docs/stable/notes/cuda.html, "expandable_segments".) Windows has none.
    """
    if sys.platform == "linux" and not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)  # torch 2.9 and newer
        (change or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")


def prepare(device: torch.device) -> None:
    """Change the settings that all work on a GPU needs; it is called before a model is loaded there."""
    if kind_of(device).has_own_memory:
        let_segments_grow()
        disable_cudnn_attention()
        disable_reduced_precision()


def fix_choices() -> None:
    """Choose between equivalent kernels by rules, from now on, instead of by measured times.

    Kernels round differently, and times differ from run to run: so might the text, at near-ties where it is not exact.
    The choices belong to the process, so they are fixed for engines that are loaded later, too.
    """
    FUSED_ROWS.is_fixed = True
