"""Tokenizers of other vocabularies, in folders: byte-level BPE on two corpora, and two of sentencepiece's kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CODE = ["def area(width, height):\n    return width * height\n", "for item in self.items:\n    print(item, end='')\n"]
PROSE = [
    "The width of the area is the height of it. ",
    "We return to the items, and print them. ",
    "naïve café 日本 😀 ",
]
EOS, BOS, TURN = "<|endoftext|>", "<s>", "<|turn|>"


def byte_level(corpus: list[str], size: int, special: list[str]) -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(corpus * 4, trainer)
    return backend


def sentencepiece(corpus: list[str], size: int, special: list[str], *, metaspace: bool = False) -> Tokenizer:
    """▁ for spaces, one before the text, and byte tokens for characters that the vocabulary lacks.

    metaspace: words are cut apart before they are merged, as newer files do it.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    ascii_only = [text for text in corpus if text.isascii()]
    trained.train_from_iterator(ascii_only * 4, trainers.BpeTrainer(vocab_size=size, show_progress=False))
    state = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [token for token in state["vocab"] if token not in tokens]
    merges = [tuple(merge) for merge in state["merges"]]
    ids = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", *special])
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    return backend


def backends() -> dict[str, Tokenizer]:
    """By names: code and prose are byte-level, spaces and words of sentencepiece's kind, which begin with BOS."""
    return {
        "code": byte_level(CODE, 310, [EOS, TURN]),
        "prose": byte_level(PROSE, 320, [TURN, EOS]),
        "spaces": sentencepiece(CODE + PROSE, 100, [BOS, EOS]),
        "words": sentencepiece(PROSE, 100, [BOS, EOS, TURN], metaspace=True),
    }


def write(folder: Path, backend: Tokenizer, **config: Any) -> Path:
    """A folder with tokenizer.json and the settings beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
