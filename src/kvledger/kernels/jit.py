"""Compiled kernels with one C signature, cached on disk. Knows nothing of what they compute.

A kernel is a function `(op, ctx, thread)` of three addresses' worth of integers: the op's row of arguments, the step's
context, and which thread of the team it runs on. `Kernel.address` compiles it, or loads it from the cache, when first
asked. Numba looks only at the file a function stands in to see whether a cached copy is stale; kernels inline code from
several files, so the cache folder is named by a hash of all of them and of what they are compiled for.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

import llvmlite
import numba
from numba import njit
from numba.core import types
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc

from kvledger.data.host import cache_dir
from kvledger.kernels.isa import ISA, target

_LOG = logging.getLogger("kvledger")
SIGNATURE = types.void(types.int64, types.int64, types.int64)
OPTIONS: dict[str, Any] = {"error_model": "numpy", "boundscheck": False}


@cache
def cache_folder() -> Path:
    """Where compiled code is kept: under $NUMBA_CACHE_DIR or the user's cache folder. It need not exist.

    Each kind of CPU has its own: two that share a folder of files and start together may get each other's code, which
    Numba's index forbids but its names of files do not.
    """
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {ISA} {target()}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    base = Path(os.environ.get("NUMBA_CACHE_DIR") or cache_dir() / "compiled")
    return base / digest.hexdigest()[:16]


@cache
def _tell_unkept(folder: Path, why: str) -> None:
    """Said once per process, and only when something had to be compiled: a warm folder is of use without writing."""
    hint = "$NUMBA_CACHE_DIR may name another folder"
    _LOG.warning("what is not in %s is compiled at every start: it cannot be kept there (%s); %s", folder, why, hint)


class _Place:
    """Numba's locator of a function's files: our folder, also where it is read-only, which Numba's own pass over."""

    def __init__(self, file: str, line: int) -> None:
        self._py_file, self._line = file, line

    @classmethod
    def from_function(cls, function: FunctionType, file: str) -> _Place:
        return cls(file, function.__code__.co_firstlineno)

    def get_cache_path(self) -> str:
        """Functions of equal name from two folders lie apart."""
        parent = Path(self._py_file).resolve().parent
        return str(cache_folder() / f"{parent.name}_{hashlib.sha256(str(parent).encode()).hexdigest()[:16]}")

    def ensure_cache_path(self) -> None:
        """Called before something is written. Raises OSError."""
        Path(self.get_cache_path()).mkdir(parents=True, exist_ok=True)

    def get_source_stamp(self) -> bytes:
        """What makes a copy stale; raises OSError where a function stands in no file."""
        return hashlib.sha256(Path(self._py_file).read_bytes()).digest()

    def get_disambiguator(self) -> str:
        return str(self._line)


class _Files(CompileResultCacheImpl):
    _locator_classes = [_Place]  # noqa: RUF012 (Numba's name)


class _Sealed(IndexDataCacheFile):
    """Numba's files of a function, with a digest over its code and its name.

    Of machine code that is damaged, or another function's, LLVM ends the process or the kernel writes where it should
    not; a crash may leave files with zeros inside.
    """

    def _digest(self, code: bytes) -> bytes:
        name: str = self._index_name
        return hashlib.sha256(name.encode() + code).digest()

    def _save_data(self, name: str, data: Any) -> None:
        code = self._dump(data)  # type: ignore[no-untyped-call]
        super()._save_data(name, (self._digest(code), code))  # type: ignore[no-untyped-call]

    def _load_data(self, name: str) -> Any:
        digest, code = super()._load_data(name)  # type: ignore[no-untyped-call]
        if digest != self._digest(code):
            raise ValueError("not what was written")
        return pickle.loads(code)


class _Cache(FunctionCache):
    """Numba's, but a file that cannot be read is one that is not there, and what cannot be written stays in memory.

    A folder may be read-only, or full, and after a crash its files may be empty, cut or holed.
    """

    _impl_class = _Files

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        where, name = self._impl.locator, self._impl.filename_base
        self._cache_file = _Sealed(where.get_cache_path(), name, where.get_source_stamp())  # type: ignore[no-untyped-call]

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """What was compiled before, or None."""
        try:
            return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        except OSError:
            return None
        except Exception as error:  # what is no pickle may raise anything
            name, folder = self._py_func.__name__, self.cache_path
            _LOG.warning("%s is compiled anew: its code in %s is damaged (%r)", name, folder, error)
            self._write(self.flush)
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        self._write(super().save_overload, sig, data)

    def _write(self, change: Callable[..., None], *args: Any) -> None:
        """Change files; after a failure, which is said, no more of this function's."""
        try:
            change(*args)
        except OSError as error:
            self.disable()  # type: ignore[no-untyped-call]
            _tell_unkept(cache_folder(), error.strerror or repr(error))


def _keep(compiler: Any, function: Callable[..., Any]) -> Any:
    """Have what Numba compiles of a function looked for and kept in our folder."""
    compiler._cache = _Cache(function)
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
