"""Every kernel against its reference, on the path this process runs and, in processes of their own, on all others."""

import gc
import os
import subprocess
import sys
from dataclasses import replace
from types import FunctionType

import numpy as np
import pytest

from kvledger.kernels import attention as att
from kvledger.kernels import attention_loops as loops
from kvledger.kernels import elementwise as ew
from kvledger.kernels import gated, isa, kv_int4, kv_pages, kv_write, simd, turned
from kvledger.kernels import latent as mla
from kvledger.kernels import matmul as mm
from kvledger.kernels import matmul_amx as amx
from kvledger.kernels import matmul_f32 as f32
from kvledger.kernels import packed as pk
from kvledger.kernels import reference as ref
from kvledger.kernels.jit import Kernel
from kvledger.kernels.team import Team, empty_program, next_item
from kvledger.spec.kv import FullKV, KVStorage, LatentKV

RNG = np.random.default_rng(7)
INTEGER = ["int8", "int8x2", "turned"] if isa.ISA.vnni else ["int8", "int16"]
SPREAD = ("int8", "fp8_e4m3")  # kept transformed
NOPE, EPS = 16, 1e-5  # of latent attention: channels of a query that are not read as they are; and the latent's norm
LATENT_NORM = (1 + 0.3 * RNG.standard_normal(512)).astype(np.float32)
LOW_BITS = {**pk.TERM_BITS, "int16": pk.TERM_BITS["int8x2"]}
MODES = [*INTEGER, "fp32", *(["bf16"] if isa.ISA.amx else [])]


def _exp_of_rows(op, ctx, thread):
    """Arguments: x, y; 16 numbers are a row."""
    x, y, rows = simd.get_i64(op + 8), simd.get_i64(op + 16), mm.num_rows(op, ctx)
    row = next_item(op)
    while row < rows:
        simd.store_f32(y + row * 64, simd.exp(simd.load_f32(x + row * 64)))
        row = next_item(op)


@pytest.fixture(scope="module", params=[1, 2])
def team(request):
    team = Team(request.param)
    yield team
    team.close()


def run(team, ops, rows, scratch_bytes=1 << 20, **words):
    """Run ops over `rows` rows; `words` are ctx words by name: arrays or numbers."""
    scratch = pk.aligned_zeros(scratch_bytes * team.num_threads)
    ctx = np.zeros(64, np.int64)
    ctx[[mm.ROWS, mm.SCRATCH, mm.SCRATCH_BYTES, mm.NUM_THREADS]] = (
        rows, scratch.ctypes.data, scratch_bytes, team.num_threads)  # fmt: skip
    for name, value in words.items():
        index = ew.TABLES + 1 if name == "NEWEST" else getattr(att, name, None) or getattr(ew, name)
        ctx[index] = value.ctypes.data if isinstance(value, np.ndarray) else value
    team.run(empty_program(ops), ctx)


def padded(rows, cols):
    return np.zeros((-(-rows // 16) * 16, cols), np.float32)


def random_matrix(rows, cols, bits, wide):
    kind = np.float32 if wide else np.float16
    level = RNG.integers(0, 1 << bits, (rows, cols)).astype(np.uint8)
    scale = (RNG.random((rows, cols // 32)) * 0.01 + 0.001).astype(kind).astype(np.float32)
    minimum = (-scale * (1 << (bits - 1)) * RNG.random(scale.shape)).astype(kind).astype(np.float32)
    return pk.pack(level, scale, minimum, bits), ref.dequantise(level, scale, minimum)


def product(team, x, packed, mode, bias=None, into=None):
    rows, cols = x.shape
    mode = pk.integer_mode(mode, packed.bits) if mode in INTEGER else mode
    acts = pk.Activations.empty(rows, cols, mode)
    y = padded(rows, packed.num_tiles * 16) if into is None else into
    bias = np.zeros(y.shape[1], np.float32) if bias is None else bias
    source = np.ascontiguousarray(x, np.float32)
    if mode == "bf16":
        op = amx.matmul(acts, packed, y.ctypes.data, y.shape[1] * 4, bias, add=into is not None)
    elif mode == "fp32":
        op = f32.matmul(acts, packed, y.ctypes.data, y.shape[1] * 4, bias, add=into is not None)
    else:
        op = mm.matmul(acts, packed, y.ctypes.data, y.shape[1] * 4, mode, bias, add=into is not None)
    run(team, [ew.quantise(source.ctypes.data, acts, mode), op], rows)
    return y[:rows, : packed.rows]


def rounded(x, mode):
    """Activations as the kernel sees them."""
    if mode == "bf16":
        return ref.to_bf16(x)
    if mode == "fp32":
        return x
    if mode == "turned":
        level, scale = ref.quantise(as_rounded(x, mode), 0)
        level = ref.turn(level)
    else:
        level, scale = ref.quantise(x, LOW_BITS[mode])
    return (level.reshape(len(x), -1, 32) * scale[..., None]).reshape(x.shape)


def as_rounded(x, mode):
    """The numbers that are rounded."""
    return ref.turn(x) / 16 if mode == "turned" else x


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("wide", [False, True])
def test_product_is_the_reference_and_rows_do_not_matter(team, bits, wide, mode):
    packed, w = random_matrix(56, 96, bits, wide)  # 56: the last tile is half empty, and tiles are odd in number
    assert packed.wide == wide
    x = RNG.standard_normal((37, 96)).astype(np.float32)
    x[3] = 0  # a row without a scale
    every = product(team, x, packed, mode)
    expected = rounded(x, pk.integer_mode(mode, bits) if mode in INTEGER else mode) @ w.T
    tolerance = 4e-3 if mode == "bf16" else 2e-6  # bf16: the weights are rounded, too
    assert np.abs(every - expected).max() <= tolerance * np.abs(expected).max()
    for rows in (1, 2, 3, 5, 6, 8, 9, 16, 17, 33):
        assert np.array_equal(product(team, x[:rows], packed, mode), every[:rows]), rows
    assert np.array_equal(product(team, x[20:21], packed, mode), every[20:21])


@pytest.mark.parametrize("mode", INTEGER)
def test_a_product_of_more_groups_than_a_panel_holds(team, mode):
    packed, w = random_matrix(40, 32 * 53, 4, False)
    x = RNG.standard_normal((21, 32 * 53)).astype(np.float32)
    start = RNG.standard_normal((32, 48)).astype(np.float32)
    every = product(team, x, packed, mode, into=start.copy())
    expected = start[:21, :40] + rounded(x, pk.integer_mode(mode, 4)).astype(np.float64) @ w.T
    assert np.abs(every - expected).max() <= 53 * 2**-24 * np.abs(expected).max()  # a rounding per group
    for rows in (1, 7, 8, 16):
        assert np.array_equal(product(team, x[:rows], packed, mode, into=start.copy()), every[:rows]), rows


@pytest.mark.parametrize(("bits", "mode"), [(16, "fp32"), (32, "fp32"), *([(16, "bf16")] if isa.ISA.amx else [])])
def test_product_with_plain_weights(team, bits, mode):
    w = RNG.standard_normal((56, 96)).astype(np.float32)
    packed = pk.pack_dense(w, bits)
    x = RNG.standard_normal((37, 96)).astype(np.float32)
    expected = rounded(x, mode) @ (ref.to_bf16(w) if bits == 16 else w).T
    every = product(team, x, packed, mode)
    assert np.abs(every - expected).max() <= (2e-5 if mode == "bf16" else 2e-6) * np.abs(expected).max()
    assert np.array_equal(product(team, x[:3], packed, mode), every[:3])
    tokens, found = np.array([55, 0, 17], np.int32), padded(3, 96)
    run(team, [ew.embed(packed, found.ctypes.data)], 3, TOKENS=tokens)
    assert np.array_equal(found[:3], (ref.to_bf16(w) if bits == 16 else w)[tokens])


@pytest.mark.parametrize("mode", MODES)
def test_product_adds_to_what_is_there_and_takes_a_bias(team, mode):
    packed, _ = random_matrix(32, 64, 4, False)
    x, bias = RNG.standard_normal((5, 64)).astype(np.float32), RNG.standard_normal(32).astype(np.float32)
    before = padded(5, 32)
    before[:5] = RNG.standard_normal((5, 32))
    start, plain = before[:5].copy(), product(team, x, packed, mode)
    after = product(team, x, packed, mode, bias, into=before)
    assert np.allclose(after, start + plain + bias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", INTEGER)
def test_norm_and_quantise(team, mode):
    x = RNG.standard_normal((19, 128)).astype(np.float32) * 3
    weight = RNG.standard_normal(128).astype(np.float32)
    acts = pk.Activations.empty(19, 128, mode)
    run(team, [ew.norm_quantise(x.ctypes.data, weight, acts, 1e-5, mode)], 19)
    got, scale = unpacked(acts, 19, mode)
    expected = ref.rms_norm(x, weight, 1e-5)
    assert np.abs(as_rounded(got - expected, mode)).max() <= 0.51 * scale.max() + 1e-6


def levels_of(acts, rows, mode):
    """int32[rows, groups, 32]."""
    is_turned = mode == "turned" and rows >= turned.MANY_ROWS
    size = pk.bytes_of_terms(turned.MANY) if is_turned else pk.x_bytes(mode)
    used = acts.values.reshape(-1)[: -(-rows // 16) * 16 * acts.cols // 32 * size]
    values = used.reshape(-1, acts.cols // 32, 16, size).transpose(0, 2, 1, 3).reshape(-1, acts.cols // 32, size)[:rows]
    if mode == "int16":
        level = np.empty((rows, acts.cols // 32, 32), np.int32)
        level[:, :, pk.ORDER] = values.view(np.int16)
        return level
    terms = values.view(np.int8).reshape(rows, acts.cols // 32, -1, 32).astype(np.int32)
    if is_turned:
        return ref.turn(terms[:, :, 0])
    shift = turned.TERM_SHIFT if mode == "turned" else pk.TERM_BITS[mode]
    return terms[:, :, 0] if mode == "int8" else (terms[:, :, 0] << shift) + terms[:, :, 1]


def scales_of(acts, rows):
    """Scales, sums and starts: [3, rows, groups]."""
    return acts.scales.transpose(2, 0, 3, 1).reshape(3, -1, acts.cols // 32)[:, :rows]


def unpacked(acts, rows, mode):
    """(values, scales) of quantised activations."""
    level, (scale, total, _) = levels_of(acts, rows, mode), scales_of(acts, rows)
    assert np.allclose(total, scale * level.sum(-1), rtol=1e-6)
    return (level * scale[..., None]).reshape(rows, -1), scale


EXP = Kernel("exp_of_rows", _exp_of_rows)


def test_exp(team):
    """As near as it says, 1 at 0, 0 far below, and cut above."""
    x = np.concatenate([np.linspace(-87, 88, 40_000), [0, -87.9, -1e4, -3e38, 88.5, 1e30, *[0] * 10]]).astype(
        np.float32
    )
    got = np.zeros_like(x)
    run(team, [[EXP.address, x.ctypes.data, got.ctypes.data]], len(x) // 16)
    near = x[:40_000].astype(np.float64)
    error = np.abs(got[:40_000] / np.exp(near) - 1)
    assert error.max() < 4e-6
    assert (error / np.maximum(1, np.abs(near))).max() < 2e-7
    assert got[40_000:40_004].tolist() == [1, 0, 0, 0]
    assert np.array_equal(got[40_004:40_006], np.full(2, got[39_999]))


@pytest.mark.parametrize("mode", INTEGER)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gate(team, activation, mode):
    x = RNG.standard_normal((9, 2 * 64)).astype(np.float32) * 4
    acts = pk.Activations.empty(9, 64, mode)
    run(team, [ew.gate_quantise(x.ctypes.data, acts, mode, activation)], 9)
    got, scale = unpacked(acts, 9, mode)
    expected = getattr(ref, activation)(x[:, :64]) * x[:, 64:]
    assert np.abs(as_rounded(got - expected, mode)).max() <= 0.51 * scale.max() + 1e-6


def quantised(team, x, cols, mode, kind):
    """Bytes of each row's values, then of its scales and sums; of turned ones, which have two forms, their levels'."""
    acts, source = pk.Activations.empty(len(x), cols, mode), np.ascontiguousarray(x).ctypes.data
    if kind in ("silu", "gelu"):
        op = ew.gate_quantise(source, acts, mode, kind)
    elif kind == "chosen":
        chosen = np.arange(2 * len(x), 0, -2, dtype=np.int32) - 1
        op = ew.norm_quantise(source, None, acts, 0.0, mode, index=chosen.ctypes.data, share=2)
    else:
        op = ew.norm_quantise(source, LATENT_NORM[:cols] if kind == "normed" else None, acts, 1e-5, mode)
    run(team, [op], len(x))
    rows = len(x)
    if mode == "turned":
        values = levels_of(acts, rows, mode).reshape(rows, -1)
    else:
        values = np.swapaxes(acts.values, 1, 2).reshape(16 * len(acts.values), -1)[:rows]
    scales = np.ascontiguousarray(scales_of(acts, rows)[:2].transpose(1, 2, 0)).reshape(rows, -1)
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in (values, scales)], axis=1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cols", [96, 512 - 32, 512])  # too few groups for sixteen at once of one row, or not
@pytest.mark.parametrize("kind", ["plain", "chosen", "normed", "silu", "gelu"])
def test_rows_are_quantised_alone_as_in_a_block(team, mode, cols, kind):
    x = RNG.standard_normal((71, cols * (2 if kind in ("silu", "gelu") else 1))).astype(np.float32)
    x[3], x[4, 5:], x[5, 32:64] = 0, 0, 0
    sizes = np.array([1e-44, 1e-39, 1e-36, 1e-30, 1e15, 1e18, 1e37], np.float32)
    x[16:23], x[24:31, ::7], x[33:40, 40:48] = x[16:23] * sizes[:, None], sizes[:, None], sizes[:, None]
    every = quantised(team, x, cols, mode, kind)
    expected = every[::-1] if kind == "chosen" else every
    if kind == "chosen":
        assert np.array_equal(expected, quantised(team, x, cols, mode, "plain"))
    for rows in (1, 15, 16, 17, 33):
        got = quantised(team, x[:rows], cols, mode, kind)
        assert np.array_equal(got[::-1] if kind == "chosen" else got, expected[:rows]), rows
    for row in range(len(x)):
        assert np.array_equal(quantised(team, x[row : row + 1], cols, mode, kind)[0], expected[row]), row


def test_groups_are_quantised_alone_as_sixteen_together(team):
    """Of one row."""
    x = (RNG.standard_normal((1, 544)) * np.repeat(10.0 ** RNG.integers(-44, 30, 17), 32)).astype(np.float32)
    for mode in INTEGER:
        together = quantised(team, x, 544, mode, "plain")[0]
        alone = [quantised(team, x[:, at : at + 32], 32, mode, "plain")[0] for at in range(0, 544, 32)]
        size = 17 * (32 * 4 if mode == "turned" else pk.x_bytes(mode))
        assert np.array_equal(np.concatenate([a[: size // 17] for a in alone]), together[:size])
        assert np.array_equal(np.concatenate([a[size // 17 :] for a in alone]), together[size:])


@pytest.mark.parametrize(
    ("bits", "wide", "mode"),
    [(4, False, "int8"), (4, True, INTEGER[1]), (4, False, INTEGER[-1]), (8, False, INTEGER[1])],
)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_gated_product_is_its_parts(team, bits, wide, mode, activation):
    """Bit for bit, in any number of rows: whole blocks of 16 and what is left, one group at a time and several."""
    inner, cols = 13 * 32, 96
    packed, _ = random_matrix(2 * inner, cols, bits, wide)
    mode = pk.integer_mode(mode, bits)
    x = RNG.standard_normal((37, cols)).astype(np.float32)
    bias = np.zeros(2 * inner, np.float32)
    for rows, out_mode in ((1, "int8"), (5, INTEGER[1]), (8, "int8"), (9, INTEGER[-1]), (16, INTEGER[1]), (37, "int8")):
        acts = pk.Activations.empty(rows, cols, mode)
        parts, whole = (pk.Activations.empty(rows, inner, out_mode) for _ in range(2))
        y = padded(rows, 2 * inner)
        first = ew.quantise(np.ascontiguousarray(x[:rows]).ctypes.data, acts, mode)
        run(team, [
            first, mm.matmul(acts, packed, y.ctypes.data, 2 * inner * 4, mode, bias, add=False),
            ew.gate_quantise(y.ctypes.data, parts, out_mode, activation),
            gated.gated(acts, packed, mode, bias, whole, out_mode, activation),
        ], rows)  # fmt: skip
        assert np.array_equal(parts.values, whole.values), rows
        assert np.array_equal(parts.scales.view(np.int32), whole.scales.view(np.int32)), rows  # starts are integers


@pytest.mark.parametrize(("bits", "wide"), [(4, False), (8, False), (8, True)])
def test_embedding_is_exact(team, bits, wide):
    packed, w = random_matrix(48, 64, bits, wide)
    tokens, x = np.array([47, 0, 16, 3, 3], np.int32), padded(5, 64)
    run(team, [ew.embed(packed, x.ctypes.data)], 5, TOKENS=tokens)
    assert np.array_equal(x[:5], w[tokens])


# ---------------------------------------------------------------------------------------------- attention


def attend(team, qkv, shape, starts, angles, pool, num_blocks, tables, split=False):
    """Write keys and values of `qkv` (of a latent: `parts_of`) and attend. `starts`: (first row, position)."""
    rows, max_rows = len(qkv), 64
    q_type = np.float32 if kv_pages.query_size(shape.size) == 4 else np.uint16
    q = np.zeros((shape.kv_heads * max_rows * shape.ratio + 16, shape.padded_dim), q_type)
    out = np.zeros((rows, shape.heads, shape.value_dim), np.float32)
    source = [np.ascontiguousarray(x, np.float32) for x in (parts_of(qkv, shape) if shape.latent else [qkv])]
    first = [a for a, _ in starts] + [rows]
    segments = np.array([(a, first[i + 1] - a, p, 0) for i, (a, p) in enumerate(starts)], np.int64)
    segment_of = np.repeat(np.arange(len(starts), dtype=np.int32), segments[:, 1])
    positions = np.concatenate([p + np.arange(n, dtype=np.int32) for _, n, p, _ in segments.tolist()]).astype(np.int32)
    units, merges, partials = [], [], 0
    for i, (_, n, p, _) in enumerate(segments.tolist()):
        spans = -(-(p + n) // loops.SPAN)
        for row, count in cut_rows(n, p, shape, loops.SPLIT_ROWS if split else loops.MAX_ROWS):
            if split:
                units += [(i, row, count, s, 1, partials + s) for s in range(spans)]
                merges.append((i, row, count, partials, spans))
                partials += spans
            else:
                units.append((i, row, count, 0, -(-(p + (row + count - 1) // shape.ratio + 1) // loops.SPAN), -1))
    newest = {} if shape.newest is None else {"NEWEST": np.roll(tables, tables.shape[1] // 2, axis=1)}
    held = np.zeros(max(1, partials) * shape.kv_heads * loops.SPLIT_ROWS * (shape.value_dim + 16), np.float32)
    units, merges = np.array(units, np.int64), np.array(merges, np.int64).reshape(-1, att.MERGE_WORDS)
    ops = [
        mla.latent_write(shape, *source, q, angles, shape.dim**-0.5, LATENT_NORM[: shape.latent], EPS)
        if shape.latent
        else kv_write.rope_write(
            shape.newest or shape, *(x.ctypes.data for x in source), q, angles, shape.dim**-0.5, max_rows
        ),
        *([kv_int4.seal(shape)] if shape.newest else []),
        *att.attention(shape, q, out.ctypes.data, max_rows),
    ]
    run(team, ops, rows, POSITIONS=positions, SEGMENT_OF=segment_of, TABLE_STRIDE=tables.shape[1], POOL=pool,
        TABLES=tables, SEGMENTS=segments, UNITS=units, NUM_UNITS=len(units), PARTIALS=held,
        MERGES=merges, NUM_MERGES=len(merges), **newest)  # fmt: skip
    return out


def cut_rows(tokens, position, shape, most):
    """(first query row, rows) of units: at most `most`, none across a multiple of 32 positions where that counts."""
    at = 0
    while at < tokens * shape.ratio:
        end = tokens
        if shape.newest:
            end = min(tokens, (position + at // shape.ratio) // 32 * 32 + 32 - position)
        count = min(most, end * shape.ratio - at)
        yield at, count
        at += count


def parts_of(rows, shape):
    """Of rows of latent attention: latent and rope key; queries; queries in the latent's space."""
    queries = shape.heads * (NOPE + shape.dim - shape.latent)
    return np.split(rows, [shape.dim, shape.dim + queries], axis=1)


def setting(heads=6, kv_heads=2, dim=64, block=16, tokens=300, window=0, cap=0.0, kind="bf16", latent=0, rng=RNG):
    """`latent`: leading channels of `dim` that are the values, too."""
    kv_heads, turning = (1, dim - latent) if latent else (kv_heads, dim)
    spec = LatentKV(latent, dim - latent) if latent else FullKV(kv_heads, dim, dim)
    page, plain = (spec.tile_bytes(block, KVStorage.of(name)) for name in (kind, "bf16"))
    num_blocks = (4 if kind == "int4" else 2) * -(-tokens // block) + 1
    shape = kv_pages.AttentionShape(heads, kv_heads, dim, block, page, 0, 0, window, cap, kind, latent)
    if kind == "int4":  # the newest tokens are a second group's; blocks hold either's page
        newest = replace(shape, kind="bf16", page_bytes=plain, group=1)
        shape = replace(shape, newest=newest, residual=128, block_bytes=plain)
    assert shape.head_bytes * kv_heads == page
    pool = pk.aligned_zeros(num_blocks * shape.stride + (1 << 16))
    pool[:] = 0xFF if kind == "int4" else 0  # what another group left, read as bf16, need not be a number
    order = rng.permutation(num_blocks).astype(np.int32)
    half = num_blocks // 2
    tables = np.stack([order[:half], order[half : 2 * half]])
    turn = np.arange(tokens)[:, None] * 0.3 ** np.arange(turning // 2)
    angles = np.concatenate([np.cos(turn), np.sin(turn)], axis=1).astype(np.float32)
    width = (dim + heads * (NOPE + dim),) if latent else (heads + 2 * kv_heads, dim)
    qkv = rng.standard_normal((tokens, *width)).astype(np.float32)
    return shape, pool, num_blocks, tables, angles, qkv


def expected_attention(qkv, shape, angles):
    q, k, v = read_apart(qkv, shape, angles)
    if shape.kind == "int4":
        return ref.attention_int4(ref.to_bf16(q), k, v, shape.residual, shape.window, shape.cap)
    if shape.kind in SPREAD:
        q, k, v = (spread(x, shape) for x in (q, k, v))
    stored = ref.STORED[shape.kind]
    q = ref.to_bf16(q) if kv_pages.query_size(shape.size) == 2 else q
    if shape.latent:
        k = ref.through_latent_int8(k, shape.latent) if shape.kind == "int8" else stored(k)
        v = k[..., : shape.latent]
    else:
        k, v = ref.keys_through_int8(k, q) if shape.kind == "int8" else stored(k), stored(v)
    mixed = ref.attention(q, k, v, 0, shape.window, shape.cap)
    return ref.hadamard(mixed) if shape.kind in SPREAD else mixed


def read_apart(qkv, shape, angles):
    """Queries (scaled), keys and values as attention takes them."""
    scale = np.float32(shape.dim**-0.5)
    if not shape.latent:
        q, k, v = np.split(qkv, [shape.heads, shape.heads + shape.kv_heads], axis=1)
        return ref.rope(q, angles) * scale, ref.rope(k, angles), v
    kv, queries, absorbed = parts_of(qkv, shape)
    latent = ref.rms_norm(kv[:, : shape.latent], LATENT_NORM[: shape.latent], EPS)[:, None]
    key = np.concatenate([latent, ref.rope(kv[:, None, shape.latent :], angles)], axis=-1)
    turned = ref.rope(queries.reshape(len(qkv), shape.heads, -1)[..., NOPE:], angles)
    q = np.concatenate([absorbed.reshape(len(qkv), shape.heads, -1), turned], axis=-1)
    return q * scale, key, latent


def spread(x, shape):
    """Transformed; of a latent's keys and queries each part for itself."""
    parts = np.split(x, [shape.latent], axis=-1) if 0 < shape.latent < x.shape[-1] else [x]
    return np.concatenate([ref.hadamard(part) for part in parts], axis=-1)


def in_chunks(team, sizes, shape, pool, num_blocks, tables, angles, qkv, **how):
    outs, at = [], 0
    while at < len(qkv):
        n = min(sizes[len(outs) % len(sizes)], len(qkv) - at)
        outs.append(attend(team, qkv[at : at + n], shape, [(0, at)], angles, pool, num_blocks, tables[:1], **how))
        at += n
    return np.concatenate(outs)


# by bytes of the form: the largest error by the largest output, and the mean one. Weights of values have 14 bits, 8 in
# bf16, or 24; a key in int8 may be rounded otherwise where two moves of a level are worth nearly the same.
ERRORS = {1: (3e-3, 8e-4), 2: (0.03, 4e-3), 4: (1e-5, 2e-6)}


@pytest.mark.parametrize(
    "case",
    [
        {}, {"dim": 80, "kv_heads": 1}, {"dim": 96, "block": 32}, {"dim": 128, "heads": 2}, {"dim": 256, "tokens": 70},
        {"window": 40}, {"window": 256, "tokens": 600}, {"cap": 5.0}, {"block": 64}, {"block": 256}, {"block": 8},
        {"dim": 16, "heads": 4}, {"kind": "int8"}, {"kind": "int8", "block": 8, "dim": 80, "kv_heads": 1},
        {"kind": "int8", "block": 64, "window": 256, "tokens": 600, "dim": 96, "kv_heads": 1},
        {"kind": "int8", "dim": 512, "heads": 2, "tokens": 40}, {"kind": "int8", "dim": 528, "heads": 2, "tokens": 40},
        {"kind": "int8", "cap": 5.0, "heads": 8}, {"kind": "int8", "heads": 2, "dim": 16},
        {"kind": "int4", "block": 32}, {"kind": "int4", "block": 64, "dim": 96, "kv_heads": 3},
        {"kind": "int4", "block": 32, "window": 40, "cap": 5.0}, {"kind": "int4", "block": 256, "window": 200},
        {"kind": "fp8_e4m3", "block": 32}, {"kind": "fp32"}, {"kind": "fp32", "block": 8, "window": 40},
        {"latent": 64, "dim": 96}, {"latent": 64, "dim": 96, "kind": "fp32", "block": 8},
        {"latent": 64, "dim": 96, "kind": "int8"}, {"latent": 48, "dim": 64, "kind": "int8", "block": 8},
        {"latent": 512, "dim": 576, "kind": "int8", "block": 64, "tokens": 70, "heads": 2},
        {"latent": 64, "dim": 96, "kind": "fp8_e4m3"}, {"latent": 128, "dim": 160, "kind": "fp8_e4m3", "block": 8},
    ],
    ids=str,
)  # fmt: skip
def test_attention_is_the_reference_however_it_is_cut(team, case):
    setup = setting(**case)
    shape, angles, qkv = setup[0], setup[4], setup[5]
    whole = in_chunks(team, [64], *setup)
    expected = expected_attention(qkv, shape, angles)
    largest, mean = ERRORS[shape.size]
    assert np.abs(whole - expected).max() <= largest * np.abs(expected).max()
    assert np.linalg.norm(whole - expected) <= mean * np.linalg.norm(expected)
    for sizes in ([5, 1, 17],):
        assert np.array_equal(in_chunks(team, sizes, *setup), whole)
    assert np.array_equal(in_chunks(team, [1, 30], *setup, split=True), whole)


@pytest.mark.parametrize(
    "case",
    [
        {}, {"block": 8}, {"block": 64}, {"dim": 80, "kv_heads": 1}, {"dim": 96, "turning": 32}, {"kind": "int8"},
        {"kind": "int8", "block": 8}, {"kind": "int8", "dim": 96}, {"kind": "fp8_e4m3", "dim": 128},
        {"kind": "fp8_e4m3", "dim": 16}, {"kind": "fp32"}, {"kind": "fp32", "block": 8, "dim": 80},
    ],
    ids=str,
)  # fmt: skip
def test_a_run_of_tokens_is_written_as_token_by_token(team, case):
    """Not a byte beside the tokens' own changes, either; norms on queries and keys, and a second sequence beside."""
    turning = case.get("turning", case.get("dim", 64))
    drawn = {"rng": np.random.default_rng(1), **{k: v for k, v in case.items() if k != "turning"}}
    shape, pool, _, tables, angles, qkv = setting(tokens=70, **drawn)
    angles = np.ascontiguousarray(angles[:, :turning])
    norms = [np.linspace(0.5, 2, shape.dim, dtype=np.float32) for _ in range(2)]
    pool[:] = np.arange(len(pool)) % 101
    q_type = np.float32 if kv_pages.query_size(shape.size) == 4 else np.uint16

    def written(parts):
        """The pool, and the queries by row, after passes over `parts`, each a list of (sequence, first, rows)."""
        held, queries = pk.aligned_zeros(len(pool)), {}
        held[:] = pool
        for part in parts:
            tokens = [(seq, first + i) for seq, first, count in part for i in range(count)]
            q = np.zeros((shape.kv_heads, 80, shape.ratio, shape.padded_dim), q_type)
            source = np.ascontiguousarray(qkv[[(at + 7 * seq) % len(qkv) for seq, at in tokens]])
            op = kv_write.rope_write(shape, source.ctypes.data, q, angles, 0.3, 80, *norms, EPS)
            which = np.repeat(np.arange(len(part)), [count for *_, count in part]).astype(np.int32)
            run(team, [op], len(tokens), POSITIONS=np.array([at for _, at in tokens], np.int32), SEGMENT_OF=which,
                TABLES=np.ascontiguousarray(tables[[seq for seq, *_ in part]]), TABLE_STRIDE=tables.shape[1],
                POOL=held)  # fmt: skip
            queries |= {token: q[:, row].tobytes() for row, token in enumerate(tokens)}
        return held, queries

    for first, count in ((0, 64), (16, 16), (5, 40), (31, 2), (15, 18), (1, 62)):
        pool_at_once, queries_at_once = written([[(0, first, count), (1, 3, 2)]])
        singly = [[(0, first + i, 1)] for i in range(count)] + [[(1, 3, 1)], [(1, 4, 1)]]
        pool_singly, queries_singly = written(singly)
        assert np.array_equal(pool_at_once, pool_singly), (first, count)
        assert queries_at_once == queries_singly, (first, count)
        changed = np.count_nonzero(pool_at_once != pool)
        most = (count + 2) * (shape.head_bytes * shape.kv_heads // shape.block_size)
        assert 0.9 * most < changed <= most, (changed, most)


def test_a_channel_that_stands_out_does_not_coarsen_int8_keys(team):
    """Real keys have channels several times the others. The error is held against what no rounding of keys gives."""
    setup = setting(kind="int8", tokens=100)
    shape, angles, qkv = setup[0], setup[4], setup[5]
    qkv[:, shape.heads : shape.heads + shape.kv_heads, 5] *= 30
    got = in_chunks(team, [64], *setup)
    q, k, v = read_apart(qkv, shape, angles)
    exact = ref.attention(q, k, v, 0)
    plain = ref.attention(ref.to_bf16(q), ref.through_int8(k), ref.through_int8(v), 0)
    error, without = (np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in (got, plain))
    assert error < 0.5 * without, (error, without)


@pytest.mark.parametrize("far", [0.01, 100])
def test_a_rope_key_of_another_size_does_not_coarsen_an_int8_latent(team, far):
    """Nor the other way round: against one range for both."""
    setup = setting(kind="int8", latent=64, dim=96, tokens=100)
    shape, angles, qkv = setup[0], setup[4], setup[5]
    qkv[:, shape.latent : shape.dim] *= far
    queries = parts_of(qkv, shape)[1]
    queries /= far  # scores stay what they are
    got = in_chunks(team, [64], *setup)
    q, k, v = read_apart(qkv, shape, angles)
    exact = ref.attention(q, k, v, 0)
    q, k = (spread(x, shape) for x in (q, k))
    kept = ref.through_int8(k)
    shared = ref.hadamard(ref.attention(ref.to_bf16(q), kept, kept[..., : shape.latent], 0))
    error, without = (np.linalg.norm(x - exact) / np.linalg.norm(exact) for x in (got, shared))
    assert error < 0.02
    assert error < 0.5 * without, (error, without)


# by bytes of a query's number; not all are this path's
INT8_WRITES = {size: kv_write.KERNELS.get(("int8", size)) or kv_write.variant("int8", size) for size in (2, 4)}


def stored_int8_keys(page, dim):
    """Levels [16, dim] of a page's first head, and zero and scale of each row."""
    levels = page[: 16 * dim].reshape(dim // 2, 16, 2).transpose(1, 0, 2).reshape(16, dim).astype(np.int32)
    words = page[16 * dim : 16 * dim + 64].view(np.uint32)
    return levels, (words & 255).astype(np.int32)[:, None], (words & 0xFFFFFF00).view(np.float32)[:, None]


@pytest.mark.parametrize("q_size", [2, 4])
@pytest.mark.parametrize("loud", [1, 50], ids=["even", "one channel of the queries stands out"])
def test_stored_int8_keys_are_the_references(team, q_size, loud):
    """Whichever form queries have; `loud` keys are moved at the ends of their levels, too."""
    shape, pool, _, tables, angles, qkv = setting(kind="int8", tokens=16, rng=np.random.default_rng(0))
    turned = ref.hadamard(np.eye(shape.dim, dtype=np.float32)[3]) * np.float32(loud)
    qkv[:, : shape.heads] += turned
    qkv[:, shape.heads : -shape.kv_heads] += turned
    angles = np.concatenate([np.ones_like(angles[:, :32]), np.zeros_like(angles[:, :32])], axis=1)
    q = np.zeros((shape.kv_heads * 64 * shape.ratio + 16, shape.padded_dim), np.float32 if q_size == 4 else np.uint16)
    source = np.ascontiguousarray(qkv)
    _, *arguments = kv_write.rope_write(shape, source.ctypes.data, q, angles, 1.0, 64)
    run(team, [[INT8_WRITES[q_size].address, *arguments]], 16, POSITIONS=np.arange(16, dtype=np.int32), TABLES=tables,
        POOL=pool, SEGMENT_OF=np.zeros(16, np.int32), TABLE_STRIDE=tables.shape[1])  # fmt: skip
    page = pool[tables[0, 0] * shape.stride :]
    q, k, _ = (ref.hadamard(x) for x in np.split(qkv, [shape.heads, shape.heads + shape.kv_heads], axis=1))
    q = q if q_size == 4 else ref.to_bf16(q)
    expected = ref.keys_through_int8(k, q)[:, 0]
    levels, zero, scale = stored_int8_keys(page, shape.dim)
    moved = levels - np.rint(ref.through_int8(k)[:, 0] / scale) - zero
    assert np.abs(moved).max() == 1
    assert 16 <= np.count_nonzero(moved) <= 64
    differ = (np.abs((levels - zero) * scale - expected) > 0.5 * scale).any(axis=1)
    assert np.count_nonzero(differ) <= 4, differ  # where two moves gain nearly alike
    read = q[:, : shape.ratio]
    weight = np.square(read).sum(axis=(1, 2)) / shape.dim
    left = [np.square(np.einsum("rjd,rd->rj", read, e)).sum(1) + weight * np.square(e).sum(1)
            for e in (k[:, 0] - (levels - zero) * scale, k[:, 0] - expected)]  # fmt: skip
    assert (left[0] < 1.1 * left[1]).all(), left  # and what is to be lessened ends about as small


def test_int8_keys_are_rounded_for_the_queries_that_read_them(team):
    """Queries of neighbouring tokens resemble each other: where they do, scores err less than nearest levels would."""
    errors = np.zeros(2)
    for _ in range(4):
        shape, pool, num_blocks, tables, angles, qkv = setting(kind="int8", tokens=100)
        still = np.concatenate([np.ones_like(angles[:, :32]), np.zeros_like(angles[:, :32])], axis=1)
        qkv[:, : shape.heads] = 2 * qkv[:1, : shape.heads] + 0.3 * qkv[:, : shape.heads]
        got = in_chunks(team, [64], shape, pool, num_blocks, tables, still, qkv)
        q, k, v = np.split(qkv, [shape.heads, shape.heads + shape.kv_heads], axis=1)
        q, k, v = (ref.hadamard(x) for x in (q * np.float32(shape.dim**-0.5), k, v))
        q = q if kv_pages.query_size(2) == 4 else ref.to_bf16(q)
        values = ref.through_int8(v)  # alike in all three, so that only keys differ
        exact, nearest = (ref.hadamard(ref.attention(q, keys, values, 0)) for keys in (k, ref.through_int8(k)))
        errors += [np.linalg.norm(x - exact) for x in (got, nearest)]
    assert errors[0] < 0.6 * errors[1], errors


def test_attention_beside_another_sequence(team):
    shape, pool, num_blocks, tables, angles, qkv = setting(tokens=40)
    alone = attend(team, qkv[:20], shape, [(0, 0)], angles, pool, num_blocks, tables)
    both = attend(
        team, qkv[[*range(20, 40), *range(20)]], shape, [(0, 0), (20, 0)], angles, pool, num_blocks, tables[::-1].copy()
    )
    assert np.array_equal(both[20:], alone)


@pytest.mark.parametrize(
    "case", [{}, *({"kind": kind, "latent": 32} for kind in kv_pages.KINDS if kind != "int4")], ids=str
)
def test_a_poisoned_block_does_not_poison_the_next_owner(team, case):
    shape, pool, num_blocks, tables, angles, qkv = setting(tokens=20, **case)
    clean = attend(team, qkv[:17], shape, [(0, 0)], angles, pool, num_blocks, tables)
    attend(team, np.full_like(qkv, np.nan), shape, [(0, 0)], angles, pool, num_blocks, tables)
    again = attend(team, qkv[:17], shape, [(0, 0)], angles, pool, num_blocks, tables)
    assert np.array_equal(again, clean)


# ---------------------------------------------------------------------------------------------- paths


def functions_within(function, found):
    """`function` and every Python function that it reaches by its globals, into `found` by the name in machine code."""
    function = getattr(function, "py_func", function)
    if not isinstance(function, FunctionType) or not function.__module__.startswith("kvledger.kernels"):
        return
    others = found.setdefault((function.__module__, function.__qualname__), set())
    if function in others:
        return
    others.add(function)
    for name in function.__code__.co_names:
        functions_within(function.__globals__.get(name), found)


def test_no_two_functions_share_a_name_in_machine_code():
    """Code that two processes have compiled is linked by name: one of two namesakes would stand for both."""
    kernels = [x for x in gc.get_objects() if type(x) is Kernel]  # isinstance would ask dead proxies, too
    found = {}
    for kernel in kernels:
        functions_within(kernel._function, found)
    assert len(kernels) > 20
    assert len(found) > 60
    assert {name: len(same) for name, same in found.items() if len(same) > 1} == {}


def test_kernels_that_two_processes_compiled_work_in_a_third(tmp_path):
    """They did not, while inner functions of variants had one name."""
    code = """
import sys
import numpy as np
from kvledger.kernels import elementwise as ew, matmul as mm, packed as pk
from kvledger.kernels.team import Team, empty_program

def difference(bits):
    rng = np.random.default_rng(bits)
    levels, scale = rng.integers(0, 1 << bits, (16, 64)).astype(np.uint8), np.ones((16, 2), np.float32)
    w, mode = pk.pack(levels, scale, -8 * scale, bits), pk.integer_mode("int8", bits)
    x = rng.standard_normal((16, 64)).astype(np.float32)
    out, bias = np.zeros((16, 16), np.float32), np.zeros(16, np.float32)
    ctx, scratch = np.zeros(64, np.int64), pk.aligned_zeros(mm.PANEL_BYTES)
    ctx[[mm.ROWS, mm.SCRATCH, mm.SCRATCH_BYTES, mm.NUM_THREADS]] = 16, scratch.ctypes.data, mm.PANEL_BYTES, 1
    act = pk.Activations.empty(16, 64, mode)
    ops = [ew.quantise(x.ctypes.data, act, mode)]
    if bits in multiplied:
        ops.append(mm.matmul(act, w, out.ctypes.data, 64, mode, bias, add=False))
    Team(1).run(empty_program(ops), ctx)
    exact = x @ (levels.astype(np.float32) - 8).T
    return float(np.abs(out - exact).max() / np.abs(exact).max())

multiplied = [int(bits) for bits in sys.argv[1:]]
print([difference(bits) < 0.02 for bits in (4, 8)])
"""
    run = lambda *bits: subprocess.run(  # noqa: E731
        [sys.executable, "-c", code, *bits], env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}, capture_output=True,
        text=True, timeout=300, check=True)  # fmt: skip
    assert run().stdout == "[False, False]\n"  # compiles what both need, so that they number their functions alike
    assert run("4").stdout == "[True, False]\n"
    assert run("8").stdout == "[False, True]\n"
    assert run("4", "8").stdout == "[True, True]\n"


def test_an_unknown_path_is_named():
    code = "import kvledger.kernels.isa"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, isa.ENV: "mmx"}, capture_output=True, text=True
    )
    assert f"{isa.ENV}=mmx: this CPU runs" in done.stderr


@pytest.fixture(scope="module")
def other_paths():
    """This file's tests on every other path of the CPU, at once: most of it is compiling."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-k", "not every_path", __file__]
    others = [path for path in isa.available() if path != isa.ISA.name and not os.environ.get(isa.ENV)]
    runs = {
        path: subprocess.Popen(
            command, env={**os.environ, isa.ENV: path}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for path in others
    }
    yield runs
    for run in runs.values():
        run.kill()


@pytest.mark.parametrize("path", isa.available())
def test_every_path_of_this_cpu(path, other_paths):
    if path not in other_paths:
        pytest.skip("this process runs it")
    output, _ = other_paths[path].communicate()
    assert other_paths[path].returncode == 0, output[-3000:]
