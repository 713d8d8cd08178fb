"""Many prompts: JSON Lines in, JSON Lines out. What is already out is not done again."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from offspec.errors import OffspecError, StorageError, UsageError

from .terminal import is_watched

if TYPE_CHECKING:
    from offspec.engine import Prompt

Answer = dict[str, Any]
OWN_KEYS = frozenset(
    ("line", "settings", "model", "draft", "prompt_token_ids", "token_ids", "text", "finish_reason", "seed", "stats")
)


@dataclass(frozen=True)
class Task:
    """One line of the file: the object in it, which stands in the answer too."""

    line: int
    content: Mapping[str, Any]

    @property
    def prompt(self) -> str | list[dict[str, str]]:
        found: str | list[dict[str, str]] = self.content.get("prompt", self.content.get("messages"))
        return found


def read_tasks(source: Path) -> tuple[list[Task], dict[int, str]]:
    """The tasks of a JSON Lines file, and what is wrong with the lines that are none, by their numbers."""
    tasks, errors = list[Task](), dict[int, str]()
    for number, line in enumerate(source.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line.decode("utf-8"))
            _check(content)
        except UnicodeDecodeError as exc:
            errors[number] = f"not UTF-8 text (byte {exc.start})"
        except (ValueError, RecursionError) as exc:
            errors[number] = f"not JSON ({exc})"
        except UsageError as exc:
            errors[number] = str(exc)
        else:
            tasks.append(Task(number, content))
    return tasks, errors


class Batch:
    """The tasks of a prompt file, and the file that takes the answers (None: standard output)."""

    def __init__(self, source: Path, output: Path | None, settings: Mapping[str, Any]) -> None:
        """settings: what the answers depend on, beside the prompts. Raises UsageError where the output has others."""
        self.source, self.output, self._settings = source, output, settings
        self.tasks, self.errors = read_tasks(source)
        self._done = {} if output is None else self._read_done(output)
        for task in self.tasks:
            if task.line in self._done and not self._is_answer(self._done[task.line], task):
                raise UsageError(
                    f"{output} answers another prompt, or with other settings, at line {task.line} of {source}: "
                    "give another --output"
                )

    @property
    def open_tasks(self) -> list[Task]:
        return [task for task in self.tasks if task.line not in self._done]

    def run(self, answer: Callable[[Prompt], Answer], *, quiet: bool) -> None:
        """Answer what is open; a task that fails is told, and the others are done. Raises OffspecError at the end."""
        for line, error in self.errors.items():
            self._tell(line, error)
        tasks, shows = self.open_tasks, is_watched() and not quiet and self.output is not None
        with _Sink(self.output) as sink:
            for number, task in enumerate(tasks, 1):
                if shows:
                    click.echo(f"\r\x1b[Kprompt {number} of {len(tasks)}", err=True, nl=False)
                try:
                    found = answer(task.prompt)
                except OffspecError as exc:
                    self.errors[task.line] = str(exc)
                    self._tell(task.line, str(exc))
                    continue
                sink.write({"line": task.line, **task.content, **found, "settings": dict(self._settings)})
        if shows:
            click.echo("\r\x1b[K", err=True, nl=False)
        if self.errors:
            lines = ", ".join(map(str, sorted(self.errors)))
            again = "" if self.output is None else "; correct them and give the same command again"
            raise OffspecError(
                f"{len(self.errors)} of {len(self.errors) + len(tasks) + len(self._done)} lines of {self.source} could not be "
                f"done ({lines}){again}"
            )

    def _tell(self, line: int, error: str) -> None:
        click.echo(f"offspec: {self.source}, line {line}: {' '.join(error.split())}", err=True)

    def _read_done(self, output: Path) -> dict[int, Answer]:
        """What an earlier run wrote; half a line at the end, where it was stopped, is taken away."""
        if not output.exists():
            return {}
        content = output.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        done: dict[int, Answer] = {}
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line)
                done[record["line"]] = record
            except (ValueError, TypeError, KeyError) as exc:
                raise UsageError(f"{output}, line {number} is no answer of offspec: give another --output") from exc
        if len(whole) < len(content):
            os.truncate(output, len(whole))
        return done

    def _is_answer(self, record: Answer, task: Task) -> bool:
        same = all(key in record and record[key] == value for key, value in task.content.items())
        return same and record.get("settings") == json.loads(json.dumps(self._settings))


class _Sink:
    """Takes answers, each written whole and at once."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def __enter__(self) -> _Sink:
        if self._path is not None:
            try:
                self._file = self._path.open("ab")
            except OSError as exc:
                raise StorageError(f"{self._path} cannot be written: {exc.strerror}") from exc
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, answer: Answer) -> None:
        line = json.dumps(answer) + "\n"
        if self._file is None:
            sys.stdout.write(line)
            sys.stdout.flush()
        else:
            self._file.write(line.encode())
            self._file.flush()


def _check(content: Any) -> None:
    """Raises UsageError for an object that is no task."""
    if not isinstance(content, dict) or ("prompt" in content) == ("messages" in content):
        raise UsageError('not an object with either "prompt" or "messages"')
    if "prompt" in content and not (isinstance(content["prompt"], str) and content["prompt"]):
        raise UsageError('"prompt" is not a text')
    messages = content.get("messages", [{"role": "", "content": ""}])
    is_chat = isinstance(messages, list) and all(
        isinstance(m, dict) and m.keys() == {"role", "content"} and all(isinstance(part, str) for part in m.values())
        for m in messages
    )
    if not is_chat or not messages:
        raise UsageError('"messages" is not a list of {"role": ..., "content": ...}')
    if taken := sorted(content.keys() & OWN_KEYS):
        raise UsageError(f"{taken[0]!r} is a key of the answer; give it another name")
