"""The bytes of blocks outside the pool, by tier slot: host memory first, then disk records. Knows no sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from kvledger.cache.disk import DiskTier

Array = np.ndarray[Any, Any]


class BlockStore:
    """Takes and gives a block's bytes, uint8[block bytes]. Slots from `num_host_slots` on are the disk's."""

    def __init__(self, num_host_slots: int = 0, disk: DiskTier | None = None) -> None:
        self._num_host_slots, self._disk = num_host_slots, disk
        self._host: dict[int, Array] = {}

    def __setitem__(self, slot: int, block: Array) -> None:
        """Save. A disk that fails stops saving; the engine goes on."""
        if slot < self._num_host_slots:
            self._host[slot] = block
        else:
            assert self._disk is not None, f"slot {slot} of {self._num_host_slots} and no disk"
            self._disk.save(slot - self._num_host_slots, block.tobytes())

    def pop(self, slot: int) -> Array:
        """What was saved; host memory is given back, a disk record stays. OSError if the record is damaged."""
        if slot < self._num_host_slots:
            return self._host.pop(slot)
        assert self._disk is not None, f"slot {slot} of {self._num_host_slots} and no disk"
        return np.frombuffer(self._disk.load(slot - self._num_host_slots), np.uint8)
