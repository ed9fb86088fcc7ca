"""Random models of a few thousand weights, in memory, under GGUF's names and keys: what an opened file looks like."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvledger.weights.quantised import quantise_q4, quantise_q8

BYTES = {"Q8_0": (34, 32, quantise_q8), "Q4_1": (20, 32, quantise_q4)}


@dataclass
class Tensor:
    name: str
    shape: tuple[int, ...]
    ggml_type: str
    data: np.ndarray


@dataclass
class Weights:
    """Stands where `open_weights` stands."""

    metadata: dict[str, object]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    path: Path = Path("tiny.gguf")

    @property
    def facts(self):
        return {t.name: (t.shape, t.ggml_type, t.data.nbytes) for t in self.tensors.values()}

    def release(self) -> None:
        """Nothing is mapped."""

    def add(self, name: str, values: np.ndarray, kind: str = "F32") -> None:
        values = np.ascontiguousarray(values, np.float32)
        data = (
            values.view(np.uint8).reshape(-1)
            if kind == "F32"
            else np.frombuffer(bytes(BYTES[kind][2](values)), np.uint8)
        )
        self.tensors[name] = Tensor(name, values.shape, kind, data)


def decoder(arch: str = "llama", *, hidden: int = 64, heads: int = 4, kv_heads: int = 2, dim: int = 16, inner: int = 96,
            layers: int = 2, vocab: int = 96, context: int = 2048, kind: str = "Q8_0", tied: bool = False,
            bias: bool = False, qk_norm: bool = False, seed: int = 0, **extra: object) -> Weights:  # fmt: skip
    """A dense decoder. `extra` are metadata keys without the architecture, dots as double underscores."""
    rng = np.random.default_rng(seed)
    keys = {
        "block_count": layers, "context_length": context, "embedding_length": hidden, "feed_forward_length": inner,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads, "attention.key_length": dim,
        "attention.value_length": dim, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0,
        "rope.dimension_count": dim, **{k.replace("__", "."): v for k, v in extra.items()},
    }  # fmt: skip
    w = Weights({"general.architecture": arch, **{f"{arch}.{k}": v for k, v in keys.items()}})

    def matrix(name: str, rows: int, cols: int) -> None:
        w.add(name, rng.standard_normal((rows, cols)) / np.sqrt(cols), kind)

    def vector(name: str, size: int, around: float = 1.0) -> None:
        w.add(name, around + 0.2 * rng.standard_normal(size))

    matrix("token_embd.weight", vocab, hidden)
    for i in range(layers):
        p = f"blk.{i}."
        vector(p + "attn_norm.weight", hidden)
        vector(p + "ffn_norm.weight", hidden)
        for name, rows in (("q", heads * dim), ("k", kv_heads * dim), ("v", kv_heads * dim)):
            matrix(f"{p}attn_{name}.weight", rows, hidden)
            if bias:
                vector(f"{p}attn_{name}.bias", rows, 0.0)
            if qk_norm and name != "v":
                vector(f"{p}attn_{name}_norm.weight", dim)
        matrix(p + "attn_output.weight", hidden, heads * dim)
        matrix(p + "ffn_gate.weight", inner, hidden)
        matrix(p + "ffn_up.weight", inner, hidden)
        matrix(p + "ffn_down.weight", hidden, inner)
    vector("output_norm.weight", hidden)
    if not tied:
        matrix("output.weight", vocab, hidden)
    return w
