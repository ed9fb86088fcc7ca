"""Architecture → the function that reads it. Adding one is a file and a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvledger.errors import UnsupportedModel, nearest
from kvledger.model import deepseek, gemma, limits, llama, qwen
from kvledger.model.decoder import Decoder
from kvledger.model.packing import Tensor
from kvledger.spec.from_gguf import Facts
from kvledger.spec.model import ModelSpec

Reader = Callable[[Facts, ModelSpec, Mapping[str, Tensor]], Decoder]
READERS: dict[str, Reader] = {
    "llama": llama.read,
    "mistral": llama.read,
    "qwen2": qwen.read,
    "qwen3": qwen.read,
    "qwen2moe": qwen.read,
    "qwen3moe": qwen.read,
    "deepseek2": deepseek.read,
    "gemma2": gemma.read,
    "gemma3": gemma.read,
}


def read_decoder(metadata: Mapping[str, Any], spec: ModelSpec, tensors: Mapping[str, Tensor]) -> Decoder:
    """The decoder of a GGUF. Raises UnsupportedModel, naming what is supported, and DamagedFile."""
    arch = spec.architecture
    if arch not in READERS:
        close = nearest(arch, READERS)
        hint = f"; nearest: {', '.join(close)}" if close else ""
        raise UnsupportedModel(f"architecture {arch!r} is not computed here{hint}; supported: {', '.join(READERS)}")
    facts = Facts(arch, metadata)
    decoder = READERS[arch](facts, spec, tensors)
    limits.check(facts, spec, decoder, tensors)
    return decoder
