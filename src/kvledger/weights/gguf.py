"""Reads GGUF files, version 2 and 3, little endian: a bounded header parser over a memory map.

The file is not trusted: every count, length and offset is checked against the bytes that are there before anything
is allocated, and each refusal says what is wrong at which byte. Knows no model and decodes no weights.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kvledger.errors import DamagedFile, UnsupportedModel
from kvledger.units import format_bytes
from kvledger.weights.ggml_types import BY_CODE, GGML_TYPES, GGMLType

if TYPE_CHECKING:
    import numpy as np

    from kvledger.weights.mapped import MappedFile

MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 17
MAX_NAME_BYTES = 1 << 10
MAX_STRING_BYTES = 1 << 24
MAX_ARRAY_ITEMS = 1 << 22  # of all arrays together: a vocabulary of 256 Ki with scores, types and merges has 1.3 M
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 10: "<Q", 11: "<q", 12: "<d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. `shape` in numpy's order, rows first; `offset` from the start of the file."""

    name: str
    shape: tuple[int, ...]
    ggml_type: str
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor as stored: `data` is a flat uint8 array of its exact bytes, in a GGUF file a view of the map."""

    name: str
    shape: tuple[int, ...]
    ggml_type: str
    data: np.ndarray


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What a file says of itself, tensors not touched."""

    path: Path
    version: int
    metadata: dict[str, object]
    tensor_infos: dict[str, TensorInfo]

    @property
    def facts(self) -> dict[str, tuple[tuple[int, ...], str, int]]:
        """Name → (shape, type, bytes): what `spec.from_gguf` asks for."""
        return {t.name: (t.shape, t.ggml_type, t.num_bytes) for t in self.tensor_infos.values()}


class GGUFFile:
    """An open GGUF file: metadata, and tensors as views of one read-only memory map."""

    def __init__(self, header: GGUFHeader) -> None:
        self.path = header.path
        self.header = header
        self.metadata = header.metadata

    @cached_property
    def _mapped(self) -> MappedFile:
        from kvledger.weights.mapped import MappedFile  # which needs NumPy; headers do not

        return MappedFile(self.path)

    def release(self) -> None:
        """See `MappedFile`."""
        self._mapped.release()

    @cached_property
    def tensors(self) -> Mapping[str, GGUFTensor]:
        """Name → tensor. Pages are read from disk when first touched."""
        data, infos = self._mapped.data, self.header.tensor_infos.values()
        if infos and max(t.offset + t.num_bytes for t in infos) > len(data):
            raise DamagedFile(f"{self.path.name} has become shorter while it was being read")
        return {
            t.name: GGUFTensor(t.name, t.shape, t.ggml_type, data[t.offset : t.offset + t.num_bytes]) for t in infos
        }

    @property
    def facts(self) -> dict[str, tuple[tuple[int, ...], str, int]]:
        """Name → (shape, type, bytes)."""
        return self.header.facts


def open_gguf(path: str | Path) -> GGUFFile:
    """Check the whole header and map the tensors. Raises DamagedFile, UnsupportedModel."""
    return GGUFFile(read_header(path))


def read_header(path: str | Path) -> GGUFHeader:
    """Parse header and tensor directory; no tensor is read. Raises DamagedFile, UnsupportedModel."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise DamagedFile(f"{path.name} is {size} bytes long: a GGUF header alone has 24")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data).parse()
    except (OSError, ValueError) as error:  # ValueError: mmap of something that is not a regular file
        raise DamagedFile(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}") from error


class _Parser:
    """One pass over the header. `pos` is the next byte; nothing is read past `size`."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size = path, data, len(data)
        self.pos = 0
        self.items_left = MAX_ARRAY_ITEMS

    def fail(self, what: str, at: int | None = None) -> NoReturn:
        raise DamagedFile(f"{self.path.name}, byte {self.pos if at is None else at:,}: {what}")

    def parse(self) -> GGUFHeader:
        version = self.check_magic()
        num_tensors, num_keys = self.number(_U64), self.number(_U64)
        # a tensor takes at least 25 bytes, a key at least 13
        if num_tensors > min(MAX_TENSORS, self.size // 25):
            self.fail(f"{num_tensors:,} tensors announced in a file of {format_bytes(self.size)}", 8)
        if num_keys > min(MAX_KEYS, self.size // 13):
            self.fail(f"{num_keys:,} metadata keys announced in a file of {format_bytes(self.size)}", 16)
        metadata = self.read_metadata(num_keys)
        if (parts := metadata.get("split.count", 1)) not in (0, 1):
            raise UnsupportedModel(f"{self.path.name} is one of {parts} parts; join them with llama.cpp's "
                                   "llama-gguf-split --merge")  # fmt: skip
        infos = [self.tensor_info() for _ in range(num_tensors)]
        return GGUFHeader(self.path, version, metadata, self.place(infos, self.alignment(metadata)))

    def check_magic(self) -> int:
        if (magic := self.data[:4]) != b"GGUF":
            self.fail(f"begins with {magic!r}, a GGUF file begins with b'GGUF'")
        self.pos = 4
        version: int = self.number(_U32)
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = f"big-endian version {swapped}" if swapped in (2, 3) else f"version {version}"
            raise UnsupportedModel(f"{self.path.name} is GGUF {kind}; versions 2 and 3, little endian, are read")
        return version

    # ------------------------------------------------------------------------------------------ primitives

    def number(self, form: struct.Struct) -> Any:
        """One number; moves on."""
        end = self.pos + form.size
        if end > self.size:
            self.fail(f"the file ends here; {end - self.size} more bytes were announced")
        (value,) = form.unpack_from(self.data, self.pos)
        self.pos = end
        return value

    def string(self, limit: int, what: str) -> str:
        """A length and that many bytes of UTF-8; moves on."""
        at = self.pos
        length = self.number(_U64)
        if length > limit or length > self.size - self.pos:
            self.fail(f"{what} of {length:,} bytes; {min(limit, self.size - self.pos):,} are possible here", at)
        raw = self.data[self.pos : self.pos + length]
        self.pos += length
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8 ({error.reason})", at)

    # ------------------------------------------------------------------------------------------ metadata

    def read_metadata(self, num_keys: int) -> dict[str, object]:
        metadata: dict[str, object] = {}
        for _ in range(num_keys):
            at = self.pos
            key = self.string(MAX_NAME_BYTES, "metadata key")
            if key in metadata:
                self.fail(f"metadata key {key!r} appears twice", at)
            metadata[key] = self.value(key, self.number(_U32))
        return metadata

    def value(self, key: str, kind: int) -> object:
        if kind == _ARRAY:
            return self.array(key)
        return self.reader(key, kind)()

    def reader(self, key: str, kind: int) -> Callable[[], object]:
        """A function that reads one value of `kind`."""
        if kind == _STRING:
            return lambda: self.string(MAX_STRING_BYTES, f"value of {key!r}")
        if kind == _BOOL:
            return lambda: self.boolean(key)
        if kind not in _SCALARS:
            self.fail(f"value of {key!r} has type {kind}, which GGUF does not define", self.pos - 4)
        form = struct.Struct(_SCALARS[kind])
        return lambda: self.number(form)

    def boolean(self, key: str) -> bool:
        value = self.data[self.pos] if self.pos < self.size else self.fail("the file ends here")
        if value > 1:
            self.fail(f"value of {key!r} is {value}, a boolean is 0 or 1")
        self.pos += 1
        return bool(value)

    def array(self, key: str) -> list[Any]:
        at = self.pos
        kind, length = self.number(_U32), self.number(_U64)
        if kind == _ARRAY:
            self.fail(f"value of {key!r} is an array of arrays; no model needs one", at)
        item_bytes = 8 if kind == _STRING else struct.calcsize(_SCALARS.get(kind, "B"))
        if length * item_bytes > self.size - self.pos or length > self.items_left:
            self.fail(f"value of {key!r} is an array of {length:,} items; more than the file or a model can hold", at)
        self.items_left -= length
        read = self.reader(key, kind)
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind], length)
        if kind == _STRING:
            return self.strings(key, length)
        return [read() for _ in range(length)]

    def numbers(self, form: str, length: int) -> list[Any]:
        values = struct.unpack_from(f"<{length}{form[1]}", self.data, self.pos)
        self.pos += length * struct.calcsize(form)
        return list(values)

    def strings(self, key: str, length: int) -> list[str]:
        """As `string`, `length` times over, written out: a vocabulary has hundreds of thousands."""
        data, pos, size, unpack = self.data, self.pos, self.size, _U64.unpack_from
        found: list[str] = []
        for _ in range(length):
            if pos + 8 > size or (end := pos + 8 + unpack(data, pos)[0]) > min(size, pos + MAX_STRING_BYTES):
                self.fail(f"item {len(found):,} of {key!r} does not fit into the file", pos)
            try:
                found.append(data[pos + 8 : end].decode())
            except UnicodeDecodeError as error:
                self.fail(f"item {len(found):,} of {key!r} is not UTF-8 ({error.reason})", pos)
            pos = end
        self.pos = pos
        return found

    def alignment(self, metadata: dict[str, object]) -> int:
        value = metadata.get("general.alignment", 32)
        if not isinstance(value, int) or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
            self.fail(f"general.alignment is {value!r}; it must be a power of two up to {MAX_ALIGNMENT:,}")
        return value

    # ------------------------------------------------------------------------------------------ tensor directory

    def tensor_info(self) -> tuple[TensorInfo, int]:
        """A directory entry, its offset still relative to the data section; and where the entry stands."""
        at = self.pos
        name = self.string(MAX_NAME_BYTES, "tensor name")
        num_dims = self.number(_U32)
        if not 1 <= num_dims <= MAX_DIMS:
            self.fail(f"tensor {name!r} has {num_dims:,} dimensions; 1 to {MAX_DIMS} are possible", at)
        shape = tuple(self.number(_U64) for _ in range(num_dims))[::-1]  # the file writes columns first
        kind = BY_CODE.get(code := self.number(_U32))
        if kind is None:
            raise UnsupportedModel(
                f"{self.path.name}: tensor {name!r} has type number {code}; known types: {', '.join(GGML_TYPES)}"
            )
        return TensorInfo(name, shape, kind.name, self.number(_U64), self.tensor_bytes(name, shape, kind, at)), at

    def tensor_bytes(self, name: str, shape: tuple[int, ...], kind: GGMLType, at: int) -> int:
        elements = prod(shape)
        if elements == 0:
            self.fail(f"tensor {name!r} of shape {shape} is empty", at)
        if shape[-1] % kind.block_elements:
            self.fail(f"tensor {name!r}: rows of {shape[-1]:,} are not whole {kind.name} blocks of "
                      f"{kind.block_elements}", at)  # fmt: skip
        num_bytes = elements // kind.block_elements * kind.block_bytes
        if num_bytes > self.size:
            self.fail(f"tensor {name!r} of shape {shape} takes {num_bytes:,} bytes, the file has {self.size:,}", at)
        return num_bytes

    def place(self, entries: list[tuple[TensorInfo, int]], alignment: int) -> dict[str, TensorInfo]:
        """Offsets from the start of the file, checked: aligned, inside the file, no two overlapping."""
        start = (self.pos + alignment - 1) // alignment * alignment
        placed: dict[str, TensorInfo] = {}
        for info, at in entries:
            if info.name in placed:
                self.fail(f"tensor {info.name!r} appears twice", at)
            if info.offset % alignment:
                self.fail(f"tensor {info.name!r} begins at {info.offset:,}, not a multiple of {alignment}", at)
            offset = start + info.offset
            if offset + info.num_bytes > self.size:
                self.fail(f"tensor {info.name!r} ends at byte {offset + info.num_bytes:,}, the file at {self.size:,}; "
                          "the download may be incomplete", at)  # fmt: skip
            placed[info.name] = TensorInfo(info.name, info.shape, info.ggml_type, offset, info.num_bytes)
        self.check_overlap(placed)
        return placed

    def check_overlap(self, placed: dict[str, TensorInfo]) -> None:
        end, before = 0, ""
        for info in sorted(placed.values(), key=lambda t: t.offset):
            if info.offset < end:
                self.fail(f"tensors {before!r} and {info.name!r} overlap", info.offset)
            end, before = info.offset + info.num_bytes, info.name
