"""Many prompts: JSON Lines in, JSON Lines out. What is already out is not done again."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import click

from offspec import SamplingParams
from offspec.checkpoints.atomic_files import check_writable, lock
from offspec.errors import OffspecError, StorageError, UsageError

from .openai_api import sampling_params
from .options import read_bytes, read_file
from .terminal import TimeLeft, is_watched, show_line

Answer = dict[str, Any]
Turns = list[dict[str, str]]
EMPTY_PROMPT = "the prompt is empty"
ANSWER_BEGINS = b'{"line": '
OWN_KEYS = frozenset(
    ("line", "settings", "model", "draft", "prompt_token_ids", "token_ids", "text", "finish_reason", "seed", "stats")
)
TAKEN = OWN_KEYS - {"seed"}  # keys that no line may have; its seed is the answer's, too


@dataclass(frozen=True)
class Task:
    """One line of the file: the object in it, which stands in the answer too."""

    line: int
    content: Mapping[str, Any]

    @property
    def prompt(self) -> str | Turns:
        found: str | Turns = self.content.get("prompt", self.content.get("messages"))
        return found

    @property
    def text(self) -> str:
        """The prompt without a chat template."""
        return self.prompt if isinstance(self.prompt, str) else "\n\n".join(part["content"] for part in self.prompt)

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """How this line is to be answered: its own `temperature`, `max_new_tokens`, … win. Raises UsageError."""
        return sampling_params(self.content, defaults)


def read_tasks(source: Path, taken: frozenset[str] = frozenset()) -> tuple[list[Task], dict[int, str]]:
    """The tasks of a JSON Lines file, and what is wrong with the lines that are none, by their numbers.

    taken: keys that no task may have, as its answer has them.
    """
    tasks, errors = list[Task](), dict[int, str]()
    content = read_bytes(source).removeprefix(BOM_UTF8)  # which editors and PowerShell put there
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
    """The prompts of a text file, one a line, or of a .jsonl file.

    Raises click.UsageError where there is none, or a line that is none.
    """
    if source.suffix == ".jsonl":
        tasks, errors = read_tasks(source)
    else:
        lines = enumerate(read_file(source).splitlines(), 1)
        tasks, errors = [Task(number, {"prompt": line}) for number, line in lines if line.strip()], {}
    for number, error in errors.items():
        raise click.UsageError(f"{source}, line {number}: {error}.")
    if not tasks:
        raise click.UsageError(f"{source} holds no prompt.")
    return tasks


class Batch:
    """The tasks of a prompt file, and the file that takes the answers (None: standard output).

    The output is locked until the batch is closed, so that its end is read and written by one process.
    """

    def __init__(self, source: Path, output: Path | None, settings: Mapping[str, Any], params: SamplingParams) -> None:
        """settings: what the answers depend on, beside the prompts and params, which lines may change for themselves.

        Raises UsageError where there is no line, or the output has others, or is something else, or another process
        writes to it, and StorageError where it cannot be written.
        """
        self.source, self.output, self._settings, self._params = source, output, settings, params
        self.tasks, self.errors = self._readable()
        self._num_lines = len(self.tasks) + len(self.errors)
        if not self.tasks and not self.errors:
            raise UsageError(f"{source} holds no prompt")
        self._done, self._num_bytes = dict[int, Answer](), 0  # of the output: answers, and how much of it they are
        self._file: BinaryIO | None = None
        try:
            if output is not None:
                self._file = self._locked(output)
                self._read_done(output, self._file)
            self._check_done()
        except BaseException:
            self.close()
            raise

    def _readable(self) -> tuple[list[Task], dict[int, str]]:
        """`read_tasks`, where settings that cannot be followed are errors too."""
        found, errors = read_tasks(self.source, TAKEN)
        tasks = list[Task]()
        for task in found:
            try:
                task.sampling(self._params)
            except UsageError as exc:
                errors[task.line] = str(exc)
            else:
                tasks.append(task)
        return tasks, errors

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # it tries once more to write what could not be written
                self._file.close()

    def _check_done(self) -> None:
        for task in self.tasks:
            if task.line in self._done and not self._is_answer(self._done[task.line], task):
                raise UsageError(
                    f"{self.output} answers another prompt, or with other settings, at line {task.line} of "
                    f"{self.source}: give another --output"
                )

    @property
    def open_tasks(self) -> list[Task]:
        return [task for task in self.tasks if task.line not in self._done]

    def run(self, answer: Callable[[str | Turns, SamplingParams], Answer], *, quiet: bool) -> None:
        """Answer what is open; a task that fails is told, and the others are done. Raises OffspecError at the end."""
        for line, error in sorted(self.errors.items()):
            self._tell(line, error)
        tasks, shows, left = self.open_tasks, is_watched() and not quiet and self.output is not None, TimeLeft()
        self._cut_half_line()
        num_before = len(self.tasks) - len(tasks)
        for number, task in enumerate(tasks):
            if shows:
                time_left = left(time.monotonic(), number, len(tasks))
                show_line(f"prompt {num_before + number + 1} of {len(self.tasks)}{time_left}")
            try:
                found = answer(task.prompt, task.sampling(self._params))
            except OffspecError as exc:
                self.errors[task.line] = str(exc)
                self._tell(task.line, str(exc))
                continue
            self._write({"line": task.line, **task.content, **found, "settings": self._settings_of(task)})
        if shows:
            show_line()
        if self.errors:
            lines = ", ".join(map(str, sorted(self.errors)))
            again = "" if self.output is None else "; correct them and give the same command again"
            raise OffspecError(
                f"{len(self.errors)} of {self._num_lines} lines of {self.source} failed ({lines}){again}"
            )

    def _tell(self, line: int, error: str) -> None:
        click.echo(f"offspec: {self.source}, line {line}: {' '.join(error.split())}", err=True)

    def _locked(self, output: Path) -> BinaryIO:
        """The output, opened and locked before a model is loaded; what is in it stays as it is."""
        check_sink(output)
        if output.exists() and not output.is_file():  # reading a pipe or a device may never end
            raise UsageError(f"{output} is no regular file: give another --output")
        if output.exists() and output.samefile(self.source):
            raise UsageError(f"{output} is the prompt file itself: give another --output")
        try:
            file = output.open("ab+")
        except OSError as exc:
            raise StorageError(f"{output} cannot be written: {exc.strerror}; choose another file") from exc
        try:
            lock(file, f"{output} is written by another process; wait until that one is done, or give another --output")
        except UsageError:
            file.close()
            raise
        return file

    def _read_done(self, output: Path, file: BinaryIO) -> None:
        """What an earlier run wrote, but for half a line at the end, where it was stopped."""
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
        """Only now, as nothing was to be changed before it was sure that answers would come."""
        if self._file is None or self._file.seek(0, os.SEEK_END) == self._num_bytes:
            return
        try:
            self._file.truncate(self._num_bytes)
        except OSError as exc:
            raise StorageError(f"{self.output} cannot be written: {exc.strerror}") from exc

    def _write(self, answer: Answer) -> None:
        """The whole line at once."""
        line = json.dumps(answer) + "\n"
        if self._file is None:
            sys.stdout.write(line)
            sys.stdout.flush()
        else:
            self._file.write(line.encode())
            self._file.flush()

    def _settings_of(self, task: Task) -> dict[str, Any]:
        return {**self._settings, **asdict(task.sampling(self._params))}

    def _is_answer(self, record: Answer, task: Task) -> bool:
        content = {key: value for key, value in task.content.items() if key not in OWN_KEYS}
        wanted = {**content, "settings": self._settings_of(task)}
        found = {key: record[key] for key in wanted if key in record}
        return json.dumps(found, sort_keys=True) == json.dumps(wanted, sort_keys=True)  # as text, NaN is NaN


def check_sink(file: Path) -> None:
    """Raises StorageError, before anything is computed for it, where a file could not be written."""
    if not file.exists():
        check_writable(file)
    elif not os.access(file, os.W_OK):
        raise StorageError(f"{file} cannot be written: {os.strerror(errno.EACCES)}; choose another file")


def _foreign(output: Path, line: int) -> UsageError:
    return UsageError(f"{output}, line {line} is no answer of offspec: give another --output")


def _check(content: Any, taken: frozenset[str]) -> None:
    """Raises UsageError for an object that is no task."""
    if not isinstance(content, dict) or ("prompt" in content) == ("messages" in content):
        raise UsageError('not an object with either "prompt" or "messages"')
    if content.get("prompt") == "":
        raise UsageError(EMPTY_PROMPT)
    if "prompt" in content and not isinstance(content["prompt"], str):
        raise UsageError('"prompt" is not a text')
    messages = content.get("messages", [{"role": "", "content": ""}])
    is_chat = isinstance(messages, list) and all(
        isinstance(m, dict) and m.keys() == {"role", "content"} and all(isinstance(part, str) for part in m.values())
        for m in messages
    )
    if not is_chat or not messages:
        raise UsageError('"messages" is not a list of {"role": ..., "content": ...}')
    if found := sorted(content.keys() & taken):
        raise UsageError(f"{found[0]!r} is a key of the answer; give it another name")
