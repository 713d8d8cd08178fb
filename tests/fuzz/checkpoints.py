"""Damaged checkpoints, by number: case N is the same everywhere. Each gives an error of offspec's or the right text.

Right is the text of the undamaged files, as far as the context goes that config.json names, or what transformers makes
of the damaged ones (a vocabulary may change and still be one). A finding is what takes longer than LONGEST_S, or
MOST_BYTES more memory than before, or raises anything else.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from offspec import Engine, SamplingParams, SpeculationParams
from offspec.errors import OffspecError
from offspec.loaders.machine.hardware import Rates
from offspec.stats import peak_host_bytes
from offspec.text import chat_template

from .damage import peak_bytes_anew

Result = TypeVar("Result")
LONGEST_S, MOST_BYTES = 20, 2**29
PROMPT, CHAT = "def area(", [{"role": "user", "content": "hi, what is <|end|> this?"}]
PARAMS, PLAIN = SamplingParams(6, ignore_eos=True), SpeculationParams(0)
RIGHT = ("refused", "same", "cut by the context", "as transformers")
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "added_tokens.json")
NO_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "header",
)  # say nothing of what is encoded
FILES = (*JSON_FILES, "model.safetensors")
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**63, 2**64 + 8, -(2**63), 10**400, 1e300, -1e300, 1e-300, 0.5),
    *("", "x", "\ud800", "a" * 100_000, "<|end|>", "float16", "</s>", [], {}, [[]], [None] * 3, {"a": 1}, "NaN"),
)
TEMPLATES = (
    *(
        "{{ 'a' * 10**10 }}",
        "{{ 'a' | center(10**10) }}",
        "{{ [1] | batch(10**10, 'a') | list }}",
        "{{ lipsum(n=10**9) }}",
    ),
    *("{% if %}", "{{ messages[9].content }}", "{{ raise_exception('no') }}", "{{ ''.__class__ }}", "{{ 1 / 0 }}", ""),
    "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% for m in messages %}<|user|>{{ m.content | upper }}<|end|>{% endfor %}",
)


@dataclass
class Said:
    """Token ids of a prompt and its text, why the text ended, and token ids of a chat where the template takes it."""

    prompt: list[int]
    text: list[int]
    finish_reason: str | None
    chat: list[int]

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.text


@dataclass
class Findings:
    """outcomes: how many cases ended how. wrong: cases that must not end so, with what was found.

    most_bytes: the most that a case added to the peak of the process's memory. longest_s: the longest case.
    also_right: outcomes that are right beside RIGHT.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    most_bytes: int = 0
    longest_s: float = 0.0
    also_right: tuple[str, ...] = ()

    def add(self, case: str, outcome: str, grown_bytes: int, seconds: float) -> None:
        self.most_bytes, self.longest_s = max(self.most_bytes, grown_bytes), max(self.longest_s, seconds)
        self.outcomes[kind := outcome.partition(":")[0]] += 1
        if kind not in (*RIGHT, *self.also_right):
            self.wrong.append(f"{case}: {outcome}")
        if grown_bytes > MOST_BYTES:
            self.wrong.append(f"{case}: {grown_bytes >> 20} MiB of memory")


@contextmanager
def quick_loading() -> Iterator[None]:
    """Short waits for templates, and no measured rates, while the body loads many models."""
    worker = chat_template.Worker(deadline_s=1)  # nothing is learnt from waiting longer
    rates = Rates()  # measuring them takes a third of a second, and they are no part of the text
    with (
        closing(worker),
        patch.object(chat_template, "WORKER", worker),
        patch("offspec.loading.measure_quick_rates", lambda *_: rates),
    ):
        yield


def run_cases(numbers: range, sound: Path, folder: Path) -> Findings:
    """sound: an undamaged checkpoint. folder: where damaged copies are made, one at a time."""
    with quick_loading():
        return _run_cases(numbers, sound, folder)


def _run_cases(numbers: range, sound: Path, folder: Path) -> Findings:
    findings, expected = Findings(), said_by(sound)
    for number in numbers:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sound, folder)
        what = damage(folder, random.Random(number))
        began, before = time.perf_counter(), peak_bytes_anew()
        outcome = found if isinstance(found := tried(folder), str) else ""
        grown, seconds = peak_host_bytes() - before, time.perf_counter() - began
        if isinstance(found, Said):  # compared after the measurement, which is of offspec alone
            outcome = _judged(folder, found, expected)
            if what.startswith(NO_TEXT_FILES) and found.chat not in (expected.chat, []):
                outcome = f"another chat: {found.chat}, not {expected.chat}"
        findings.add(f"case {number} ({what})", outcome, grown, seconds)
    return findings


def damage(folder: Path, chance: random.Random) -> str:
    """Damage one file; returns which and how."""
    kinds: tuple[Callable[[Path, random.Random], str], ...] = (
        _value,
        _value,
        _value,
        _bytes,
        _special_file,
        damaged_header,
        _template,
    )
    return chance.choice(kinds)(folder, chance)


def _value(folder: Path, chance: random.Random) -> str:
    file = folder / chance.choice(JSON_FILES)
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    known = list(places(content))
    if known and chance.random() < 0.9:
        holder, key = chance.choice(known if chance.random() < 0.3 else known[:60])
        if chance.random() < 0.2:
            del holder[key]
        else:
            holder[key] = chance.choice(VALUES)
    else:
        key = chance.choice(("sliding_window", "head_dim", "rope_scaling", "eos_token", "added_tokens_decoder", "x"))
        content[key] = chance.choice(VALUES)
    file.write_text(json.dumps(content), encoding="utf-8")
    return f"{file.name}: {key}"


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    keys = content.keys() if isinstance(content, dict) else range(len(content))
    for key in list(keys):
        yield content, key
        if isinstance(content[key], (dict, list)):
            yield from places(content[key])


def _bytes(folder: Path, chance: random.Random) -> str:
    file = folder / chance.choice([name for name in FILES[:-1] if (folder / name).exists()])
    content = bytearray(file.read_bytes())
    at = chance.randrange(len(content))
    kind = chance.choice(("cut", "random", "deep", "doubled"))
    if kind == "cut":
        del content[at:]
    elif kind == "random":
        content[at : at + 8] = chance.randbytes(8)
    elif kind == "deep":
        content[at:at] = b"[" * 100_000
    else:
        content = content * 2
    file.write_bytes(content)
    return f"{file.name}: {kind} at {at}"


def _special_file(folder: Path, chance: random.Random) -> str:
    file, kind = (
        folder / chance.choice(FILES),
        chance.choice(("pipe", "/dev/zero", "/dev/null", "folder", "gone", "huge")),
    )
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "huge":
        with file.open("wb") as opened:
            opened.truncate(2**32)
    elif kind != "gone":
        file.symlink_to(kind)
    return f"{file.name}: {kind}"


def damaged_header(folder: Path, chance: random.Random) -> str:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    holder, key = chance.choice(list(places(header)))
    kind = chance.choice(("value", "length", "bytes", "cut"))
    if kind == "value":
        holder[key] = chance.choice(VALUES)
    changed = bytearray(json.dumps(header).encode() if kind == "value" else content[8 : 8 + length])
    if kind == "bytes":
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    stated = chance.choice((0, 1, 2**24, 2**63, length - 1)) if kind == "length" else len(changed)
    whole = struct.pack("<Q", stated) + bytes(changed) + content[8 + length :]
    file.write_bytes(whole[: chance.randrange(len(whole))] if kind == "cut" else whole)
    return f"header: {kind} {key if kind == 'value' else ''}"


def _template(folder: Path, chance: random.Random) -> str:
    template = chance.choice(TEMPLATES)
    (folder / "chat_template.jinja").write_text(template + chance.choice(("", "{{ messages }}")))
    return f"template: {template}"


def said_by(folder: Path) -> Said:
    engine = Engine.load(str(folder), draft="none", device="cpu", dtype="fp32")
    try:
        prompt = engine.encode(PROMPT)
        steps = list(engine.generate(prompt, PARAMS, PLAIN))
        try:
            chat = engine.encode(CHAT)  # type: ignore[arg-type]
        except OffspecError:
            chat = []
        return Said(prompt, [token for step in steps for token in step.token_ids], steps[-1].finish_reason, chat)
    finally:
        engine.close()


def tried(folder: Path) -> Said | str:
    return outcome_of(lambda: said_by(folder))


def outcome_of(load: Callable[[], Result]) -> Result | str:
    """What a model said; or `refused`, or what is wrong with its error."""
    try:
        with deadline():
            return load()
    except OffspecError as exc:
        return "refused" if len(str(exc).splitlines()) == 1 else f"more than a line: {exc}"
    except BaseException as exc:  # noqa: BLE001 (a panic of Rust's code is no Exception)
        return f"foreign: {type(exc).__name__}: {str(exc)[:200]}"


def _judged(folder: Path, found: Said, expected: Said) -> str:
    if found.ids == expected.ids:
        return "same"
    if found.prompt == expected.prompt and found.text == expected.text[: len(found.text)]:
        context = json.loads((folder / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
        if found.finish_reason == "length" and len(found.ids) == context:
            return "cut by the context"
    if found.ids == _transformers(folder):
        return "as transformers"
    return f"another text: {found.ids} ({found.finish_reason}), not {expected.ids}"


def _transformers(folder: Path) -> list[int] | str:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        ids = tokenizer(PROMPT, return_tensors="pt").input_ids
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
        for _ in range(PARAMS.max_new_tokens):
            ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), dim=1)
        return list(map(int, ids[0]))
    except Exception as exc:  # noqa: BLE001 (it says what it cannot take in its own way)
        return f"{type(exc).__name__}: {exc}"


@contextmanager
def deadline() -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"longer than {LONGEST_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
