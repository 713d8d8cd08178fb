"""The log-probabilities that a request asks for, taken from its passes: of the prompt's tokens and of the answer's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offspec.scheduler.params import SamplingParams
from offspec.scheduler.trees.logprobs import SLICE_ROWS, TokenLogprob, token_logprobs
from offspec.scheduler.trees.token_tree import ROOT
from offspec.scheduler.trees.verify import Verdict

from ..model.row_logits import HEAD_ROWS, RowLogits


class LogprobReport:
    """of_pass: of the last pass's tokens. of_prompt: of the prompt's tokens from the second on, as far as scored."""

    def __init__(self, sampling: SamplingParams, num_prompt_tokens: int) -> None:
        self._num_likeliest, self._wants_prompt = sampling.logprobs, sampling.prompt_logprobs
        self._num_prompt = num_prompt_tokens
        self.of_pass, self.of_prompt = list[TokenLogprob](), list[TokenLogprob]()

    @property
    def lacks_prompt(self) -> bool:
        """Whether rows of the prompt are still to come."""
        return self._wants_prompt and len(self.of_prompt) < self._num_prompt - 1

    def take(
        self, rows: RowLogits, verdict: Verdict | None, text: Sequence[int], num_scored: int, num_chain: int
    ) -> None:
        """Take them from a pass that has scored text[num_scored - num_chain : num_scored]; no verdict: a prompt's part.

        A slice of rows at a time: a row of logits has the size of the vocabulary.
        """
        if self._num_likeliest is None:
            return
        if self.lacks_prompt:  # those of its tokens that follow those of the pass
            prompt, begin = text[: self._num_prompt], num_scored - num_chain
            for first in range(0, rows.num_before, HEAD_ROWS):
                last, position = min(first + HEAD_ROWS, rows.num_before), begin + first + 1
                of_slice = prompt[position : begin + last + 1]
                self.of_prompt += token_logprobs(rows.before(first, last), of_slice, self._num_likeliest, position)
            if num_scored < self._num_prompt:
                self.of_prompt += token_logprobs(rows[0][None], [prompt[num_scored]], self._num_likeliest, num_scored)
        if verdict is None:
            return
        nodes, self.of_pass = [ROOT, *verdict.path], []
        for first in range(0, len(nodes), SLICE_ROWS):
            logits = torch.stack([rows[node + 1] for node in nodes[first : first + SLICE_ROWS]])
            tokens = verdict.tokens[first : first + SLICE_ROWS]
            self.of_pass += token_logprobs(logits, tokens, self._num_likeliest, len(text) + first)
