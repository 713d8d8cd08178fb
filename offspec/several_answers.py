"""Several answers to one prompt, in passes that they share: the prompt is scored once.

The first answer scores it. Then the others begin, with a copy of its KV entries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace

from offspec.scheduler.params import AUTO_TEXTS, SEED_LIMIT, SamplingParams, SpeculationParams

from .engine import Engine, Prompt
from .errors import OffspecError
from .model.text_caches import TextCaches
from .model.text_pool import TextPool
from .running.batch import Batch, Ticket
from .running.steps import Step


def generate_answers(
    engine: Engine,
    prompt: Prompt,
    num_answers: int,
    params: SamplingParams | None = None,
    speculation: SpeculationParams | None = None,
    *,
    max_texts: int = AUTO_TEXTS,
) -> Generator[tuple[int, Step], None, None]:
    """Generate several answers to one prompt: pairs of an answer's index and its next `Step`.

    Answer i is that of `Engine.generate` with seed params.seed + i; without a seed, a random one. The first one alone
    has `prompt_logprobs`. max_texts: the maximum number of answers under way; the others wait in order. Raises the
    errors of `Engine.generate`.
    """
    params = params or SamplingParams()
    asked = engine.check_request(prompt, params, speculation)
    return _Answers(engine, asked.prompt, speculation, max_texts).steps(params_of_each(params, asked.seed, num_answers))


def params_of_each(params: SamplingParams, seed: int, num_answers: int) -> list[SamplingParams]:
    """The parameters of each answer: seeds count up. The first one reports what concerns the prompt."""
    first = replace(params, seed=seed)
    others = range(1, num_answers)
    return [first, *(replace(params, seed=(seed + i) % SEED_LIMIT, prompt_logprobs=False) for i in others)]


class _Answers:
    """The answers under way, and their caches."""

    def __init__(
        self, engine: Engine, prompt: list[int], speculation: SpeculationParams | None, max_texts: int
    ) -> None:
        self._engine, self._prompt, self._speculation = engine, prompt, speculation
        self._max_texts = engine.models.max_texts(max_texts)
        self._pool = TextPool(engine.new_caches, 0)
        self._batch = Batch(engine.models, self._max_texts, self._pool)
        self._under_way = dict[Ticket, tuple[int, TextCaches]]()

    def steps(self, params: Sequence[SamplingParams]) -> Generator[tuple[int, Step], None, None]:
        waiting = deque(enumerate(params))
        with closing(self._batch):
            self._begin(*waiting.popleft())
            while self._under_way:
                outcomes = self._batch.step()
                for ticket, outcome in outcomes:
                    if isinstance(outcome, OffspecError):
                        raise outcome
                    index, caches = self._under_way[ticket]
                    if outcome.finish_reason is not None:
                        del self._under_way[ticket]
                        self._pool.give_back(caches)
                    yield index, outcome
                while waiting and self._has_room():
                    self._begin(*waiting.popleft())

    def _begin(self, index: int, params: SamplingParams) -> None:
        caches = self._pool.borrow(self._prompt)
        ticket = self._batch.add(self._engine.check_request(self._prompt, params, self._speculation), caches)
        self._under_way[ticket] = index, caches

    def _has_room(self) -> bool:
        """Whether another answer may begin. While one waits, the batch has no KV entries left."""
        if self._batch.num_waiting or self._pool.num_used >= self._max_texts:
            return False
        plan = self._engine.plan
        if plan is None or not self._under_way:
            return True
        return self._pool.num_entries + len(self._prompt) <= plan.kv_entries
