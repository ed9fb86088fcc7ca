"""What this machine can do at best: small loops that do nothing but read memory, or nothing but multiply.

Seconds are taken as the best of a few runs, so that a neighbour's burst does not count; a busy machine still shows less
than it has.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from kvledger.kernels import simd
from kvledger.kernels.emit import I64, VF32, VI32, Emit, Val
from kvledger.kernels.isa import ISA
from kvledger.kernels.jit import Kernel
from kvledger.kernels.matmul import aligned_zeros
from kvledger.kernels.matmul_amx import TILE_SHAPES
from kvledger.kernels.simd import emitted
from kvledger.kernels.team import Team, empty_program, next_item, num_cpus

READ_BYTES = 256 << 20  # per thread; well beyond the last-level cache of most machines
_CHAINS = 12  # independent sums: more than latency × ports


def _read(e: Emit, address: Val, num_bytes: Val, out: Val) -> None:
    sums = [e.var(e.const(VI32, 0)) for _ in range(4)]
    with e.loop(Val(e, e.b.udiv(num_bytes.v, ir.Constant(I64, 256)))) as i:
        for lane in range(4):
            sums[lane].set(sums[lane].get() + e.load(VI32, address + i * 256, lane * 64))
    for s in sums:
        e.store(e.load(VI32, out) + s.get(), out)


def _chains(kind: str) -> Any:
    """An emitted function (rounds, out): `rounds` × _CHAINS dependent products of one kind."""

    def emit(e: Emit, rounds: Val, out: Val) -> None:
        is_integer = kind == "int8"
        sums = [e.var(e.const(VI32 if is_integer else VF32, i + 1)) for i in range(_CHAINS)]
        word = e.load(VI32, out)
        with e.loop(rounds):
            for s in sums:
                if kind == "fp32":
                    s.set(e.fma(s.get(), e.bitcast(word, VF32), s.get()))
                else:
                    s.set((e.dot_u8s8 if is_integer else e.dot_bf16)(s.get(), word, word))
        for s in sums:
            e.store(e.bitcast(s.get(), VI32) | e.load(VI32, out), out)

    return emitted(types.void, [types.int64] * 2, emit)


def _tiles(e: Emit, rounds: Val, out: Val) -> None:
    """`rounds` × four tile products of bf16."""
    for tile in range(4, 8):
        e.tile_load(tile, out, e.i64(0))
    with e.loop(rounds):
        for tile in range(4):
            e.tile_dot("bf16ps", tile, 4 + tile // 2, 6 + tile % 2)
    for tile in range(4):
        e.tile_zero(tile)


read = emitted(types.void, [types.int64] * 3, _read)
int8, bf16, fp32 = (_chains(k) for k in ("int8", "bf16", "fp32"))
tiles = emitted(types.void, [types.int64] * 2, _tiles if ISA.amx else lambda e, *args: None)
loop: Any = None  # bound per variant


def _reading(op: int, ctx: int, thread: int) -> None:
    """Arguments: memory, bytes per thread, threads."""
    memory, num_bytes, out = simd.get_i64(op + 8), simd.get_i64(op + 16), simd.get_i64(ctx)
    item = next_item(op)
    while item < simd.get_i64(op + 24):
        read(memory + item * num_bytes, num_bytes, out + thread * 256)
        item = next_item(op)


def _multiplying(op: int, ctx: int, thread: int) -> None:
    """Arguments: rounds, tile configuration, threads."""
    simd.tile_config(simd.get_i64(op + 16))
    while next_item(op) < simd.get_i64(op + 24):
        loop(simd.get_i64(op + 8), simd.get_i64(ctx) + thread * 256)
    simd.tile_release(0)


READ = Kernel("ceiling_read", _reading)
MULTIPLY = {
    k: Kernel(f"ceiling_{k}", _multiplying, loop=f) for k, f in (("int8", int8), ("bf16", bf16), ("fp32", fp32))
}
TILES = Kernel("ceiling_tiles", _multiplying, loop=tiles)


def measure_ceilings(num_threads: int | None = None) -> dict[str, Any]:
    """What memory and arithmetic give on all threads. Takes some seconds.

    `threads`; `read_bytes_per_s` by number of threads (one, and all); `peak_ops_per_s` by number type, of the fastest
    unit, a product and a sum being two; `units` the same by unit: `avx_int8`, `avx_bf16`, `avx_fp32`, `amx_bf16`
    (`avx` stands for whatever vectors this path has).
    """
    threads = num_threads or num_cpus()
    reading = {n: _read_speed(n) for n in sorted({1, threads})}
    units = {
        f"avx_{kind}": _rate(MULTIPLY[kind], threads, 400_000, _CHAINS * 16 * per_lane)
        for kind, per_lane in (("int8", 8), ("bf16", 4), ("fp32", 2))
    }
    if ISA.amx:
        units["amx_bf16"] = _rate(TILES, threads, 100_000, 4 * 16 * 16 * 32 * 2)
    peaks: dict[str, float] = {}
    for unit, rate in units.items():
        kind = unit.partition("_")[2]
        peaks[kind] = max(rate, peaks.get(kind, 0.0))
    return {"threads": threads, "read_bytes_per_s": reading, "peak_ops_per_s": peaks, "units": units}


def _read_speed(threads: int) -> float:
    memory = aligned_zeros(threads * READ_BYTES)
    memory[::4096] = 1  # every page is there
    return threads * READ_BYTES / _best([READ.address, memory.ctypes.data, READ_BYTES, threads], threads, memory)


def _rate(kernel: Kernel, threads: int, rounds: int, per_round: int) -> float:
    return (
        threads
        * rounds
        * per_round
        / _best([kernel.address, rounds, TILE_SHAPES[15].ctypes.data, threads], threads, None)
    )


def _best(op: list[int], threads: int, keep: object) -> float:
    """Seconds of the op on a team of threads, best of seven. `keep` lives as long."""
    out, ctx = aligned_zeros(threads * 256 + 1024), np.zeros(64, np.int64)
    ctx[0] = out.ctypes.data
    team, program, best = Team(threads), empty_program([op]), float("inf")
    for _ in range(7):
        out[:] = 0
        start = time.perf_counter()
        team.run(program, ctx)
        best = min(best, time.perf_counter() - start)
    team.close()
    del keep
    return best
