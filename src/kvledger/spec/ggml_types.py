"""The tensor types a GGUF file can hold: number in the file, elements per block, bytes per block.

From ggml's block structs (ggml.h and ggml-common.h). Knows sizes only; decoding is in `quantised`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GGMLType:
    """Weights of a row are stored in blocks of `block_elements`, each `block_bytes` long."""

    code: int
    name: str
    block_elements: int
    block_bytes: int

    def row_bytes(self, row_elements: int) -> int:
        """Bytes of a row; `row_elements` must be whole blocks."""
        assert row_elements % self.block_elements == 0, (self.name, row_elements)
        return row_elements // self.block_elements * self.block_bytes


_ROWS = [
    GGMLType(0, "F32", 1, 4), GGMLType(1, "F16", 1, 2), GGMLType(30, "BF16", 1, 2), GGMLType(28, "F64", 1, 8),
    GGMLType(24, "I8", 1, 1), GGMLType(25, "I16", 1, 2), GGMLType(26, "I32", 1, 4), GGMLType(27, "I64", 1, 8),
    GGMLType(2, "Q4_0", 32, 18), GGMLType(3, "Q4_1", 32, 20), GGMLType(6, "Q5_0", 32, 22), GGMLType(7, "Q5_1", 32, 24),
    GGMLType(8, "Q8_0", 32, 34), GGMLType(9, "Q8_1", 32, 40),
    GGMLType(10, "Q2_K", 256, 84), GGMLType(11, "Q3_K", 256, 110), GGMLType(12, "Q4_K", 256, 144),
    GGMLType(13, "Q5_K", 256, 176), GGMLType(14, "Q6_K", 256, 210), GGMLType(15, "Q8_K", 256, 292),
    GGMLType(16, "IQ2_XXS", 256, 66), GGMLType(17, "IQ2_XS", 256, 74), GGMLType(18, "IQ3_XXS", 256, 98),
    GGMLType(19, "IQ1_S", 256, 50), GGMLType(20, "IQ4_NL", 32, 18), GGMLType(21, "IQ3_S", 256, 110),
    GGMLType(22, "IQ2_S", 256, 82), GGMLType(23, "IQ4_XS", 256, 136), GGMLType(29, "IQ1_M", 256, 56),
    GGMLType(34, "TQ1_0", 256, 54), GGMLType(35, "TQ2_0", 256, 66),
    GGMLType(39, "MXFP4", 32, 17), GGMLType(40, "NVFP4", 64, 36), GGMLType(41, "Q1_0", 128, 18),
]  # fmt: skip
GGML_TYPES: dict[str, GGMLType] = {t.name: t for t in _ROWS}
BY_CODE: dict[int, GGMLType] = {t.code: t for t in _ROWS}
