"""`offspec distill --head`: trains a head for a model, and measures it."""

from __future__ import annotations

from typing import Any

from offspec.training.distill_params import DistillParams

from .training_job import Job, training_line

MOST_MEASURED = 64  # tokens generated after each held-out prompt


def distil_head(job: Job, kind: str, params: DistillParams) -> tuple[dict[str, Any], str]:
    """Train a head and measure it; the result as JSON and as a sentence. Raises a subclass of OffspecError."""
    from offspec.tools.draft_gain import tokens_per_pass
    from offspec.training.heads import distill_head

    teacher = job.teacher()
    with training_line(quiet=job.quiet) as line:
        done = distill_head(teacher, kind, params, progress=line, **job.more)
    teacher.target.weights.close()
    engine = job.engine(draft=str(done.path))
    with training_line(quiet=job.quiet, advice=f"the training is complete, and its result is {done.path}.") as line:
        count = min(MOST_MEASURED, params.text_tokens // 2)
        found = tokens_per_pass(engine, done.prompts, count, params.temperature, line)
    engine.close()
    said: dict[str, Any] = {"path": str(done.path), "kind": kind, "num_tokens": done.num_tokens}
    said |= {"num_steps": done.num_steps, "agreement_before": done.agreement_before, "agreement": done.agreement}
    said |= {"tokens_per_pass": found}
    shares = ", ".join(f"{share:.0%}" for share in done.agreement)
    agrees = f"its likeliest token is the target's at {shares} of positions, 1 to {len(done.agreement)} tokens ahead"
    return said, f"{done.path}: {found:.2f} tokens per pass of 64 nodes on held-out texts; {agrees}"
