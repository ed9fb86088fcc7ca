"""Kernels beside the machine's ceilings: `python benchmarks/kernels.py [--threads N] [--json]`.

Each line is one kernel on one shape, the best of several runs, with the fraction of the ceiling that binds it. The
ceilings are measured first, in the same run; compare fractions, not figures, between runs and machines.
"""

import argparse
import json
import time

import numpy as np

from kvledger.kernels import attention as att
from kvledger.kernels import elementwise as ew
from kvledger.kernels import matmul as mm
from kvledger.kernels import matmul_amx as amx
from kvledger.kernels import packed as pk
from kvledger.kernels.attention_loops import SPAN
from kvledger.kernels.ceilings import measure_ceilings
from kvledger.kernels.isa import ISA
from kvledger.kernels.kv_pages import AttentionShape, query_size
from kvledger.kernels.team import Team, empty_program

SHAPES = [(3072, 576), (576, 1536), (4096, 4096)]  # outputs, inputs: SmolLM2-135M's gate and up, its down; an 8 B model
COPIES_BYTES = 96 << 20  # matrices are visited in turn, so that they come from where a model's weights come from


def best_of(team: Team, programs: list[np.ndarray], ctx: np.ndarray, runs: int = 7) -> float:
    """Seconds per program."""
    best = float("inf")
    for _ in range(runs):
        start = time.perf_counter()
        for program in programs:
            team.run(program, ctx)
        best = min(best, (time.perf_counter() - start) / len(programs))
    return best


def context(team: Team, rows: int, scratch_bytes: int) -> tuple[np.ndarray, object]:
    scratch = pk.aligned_zeros(team.num_threads * scratch_bytes)
    ctx = np.zeros(64, np.int64)
    ctx[[mm.ROWS, mm.SCRATCH, mm.SCRATCH_BYTES, mm.NUM_THREADS]] = (
        rows, scratch.ctypes.data, scratch_bytes, team.num_threads)  # fmt: skip
    return ctx, scratch


def product(team: Team, outputs: int, inputs: int, rows: int, mode: str, found: dict) -> dict:
    rng = np.random.default_rng(0)
    level = rng.integers(0, 16, (outputs, inputs)).astype(np.uint8)
    scale = np.full((outputs, inputs // 32), 0.01, np.float16).astype(np.float32)
    first = pk.pack(level, scale, -8 * scale, 4)
    copies = [first] + [pk.PackedMatrix(outputs, inputs, 4, False, first.data.copy())
                        for _ in range(COPIES_BYTES // first.data.nbytes)]  # fmt: skip
    x, y = pk.Activations.empty(rows, inputs, mode), pk.aligned((-(-rows // 16) * 16, outputs))
    bias = pk.aligned((outputs,))
    ctx, keep = context(team, rows, max(mm.PANEL_BYTES, amx.scratch_bytes(first)))
    place = (y.ctypes.data, outputs * 4)
    if mode == "bf16":
        programs = [empty_program([amx.matmul(x, w, *place, bias, add=False)]) for w in copies]
    else:
        programs = [empty_program([mm.matmul(x, w, *place, mode, bias, add=False)]) for w in copies]
    seconds = best_of(team, programs, ctx, 5)
    del keep
    unit = {"bf16": "amx_bf16", "int16": "avx_int16"}.get(mode, "avx_int8")
    peak = found["units"].get(unit) or found["units"]["avx_int16"]
    operations, read = 2 * outputs * inputs * rows, first.data.nbytes
    work = operations * (2 if mode == "int8x2" else 1)
    return {
        "kernel": f"product {mode}", "shape": f"{rows} × {inputs} → {outputs}", "seconds": seconds,
        "ops_per_s": operations / seconds, "bytes_per_s": read / seconds,
        "of_arithmetic": work / seconds / peak, "of_memory": read / seconds / max(found["read_bytes_per_s"].values()),
    }  # fmt: skip


def attention(team: Team, sequences: int, new: int, context_tokens: int, found: dict) -> dict:
    heads, kv_heads, dim, block = 9, 3, 64, 16
    per_sequence = -(-(context_tokens + new) // block)
    blocks = sequences * per_sequence
    shape = AttentionShape(heads, kv_heads, dim, block, kv_heads * block * dim * 4, 0, 0)
    rows, ratio = sequences * new, heads // kv_heads
    pool = pk.aligned_zeros(blocks * shape.page_bytes + (1 << 16))
    number = np.float32 if query_size(2) == 4 else np.uint16
    q = pk.aligned((kv_heads * rows * ratio + 16, shape.padded_dim), number)
    out = pk.aligned((rows, heads, dim))
    segments = np.array([(i * new, new, context_tokens, 0) for i in range(sequences)], np.int64)
    spans = lambda last: -(-last // SPAN)  # noqa: E731
    units = np.array([
        (i, r, min(att.MAX_ROWS, new * ratio - r), 0,
         spans(context_tokens + (r + min(att.MAX_ROWS, new * ratio - r) - 1) // ratio + 1), -1)
        for i in range(sequences) for r in range(0, new * ratio, att.MAX_ROWS)], np.int64)  # fmt: skip
    tables = np.arange(blocks, dtype=np.int32).reshape(sequences, per_sequence)
    ctx, keep = context(team, rows, att.scratch_bytes(dim, dim))
    for word, value in ((att.SEGMENTS, segments), (att.UNITS, units), (ew.TABLES, tables), (ew.POOL, pool)):
        ctx[word] = value.ctypes.data
    ctx[att.NUM_UNITS], ctx[ew.TABLE_STRIDE] = len(units), per_sequence
    program = empty_program(att.attention(shape, q, out.ctypes.data, rows))
    seconds = best_of(team, [program], ctx)
    del keep
    pairs = sequences * (new * context_tokens + new * (new + 1) // 2)
    operations, read = 4 * pairs * heads * dim, sequences * (context_tokens + new) * kv_heads * dim * 4
    peak = found["units"].get("amx_bf16", found["units"]["avx_bf16"])
    return {
        "kernel": "attention bf16", "shape": f"{sequences} × {new} new after {context_tokens}", "seconds": seconds,
        "ops_per_s": operations / seconds, "bytes_per_s": read / seconds, "of_arithmetic": operations / seconds / peak,
        "of_memory": read / seconds / max(found["read_bytes_per_s"].values()),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure_ceilings(options.threads)
    team = Team(found["threads"])
    integers = ("int8", "int8x2") if ISA.vnni else ("int8", "int16")
    modes = [*dict.fromkeys(pk.integer_mode(mode, 4) for mode in integers), *(["bf16"] if ISA.amx else [])]
    lines = [product(team, n, k, m, mode, found) for mode in modes for n, k in SHAPES for m in (1, 8, 64, 256)]
    lines += [attention(team, *case, found) for case in ((1, 256, 0), (1, 256, 1792), (64, 1, 160), (1, 1, 2048))]
    team.close()
    if options.json:
        print(json.dumps({"path": ISA.name, "ceilings": found, "kernels": lines}))
        return
    print(f"path {ISA.name}, {found['threads']} threads")
    for threads, speed in found["read_bytes_per_s"].items():
        print(f"  memory read, {threads} threads   {speed / 1e9:8.1f} GB/s")
    for unit, rate in found["units"].items():
        print(f"  {unit:22} {rate / 1e9:8.0f} Gop/s")
    for x in lines:
        print(
            f"{x['kernel']:16} {x['shape']:24} {x['seconds'] * 1e6:9.1f} µs {x['ops_per_s'] / 1e9:7.0f} Gop/s "
            f"({x['of_arithmetic']:4.0%} of arithmetic) {x['bytes_per_s'] / 1e9:6.1f} GB/s "
            f"({x['of_memory']:4.0%} of memory)"
        )


if __name__ == "__main__":
    main()
