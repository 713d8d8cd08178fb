"""offspec's worker, through `Engine`. Settings: `budget`, the nodes per tree; by default found at run time."""

from __future__ import annotations

import common

from offspec import Engine, SamplingParams, SpeculationParams, __version__


def load(job: common.Job) -> tuple[common.Generate, str]:
    engine = Engine.load(
        job.model, draft=job.draft, dtype="bf16", device="cpu", threads=job.threads, ram=job.ram, context=common.CONTEXT
    )
    speculation = SpeculationParams(**job.settings)

    def generate(prompt: list[int], num_tokens: int, emit: common.Emit) -> None:
        for step in engine.generate(prompt, SamplingParams(num_tokens, ignore_eos=True), speculation):
            emit(step.token_ids)

    return generate, __version__


if __name__ == "__main__":
    common.run(load)
