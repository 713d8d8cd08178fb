"""transformers, with accelerate's disk offload where the model does not fit: plain, with an assistant,
with prompt lookup.

Settings: `assistant_tokens` N drafts N tokens per pass with the draft model ("constant" and no confidence threshold,
without which N is only a beginning); `lookup_tokens` N guesses by prompt lookup; `resident_share` of the memory goes to
layers that accelerate keeps out of the offload (max_memory), less the draft's bytes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import common
import torch
import transformers
from transformers import AutoModelForCausalLM
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


def load(job: common.Job) -> tuple[common.Generate, str]:
    torch.set_num_threads(job.threads)
    where: dict[str, object] = {}
    if not job.fits:
        files = Path(job.draft).glob("*.safetensors") if job.settings.get("assistant_tokens") else ()
        resident = int(job.ram * job.settings["resident_share"]) - sum(file.stat().st_size for file in files)
        where = {"device_map": "auto", "max_memory": {"cpu": resident}, "offload_folder": tempfile.mkdtemp()}
    model = AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.bfloat16, **where).eval()
    options: dict[str, object] = {}
    if number := job.settings.get("lookup_tokens"):
        options = {"prompt_lookup_num_tokens": number}
    if number := job.settings.get("assistant_tokens"):
        assistant = AutoModelForCausalLM.from_pretrained(job.draft, dtype=torch.bfloat16).eval()
        assistant.generation_config.num_assistant_tokens = number
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0
        options = {"assistant_model": assistant}

    def generate(prompt: list[int], num_tokens: int, emit: common.Emit) -> None:
        ids = torch.tensor([prompt])
        length = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, streamer=Watch(emit), **length, **options
        )

    return generate, transformers.__version__


if __name__ == "__main__":
    common.run(load)
