"""What every download needs: one at a time per model, complete or not at all, and plain words when it fails."""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvledger.errors import FetchError
from kvledger.units import format_bytes

try:
    import fcntl
except ImportError:  # not on Windows: there the rename alone keeps two downloads apart
    fcntl = None  # type: ignore[assignment]

_MARK = ".complete"
_PRIVATE = re.compile(r"\S*://\S+|(?:/[\w.@+-]+){2,}/?")


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """One process at a time may build `folder`; others wait. Raises FetchError where the cache cannot be written."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f".{folder.name}.lock").open("w") as file:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed, also by a crash
            yield
    except OSError as error:
        raise FetchError(disk_message(error, folder)) from error


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """A place to build `folder` in, within `exclusive`; it takes its name on success and vanishes on failure."""
    work = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(work, ignore_errors=True)  # of a process that was killed
    work.mkdir()
    try:
        yield work
        mark_complete(work)
        _swap(work, folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def mark_complete(folder: Path) -> None:
    """Only a folder with this mark counts as a model."""
    (folder / _MARK).touch()


def is_complete(folder: Path) -> bool:
    """Whether everything that belongs to the model is in its folder."""
    return (folder / _MARK).is_file()


def _swap(work: Path, folder: Path) -> None:
    """Put `work` in the place of `folder`, which may exist."""
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        folder.rename(old)
        shutil.rmtree(old, ignore_errors=True)
    work.rename(folder)


def disk_message(error: OSError, folder: Path) -> str:
    """One sentence for what went wrong with the disk."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        place = next(p for p in folder.parents if p.exists())
        return (
            f"the disk is full: {format_bytes(shutil.disk_usage(place).free)} are free where models are kept; "
            "make room, or set KVLEDGER_CACHE to another folder"
        )
    return f"the model cannot be stored: {error.strerror or error}; KVLEDGER_CACHE names the folder that is used"


def without_places(text: str) -> str:
    """A message without addresses and paths, which say more of the machine than of the fault."""
    return re.sub(r"\s{2,}", " ", _PRIVATE.sub("…", text)).strip()
