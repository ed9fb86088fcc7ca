"""One way in for every format: a GGUF file or a folder of safetensors, opened as the same thing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from kvledger.errors import ConfigError
from kvledger.weights.gguf import open_gguf


class WeightsFile(Protocol):
    """What opening gives: `metadata` under GGUF keys, `tensors` under GGUF names, `facts` without touching them.

    `release`: what has been read of the file need not stay in memory.
    """

    path: Path
    metadata: dict[str, object]

    @property
    def tensors(self) -> Mapping[str, Any]: ...

    @property
    def facts(self) -> dict[str, tuple[tuple[int, ...], str, int]]: ...

    def release(self) -> None: ...


def open_weights(path: str | Path, quantise: str = "") -> WeightsFile:
    """Open a .gguf file, or a folder with config.json and *.safetensors (or with one .gguf).

    `quantise` ("Q8_0", "Q4_1") turns the matrices of a safetensors folder into that type as they are read. Raises
    DamagedFile, UnsupportedModel, ConfigError.
    """
    path = Path(path)
    if path.is_dir() and (path / "config.json").is_file():
        from kvledger.weights.safetensors import SafetensorsFolder

        return SafetensorsFolder(path, quantise)
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if len(found) != 1:
            raise ConfigError(f"{path.name or path} holds {len(found)} GGUF files and no config.json; name one file")
        path = found[0]
    if quantise:
        raise ConfigError("only safetensors are quantised while they are read; a GGUF file is used as it is")
    return open_gguf(path)
