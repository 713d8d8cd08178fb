"""`offspec run`: generates text for one prompt, printed as it is accepted, or for a file of prompts."""

from __future__ import annotations

import json
import os
import reprlib
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from offspec import AUTO_TEXTS, MODEL_NAMES, LoadOptions, SamplingParams, SpeculationParams
from offspec.errors import OffspecError

from .answers import INTERRUPTED, Printer, SharedAnswers, answer_of, describe_answers, interrupted
from .batch import EMPTY_PROMPT, Answer, Asked, PromptBatch, TokenIds, Turns, is_turns
from .constraints import ConstraintFlags, constraint_options
from .flag_declarations import FlagRecord, OffspecCommand, option
from .node_engine import EngineJob
from .options import (
    MAX_TEXTS,
    MODEL_HELP,
    WholeNumber,
    fit_to_requests,
    is_typed,
    load_engine,
    loading_options,
    lookup_files_option,
    lossy_settings,
    model_argument,
    number_of_texts,
    output_options,
    reworded,
    sampling_options,
    speculation_options,
    text_options,
    think_option,
)
from .ray_batch import RayEngines
from .reading import read_prompt
from .reasoning import ThinkingReader, reader_of, thinking_first
from .terminal import as_shown, draft_off, first_pass_shown, wrapped

if TYPE_CHECKING:
    from offspec import Engine, Prompt, PromptCache, Step
    from offspec.text.tokenizer import Tokenizer

STANDARD_OUTPUT = Path("-")


@dataclass(frozen=True)
class PromptFlags:
    """The flags that name the prompt, and how to interpret it.

    cache_prompt: the file of its KV entries.
    """

    prompt: str | None = None
    prompt_file: Path | None = None
    system: str | None = None
    raw: bool = False
    cache_prompt: Path | None = None

    @property
    def is_batch(self) -> bool:
        return self.prompt_file is not None and self.prompt_file.suffix == ".jsonl"

    def check(self, num_answers: int, think: bool | None, temperature: float) -> None:
        """Raises click.UsageError for flags that contradict each other."""
        if self.cache_prompt is not None and (self.is_batch or num_answers > 1):
            raise click.UsageError("--cache-prompt needs one prompt and one answer.")
        if self.raw and self.system is not None:
            raise click.UsageError("--system needs the chat template, which --raw turns off.")
        if self.raw and think is not None:
            raise click.UsageError("--think and --no-think need the chat template, which --raw turns off.")
        if self.is_batch and self.prompt is not None:
            raise click.UsageError("Give PROMPT or --prompt-file, not both.")
        if self.is_batch and num_answers > 1:
            raise click.UsageError("--num-answers needs one prompt, not a .jsonl file; repeat its lines instead.")
        if num_answers > 1 and temperature == 0:
            raise click.UsageError("At --temperature 0 all answers are equal; raise it, or omit --num-answers.")

    def words(self, model: str) -> str:
        """The prompt's text. Raises click.UsageError if it is empty."""
        text = read_prompt(self.prompt, self.prompt_file)
        if not text:
            is_piped = self.prompt is None and self.prompt_file is None
            where = f": standard input is empty, and {model!r} is MODEL" if is_piped else ""
            raise click.UsageError(f"{EMPTY_PROMPT}{where}.")
        return text

    def for_model(self, tokenizer: Tokenizer, prompt: str | Turns | TokenIds) -> Prompt:
        """Messages for a model with a chat template, otherwise the text or the ids. The prompt's own system message has
        priority.
        """
        if isinstance(prompt, str):
            if self.raw or not (tokenizer.has_chat_template or self.system is not None):
                return prompt
            prompt = [{"role": "user", "content": prompt}]
        if self.system is None or not is_turns(prompt) or any(turn["role"] == "system" for turn in prompt):
            return prompt
        return [{"role": "system", "content": self.system}, *prompt]


PROMPT = FlagRecord("prompts", PromptFlags, PromptFlags)


def _texts_and_cluster(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int | None, str | None]:
    """A click callback: the number of texts (None is `auto`), and the address of a Ray cluster (None is no cluster)."""
    texts, _, cluster = value.partition(",") if value[:3] != "ray" else ("auto", "", value)
    name, _, address = cluster.partition(":")
    if name not in ("", "ray"):
        raise click.BadParameter(f"{reprlib.repr(name)} is not ray or ray:HOST:PORT.")
    return number_of_texts(ctx, param, texts), (address or "auto") if name else None


@dataclass(frozen=True)
class OutputFlags:
    """The output flags of a request."""

    as_json: bool
    stats: bool
    quiet: bool
    verbose: bool


@click.command(
    cls=OffspecCommand,
    name="run",
    help=f"""Generate text for one prompt; the text goes to stdout as it is accepted.

{MODEL_HELP} Piped input goes before PROMPT, with an empty line between them. If PROMPT is "-" or missing, the prompt is
the piped input alone. A model with a chat template answers PROMPT as a message; with --raw it continues PROMPT as text.
MODEL may be omitted if a setting names it (offspec config).

\b
Examples:
  offspec run builtin "def area("
  offspec run ./Llama-3.1-70B-Instruct --draft ./Llama-3.2-1B-Instruct "Why is the sky blue?"
  git diff | offspec run ./Llama-3.1-8B-Instruct "Explain this change." --temperature 0.6 --stats
  offspec run ./Llama-3.1-8B-Instruct "Name three rivers." --json-schema rivers.schema.json
  offspec run builtin --prompt-file prompts.jsonl --output answers.jsonl

A line of prompts.jsonl is {{"prompt": "..."}} or {{"messages": [{{"role": "user", "content": "..."}}]}}. Its
"temperature", "max_new_tokens", "seed", "stop" and other sampling settings override flags, and so do "json_schema",
"json_object", "grammar" and "regex". A "prompt" may be a list of token ids. Other keys are copied into the answer.
""",
)
@model_argument
@PROMPT.argument("prompt", required=False)
@PROMPT.option(
    "prompt_file",
    type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
    help="Read the prompt from a file, or many prompts from a .jsonl file, one per line.",
)
@option(
    "--output",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    metavar="FILE",
    help="File for the answers to a .jsonl file; prompts already answered there are skipped. [default: -, stdout]",
)
@option(
    "--batch",
    is_rare=True,
    default="auto",
    show_default=True,
    metavar="auto|N|ray[:HOST:PORT]",
    callback=_texts_and_cluster,
    help="Answer up to N lines of a .jsonl file, or of --num-answers, at a time; they share the target's passes. With "
    "ray or N,ray all nodes of this machine's Ray cluster answer the file; HOST:PORT names the head of another one.",
)
@option(
    "--num-answers",
    is_rare=True,
    type=WholeNumber(1, MAX_TEXTS),
    default=1,
    show_default=True,
    metavar="N",
    help="Give N answers, with seeds that count up from --seed; they share the prompt's pass and all later ones.",
)
@PROMPT.option(
    "cache_prompt",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Keep the prompt's KV entries in FILE; a prompt that begins the same is not computed again.",
)
@PROMPT.option("system", metavar="TEXT", help="System message, for models with a chat template.")
@PROMPT.option("raw", is_flag=True, help="Continue the prompt as text, without the chat template.")
@loading_options
@lookup_files_option
@think_option
@speculation_options
@sampling_options()
@text_options
@constraint_options
@output_options(
    json="Print one JSON object instead of the text.", stats="Show tokens/s and other statistics on stderr."
)
def command(
    output: Path | None,
    batch: tuple[int | None, str | None],
    num_answers: int,
    as_json: bool,
    show_stats: bool,
    quiet: bool,
    verbose: bool,
    prompts: PromptFlags,
    loading: LoadOptions,
    speculation: SpeculationParams,
    sampling: SamplingParams,
    constraint: ConstraintFlags,
) -> None:
    sampling = constraint.applied_to(sampling)
    model, prompt = (loading.model, prompts.prompt) if prompts.prompt is not None else _alone(loading.model)
    prompts = replace(prompts, prompt=prompt)
    prompts.check(num_answers, loading.think, sampling.temperature)
    shown = OutputFlags(as_json, show_stats, quiet, verbose)
    loading = replace(fit_to_requests(loading, sampling, speculation), model=model, chats=prompts.system is not None)
    if prompts.is_batch:
        _run_file(prompts, loading, sampling, speculation, shown, output, batch)
        return
    max_texts, ray = batch
    if output is not None or ray is not None:
        flag = "--batch ray" if output is None else "--output"
        raise click.UsageError(f"{flag} needs a --prompt-file that ends with .jsonl.")
    num_texts = min(num_answers, max_texts or AUTO_TEXTS)
    loading = replace(loading, texts=num_texts, answer_tokens=sampling.max_new_tokens)
    if num_answers > 1:
        _run_several(prompts, loading, sampling, speculation, shown, num_answers)
    else:
        _run_one(prompts, loading, sampling, speculation, shown)


reworded(command, seed="Random seed; the draft does not change the text. [default: random; --stats and --json show it]")


def _load_one(prompts: PromptFlags, loading: LoadOptions, shown: OutputFlags) -> tuple[Engine, Prompt]:
    """The engine and the prompt. Raises click.UsageError for an empty one before anything is loaded."""
    to_prompt = partial(prompts.for_model, prompt=prompts.words(loading.model))
    engine = load_engine(replace(loading, prompt=to_prompt), quiet=shown.quiet, verbose=shown.verbose)
    return engine, to_prompt(engine.tokenizer)


def _run_one(
    prompts: PromptFlags,
    loading: LoadOptions,
    params: SamplingParams,
    speculation: SpeculationParams,
    shown: OutputFlags,
) -> None:
    """Answer one prompt on standard output."""
    engine, prompt = _load_one(prompts, loading, shown)
    params, ids = thinking_first(params, prompt), engine.encode(prompt)
    notes = list[str]()  # shown after the text, not in the middle of it
    source: Engine | PromptCache = engine
    if prompts.cache_prompt is not None:
        from offspec import PromptCache

        source = PromptCache(engine, prompts.cache_prompt, notes.append)
    steps = _steps(engine, source.generate(ids, params, speculation), quiet=shown.quiet)
    if shown.as_json:
        all_steps = list(steps)
        last = all_steps[-1]
        click.echo(json.dumps(answer_of(engine, ids, all_steps, params)))
    else:
        last = _stream(steps, reader_of(engine, ids, params), quiet=shown.quiet)
        if not shown.quiet:
            _tell_cut(engine, last, params)
    for note in notes if not shown.quiet else ():
        click.echo(f"offspec: {note}", err=True)
    if shown.stats:
        click.echo(wrapped(describe(last), indent=10 * " "), err=True)
    elif shown.verbose and (off := draft_off(last.stats)):
        click.echo(wrapped(f"offspec: the draft is {off}"), err=True)
    if last.finish_reason == INTERRUPTED:
        raise KeyboardInterrupt


def _run_several(
    prompts: PromptFlags,
    loading: LoadOptions,
    params: SamplingParams,
    speculation: SpeculationParams,
    shown: OutputFlags,
    number: int,
) -> None:
    """Give several answers to one prompt on standard output. If Ctrl-C stops them, those that have begun say so."""
    engine, prompt = _load_one(prompts, loading, shown)
    params = thinking_first(params, prompt)
    ids, began = engine.encode(prompt), time.perf_counter()
    answers: list[list[Step]] = [[] for _ in range(number)]
    show: Callable[[int, Step], object] = (lambda index, step: None) if shown.as_json else Printer(number)
    pairs = engine.generate_answers(ids, number, params, speculation, max_texts=loading.texts)
    try:
        for index, step in first_pass_shown(engine, pairs, quiet=shown.quiet):
            answers[index].append(step)
            show(index, step)
    except KeyboardInterrupt:
        if not any(answers):
            raise
        for index, steps in enumerate(answers):
            if steps and steps[-1].finish_reason is None:
                steps.append(interrupted(steps[-1]))
                show(index, steps[-1])
    ends = [steps[-1] for steps in answers if steps]
    if shown.as_json:
        click.echo(json.dumps([answer_of(engine, ids, steps, params) for steps in answers if steps]))
    elif not shown.quiet and (cut := next((end for end in ends if end.finish_reason == "length"), None)) is not None:
        _tell_cut(engine, cut, params)
    if shown.stats:
        click.echo(describe_answers(ends, time.perf_counter() - began), err=True)
    if any(end.finish_reason == INTERRUPTED for end in ends):
        raise KeyboardInterrupt


def _run_file(
    prompts: PromptFlags,
    loading: LoadOptions,
    sampling: SamplingParams,
    speculation: SpeculationParams,
    shown: OutputFlags,
    output: Path | None,
    batch_flag: tuple[int | None, str | None],
) -> None:
    """Answer the prompts of a file, here or on a Ray cluster; without open prompts, none of them is asked for."""
    assert prompts.prompt_file is not None
    max_texts, ray = batch_flag
    if ray is not None and loading.device.startswith("cuda:"):
        raise click.UsageError(f"Ray chooses the GPU of each engine: give --device cuda instead of {loading.device}.")
    sink = None if output == STANDARD_OUTPUT else output
    with closing(PromptBatch(prompts.prompt_file, sink, _settings(prompts, loading, speculation), sampling)) as batch:
        if chats := [task.line for task in batch.tasks if prompts.raw and is_turns(task.prompt)]:
            raise click.UsageError(
                f"{prompts.prompt_file}, line {chats[0]}: messages need the chat template, which --raw turns off."
            )
        num_texts = max_texts or max(1, min(AUTO_TEXTS, len(batch.open_tasks)))
        loading = replace(loading, texts=num_texts)
        together = partial(SharedAnswers, to_prompt=prompts.for_model, speculation=speculation, max_texts=num_texts)
        if ray is None:
            source: SharedAnswers | RayEngines = together(
                partial(load_engine, loading, quiet=shown.quiet, verbose=shown.verbose)
            )
        else:
            job = EngineJob(loading, partial(_answers_together, together=together), num_texts)
            source = RayEngines(ray, job, quiet=shown.quiet, verbose=shown.verbose)
        try:
            batch.collect(source.answers, quiet=shown.quiet, progress=source.progress)
        finally:
            if shown.stats:
                click.echo(source.describe(), err=True)


def _answers_together(
    engine: Engine, prompts: Sequence[Asked], *, together: Callable[[Callable[[], Engine]], SharedAnswers]
) -> Generator[tuple[int, Answer | OffspecError], None, None]:
    """The answers of one engine to several prompts (`node_engine.EngineJob`)."""
    return together(lambda: engine).answers(prompts)


def _settings(prompts: PromptFlags, loading: LoadOptions, speculation: SpeculationParams) -> dict[str, object]:
    """The settings that answers in a file depend on, beside those of sampling."""
    settings: dict[str, object] = {"model": loading.model, "revision": loading.revision, "dtype": loading.dtype}
    settings |= {"system": prompts.system, "raw": prompts.raw}
    if loading.think is not None:
        settings["think"] = loading.think
    if speculation.is_lossy:  # exact answers do not depend on the draft
        settings |= {"draft": loading.draft, **lossy_settings(speculation)}
    return settings


def _alone(argument: str) -> tuple[str, str | None]:
    """MODEL and PROMPT for a single argument: it is PROMPT if a setting names MODEL and it does not look like MODEL."""
    named = (click.get_current_context().default_map or {}).get("model")
    is_path = any(separator in argument for separator in "/\\") and not any(map(str.isspace, argument))
    if named is None or argument in (named, *MODEL_NAMES) or is_path or os.path.exists(argument):
        return argument, None
    return named, argument


def _stream(steps: Generator[Step, None, None], thinking: ThinkingReader | None, *, quiet: bool) -> Step:
    """Print the text step by step, ending with a newline; returns the last step. The thinking goes to stderr."""
    shown, last, is_line_open = "", None, False
    for last in steps:
        text, is_end = last.text, last.finish_reason is not None
        if thinking is not None:
            thought, text = thinking.push(text, is_end=is_end)
            if thought and not quiet:
                click.echo(as_shown(thought, sys.stderr), err=True, nl=False)
                is_line_open = True
            if is_line_open and (text or is_end):
                click.echo(err=True)
                is_line_open = False
        sys.stdout.write(as_shown(text))
        sys.stdout.flush()
        shown = text or shown
    if not shown.endswith("\n"):
        sys.stdout.write("\n")
    assert last is not None
    return last


def _steps(engine: Engine, steps: Generator[Step, None, None], *, quiet: bool) -> Generator[Step, None, None]:
    """The steps of a request. If Ctrl-C stops it after the first, an empty step with INTERRUPTED follows."""
    last = None
    try:
        for last in first_pass_shown(engine, steps, quiet=quiet):
            yield last
    except KeyboardInterrupt:
        if last is None:
            raise
        yield interrupted(last)


def _tell_cut(engine: Engine, last: Step, params: SamplingParams) -> None:
    """Print a note if a limit cut the text, with the flag that allows more; not for an explicit --max-new-tokens.

    Constrained text that is cut is invalid, so the note is printed in any case.
    """
    if last.finish_reason != "length":
        return
    planned, longest = engine.max_context, engine.target.config.max_context
    if last.stats.num_tokens < params.max_new_tokens:
        more = f"; --context N allows more, up to {longest}" if planned < longest else ""
        click.echo(f"offspec: cut, because the context of {planned} tokens is full{more}", err=True)
    elif params.constraint is not None:
        limit = f"cut at {params.max_new_tokens} tokens, before the end of what the constraint demands"
        click.echo(f"offspec: {limit}; --max-new-tokens N allows more", err=True)
    elif not is_typed("max_new_tokens"):
        click.echo(f"offspec: cut at {params.max_new_tokens} tokens; --max-new-tokens N allows more", err=True)


def describe(last: Step) -> str:
    """The statistics of a request as a few lines of text."""
    stats = last.stats
    rate, later = stats.decode_tokens_per_s, stats.num_passes - 1
    seconds = (stats.draft_s - stats.first_draft_s, stats.target_s - stats.first_target_s)
    draft_ms, target_ms = (1e3 * each / max(later, 1) for each in seconds)
    then = f", then draft {draft_ms:.1f} ms + target {target_ms:.1f} ms per pass" if later > 0 else ""
    device = f", {stats.peak_device_bytes / 2**30:.2f} GiB device" if stats.peak_device_bytes else ""
    num_cached = stats.num_prompt_tokens - stats.num_prefilled_tokens
    cached = f", {num_cached} of them from --cache-prompt" if num_cached else ""
    lines = [
        f"prompt    {stats.num_prompt_tokens} tokens{cached}, first text after {stats.ttft_s:.2f} s, seed {stats.seed}",
        f"decoding  {stats.num_tokens} tokens ({last.finish_reason}), {f'{rate:.1f}' if rate else '-'} tokens/s after "
        "the first pass",
        f"passes    {stats.num_passes}, {stats.tokens_per_pass:.2f} tokens per pass; with the prompt "
        f"{stats.prefill_s:.2f} s{then}",
        f"memory    peak {stats.peak_host_bytes / 2**30:.2f} GiB host{device}",
        f"text      {stats.exactness}, compared with plain decoding",
    ]
    if stats.is_lossy:
        lines.append("lossy     not exact acceptance (--accept): plain decoding may produce another text")
    if stats.draft_fault is not None:
        lines.append(f"no draft  from some pass on, which changes no text: {stats.draft_fault}")
    if off := draft_off(stats):
        lines.append(f"draft     {off}")
    if (plain := stats.plain_without_draft_tokens_per_s) is not None:
        lines.append(f"plain     without this draft: about {plain:.2g} tokens/s, as its memory would hold layers")
    if stats.learnt_loss is not None:
        lines.append(
            f"learning  {stats.learn_steps} steps in {stats.learn_s:.2f} s; draft loss against the target "
            f"{stats.learnt_loss:.3f} nats, before learning {stats.unlearnt_loss:.3f}"
        )
    return "\n".join(lines)
