"""How many tokens a text may have, and the error for a prompt that leaves no room for an answer."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ContextLengthError


@dataclass(frozen=True)
class ContextLimit:
    """num_tokens: the most of prompt and answer. longest: the model's own limit, which memory may not hold."""

    num_tokens: int
    longest: int

    def room_after(self, num_tokens: int) -> int:
        """Tokens left for an answer to a prompt. Raises ContextLengthError if there are none."""
        if num_tokens >= self.num_tokens:
            raise self.error(str(num_tokens))
        return self.num_tokens - num_tokens

    def error(self, num_tokens: str) -> ContextLengthError:
        """The error for a prompt of so many tokens, in words."""
        limit, more = "the model's context", ""
        if self.num_tokens < self.longest:
            limit, more = "the planned context", f", or set a larger `context`, up to {self.longest}"
        return ContextLengthError(
            f"the prompt has {num_tokens} tokens and {limit} is {self.num_tokens}, which leaves no room for an answer; "
            f"shorten the prompt{more}"
        )
