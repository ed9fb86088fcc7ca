"""Reading a config.json: bounded parsing, and fields that check type and range. Knows no architecture.

Everything here may come from a stranger: text has a size limit, nesting and numbers are bounded, and each error
names the field and the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvledger.errors import ConfigError

MAX_TEXT_BYTES = 4 << 20  # the longest public config.json is well under 1 MiB
MAX_LAYERS = 1024
MAX_COUNT = 1 << 40  # of anything: heads, channels, words, tokens of context


def parse_config(text: str | bytes, source: str) -> dict[str, Any]:
    """JSON text → object. Raises ConfigError on anything but one bounded object of plain JSON."""
    if len(text) > MAX_TEXT_BYTES:
        raise ConfigError(f"{source}: {len(text)} bytes of JSON; a model configuration has at most {MAX_TEXT_BYTES}")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ConfigError(f"{source}: JSON nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, an integer of thousands of digits
        raise ConfigError(f"{source}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: holds a JSON {type(value).__name__}, not an object")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def read_config(path: Path) -> dict[str, Any]:
    """A file → object, never reading more than the limit. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            return parse_config(file.read(MAX_TEXT_BYTES + 1), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None


class Fields:
    """One object of a config.json. Reading never mutates; null counts as absent, as it does in transformers.

    Names given together are the spellings of one field; the first that is present counts.
    """

    def __init__(self, values: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self._values, self._prefix, self.source = values, prefix, source

    def _find(self, names: Sequence[str]) -> tuple[str, Any]:
        for name in names:
            value = self._values.get(name)
            if value is not None:
                return name, value
        return names[0], None

    def fail(self, name: str, problem: str) -> ConfigError:
        """The error to raise about field `name`."""
        return ConfigError(f"{self.source}: field {self._prefix + name!r} {problem}")

    def has(self, *names: str) -> bool:
        return self._find(names)[1] is not None

    def names(self) -> list[str]:
        """The fields' names."""
        return [name for name in self._values if isinstance(name, str)]

    def maybe_count(self, *names: str, low: int = 1, high: int = MAX_COUNT) -> int | None:
        """A whole number in [low, high], or None where absent. Raises ConfigError."""
        name, value = self._find(names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(name, f"must be a whole number, is {_shown(value)}")
        if not low <= value <= high:
            raise self.fail(name, f"must be from {low} to {high}, is {_shown(value)}")
        return value

    def count(self, *names: str, low: int = 1, high: int = MAX_COUNT) -> int:
        """As `maybe_count`, but the field must be there."""
        value = self.maybe_count(*names, low=low, high=high)
        if value is None:
            spelled = f" (also spelled {', '.join(map(repr, names[1:]))})" if len(names) > 1 else ""
            raise self.fail(names[0], f"is missing{spelled}; without it memory cannot be counted")
        return value

    def count_or(self, default: int, *names: str, low: int = 0, high: int = MAX_COUNT, auto: str = "") -> int:
        """As `maybe_count`, with a value for the absent field; the text `auto`, if any, counts as absent."""
        if auto and self._find(names)[1] == auto:
            return default
        value = self.maybe_count(*names, low=low, high=high)
        return default if value is None else value

    def number_or(self, default: float, *names: str) -> float:
        name, value = self._find(names)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_COUNT:
            raise self.fail(name, f"must be a number from 0 to {MAX_COUNT}, is {_shown(value)}")
        return float(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        name, value = self._find(names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, f"must be true or false, is {_shown(value)}")
        return value

    def text(self, *names: str, default: str = "") -> str:
        name, value = self._find(names)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > 200:
            raise self.fail(name, f"must be a short text, is {_shown(value)}")
        return value

    def _list(self, name: str, kind: type, what: str) -> list[Any] | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) > MAX_LAYERS:
            raise self.fail(name, f"must be a list of at most {MAX_LAYERS} {what}, is {_shown(value)}")
        if any(not isinstance(x, kind) or (kind is int and isinstance(x, bool)) for x in value):
            raise self.fail(name, f"must hold {what} only, is {_shown(value)}")
        return value

    def texts(self, name: str) -> list[str] | None:
        return self._list(name, str, "texts")

    def numbers(self, name: str) -> list[float] | None:
        values = self._list(name, object, "numbers")
        if values is not None and any(
            isinstance(x, bool) or not isinstance(x, int | float) or not 0 <= x <= MAX_COUNT for x in values
        ):
            raise self.fail(name, f"must hold numbers from 0 on only, is {_shown(values)}")
        return values

    def lists(self, name: str) -> list[list[Any]] | None:
        return self._list(name, list, "lists")

    def counts(self, name: str, low: int = 0, high: int = MAX_COUNT) -> list[int] | None:
        values = self._list(name, int, "whole numbers")
        if values is not None and any(not low <= x <= high for x in values):
            raise self.fail(name, f"must hold numbers from {low} to {high} only, is {_shown(values)}")
        return values

    def per_layer(self, num_layers: int, *names: str, default: int | None = None) -> list[int]:
        """One whole number per layer, from a list or from one number for all. Raises ConfigError."""
        name, value = self._find(names)
        if not isinstance(value, list):
            one = self.count(*names) if default is None else self.count_or(default, *names, low=1)
            return [one] * num_layers
        found = self.counts(name) or []
        if len(found) < num_layers:
            raise self.fail(name, f"has {len(found)} entries for {num_layers} layers")
        return found[:num_layers]

    def sliding_pattern(self, default: str) -> str:
        """`sliding_window_pattern` in letters (L local, G global); a number n means n − 1 local, then one global."""
        value = self._values.get("sliding_window_pattern")
        if isinstance(value, str):
            if not value or len(value) > MAX_LAYERS or set(value) - {"L", "G"}:
                raise self.fail("sliding_window_pattern", f"must be letters L and G, is {_shown(value)}")
            return value
        period = self.maybe_count("sliding_window_pattern", high=MAX_LAYERS)
        return "L" * (period - 1) + "G" if period else default

    def section(self, name: str) -> Fields | None:
        """The object under `name`, or None."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(name, f"must be an object, is {_shown(value)}")
        return Fields(value, self.source, f"{self._prefix}{name}.")

    def sections(self, name: str) -> list[Fields] | None:
        """The objects of the list under `name`, or None."""
        values = self._list(name, dict, "objects")
        if values is None:
            return None
        return [Fields(x, self.source, f"{self._prefix}{name}[{i}].") for i, x in enumerate(values)]

    def with_defaults(self, defaults: Mapping[str, Any]) -> Fields:
        """The same object with `defaults` for what is absent or null."""
        given = {k: v for k, v in self._values.items() if v is not None}
        return Fields({**defaults, **given}, self.source, self._prefix)

    def only(self, *names: str) -> dict[str, Any]:
        """Those of `names` that are present."""
        return {name: self._values[name] for name in names if self._values.get(name) is not None}


def _shown(value: object) -> str:
    """A value short enough for an error message; never formats a huge one."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
