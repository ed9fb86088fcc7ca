"""Compiled kernels with one C signature, cached on disk. Knows nothing of what they compute.

A kernel is a function `(op, ctx, thread)` of three addresses' worth of integers: the op's row of arguments, the step's
context, and which thread of the team it runs on. `Kernel.address` compiles it, or loads it from the cache, when first
asked. Numba looks only at the file a function stands in to see whether a cached copy is stale; kernels inline code from
several files, so the cache folder is named by a hash of all of them and of what they are compiled for.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite
import numba
from numba import njit
from numba.core import types
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc

from kvledger.data.host import cache_dir
from kvledger.kernels.isa import ISA, target
from kvledger.units import format_bytes

_LOG = logging.getLogger("kvledger")
numba_config: Any = numba.config
SIGNATURE = types.void(types.int64, types.int64, types.int64)
_ROOM_BYTES = 16 << 20  # what is compiled for one model takes about 5 MB
OPTIONS: dict[str, Any] = {"error_model": "numpy", "boundscheck": False}


@cache
def cache_folder() -> Path | None:
    """Where compiled code is kept: under $NUMBA_CACHE_DIR or the user's cache folder. None: nowhere, which is said.

    Each kind of CPU has its own: two that share a folder of files and start together may get each other's code, which
    Numba's index forbids but its names of files do not.
    """
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {ISA} {target()}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    base = Path(os.environ.get("NUMBA_CACHE_DIR") or cache_dir() / "compiled")
    folder = base / digest.hexdigest()[:16]
    try:
        _check_usable(folder)
    except OSError as error:  # a read-only home or a full disk
        hint = "$NUMBA_CACHE_DIR may name another folder"
        _LOG.warning("kernels are compiled at every start: %s cannot keep them (%s); %s", folder, error.strerror, hint)
        return None
    return folder


def _check_usable(folder: Path) -> None:
    """Makes the folder. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, "it is not writable")
    if (free := shutil.disk_usage(folder).free) < _ROOM_BYTES:
        raise OSError(errno.ENOSPC, f"{format_bytes(free)} of disk are free, {format_bytes(_ROOM_BYTES)} are needed")


@contextmanager
def _cache_here() -> Iterator[bool]:
    """Numba reads its cache folder when a function is decorated; others' functions are left alone.

    Gives whether there is a folder.
    """
    before, folder = numba_config.CACHE_DIR, cache_folder()
    numba_config.CACHE_DIR = str(folder or "")
    try:
        yield folder is not None
    finally:
        numba_config.CACHE_DIR = before


class _Cache(FunctionCache):
    """Numba's, to which a file that cannot be read is one that is not there: after a crash it may be empty or cut."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was compiled before, or None."""
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except Exception as error:  # what is no pickle may raise anything
            name, folder = self._py_func.__name__, self.cache_path
            _LOG.warning("%s is compiled anew: its code in %s is damaged (%r)", name, folder, error)
            self.flush()  # type: ignore[no-untyped-call]
            return None


def _keep(compiler: Any, function: Callable[..., Any]) -> Any:
    """Have what Numba compiles of a function kept in our folder, if there is one."""
    with _cache_here() as is_kept:
        if is_kept:
            compiler._cache = _Cache(function)  # type: ignore[no-untyped-call]
    return compiler


def cached_njit(function: Callable[..., Any]) -> Any:
    """`numba.njit` without the GIL, cached in our folder."""
    return _keep(njit(nogil=True, **OPTIONS)(function), function)


def inline(function: Callable[..., Any]) -> Any:
    """A helper of kernels: compiled into whoever calls it."""
    return njit(inline="never", **OPTIONS)(function)


def rebound(template: Callable[..., Any], name: str, **bindings: Any) -> FunctionType:
    """A copy of a function with other globals; not a closure, which Numba could not cache over emitted functions.

    `name` must say what is bound: machine code kept by one process is linked with another's by name, and of two
    functions of the same name only one would be left.
    """
    assert isinstance(template, FunctionType)
    function = FunctionType(template.__code__, {**template.__globals__, **bindings}, name)
    function.__qualname__ = name
    function.__module__ = template.__module__
    return function


class Kernel:
    """A kernel made of a template and the inner functions bound to its global names."""

    def __init__(self, name: str, template: Callable[[int, int, int], None], **bindings: Any) -> None:
        self.name = name
        self._function = rebound(template, name, **bindings)
        self._compiled: Any = None

    @property
    def is_compiled(self) -> bool:
        return self._compiled is not None

    @property
    def address(self) -> int:
        """Where the machine code lies; valid for the life of the process."""
        if self._compiled is None:
            signature = SIGNATURE.args, SIGNATURE.return_type
            compiled = CFunc(self._function, signature, locals={}, options=OPTIONS)
            _keep(compiled, self._function).compile()
            self._compiled = compiled
        return int(self._compiled.address)
