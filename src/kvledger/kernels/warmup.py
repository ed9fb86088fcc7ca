"""Compiling ahead: what a model will need, with a word on how far it is. Without a cache this takes some 15 seconds."""

from __future__ import annotations

from collections.abc import Callable

from kvledger.kernels import attention, elementwise, gated, kv_write, matmul, matmul_amx, matmul_f32
from kvledger.kernels.jit import Kernel
from kvledger.kernels.kv_pages import query_size
from kvledger.kernels.packed import FLOAT_MODES, integer_mode
from kvledger.kernels.team import Team


def common_kernels(mode: str, size: int = 2, form: str = "in_place") -> list[Kernel]:
    """Kernels of a dense model with 4- and 8-bit weights. `mode`: of activations; the others as in `attention`."""
    products: list[Kernel] = []
    for bits in (4, 8):
        if mode == "bf16":
            products.append(matmul_amx.KERNELS[bits, False])
            if bits == 8:
                products.append(matmul.KERNELS[bits, False, "int8x2"])  # the head
        elif mode == "fp32":
            products.append(matmul_f32.KERNELS[bits, False])
        else:
            modes = sorted({integer_mode(mode, bits, fine=fine) for fine in (False, True)})
            products += [matmul.KERNELS[bits, False, each] for each in modes]
            products += [gated.KERNELS[bits, False, each] for each in modes if bits == 4]
    if mode in FLOAT_MODES:
        products.append(elementwise.GATE_QUANTISE)
    others = [elementwise.EMBED, elementwise.NORM_QUANTISE]
    cached = [
        kv_write.KERNELS["fp32" if size == 4 else "bf16", query_size(size)],
        attention.KERNELS[size, form],
        attention.MERGE,
    ]
    return products + others + cached


def warmup(kernels: list[Kernel], progress: Callable[[float], None] = lambda share: None) -> None:
    """Compile, or load from the cache, and tell the share done after each."""
    Team(1).close()  # the functions that run programs
    for done, kernel in enumerate(kernels, start=1):
        assert kernel.address
        progress(done / len(kernels))
