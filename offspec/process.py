"""All process-wide settings that offspec changes, with their reasons.

- `set_num_threads`: torch's number of threads, if `--threads` sets it (`loading.py`).
- `disable_cudnn_attention`: torch does not compute attention with cuDNN after a model was loaded on a GPU.
- `loaders.cuda.limit_memory`: a limit for torch's allocator on a GPU, if `--vram` sets one.
- `loaders.formats.process_state`: settings changed during bitsandbytes' import, the measured rows up to which a fused
  product is faster, and blocks in which torch has one thread.
- `model.foreign_modules`: transformers logs errors only, after a model was loaded through its modules.
- `cli.serve`: while it runs, SIGTERM ends the server as Ctrl-C does, and asyncio's messages are filtered.
"""

from __future__ import annotations

import torch


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
