"""From what a person calls a model to its facts: a path, a catalogue name, a hub id, a model fetched before.

Nothing is downloaded but a config.json, and that only for a hub id that the catalogue does not know. Weights are
`weights.store`'s business.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from kvledger.data import catalogue
from kvledger.data.host import cache_dir
from kvledger.errors import ConfigError, DamagedFile, FetchError, UnknownName, about_file
from kvledger.spec.config_fields import read_config
from kvledger.spec.from_config import load_config, model_from_config
from kvledger.spec.from_gguf import model_from_gguf
from kvledger.spec.model import ModelSpec

_HUB_ID = re.compile(r"(?:hf:)?([A-Za-z0-9][\w.-]{0,95})/([A-Za-z0-9][\w.-]{0,95})")


def resolve_model(name: str) -> ModelSpec:
    """The model that `name` means, without its weights.

    In this order: a GGUF file, a config.json or a folder with one; a name, alias or variant of the catalogue; a model
    in the local store; a hub id (`org/repo`, or `hf:org/repo` to ask the hub first), whose config.json is fetched.
    Raises UnknownName with the nearest names, ConfigError, DamagedFile, UnsupportedModel, FetchError.
    """
    path = Path(name).expanduser()
    if _exists(path):
        return model_at(path)
    if name.startswith((".", "/", "~")) or name.endswith((".gguf", ".json")):
        raise ConfigError(f"there is no file {name[:200]!r}; give a path that exists, or a model's name")
    hub = _HUB_ID.fullmatch(name)
    if hub and name.startswith("hf:"):
        return _from_hub(hub[1], hub[2])
    try:
        return catalogue.model(name)
    except UnknownName:
        stored = _stored(name)
        if stored is not None:
            return model_at(stored)
        if hub is None:
            raise
    return _from_hub(hub[1], hub[2])


def model_at(path: Path) -> ModelSpec:
    """The model of a GGUF file, a config.json, or a folder with either. Raises ConfigError, DamagedFile …"""
    if path.is_dir() and not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
        if len(found) != 1:
            raise ConfigError(f"{path}: holds {len(found)} GGUF files and no config.json; name one file")
        path = found[0]
    if path.suffix == ".gguf":
        return _from_gguf(path)
    model = load_config(path)
    return replace(model, weight_bytes=_safetensors_bytes(path)) if path.is_dir() else model


def _safetensors_bytes(folder: Path) -> int | None:
    """Bytes of all tensors in the folder's safetensors files, None without any. Raises DamagedFile.

    A file is eight bytes of length, that many bytes of JSON, and the tensors.
    """
    files = sorted(folder.glob("*.safetensors"))
    total = 0
    for file in files:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
        tensors = file.stat().st_size - 8 - length
        if tensors < 0:
            raise DamagedFile(f"{file.name}: announces {length} bytes of header, the file is shorter")
        total += tensors
    return total if files else None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # longer than a file name may be, or with a null byte
        return False


def _from_gguf(path: Path) -> ModelSpec:
    from kvledger.weights.gguf import read_header

    with about_file(path.name):
        header = read_header(path)
        return model_from_gguf(header.metadata, header.facts, str(path))


def _stored(name: str) -> Path | None:
    """A model fetched before under that name."""
    from kvledger.weights import store

    try:
        return store.find(name)
    except (UnknownName, ConfigError):
        return None


def _from_hub(owner: str, repo: str) -> ModelSpec:
    """The hub's config.json, kept in the cache folder once fetched."""
    from kvledger.weights.fetch_hub import fetch_repository
    from kvledger.weights.store import no_progress

    full = f"{owner}/{repo}"
    folder = cache_dir() / "configs" / f"{owner}--{repo}"
    file = folder / "config.json"
    if not file.is_file():
        try:
            fetch_repository(full, "config.json", folder, no_progress)
        except FetchError as error:
            why = str(error).removeprefix(f"{full} could not be downloaded: ")
            raise FetchError(f"{full}: its config.json could not be fetched: {why}{_in_catalogue(full)}") from error
    return model_from_config(read_config(file), full, f"hf:{full} config.json")


def _in_catalogue(full: str) -> str:
    try:
        return f"; the bundled catalogue has it as {catalogue.find(full).row.id!r}"
    except UnknownName as error:
        return f"; nearest in the bundled catalogue: {', '.join(error.nearest)}" if error.nearest else ""
