"""Chains of a head in offspec and in llama.cpp, on the same GGUF files of the built-in target and of the head.

    python -m benchmarks.drafts.beside_llama_cpp HEAD [--chain 4] [--prompts 8] [--tokens 96]

HEAD: a folder of an EAGLE-3, DFlash, DSpark or MTP head for the built-in target (`offspec distill builtin --head
eagle3`), which is written as llama.cpp's conversion does it (conversion/llama.py, conversion/qwen.py). llama.cpp drafts
with MTP layers of some architectures only, so target and layer are written as one GLM-4.5 (conversion/glm.py), whose
layers have one expert that is always chosen and a shared one: together they are the dense MLP.

Greedy texts in fp32 on one thread; the texts must be equal. Recall and lookup are off, because llama.cpp has neither.
Prints the tokens that were drafted and accepted, and tokens per pass.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from offspec import Engine, SamplingParams, SpeculationParams, builtin

from ..peers import gguf_file

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "hidden_norm": "attn_norm_2",
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
}
OUTSIDE = {
    "fc": "fc",
    "norm": "output_norm",
    "hidden_norm": "enc.output_norm",
    "lm_head": "output",
    "embed_tokens": "token_embd",
    **{f"markov_head.markov_{name}": f"markov_{name}" for name in ("w1", "w2")},
    "confidence_head.proj": "conf_proj",
}
SHARED = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
NEXTN = {
    "fc": "eh_proj",
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "norm": "shared_head_norm",
}


class Counts(NamedTuple):
    """The texts, and how many tokens were drafted and accepted for them."""

    texts: list[list[int]]
    drafted: int
    accepted: int

    def __str__(self) -> str:
        tokens = sum(map(len, self.texts))
        per_pass = tokens / (tokens - self.accepted)
        return f"{tokens} tokens, {self.drafted} drafted, {self.accepted} accepted, {per_pass:.3f} tokens per pass"


# ------------------------------------------------------------------------------------------------ files


def write_head(
    file: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    num_layers: int,
    add_vocabulary: Callable[[gguf.GGUFWriter], None],
) -> Path:
    """A head as llama.cpp's conversion writes it, in fp32. num_layers, add_vocabulary: of its target."""
    kind = "dflash" if "block_size" in config else "eagle3"
    writer = gguf.GGUFWriter(str(file), kind)
    gguf_file.describe(writer, dict(config))
    add_vocabulary(writer)
    if kind == "dflash":
        settings = config.get("dflash_config", config)
        writer.add_uint32("dflash.block_size", config["block_size"])
        writer.add_array("dflash.target_layers", [layer + 1 for layer in settings["target_layer_ids"]])
        writer.add_uint32("tokenizer.ggml.mask_token_id", settings["mask_token_id"])
        if "sample_from_anchor" in config:
            writer.add_bool("dflash.sample_from_anchor", config["sample_from_anchor"])
    else:
        writer.add_array("eagle3.target_layers", [2, num_layers // 2, num_layers - 3])
        writer.add_uint32("eagle3.target_hidden_size", config["hidden_size"])
    for name, tensor in tensors.items():
        if name != "t2d":
            writer.add_tensor(gguf_name(name), stored(name, tensor.numpy(), config))
    close(writer)
    return file


def gguf_name(name: str) -> str:
    name = name.replace("midlayer.", "layers.0.")
    if not name.startswith("layers."):
        base, _, suffix = name.rpartition(".")
        return f"{OUTSIDE[base]}.{suffix}" if base else name
    _, layer, base = name.removesuffix(".weight").split(".", 2)
    return f"blk.{layer}.{NAMES[base]}.weight"


def stored(name: str, numbers: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """EAGLE-3's queries and keys are in Llama's order of llama.cpp; d2t has tokens instead of distances to them."""
    if name == "d2t":
        return numbers.astype(np.int64) + np.arange(len(numbers))
    is_paired = kind_of(config) == "eagle3" and name.endswith(("q_proj.weight", "k_proj.weight"))
    if is_paired:
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        numbers = numbers.reshape(heads, 2, -1, numbers.shape[1]).swapaxes(1, 2).reshape(numbers.shape)
    return np.ascontiguousarray(numbers, dtype=np.float32)


def write_glm(file: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], tokenizer: dict[str, Any]) -> Path:
    """A dense Llama with an MTP layer (`mtp.*`) as a GLM-4.5 in fp32, in which it computes the same.

    Without the MTP layer's tensors, it is a file without one; without the others, a file of the MTP layer alone.
    """
    layers, inner = config["num_hidden_layers"], config["intermediate_size"] // 2
    count = layers + any(name.startswith("mtp.") for name in tensors)
    writer = gguf.GGUFWriter(str(file), "glm4moe")
    gguf_file.describe(writer, {**config, "num_hidden_layers": count})
    gguf_file.add_vocabulary(writer, tokenizer, dict(config))
    writer.add_nextn_predict_layers(count - layers)
    for add in (writer.add_expert_count, writer.add_expert_used_count, writer.add_expert_shared_count):
        add(1)
    writer.add_expert_feed_forward_length(inner)
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    for name, tensor in tensors.items():
        for own_name, part in glm_tensors(name, tensor.float().numpy(), layers, inner).items():
            writer.add_tensor(own_name, np.ascontiguousarray(part))
    first = 0 if any(name.startswith("model.layers.") for name in tensors) else layers
    for layer in range(first, count):
        writer.add_tensor(f"blk.{layer}.ffn_gate_inp.weight", np.zeros((1, config["hidden_size"]), np.float32))
        writer.add_tensor(f"blk.{layer}.exp_probs_b.bias", np.zeros(1, np.float32))
    close(writer)
    return file


def glm_tensors(name: str, numbers: np.ndarray, num_layers: int, inner: int) -> dict[str, np.ndarray]:
    """A tensor of Llama or of its MTP layer by GLM-4.5's names in GGUF; a matrix of an MLP becomes two experts'."""
    base = name.removesuffix(".weight").removeprefix("model.")
    if base.startswith("mtp.") and not base.startswith("mtp.layers."):
        return {f"blk.{num_layers}.nextn.{NEXTN[base.removeprefix('mtp.')]}.weight": numbers}
    if not base.startswith(("layers.", "mtp.layers.")):
        return {f"{SHARED[base]}.weight": numbers}
    layer, _, short = base.partition("layers.")[2].partition(".")
    place = f"blk.{num_layers if base.startswith('mtp.') else layer}"
    part = {**NAMES, "post_attention_layernorm": "post_attention_norm"}[short]
    if not part.startswith("ffn_"):
        return {f"{place}.{part}.weight": numbers}
    halves = (numbers[:, :inner], numbers[:, inner:]) if part == "ffn_down" else (numbers[:inner], numbers[inner:])
    return {f"{place}.{part}_exps.weight": halves[0][None], f"{place}.{part}_shexp.weight": halves[1]}


def close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def kind_of(config: Mapping[str, Any]) -> str:
    keys = {"markov_rank": "dspark", "dflash_config": "dflash", "mtp_num_hidden_layers": "mtp"}
    return next((kind for key, kind in keys.items() if key in config), "eagle3")


def written(head: Path, folder: Path) -> tuple[Path, Path | None]:
    """The built-in target and the head as GGUF files; None if the target's file has the head."""
    source = builtin.path("target")
    target = folder / "target.gguf"
    config, target_config = (json.loads((place / "config.json").read_text()) for place in (head, source))
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    if kind_of(config) == "mtp":
        # llama.cpp never writes ends of text where these are ignored, and takes a token named <|end|> for one, too.
        target_config["eos_token_id"] = target_config["vocab_size"] - 1
        tokenizer["added_tokens"] = [{**token, "content": f"<{token['id']}>"} for token in tokenizer["added_tokens"]]
        tensors = load_file(source / "model.safetensors") | load_file(head / "model.safetensors")
        write_glm(target, target_config, tensors, tokenizer)
        return target, None
    gguf_file.write(source, target, "bf16")
    return target, write_head(
        folder / "head.gguf",
        config,
        load_file(head / "model.safetensors"),
        target_config["num_hidden_layers"],
        lambda writer: gguf_file.add_vocabulary(writer, tokenizer, target_config),
    )


# ------------------------------------------------------------------------------------------------ chains


def ours(target: Path, head: Path | None, prompts: Sequence[list[int]], chain: int, count: int) -> Counts:
    texts, drafted, accepted = list[list[int]](), 0, 0
    speculation = SpeculationParams(chain, width=1, children=1, max_depth=chain, lookup=False, recall=False)
    with Engine.load(str(target), draft=str(head or "mtp"), device="cpu", dtype="fp32") as engine:
        for prompt in prompts:
            steps = list(engine.generate(prompt, SamplingParams(count, ignore_eos=True), speculation))
            texts.append([token for step in steps for token in step.token_ids])
            drafted += steps[-1].stats.num_drafted_tokens
            accepted += len(texts[-1]) - len(steps)
    return Counts(texts, drafted, accepted)


def theirs(target: Path, head: Path | None, kind: str, prompts: Sequence[list[int]], chain: int, count: int) -> Counts:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(target)
    params.n_ctx, params.n_parallel, params.warmup, params.n_gpu_layers = 2048, 1, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    types = xllamacpp.common_speculative_type
    params.speculative.types = [getattr(types, f"COMMON_SPECULATIVE_TYPE_DRAFT_{kind.upper()}")]
    draft = params.speculative.draft
    if head is not None:
        draft.mparams.path = str(head)
    draft.n_max, draft.n_min, draft.p_min = chain, 0, 0.0
    draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = 1
    draft.cache_type_k = draft.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server, counts = xllamacpp.Server(params), Counts([], 0, 0)
    for prompt in prompts:
        fields = {"prompt": prompt, "n_predict": count, "temperature": 0.0, "ignore_eos": True, "return_tokens": True}
        fields["cache_prompt"] = False
        request = urllib.request.Request(f"{server.listening_address}/completion", json.dumps(fields).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as answer:
            text = json.load(answer)
        timings = text["timings"]
        drafted, accepted = counts.drafted + timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
        counts = Counts([*counts.texts, text["tokens"]], drafted, counts.accepted + accepted)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path)
    parser.add_argument("--chain", type=int, default=4, help="tokens of a chain")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    with tempfile.TemporaryDirectory() as place, redirect_stdout(answers):
        target, head = written(args.head, Path(place))
        with Engine.load(str(target), draft="none", device="cpu") as engine:
            prompts = [engine.encode(prompt) for prompt in builtin.prompts()[: args.prompts]]
        kind = kind_of(json.loads((args.head / "config.json").read_text()))
        mine = ours(target, head, prompts, args.chain, args.tokens)
        print(f"offspec    {mine}")
        os.dup2(2, 1)  # llama.cpp writes of its own accord
        others = theirs(target, head, kind, prompts, args.chain, args.tokens)
        print(f"llama.cpp  {others}")
        same = sum(a == b for a, b in zip(mine.texts, others.texts, strict=True))
        print(
            f"equal texts: {same} of {len(prompts)}; accepted: {mine.accepted / max(1, others.accepted):.3f} of theirs"
        )
        answers.flush()
        os._exit(0)  # llama.cpp's threads may outlive its server


if __name__ == "__main__":
    sys.exit(main())
