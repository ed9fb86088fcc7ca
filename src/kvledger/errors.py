"""Every error kvledger raises on purpose. Knows nothing else of the package.

    KvledgerError
    ├── ConfigError          an option or a value that cannot be meant
    ├── UnknownName          a model, device, engine … that no row describes; carries the nearest names
    ├── DoesNotFit           memory: what is missing, and the nearest thing that fits
    ├── UnsupportedModel     architecture, tensor type or tokenizer this code does not compute
    ├── DamagedFile          a file that is not what it says: which, where in it, what was expected
    ├── FetchError           something could not be downloaded
    ├── BadRequest           one request is wrong; the server answers 400 and lives on
    │   └── ContextTooLong   prompt (and asked-for output) beyond what can ever be held
    └── EngineDead           the engine thread has ended; nothing will be answered any more

A message names the thing, the number and the nearest thing that works.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

MAX_LISTED = 12  # names that an error lists where none is near


class KvledgerError(Exception):
    """Base of all errors meant for a person: shown as one line, never as a traceback."""


class ConfigError(KvledgerError):
    """An option or a value that cannot be meant."""


class UnknownName(KvledgerError):
    """A name that no row describes. Tells the nearest known ones, or all where they are few."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(set(known))
        self.kind, self.name, known = kind, name, list(known)
        self.nearest = nearest(name, known)
        hint = f"; nearest: {', '.join(self.nearest)}" if self.nearest else ""
        if not hint and 0 < len(known) <= MAX_LISTED:
            hint = f"; known: {', '.join(known)}"
        super().__init__(f"unknown {kind} {name!r}{hint}")


class DoesNotFit(KvledgerError):
    """Memory does not suffice. `missing_bytes` says by how much."""

    def __init__(self, message: str, missing_bytes: int = 0) -> None:
        self.missing_bytes = missing_bytes
        super().__init__(message)


class UnsupportedModel(KvledgerError):
    """An architecture, tensor type or tokenizer that this code does not compute."""


class DamagedFile(KvledgerError):
    """A file is not what it says."""


class FetchError(KvledgerError):
    """A download failed."""


class BadRequest(KvledgerError):
    """One request is wrong. `param` names the field, as OpenAI's error body does."""

    def __init__(self, message: str, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


class ContextTooLong(BadRequest):
    """The request can never be held: longer than the context or than the whole pool."""


class EngineDead(KvledgerError):
    """The engine thread has ended."""


@contextmanager
def about_file(name: str) -> Iterator[None]:
    """Whoever finds fault with a model's file need not know its name: it is put in front where it is missing."""
    try:
        yield
    except (DamagedFile, UnsupportedModel) as error:
        if str(error).startswith(name):
            raise
        raise type(error)(f"{name}: {error}") from error


def nearest(name: str, known: Iterable[str], count: int = 5) -> list[str]:
    """Up to `count` known names that look like `name`, best first: same start, then edit distance."""
    folded = {k.lower(): k for k in known}
    word = name.lower()
    starts = [folded[k] for k in sorted(folded) if word and (k.startswith(word) or word in k)]
    close = [folded[k] for k in difflib.get_close_matches(word, folded, n=count, cutoff=0.5)]
    return list(dict.fromkeys(close + starts))[:count]
