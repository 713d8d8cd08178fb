"""Writes a model as GGUF in 16 bits for llama.cpp or OpenVINO, tensor by tensor.

    PYTHON gguf_file.py SOURCE FILE.gguf bf16|f16

SOURCE: a Llama checkpoint (safetensors, bf16), or another GGUF file, whose metadata stay and whose matrices are
dequantised (to bf16).

Runs in the peer's environment (packages gguf and numpy). The rows of q and k are reordered: RoPE rotates dimension i
with i + D/2 in Hugging Face's order, and 2i with 2i + 1 in llama.cpp's. Weights stay bf16, or become fp16 for OpenVINO,
whose reader does not support bf16; norms become fp32 for llama.cpp.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

FILE_TYPES = {"bf16": gguf.LlamaFileType.MOSTLY_BF16, "f16": gguf.LlamaFileType.MOSTLY_F16}


def write(folder: Path, file: Path, dtype: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    part = file.with_suffix(".part")
    writer = gguf.GGUFWriter(str(part), "llama")
    writer.add_file_type(FILE_TYPES[dtype])
    describe(writer, config)
    add_vocabulary(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    tensors = dict(stored(folder))
    for name, bits in tensors.items():
        writer.add_tensor_info(names.get_name(name, try_suffixes=(".weight",)), *told(bits, dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, bits in tensors.items():
        writer.write_tensor_data(content(name, bits, config, dtype))
    writer.close()
    part.rename(file)


def rewrite(source: Path, file: Path) -> None:
    """Another GGUF file's model in bf16; vectors in fp32."""
    reader, part = gguf.GGUFReader(source), file.with_suffix(".part")
    writer = gguf.GGUFWriter(str(part), reader.fields["general.architecture"].contents())
    writer.add_file_type(FILE_TYPES["bf16"])
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        shape = tuple(reversed([int(size) for size in tensor.shape]))
        writer.add_tensor_info(tensor.name, *told(np.empty(shape, np.uint16), "bf16"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        is_vector = len(tensor.shape) == 1
        writer.write_tensor_data(values if is_vector else gguf.quants.quantize(values, gguf.GGMLQuantizationType.BF16))
    writer.close()
    part.rename(file)


def told(bits: np.ndarray, dtype: str) -> tuple[Any, ...]:
    """Shape, dtype, bytes and GGUF type of the result of `content`; numpy has no bf16, so bf16 is written as bytes."""
    if bits.ndim == 1:
        return bits.shape, np.dtype(np.float32), 4 * bits.size
    if dtype == "f16":
        return bits.shape, np.dtype(np.float16), bits.nbytes
    return (bits.shape[0], 2 * bits.shape[1]), np.dtype(np.uint8), bits.nbytes, gguf.GGMLQuantizationType.BF16


def content(name: str, bits: np.ndarray, config: dict[str, Any], dtype: str) -> np.ndarray:
    """A matrix's rows, as bf16's bytes or in fp16; a norm in fp32."""
    if bits.ndim == 1:
        return numbers(bits)
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        bits = bits.reshape(heads, 2, -1, bits.shape[1]).swapaxes(1, 2).reshape(bits.shape)
    return numbers(bits).astype(np.float16) if dtype == "f16" else np.ascontiguousarray(bits).view(np.uint8)


def numbers(bits: np.ndarray) -> np.ndarray:
    """bf16's bits as fp32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """Byte-level BPE. The benchmark uses only token ids, but llama.cpp requires a vocabulary."""
    ids = {**tokenizer["model"]["vocab"], **{t["content"]: t["id"] for t in tokenizer["added_tokens"]}}
    tokens = [f"<unused{i}>" for i in range(config["vocab_size"])]
    for token, number in ids.items():
        tokens[number] = token
    special = {token["id"] for token in tokenizer["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(len(tokens))]
    )
    writer.add_token_merges(merges)
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def stored(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor's bits (uint16), mapped from its file."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
        for name, info in header.items():
            if name != "__metadata__":
                if info["dtype"] != "BF16":
                    sys.exit(f"Error: {file}: {name} is {info['dtype']}; only bf16 checkpoints are converted")
                start = 8 + length + info["data_offsets"][0]
                yield name, np.memmap(file, np.uint16, "r", start, tuple(info["shape"]))


if __name__ == "__main__":
    if sys.argv[1].endswith(".gguf"):
        if sys.argv[3] != "bf16":
            sys.exit(f"Error: {sys.argv[1]}: a GGUF file is rewritten in bf16 only, not in {sys.argv[3]}")
        rewrite(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        write(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
