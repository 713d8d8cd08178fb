"""transformers, with accelerate's disk offload where the model does not fit: plain, with an assistant,
with prompt lookup.

Settings: `assistant_tokens` N drafts N tokens per pass with the draft model ("constant" and no confidence threshold,
without which N is only a beginning); `lookup_tokens` N guesses by prompt lookup; `resident_share` of the memory goes to
modules that accelerate keeps out of the offload, less the draft's bytes.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import common
import torch
import transformers
from safetensors import safe_open
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


def placement(job: common.Job) -> dict[str, str]:
    """accelerate's device map: as many first modules on the CPU as `resident_share` holds beside the draft.

    The embedding is always there: assisted decoding moves tokens to its device, and fails where that is a disk. The
    output matrix, which each pass needs, comes before the layers.
    """
    room = int(job.ram * job.settings["resident_share"])
    if job.settings.get("assistant_tokens"):
        room -= sum(file.stat().st_size for file in Path(job.draft).glob("*.safetensors"))
    sizes: dict[str, int] = {}
    for file in sorted(Path(job.model).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dictionary
                parts = name.split(".")
                module = ".".join(parts[: 3 if parts[1] == "layers" else -1])
                sizes[module] = sizes.get(module, 0) + 2 * math.prod(opened.get_slice(name).get_shape())
    first = ["model.embed_tokens", "model.norm"]
    room -= sum(sizes[name] for name in first)
    found = dict.fromkeys([*first, "model.rotary_emb"], "cpu")
    for name in sorted(sizes.keys() - found.keys(), key=lambda name: [int(n) for n in name.split(".") if n.isdigit()]):
        found[name] = "cpu" if sizes[name] <= room else "disk"
        room -= sizes[name]
    return found


def load(job: common.Job) -> tuple[common.Generate, str]:
    torch.set_num_threads(job.threads)
    where: dict[str, object] = {}
    if not job.fits:
        where = {"device_map": placement(job), "offload_folder": tempfile.mkdtemp()}
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
