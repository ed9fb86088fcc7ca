"""Options of the engine that run, chat, serve and bench share. Checked by `spec.config`."""

from __future__ import annotations

from typing import Annotated, get_args

import typer

from kvledger.spec.config import Activations as _Activations
from kvledger.spec.kv_computed import COMPUTED


def _choice(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


KvMemory = Annotated[str, typer.Option(help="Bytes of the KV pool, as 512MiB; default: a share of free memory.")]
KvDtype = Annotated[str, typer.Option(help=f"Type of K and V in the cache: {_choice(COMPUTED)}.")]
BlockSize = Annotated[int | None, typer.Option(help="Tokens per block: 8 … 256, a power of two; default: 16, int4 32.")]
Activations = Annotated[str, typer.Option(help=f"Arithmetic of activations: {_choice(get_args(_Activations))}.")]
Threads = Annotated[int | None, typer.Option(help="Threads that compute; default: every core.")]
Quantise = Annotated[str, typer.Option(help="Safetensors only: q8_0 or q4_1 as they are read.")]
