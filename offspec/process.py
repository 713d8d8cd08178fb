"""What offspec changes in the process that it runs in, beyond its own objects: all of it, and why.

- `set_num_threads`: torch's threads, where `--threads` asks for a number (`loading.py`).
- `disable_cudnn_attention`: torch no longer computes attention with cuDNN, once a model is loaded on a GPU.
- `loaders.cuda.limit_memory`: a limit for torch's allocator on a GPU, where `--vram` asks for one.
- `loaders.formats.process_state`: what importing bitsandbytes changes for a moment, the rows up to which a 4-bit kernel
  was measured to be faster, and a block in which torch has one thread.
- `model.foreign_modules`: transformers says nothing but errors, once a model is computed by its modules.
- `cli.serve`: SIGTERM ends the server as Ctrl-C does.
"""

from __future__ import annotations

import torch


def set_num_threads(threads: int) -> None:
    """Let torch compute with so many threads on the CPU."""
    torch.set_num_threads(threads)


def disable_cudnn_attention() -> None:
    """Take cuDNN out of what torch may compute attention with on a GPU.

    The newest cards prefer it, and it makes a plan for each shape, which takes tenths of a second; the number of keys
    is another one in each pass. (https://github.com/modelscope/FunASR/issues/3704 measured it with torch 2.11.)
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
