"""Texts that repeat their prompt: edited functions and outlines with quotes, from the held-out standard library.

The built-in target is too small to follow such a request. So rules generate the answer, and `replay` uses it like any
recording of the target. The texts are greedy, because there is no noise in them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator

from offspec import Engine, SamplingParams

from .replay import Recording

MODULES = ("random", "shlex", "ftplib", "bdb", "getpass", "lzma", "pickle", "_compression")  # held out from the pair
FEWEST_LINES, MOST_LINES = 15, 70

Text = tuple[str, str]  # prompt, answer


def edits() -> Iterator[Text]:
    """Functions and classes, and the same with their most frequent name replaced."""
    for source, node in _definitions():
        names = Counter(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load))
        names.update(n.arg for n in ast.walk(node) if isinstance(n, ast.arg))
        names.pop("self", None)
        if names:
            old = names.most_common(1)[0][0]
            edited = re.sub(rf"\b{old}\b", f"the_{old}", source)
            yield f"{source}\n\n# The same with {old} renamed to the_{old}.\n\n", edited


def outlines() -> Iterator[Text]:
    """Classes, and a list of their methods with the first line of each docstring."""
    for source, node in _definitions(most_lines=4 * MOST_LINES):
        methods = [n for n in node.body if isinstance(n, ast.FunctionDef) and ast.get_docstring(n)]
        if len(methods) >= 3:
            lines = [
                f'- {m.name}({ast.unparse(m.args)}): "{(ast.get_docstring(m) or "").splitlines()[0]}"\n'
                for m in methods
            ]
            yield f"{source}\n\n# What {node.name} can do.\n\n", "".join(lines)


KINDS: dict[str, Callable[[], Iterator[Text]]] = {"edit": edits, "outline": outlines}


def recordings(engine: Engine, kind: str, count: int, max_new_tokens: int) -> list[Recording]:
    """The first `count` texts of a kind that fit the context, as recordings of the target."""
    found: list[Recording] = []
    for prompt, answer in KINDS[kind]():
        ids, said = engine.encode(prompt), engine.encode(answer)[:max_new_tokens]
        if len(ids) + len(said) < engine.max_context:
            found.append(Recording(ids, said, len(said), SamplingParams(len(said), seed=0, ignore_eos=True)))
        if len(found) == count:
            break
    return found


def _definitions(most_lines: int = MOST_LINES) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """The modules' functions and classes of moderate length: source and syntax."""
    for name in MODULES:
        try:
            whole = inspect.getsource(importlib.import_module(name))
        except ImportError:  # a Python that was built without it
            continue
        for node in ast.parse(whole).body:
            is_one = isinstance(node, ast.FunctionDef | ast.ClassDef)
            if is_one and FEWEST_LINES <= (node.end_lineno or 0) - node.lineno < most_lines:
                yield ast.get_source_segment(whole, node) or "", node
