"""The commands that README and the pages of docs/ and its folders show."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# The log tells what was tried when; its commands are of their day.
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "offspec/builtin/README.md")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if page.name != "LOG.md"),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
ASSIGNMENT = re.compile(r"[A-Z_]+=.*")
ENDS = {"&&", "||", ";", "&", "|", "\n"}
# First words by which a command is told from a formula or a name.
PROGRAMS = (
    "offspec",
    "python",
    "python3",
    "pip",
    "pytest",
    "curl",
    "git",
    "scripts/check",
    "scripts/fuzz",
    "scripts/card",
    "for",
)
# Commands that no test runs as they stand, as they begin → who does, or why nobody does.
ELSEWHERE = {
    **dict.fromkeys(("python3 -m venv", "python -m venv", ". .venv/bin/activate"), ".ci/run"),
    "pip install": ".ci/run",
    **dict.fromkeys(("scripts/check", "pytest", "python -m pytest"), ".ci/run"),
    "scripts/fuzz": "tests/fuzz",
    "git clone": "the checkout is there",
    "git diff": "stands for any text",
    "curl": "tests/cli/sandbox.py",
    # These need a cluster.
    **dict.fromkeys(("ray start", "offspec run ~/models/Llama-3.1-70B-nf4"), "tests/cli/test_ray_batch.py"),
    **dict.fromkeys(("for stage in", "do python scripts/train_builtin.py", "done"), "trains for hours"),
    "serve run": "tests/cli/server/test_ray_serve.py",
    "offspec tokens": "tests/house/test_docs.py",
    "python -m tests.offspec.schemas": "tests/offspec/test_constrained_texts.py",
    "python -m tests.cli.server.picture_page": "tests/cli/server/test_page.py",
    "python -m tests.fuzz.requests": "tests/fuzz/test_requests.py",
    "lm_eval": "tests/cli/server/test_clients.py",
    "python -m benchmarks.grow FOLDER --shape 7b --exit": "tests/benchmarks/test_grow.py",
    "offspec run TARGET Compose": "tests/offspec/drafts/test_self_draft.py",
    **dict.fromkeys(
        tuple(f"offspec distill {target} --head" for target in ("builtin", "HYBRID", "TARGET.gguf")),
        "tests/offspec/research/test_heads.py",
    ),
    "offspec distill TARGET.gguf --exit-layer": "tests/offspec/research/test_distillation.py",
    "python -m benchmarks.drafts.beside_llama_cpp": "tests/offspec/checkpoints/test_gguf_heads.py",
    "offspec bench TARGET --draft DRAFT --ram": "tests/cli/test_bench.py",
    **dict.fromkeys(("_OFFSPEC_COMPLETE=fish_source offspec", "source"), "tests/cli/test_completion.py"),
    "python -m benchmarks.peers": "tests/benchmarks/test_peers.py",
    "python -m benchmarks.mixtures": "tests/benchmarks/test_mixtures.py",
    "python -m benchmarks.agent_replay": "tests/benchmarks/test_agent_replay.py",
    "python -m benchmarks.real": "tests/benchmarks/test_real.py",
    "python -m benchmarks.scheduling.against_plain": "tests/benchmarks/test_against_plain.py",
    "python -m benchmarks.real.quality": "tests/benchmarks/test_real_quality.py",
    **dict.fromkeys(
        ("python -m benchmarks.card", "scripts/card", "python3 scripts/card"), "tests/benchmarks/test_card.py"
    ),
    "python benchmarks/streaming.py measure": "needs control groups and a checkpoint of 13 GB",
    "python -m benchmarks.exactness texts": "tests/offspec/test_exact_texts.py",
    "offspec plan Qwen/Qwen2.5-32B-Instruct": "tests/offspec/drafts/test_layer_drafts.py",
    "python scripts/record_terminal.py": "tests/cli/test_transcript.py",
}


@dataclass(frozen=True)
class Command:
    """A command of a shell line: its words without assignments before them and redirections.

    page: where it stands. environment: the assignments. is_piped: standard input is another command's output.
    stdin: the file that it reads instead.
    """

    page: str
    words: tuple[str, ...]
    environment: tuple[str, ...] = ()
    is_piped: bool = False
    stdin: str | None = None

    def __str__(self) -> str:
        return " ".join((*self.environment, *self.words))

    def begins(self, beginning: str) -> bool:
        """Whether the command starts with these words, with its environment or without."""
        lines = (str(self), " ".join(self.words))
        return any(f"{line} ".startswith(f"{beginning} ") for line in lines)

    @property
    def program(self) -> str:
        """`offspec`, `benchmark` for a module or script that measures, or "" for what neither runs."""
        if any(map(self.begins, ELSEWHERE)):
            return ""
        is_benchmark = " ".join(self.words).startswith(("python -m benchmarks.", "python benchmarks/"))
        return "benchmark" if is_benchmark else self.words[0]

    @property
    def args(self) -> list[str]:
        return list(self.words[1:])


def blocks(page: Path, language: str) -> list[str]:
    return [content for name, content in FENCE.findall(page.read_text(encoding="utf-8")) if name == language]


def shell_lines(page: Path) -> Iterator[str]:
    """Lines of sh blocks, and commands in indented blocks and between backticks."""
    for content in blocks(page, "sh"):
        yield from content.replace("\\\n", " ").splitlines()
    outside = FENCE.sub("", page.read_text(encoding="utf-8")).replace("\\\n", " ")
    indented = [line.strip() for line in outside.splitlines() if line.startswith("    ")]
    spans = [" ".join(span.split()) for span in SPAN.findall(outside)]
    yield from (line for line in indented if _is_command(line))
    yield from (span for span in spans if _is_command(span) and not _is_name(span))


def _is_command(line: str) -> bool:
    words = line.split()
    while words and ASSIGNMENT.fullmatch(words[0]):
        words.pop(0)
    return words[:1] != [] and words[0] in PROGRAMS


def _is_name(span: str) -> bool:
    """Whether this is a program, a command or a flag of one, without arguments: `offspec plan --format`."""
    first, *others = span.split()
    return "/" not in first and (len(others) < 2 or (len(others) == 2 and others[1].startswith("--")))


def commands_of(line: str, page: str = "") -> Iterator[Command]:
    """The commands of a line of shell: `FOO=1 offspec run … < file && git diff | offspec chat … # comment`."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    tokens, found = [*lexer, "\n"], Command(page, ())
    while tokens:
        token = tokens.pop(0)
        if token == "<":
            found = replace(found, stdin=tokens.pop(0))
        elif token == ">":
            tokens.pop(0)
        elif token in ENDS:
            if found.words:
                yield found
            found = Command(page, (), is_piped=token == "|")
        elif not found.words and ASSIGNMENT.fullmatch(token):
            found = replace(found, environment=(*found.environment, token))
        else:
            found = replace(found, words=(*found.words, token))


@cache
def commands() -> list[Command]:
    """All of them, each once: by the page where it stands first."""
    found = [
        command
        for page in PAGES
        for line in shell_lines(page)
        for command in commands_of(line, str(page.relative_to(ROOT)))
    ]
    firsts: dict[tuple[str, ...], Command] = {}
    for command in found:
        firsts.setdefault((*command.environment, *command.words, command.stdin or ""), command)
    return list(firsts.values())
