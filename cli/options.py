"""Options that several commands share; their defaults come from the records. `load_engine` loads a model by them."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from offspec import (
    ACCEPTS,
    ARITHMETIC_NAMES,
    KV_CACHES,
    MODEL_NAMES,
    RECOMMENDED,
    SEED_LIMIT,
    TREES,
    LoadOptions,
    SamplingParams,
    SpeculationParams,
    parse_size,
)
from offspec.errors import UsageError

from . import flag_declarations as heading
from .flag_declarations import Decorator, FlagRecord, all_of, option, with_flags
from .learning import keep_learning, learning_alone
from .terminal import LoadingBar, is_watched

if TYPE_CHECKING:
    from offspec import Engine

T = TypeVar("T")
A_MODEL = f"a folder, a GGUF file, a Hugging Face hub id, or a name: {', '.join(MODEL_NAMES)}"
MODEL_HELP = f"MODEL is {A_MODEL}."
MAX_TEXTS = 64  # that share passes
MOST_DIGITS = 9  # of a number of tokens
MAX_BUDGET = 8192  # for N nodes the mask takes N² bytes, the logits 4 · N · vocabulary bytes


class ModelName(click.types.StringParamType):
    """A model. An empty one is refused. The shell completes folders and the given names."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "":
            self.fail(f"it is empty; give {A_MODEL}. If $(...) stands there, its command has failed.", param, ctx)
        return super().convert(value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        names = [CompletionItem(name) for name in self._names if incomplete and name.startswith(incomplete)]
        return [CompletionItem(incomplete, type="dir"), *names]  # bash drops entries before a folder


MODEL = ModelName(*MODEL_NAMES)


class Number(click.FloatRange):
    """A number within a range; error messages call it a number."""

    name = "number"


class WholeNumber(click.IntRange):
    """An integer within a range."""

    name = "whole number"


def auto_or(most: int, described: str, least: int = 0) -> Callable[[click.Context, click.Parameter, str], int | None]:
    """A click callback: `auto`, which is None, or a whole number. described: the number, for errors."""

    def parse(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
        if value == "auto":
            return None
        if not value.isdecimal() or len(value) > MOST_DIGITS or not least <= int(value) <= most:
            raise click.BadParameter(f"{reprlib.repr(value)} is neither auto nor {described}.")
        return int(value)

    return parse


budget = auto_or(MAX_BUDGET, f"a number from 0 (plain decoding) to {MAX_BUDGET}")
number_of_texts = auto_or(MAX_TEXTS, f"a number from 1 to {MAX_TEXTS}", 1)


def several_budgets(ctx: click.Context, param: click.Parameter, value: str) -> list[int | None]:
    """A click callback: "16,64,auto" as budgets without duplicates."""
    budgets = [budget(ctx, param, part.strip()) for part in value.split(",")]
    if 0 in budgets:
        raise click.BadParameter("0 is plain decoding, which always runs; leave it out.")
    return list(dict.fromkeys(budgets))


def _stops(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """A click callback: refuses an empty stop text, which would match everywhere."""
    if not all(value):
        raise click.BadParameter("the text is empty; give a text, or omit the flag.")
    return value


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A click callback: "20GiB" as bytes."""
    try:
        return None if value is None else parse_size(value)
    except UsageError as exc:
        raise click.BadParameter(f"{exc}.") from exc


def several(kind: click.ParamType[T]) -> Callable[[click.Context, click.Parameter, str | None], list[T] | None]:
    """A click callback that reads "a,b,c", without duplicates; None stays."""

    def parse(ctx: click.Context, param: click.Parameter, value: str | None) -> list[T] | None:
        parts = [] if value is None else value.split(",")
        return list(dict.fromkeys(kind(part.strip(), param, ctx) for part in parts)) or None

    return parse


def reworded(command: click.Command, **helps: str) -> None:
    """Replace the help texts of a command's shared options, by their names."""
    parameters = {parameter.name: parameter for parameter in command.params}
    for name, text in helps.items():
        parameter = parameters[name]
        assert isinstance(parameter, click.Option)
        parameter.help = text


# ------------------------------------------------------------------------------------------------ shared flags

DETERMINISTIC = "deterministic"  # also behind one of ARITHMETIC_NAMES and a comma


def _load_options(arithmetic: str = LoadOptions.arithmetic, **values: Any) -> LoadOptions:
    """The flags' values as a record. arithmetic: its name, `deterministic`, or both."""
    name, _, more = arithmetic.partition(",")
    is_deterministic = DETERMINISTIC in (name, more)
    name = LoadOptions.arithmetic if name == DETERMINISTIC else name
    return LoadOptions.of(arithmetic=name, deterministic=is_deterministic, **values)


LOADING = FlagRecord("loading", LoadOptions, _load_options, group=heading.MODEL)
SAMPLING = FlagRecord("sampling", SamplingParams, SamplingParams, group=heading.SAMPLING)
SPECULATION = FlagRecord("speculation", SpeculationParams, SpeculationParams, group=heading.DRAFT, is_research=True)

model_argument = LOADING.argument("model", type=MODEL)

# The device and the dtype; also for `plan` and `distill`.
model_flags = all_of(
    LOADING.option(
        "device",
        metavar="auto|cpu|cuda[:N]",
        help="Device that computes. [default: auto, the first CUDA device or the CPU]",
    ),
    LOADING.option(
        "dtype",
        is_rare=True,
        type=click.Choice(["auto", "bf16", "fp16", "fp32"]),
        help="Compute dtype. auto: the checkpoint's own; fp32 for small models on a CPU.",
    ),
)
# Limits of memory and context; also for `plan` and `distill`.
memory_flags = all_of(
    LOADING.option(
        "vram",
        group=heading.MEMORY,
        callback=size,
        metavar="SIZE",
        help="GPU memory limit, e.g. 20GiB. [default: the free GPU memory]",
    ),
    LOADING.option(
        "ram",
        group=heading.MEMORY,
        callback=size,
        metavar="SIZE",
        help="RAM limit, e.g. 48GiB. [default: the free RAM]",
    ),
    LOADING.option(
        "context",
        "-c",
        group=heading.MEMORY,
        type=WholeNumber(1),
        metavar="N",
        help="Maximum number of tokens of prompt and answer. [default: what costs no speed, up to the model's]",
    ),
    LOADING.option(
        "kv_cache",
        group=heading.MEMORY,
        is_rare=True,
        type=click.Choice(["auto", *KV_CACHES]),
        help="Bits of the KV cache; 8 and 4 change the text. auto: 16, or 8 for long contexts.",
    ),
)
DRAFT_NAME = ModelName("auto", "mtp", "shadow", "head", "self", "lookup", "none", *MODEL_NAMES)
draft_option = LOADING.option(
    "draft",
    group=heading.DRAFT,
    type=DRAFT_NAME,
    metavar="PATH|auto|mtp|shadow|head|self|lookup|none",
    help="Draft: path or hub id, mtp, shadow[:BITS] (low-bit target), head, self[:N|:FILE] (early exit), "
    "lookup, none, module:Name (your own). [default: auto: mtp, lookup or a cached shadow]",
)
draft_window_option = LOADING.option(
    "draft_window",
    group=heading.DRAFT,
    is_rare=True,
    callback=auto_or(10**MOST_DIGITS, "a number of tokens"),
    default="auto",
    metavar="auto|N",
    help="A draft model or shadow keeps N tokens of a text. [default: auto, by context and by trial]",
)
# The draft, and where target and draft run.
loading_options = all_of(
    model_flags,
    LOADING.option(
        "arithmetic",
        is_rare=True,
        type=click.Choice(
            [*ARITHMETIC_NAMES, DETERMINISTIC, *(f"{each},{DETERMINISTIC}" for each in ARITHMETIC_NAMES)]
        ),
        metavar=f"{'|'.join(ARITHMETIC_NAMES)}[,{DETERMINISTIC}]",
        help="exact: plain decoding's text, or an error. int8: rows in 8 bits for GGUF. fast: up to near-ties. "
        "deterministic: the same text twice on a GPU, too, as nothing is timed. "
        "[default: auto, which is exact on a CPU and for streamed weights]",
    ),
    LOADING.option(
        "threads",
        is_rare=True,
        type=WholeNumber(1, os.cpu_count()),
        metavar="N",
        help="Number of CPU threads. [default: torch's choice]",
    ),
    draft_option,
    memory_flags,
)
lookup_files_option = LOADING.option(
    "lookup_files",
    group=heading.DRAFT,
    is_rare=True,
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also look up n-grams in this text file; may be repeated.",
)
think_option = LOADING.option(
    "think",
    "--think/--no-think",
    is_rare=True,
    help="Let the model think before its answer, or not, if its chat template can choose. [default: the template's]",
)
special_in_text_option = LOADING.option(
    "special_in_text",
    is_rare=True,
    is_flag=True,
    help="Parse special tokens in messages, such as `<|im_end|>`, as tokens instead of text.",
)
# For commands that compare or tune: rarely changed settings of loading.
tuning_options = all_of(
    draft_window_option,
    LOADING.option(
        "synchronous",
        "--no-read-ahead",
        group=heading.MEMORY,
        is_research=True,
        is_flag=True,
        help="Read each streamed layer only when the pass needs it: slower, same text.",
    ),
)
learn_file_option = LOADING.option(
    "learn_file",
    group=heading.DRAFT,
    is_rare=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with the draft's training; --learn also writes it.",
)
# Training of the draft on the target's predictions.
learning_options = all_of(
    LOADING.option(
        "learn",
        group=heading.DRAFT,
        is_rare=True,
        is_flag=True,
        help="Train the draft between requests; the text stays the same.",
    ),
    learn_file_option,
)
# When drafting stops, and which text is accepted.
acceptance_options = all_of(
    SPECULATION.option(
        "stopping",
        type=click.Choice(["default", "thompson", "thompson-calibrated"]),
        help="Stop drafting when another round is not worth its cost, or by Thompson sampling (EESD).",
    ),
    SPECULATION.option(
        "accept",
        type=click.Choice(ACCEPTS),
        help="exact: plain decoding's text, exactly on a CPU, and on a GPU for streamed targets. "
        "Others are LOSSY; joint: MJSD.",
    ),
    SPECULATION.option(
        "tau",
        type=Number(0, 1, min_open=True),
        metavar="T",
        help="With --accept joint: minimum ratio of target to draft likelihood; with others: the draft's weight, or "
        "a threshold. [default: the method's, joint: 0.1]",
    ),
)
speculation_options = all_of(
    SPECULATION.option(
        "budget",
        is_research=False,
        callback=budget,
        default="auto",
        metavar="auto|N",
        help="Draft tokens per pass; 0 disables speculation. [default: auto, adapts]",
    ),
    acceptance_options,
)
# For `bench`: ways of drafting to compare, and the settings of lossy acceptance.
research_options = all_of(
    SPECULATION.option(
        "scoring",
        "--draft-scoring",
        type=click.Choice(["coupled", "specexec"]),
        help="Rank draft tokens by the target's noise and a fitted sharpness, or as SpecExec by the draft's "
        "probability alone.",
    ),
    SPECULATION.option(
        "tree", type=click.Choice(TREES), help="Shape of the draft tree; sequoia and opt-tree are baselines."
    ),
    acceptance_options,
    SPECULATION.option("beam", type=WholeNumber(1), metavar="N", help="With lossy acceptance: number of hypotheses."),
    SPECULATION.option("gamma", type=WholeNumber(1), metavar="N", help="With lossy acceptance: tokens per hypothesis."),
)
_choice_options = all_of(
    SAMPLING.option(
        "temperature", "--temperature", "--temp", type=Number(0), metavar="T", help="Sampling temperature; 0 is greedy."
    ),
    SAMPLING.option(
        "top_p",
        type=Number(0, 1, min_open=True),
        metavar="P",
        help="Sample from the most likely tokens whose probabilities sum to P; 1 disables.",
    ),
    SAMPLING.option(
        "top_k", type=WholeNumber(0), metavar="K", help="Sample from the K most likely tokens; 0 disables."
    ),
    SAMPLING.option(
        "min_p",
        is_rare=True,
        type=Number(0, 1, max_open=True),
        metavar="P",
        help="Drop tokens less than P times as likely as the likeliest; 0 disables.",
    ),
    SAMPLING.option(
        "seed",
        type=WholeNumber(0, SEED_LIMIT - 1),
        metavar="S",
        help="Random seed; the draft does not change the text. [default: random]",
    ),
)
ignore_eos_option = SAMPLING.option(
    "ignore_eos", is_rare=True, is_flag=True, help="Continue after the end-of-text token."
)
# For commands that write texts for users.
text_options = all_of(
    SAMPLING.option(
        "repetition_penalty",
        is_rare=True,
        type=Number(0, min_open=True),
        metavar="R",
        help="Values above 1 make earlier tokens less likely; 1 disables.",
    ),
    SAMPLING.option(
        "stop", multiple=True, callback=_stops, metavar="TEXT", help="Stop before this text; may be repeated."
    ),
)
# For conversations and the server.
more_text_options = all_of(
    text_options,
    SAMPLING.option(
        "frequency_penalty",
        is_rare=True,
        type=Number(-2, 2),
        metavar="F",
        help="Make tokens less likely for each time that the answer has them, -2 to 2; 0 disables.",
    ),
    SAMPLING.option(
        "presence_penalty",
        is_rare=True,
        type=Number(-2, 2),
        metavar="F",
        help="Make tokens that the answer has less likely, -2 to 2; 0 disables.",
    ),
    ignore_eos_option,
)


def sampling_options(max_new_tokens: int = SamplingParams.max_new_tokens) -> Decorator:
    """How tokens are chosen, and how many."""
    limit = SAMPLING.option(
        "max_new_tokens",
        "-n",
        type=WholeNumber(1),
        default=max_new_tokens,
        metavar="N",
        help="Generate at most N tokens.",
    )
    return all_of(limit, _choice_options)


def samples_as_recommended(command: click.Command) -> None:
    """Help and `config` say that the defaults are what the model recommends."""
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.name in RECOMMENDED:
            parameter.show_default = "the model's"


def is_typed(name: str) -> bool:
    """Whether the flag with this click name is in the command line, not only in the user's settings."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def given_sampling(speculation: SpeculationParams) -> list[str]:
    """The fields that the model's recommended sampling does not replace: flags and settings give them.

    All of them if the text must be greedy.
    """
    context = click.get_current_context()
    sources = {name: context.get_parameter_source(name) for name in RECOMMENDED}
    return [name for name in RECOMMENDED if speculation.is_greedy or sources[name] is not ParameterSource.DEFAULT]


def output_options(
    json: str = "",
    stats: str = "",
    quiet: str = "Print no notes to stderr.",
    verbose: str = "Explain automatic choices; show tracebacks.",
) -> Decorator:
    """Those of --stats, --json, --quiet and --verbose whose help texts are not empty."""
    names = {("--stats", "show_stats"): stats, ("--json", "as_json"): json}
    names |= {("-q", "--quiet"): quiet, ("-v", "--verbose"): verbose}
    return all_of(
        *(option(*each, is_flag=True, group=heading.OUTPUT, help=text) for each, text in names.items() if text)
    )


def load_engine(options: LoadOptions, *, quiet: bool, verbose: bool) -> Engine:
    """`Engine.load`. Prints advice to stderr, and with -v every automatic choice.

    However the command ends, the draft's training is saved, and the engine is closed.
    """
    context, file = click.get_current_context(), options.learn_file if options.learn else None
    if file is not None:
        context.with_resource(learning_alone(file))
    from offspec import Engine

    if quiet or not is_watched():
        engine = Engine.load(options)
    else:
        with LoadingBar(options.model) as bar:
            engine = Engine.load(replace(options, progress=bar))
    # The read-ahead threads must end before the interpreter does, whatever ends the command.
    context.call_on_close(engine.close)
    if file is not None:
        context.call_on_close(partial(keep_learning, engine, file, quiet=quiet))
    shown = set[str]()

    def show() -> None:
        for text in dict.fromkeys(note.text for note in engine.notes if verbose or (note.advice and not quiet)):
            if text not in shown:
                click.echo(f"offspec: {with_flags(text)}", err=True)
        shown.update(note.text for note in engine.notes)

    show()
    context.call_on_close(show)  # those of requests
    return engine


def fit_to_requests(loading: LoadOptions, sampling: SamplingParams, speculation: SpeculationParams) -> LoadOptions:
    """What to load for such requests. Raises UsageError for settings that contradict each other."""
    speculation.check_sampling(sampling)
    return replace(loading, tree=speculation.budget, needs_draft_model=speculation.is_lossy)


def lossy_settings(speculation: SpeculationParams) -> dict[str, object]:
    """The speculation settings that change the text; empty for exact acceptance."""
    names = ("accept", "tau", "beam", "gamma") if speculation.is_lossy else ()
    return {name: getattr(speculation, name) for name in names}
