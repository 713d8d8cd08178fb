"""How often passes of many rows choose another token than plain decoding, and whether their logits have its bits.

    python -m benchmarks.exactness flips [MODEL ...] [--tokens 512] [--forms bf16,q4_k] [--dtypes bf16] [--fast]
    python -m benchmarks.exactness texts [MODEL] [--draft DRAFT] [--prompts 8] [--tokens 96] [--dtype bf16]
                                        [--kv-cache 16|8|4]
    python -m benchmarks.exactness prefill [MODEL ...] [--rows 64,256,512] [--turns 3]

`flips` reads held-out code token by token, which is plain decoding's arithmetic, and again in passes of 8, 64 and 256
rows: resident, and read from the disk. Of each, it counts rows whose logits have other bits, the rows whose likeliest
token is another one, and how far the two tokens' logits are apart. Matrices are those of the checkpoint, or are
converted first (`--forms`). `--fast` measures what `--arithmetic fast` does.

`texts` compares texts of a pair, by default the built-in one, with plain decoding's: trees of 8, 64, 256 and any number
of nodes, 1 and 3 threads, batches of 8, prompts from a file, streamed targets with read-ahead and without. The last
line of both is
JSON.

`prefill` times whole passes of a prompt with `--arithmetic exact` and `fast` by turns, and prints the least of each.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from offspec import Engine, SamplingParams, SpeculationParams, builtin
from offspec.backends.arithmetic import EXACT, FAST
from offspec.backends.weights import Weight
from offspec.backends.x86.processor import describe_instructions
from offspec.checkpoints.load import WeightSettings, load_decoder
from offspec.checkpoints.model_files import ModelFiles
from offspec.checkpoints.opening import locate, open_model
from offspec.loaded_target import LoadedTarget
from offspec.loaders.convert import convert
from offspec.loaders.files.gguf_types import GGUF_TYPES
from offspec.loaders.formats.gguf import GgufMatrix
from offspec.loaders.params import CONVERT_FORMATS, SHADOW_FORMATS, ConvertParams
from offspec.loaders.streaming.placement import ExpertSlots, Limits, Placement, Slots, Tier
from offspec.loaders.streaming.weights import RamWeights
from offspec.model.decoder import CachedDecoder, Decoder, pass_together
from offspec.model.exactness import reason_against_exactness
from offspec.model.memory.kv_formats import KV_FORMATS
from offspec.model.pass_rows import TextRows
from offspec.prompt_cache import PromptCache
from offspec.text.tokenizer import Tokenizer

CPU = torch.device("cpu")
WIDTHS = (8, 64, 256)
STORED, Q8_0 = "as stored", "q8_0"
FORMS = ("bf16", "bf16-packed", "nf4", "q4_k", Q8_0)


# ------------------------------------------------------------------------------------------------ decoders


def open_files(folder: Path, dtype: str) -> ModelFiles:
    return open_model(folder, dtype, [])


def decoder_of(files: ModelFiles, *, is_streamed: bool, is_exact: bool, synchronous: bool = False) -> Decoder:
    """A decoder with all layers in RAM, or read from the disk in each pass, with slots for a third of the experts."""
    costs = [layer.cost(files.dtype) for layer in files.stored.layers]
    places = [Tier.DISK if is_streamed else Tier.DEVICE] * len(costs)
    slots = Slots(2, 0, max(cost.slot_bytes for cost in costs)) if is_streamed else Slots(0, 0, 0)
    num_experts = sum(len(units) for units in files.stored.experts.values())
    experts = ExpertSlots(max(1, num_experts // 3)) if is_streamed else ExpertSlots(num_experts, are_resident=True)
    placement = Placement(tuple(places), slots, (), Limits(None, 0), 0, 0, experts=experts)
    settings = WeightSettings(has_far_embedding=True, synchronous=synchronous)
    decoder = load_decoder(files, placement, CPU, settings)
    assert reason_against_exactness(decoder.config, decoder.dtype, CPU) is None
    decoder.arithmetic = EXACT if is_exact else FAST
    return decoder


def in_q8_0(decoder: Decoder) -> Decoder:
    """The same decoder with all matrices of its layers in Q8_0: a scale in fp16 and 32 integers of 8 bit a block."""
    layers = list[Mapping[str, Weight]]()
    for index in range(len(decoder.blocks)):
        with decoder.weights.layer(index) as weights:
            layers.append({name: _q8_0(weight) for name, weight in weights.items()})
    names = [decoder.config.embedding_name, decoder.config.head_name, *decoder.config.final_norm_names]
    shared = {name: decoder.weights.shared(name) for name in names}
    made = Decoder(decoder.config, RamWeights(layers, shared), dtype=decoder.dtype, device=CPU)
    made.arithmetic = decoder.arithmetic
    return made


def _q8_0(weight: Weight) -> Weight:
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        return weight
    blocks = weight.float().view(weight.shape[0], -1, 32)
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    codes = (blocks / scales.float().clamp(min=1e-30)).round().to(torch.int8)
    packed = torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), -1)
    kind = next(kind for kind in GGUF_TYPES.values() if kind.name == "Q8_0")
    return GgufMatrix(kind, packed.flatten(1).contiguous())


# ------------------------------------------------------------------------------------------------ flips


@dataclass
class Flips:
    """Rows of passes of `width` rows, compared with those of passes of one row.

    num_flips: rows whose likeliest token is another one; gap: the largest distance of both tokens' logits.
    """

    model: str
    form: str
    dtype: str
    is_streamed: bool
    is_exact: bool
    width: int
    num_rows: int = 0
    num_other_bits: int = 0
    num_flips: int = 0
    gap: float = 0.0

    def add(self, plain: Tensor, wide: Tensor) -> None:
        """Logits [R, vocab] of the same rows."""
        one, other = plain.argmax(-1), wide.argmax(-1)
        differs = one != other
        gaps = plain.gather(1, one[:, None]) - plain.gather(1, other[:, None])
        self.num_rows += len(plain)
        self.num_other_bits += int((plain != wide).any(-1).sum())
        self.num_flips += int(differs.sum())
        self.gap = max(self.gap, float(gaps.max()))

    def __str__(self) -> str:
        place = "streamed" if self.is_streamed else "resident"
        arithmetic = "exact" if self.is_exact else "fast"
        rates = f"{1000 * self.num_flips / self.num_rows:.1f} | {self.gap:.3g}"
        bits = f"{100 * self.num_other_bits / self.num_rows:.0f} %"
        return (
            f"| {self.model} | {self.form} | {self.dtype} | {place} | {arithmetic} | {self.width} | {bits} | {rates} |"
        )


HEAD = (
    "| model | matrices | rows in | target | arithmetic | rows of a pass | rows with other bits | "
    "other tokens, of 1,000 | largest gap |\n|---|---|---|---|---|---:|---:|---:|---:|"
)


def logits_in_passes(decoder: Decoder, tokens: Sequence[int], width: int) -> Tensor:
    """Logits [T, vocab] of a text read in passes of `width` rows."""
    text, found = CachedDecoder(decoder, len(tokens)), list[Tensor]()
    for first in range(0, len(tokens), width):
        found.append(decoder.logits(pass_together([(text, TextRows.of_chain(tokens[first : first + width]))])))
    return torch.cat(found)


def measure_flips(
    name: str, form: str, folder: Path, dtype: str, texts: Sequence[Sequence[int]], is_exact: bool
) -> Iterator[Flips]:
    files = open_files(folder, dtype)
    resident = decoder_of(files, is_streamed=False, is_exact=is_exact)
    if form == Q8_0:
        resident = in_q8_0(resident)
    streamed = None if form == Q8_0 else decoder_of(files, is_streamed=True, is_exact=is_exact)
    plain = [logits_in_passes(resident, tokens, 1) for tokens in texts]
    for is_streamed, decoder in ((False, resident), (True, streamed)):
        for width in WIDTHS if decoder is not None else ():
            found = Flips(name, form, dtype, is_streamed, is_exact, width)
            for tokens, expected in zip(texts, plain, strict=True):
                found.add(expected, logits_in_passes(decoder, tokens, width))
            yield found
    if streamed is not None:
        streamed.weights.close()


def flips(
    models: Sequence[str], forms: Sequence[str], dtypes: Sequence[str], num_tokens: int, ways: Sequence[bool]
) -> None:
    print(f"{describe_instructions()}, {torch.get_num_threads()} threads\n\n{HEAD}", flush=True)
    found = list[Flips]()
    with tempfile.TemporaryDirectory() as scratch:
        for model in models:
            source = locate(model, None, "target")
            texts = held_out(source, num_tokens)
            for form in forms:
                folder = converted(source, form, Path(scratch))
                for dtype in dtypes:
                    for is_exact in ways:
                        for each in measure_flips(Path(model).stem, form, folder, dtype, texts, is_exact):
                            print(each, flush=True)
                            found.append(each)
    print(json.dumps([asdict(each) for each in found]))


def held_out(source: Path, num_tokens: int) -> list[list[int]]:
    """Texts of 256 tokens of the built-in pair's held-out code, `num_tokens` together."""
    files = open_files(source, "bf16")
    tokenizer = Tokenizer.load(files.checkpoint.tokenizer_path or files.checkpoint.path)
    tokens = [token for prompt in builtin.prompts() for token in tokenizer.encode(prompt)][:num_tokens]
    return [tokens[first : first + 256] for first in range(0, len(tokens), 256)]


def converted(source: Path, form: str, scratch: Path) -> Path:
    """The checkpoint in a form; one that `offspec quantize` does not write is the source."""
    folder = scratch / f"{source.stem}-{form}"
    if form not in (*CONVERT_FORMATS, *SHADOW_FORMATS.values()):
        return source
    if not folder.exists():
        files = open_files(source, "bf16")
        convert(source, folder, ConvertParams(form), layer_prefix=files.config.layer_prefix)
    return folder


# ------------------------------------------------------------------------------------------------ texts


@dataclass
class Compared:
    """Texts with a setting, compared with plain decoding's."""

    setting: str
    num_tokens: int = 0
    num_texts: int = 0
    num_different: int = 0

    def add(self, plain: Sequence[int], found: Sequence[int]) -> None:
        self.num_tokens += len(found)
        self.num_texts += 1
        self.num_different += list(plain) != list(found)


class Texts:
    """Texts of an engine, and of engines with its draft before another decoder of the same target."""

    def __init__(self, engine: Engine, prompts: Sequence[str], num_tokens: int) -> None:
        self.engine, self.prompts, self.num_tokens = engine, prompts, num_tokens
        self.found = list[Compared]()

    def params(self, index: int) -> SamplingParams:
        """Every other text is sampled."""
        return SamplingParams(self.num_tokens, temperature=index % 2, seed=index, ignore_eos=True)

    @cache  # noqa: B019 (one object in the process)
    def plain(self, index: int) -> list[int]:
        return self.text(self.engine, index, SpeculationParams(budget=0))

    def text(self, engine: Engine, index: int, speculation: SpeculationParams) -> list[int]:
        steps = engine.generate(self.prompts[index], self.params(index), speculation)
        with closing(steps):
            return [token for step in steps for token in step.token_ids]

    def compare(self, setting: str, texts: Iterator[tuple[int, Sequence[int]]]) -> None:
        """texts: numbers of prompts, and tokens."""
        found = Compared(setting)
        for index, tokens in texts:
            found.add(self.plain(index), tokens)
        print(
            f"{setting}: {found.num_different} of {found.num_texts} texts differ, {found.num_tokens} tokens", flush=True
        )
        self.found.append(found)

    def with_budget(
        self, engine: Engine, budget: int | None, *, overlap: bool = True
    ) -> Iterator[tuple[int, Sequence[int]]]:
        for index in range(len(self.prompts)):
            yield index, self.text(engine, index, SpeculationParams(budget=budget, overlap=overlap))

    def together(self) -> Iterator[tuple[int, Sequence[int]]]:
        for first in range(0, len(self.prompts), 8):
            some = range(first, min(first + 8, len(self.prompts)))
            tokens: dict[int, list[int]] = {index: [] for index in some}
            params = [self.params(index) for index in some]
            for place, step in self.engine.generate_many([self.prompts[i] for i in some], params):
                tokens[some[place]] += step.token_ids
            yield from tokens.items()

    def from_file(self) -> Iterator[tuple[int, Sequence[int]]]:
        """Each prompt once without entries in the file, and once with them."""
        with tempfile.TemporaryDirectory() as scratch:
            for index, prompt in enumerate(self.prompts):
                for _ in range(2):
                    cached = PromptCache(self.engine, Path(scratch) / f"{index}.kv")
                    yield (
                        index,
                        [token for step in cached.generate(prompt, self.params(index)) for token in step.token_ids],
                    )


def texts(model: str, draft: str, num_prompts: int, num_tokens: int, dtype: str, kv_cache: str) -> None:
    options = {"dtype": dtype, "kv_cache": kv_cache, "texts": 8, "context": 1024}
    with Engine.load(model, draft=draft, device="cpu", arithmetic="exact", **options) as engine:
        assert engine.is_exact
        made = Texts(engine, builtin.prompts()[:num_prompts], num_tokens)
        for budget in (8, 64, 256, None):
            made.compare(f"resident, budget {budget or 'auto'}", made.with_budget(engine, budget))
        made.compare("resident, no drafting during passes, budget 64", made.with_budget(engine, 64, overlap=False))
        num_threads = torch.get_num_threads()
        for number in (1, 3):
            torch.set_num_threads(number)
            made.compare(f"{number} threads, budget 64", made.with_budget(engine, 64))
        torch.set_num_threads(num_threads)
        made.compare("batches of 8", made.together())
        made.compare("prompts from a file", made.from_file())
        files = open_files(builtin.path("target") if model == "builtin" else Path(model), dtype)
        files = files.with_kv(KV_FORMATS[kv_cache])
        for synchronous in (False, True):
            decoder = decoder_of(files, is_streamed=True, is_exact=True, synchronous=synchronous)
            streamed = Engine(LoadedTarget(decoder), engine.tokenizer, engine.draft)
            ahead = "without read-ahead" if synchronous else "read ahead"
            made.compare(f"streamed, {ahead}, budget 64", made.with_budget(streamed, 64))
            decoder.weights.close()
    print(json.dumps([asdict(each) for each in made.found]))


def prefill(model: str, rows: Sequence[int], turns: int) -> None:
    options = {"draft": "none", "device": "cpu", "context": max(rows) + 8}
    with (
        Engine.load(model, arithmetic="exact", **options) as exact,
        Engine.load(model, arithmetic="fast", **options) as fast,
    ):
        print(f"{Path(model).stem}: {describe_instructions()}, {torch.get_num_threads()} threads", flush=True)
        for num_rows in rows:
            by_turns = [(prefill_s(exact, num_rows), prefill_s(fast, num_rows)) for _ in range(turns)]
            exact_s, fast_s = map(min, zip(*by_turns, strict=True))
            ratio = exact_s / fast_s
            print(f"{num_rows:>5} rows: exact {exact_s:.2f} s, fast {fast_s:.2f} s, ratio {ratio:.2f}", flush=True)


def prefill_s(engine: Engine, num_rows: int) -> float:
    """Seconds of a pass over a prompt of so many tokens, with the logits of the last."""
    text, none = CachedDecoder(engine.target, num_rows), np.zeros(0, int)
    began_s = time.perf_counter()
    text.score([(7 * row) % 500 for row in range(num_rows)], none, none, none)
    return time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    some = commands.add_parser("flips")
    some.add_argument("models", nargs="*", default=["builtin"])
    some.add_argument("--forms", default=",".join(FORMS))
    some.add_argument("--dtypes", default="bf16,fp16,fp32")
    some.add_argument("--tokens", type=int, default=512)
    some.add_argument("--fast", action="store_true")
    whole = commands.add_parser("texts")
    whole.add_argument("model", nargs="?", default="builtin")
    whole.add_argument("--draft", default="auto", help="of the model [auto]")
    whole.add_argument("--prompts", type=int, default=8)
    whole.add_argument("--tokens", type=int, default=96)
    whole.add_argument("--dtype", default="bf16")
    whole.add_argument("--kv-cache", default="16", choices=("16", "8", "4"), help="bits of KV entries [16]")
    prompt = commands.add_parser("prefill")
    prompt.add_argument("models", nargs="*", default=["builtin"])
    prompt.add_argument("--rows", default="64,256,512")
    prompt.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    if args.command == "prefill":
        for model in args.models:
            prefill(model, [int(each) for each in args.rows.split(",")], args.turns)
    elif args.command == "texts":
        texts(args.model, args.draft, args.prompts, args.tokens, args.dtype, args.kv_cache)
    else:
        flips(args.models, args.forms.split(","), args.dtypes.split(","), args.tokens, (not args.fast,))


if __name__ == "__main__":
    main()
