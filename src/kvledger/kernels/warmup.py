"""Compiling ahead: what a model will need, with a word on how far it is. Without a cache this takes some 15 seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvledger.kernels import attention, elementwise, gated, kv_int4, kv_write, matmul, matmul_amx, matmul_f32
from kvledger.kernels.jit import Kernel
from kvledger.kernels.kv_pages import AttentionShape
from kvledger.kernels.packed import FIFTEEN_BITS, FLOAT_MODES, TURNING, integer_mode
from kvledger.kernels.team import Team


def common_kernels(mode: str, kind: str) -> list[Kernel]:
    """Kernels of a dense model with 4- and 8-bit weights and heads' keys and values in blocks of 16 tokens or more.

    `mode`: of activations; `kind`: of the KV cache.
    """
    products: list[Kernel] = []
    for bits in (4, 8):
        if mode == "bf16":
            products.append(matmul_amx.KERNELS[bits, False])
            if bits == 8:
                products.append(matmul.KERNELS[bits, False, "int8x2"])  # the head
        elif mode == "fp32":
            products.append(matmul_f32.KERNELS[bits, False])
        else:
            modes = {worth: integer_mode(mode, bits, worth) for worth in (0, TURNING, FIFTEEN_BITS)}
            products += [matmul.KERNELS[bits, False, each] for each in sorted({*modes.values()})]
            gates = {modes[0], modes[FIFTEEN_BITS]} if bits == 4 else ()  # gate and up are not worth turning
            products += [gated.KERNELS[bits, False, each] for each in sorted(gates)]
    if mode in FLOAT_MODES:
        products.append(elementwise.GATE_QUANTISE)
    others = [elementwise.EMBED, elementwise.NORM_QUANTISE]
    return products + others + _of_cache(kind)


def _of_cache(kind: str) -> list[Kernel]:
    """What writes a type's pages and attends to them, whatever the heads."""
    plain = AttentionShape(heads=1, kv_heads=1, dim=64, block_size=32, page_bytes=0, group=0, slot=0)
    newest = plain if kind == "int4" else None
    shape = replace(plain, kind=kind, newest=newest)
    found = [kv_write.kernel_of(newest or shape), attention.kernel_of(shape), attention.MERGE]
    return [*found, kv_int4.SEAL] if newest else found


def warmup(kernels: list[Kernel], progress: Callable[[float], None] = lambda share: None) -> None:
    """Compile, or load from the cache, and tell the share done after each."""
    Team(1).close()  # the functions that run programs
    for done, kernel in enumerate(kernels, start=1):
        assert kernel.address
        progress(done / len(kernels))
