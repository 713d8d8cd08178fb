"""The counters of one request."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

EXACT = "exact"


def exactness(inexact_reason: str | None) -> str:
    """How near a text comes to plain decoding's, in words."""
    return EXACT if inexact_reason is None else "up to near-ties"


@dataclass
class Stats:
    """Counters of one request. The engine writes them; `as_dict` adds derived rates, None if unmeasured.

    num_prefilled_tokens of the prompt's tokens were scored; the others were in caches from an earlier request.
    The first pass takes the whole prompt *and* a tree, so it is the prefill and already yields tokens. prefill_s is the
    time of this iteration, including drafting; ttft_s is the time from the request to its tokens. decode_s is the time
    of all later iterations. tokens_per_pass includes the first pass; plain decoding has 1. draft_s and target_s are
    sums over passes; first_draft_s and first_target_s are those of the first pass.
    is_lossy: lossy acceptance was on, so the text may differ from plain decoding's. inexact_reason: why the text equals
    it up to near-ties only; None where it is exact (`model.exactness`).
    draft_fault: why the draft was given up within the request; None if it was not. The text is the same.
    draft_off_since: the pass since which the draft is switched off, but for trials, as it does not pay; None if it is
    not, or was for few passes only. Then draft_round_s is what a round of it takes, None if unknown, and plain_pass_s
    what a pass without it takes, for one token.
    plain_without_draft_tokens_per_s: of plain decoding if the draft's memory held layers of the streamed target; what a
    plain pass takes, times the ratio of both plans' predictions. None if nothing is streamed, or nothing drafts.
    learn_*: the training after the request (`Engine.learn`). learnt_loss is KL(target ‖ draft) per token in nats, for
    the draft as it was during the request; unlearnt_loss is that of the original draft.
    stream_*: bytes of weights streamed to the device; None if nothing is streamed.
    """

    num_prompt_tokens: int = 0
    num_prefilled_tokens: int = 0
    num_tokens: int = 0
    num_passes: int = 0
    num_drafted_tokens: int = 0
    num_first_pass_tokens: int = 0
    ttft_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    draft_s: float = 0.0
    target_s: float = 0.0
    first_draft_s: float = 0.0
    first_target_s: float = 0.0
    seed: int = 0
    is_lossy: bool = False
    inexact_reason: str | None = None
    draft_fault: str | None = None
    draft_off_since: int | None = None
    draft_round_s: float | None = None
    plain_pass_s: float | None = None
    plain_without_draft_tokens_per_s: float | None = None
    learn_s: float = 0.0
    learn_steps: int = 0
    learnt_loss: float | None = None
    unlearnt_loss: float | None = None
    stream_bytes_per_pass: int = 0
    stream_gb_per_s: float | None = None
    link_gb_per_s: float | None = None
    peak_host_bytes: int = 0
    peak_device_bytes: int = 0

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / self.num_passes if self.num_passes else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first pass ÷ decode_s; 0 if there was only one pass."""
        return (self.num_tokens - self.num_first_pass_tokens) / self.decode_s if self.decode_s else 0.0

    @property
    def exactness(self) -> str:
        """What the text promises: "exact", "up to near-ties", or "lossy"."""
        return "lossy" if self.is_lossy else exactness(self.inexact_reason)

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "exact": self.exactness == EXACT,
            "tokens_per_pass": self.tokens_per_pass,
            "decode_tokens_per_s": self.decode_tokens_per_s or None,
        }


def peak_host_bytes() -> int:
    """This process's peak physical memory, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    if sys.platform == "linux":  # there, getrusage(2) includes the parent's memory before execve(2)
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
