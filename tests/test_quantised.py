"""Decoders against the gguf package, bit for bit, on random blocks; quantisers against their error bound."""

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from kvledger.errors import UnsupportedModel
from kvledger.weights.ggml_types import GGML_TYPES
from kvledger.weights.quantised import DECODERS, decoded_types, dequantise, quantise_q4, quantise_q8

BLOCKWISE = [name for name in decoded_types() if GGML_TYPES[name].block_elements > 1]
SCALES = {"Q8_0": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q2_K": [80, 82], "Q3_K": [108],
          "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}  # fmt: skip


def random_blocks(name: str, count: int = 64) -> np.ndarray:
    """Every bit random, but the float16 scales finite."""
    kind = GGML_TYPES[name]
    rng = np.random.default_rng(kind.code)
    blocks = rng.integers(0, 256, (count, kind.block_bytes), dtype=np.uint8)
    for at in SCALES.get(name, []):
        blocks[:, at : at + 2] = rng.normal(0, 0.1, (count, 1)).astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.parametrize("name", BLOCKWISE)
def test_decodes_as_gguf_does(name):
    blocks = random_blocks(name)
    shape = (4, 16 * GGML_TYPES[name].block_elements)
    with np.errstate(all="ignore"):
        ours = dequantise(blocks.reshape(-1), name, shape)
        theirs = dequantize(blocks, GGMLQuantizationType[name]).reshape(shape)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("name", "dtype"), [("F32", np.float32), ("F16", np.float16), ("F64", np.float64)])
def test_plain_types(name, dtype):
    values = np.random.default_rng(0).normal(size=(3, 5)).astype(dtype)
    np.testing.assert_array_equal(
        dequantise(values.view(np.uint8).reshape(-1), name, (3, 5)), values.astype(np.float32)
    )


def test_bf16_is_the_upper_half_of_float32():
    values = np.array([1.5, -2.25, 3e38, 0.0], np.float32)
    upper = (values.view(np.uint32) >> 16).astype(np.uint16)
    np.testing.assert_allclose(dequantise(upper.view(np.uint8), "BF16", (4,)), values, rtol=2**-7)


def test_every_native_type_is_compared_or_plain():
    assert set(DECODERS) <= set(BLOCKWISE) | {"F32", "F16", "F64", "BF16", "I8", "I16", "I32", "I64"}


def test_unknown_type_names_the_known():
    with pytest.raises(UnsupportedModel, match=r"Q9_Z.*Q4_1"):
        dequantise(np.zeros(32, np.uint8), "Q9_Z", (32,))


@pytest.mark.parametrize(("quantise", "name", "levels"), [(quantise_q8, "Q8_0", 254), (quantise_q4, "Q4_1", 15)])
def test_quantisers_err_by_half_a_level(quantise, name, levels):
    weights = np.random.default_rng(1).normal(size=(8, 256)).astype(np.float32)
    weights[3, :32] = 0  # a block of zeros
    again = dequantise(quantise(weights), name, weights.shape)
    blocks = weights.reshape(-1, 32)
    span = 2 * np.abs(blocks).max(1) if name == "Q8_0" else np.ptp(blocks, axis=1)
    error = np.abs(again.reshape(-1, 32) - blocks).max(1)
    assert (error <= span / levels * 0.51 + 2e-3 * np.abs(blocks).max(1)).all()  # + rounding of the float16 scales
    assert (again[3, :32] == 0).all()


def test_q8_is_close_to_gguf_quantiser():
    weights = np.random.default_rng(2).normal(size=(4, 128)).astype(np.float32)
    theirs = dequantize(quantize(weights, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0)
    ours = dequantise(quantise_q8(weights), "Q8_0", weights.shape)
    assert np.abs(ours - weights).mean() <= 1.01 * np.abs(theirs - weights).mean()
