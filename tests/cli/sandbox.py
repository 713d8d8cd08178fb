"""A folder in which the commands of README and docs run as they stand there.

Names of models are names of tiny ones there, files that commands read are there, and settings of the environment keep
texts short. What is replaced is in the tables below and nowhere else.
"""

from __future__ import annotations

import json
import shutil
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from offspec.loaders.machine.hardware import Rates

from ..pages import Command, commands
from ..pair import SPECIALS, TEMPLATE, VOCAB_SIZE, build_pair
from .conftest import Offspec, Result

NUM_LAYERS = 10  # of models with exit layers after 8
# Names in the pages → what lies there.
MODELS = {
    **dict.fromkeys(("Llama-3.1-70B-Instruct", "Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"), "target"),
    **dict.fromkeys(("Llama-3.1-8B", "layerskip-llama3-8B"), "deep"),
    **dict.fromkeys(
        ("Qwen2.5-32B-Instruct", "Qwen/Qwen2.5-14B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "MODEL"), "target"
    ),
    **dict.fromkeys(("Llama-3.2-1B-Instruct", "Llama-3.2-1B", "Qwen/Qwen2.5-0.5B-Instruct", "DRAFT"), "draft"),
    "meta-llama/Llama-3.2-1B-Instruct": "draft",
    "Qwen3.5-27B": "mtp",
    "models/target": "target",
    "my-draft": "draft",
    "Llama-3.3-70B": "target",
    **dict.fromkeys(("Llama-3.1-70B-nf4", "Llama-3.3-70B-nf4"), "nf4"),
    "EAGLE3-LLaMA3.1-Instruct-8B": "head",
    "builtin-packed": "packed",
    "SmolLM2-135M-Instruct": "other vocabulary",
    "tiiuae/falcon-7b-instruct": "falcon",
    **dict.fromkeys(("Llama-3.1-8B-Instruct-Q4_K_M.gguf", "Llama-3.1-70B-Instruct-Q4_K_M.gguf", "model.gguf"), "gguf"),
    "SmolLM2.gguf": "gguf",
}
# Words that are no names of files, or name what would be downloaded.
WORDS = {"smollm2": "SmolLM2.gguf", "org/name:Q4_K_M": "model.gguf", "FOLDER": "models", "N": "1"}
FILES = {
    "prompts.jsonl": '{"prompt": "def area("}\n{"messages": [{"role": "user", "content": "Hello"}]}\n',
    "question.txt": "Why is the sky blue?\n",
    "person.json": '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}',
    "answer.gbnf": 'root ::= "yes" | "no" [a-z]*\n',
    "notes.txt": "def area(width, height):\n    return width * height\n",
}
SETTINGS = {
    "DEVICE": "cpu",
    "MAX_NEW_TOKENS": "4",
    "MAX_PROMPTS": "1",
    "VERIFY_TEMPERATURES": "0",
    "VERIFY_SCORINGS": "coupled",
    "VERIFY_BUDGETS": "4",
    "BENCH_PROMPTS": "prompts.jsonl",
    "REPEATS": "0+1",
    "BENCH_BUDGETS": "4",
    "STEPS": "1",
    "NUM_TEXTS": "16",
    "TEXT_TOKENS": "8",
}
# What `plan` and `doctor` else measure for seconds.
RATES = Rates(disk_bytes_per_s=2e9, matmul_flops={1: 1e10}, sources={"disk_bytes_per_s": "2 readers"})
# A command, as it begins → what has to run before it.
BEFORE = {
    "run builtin --draft self": ["distill", "builtin", "--exit-layer", "2"],
    "run ./Llama-3.1-8B --draft self": ["distill", "./Llama-3.1-8B", "--exit-layer", "8"],
    "run ./Qwen2.5-32B-Instruct --draft head": ["distill", "./Qwen2.5-32B-Instruct", "--head", "medusa"],
}
# Values of flags in place of what a page says.
SHORT = {"--max-new-tokens": "4", "--budgets": "4", "--max-prompts": "1", "--texts": "1,2", "--num-answers": "2"}
TYPED = b"Why is the sky blue?\n/stats\n"  # at the prompt of `chat`


class Shelf:
    """What the names in MODELS stand for; each is made when a command first names it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pair = build_pair(folder, 4, max_position_embeddings=32768)

    def get(self, kind: str) -> Path:
        path = self._folder / kind
        if not path.exists():
            _MAKERS[kind](self._pair.target, path)
        return path


def _build_deep(source: Path, folder: Path) -> None:
    (pair := folder.with_suffix(".pair")).mkdir()
    build_pair(pair, NUM_LAYERS, max_position_embeddings=32768).target.rename(folder)


def _convert(source: Path, folder: Path) -> None:
    from offspec import convert

    convert(source, folder)


def _copy_builtin_draft(source: Path, folder: Path) -> None:
    from offspec import builtin

    shutil.copytree(builtin.path("draft"), folder)


def _pack_builtin_target(source: Path, folder: Path) -> None:
    from offspec import ConvertParams, builtin, convert

    convert(builtin.path("target"), folder, ConvertParams("bf16-packed"))


def write_gguf(source: Path, file: Path, kinds: Mapping[str, str] = MappingProxyType({})) -> None:
    """A checkpoint as a GGUF file. kinds: see `gguf_models.write_model`."""
    from safetensors.torch import load_file

    from ..gguf_models import write_model

    model = json.loads((source / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    tokens += [f"<unused{i}>" for i in range(VOCAB_SIZE - len(tokens))]
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    vocabulary = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    config = json.loads((source / "config.json").read_text()) | {"tie_word_embeddings": False}
    config["rope_parameters"] = {"rope_theta": config["rope_theta"]}
    write_model(file, config, load_file(source / "model.safetensors"), kinds, vocabulary)


def _write_head(source: Path, folder: Path) -> None:
    from ..offspec.model.heads.head_twins import EAGLE_CONFIG, eagle_tensors, write_folder

    write_folder(folder, EAGLE_CONFIG, eagle_tensors(3))


def _write_falcon(source: Path, folder: Path) -> None:
    import torch
    from transformers import FalconConfig, FalconForCausalLM

    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, eos_token_id=0
    )
    FalconForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)


def _build_mtp(source: Path, folder: Path) -> None:
    from ..mtp_models import write_model

    (pair := folder.with_suffix(".pair")).mkdir()
    write_model(pair, "qwen").rename(folder)


_MAKERS: dict[str, Callable[[Path, Path], None]] = {
    "deep": _build_deep,
    "nf4": _convert,
    "packed": _pack_builtin_target,
    "gguf": write_gguf,
    "falcon": _write_falcon,
    "head": _write_head,
    "other vocabulary": _copy_builtin_draft,
    "mtp": _build_mtp,
}


class Sandbox:
    """Runs a command of the pages in a folder of its own."""

    def __init__(self, folder: Path, shelf: Shelf, offspec: Offspec, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._shelf, self._offspec, self._patch = folder, shelf, offspec, patch
        patch.chdir(folder)
        for name, value in SETTINGS.items():
            patch.setenv(f"OFFSPEC_{name}", value)
        for kind in ("DATA", "STATE", "CACHE"):  # exit layers and shadows are this test's own
            patch.setenv(f"XDG_{kind}_HOME", str(folder / kind.lower()))
        for name, content in FILES.items():
            (folder / name).write_text(content)
        patch.setattr("offspec.tools.forecast.measure_rates", lambda *_, **__: RATES)
        patch.setattr("offspec.tools.diagnosis.measure_rates", lambda *_, **__: RATES)
        patch.setattr("offspec.tools.diagnosis.measure_products", lambda dtype: ())

    def run(self, command: Command) -> Result:
        args = [
            SHORT.get(before, WORDS.get(word, word))
            for before, word in zip(("", *command.args), command.args, strict=False)
        ]
        self._put_models(args)
        for assignment in command.environment:
            self._patch.setenv(*assignment.split("=", 1))
        for beginning, before in BEFORE.items():
            if " ".join(args).startswith(beginning):
                assert self._offspec(*before).code == 0
        if args[0] == "serve":
            return self._serve(args)
        if any(str(arg).endswith(".svg") for arg in args):
            pytest.importorskip("matplotlib")
        stdin = TYPED if args[0] == "chat" else b""
        if command.is_piped:
            stdin = b"- a\n+ b\n"
        elif command.stdin is not None:
            stdin = (self._folder / command.stdin).read_bytes()
        elif args[0] == "run" and "--prompt-file" not in args:
            stdin = None  # a terminal: the prompt is all there is
        result = self._offspec(*args, stdin=stdin)
        for flag in ("--output", "--save", "--out", "--learn-file"):
            if flag in args:
                assert Path(args[args.index(flag) + 1]).stat().st_size > 0, flag
        return result

    def _put_models(self, args: list[str]) -> None:
        """Those that the command names, except what it makes."""
        made = args[2:3] if args[0] == "quantize" else args[args.index("--out") + 1 :][:1] if "--out" in args else []
        if "models" in args:
            args = [*args, "models/target"]
        for word in set(args) - set(made):
            name = word.removeprefix("./")
            if name in MODELS:
                (self._folder / name).parent.mkdir(exist_ok=True)
                (self._folder / name).symlink_to(self._shelf.get(MODELS[name]))

    def _serve(self, args: list[str]) -> Result:
        """Start the server, send the request that usage.md shows to it, and stop it."""
        (curl,) = (command for command in commands() if command.words[0] == "curl")
        url, body = curl.words[1], curl.words[curl.words.index("-d") + 1]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._patch.setenv("OFFSPEC_PORT", str(port))
        with _asked(url.replace(":8080", f":{port}"), body.encode(), self._patch) as answers:
            result = self._offspec(*args)
        assert answers, result
        assert json.loads(answers[0])["choices"][0]["message"]["content"], answers
        return result


@contextmanager
def _asked(url: str, body: bytes, patch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """Meanwhile send a request as soon as the server listens, and then end the server. Yields the answers' list."""
    import uvicorn

    servers, answers, is_over = list[Any](), list[bytes](), threading.Event()
    begin = uvicorn.Server.__init__

    def remember(server: Any, config: Any) -> None:
        begin(server, config)
        servers.append(server)

    def ask() -> None:
        while not is_over.wait(0.05):
            if servers and servers[0].started:
                with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
                    answers.append(answer.read())
                break
        if servers:
            servers[0].should_exit = True

    patch.setattr(uvicorn.Server, "__init__", remember)
    client = threading.Thread(target=ask)
    client.start()
    try:
        yield answers
    finally:
        is_over.set()
        client.join(60)


def check_runs(command: Command, sandbox: Sandbox) -> None:
    """The command succeeds, and says something: on standard output, or in the file that `--output` names."""
    result = sandbox.run(command)
    assert result.code == 0, result.err
    assert result.out.strip() or "--output" in command.words, result.err
