"""How weights can be stored: bytes of one matrix under a scheme, and which parts a scheme touches.

A scheme is one row. The published formats are exact for a matrix of given shape; GGUF *file types* such as Q4_K_M mix
tensor types by rules of llama.cpp, which are followed here as far as shapes tell, so they are estimates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from kvledger.errors import UnknownName
from kvledger.spec.ggml_types import GGML_TYPES
from kvledger.spec.model import Part, Weight
from kvledger.units import cdiv

LINEAR: frozenset[Part] = frozenset({"attention", "mlp", "experts", "shared_experts", "state", "indexer"})
EXPERTS: frozenset[Part] = frozenset({"experts"})
ALL: frozenset[Part] = LINEAR | {"router", "norm", "bias", "embedding", "head", "vision", "other"}
GGUF_PARTS: frozenset[Part] = LINEAR | {"embedding", "head"}

MatrixBytes = Callable[[int, int], int]  # (rows, columns) → bytes


@dataclass(frozen=True, slots=True)
class Scheme:
    """`matrix_bytes` of a matrix of the `parts` it touches; everything else stays in `rest_bytes` per number.

    `rest_bytes` 0: as the activations. `experts_only` where a model has experts: the format is published that way.
    """

    name: str
    matrix_bytes: MatrixBytes
    parts: frozenset[Part] = LINEAR
    rest_bytes: int = 0
    experts_only: bool = False
    estimated: bool = False
    note: str = ""

    def touched(self, has_experts: bool) -> frozenset[Part]:
        """Parts whose matrices the scheme stores its own way."""
        return EXPERTS if self.experts_only and has_experts else self.parts

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight of a 4096 × 4096 matrix, scales included: for ordering schemes and for tables."""
        return self.matrix_bytes(4096, 4096) * 8 / (4096 * 4096)


def _plain(size: int) -> MatrixBytes:
    return lambda rows, cols: rows * cols * size


def _grouped(bits: int, group: int, scale_bits: int, per_matrix: int = 0) -> MatrixBytes:
    """`bits` per weight, `scale_bits` (scale and zero) per `group` inputs of a row, `per_matrix` bytes once."""
    return lambda rows, cols: cdiv(rows * cols * bits, 8) + cdiv(rows * cdiv(cols, group) * scale_bits, 8) + per_matrix


def _gptq(rows: int, cols: int) -> int:
    """Groups of 128 with fp16 scale and 4-bit zero, and an int32 group index per input."""
    return _grouped(4, 128, 20)(rows, cols) + 4 * cols


def _fp8_rows(rows: int, cols: int) -> int:
    return rows * cols + 4 * rows


def _fp8_blocks(rows: int, cols: int) -> int:
    return rows * cols + 4 * cdiv(rows, 128) * cdiv(cols, 128)


def _nf4(rows: int, cols: int) -> int:
    """Blocks of 64 whose scales are 8-bit in blocks of 256 (QLoRA, arXiv:2305.14314, double quantisation)."""
    return rows * cols // 2 + cdiv(rows * cols, 64) + 4 * cdiv(rows * cols, 64 * 256)


_ROWS = [
    Scheme("fp32", _plain(4), ALL, 4, note="every number in four bytes"),
    Scheme("bf16", _plain(2), ALL, 2, note="every number in two bytes"),
    Scheme("fp16", _plain(2), ALL, 2, note="every number in two bytes"),
    Scheme("fp8", lambda rows, cols: rows * cols + 4, note="one fp32 scale per matrix"),
    Scheme("fp8_channel", _fp8_rows, note="one fp32 scale per output row"),
    Scheme("fp8_block", _fp8_blocks, note="one fp32 scale per 128 × 128 block (DeepSeek-V3)"),
    Scheme("int8", _fp8_rows, note="one fp32 scale per output row"),
    Scheme("awq", _grouped(4, 128, 20), note="4 bits; fp16 scale and 4-bit zero per 128 inputs (arXiv:2306.00978)"),
    Scheme("gptq", _gptq, note="4 bits; fp16 scale, 4-bit zero per 128 inputs, group index (arXiv:2210.17323)"),
    Scheme("int4", _grouped(4, 128, 16), note="4 bits, symmetric; bf16 scale per 128 inputs"),
    Scheme("int4_g32", _grouped(4, 32, 16), experts_only=True, note="4 bits, symmetric; bf16 scale per 32 inputs"),
    Scheme("bnb4", _nf4, note="NF4 with double quantisation"),
    Scheme("mxfp4", _grouped(4, 32, 8), experts_only=True, note="4 bits; one 8-bit exponent per 32 inputs (OCP MX)"),
    Scheme("mxfp8", _grouped(8, 32, 8), note="8 bits; one 8-bit exponent per 32 inputs (OCP MX)"),
    Scheme("nvfp4", _grouped(4, 16, 8, 8), experts_only=True, note="4 bits; fp8 scale per 16 inputs"),
]  # fmt: skip
SCHEMES: dict[str, Scheme] = {s.name: s for s in _ROWS}
_ALIASES = {
    "float32": "fp32", "f32": "fp32", "bfloat16": "bf16", "float16": "fp16", "f16": "fp16", "half": "fp16",
    "fp8_e4m3": "fp8", "fp8-dynamic": "fp8_channel", "w8a8": "int8", "w4a16": "int4", "nf4": "bnb4", "bnb": "bnb4",
    "fp4": "nvfp4",
}  # fmt: skip

# ---------------------------------------------------------------------------------------------- GGUF

# Where a row is no whole number of 256-blocks, llama.cpp takes these types of 32 instead.
_FALLBACK = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "Q2_K": "Q4_0", "Q3_K": "Q4_0", "TQ1_0": "Q4_0",
             "TQ2_0": "Q4_0"}  # fmt: skip


def ggml_bytes(kind: str, rows: int, cols: int) -> int:
    """Bytes of a matrix in ggml type `kind`, or in what llama.cpp takes instead if rows are no whole blocks."""
    ggml = GGML_TYPES[kind]
    if cols % ggml.block_elements:
        ggml = GGML_TYPES[_FALLBACK.get(kind, "IQ4_NL" if kind.startswith("IQ") else "F16")]
        if cols % ggml.block_elements:
            ggml = GGML_TYPES["F16"]
    return rows * ggml.row_bytes(cols)


@dataclass(frozen=True, slots=True)
class FileType:
    """A GGUF file type: `base` for most matrices, others for values, attention output, MLP down and embeddings.

    `more` is used in the first and the last eighth of the layers and in every third between (llama.cpp's
    use_more_bits); with `always` in all of them.
    """

    base: str
    head: str = "Q6_K"
    embedding: str = ""  # "": as base
    value: str = ""
    output: str = ""
    down: str = ""
    always: bool = False

    def kind(self, weight: Weight, layer: int, num_layers: int, tied: bool) -> str:
        """ggml type of one matrix in layer `layer`."""
        if weight.part == "head" or (weight.part == "embedding" and tied):
            return self.head
        if weight.part == "embedding":
            return self.embedding or self.base
        more = self.always or _more_bits(layer, num_layers)
        if weight.name == "v" and more:
            return self.value or self.base
        if weight.name == "down" and more:
            return self.down or self.base
        if weight.part == "attention" and weight.split == "cols":
            return self.output or self.base
        return self.base


def _more_bits(layer: int, num_layers: int) -> bool:
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2


FILE_TYPES: dict[str, FileType] = {
    "q2_k": FileType("Q2_K", value="Q4_K", output="Q3_K", down="Q3_K", always=True),
    "q3_k_s": FileType("Q3_K"),
    "q3_k_m": FileType("Q3_K", value="Q4_K", output="Q4_K", down="Q4_K", always=True),
    "q3_k_l": FileType("Q3_K", value="Q5_K", output="Q5_K", down="Q5_K", always=True),
    "q4_k_s": FileType("Q4_K"),
    "q4_k_m": FileType("Q4_K", value="Q6_K", down="Q6_K"),
    "q5_k_s": FileType("Q5_K"),
    "q5_k_m": FileType("Q5_K", value="Q6_K", down="Q6_K"),
    "iq1_s": FileType("IQ1_S", "Q5_K", "Q2_K", "Q4_K", "IQ2_XXS", "Q2_K"),
    "iq1_m": FileType("IQ1_M", "Q5_K", "Q2_K", "Q4_K", "IQ2_XXS", "Q2_K"),
    "iq2_xxs": FileType("IQ2_XXS", "Q5_K", "Q2_K", "Q4_K", "IQ3_XXS", "Q2_K"),
    "iq2_xs": FileType("IQ2_XS", "Q5_K", "Q2_K", "Q4_K", "IQ3_XXS", "Q2_K"),
    "iq2_s": FileType("IQ2_XS", "Q5_K", "IQ3_S", "Q4_K", "IQ3_S", "IQ3_S"),
    "iq2_m": FileType("IQ2_S", "Q5_K", "IQ3_S", "Q4_K", "IQ3_S", "IQ3_S"),
    "iq3_xxs": FileType("IQ3_XXS", "Q5_K", "IQ3_S", "Q4_K", "IQ3_S", "Q3_K"),
    "iq3_xs": FileType("IQ3_XXS", "Q6_K", "", "Q4_K", "IQ3_S", "Q4_K"),
    "iq3_s": FileType("IQ3_S", "Q6_K", "", "Q4_K"),
    "iq3_m": FileType("IQ3_S", "Q6_K", "", "Q4_K", "Q4_K", "Q4_K"),
}


def _pure_file(kind: str) -> FileType:
    """A file of one type still keeps the output matrix in Q6_K, or Q8_0 where it is at least that wide."""
    keeps = GGML_TYPES[kind].block_bytes / GGML_TYPES[kind].block_elements >= 210 / 256
    return FileType(kind, head=kind if keeps else "Q6_K")


@lru_cache(maxsize=64)
def file_type(name: str) -> FileType | None:
    """The mix that a GGUF name such as `Q4_K_M` or `q8_0` means; None where it is no GGUF name."""
    text = name.strip().lower().replace("-", "_").removeprefix("ud_")
    text = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m", "q2_k_s": "q2_k", "q2_k_l": "q2_k"}.get(text, text)
    for long, short in (("_xxl", ""), ("_xl", "")):
        text = text.replace(long, short)
    found = FILE_TYPES.get(text) or FILE_TYPES.get(f"{text}_m")
    if found is None and text.upper() in GGML_TYPES and text not in ("bf16", "f16", "f32", "f64", "mxfp4", "nvfp4"):
        return _pure_file(text.upper())
    return found


def scheme(name: str) -> Scheme:
    """The scheme of that name or alias. Raises UnknownName; GGUF names are `file_type`'s."""
    text = name.strip().lower()
    found = SCHEMES.get(_ALIASES.get(text, text))
    if found is None:
        raise UnknownName("weight scheme", name[:100], [*SCHEMES, *_ALIASES, *FILE_TYPES, "q8_0", "q4_0", "q6_k"])
    return found


def scheme_bits(name: str) -> float:
    """Bits per weight of a scheme or GGUF type, scales included: for ordering and tables. Raises UnknownName."""
    mix = file_type(name)
    if mix is None:
        return scheme(name).bits_per_weight
    return ggml_bytes(mix.base, 4096, 4096) * 8 / (4096 * 4096)
