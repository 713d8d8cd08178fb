"""A tiny pair of checkpoints, with a real tokenizer and a chat template: random weights, yet a draft that guesses well.

The draft is the target with some noise on its weights. Text is printable ASCII: other tokens have a head of zeros.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from offspec.model.block import layer_shapes
from offspec.model.config import read_config
from offspec.model.names import LAYER_PREFIX

CONTEXT = 128
VOCAB_SIZE = 320  # more than the tokenizer has: padding
SPECIALS = ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "eos_token_id": 0,
}
MIXTURE: dict[str, Any] = {  # settings of `build_pair` for a mixture of experts
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
CORPUS = ["def area(width, height):\n    return width * height\n", "for item in self.items:\n    print(item, end='')\n"]


@dataclass(frozen=True)
class Pair:
    """Folders of a target, and of a draft that often guesses right."""

    target: Path
    draft: Path


def build_pair(folder: Path, num_layers: int = CONFIG["num_hidden_layers"], **settings: Any) -> Pair:
    """Write both checkpoints below `folder`. settings: of config.json, where they are not those of CONFIG."""
    pair = Pair(folder / "target", folder / "draft")
    tokenizer = _tokenizer()
    config = CONFIG | {"num_hidden_layers": num_layers} | settings
    weights = _random_weights(_printable(tokenizer), config)
    noise = torch.Generator().manual_seed(1)
    near = {
        name: tensor + 0.15 * tensor.std() * torch.randn(tensor.shape, generator=noise)
        for name, tensor in weights.items()
    }
    for path, tensors in ((pair.target, weights), (pair.draft, near)):
        path.mkdir()
        save_file(tensors, path / "model.safetensors")
        tokenizer.save(str(path / "tokenizer.json"))
        _write_json(path / "config.json", config)
        _write_json(path / "generation_config.json", {"do_sample": False})
        _write_json(path / "tokenizer_config.json", {"eos_token": SPECIALS[0], "chat_template": TEMPLATE})
    return pair


def variant(source: Path, folder: Path, **config: Any) -> Path:
    """A copy of a checkpoint whose config.json says something else; None takes a key out."""
    shutil.copytree(source, folder)
    said = _config(folder) | config
    _write_json(folder / "config.json", {key: value for key, value in said.items() if value is not None})
    return folder


def with_tokenizer_config(folder: Path, **config: Any) -> Path:
    """Change a checkpoint's tokenizer_config.json, in place."""
    file = folder / "tokenizer_config.json"
    _write_json(file, json.loads(file.read_text()) | config)
    return folder


def with_gaps(folder: Path) -> Path:
    """Give a checkpoint's tokenizer tokens for filling in the middle, in place."""
    file = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_special_tokens(FIM)
    tokenizer.save(file)
    return folder


def scale_weights(folder: Path, factors: Mapping[str, float]) -> Path:
    """Multiply tensors, by their names, in place."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor * factors.get(name, 1.0) for name, tensor in tensors.items()}, file)
    return folder


def shorten(folder: Path, num_layers: int) -> Path:
    """Cut a checkpoint down to its first layers, in place."""
    file = folder / "model.safetensors"
    after = tuple(f"{LAYER_PREFIX}{layer}." for layer in range(num_layers, _config(folder)["num_hidden_layers"]))
    save_file({name: tensor for name, tensor in load_file(file).items() if not name.startswith(after)}, file)
    _write_json(folder / "config.json", _config(folder) | {"num_hidden_layers": num_layers})
    return folder


def narrow(folder: Path, vocab_size: int) -> Path:
    """Cut a checkpoint's padding down to vocab_size tokens, in place."""
    file = folder / "model.safetensors"
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    tensors = {name: tensor[:vocab_size] if name in tables else tensor for name, tensor in load_file(file).items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    _write_json(folder / "config.json", CONFIG | {"vocab_size": vocab_size})
    return folder


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def _printable(tokenizer: Tokenizer) -> list[int]:
    texts = {token: tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())}
    return [token for token, text in texts.items() if text.isascii() and text.isprintable() and text]


def _random_weights(printable: list[int], raw: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    config = read_config(raw)
    shapes = dict(config.shared_shapes())
    for index in range(config.num_layers):
        inner = sorted(layer_shapes(config).items(), key=lambda item: len(item[1]))  # vectors first
        shapes |= {f"{LAYER_PREFIX}{index}.{name}": shape for name, shape in inner}
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * noise if len(shape) == 1 else noise * 1.5 / shape[-1] ** 0.5
    mute = torch.ones(VOCAB_SIZE, dtype=torch.bool)
    mute[printable] = False
    weights["lm_head.weight"][mute] = 0
    return weights
