"""openvino-genai's LLMPipeline on the CPU, which reads GGUF. Settings: `draft_tokens` N drafts N tokens
with the draft model.

PYTHON openvino_worker.py JOB.json RESULT.json   as every worker; the job's "draft" is a folder in OpenVINO's format
PYTHON openvino_worker.py --convert FILE.gguf    write that format beside the file
"""

from __future__ import annotations

import sys
from typing import Any

import common
import numpy as np
import openvino
import openvino_genai


class Watch(openvino_genai.StreamerBase):
    """Hands token ids on as they come."""

    def __init__(self, emit: common.Emit) -> None:
        super().__init__()
        self.emit = emit

    def write(self, token: int | list[int]) -> openvino_genai.StreamingStatus:
        self.emit(token if isinstance(token, list) else [token])
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None: ...


def load(job: common.Job) -> tuple[common.Generate, str]:
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": job.threads}
    number = job.settings.get("draft_tokens")
    if number:
        options["draft_model"] = openvino_genai.draft_model(job.draft, "CPU", INFERENCE_NUM_THREADS=job.threads)
    pipeline = openvino_genai.LLMPipeline(job.model, "CPU", **options)
    config = openvino_genai.GenerationConfig()
    config.do_sample, config.ignore_eos, config.apply_chat_template = False, True, False
    if number:
        config.num_assistant_tokens = number

    def generate(prompt: list[int], num_tokens: int, emit: common.Emit) -> int | None:
        config.max_new_tokens = num_tokens
        ids = np.array([prompt], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        answer = pipeline.generate(inputs, config, Watch(emit))
        details = getattr(answer, "extended_perf_metrics", None)
        return num_tokens - details.get_num_accepted_tokens() if number and details is not None else None

    return generate, f"openvino-genai {openvino_genai.__version__}"


if __name__ == "__main__":
    if sys.argv[1] == "--convert":
        openvino_genai.LLMPipeline(sys.argv[2], "CPU", enable_save_ov_model=True)
    else:
        common.run(load)
