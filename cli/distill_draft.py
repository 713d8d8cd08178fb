"""`offspec distill TARGET --draft SMALL`: trains a small model, and measures what it gains."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from offspec.research.distill_params import DraftParams

from .flag_declarations import option, research_option
from .options import Number, WholeNumber
from .training_job import TrainingJob, is_typed, training_line

if TYPE_CHECKING:
    from offspec.research.draft_distillation import DistilledDraft
    from offspec.tools.draft_gain import DraftGain

F = TypeVar("F", bound=Callable[..., Any])
P = DraftParams
DRAFT_FLAGS = ("on_policy", "rounds", "lora_rank")


def draft_options(function: F) -> F:
    """The flags of training a draft model."""
    for decorate in reversed(
        (
            option("--draft", "small", metavar="SMALL", help="Train this model: a path, a hub id, or builtin."),
            option(
                "--lora",
                "lora_rank",
                type=WholeNumber(1),
                metavar="RANK",
                help="Train low-rank additions only, and write one file for --learn-file. [default: all weights]",
            ),
            option(
                "--on-policy",
                type=Number(0, 1),
                default=P.on_policy,
                metavar="SHARE",
                help="Share of the texts that the draft writes and MODEL reads; MODEL writes the others. [default: 0]",
            ),
            research_option(
                "--rounds",
                type=WholeNumber(1),
                default=P.rounds,
                show_default=True,
                metavar="N",
                help="How often the draft writes new texts.",
            ),
        )
    ):
        function = decorate(function)
    return function


def draft_to_train(settings: dict[str, Any]) -> str | None:
    """What `--draft` names, or None. Removes the flags from `settings` that nothing else uses.

    The draft that the user's settings name for other commands is not meant.
    """
    small: str | None = settings.pop("small", None)
    if is_typed("small"):
        return small
    for name in DRAFT_FLAGS:
        settings.pop(name, None)
    return None


def distil_draft(job: TrainingJob, small: str, settings: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Train the draft and measure it; the result as JSON and as a sentence."""
    from offspec.research.draft_distillation import Untrained, distill_draft

    if job.more["out"] is None:
        raise click.UsageError("Give --out, a new folder for the draft (with --lora, a file).")
    params = DraftParams(**settings)
    teacher = job.teacher()
    with training_line(quiet=job.quiet) as line:
        draft = Untrained.of_model(small, teacher.tokenizer, teacher.target.device)
        done = distill_draft(teacher, draft, params, progress=line, **job.more)
    teacher.target.weights.close()
    before = job.gain(done.path, done.prompts, params, small)
    if params.lora_rank:
        after = job.gain(done.path, done.prompts, params, small, done.path)
    else:
        after = job.gain(done.path, done.prompts, params, str(done.path))
    return _said(done, before, after)


def _said(done: DistilledDraft, before: DraftGain, after: DraftGain) -> tuple[dict[str, Any], str]:
    was, now = before.tokens_per_pass, after.tokens_per_pass
    summary: dict[str, Any] = {"path": str(done.path), "num_tokens": done.num_tokens, "num_steps": done.num_steps}
    summary |= {"agreement_before": done.agreement_before, "agreement": done.agreement}
    summary |= {"divergence_before": done.divergence_before, "divergence": done.divergence}
    summary |= {"tokens_per_pass_before": was, "tokens_per_pass": now}
    agrees = f"its likeliest token is the target's at {done.agreement:.0%} of positions ({done.agreement_before:.0%})"
    return (
        summary,
        f"{done.path}: {now:.2f} tokens per pass of 64 nodes on held-out texts (before: {was:.2f}); {agrees}",
    )
