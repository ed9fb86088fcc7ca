"""Reads a folder of safetensors as if it were a GGUF file: the same metadata keys, tensor names and layouts.

The header is read by a bounded parser of our own (8 bytes of length, then JSON) over a memory map; renaming and
re-ordering happen when a tensor is asked for. So whatever reads models knows one convention.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from kvledger.errors import ConfigError, DamagedFile, UnsupportedModel
from kvledger.spec.config_fields import read_config
from kvledger.weights.ggml_types import GGML_TYPES
from kvledger.weights.hf_metadata import metadata_of
from kvledger.weights.hf_tensors import Recipe, recipes_of
from kvledger.weights.mapped import MappedFile
from kvledger.weights.quantised import dequantise, quantise_q4, quantise_q8

Array = np.ndarray[Any, Any]
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_FILES = 1024
_TYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16", "F64": "F64"}
_QUANTISERS: dict[str, Callable[[Array], Array]] = {"Q8_0": quantise_q8, "Q4_1": quantise_q4}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a safetensors file."""

    shape: tuple[int, ...]
    ggml_type: str
    file: Path
    offset: int
    num_bytes: int


class LazyTensor:
    """A tensor under its GGUF name, made from what is stored when `data` is read (each time anew)."""

    def __init__(
        self, name: str, recipe: Recipe, parts: list[Stored], maps: Mapping[Path, Array], quantise: str
    ) -> None:
        self.name, self._recipe, self._parts, self._maps = name, recipe, parts, maps
        shapes = [part.shape for part in parts]
        self.shape = recipe.shape(shapes)
        self._made_type = "F32" if recipe.as_f32 or len(self.shape) == 1 else parts[0].ggml_type
        wanted = quantise and len(self.shape) > 1 and self.shape[-1] % 32 == 0 and not recipe.as_f32
        self.ggml_type = quantise if wanted else self._made_type

    @property
    def num_bytes(self) -> int:
        kind = GGML_TYPES[self.ggml_type]
        return prod(self.shape) // kind.block_elements * kind.block_bytes

    @property
    def data(self) -> Array:
        """Its exact bytes, flat."""
        made = self._recipe.make([self._read(part) for part in self._parts])
        if self.ggml_type != self._made_type:
            made = _QUANTISERS[self.ggml_type](self._floats(made))
        return np.ascontiguousarray(made).reshape(-1).view(np.uint8)

    def _read(self, part: Stored) -> Array:
        """As float32 where the result is; else as the stored numbers, float or their bits."""
        raw = self._maps[part.file][part.offset : part.offset + part.num_bytes]
        if self._made_type == "F32":
            return dequantise(raw, part.ggml_type, part.shape)
        kind = {2: np.uint16, 4: np.float32, 8: np.float64}[GGML_TYPES[part.ggml_type].block_bytes]
        return np.frombuffer(raw, kind).reshape(part.shape)

    def _floats(self, made: Array) -> Array:
        return dequantise(np.ascontiguousarray(made).reshape(-1).view(np.uint8), self._made_type, self.shape)


class SafetensorsFolder:
    """An open folder; offers what `gguf.GGUFFile` offers."""

    def __init__(self, folder: Path, quantise: str = "") -> None:
        """`quantise`: "Q8_0" or "Q4_1" for all matrices but routers, "" to leave them. Raises DamagedFile …"""
        if quantise and quantise not in _QUANTISERS:
            raise ConfigError(f"weights are quantised to {' or '.join(_QUANTISERS)}, not {quantise!r}")
        self.path = folder
        self.config = read_config(folder / "config.json")
        self._stored = _stored_tensors(folder)
        self._quantise = quantise
        self._maps = _Maps()
        self.metadata = metadata_of(folder, self.config)

    @cached_property
    def tensors(self) -> Mapping[str, LazyTensor]:
        """GGUF name → tensor. Raises UnsupportedModel for a tensor that has no GGUF name."""
        recipes = recipes_of(self.metadata, {name: stored.shape for name, stored in self._stored.items()})
        return {
            name: LazyTensor(name, recipe, [self._stored[s] for s in recipe.sources], self._maps, self._quantise)
            for name, recipe in recipes.items()
        }

    def release(self) -> None:
        """See `MappedFile`."""
        self._maps.release()

    @property
    def facts(self) -> dict[str, tuple[tuple[int, ...], str, int]]:
        """Name → (shape, type, bytes)."""
        return {name: (t.shape, t.ggml_type, t.num_bytes) for name, t in self.tensors.items()}


class _Maps(Mapping[Path, Array]):
    """Files, mapped when first read."""

    def __init__(self) -> None:
        self._open: dict[Path, MappedFile] = {}

    def __getitem__(self, path: Path) -> Array:
        if path not in self._open:
            self._open[path] = MappedFile(path)
        return self._open[path].data

    def release(self) -> None:
        """See `MappedFile`."""
        for file in self._open.values():
            file.release()

    def __iter__(self) -> Iterator[Path]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)


def _stored_tensors(folder: Path) -> dict[str, Stored]:
    """All tensors of all files in the folder. Raises DamagedFile."""
    files = sorted(folder.glob("*.safetensors"))
    if not files or len(files) > MAX_FILES:
        raise DamagedFile(f"{folder.name} holds {len(files):,} safetensors files")
    found: dict[str, Stored] = {}
    for file in files:
        for name, stored in read_safetensors(file).items():
            if name in found:
                raise DamagedFile(f"tensor {name!r} is in {found[name].file.name} and in {file.name}")
            found[name] = stored
    _check_index(folder, found)
    return found


def _check_index(folder: Path, found: Mapping[str, Stored]) -> None:
    """Every tensor that the index names is there: a part may be missing."""
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return
    weight_map = read_config(path).get("weight_map")
    missing = [name for name in weight_map if name not in found] if isinstance(weight_map, dict) else []
    if missing:
        raise DamagedFile(f"{len(missing):,} tensors that {path.name} names are missing, first {missing[0]!r}; "
                          "the download may be incomplete")  # fmt: skip


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Name → where it is stored, every range checked. Raises DamagedFile, UnsupportedModel."""
    try:
        return _read(path)
    except OSError as error:
        raise DamagedFile(f"{path.name} cannot be read: {error.strerror or error}") from error


def _read(path: Path) -> dict[str, Stored]:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise DamagedFile(f"{path.name}: a header of {length:,} bytes in a file of {size:,}")
        header = _parse_header(path, file.read(length))
    start = 8 + length
    found = {name: _entry(path, name, row, start, size) for name, row in header.items() if name != "__metadata__"}
    _check_overlap(path, found)
    return found


def _check_overlap(path: Path, found: Mapping[str, Stored]) -> None:
    end, before = 0, ""
    for name, stored in sorted(found.items(), key=lambda item: item[1].offset):
        if stored.num_bytes and stored.offset < end:
            raise DamagedFile(f"{path.name}: tensors {before!r} and {name!r} overlap")
        end, before = max(end, stored.offset + stored.num_bytes), name


def _parse_header(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = json.loads(raw, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path.name}: the header is not JSON as it should be: {error}") from error
    if not isinstance(header, dict):
        raise DamagedFile(f"{path.name}: the header is a JSON {type(header).__name__}, not an object")
    return header


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names are all different. Raises ValueError."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = Counter(name for name, _ in pairs)
        raise ValueError(f"{names.most_common(1)[0][0]!r} appears twice")
    return found


def _entry(path: Path, name: str, row: Any, start: int, size: int) -> Stored:
    where = f"{path.name}: tensor {name!r}"
    if not isinstance(row, dict):
        raise DamagedFile(f"{where} is described by a JSON {type(row).__name__}, not an object")
    shape, offsets = _whole_numbers(row.get("shape"), where), _whole_numbers(row.get("data_offsets"), where)
    if (kind := _TYPES.get(str(row.get("dtype")))) is None:
        raise UnsupportedModel(f"{where} is of type {row.get('dtype')!r}; read are {', '.join(_TYPES)}")
    num_bytes = prod(shape) * GGML_TYPES[kind].block_bytes
    if len(offsets) != 2 or offsets[1] - offsets[0] != num_bytes or start + offsets[1] > size:
        raise DamagedFile(f"{where} of {num_bytes:,} bytes does not lie in the file of {size:,} at {offsets}")
    return Stored(tuple(shape), kind, path, start + offsets[0], num_bytes)


def _whole_numbers(value: Any, where: str) -> list[int]:
    if not isinstance(value, list) or len(value) > 8 or not all(type(n) is int and n >= 0 for n in value):
        raise DamagedFile(f"{where} has no shape or offsets that could be meant")
    return value
