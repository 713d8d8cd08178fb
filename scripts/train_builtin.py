"""Train the built-in pair: tokenizer, target and draft, from the Python standard library's own source.

    python scripts/train_builtin.py data      # corpus, tokenizer, token files      (~2 minutes)
    python scripts/train_builtin.py target    # 7.3M parameters, next-token loss     (about 3 hours on 2 shared cores)
    python scripts/train_builtin.py chat      # the target learns to take a function's name from the request   (~10
        minutes)
    python scripts/train_builtin.py samples   # text that the target writes, for the draft to learn from   (~20 minutes)
    python scripts/train_builtin.py labels    # what the target thinks at every place of that and of the text   (~15
        minutes)
    python scripts/train_builtin.py draft     # 0.9M parameters, text first, then distilled (2310.08461)   (~100
        minutes)
    python scripts/train_builtin.py export    # bf16 checkpoints and held-out prompts into offspec/builtin/
    python scripts/train_builtin.py hybrid    # the target with delta nets in half of its layers, into --work   (~40
        minutes on a core); it is not shipped

Everything is drawn from the standard library of the interpreter that runs this script (the committed pair: CPython
3.11.7), whose licence (PSF-2.0) allows it. Modules are held out by name, a package together with its tests, so that
nothing of a held-out module is ever trained on; the benchmarks' prompts come from those modules only. Each stage is
seeded and writes to --work; an interrupted training resumes from its last checkpoint.

Needs the `train` extra (transformers is the trainer's model; offspec's own decoder only runs inference).
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import random
import re
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from offspec.model.names import HEAD

VOCAB_SIZE = 4096
CONTEXT = 2048
SPECIALS = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
EOT, SYSTEM, USER, ASSISTANT, END = SPECIALS
SYSTEM_PROMPT = "You write short, clear Python functions."
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
SHAPES = {
    # Hidden 256 and head size 32 are a power of four below 4096 and 128: a grown copy computes the same in bf16.
    "target": {
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "intermediate_size": 768,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "draft": {
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "intermediate_size": 352,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


# ---------------------------------------------------------------------------------------------------------- corpus


@dataclass(frozen=True)
class Source:
    """One module's text. `group` is the top-level module it belongs to or tests: the unit that is held out."""

    path: str
    text: str
    group: str
    is_test: bool


def group_of(relative: Path) -> str:
    """The module a file is about: 'json/decoder.py', 'test/test_json/x.py' and 'test/test_json.py' are all 'json'."""
    parts = list(relative.parts)
    if parts[0] == "test" and len(parts) > 1:
        parts = parts[1:]
    name = parts[0].removesuffix(".py").lower()
    return name.removeprefix("test_").removeprefix("_")


def is_held_out(group: str) -> bool:
    """About one module in twenty-five, by a hash of its name."""
    return hashlib.sha256(f"offspec:{group}".encode()).digest()[0] % 25 == 0


def sources() -> Iterator[Source]:
    """The standard library's modules, without tables (charmaps, topics), grammars' test data and site-packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = re.compile(
        r"site-packages|/pydoc_data/|/encodings/(?!__init__|aliases|utf_|idna|punycode)|lib2to3/tests/data|"
        r"/_sysconfigdata"
    )
    for path in sorted(root.rglob("*.py")):
        if skipped.search(path.as_posix()) or not 400 < path.stat().st_size < 250_000:
            continue
        relative = path.relative_to(root)
        try:
            text = path.read_text(encoding="utf-8")
            ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        if len(text) > 0 and sum(c.isdigit() for c in text) / len(text) > 0.15:
            continue
        is_test = "test" in relative.parts[:-1] or "tests" in relative.parts[:-1] or "idle_test" in relative.parts
        yield Source(relative.as_posix(), text, group_of(relative), is_test)


def request_of(name: str, first_line: str, docstring: str | None, rng: random.Random) -> str:
    """What a user would type to get this function: its docstring's summary, its name, or the start of its code."""
    forms = [f"def {name}(", first_line, f"Complete this:\n{first_line}"]
    if docstring:
        summary = " ".join(docstring.split("\n\n")[0].split())[:300]
        lowered = summary[0].lower() + summary[1:] if summary[:2].istitle() else summary
        wordings = [
            "Write a function {name}. {summary}",
            "{summary}",
            "Write {name}: {lowered}",
            "Please write a Python function that does this: {summary}",
        ]
        forms = [w.format(name=name, summary=summary, lowered=lowered) for w in wordings] * 2 + forms
    return rng.choice(forms)


def chat_turns(source: Source, rng: random.Random) -> Iterator[tuple[str, str]]:
    """(request, answer) for each short function, the answer without its indent; of undocumented ones, one in three."""
    lines = source.text.splitlines()
    for node in ast.walk(ast.parse(source.text)):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        docstring = ast.get_docstring(node) or ""
        block = lines[node.lineno - 1 : node.end_lineno]
        documented = 15 <= len(docstring) <= 1500
        if 3 <= len(block) <= 60 and (documented or rng.random() < 1 / 3):
            indent = len(block[0]) - len(block[0].lstrip())
            answer = "\n".join(line[indent:] for line in block)
            yield request_of(node.name, block[0].strip(), docstring if documented else None, rng), answer


def renamed_turns(source: Source, words: list[str], rng: random.Random) -> Iterator[str]:
    """One-turn chats of short functions under another name, so that it can only be taken from the request."""
    lines = source.text.splitlines()
    for node in ast.walk(ast.parse(source.text)):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__") or node.end_lineno is None:
            continue
        block = lines[node.lineno - 1 : node.end_lineno]
        docstring = ast.get_docstring(node) or ""
        if not 2 <= len(block) <= 16 or len(docstring) > 400:
            continue
        is_bare = rng.random() < 0.5
        if is_bare and docstring and len(node.body) > 1:  # nothing to document: the answer is code alone
            del block[node.body[0].lineno - node.lineno : node.body[1].lineno - node.lineno]
        name = "_".join(rng.sample(words, rng.choice([1, 1, 2])))
        indent = len(block[0]) - len(block[0].lstrip())
        answer = re.sub(rf"\b{re.escape(node.name)}\b", name, "\n".join(line[indent:] for line in block))
        bare = rng.choice([f"def {name}(", f"def {name}(", answer.splitlines()[0]])
        summary = docstring if len(docstring) >= 15 else None
        request = bare if is_bare else request_of(name, answer.splitlines()[0], summary, rng)
        yield f"{USER}\n{request}{END}\n{ASSISTANT}\n{answer}{END}\n"


def prepare_chat(work: Path) -> None:
    """Write chat.bin: `renamed_turns` of the training modules, three times with other names."""
    rng = random.Random(2)
    kept = [s for s in sources() if not is_held_out(s.group) and not s.is_test]
    names = {w for s in kept for w in re.findall(r"\b[a-z]{3,9}\b", s.text)}
    words = sorted(names)
    turns = [turn for _ in range(3) for s in kept for turn in renamed_turns(s, words, rng)]
    rng.shuffle(turns)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    ids = [token for e in tokenizer.encode_batch(turns) for token in (*e.ids, 0)]
    np.array(ids, dtype=np.uint16).tofile(work / "chat.bin")
    print(f"chat: {len(turns)} turns, {len(ids) / 1e6:.2f} M tokens")


def conversations(source: Source, rng: random.Random) -> Iterator[str]:
    """Chat documents of one to three turns; one in four begins with a system message."""
    turns = list(chat_turns(source, rng))
    while turns:
        count = rng.choice([1, 1, 2, 3])
        taken, turns = turns[:count], turns[count:]
        head = f"{SYSTEM}\n{SYSTEM_PROMPT}{END}\n" if rng.random() < 0.25 else ""
        yield head + "".join(f"{USER}\n{q}{END}\n{ASSISTANT}\n{a}{END}\n" for q, a in taken)


def prepare(work: Path) -> None:
    """Write tokenizer.json, train.bin (uint16 tokens, documents shuffled) and held_out.bin."""
    rng = random.Random(0)
    train: list[str] = []
    held_out: list[str] = []
    names: dict[str, list[str]] = {"train": [], "held_out": []}
    for source in sources():
        chats = [] if source.is_test else [*conversations(source, rng), *conversations(source, rng)]
        if is_held_out(source.group):
            names["held_out"].append(source.path)
            if not source.is_test:
                held_out += [source.text, *chats]
        else:
            names["train"].append(source.path)
            # The library itself is read twice for each reading of its tests.
            train += ([source.text] if source.is_test else [source.text] * 2) + chats
    rng.shuffle(train)
    tokenizer = train_tokenizer(sorted(set(train)))
    tokenizer.save(str(work / "tokenizer.json"))
    for name, documents in (("train", train), ("held_out", held_out)):
        ids = [token for e in tokenizer.encode_batch(documents) for token in (*e.ids, 0)]
        np.array(ids, dtype=np.uint16).tofile(work / f"{name}.bin")
        print(
            f"{name}: {len(documents)} documents, {sum(map(len, documents)) / 1e6:.1f} M characters, "
            f"{len(ids) / 1e6:.2f} M tokens"
        )
    (work / "files.json").write_text(json.dumps({"python": sys.version.split()[0], **names}, indent=1))


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE; special tokens take the first ids, <|endoftext|> is 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


# -------------------------------------------------------------------------------------------------------- training

SEEDS = {"target": 7, "draft": 8, "hybrid": 11}
STEPS = {"target": 2250, "draft": 6700, "hybrid": 120}
CHAT_STEPS = (120, 70)
PROMPT_TOKENS, SAMPLE_TOKENS = 128, 513
TEXT_STEPS = 1000  # of the draft learn from the text alone, before the target teaches
NUM_LABELS = 64  # of the target's likeliest tokens that are kept at each place; the rest counts as one


def build(kind: str) -> PreTrainedModel:
    """A fresh model of the shape `kind`, initialised from seed 0; a hybrid from the built-in target."""
    torch.manual_seed(0)
    if kind == "hybrid":
        return hybrid_of(LlamaForCausalLM.from_pretrained(HERE / "target", dtype=torch.float32))
    config = LlamaConfig(
        **SHAPES[kind],
        vocab_size=VOCAB_SIZE,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        initializer_range=0.02,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def hybrid_of(dense: LlamaForCausalLM) -> Qwen3_5ForCausalLM:
    """A copy of `dense` in Qwen3.5's layout: a delta net in every other layer, and gated attention in the rest.

    Embeddings, norms and MLPs are the dense model's. A delta net begins with its attention's projections, as a Mamba2
    layer does in "The Mamba in the Llama" (2408.15237, section 3), and forgets slowly.
    """
    old = dense.config
    heads, size = old.num_attention_heads, old.head_dim
    settings = {name: getattr(old, name) for name in (*SHAPES["target"], "vocab_size", "head_dim", "rms_norm_eps")}
    config = Qwen3_5TextConfig(
        **settings,
        layer_types=["linear_attention", "full_attention"] * (old.num_hidden_layers // 2),
        linear_num_key_heads=heads,
        linear_num_value_heads=heads,
        linear_key_head_dim=size,
        linear_value_head_dim=size,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        tie_word_embeddings=True,
        eos_token_id=0,
        use_cache=False,
    )
    model = Qwen3_5ForCausalLM(config)
    weights = model.state_dict()
    copied = {name: tensor for name, tensor in dense.state_dict().items() if name in weights}
    for name in copied:
        if "norm" in name:
            copied[name] = copied[name] - 1  # Qwen3.5 stores its norms so
    for layer, kind in enumerate(config.layer_types):
        before = f"model.layers.{layer}."
        q, k, v, o = (dense.state_dict()[f"{before}self_attn.{name}_proj.weight"] for name in "qkvo")
        if kind == "full_attention":
            gated = torch.stack((q.view(heads, size, -1), torch.zeros(heads, size, q.shape[1])), 1).flatten(0, 2)
            copied[f"{before}self_attn.q_proj.weight"] = gated
            copied[f"{before}self_attn.o_proj.weight"] = 2 * o  # the gates begin at 1/2
            scale = dense.state_dict()[f"{before}input_layernorm.weight"]
            for name, matrix in (("q", q), ("k", k)):  # about as large as without a norm
                size_of_rows = (matrix * scale).norm(dim=1).square().mean().sqrt()
                copied[f"{before}self_attn.{name}_norm.weight"] = (size_of_rows - 1).expand(size)
            continue
        net = f"{before}linear_attn."
        k, v = (each.view(-1, size, each.shape[1]).repeat_interleave(heads * size // len(k), 0) for each in (k, v))
        copied[f"{net}in_proj_qkv.weight"] = torch.cat((q, k.flatten(0, 1), v.flatten(0, 1)))
        copied[f"{net}out_proj.weight"] = o
        identity = torch.zeros_like(weights[f"{net}conv1d.weight"])
        identity[..., -1] = 1
        copied[f"{net}conv1d.weight"] = identity
        steps = torch.logspace(-3, -1, heads)
        copied[f"{net}dt_bias"] = steps.expm1().log()  # softplus gives `steps`
        copied[f"{net}A_log"] = torch.zeros(heads)
    model.load_state_dict({**weights, **copied})
    return model


def optimizers(model: PreTrainedModel, kind: str = "target") -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings and norms; of a hybrid, AdamW for attention and delta nets.

    The rest of a hybrid stays the dense model's: half of the work of going backwards.
    """
    if kind == "hybrid":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("attn" in name)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return [torch.optim.AdamW(trained, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)]
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=5e-3, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate(step: int, steps: int) -> float:
    """Warm-up over 100 steps (or a tenth of a short run), flat, then linear to zero over the last half."""
    return min(1.0, (step + 1) / min(100, steps // 10), (steps - step) / (steps * 0.5))


def windows(tokens: np.ndarray, step: int, steps: int, batch_tokens: int, seed: int) -> torch.Tensor:
    """The [B, T+1] batch of a step, a pure function of the step: T is 512, over the last fifth 1024, at the end 2048.

    Windows start at a fresh random offset each epoch, so that no two epochs cut the text at the same places.
    """
    rng = np.random.default_rng([seed, step])
    length = 512 if step < steps * 0.8 else 1024 if step < steps * 0.98 else CONTEXT
    starts = rng.integers(0, len(tokens) - length - 1, size=max(1, batch_tokens // length))
    return torch.from_numpy(np.stack([tokens[s : s + length + 1].astype(np.int64) for s in starts]))


@dataclass(frozen=True)
class Labels:
    """Rows of text and what the target thinks after each of their tokens: its likeliest ones and their probabilities.

    tokens [N, 513]; likeliest, probabilities [N, 512, NUM_LABELS], on disk.
    """

    tokens: np.ndarray
    likeliest: np.ndarray
    probabilities: np.ndarray

    @classmethod
    def open(cls, work: Path, part: str, mode: str = "r") -> Labels:
        tokens = np.fromfile(work / f"{part}.bin", dtype=np.uint16).reshape(-1, SAMPLE_TOKENS)
        shape = (len(tokens), SAMPLE_TOKENS - 1, NUM_LABELS)
        return cls(
            tokens,
            np.memmap(work / f"{part}.likeliest", dtype=np.uint16, mode=mode, shape=shape),
            np.memmap(work / f"{part}.probabilities", dtype=np.float16, mode=mode, shape=shape),
        )

    def batch(self, rows: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids [B, 512], and for each of their places likeliest and probabilities [B * 512, NUM_LABELS]."""
        ids = torch.from_numpy(self.tokens[rows, :-1].astype(np.int64))
        likeliest = torch.from_numpy(self.likeliest[rows].astype(np.int64)).flatten(0, 1)
        return ids, likeliest, torch.from_numpy(self.probabilities[rows].astype(np.float32)).flatten(0, 1)


@torch.no_grad()
def label(work: Path, num_rows: int, batch_rows: int = 8) -> None:
    """Write what the target thinks of samples.bin, and of text.bin: `num_rows` rows of the training text."""
    tokens = np.fromfile(work / "train.bin", dtype=np.uint16)
    rng = np.random.default_rng(33)
    starts = rng.permutation(len(tokens) // SAMPLE_TOKENS)[:num_rows] * SAMPLE_TOKENS
    np.stack([tokens[s : s + SAMPLE_TOKENS] for s in starts]).tofile(work / "text.bin")
    model = build("target").eval()
    model.load_state_dict(torch.load(work / "target.pt")["model"])
    model = torch.compile(model, dynamic=False)
    for part in ("samples", "text"):
        labels = Labels.open(work, part, "w+")
        for first in range(0, len(labels.tokens), batch_rows):
            ids = torch.from_numpy(labels.tokens[first : first + batch_rows, :-1].astype(np.int64))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                probabilities = model(ids).logits.float().softmax(-1)
            values, found = probabilities.topk(NUM_LABELS)
            labels.likeliest[first : first + batch_rows] = found.numpy()
            labels.probabilities[first : first + batch_rows] = values.numpy()
            print(f"{part}: {first + len(ids)} of {len(labels.tokens)} rows", flush=True)


def text_loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Next-token cross-entropy of ids [B, T+1]."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def taught_loss(
    model: LlamaForCausalLM, ids: torch.Tensor, likeliest: torch.Tensor, probabilities: torch.Tensor
) -> torch.Tensor:
    """KL(target || model) at temperature 1 (DistillSpec, forward KL) over the likeliest tokens and the rest as one."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(ids).logits.flatten(0, 1)
    logits = logits.float()
    log_q = logits.gather(-1, likeliest) - logits.logsumexp(-1, keepdim=True)
    rest = (1 - probabilities.sum(-1)).clamp_min(1e-4)
    log_q_rest = (1 - log_q.exp().sum(-1)).clamp_min(1e-6).log()
    kept = probabilities * (probabilities.clamp_min(1e-8).log() - log_q)
    return (kept.sum(-1) + rest * (rest.log() - log_q_rest)).mean()


def copied_loss(model: PreTrainedModel, teacher: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """KL(teacher || model) at temperature 1 after each token of ids [B, T+1], over the whole vocabulary."""
    with torch.no_grad():
        wanted = teacher(batch[:, :-1]).logits.log_softmax(-1).flatten(0, 1)
    logits = model(batch[:, :-1]).logits.log_softmax(-1).flatten(0, 1)
    return F.kl_div(logits, wanted, reduction="batchmean", log_target=True)


def tune(work: Path, batch_tokens: int) -> None:
    """Teach the trained target to take a function's name from the request: half renamed chats, half the text as before.

    Two short rounds; what is kept is the mean of the weights before, between and after them (2203.05482), which learned
    the chats and kept the held-out loss that either round alone gives up.
    """
    before = torch.load(work / "target.pt")
    states = [before["model"]]
    for steps in CHAT_STEPS:
        states.append(tuned(work, states[-1], steps, batch_tokens))
    mean = {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}
    torch.save(before | {"model": mean}, work / "target.pt")
    model = build("target")
    model.load_state_dict(mean)
    held_out = np.fromfile(work / "held_out.bin", dtype=np.uint16)
    print(f"held-out loss {held_out_loss(model, held_out):.4f}", flush=True)


def tuned(work: Path, state: dict[str, torch.Tensor], steps: int, batch_tokens: int) -> dict[str, torch.Tensor]:
    """One round, from a fifth of the learning rate down to zero."""
    texts = [np.fromfile(work / f"{name}.bin", dtype=np.uint16) for name in ("chat", "train")]
    model = build("target")
    model.load_state_dict(state)
    opts = optimizers(model)
    forward = torch.compile(model, dynamic=False)
    for step in range(steps):
        for opt in opts:
            for group in opt.param_groups:
                group["lr"] = group.setdefault("base", 0.2 * group["lr"]) * min(
                    1.0, (step + 1) / 10, (steps - step) / steps
                )
        rng = np.random.default_rng([10, step])
        rows = [
            text[s : s + 513].astype(np.int64)
            for text in texts
            for s in rng.integers(0, len(text) - 513, size=batch_tokens // 1024)
        ]
        loss = text_loss(forward, torch.from_numpy(np.stack(rows)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        if (step + 1) % 10 == 0:
            print(f"step {step + 1}/{steps} loss {loss.item():.3f}", flush=True)
    return model.state_dict()


@torch.no_grad()
def sample(work: Path, num_rows: int, batch_rows: int = 96) -> None:
    """Write samples.bin: rows of SAMPLE_TOKENS tokens, PROMPT_TOKENS of training text
    and what the target makes of them.

    A draft meets the target's text, not the library's: on-policy data (DistillSpec, 2310.08461, section 4). Half of it
    at temperature 1, a quarter each at 0.6 and 0.
    """
    tokens = np.fromfile(work / "train.bin", dtype=np.uint16)
    model = build("target").eval()
    model.load_state_dict(torch.load(work / "target.pt")["model"])
    model.generation_config.eos_token_id = None  # as in the training text, one document follows another
    rng, rows = np.random.default_rng(9), list[np.ndarray]()
    torch.manual_seed(9)
    began = time.perf_counter()
    while len(rows) * batch_rows < num_rows:
        starts = rng.integers(0, len(tokens) - PROMPT_TOKENS, size=batch_rows)
        prompts = torch.from_numpy(np.stack([tokens[s : s + PROMPT_TOKENS].astype(np.int64) for s in starts]))
        rows.append(continued(model, prompts, (1.0, 1.0, 0.6, 0.0)[len(rows) % 4]).numpy().astype(np.uint16))
        rate = len(rows) * batch_rows * (SAMPLE_TOKENS - PROMPT_TOKENS) / (time.perf_counter() - began)
        print(f"{len(rows) * batch_rows} of {num_rows} rows, {rate:,.0f} tokens/s", flush=True)
    np.concatenate(rows).tofile(work / "samples.bin")


def continued(model: LlamaForCausalLM, prompts: torch.Tensor, temperature: float) -> torch.Tensor:
    """[B, PROMPT_TOKENS] → [B, SAMPLE_TOKENS], past any end of text."""
    count = SAMPLE_TOKENS - PROMPT_TOKENS
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    settings = GenerationConfig(
        max_new_tokens=count,
        use_cache=True,
        cache_implementation="static",
        pad_token_id=0,
        eos_token_id=None,
        **sampling,
    )
    return model.generate(prompts, generation_config=settings)


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, tokens: np.ndarray, length: int = 1024) -> float:
    """Mean next-token loss (nats) over the whole held-out text, in windows of `length`, in fp32."""
    windows = len(tokens) // (length + 1)
    data = torch.from_numpy(tokens[: windows * (length + 1)].astype(np.int64)).view(windows, length + 1)
    losses = [
        F.cross_entropy(model(b[:, :-1]).logits.flatten(0, 1), b[:, 1:].flatten(), reduction="sum")
        for b in data.split(4)
    ]
    return float(sum(losses)) / (windows * length)


def train(kind: str, work: Path, steps: int, batch_tokens: int) -> None:
    """Train one of the pair; a checkpoint every 100 steps, resumed when there is one."""
    tokens = np.fromfile(work / "train.bin", dtype=np.uint16)
    held_out = np.fromfile(work / "held_out.bin", dtype=np.uint16)
    model = build(kind)
    parts = [Labels.open(work, part) for part in ("samples", "text")] if kind == "draft" else []
    teacher = LlamaForCausalLM.from_pretrained(HERE / "target", dtype=torch.float32) if kind == "hybrid" else None
    opts = optimizers(model, kind)
    base = [group["lr"] for opt in opts for group in opt.param_groups]
    checkpoint, start = work / f"{kind}.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        for opt, saved in zip(opts, state["optimizers"], strict=True):
            opt.load_state_dict(saved)
        start = state["step"]
    forward = torch.compile(model, dynamic=False)
    print(
        f"{kind}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, steps {start}..{steps}",
        flush=True,
    )
    began, running = time.perf_counter(), math.nan
    for step in range(start, steps):
        for lr, group in zip(base, (g for o in opts for g in o.param_groups), strict=True):
            group["lr"] = lr * learning_rate(step, steps)
        if kind == "draft" and step >= TEXT_STEPS:
            labels, rng = parts[step % 2], np.random.default_rng([SEEDS[kind], step])
            rows = rng.integers(0, len(labels.tokens), batch_tokens // (SAMPLE_TOKENS - 1))
            loss = taught_loss(forward, *labels.batch(rows))
        elif teacher is not None:
            loss = copied_loss(model, teacher, windows(tokens, step, steps, batch_tokens, SEEDS[kind]))
        else:
            loss = text_loss(forward, windows(tokens, step, steps, batch_tokens, SEEDS[kind]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
            opt.zero_grad(set_to_none=True)
        running = loss.item() if math.isnan(running) else 0.97 * running + 0.03 * loss.item()
        if (step + 1) % 20 == 0:
            rate = (step + 1 - start) * batch_tokens / (time.perf_counter() - began)
            print(f"step {step + 1}/{steps} loss {running:.3f} {rate:,.0f} tokens/s", flush=True)
        if (step + 1) % 100 == 0 or step + 1 == steps:
            state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in opts], "step": step + 1}
            torch.save(state, checkpoint.with_suffix(".tmp"))
            checkpoint.with_suffix(".tmp").replace(checkpoint)
        if (step + 1) % 500 == 0 or step + 1 == steps:
            print(f"step {step + 1} held-out loss {held_out_loss(model, held_out):.4f}", flush=True)


# ---------------------------------------------------------------------------------------------------------- export

HERE = Path(__file__).resolve().parent.parent / "offspec" / "builtin"
NUM_PROMPTS = 27


def export(work: Path, out: Path) -> None:
    """Write both checkpoints and the held-out prompts."""
    for kind in SHAPES:
        export_model(kind, work, out)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    with (out / "prompts.jsonl").open("w") as file:
        for path, prompt in held_out_prompts(tokenizer):
            file.write(json.dumps({"source": path, "prompt": prompt}) + "\n")


def export_model(kind: str, work: Path, out: Path) -> None:
    """Write a checkpoint in bf16, as Hugging Face lays it out."""
    model = build(kind)
    model.load_state_dict(torch.load(work / f"{kind}.pt")["model"])
    model.to(torch.bfloat16)
    tensors = {name: t for name, t in model.state_dict().items() if name != HEAD}
    folder = out / kind
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in settings_of(model.config).items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (folder / "model.safetensors").chmod(0o644)
    (folder / "tokenizer.json").write_bytes((work / "tokenizer.json").read_bytes())
    loss = held_out_loss(model.float(), np.fromfile(work / "held_out.bin", dtype=np.uint16))
    print(
        f"{kind}: {sum(t.numel() for t in tensors.values()) / 1e6:.2f} M parameters, held-out loss {loss:.4f} "
        "nats a token (in bf16)"
    )


def settings_of(config: PreTrainedConfig) -> dict[str, dict[str, object]]:
    """The JSON files of a checkpoint; config.json in the layout that every version of transformers reads."""
    names = (
        *SHAPES["target"],
        "vocab_size",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "tie_word_embeddings",
    )
    return {
        "config.json": config.to_dict()
        if isinstance(config, Qwen3_5TextConfig)
        else {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **{name: getattr(config, name) for name in names},
            "hidden_act": "silu",
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": None,
            "eos_token_id": SPECIALS.index(EOT),
            "torch_dtype": "bfloat16",
        },
        "generation_config.json": {"do_sample": False, "eos_token_id": [SPECIALS.index(EOT), SPECIALS.index(END)]},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "eos_token": EOT,
            "model_max_length": CONTEXT,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }


def held_out_prompts(tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """Spread over the held-out modules: some source, then a function's signature and docstring,
    its body left to say.
    """
    rng = random.Random(1)
    choices: dict[str, list[str]] = {}
    for source in sources():
        if is_held_out(source.group) and not source.is_test:
            choices[source.path] = list(function_beginnings(source, tokenizer))
            rng.shuffle(choices[source.path])
    taken = 0
    while taken < NUM_PROMPTS and any(choices.values()):
        for path, prompts in choices.items():
            if prompts and taken < NUM_PROMPTS:
                taken += 1
                yield path, prompts.pop()


def function_beginnings(source: Source, tokenizer: Tokenizer) -> Iterator[str]:
    """For each function with a body of 8 lines or more: up to 160 tokens of source that end where its body begins."""
    lines = source.text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.body[0].lineno >= 8:
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            before = lines[: first.lineno - 1]
            while before and len(tokenizer.encode("".join(before)).ids) > 160:
                before = before[max(1, len(before) // 8) :]
            if before:
                yield "".join(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["data", "target", "chat", "samples", "labels", "draft", "export", "hybrid"])
    parser.add_argument("--work", type=Path, default=Path("build/builtin"))
    parser.add_argument("--out", type=Path, default=HERE, help="where export writes")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=3840, help="of the target's own text, and of the text to label")
    parser.add_argument("--threads", type=int, default=None)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.stage == "data":
        prepare(args.work)
    elif args.stage == "chat":
        prepare_chat(args.work)
        tune(args.work, args.batch_tokens)
    elif args.stage == "samples":
        sample(args.work, args.rows)
    elif args.stage == "labels":
        label(args.work, args.rows)
    elif args.stage in STEPS:
        train(args.stage, args.work, args.steps or STEPS[args.stage], args.batch_tokens)
    else:
        export(args.work, args.out)
    if args.stage == "hybrid":
        export_model(args.stage, args.work, args.work)


if __name__ == "__main__":
    main()
