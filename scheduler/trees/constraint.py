"""Constraints: which tokens may follow a text, at every node of a tree by the node's own path.

The mask is part of the processed distribution (`Sampler.process`), the target's as well as the draft's. So the walk and
the noise stay as they are, and the text equals plain decoding under the same constraint. This module knows no grammar
and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from offspec.errors import ConstraintError

from .token_tree import IntArray

MaskBits = npt.NDArray[np.uint8]


class TokenConstraint(Protocol):
    """Which tokens may follow one text, which grows. path: the tokens between the text and the place in question.

    The answer is a function of the text's and the path's tokens. Calls come from one thread at a time.
    """

    def mask(self, path: Sequence[int]) -> MaskBits | None:
        """The tokens that may follow: bit i % 8 of byte i // 8 stands for token i; uint8 [ceil(V / 8)].

        No bit: a dead end. None: every token may follow, or the path itself is forbidden, so that nothing depends on
        the answer.
        """

    def barred(self, path: Sequence[int]) -> Sequence[int]:
        """Tokens that may not follow although `mask` is None: ends of the text that would come too early.

        They are excluded where the target chooses; masking a draft's rows for them would cost more than it saves.
        """

    def is_idle(self, tokens: IntArray) -> bool:
        """Whether every token may follow the text, and also every path that consists of these tokens."""

    def forced(self, path: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens, each the only one that may follow the ones before it."""

    def accept(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text. Tokens after the end of the text are ignored."""

    def dead_end(self, path: Sequence[int]) -> ConstraintError:
        """The error for a path that no token may follow."""


def allows(mask: MaskBits | None, token: int) -> bool:
    return mask is None or bool(mask[token >> 3] >> (token & 7) & 1)
