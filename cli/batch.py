"""Many prompts: JSON Lines in, JSON Lines out. Prompts already answered in the output are skipped."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import click

from offspec import SamplingParams
from offspec.errors import OffspecError, StorageError, UsageError
from offspec.user_files import cannot_write, check_writable, lock

from .constraints import NAMES, constraint_in
from .flag_declarations import with_flags
from .reading import read_bytes, read_file
from .server.openai_requests import FIELDS, sampling_params
from .terminal import ProgressLine, TimeLeft

Answer = dict[str, Any]
Turns = list[dict[str, str]]
TokenIds = list[int]
Asked = tuple[str | Turns | TokenIds, SamplingParams]  # a prompt and its settings
# Answers a list of prompts in any order: yields a prompt's place in the list, and its answer or error.
Answers = Callable[[Sequence[Asked]], Generator[tuple[int, Answer | OffspecError], None, None]]
EMPTY_PROMPT = "the prompt is empty"
ANSWER_BEGINS = b'{"line": '
OWN_KEYS = frozenset(
    ("line", "settings", "model", "draft", "prompt_token_ids", "token_ids", "text", "finish_reason", "seed", "stats")
)
READ_KEYS = {"prompt", "messages", "stop", "logit_bias", *NAMES, *FIELDS}  # of a line
TYPO = 0.8  # similarity of a misspelt key: "max_new_tokns" has 0.96, "step" and "stop" 0.75
TAKEN = OWN_KEYS - {"seed"}  # keys that no line may have; a line's seed is also its answer's


@dataclass(frozen=True)
class Task:
    """One line of the file. Its object is copied into the answer."""

    line: int
    content: Mapping[str, Any]

    @property
    def prompt(self) -> str | Turns | TokenIds:
        prompt: str | Turns | TokenIds = self.content.get("prompt", self.content.get("messages"))
        return prompt

    @property
    def text(self) -> str:
        """The prompt as plain text, without a chat template. Raises click.UsageError for token ids."""
        if isinstance(self.prompt, str):
            return self.prompt
        if not is_turns(self.prompt):
            raise click.UsageError(f"line {self.line} of the prompts has token ids; give text.")
        return "\n\n".join(part["content"] for part in self.prompt)

    @property
    def typos(self) -> dict[str, str]:
        """Its keys that are not read, although they look like one that is: the key → that one."""
        near = {key: get_close_matches(key, READ_KEYS, n=1, cutoff=TYPO) for key in self.content.keys() - READ_KEYS}
        return {key: meant[0] for key, meant in sorted(near.items()) if meant}

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """`defaults`, overridden by the line's own `temperature`, `json_schema`, …. Raises UsageError."""
        params = sampling_params(self.content, defaults)
        return replace(params, constraint=constraint_in(self.content, params.constraint))


def is_turns(prompt: str | Turns | TokenIds) -> TypeGuard[Turns]:
    return not isinstance(prompt, str) and isinstance(prompt[0], dict)


def read_tasks(source: Path, taken: frozenset[str] = frozenset()) -> tuple[list[Task], dict[int, str]]:
    """The tasks of a JSON Lines file, and the errors of its invalid lines by line number.

    taken: keys that no task may have, because its answer has them.
    """
    tasks, errors = list[Task](), dict[int, str]()
    content = read_bytes(source).removeprefix(BOM_UTF8)  # editors and PowerShell write it
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            task = json.loads(line.decode("utf-8"))
            _check(task, taken)
        except UnicodeDecodeError as exc:
            errors[number] = f"not UTF-8 text (byte {exc.start})"
        except (ValueError, RecursionError) as exc:
            errors[number] = f"not JSON ({exc})"
        except UsageError as exc:
            errors[number] = str(exc)
        else:
            tasks.append(Task(number, task))
    return tasks, errors


def read_prompts(source: Path) -> list[Task]:
    """The prompts of a text file, one per line, or of a .jsonl file.

    Raises click.UsageError for a file without prompts, or with an invalid line.
    """
    if source.suffix == ".jsonl":
        tasks, errors = read_tasks(source)
    else:
        lines = enumerate(read_file(source).splitlines(), 1)
        tasks, errors = [Task(number, {"prompt": line}) for number, line in lines if line.strip()], {}
    for number, error in errors.items():
        raise click.UsageError(f"{source}, line {number}: {error}.")
    if not tasks:
        raise click.UsageError(f"{source} contains no prompt.")
    return tasks


class PromptBatch:
    """The tasks of a prompt file, and the file for the answers (None: standard output).

    The batch locks the output until `close`, so that one process reads and appends to it.
    """

    def __init__(
        self, source: Path, output: Path | None, settings: Mapping[str, object], params: SamplingParams
    ) -> None:
        """params: sampling, which a line may override. settings: everything else that the answers depend on.

        Raises UsageError for a source without lines, and for an output with other answers, of another type, or
        locked by another process. Raises StorageError if the output cannot be written.
        """
        self.source, self.output, self._settings, self._params = source, output, settings, params
        self.tasks, self.errors = self._readable()
        self._num_lines = len(self.tasks) + len(self.errors)
        if not self.tasks and not self.errors:
            raise UsageError(f"{source} contains no prompt")
        self._done, self._num_bytes = dict[int, Answer](), 0  # the output's answers, and their size
        self._file: BinaryIO | None = None
        try:
            if output is not None:
                self._file = self._locked(output)
                self._read_done(output, self._file)
            for task in self.tasks:
                if task.line in self._done and not self._is_answer(self._done[task.line], task):
                    raise UsageError(
                        f"the answer in {output} to line {task.line} of {source} has another prompt or other settings: "
                        "give another --output"
                    )
        except BaseException:
            self.close()
            raise

    def _readable(self) -> tuple[list[Task], dict[int, str]]:
        """`read_tasks`, with lines of invalid settings among the errors."""
        readable, errors = read_tasks(self.source, TAKEN)
        tasks = list[Task]()
        for task in readable:
            try:
                task.sampling(self._params)
            except UsageError as exc:
                errors[task.line] = str(exc)
            else:
                tasks.append(task)
        return tasks, errors

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # close retries a write that failed
                self._file.close()

    @property
    def open_tasks(self) -> list[Task]:
        return [task for task in self.tasks if task.line not in self._done]

    def collect(self, answers: Answers, *, quiet: bool, progress: Callable[[], str] = lambda: "") -> None:
        """Write the answers to the open tasks as they come; without open tasks, `answers` is not called.

        Reports a failed task and continues; raises OffspecError at the end if any failed.
        progress: what the progress line says at its end.
        """
        for line, error in sorted(self.errors.items()):
            self._tell(line, error)
        if not quiet:
            self._tell_typos()
        tasks, left, progress_line = self.open_tasks, TimeLeft(), ProgressLine(quiet=quiet or self.output is None)
        num_before = len(self.tasks) - len(tasks)
        if num_before and not quiet:
            click.echo(f"offspec: {num_before} of {len(self.tasks)} prompts were answered before", err=True)

        def show(number: int) -> None:
            if number < len(tasks):
                time_left = left(time.monotonic(), number, len(tasks))
                progress_line.show(f"prompt {num_before + number + 1} of {len(self.tasks)}{time_left}{progress()}")

        if tasks:
            with closing(answers([(task.prompt, task.sampling(self._params)) for task in tasks])) as answered:
                self._cut_half_line()
                show(0)
                for number, (place, answer) in enumerate(answered, 1):
                    task = tasks[place]
                    if isinstance(answer, OffspecError):
                        self.errors[task.line] = with_flags(str(answer))
                        self._tell(task.line, self.errors[task.line])
                    else:
                        settings = self._settings_of(task)
                        self._write({"line": task.line, **task.content, **answer, "settings": settings})
                    show(number)
        progress_line.show()
        if self.errors:
            lines = ", ".join(map(str, sorted(self.errors)))
            again = "" if self.output is None else "; correct them and repeat the command"
            raise OffspecError(
                f"{len(self.errors)} of {self._num_lines} lines of {self.source} failed ({lines}){again}"
            )

    def _tell(self, line: int, error: str) -> None:
        click.echo(f"offspec: {self.source}, line {line}: {' '.join(error.split())}", err=True)

    def _tell_typos(self) -> None:
        """One note for each misspelt key, however many lines have it."""
        lines = dict[tuple[str, str], list[int]]()
        for task in self.open_tasks:
            for typo in task.typos.items():
                lines.setdefault(typo, []).append(task.line)
        for typo, (first, *others) in lines.items():
            more = f" ({len(others)} more lines have it)" if others else ""
            self._tell(first, "the key {!r} sets nothing; did you mean {!r}?".format(*typo) + more)

    def _locked(self, output: Path) -> BinaryIO:
        """The output, opened and locked before a model is loaded; its content does not change."""
        check_sink(output)
        if output.exists() and not output.is_file():  # reading a pipe or a device may never end
            raise UsageError(f"{output} is not a regular file; give a file, or - for standard output (--output)")
        if output.exists() and output.samefile(self.source):
            raise UsageError(f"{output} is the prompt file itself: give another --output")
        try:
            file = output.open("ab+")
        except OSError as exc:
            raise cannot_write(output, exc, "choose another file") from exc
        try:
            lock(file, f"another process writes to {output}; wait until it ends, or give another --output")
        except UsageError:
            file.close()
            raise
        return file

    def _read_done(self, output: Path, file: BinaryIO) -> None:
        """Read the answers of an earlier run, except an incomplete last line."""
        file.seek(0)
        content = file.read()
        self._num_bytes = content.rfind(b"\n") + 1
        for number, line in enumerate(content[: self._num_bytes].splitlines(), 1):
            try:
                record = json.loads(line)
                self._done[record["line"]] = record
            except (ValueError, TypeError, KeyError, RecursionError) as exc:
                raise _foreign(output, number) from exc
        half = content[self._num_bytes :]
        if half and not (self._done or half.startswith(ANSWER_BEGINS)):
            raise _foreign(output, 1)

    def _cut_half_line(self) -> None:
        """Remove an incomplete last line. Called when answers are about to be written, not earlier."""
        if self._file is None or self.output is None or self._file.seek(0, os.SEEK_END) == self._num_bytes:
            return
        try:
            self._file.truncate(self._num_bytes)
        except OSError as exc:
            raise cannot_write(self.output, exc) from exc

    def _write(self, answer: Answer) -> None:
        """Write one line and flush it. Raises StorageError."""
        line = json.dumps(answer) + "\n"
        if self._file is None or self.output is None:
            sys.stdout.write(line)
            sys.stdout.flush()
            return
        try:
            self._file.write(line.encode())
            self._file.flush()
        except OSError as exc:
            raise cannot_write(self.output, exc) from exc

    def _settings_of(self, task: Task) -> dict[str, object]:
        sampling = task.sampling(self._params)
        settings: dict[str, object] = asdict(sampling)
        if sampling.constraint is not None:  # those of lines and flags have no other fields
            settings["constraint"] = {"kind": sampling.constraint.kind, "text": sampling.constraint.text}
        return {**self._settings, **settings}

    def _is_answer(self, record: Answer, task: Task) -> bool:
        content = {key: value for key, value in task.content.items() if key not in OWN_KEYS}
        wanted = {**content, "settings": self._settings_of(task)}
        recorded = {key: record[key] for key in wanted if key in record}
        return json.dumps(recorded, sort_keys=True) == json.dumps(wanted, sort_keys=True)  # as text, NaN equals NaN


def check_sink(file: Path) -> None:
    """Raises StorageError if a file cannot be written. Called before the computation of its content."""
    if not file.exists():
        check_writable(file)
    elif not os.access(file, os.W_OK):
        raise StorageError(f"cannot write {file}: {os.strerror(errno.EACCES)}; choose another file")


def _foreign(output: Path, line: int) -> UsageError:
    return UsageError(f"{output}, line {line} is not an answer of offspec: give another --output")


def _check(content: Any, taken: frozenset[str]) -> None:
    """Raises UsageError for an object that is not a valid task."""
    if not isinstance(content, dict) or ("prompt" in content) == ("messages" in content):
        raise UsageError('not an object with either "prompt" or "messages"')
    prompt = content.get("prompt", "messages")
    if prompt in ("", []):
        raise UsageError(EMPTY_PROMPT)
    if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(token) is int for token in prompt)):
        raise UsageError('"prompt" is neither a string nor a list of token ids')
    messages = content.get("messages", [{"role": "", "content": ""}])
    is_chat = isinstance(messages, list) and all(
        isinstance(m, dict) and m.keys() == {"role", "content"} and all(isinstance(part, str) for part in m.values())
        for m in messages
    )
    if not is_chat or not messages:
        raise UsageError('"messages" is not a list of {"role": ..., "content": ...}')
    if reserved := sorted(content.keys() & taken):
        raise UsageError(f"the key {reserved[0]!r} is reserved for the answer; rename it")
