"""A random llama of some 50,000 weights as a GGUF file: tokens are bytes (and ` t`), else a model like any other."""

import gguf
import numpy as np

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 64, 96, 2, 4, 2, 32, 512
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_names():
    """GPT-2's printable names of the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names, shift = {b: chr(b) for b in plain}, 0
    for b in range(256):
        if b not in names:
            names[b], shift = chr(256 + shift), shift + 1
    return [names[b] for b in range(256)]


def write_tiny_model(path, seed=0, window=None, context=CONTEXT, head_dim=HEAD_DIM):
    """Writes the file and returns its path; `window` makes every layer a sliding window of that many tokens."""
    rng = np.random.default_rng(seed)
    tokens = [*byte_names(), *MARKS, "Ġt", *(f"<{i}>" for i in range(60))]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    if window is not None:
        writer.add_sliding_window(window)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * len(MARKS) + [1] + [5] * 60)
    writer.add_token_merges(["Ġ t"])
    writer.add_eos_token_id(256)

    def tensor(name, *shape, scale=None):
        values = rng.normal(0, scale or shape[-1] ** -0.5, shape) if scale != 0 else np.ones(shape)
        writer.add_tensor(name, values.astype(np.float32))

    tensor("token_embd.weight", len(tokens), HIDDEN, scale=1.0)
    tensor("output_norm.weight", HIDDEN, scale=0)
    tensor("output.weight", len(tokens), HIDDEN, scale=0.25)
    for i in range(LAYERS):
        tensor(f"blk.{i}.attn_norm.weight", HIDDEN, scale=0)
        tensor(f"blk.{i}.ffn_norm.weight", HIDDEN, scale=0)
        tensor(f"blk.{i}.attn_q.weight", HEADS * head_dim, HIDDEN)
        tensor(f"blk.{i}.attn_k.weight", KV_HEADS * head_dim, HIDDEN)
        tensor(f"blk.{i}.attn_v.weight", KV_HEADS * head_dim, HIDDEN)
        tensor(f"blk.{i}.attn_output.weight", HIDDEN, HEADS * head_dim)
        tensor(f"blk.{i}.ffn_gate.weight", INNER, HIDDEN)
        tensor(f"blk.{i}.ffn_up.weight", INNER, HIDDEN)
        tensor(f"blk.{i}.ffn_down.weight", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
