"""Arrays moved into pages of 2 MiB: the same bytes, side by side, and memory that goes back with them."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from kvledger.kernels import large_pages
from kvledger.kernels.large_pages import OWN, LargePages
from kvledger.model.linear import Weights
from tiny_models import decoder

RNG = np.random.default_rng(5)
SMAPS = Path("/proc/self/smaps")


def asked_for(address):
    """Whether the mapping that holds `address` is marked for large pages."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            low, high = (int(end, 16) for end in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            return "hg" in line.split()
    return False


@pytest.fixture
def has_large_pages():
    if not (hasattr(mmap, "MADV_HUGEPAGE") and SMAPS.exists() and "VmFlags" in SMAPS.read_text()):
        pytest.skip("no large pages on request here, or nothing that tells of them")
    if len(large_pages._piece()) == 0:
        pytest.skip("the system refuses large pages")


def test_moved_arrays_are_the_same_and_share_nothing(monkeypatch):
    monkeypatch.setattr(large_pages, "PIECE", 3 * OWN // 2)  # several pieces
    memory = LargePages()
    arrays = [RNG.integers(0, 256, n, np.uint8) for n in (1, 64, 100, OWN - 1, OWN - 64, 0, 5000, 1 << 20)]
    moved = [memory.move(a) for a in arrays]
    assert all(np.array_equal(a, m) for a, m in zip(arrays, moved, strict=True))
    assert all(m is a or m.ctypes.data % 64 == 0 for a, m in zip(arrays, moved, strict=True))
    moved[2][:] = 7
    assert all(np.array_equal(a, m) for i, (a, m) in enumerate(zip(arrays, moved, strict=True)) if i != 2)


def test_weights_lie_in_large_pages_and_give_them_back(has_large_pages):
    weights = Weights(decoder().tensors, lambda share: None)
    matrices = [weights.matrix(f"blk.{i}.ffn_down.weight") for i in range(2)]
    addresses = [m.data.ctypes.data for m in matrices]
    assert all(map(asked_for, addresses))
    assert 0 < addresses[1] - addresses[0] < matrices[0].data.nbytes + 64
    del weights, matrices
    assert not any(map(asked_for, addresses))


def test_arrays_that_have_large_pages_of_their_own_stay():
    large = np.zeros(OWN, np.uint8)
    assert LargePages().move(large) is large


@pytest.mark.parametrize("advice", [None, 9999], ids=["no such advice", "refused"])
def test_without_large_pages_arrays_stay(monkeypatch, advice):
    if advice is None:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    else:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", advice, raising=False)
    small = np.arange(100, dtype=np.uint8)
    assert LargePages().move(small) is small
