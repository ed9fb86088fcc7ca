"""The tensor types a GGUF file can hold; the table is `spec.ggml_types`, because plans count with it, too."""

from kvledger.spec.ggml_types import BY_CODE, GGML_TYPES, GGMLType

__all__ = ["BY_CODE", "GGML_TYPES", "GGMLType"]
