"""`offspec distill --head`: trains a head for a model, and measures it."""

from __future__ import annotations

from typing import Any

from offspec.training.distill_params import HeadParams

from .training_job import Job, training_line


def distil_head(job: Job, kind: str, params: HeadParams) -> tuple[dict[str, Any], str]:
    """Train a head and measure it; the result as JSON and as a sentence. Raises a subclass of OffspecError."""
    from offspec.training.heads import distill_head

    teacher = job.teacher()
    with training_line(quiet=job.quiet) as line:
        done = distill_head(teacher, kind, params, progress=line, **job.more)
    teacher.target.weights.close()
    gain = job.gain(done.path, done.prompts, params, str(done.path))
    said: dict[str, Any] = {"path": str(done.path), "kind": kind, "num_tokens": done.num_tokens}
    said |= {"num_steps": done.num_steps, "agreement_before": done.agreement_before, "agreement": done.agreement}
    said |= {"tokens_per_pass": gain.tokens_per_pass, "found_by_depth": gain.by_depth}
    agrees, found = (", ".join(f"{share:.0%}" for share in shares) for shares in (done.agreement, gain.by_depth))
    sentence = (
        f"{done.path}: {gain.tokens_per_pass:.2f} tokens per pass of 64 nodes on held-out texts; its likeliest token "
        f"is the target's at {agrees} of positions, 1 to {len(done.agreement)} tokens ahead"
    )
    return said, sentence + (f"; trees held the next token in {found} of the cases, by depth" if found else "")
