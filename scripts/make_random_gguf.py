"""Writes a GGUF file of random weights in the shape of a published model, to measure speed without a download.

    python scripts/make_random_gguf.py llama-3.2-1b /tmp/llama-3.2-1b.gguf
    python scripts/make_random_gguf.py qwen3-0.6b /tmp/qwen3-0.6b.gguf --types q4_k_m

Shapes and rope are those of the models' config.json; norms are 1. Matrices are Q4_1 and the embedding Q8_0, or in the
manner of Q4_K_M: Q4_K, but Q6_K for the embedding and, in every other layer, for values and what leaves the MLP. The
tokenizer knows single bytes and placeholders, so any prompt works and every answer is nonsense.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFWriter, LlamaFileType

from kvledger.text.pieces import byte_alphabet
from kvledger.weights.ggml_types import GGML_TYPES


@dataclass(frozen=True)
class Shape:
    """A decoder with tied embedding."""

    arch: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_base: float
    qk_norm: bool = False
    llama3_rope: bool = False


SHAPES = {
    # https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json
    "llama-3.2-1b": Shape("llama", 16, 2048, 8192, 32, 8, 64, 128256, 131072, 500000.0, llama3_rope=True),
    # https://huggingface.co/Qwen/Qwen3-0.6B/blob/main/config.json
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, 40960, 1000000.0, qk_norm=True),
}


# spread of the levels, mean level (where a minimum stands for it), bytes of the scale and of the minimum
KINDS = {
    "Q4_1": (np.sqrt((16**2 - 1) / 12), 7.5, 0, 2), "Q8_0": (np.sqrt((256**2 - 1) / 12), 0, 0, None),
    "Q4_K": (48 * np.sqrt((16**2 - 1) / 12), 7.5, 0, 2), "Q6_K": (64 * np.sqrt((64**2 - 1) / 12), 0, 208, None),
}  # fmt: skip
FILE_TYPES = {"q4_1": LlamaFileType.MOSTLY_Q4_1, "q4_k_m": LlamaFileType.MOSTLY_Q4_K_M}
K_SCALES = {"Q4_K": (4, b"\xf0" * 8 + bytes(4)), "Q6_K": (192, b"\x40" * 16)}  # all groups' scales are 48, or 64


def random_blocks(rng: np.random.Generator, kind: str, rows: int, cols: int) -> np.ndarray:
    """uint8[rows, bytes of a row]: random levels under scales that keep the variance of what passes through."""
    type_ = GGML_TYPES[kind]
    data = rng.integers(0, 256, (rows * cols // type_.block_elements, type_.block_bytes), dtype=np.uint8)
    if kind in K_SCALES:
        start, scales = K_SCALES[kind]
        data[:, start : start + len(scales)] = np.frombuffer(scales, np.uint8)
    spread, middle, scale_at, minimum_at = KINDS[kind]
    scale = np.full((len(data), 1), cols**-0.5 / spread, np.float16)
    data[:, scale_at : scale_at + 2] = scale.view(np.uint8)
    if minimum_at is not None:
        sign = 1 if kind in K_SCALES else -1  # K-quants subtract theirs
        data[:, minimum_at : minimum_at + 2] = (scale * np.float16(sign * middle)).view(np.uint8)
    return data.reshape(rows, -1)


def kind_of(types: str, part: str, layer: int) -> str:
    """The type of a matrix; `part` is its name within a layer, or token_embd."""
    if types == "q4_1":
        return "Q8_0" if part == "token_embd" else "Q4_1"
    return "Q6_K" if part == "token_embd" or (part in ("attn_v", "ffn_down") and layer % 2 == 0) else "Q4_K"


def write_metadata(writer: GGUFWriter, name: str, shape: Shape, types: str) -> None:
    writer.add_name(f"{name}, random weights")
    writer.add_file_type(FILE_TYPES[types])  # OpenVINO reads no file without it
    writer.add_quantization_version(GGML_QUANT_VERSION)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-5 if shape.arch == "llama" else 1e-6)
    writer.add_vocab_size(shape.vocab)


def write_tokenizer(writer: GGUFWriter, vocab: int) -> None:
    letters = [*(chr(point) for point in byte_alphabet()), "Ġt"]
    placeholders = [f"<|{i}|>" for i in range(len(letters), vocab - 1)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*letters, *placeholders, "<|endoftext|>"])
    writer.add_token_types([1] * len(letters) + [5] * len(placeholders) + [3])
    writer.add_token_merges(["Ġ t"])
    writer.add_eos_token_id(vocab - 1)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}\n{% endfor %}")


def matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    """Name within a layer → (rows, columns)."""
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "attn_q": (query, shape.hidden), "attn_k": (kv, shape.hidden), "attn_v": (kv, shape.hidden),
        "attn_output": (shape.hidden, query), "ffn_gate": (shape.inner, shape.hidden),
        "ffn_up": (shape.inner, shape.hidden), "ffn_down": (shape.hidden, shape.inner),
    }  # fmt: skip


def rope_factors(shape: Shape) -> np.ndarray:
    """Llama 3.2's: factor 32, bands 1 and 4, 8,192 trained positions."""
    wavelength = 2 * np.pi * shape.rope_base ** (np.arange(0, shape.head_dim, 2) / shape.head_dim)
    kept = np.clip((8192 / wavelength - 1) / 3, 0, 1)
    return (1 / ((1 - kept) / 32 + kept)).astype(np.float32)


def write(name: str, path: Path, types: str = "q4_1") -> None:
    shape, rng = SHAPES[name], np.random.default_rng(0)
    writer = GGUFWriter(path, shape.arch, use_temp_file=True)
    write_metadata(writer, name, shape, types)
    write_tokenizer(writer, shape.vocab)

    def quantised(tensor: str, kind: str, rows: int, cols: int) -> None:
        writer.add_tensor(tensor, random_blocks(rng, kind, rows, cols), raw_dtype=GGMLQuantizationType[kind])

    def ones(tensor: str, count: int) -> None:
        writer.add_tensor(tensor, np.ones(count, np.float32))

    quantised("token_embd.weight", kind_of(types, "token_embd", 0), shape.vocab, shape.hidden)
    ones("output_norm.weight", shape.hidden)
    if shape.llama3_rope:
        writer.add_tensor("rope_freqs.weight", rope_factors(shape))
    for i in range(shape.layers):
        ones(f"blk.{i}.attn_norm.weight", shape.hidden)
        ones(f"blk.{i}.ffn_norm.weight", shape.hidden)
        if shape.qk_norm:
            ones(f"blk.{i}.attn_q_norm.weight", shape.head_dim)
            ones(f"blk.{i}.attn_k_norm.weight", shape.head_dim)
        for part, (rows, cols) in matrices(shape).items():
            quantised(f"blk.{i}.{part}.weight", kind_of(types, part, i), rows, cols)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=SHAPES)
    parser.add_argument("path", type=Path)
    parser.add_argument("--types", choices=FILE_TYPES, default="q4_1")
    arguments = parser.parse_args()
    write(arguments.model, arguments.path, arguments.types)
