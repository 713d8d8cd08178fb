"""AirLLM on the CPU: each layer from a file of its own, read ahead by its own thread.

PYTHON airllm_worker.py JOB.json RESULT.json        as every worker; the job's "draft" is the folder of the split
PYTHON airllm_worker.py --split CHECKPOINT FOLDER   split the checkpoint beforehand, as AirLLM does when it opens one
"""

from __future__ import annotations

import sys
from importlib.metadata import version

import common
import torch
from airllm import AutoModel
from transformers.generation.streamers import BaseStreamer


class Watch(BaseStreamer):
    """Hands tokens on as generate() says them; what it says first is the prompt."""

    def __init__(self, emit: common.Emit) -> None:
        self.emit, self.is_prompt = emit, True

    def put(self, value: torch.Tensor) -> None:
        if not self.is_prompt:
            self.emit(value.reshape(-1).tolist())
        self.is_prompt = False

    def end(self) -> None: ...


def opened(model: str, split: str) -> AutoModel:
    return AutoModel.from_pretrained(
        model, device="cpu", dtype=torch.bfloat16, max_seq_len=common.CONTEXT, layer_shards_saving_path=split
    )


def load(job: common.Job) -> tuple[common.Generate, str]:
    torch.set_num_threads(job.threads)
    model = opened(job.model, job.draft)

    def generate(prompt: list[int], num_tokens: int, emit: common.Emit) -> None:
        length = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
        ids = torch.tensor([prompt])
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, use_cache=True, streamer=Watch(emit), **length
        )

    return generate, version("airllm")


if __name__ == "__main__":
    if sys.argv[1] == "--split":
        opened(*sys.argv[2:4])
    else:
        common.run(load)
