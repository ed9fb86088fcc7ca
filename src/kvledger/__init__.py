"""kvledger: know what every token of KV cache costs, then serve it at that price."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__", "plan"]

if TYPE_CHECKING:
    from kvledger.llm import LLM
    from kvledger.plan.planner import plan
    from kvledger.spec.sampling import SamplingParams

_HOMES = {"LLM": "kvledger.llm", "SamplingParams": "kvledger.spec.sampling"}


def __getattr__(name: str) -> object:
    """Public names are imported on first use, so that `kvledger --help` stays fast."""
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name == "plan":
        return importlib.import_module("kvledger.plan")  # a package that can be called
    raise AttributeError(f"module 'kvledger' has no attribute {name!r}")
