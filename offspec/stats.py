"""What one request counted. Knows nothing of how the work is done."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil


@dataclass
class Stats:
    """Counters of one request. The engine writes them; `as_dict` adds what follows from them, None if unmeasured.

    num_prefilled_tokens of the prompt's were scored; the others were in caches kept from an earlier request.
    The first pass takes the whole prompt *and* a tree, so it is the prefill and already yields tokens: prefill_s is
    that iteration, drafting included, and ttft_s the time from the request to its tokens. decode_s is everything after
    it. tokens_per_pass counts every pass, the first one too; 1 is plain decoding. draft_s and target_s are sums over
    passes.
    is_lossy: the text was accepted jointly, and may be another than plain decoding's.
    learn_*: what the draft learnt when the request had ended (`Engine.learn`); learnt_loss is KL(target ‖ draft) a
    token in nats, as it drafted, and unlearnt_loss that of the draft as it came.
    stream_*: bytes of weights moved to the device for passes; None where nothing is streamed and no link is involved.
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
    seed: int = 0
    is_lossy: bool = False
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
        """Tokens after the first pass ÷ decode_s; 0 where the first pass said everything and nothing was measured."""
        return (self.num_tokens - self.num_first_pass_tokens) / self.decode_s if self.decode_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "tokens_per_pass": self.tokens_per_pass,
            "decode_tokens_per_s": self.decode_tokens_per_s or None,
        }


def peak_host_bytes() -> int:
    """The most physical memory this process has held, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    if sys.platform == "linux":  # getrusage(2) there counts what the parent held before execve(2) as well
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
