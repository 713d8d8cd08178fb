"""The jobs of a run: shapes of targets and drafts, their memory, and the amount of work."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.grow import SHAPES, Shape
from offspec.checkpoints.model_files import ModelFiles

CONTEXT = 1024


@dataclass(frozen=True)
class Job:
    """Shapes of a target and its draft, and the amount of work.

    widths: tokens of a timed pass, including the last token of the text. vocabulary: tokens of the real pair; the
    additional memory of its matrices is left free.
    """

    target: Shape
    draft: Shape
    widths: tuple[int, ...] = (1, 64, 256, 512, 1024)
    repeats: int = 5
    num_prompts: int = 4
    num_tokens: int = 64
    num_plain_tokens: int = 8
    num_same_tokens: int = 256
    num_same_prompts: int = 8
    vocabulary: int = 0

    def vocabulary_bytes(self, target: ModelFiles, draft: ModelFiles) -> int:
        """Bytes of the target's head, and of the draft's, which is also its embedding."""
        widths = target.config.hidden_size + draft.config.hidden_size
        return 2 * widths * max(0, self.vocabulary - target.config.vocab_size)


JOBS = {
    "70b": Job(SHAPES["70b"], SHAPES["1b"], vocabulary=128_256),  # Llama 3's
    "7b": Job(SHAPES["7b"], SHAPES["1b"]),  # whose shape has a layer for a larger vocabulary
    "tiny": Job(
        Shape(512, 800, 10, 16, 4, 128, format="nf4"),
        Shape(128, 352, 3, 4, 2, 32),
        widths=(1, 16),
        repeats=2,
        num_prompts=1,
        num_tokens=12,
        num_plain_tokens=6,
        num_same_tokens=8,
        num_same_prompts=2,
    ),
}
