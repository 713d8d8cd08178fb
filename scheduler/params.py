"""User settings of sampling and speculation; the CLI reads its defaults from here.

This module imports neither torch nor numpy, so that `--help` is fast.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, get_args

from offspec.errors import UsageError

SEED_LIMIT = 1 << 64
MAX_STOPS, MAX_STOP_LENGTH = 64, 1024  # stop texts, and characters of each: every token's text is searched for all
_STOP_LENGTH = f"texts of at most {MAX_STOP_LENGTH} characters"
MAX_LOGPROBS = 20  # alternatives per token, as at OpenAI and in vLLM
MAX_NODES = 1024  # per tree, if the budget is found at run time
DEFAULT_NODES = 64  # per tree of what needs a budget, baselines and deterministic requests, if none is given
AUTO_TEXTS = 8  # that share passes; more of them bring little, because the later nodes of eight trees bring little
MAX_ROWS = 3072  # expanded candidates pending in the draft's KV cache at a time
DRAFT_ROWS = 384  # of each text of several that share passes, because each has a draft cache
MOST_STATE_NODES = 256  # per tree of a model with recurrent layers, whose nodes take much memory
MAX_JOINT_NODES = 256  # per jointly accepted tree, because all its logits are in memory at a time
# Fields of `SamplingParams` that a model's authors may recommend.
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
ACCEPTS = ("exact", "joint", "cascade", "contrastive", "mix", "relaxed", "bild")
Scoring = Literal["coupled", "specexec"]
TREES = ("best-first", "sequoia", "opt-tree")
Stopping = Literal["default", "thompson", "thompson-calibrated"]
T = TypeVar("T")
ConstraintKind = Literal["json_schema", "json_object", "grammar", "regex", "tool_calls"]
NUMBERS: dict[str, tuple[type, str]] = {"int": (Integral, "a whole number"), "float": (Real, "a number")}


def check_names(where: str, given: Iterable[str], names: Sequence[str]) -> None:
    """Raises UsageError for a name that is not known, with the nearest one. where: what has no such setting."""
    if unknown := [name for name in given if name not in names]:
        near = get_close_matches(unknown[0], names, n=1)
        meant = f"did you mean {near[0]}?" if near else f"choose from {', '.join(names)}"
        raise UsageError(f"{where} has no setting {unknown[0]!r}; {meant}")


def known_settings_only(params: type[T]) -> type[T]:
    """A dataclass that raises UsageError, not TypeError, for an unknown setting."""
    names, init = [field.name for field in fields(params)], params.__init__  # type: ignore[arg-type]

    @wraps(init)
    def checked(self: T, *args: Any, **settings: Any) -> None:
        check_names(params.__name__, settings, names)
        init(self, *args, **settings)

    params.__init__ = checked  # type: ignore[method-assign,assignment]
    return params


def _check_numbers(params: Any) -> None:
    """Raises UsageError for a field that should be a number but is not; numpy's numbers are accepted."""
    for field in fields(params):
        kind, _, none = str(field.type).partition(" | ")
        value, (wanted, description) = getattr(params, field.name), NUMBERS.get(kind, (object, "anything"))
        if value is None and not none:
            raise UsageError(f"{field.name} has no value; give {description}")
        if value is not None and not isinstance(value, wanted):
            raise UsageError(f"{field.name} must be {description}{' or None' if none else ''}, not {value!r}")


@dataclass(frozen=True)
class Trigger:
    """Where in an answer a constraint begins to hold; before, every token may follow.

    That is at the first of `texts`, or at the special token `token`. The grammar describes the text from there on: it
    has to begin with the trigger, and with a lazy lexeme of any text before it, because a token may hold both.
    is_at_start: only at the answer's beginning; white space in and before the texts is then ignored. repeats: when the
    grammar's text is complete, everything may follow again, and the trigger is looked for again; otherwise the answer
    ends there. yields: at a dead end, and where the library reaches a limit, the constraint ends instead of the answer.
    """

    texts: tuple[str, ...] = ()
    token: int | None = None
    is_at_start: bool = False
    repeats: bool = False
    yields: bool = False


@dataclass(frozen=True)
class Constraint:
    """What an answer must be: JSON by a schema, any JSON object, a text of a grammar, or a match of a regex.

    `Constraint.json_schema({...})` and so on make one. The engine compiles it with the model's tokenizer.
    trigger: where in the answer it begins to hold, if not at its start. tool_calls: a grammar (Lark) of offspec's own.
    thinks: the model may think before (`<think>…</think>`), if its chat template knows that and the prompt does not
    turn it off; the constraint is then one on what follows.
    """

    kind: ConstraintKind
    text: str = ""
    trigger: Trigger | None = None
    thinks: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(ConstraintKind):
            raise UsageError(f"a constraint must be one of {', '.join(get_args(ConstraintKind))}, not {self.kind!r}")
        if not isinstance(self.text, str):
            raise UsageError(f"a constraint of kind {self.kind} needs a text, not {reprlib.repr(self.text)}")

    @classmethod
    def json_schema(cls, schema: str | bool | Mapping[str, Any]) -> Constraint:
        """schema: JSON Schema as text or object. Raises UsageError for an object that JSON cannot express."""
        try:
            return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as exc:
            raise UsageError(f"the JSON schema is not JSON ({exc})") from exc

    @classmethod
    def json_object(cls) -> Constraint:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def grammar(cls, text: str) -> Constraint:
        """text: llama.cpp's GBNF, or Lark as llguidance reads it."""
        return cls("grammar", text)

    @classmethod
    def regex(cls, text: str) -> Constraint:
        """text: a regular expression that the whole answer must match, in the syntax of Rust's regex crate."""
        return cls("regex", text)


@known_settings_only
@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping; the defaults are greedy.

    temperature 0 is greedy and ignores top_k, top_p and min_p. top_k 0, top_p 1 and min_p 0 disable the filters. The
    repetition penalty (CTRL, 1909.05858, as in transformers) applies to every token of the prompt and of the text so
    far. The frequency and the presence penalty (OpenAI) apply to the answer's tokens: the first is subtracted from a
    token's logit for each time it occurs, the second once. logit_bias: (token id, number to add to its logit) pairs.
    seed None selects a random one, which the statistics report. constraint: what the answer must be, or None.
    logprobs: report the log-probability of each token, and of so many of the likeliest (`trees.logprobs`); None is
    off. prompt_logprobs: also of the prompt's tokens from the second on, all of which are then scored anew.
    Raises UsageError for a value out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    constraint: Constraint | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        _check_numbers(self)
        are_texts = isinstance(self.stop, (tuple, list)) and all(isinstance(text, str) for text in self.stop)
        checks = [
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 (off) and below 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0; 1 is off"),
            ("seed", self.seed is None or 0 <= self.seed < SEED_LIMIT, "between 0 and 2**64 - 1"),
            ("stop", are_texts and all(self.stop), "a tuple of texts that are not empty"),
            ("stop", are_texts and len(self.stop) <= MAX_STOPS, f"at most {MAX_STOPS} texts"),
            ("stop", are_texts and max(map(len, self.stop), default=0) <= MAX_STOP_LENGTH, _STOP_LENGTH),
            ("frequency_penalty", abs(self.frequency_penalty) <= 2, "between -2 and 2; 0 is off"),
            ("presence_penalty", abs(self.presence_penalty) <= 2, "between -2 and 2; 0 is off"),
            ("logit_bias", _is_bias(self.logit_bias), "a tuple of pairs: a token's id, a number from -100 to 100"),
            ("logprobs", 0 <= (self.logprobs or 0) <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}, or None"),
            ("constraint", self.constraint is None or isinstance(self.constraint, Constraint), "a Constraint"),
        ]
        for name, good, wanted in checks:
            if not good:
                raise UsageError(f"{name} must be {wanted}, not {reprlib.repr(getattr(self, name))}")
        if self.ignore_eos and self.constraint is not None:
            raise UsageError("ignore_eos contradicts a constraint, which says where the text ends; omit one of them")
        if self.prompt_logprobs and self.logprobs is None:
            raise UsageError("prompt_logprobs needs logprobs: the number of alternatives to report")


def with_recommended(params: SamplingParams, recommended: SamplingParams, given: Collection[str]) -> SamplingParams:
    """`params` with what a model recommends in those of the fields RECOMMENDED that are not `given`.

    A given temperature of 0 keeps all of them, so that the text is greedy decoding's.
    """
    if "temperature" in given and params.temperature == 0:
        return params
    return replace(params, **{name: getattr(recommended, name) for name in RECOMMENDED if name not in given})


def _is_bias(pairs: Any) -> bool:
    """Whether this is a valid `SamplingParams.logit_bias`, but for the size of the vocabulary."""
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        return False
    are_numbers = all(isinstance(token, Integral) and isinstance(value, Real) for token, value in pairs)
    return are_numbers and all(token >= 0 and abs(value) <= 100 for token, value in pairs)


@known_settings_only
@dataclass(frozen=True)
class SpeculationParams:
    """Drafting and acceptance. Only `accept` changes the text, if it is not exact.

    budget: nodes per tree; 0 is plain decoding; None finds the budget at run time (`pace.controllers`). scoring:
    coupled (shared noise, fitted sharpness) or specexec (the draft's cumulative probability, without the request's
    temperature, top-k, top-p and min-p, as in its authors' code). tree: best-first, or another of TREES, for
    comparison. width: nodes expanded by one draft forward; None finds it at run time, or is an eighth of a given
    budget, from 16 to 64. children: candidates kept per expanded node. max_depth: longest path. stopping: default
    stops when another round is not worth its cost; thompson and thompson-calibrated sample (EESD's TS and
    Calibration-TS). lookup: merge in n-gram lookup in the text.
    recycling: merge in the target's earlier top-k predictions after the same token; always on without a draft model.
    recall: correct the draft by the target's predictions at similar places. reuse: keep the subtree below the accepted
    token. overlap: draft during the target's pass. forced: add the tokens that a constraint forces to the tree.

    accept: exact, or joint (`scheduler.joint`), which is lossy: it accepts the longest path whose joint probability
    under the target is at least `tau`, in (0, 1], times that under the draft. Joint acceptance drafts by beam search,
    `beam` wide and `gamma` tokens deep, and the drafting settings above must have their defaults. The other lossy ways
    draft the same beam, and choose each token from target and draft together (others of ACCEPTS), but for bild: the
    draft speaks alone while its likeliest token has `tau` or more, for `beam * gamma` tokens at most. There, tau is the
    rule's threshold, or the draft's weight. None: the rule's default (joint: 0.1). Exact acceptance ignores tau, beam
    and gamma.

    Raises UsageError for a value out of range, and for incompatible settings.
    """

    budget: int | None = None
    scoring: Scoring = "coupled"
    tree: str = "best-first"
    width: int | None = None
    children: int = 16
    max_depth: int = 64
    stopping: Stopping = "default"
    lookup: bool = True
    recycling: bool = False
    recall: bool = True
    reuse: bool = True
    overlap: bool = True
    forced: bool = True
    accept: str = "exact"
    tau: float | None = None
    beam: int = 8
    gamma: int = 16

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.scoring not in ("coupled", "specexec"):
            raise UsageError(f"scoring must be coupled or specexec, not {self.scoring!r}")
        for name, choices in (("tree", TREES), ("stopping", get_args(Stopping)), ("accept", ACCEPTS)):
            if (value := getattr(self, name)) not in choices:
                raise UsageError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
        for name, least in (("budget", 0), ("width", 1), ("children", 1), ("max_depth", 1), ("beam", 1), ("gamma", 1)):
            if (value := getattr(self, name)) is not None and value < least:
                raise UsageError(f"{name} must be at least {least}, not {value}")
        if self.tau is not None and not 0 < self.tau <= 1:
            raise UsageError(f"tau must be above 0 and at most 1, not {self.tau!r}")
        if not self.is_lossy:
            return
        for name in ("budget", "scoring", "tree", "width", "stopping"):
            if (value := getattr(self, name)) != getattr(SpeculationParams, name):
                raise UsageError(
                    f"{name} {value} applies to exact acceptance only, and {self.accept} acceptance drafts by beam "
                    f"and gamma; omit {name}, or use accept exact"
                )
        if self.beam * self.gamma > MAX_JOINT_NODES:
            raise UsageError(
                f"beam x gamma, the size of the tree, must be at most {MAX_JOINT_NODES}, not {self.beam * self.gamma}"
            )

    @property
    def is_lossy(self) -> bool:
        """Whether the text may differ from plain decoding."""
        return self.accept != "exact"

    def without_timing(self) -> SpeculationParams:
        """These settings without what depends on measured times: a budget found at run time, and overlap."""
        budget = DEFAULT_NODES if self.budget is None and not self.is_lossy else self.budget
        return replace(self, budget=budget, overlap=False)

    @property
    def is_greedy(self) -> bool:
        """Whether the temperature must be 0."""
        return self.accept == "joint"

    def check_sampling(self, sampling: SamplingParams) -> None:
        """Raises UsageError for joint acceptance with a temperature above 0."""
        if self.is_greedy and sampling.temperature > 0:
            raise UsageError(
                "joint acceptance searches for the likeliest text, so temperature must be 0, "
                f"not {sampling.temperature:g}; to sample, use accept exact"
            )


def tree_room(speculation: SpeculationParams, useful_rows: int) -> int:
    """The maximum number of nodes of a tree that is sent to the target. useful_rows: of its device (`DeviceKind`)."""
    if speculation.is_lossy:
        return speculation.beam * speculation.gamma
    return useful_rows if speculation.budget is None else speculation.budget
