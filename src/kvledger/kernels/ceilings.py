"""What this machine can do at best: small loops that do nothing but read memory, or nothing but multiply.

Seconds are taken as the best of a few runs, so that a neighbour's burst does not count; a busy machine still shows less
than it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import types

from kvledger.kernels import simd
from kvledger.kernels.emit import F32, I16, I32, I64, LANES, VI32, Emit, Val, vec
from kvledger.kernels.isa import ISA
from kvledger.kernels.jit import Kernel
from kvledger.kernels.matmul_amx import TILE_SHAPES
from kvledger.kernels.matmul_loops import HALF
from kvledger.kernels.packed import aligned_zeros
from kvledger.kernels.simd import emitted
from kvledger.kernels.team import Team, empty_program, next_item, num_cpus

READ_BYTES = 256 << 20  # per thread; well beyond the last-level cache of most machines
_CHAINS = 12  # independent sums: more than latency × ports, fewer than registers
_WIDE = LANES if ISA.vnni else HALF  # lanes of a register


def _read(e: Emit, address: Val, num_bytes: Val, out: Val) -> None:
    sums = [e.var(e.const(VI32, 0)) for _ in range(4)]
    with e.loop(Val(e, e.b.udiv(num_bytes.v, ir.Constant(I64, 256)))) as i:
        for lane in range(4):
            sums[lane].set(sums[lane].get() + e.load(VI32, address + i * 256, lane * 64))
    for s in sums:
        e.store(e.load(VI32, out) + s.get(), out)


class Unit(NamedTuple):
    """A way to multiply and add: lanes of sums, their type, products per lane, the instruction."""

    lanes: int
    element: ir.Type
    products: int
    dot: Callable[[Emit, Val, Val], Val]


UNITS = {
    "bf16": Unit(LANES, F32, 2, lambda e, s, w: e.dot_bf16(s, e.bitcast(w, VI32), e.bitcast(w, VI32))),
    "fp32": Unit(_WIDE, F32, 1, lambda e, s, w: e.fma(s, w, s)),
}
if ISA.vnni:
    UNITS["int8"] = Unit(LANES, I32, 4, lambda e, s, w: e.dot_u8s8(s, s, w))
else:
    UNITS["int16"] = Unit(HALF, I32, 2, lambda e, s, w: e.dot_i16(w, s, w))
if ISA.name == "avx2":
    UNITS["int8"] = Unit(2 * HALF, I16, 2, lambda e, s, w: e.dot_u8s8_i16(w, s, w))


def _chains(kind: str) -> Any:
    """An emitted function (rounds, out): `rounds` × _CHAINS dependent products of one kind."""

    def emit(e: Emit, rounds: Val, out: Val) -> None:
        unit = UNITS[kind]
        sums = [e.var(e.const(vec(unit.element, unit.lanes), i + 1)) for i in range(_CHAINS)]
        word = e.load(vec(unit.element, unit.lanes), out)
        with e.loop(rounds):
            for s in sums:
                s.set(unit.dot(e, s.get(), word))
        words = vec(I32, unit.lanes // 2 if unit.element == I16 else unit.lanes)
        for s in sums:
            e.store(e.bitcast(s.get(), words) | e.load(words, out), out)

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
MULTIPLY = {kind: Kernel(f"ceiling_{kind}", _multiplying, loop=_chains(kind)) for kind in UNITS}
TILES = Kernel("ceiling_tiles", _multiplying, loop=tiles)


def measure_ceilings(num_threads: int | None = None) -> dict[str, Any]:
    """What memory and arithmetic give on all threads. Takes some seconds.

    `threads`; `read_bytes_per_s` by number of threads (one, and all); `peak_ops_per_s` by number type, of the fastest
    unit, a product and a sum being two; `units` the same by unit: `avx_int8`, `avx_int16`, `avx_bf16`, `avx_fp32`,
    `amx_bf16` (`avx` stands for whatever vectors this path has).
    """
    threads = num_threads or num_cpus()
    reading = {n: _read_speed(n) for n in sorted({1, threads})}
    units = {
        f"avx_{kind}": _rate(MULTIPLY[kind], threads, 400_000, _CHAINS * unit.lanes * unit.products * 2)
        for kind, unit in UNITS.items()
    }
    if ISA.amx:
        units["amx_bf16"] = _rate(TILES, threads, 100_000, 4 * 16 * 16 * 32 * 2)
    peaks: dict[str, float] = {}
    for unit, rate in units.items():
        kind = unit.partition("_")[2]
        peaks[kind] = max(rate, peaks.get(kind, 0.0))
    peaks.setdefault("int8", peaks.pop("int16", 0.0))  # what bytes are widened to
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
