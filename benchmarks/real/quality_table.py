"""The Markdown tables of `quality`: ways of decoding by what their answers are worth and what they take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from .answers import Answer
from .estimates import mean, ratio_of_rates, ratio_of_sums

PLAIN, EXACT = "plain decoding", "exact, the default"
UNREADABLE = "not readable here"
ABSENT = "\N{EN DASH}"
SOLVED = {"humaneval": "pass@1", "gsm8k": "right numbers"}
Answers = Mapping[str, Answer]  # of one way, by their prompts


def show(answers: Sequence[Answer]) -> str:
    """A table for each pair, dtype, set and length. Brackets: 95 % intervals over prompts."""
    parts = list[str]()
    for (model, draft, dtype, name, count), group in groupby(sorted(answers, key=_table_of), key=_table_of):
        ways: dict[str, dict[str, Answer]] = {}
        for answer in group:
            ways.setdefault(answer.key.way, {})[answer.key.prompt] = answer
        title = f"{name}, at most {count} tokens: {Path(model).name}, draft {Path(draft).name}, {dtype}"
        parts.append(f"{title}\n\n{_table(name, ways)}")
    return "\n\n".join(parts)


def _table_of(answer: Answer) -> tuple[str, str, str, str, int]:
    key = answer.key
    return key.model, key.draft, key.dtype, key.set, key.num_tokens


def _table(name: str, ways: Mapping[str, Answers]) -> str:
    titles = [SOLVED[name] if title == "solved" else title for title in COLUMNS]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for way, answers in ways.items():
        lines.append(f"| {way} | {' | '.join(column(answers, ways) for column in COLUMNS.values())} |")
    return "\n".join(lines)


def solved(answers: Answers, ways: Mapping[str, Answers]) -> str:
    """The share of solved tasks."""
    return str(mean([answer.is_solved for answer in answers.values()]))


def against_exact(answers: Answers, ways: Mapping[str, Answers]) -> str:
    """Tasks that this way solves and exact decoding does not, and the other way round."""
    exact = ways.get(EXACT, {})
    pairs = [(answer.is_solved, exact[prompt].is_solved) for prompt, answer in answers.items() if prompt in exact]
    gained, lost = (pairs.count(pair) for pair in ((True, False), (False, True)))
    return f"+{gained} \N{MINUS SIGN}{lost}" if answers is not exact and pairs else ABSENT


def nats_per_token(answers: Answers, ways: Mapping[str, Answers]) -> str:
    told = answers.values()
    found = ratio_of_sums([answer.log_likelihood for answer in told], [answer.num_tokens for answer in told])
    return f"{found:.3f}"


def rouge_l(answers: Answers, ways: Mapping[str, Answers]) -> str:
    return f"{mean([answer.rouge_l for answer in answers.values()]):.3f}"


def tokens_per_pass(answers: Answers, ways: Mapping[str, Answers]) -> str:
    told = answers.values()
    return str(ratio_of_sums([answer.num_tokens for answer in told], [answer.num_passes for answer in told]))


def tokens_per_s(answers: Answers, ways: Mapping[str, Answers]) -> str:
    told = answers.values()
    return str(ratio_of_sums([answer.num_tokens for answer in told], [answer.seconds for answer in told]))


def times_exact(answers: Answers, ways: Mapping[str, Answers]) -> str:
    """Tokens/s over those of exact decoding in the same minutes."""
    return ABSENT if answers is ways.get(EXACT) else _times(answers, "exact")


def times_plain(answers: Answers, ways: Mapping[str, Answers]) -> str:
    return ABSENT if answers is ways.get(PLAIN) else _times(answers, "plain")


def _times(answers: Answers, reference: str) -> str:
    told = list(answers.values())
    beside = [getattr(answer, reference) for answer in told]
    return str(
        ratio_of_rates(
            [answer.num_tokens for answer in told],
            [answer.seconds for answer in told],
            [rate.tokens for rate in beside],
            [rate.seconds for rate in beside],
        )
    )


def joules_per_token(answers: Answers, ways: Mapping[str, Answers]) -> str:
    told = [(answer.joules, answer.num_tokens) for answer in answers.values() if answer.joules is not None]
    return str(ratio_of_sums(*zip(*told, strict=True))) if told else UNREADABLE


def num_cut(answers: Answers, ways: Mapping[str, Answers]) -> str:
    """Answers that reached the maximum number of tokens; they may lack their end."""
    return str(sum(answer.is_cut for answer in answers.values()))


def num_as_plain(answers: Answers, ways: Mapping[str, Answers]) -> str:
    """Texts that are those of plain decoding."""
    plain = ways.get(PLAIN, {})
    pairs = [(answer.text, plain[prompt].text) for prompt, answer in answers.items() if prompt in plain]
    return f"{sum(text == other for text, other in pairs)} of {len(pairs)}" if pairs else ABSENT


COLUMNS: Mapping[str, Callable[[Answers, Mapping[str, Answers]], str]] = {
    "prompts": lambda answers, ways: str(len(answers)),
    "solved": solved,
    "against exact": against_exact,
    "text as plain": num_as_plain,
    "cut": num_cut,
    "nats/token": nats_per_token,
    "ROUGE-L": rouge_l,
    "tokens per pass": tokens_per_pass,
    "tokens/s": tokens_per_s,
    "over exact": times_exact,
    "over plain": times_plain,
    "J/token": joules_per_token,
}
