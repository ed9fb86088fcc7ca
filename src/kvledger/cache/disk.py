"""Prefix blocks on disk: found again by content after eviction, and after a restart. Bytes and files; no sequences.

One file of equal records per model and layout. A record is a header (magic, key, age, checksum) and the block's
bytes; the checksum covers all of them, so a write torn by a crash, or a flipped bit, is a miss and never a wrong
answer. The number of records is bounded; the least recently used one is overwritten. A full or failing disk ends
saving, not serving.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
from collections import OrderedDict
from pathlib import Path

from kvledger.cache.prefix_cache import Key
from kvledger.errors import ConfigError
from kvledger.units import cdiv, format_bytes

MAGIC = b"kvblock1"
_HEADER = struct.Struct("<8s32sIQ16s")  # magic, digest, group, age, checksum
PAGE = 4096  # records begin at multiples of this


class DiskTier:
    """`num_records` places for blocks of `block_bytes` bytes in `folder`.

    `namespace` tells models and layouts apart. Raises ConfigError if the folder cannot be used, is in use by another
    process, or `budget_bytes` hold no block.
    """

    def __init__(self, folder: Path, budget_bytes: int, block_bytes: int, namespace: bytes) -> None:
        self.block_bytes = block_bytes
        self.record_bytes = cdiv(_HEADER.size + block_bytes, PAGE) * PAGE
        self.num_records = budget_bytes // self.record_bytes
        if self.num_records < 1:
            need = format_bytes(self.record_bytes)
            raise ConfigError(f"{format_bytes(budget_bytes)} of disk hold no KV block of {need}: give a larger size")
        self.path = folder / f"blocks-{hashlib.sha256(namespace).hexdigest()[:16]}.kv"
        self._file = _open_locked(self.path)
        self._slot_of: OrderedDict[Key, int] = OrderedDict()  # least recently used first
        self._key_of: dict[int, Key] = {}
        self._trusted: set[int] = set()  # slots whose checksum was seen to be right, or that are being written
        self._age = 0
        self.failure = ""  # why nothing is saved any more
        self._drop_surplus()
        self._scan()
        self.num_found = len(self)  # left by an earlier process

    def __len__(self) -> int:
        return len(self._slot_of)

    @property
    def can_save(self) -> bool:
        """Nothing has failed yet."""
        return not self.failure

    def find(self, key: Key) -> int | None:
        """The slot with this block, or None. The first find of a slot reads it and checks it."""
        slot = self._slot_of.get(key)
        if slot is None:
            return None
        if slot not in self._trusted and self._read(slot) is None:
            self.forget(key)
            return None
        self._trusted.add(slot)
        self._slot_of.move_to_end(key)
        return slot

    def claim(self, key: Key) -> int | None:
        """A slot for a block that is not there yet; None if it is, or if saving has ended. `save` must follow."""
        if self.failure or key in self._slot_of:
            return None
        slot = len(self._slot_of)
        if slot >= self.num_records:
            _, slot = self._slot_of.popitem(last=False)
        elif slot in self._key_of:
            slot = next(s for s in range(self.num_records) if s not in self._key_of)
        self._slot_of[key], self._key_of[slot] = slot, key
        self._trusted.add(slot)
        return slot

    def save(self, slot: int, block: bytes) -> None:
        """Write a claimed slot. On failure the block is forgotten and nothing more is saved."""
        digest, group = key = self._key_of[slot]
        self._age += 1
        body = _HEADER.pack(MAGIC, digest, group, self._age, _checksum(digest, group, self._age, block)) + block
        try:
            if os.pwrite(self._file, body, slot * self.record_bytes) != len(body):
                raise OSError("short write")
        except OSError as error:
            self.failure = f"{self.path}: {error.strerror or error}"
            self.forget(key)

    def load(self, slot: int) -> bytes:
        """The block's bytes. OSError if they are not what was written."""
        block = self._read(slot)
        if block is None:
            raise OSError(f"{self.path}: record {slot} is damaged")
        return block

    def forget(self, key: Key) -> None:
        """The block is not there any more."""
        slot = self._slot_of.pop(key, None)
        if slot is not None:
            self._trusted.discard(slot)
            del self._key_of[slot]

    def close(self) -> None:
        """Give up the file and its lock; its content stays. Idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _read(self, slot: int) -> bytes | None:
        try:
            record = os.pread(self._file, _HEADER.size + self.block_bytes, slot * self.record_bytes)
        except OSError:
            return None
        if len(record) < _HEADER.size + self.block_bytes:
            return None
        magic, digest, group, age, checksum = _HEADER.unpack_from(record)
        block = record[_HEADER.size :]
        is_right = magic == MAGIC and self._key_of.get(slot) == (digest, group)
        return block if is_right and checksum == _checksum(digest, group, age, block) else None

    def _drop_surplus(self) -> None:
        """A file from a time of a larger budget gives back what is above this one."""
        most = self.num_records * self.record_bytes
        if os.fstat(self._file).st_size > most:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, most)

    def _scan(self) -> None:
        """Find what an earlier process left, oldest first; only headers are read."""
        found: list[tuple[int, int, Key]] = []
        for slot in range(min(self.num_records, os.fstat(self._file).st_size // self.record_bytes + 1)):
            header = os.pread(self._file, _HEADER.size, slot * self.record_bytes)
            if len(header) == _HEADER.size and header.startswith(MAGIC):
                _, digest, group, age, _ = _HEADER.unpack(header)
                found.append((age, slot, (digest, group)))
        for age, slot, key in sorted(found):
            if (older := self._slot_of.pop(key, None)) is not None:
                del self._key_of[older]
            self._slot_of[key], self._key_of[slot], self._age = slot, key, age


def _checksum(digest: bytes, group: int, age: int, block: bytes) -> bytes:
    told = hashlib.blake2b(digest + struct.pack("<IQ", group, age), digest_size=16)
    told.update(block)
    return told.digest()


def _open_locked(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (OSError, ValueError) as error:  # ValueError: a null byte
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path.parent} cannot hold the KV tier: {why}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        with contextlib.suppress(OSError):
            os.close(file)
        raise ConfigError(f"{path} is in use by another process; give each its own --kv-disk") from None
    return file
