"""Options that several commands share, and their conversion to parameters. Defaults come from the dataclasses."""

from __future__ import annotations

import os
import reprlib
import select
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.shell_completion import CompletionItem

from offspec import ACCEPTS, KV_CACHES, SEED_LIMIT, SamplingParams, SpeculationParams, parse_size
from offspec.checkpoints.small_files import MOST_TEXT_BYTES, read_small_file
from offspec.errors import UsageError
from offspec.named_models import NAMES

from .flags import with_flags
from .help_groups import option, research_option
from .learning import learning_alone, written_file
from .terminal import LoadingBar, is_watched

if TYPE_CHECKING:
    from offspec import Engine

F = TypeVar("F", bound=Callable[..., Any])
A_MODEL = f"a folder, a GGUF file, a Hugging Face hub id, or a name: {', '.join(NAMES)}"
MODEL_HELP = f"MODEL is {A_MODEL}."
IDLE_S = 3  # seconds without input after which a note says that the command waits for the pipe
MAX_TEXTS = 64  # that share passes
MOST_DIGITS = 9  # of a number of tokens
MAX_BUDGET = 8192  # for N nodes the mask takes N² bytes, the logits 4 · N · vocabulary bytes


class ModelName(click.types.StringParamType):
    """A model. An empty one is refused. The shell completes folders and the given names."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail(f"it is empty; give {A_MODEL}. If $(...) stands there, its command has failed.", param, ctx)
        return super().convert(value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        names = [CompletionItem(name) for name in self._names if incomplete and name.startswith(incomplete)]
        return [CompletionItem(incomplete, type="dir"), *names]  # bash drops entries before a folder


MODEL = ModelName(*NAMES)


class Number(click.FloatRange):
    """A number within a range; error messages call it a number."""

    name = "number"


class WholeNumber(click.IntRange):
    """An integer within a range."""

    name = "whole number"


def budget(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    """A click callback: `auto` or a number of nodes."""
    try:
        number = None if value == "auto" else int(value)
    except ValueError:
        number = -1
    if number is not None and not 0 <= number <= MAX_BUDGET:
        what = f"neither auto nor a number from 0 (plain decoding) to {MAX_BUDGET}"
        raise click.BadParameter(f"{reprlib.repr(value)} is {what}.")
    return number


def one_or_several(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> str | list[str]:
    """The value of a flag that is seldom repeated."""
    return value[0] if len(value) == 1 else list(value)


def draft_window(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    """A click callback: `auto`, which is None, or a number of tokens."""
    if value == "auto":
        return None
    if not value.isdecimal() or len(value) > MOST_DIGITS:
        raise click.BadParameter(f"{reprlib.repr(value)} is neither auto nor a number of tokens.")
    return int(value)


def number_of_texts(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    """A click callback: `auto`, which is None, or a number of texts."""
    if value == "auto":
        return None
    if not value.isdecimal() or not 1 <= int(value) <= MAX_TEXTS:
        raise click.BadParameter(f"{reprlib.repr(value)} is neither auto nor a number from 1 to {MAX_TEXTS}.")
    return int(value)


def several_budgets(ctx: click.Context, param: click.Parameter, value: str) -> list[int | None]:
    """A click callback: "16,64,auto" as budgets without duplicates."""
    found = [budget(ctx, param, part.strip()) for part in value.split(",")]
    if 0 in found:
        raise click.BadParameter("0 is plain decoding, which always runs; leave it out.")
    return list(dict.fromkeys(found))


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


def several(kind: click.ParamType[Any]) -> Callable[[click.Context, click.Parameter, str], list[Any]]:
    """A click callback that reads "a,b,c"."""

    def parse(ctx: click.Context, param: click.Parameter, value: str) -> list[Any]:
        return [kind(part.strip(), param, ctx) for part in value.split(",")]

    return parse


def _all(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Combine several click options into one decorator; help shows them in this order."""

    def decorate(command: F) -> F:
        for decorator in reversed(options):
            command = decorator(command)
        return command

    return decorate


def reworded(command: click.Command, **helps: str) -> None:
    """Replace the help texts of a command's shared options, by their names."""
    parameters = {parameter.name: parameter for parameter in command.params}
    for name, text in helps.items():
        parameter = parameters[name]
        assert isinstance(parameter, click.Option)
        parameter.help = text


def model_flags(function: F) -> F:
    """The model's revision, the device and the dtype; also for `plan`."""
    return _all(
        option("--revision", metavar="REV", help="Branch, tag or commit of a hub id."),
        option(
            "--device",
            default="auto",
            metavar="auto|cpu|cuda[:N]",
            help="Device that computes. [default: auto, the first CUDA device or the CPU]",
        ),
        option(
            "--dtype",
            type=click.Choice(["auto", "bf16", "fp16", "fp32"]),
            default="auto",
            show_default=True,
            help="Compute dtype. auto: the checkpoint's own; fp32 for small models on a CPU.",
        ),
    )(function)


def loading_options(function: F) -> F:
    """The draft, and where target and draft run."""
    return _all(
        option(
            "--draft",
            type=ModelName("auto", "shadow", "head", "self", "resident", "lookup", "none", *NAMES),
            default=("auto",),
            multiple=True,
            callback=one_or_several,
            metavar="PATH|auto|shadow|head|self|resident|lookup|none",
            help="Draft: path or hub id, shadow[:BITS] (low-bit target), head, self (early exit), resident (layers), "
            "lookup or none; may be repeated. [default: auto: lookup, or a cached shadow if faster]",
        ),
        model_flags,
        memory_flags,
        option(
            "--threads",
            type=WholeNumber(1, os.cpu_count()),
            metavar="N",
            help="Number of CPU threads. [default: torch's choice]",
        ),
        option(
            "--lookup-files",
            multiple=True,
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Also look up n-grams in this text file; may be repeated.",
        ),
        option(
            "--exit-file",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Exit layer for --draft self. [default: the latest that offspec distill made for this model]",
        ),
        option(
            "--exit-layer",
            type=WholeNumber(1),
            metavar="N",
            help="With --draft self: draft with the first N layers, without a trained exit layer.",
        ),
        draft_window_option,
        option(
            "--special-in-text",
            is_flag=True,
            help="Parse special tokens in messages, such as `<|im_end|>`, as tokens instead of text.",
        ),
        option(
            "--deterministic",
            is_flag=True,
            help="Give the same text twice in 16 bits, too: choose nothing by timing, and run one text at a time.",
        ),
        fast_arithmetic_option,
        research_option(
            "--no-read-ahead",
            "synchronous",
            is_flag=True,
            help="Read each streamed layer only when the pass needs it: slower, same text.",
        ),
    )(function)


fast_arithmetic_option = option(
    "--fast-arithmetic",
    is_flag=True,
    help="In 16 bits, compute in the fastest way: the text equals plain decoding's up to near-ties.",
)


draft_window_option = option(
    "--draft-window",
    callback=draft_window,
    default="auto",
    metavar="auto|N",
    help="A draft model keeps the last N tokens of a text. [default: auto, by its context and by trial]",
)


def memory_flags(function: F) -> F:
    """Limits of memory and context; also for `plan`."""
    return _all(
        option(
            "--vram",
            callback=size,
            metavar="SIZE",
            help="GPU memory limit, e.g. 20GiB. [default: the free GPU memory]",
        ),
        option(
            "--ram",
            callback=size,
            metavar="SIZE",
            help="RAM limit, e.g. 48GiB. [default: the free RAM]",
        ),
        option(
            "--context",
            "-c",
            type=WholeNumber(1),
            metavar="N",
            help="Maximum number of tokens of prompt and answer. [default: 4096, or fewer if memory is short]",
        ),
        option(
            "--kv-cache",
            type=click.Choice(["auto", *KV_CACHES]),
            default="auto",
            show_default=True,
            help="Bits of the KV cache; 8 and 4 change the text. auto: 16, or 8 for long contexts.",
        ),
    )(function)


def learning_options(function: F) -> F:
    """Training of the draft on the target's predictions."""
    return _all(
        option(
            "--learn",
            is_flag=True,
            help="Train the draft between requests; the text stays the same.",
        ),
        option(
            "--learn-file",
            multiple=True,
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="File with the draft's training; --learn also writes it. Of several, the best for each prompt is "
            "used.",
        ),
    )(function)


def speculation_options(function: F) -> F:
    """Budget, draft tree, guessers and acceptance."""
    return _all(
        option(
            "--budget",
            callback=budget,
            default="auto",
            metavar="auto|N",
            help="Draft tokens per pass; 0 disables speculation. Changes the text at most at near-ties in 16 bits. "
            "[default: auto, adapts]",
        ),
        _tree_options,
        _guess_options,
        _joint_options,
    )(function)


def _tree_options(function: F) -> F:
    """Score, shape and size of the draft tree."""
    return _all(
        research_option(
            "--draft-scoring",
            "scoring",
            type=click.Choice(["coupled", "specexec"]),
            default=SpeculationParams.scoring,
            show_default=True,
            help="Rank draft tokens by the target's noise and a fitted sharpness, or by draft probability "
            "after temperature and top-p.",
        ),
        research_option(
            "--tree",
            type=click.Choice(["best-first", "sequoia", "opt-tree"]),
            default=SpeculationParams.tree,
            show_default=True,
            help="Shape of the draft tree; sequoia and opt-tree are baselines.",
        ),
        research_option(
            "--stopping",
            type=click.Choice(["default", "thompson", "thompson-calibrated"]),
            default=SpeculationParams.stopping,
            show_default=True,
            help="Stop drafting when another round is not worth its cost, or by Thompson sampling (EESD).",
        ),
    )(function)


def _guess_options(function: F) -> F:
    """Guessers, recall, reuse and overlap."""
    return _all(
        research_option(
            "--lookup/--no-lookup",
            default=SpeculationParams.lookup,
            help="Also draft by n-gram lookup in the text so far.",
        ),
        research_option(
            "--recycling/--no-recycling",
            default=SpeculationParams.recycling,
            help="Reuse the target's earlier top-k predictions (token recycling).",
        ),
        research_option(
            "--recall/--no-recall",
            default=SpeculationParams.recall,
            help="Correct the draft by the target's earlier predictions after similar text.",
        ),
        research_option(
            "--reuse/--no-reuse",
            default=SpeculationParams.reuse,
            help="Keep draft tokens that follow the accepted ones, for the next tree.",
        ),
        research_option(
            "--overlap/--no-overlap",
            default=SpeculationParams.overlap,
            help="Keep drafting while the target's pass runs.",
        ),
        research_option(
            "--forced/--no-forced",
            default=SpeculationParams.forced,
            help="Add tokens to the tree where a schema or grammar allows only one.",
        ),
    )(function)


def _joint_options(function: F) -> F:
    """Acceptance by joint likelihood, and the beam that it drafts."""
    return _all(
        research_option(
            "--accept",
            type=click.Choice(ACCEPTS),
            default=SpeculationParams.accept,
            show_default=True,
            help="exact: plain decoding's text, in 16 bits up to near-ties. Others are LOSSY. joint: by joint "
            "likelihood (MJSD).",
        ),
        research_option(
            "--tau",
            type=Number(0, 1, min_open=True),
            default=SpeculationParams.tau,
            show_default=True,
            metavar="T",
            help="With --accept joint: minimum ratio of target to draft likelihood.",
        ),
        research_option(
            "--strength",
            type=Number(0, 1, min_open=True),
            default=SpeculationParams.strength,
            metavar="X",
            help="With --accept cascade, contrastive, mix, bild, relaxed or proxy: weight of the draft, or threshold. "
            "[default: depends on --accept]",
        ),
        research_option(
            "--beam",
            type=WholeNumber(1),
            default=SpeculationParams.beam,
            show_default=True,
            metavar="N",
            help="With lossy acceptance: number of hypotheses.",
        ),
        research_option(
            "--gamma",
            type=WholeNumber(1),
            default=SpeculationParams.gamma,
            show_default=True,
            metavar="N",
            help="With lossy acceptance: tokens per hypothesis.",
        ),
    )(function)


def max_new_tokens_option(default: int) -> Callable[[F], F]:
    return option(
        "--max-new-tokens",
        "-n",
        type=WholeNumber(1),
        default=default,
        show_default=True,
        metavar="N",
        help="Generate at most N tokens.",
    )


def sampling_options(function: F, max_new_tokens: int = SamplingParams.max_new_tokens) -> F:
    """Sampling and stopping."""
    p = SamplingParams
    return _all(
        max_new_tokens_option(max_new_tokens),
        option(
            "--temperature",
            "--temp",
            type=Number(0),
            default=p.temperature,
            show_default=True,
            metavar="T",
            help="Sampling temperature; 0 is greedy.",
        ),
        _filter_options,
        option(
            "--repetition-penalty",
            type=Number(0, min_open=True),
            default=p.repetition_penalty,
            show_default=True,
            metavar="R",
            help="Values above 1 make earlier tokens less likely; 1 disables.",
        ),
        _answer_penalty_options,
        option(
            "--seed",
            type=WholeNumber(0, SEED_LIMIT - 1),
            default=p.seed,
            metavar="S",
            help="Random seed; the draft does not change the text. [default: random]",
        ),
        option(
            "--stop",
            multiple=True,
            callback=_stops,
            metavar="TEXT",
            help="Stop before this text; may be repeated.",
        ),
        option("--ignore-eos", is_flag=True, help="Continue after the end-of-text token."),
    )(function)


def _answer_penalty_options(function: F) -> F:
    """OpenAI's penalties."""
    p = SamplingParams
    return _all(
        option(
            "--frequency-penalty",
            type=Number(-2, 2),
            default=p.frequency_penalty,
            show_default=True,
            metavar="F",
            help="Make tokens less likely for each time that the answer has them, -2 to 2; 0 disables.",
        ),
        option(
            "--presence-penalty",
            type=Number(-2, 2),
            default=p.presence_penalty,
            show_default=True,
            metavar="F",
            help="Make tokens that the answer has less likely, -2 to 2; 0 disables.",
        ),
    )(function)


def _filter_options(function: F) -> F:
    """Filters on the tokens to sample from."""
    p = SamplingParams
    return _all(
        option(
            "--top-k",
            type=WholeNumber(0),
            default=p.top_k,
            show_default=True,
            metavar="K",
            help="Sample from the K most likely tokens; 0 disables.",
        ),
        option(
            "--top-p",
            type=Number(0, 1, min_open=True),
            default=p.top_p,
            show_default=True,
            metavar="P",
            help="Sample from the most likely tokens whose probabilities sum to P; 1 disables.",
        ),
        option(
            "--min-p",
            type=Number(0, 1, max_open=True),
            default=p.min_p,
            show_default=True,
            metavar="P",
            help="Drop tokens less than P times as likely as the likeliest; 0 disables.",
        ),
    )(function)


think_option = option(
    "--think/--no-think",
    default=None,
    help="Let the model think before its answer, or not, if its chat template can choose. [default: the template's]",
)


def load_engine(model: str, *, quiet: bool, verbose: bool, **loading: Any) -> Engine:
    """`Engine.load` with `loading_options`. Prints advice to stderr, and with -v every automatic choice."""
    if loading.get("learn") and (file := written_file(loading.get("learn_file", ()))) is not None:
        click.get_current_context().with_resource(learning_alone(file))
    from offspec import Engine

    special_in_text = loading.pop("special_in_text", False)
    if quiet or not is_watched():
        engine = Engine.load(model, **loading)
    else:
        with LoadingBar(model) as bar:
            engine = Engine.load(model, progress=bar, **loading)
    engine.tokenizer.special_in_text = special_in_text
    # The read-ahead threads must end before the interpreter does, whatever ends the command.
    click.get_current_context().call_on_close(engine.close)
    shown = set[str]()

    def show() -> None:
        for text in dict.fromkeys(note.text for note in engine.notes if verbose or (note.advice and not quiet)):
            if text not in shown:
                click.echo(f"offspec: {with_flags(text)}", err=True)
        shown.update(note.text for note in engine.notes)

    show()
    click.get_current_context().call_on_close(show)  # those of requests
    return engine


def read_prompt(argument: str | None, file: Path | None) -> str:
    """The prompt from --prompt-file, or from a pipe and the argument, the pipe first ("-" is the pipe alone)."""
    if file is not None:
        if argument is not None:
            raise click.UsageError("Give PROMPT or --prompt-file, not both.")
        return read_file(file)
    is_piped = sys.stdin is not None and not sys.stdin.isatty()
    if argument is None and not is_piped:
        raise click.UsageError("Give a PROMPT, --prompt-file, or pipe one in.")
    if argument is None or argument == "-":
        return "" if sys.stdin is None else _piped(sys.stdin.buffer.read, "standard input")
    # Bytes that the locale cannot decode are usually UTF-8; Python keeps them as surrogates.
    words = _decoded(argument.encode("utf-8", "surrogateescape"), "PROMPT")
    if not is_piped:
        return words
    _tell_of_idle_pipe()
    before = _piped(sys.stdin.buffer.read, "standard input").rstrip("\r\n")
    return "\n\n".join(filter(None, (before, words)))


def _tell_of_idle_pipe() -> None:
    """Print a note if standard input stays empty for IDLE_S seconds: the process may have inherited it."""
    with suppress(OSError, ValueError):  # stdin without a descriptor, or Windows, where select takes no pipes
        if not select.select([sys.stdin.fileno()], [], [], IDLE_S)[0]:
            note = "offspec: waiting for standard input, which goes before PROMPT; `< /dev/null` skips it"
            click.echo(note, err=True)


def read_line() -> str:
    """The next line of standard input with its line end; empty at the end of input. Raises click.UsageError."""
    if sys.stdin is None:
        return ""
    try:
        return _piped(readline := sys.stdin.buffer.readline, "a line of standard input")
    except _TooLongError:  # skip the rest of this line
        while (part := readline(MOST_TEXT_BYTES)) and not part.endswith(b"\n"):
            pass
        raise


class _TooLongError(click.UsageError):
    pass


def _piped(read: Callable[[int], bytes], where: str) -> str:
    """Text from standard input, at most MOST_TEXT_BYTES. Raises click.UsageError."""
    content = read(MOST_TEXT_BYTES + 1)
    if len(content) > MOST_TEXT_BYTES:
        raise _TooLongError(f"Input from {where} exceeds {MOST_TEXT_BYTES >> 20} MiB; shorten it.")
    return _decoded(content, where)


def read_file(file: Path) -> str:
    """The text of a file, unchanged. Raises click.UsageError if it is not UTF-8."""
    return _decoded(read_bytes(file), str(file))


def read_bytes(file: Path) -> bytes:
    """The bytes of a file or pipe that the user names. Raises click.UsageError if it cannot be read."""
    try:
        return read_small_file(file, MOST_TEXT_BYTES, allow_pipe=True)
    except OSError as exc:
        raise click.UsageError(f"Cannot read {file}: {exc.strerror}.") from exc


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig")  # editors and PowerShell write a byte order mark
    except UnicodeDecodeError as exc:
        raise click.UsageError(f"{where} is not UTF-8 text (byte {exc.start}).") from exc


def request_of(options: dict[str, Any]) -> tuple[SamplingParams, SpeculationParams]:
    """Remove the values of `sampling_options` and `speculation_options` from `options`. Raises UsageError."""
    sampling, speculation = sampling_of(options), speculation_of(options)
    speculation.check_sampling(sampling)
    return sampling, speculation


def needs_draft_model(speculation: SpeculationParams, draft: str | Sequence[str]) -> bool:
    """Whether the acceptance needs a draft model. Raises click.UsageError for too few drafts or too many."""
    number, accept = 1 if isinstance(draft, str) else len(draft), speculation.accept
    if accept == "proxy" and number != 2:
        raise click.UsageError(
            "--accept proxy needs two drafts, a small model after training and before: --draft TRAINED --draft BASE"
        )
    if speculation.is_lossy and accept != "proxy" and number > 1:
        raise click.UsageError(f"--accept {accept} uses one draft, and --draft names {number}; give one.")
    return speculation.is_lossy


def lossy_settings(speculation: SpeculationParams) -> dict[str, Any]:
    """The speculation settings that change the text; empty for exact acceptance."""
    names = ("accept", "tau", "beam", "gamma", "strength") if speculation.is_lossy else ()
    return {name: getattr(speculation, name) for name in names}


def sampling_of(options: dict[str, Any]) -> SamplingParams:
    """Remove the values of `sampling_options`, and a `constraint`, from `options`."""
    constraint = options.pop("constraint", None)
    names = [field.name for field in fields(SamplingParams) if field.name in options]
    return SamplingParams(constraint=constraint, **{name: options.pop(name) for name in names})


def speculation_of(options: dict[str, Any]) -> SpeculationParams:
    """Remove the values of `speculation_options` from `options`."""
    return SpeculationParams(**{f.name: options.pop(f.name) for f in fields(SpeculationParams) if f.name in options})
