"""A figure that can account for itself: value, unit, formula, inputs, source, and whether it was measured or assumed.

Every number that a ledger or a plan shows is a `Figure`. Its formula is text in plain arithmetic over the names of
its inputs, and `evaluate` computes that text: the tests demand that it gives the value shown, so an explanation
cannot drift from the code. Knows no models and no devices.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from kvledger.errors import ConfigError
from kvledger.units import format_bytes, format_count, format_money, format_seconds

Basis = Literal["measured", "derived", "assumed", "given"]
Number = int | float


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a formula: its symbol, value and unit, where it comes from and on what it rests."""

    name: str
    value: Number
    unit: str = ""
    source: str = ""
    basis: Basis = "given"


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its account. `name` is a symbol that other formulas may use; `label` is for people."""

    name: str
    value: Number
    unit: str
    formula: str
    inputs: tuple[Input, ...] = ()
    source: str = ""
    basis: Basis = "derived"
    label: str = ""
    note: str = ""

    @property
    def title(self) -> str:
        """What a table calls it."""
        return self.label or self.name.replace("_", " ")

    @property
    def rests_on(self) -> tuple[str, ...]:
        """Names of the inputs that are assumed, directly or through another figure."""
        return tuple(i.name for i in self.inputs if i.basis == "assumed")

    @property
    def is_assumed(self) -> bool:
        """Assumed itself or computed from something assumed."""
        return self.basis == "assumed" or bool(self.rests_on)

    @property
    def text(self) -> str:
        """The value dressed in its unit; a trailing ~ marks what rests on an assumption."""
        return dress(self.value, self.unit) + ("~" if self.is_assumed else "")

    @property
    def substitution(self) -> str:
        """The formula with the inputs' values in place of their names."""
        values = {i.name: plain(i.value) for i in self.inputs}
        return re.sub(r"[^\W\d]\w*", lambda m: values.get(m[0], m[0]), self.formula)

    def as_input(self, name: str = "") -> Input:
        """This figure as an input of another one."""
        basis: Basis = "assumed" if self.is_assumed else self.basis
        return Input(name or self.name, self.value, self.unit, f"figure `{self.name}`", basis)

    def explain(self) -> str:
        """Formula, inputs, substitution, result and source, one line each."""
        lines = [f"{self.title} = {self.text}", f"  formula       {self.name} = {self.formula}"]
        for i in self.inputs:
            mark = " (assumed)" if i.basis == "assumed" else " (measured)" if i.basis == "measured" else ""
            lines.append(
                f"  input         {i.name} = {dress(i.value, i.unit)}{mark}" + (f"  [{i.source}]" if i.source else "")
            )
        if self.inputs:
            lines.append(f"  substituted   {self.substitution}")
        lines.append(f"  result        {plain(self.value)} {self.unit}".rstrip() + f"  ({self.basis})")
        if self.source:
            lines.append(f"  source        {self.source}")
        if self.note:
            lines.append(f"  note          {self.note}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """A JSON object with everything `explain` says."""
        return {
            "name": self.name,
            "label": self.title,
            "value": self.value if math.isfinite(self.value) else None,
            "unit": self.unit,
            "formula": self.formula,
            "substitution": self.substitution,
            "inputs": [
                {"name": i.name, "value": i.value, "unit": i.unit, "source": i.source, "basis": i.basis}
                for i in self.inputs
            ],
            "source": self.source,
            "basis": self.basis,
            "assumed": self.is_assumed,
        }


def given(
    name: str, value: Number, unit: str = "", source: str = "", basis: Basis = "given", label: str = ""
) -> Figure:
    """A figure that is an input: its formula is itself."""
    text = plain(value) if value == int(value) else repr(value)
    return Figure(name, value, unit, text, (), source, basis, label)


def derive(
    name: str, unit: str, formula: str, *inputs: Input | Figure, source: str = "", label: str = "", note: str = ""
) -> Figure:
    """A figure whose value is its formula, computed."""
    flat = tuple(i.as_input() if isinstance(i, Figure) else i for i in inputs)
    value = evaluate(formula, {i.name: i.value for i in flat})
    return Figure(name, value, unit, formula, flat, source, "derived", label, note)


# ---------------------------------------------------------------------------------------------- arithmetic in text

_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-", "·": "*"})
_FUNCTIONS: Mapping[str, Callable[..., Number]] = {
    "floor": math.floor, "ceil": math.ceil, "min": min, "max": max,
}  # fmt: skip


def evaluate(formula: str, values: Mapping[str, Number]) -> Number:
    """Compute `formula` (+ − × ÷ // ^, parentheses, floor, ceil, min, max) with `values` for its names.

    Whole numbers stay exact. Raises ConfigError on anything else, and on a name without a value.
    """
    try:
        return _value(_parsed(formula), values)
    except (SyntaxError, KeyError, ZeroDivisionError, OverflowError) as error:
        raise ConfigError(f"cannot compute {formula!r}: {error!r}") from error


@lru_cache(maxsize=1024)
def _parsed(formula: str) -> ast.expr:
    return ast.parse(formula.translate(_SIGNS).replace("^", "**"), mode="eval").body


def _value(node: ast.expr, values: Mapping[str, Number]) -> Number:
    match node:
        case ast.Constant(value=int() | float()):
            return node.value  # type: ignore[return-value]
        case ast.Name():
            return values[node.id]
        case ast.BinOp():
            return _binary(node.op, _value(node.left, values), _value(node.right, values))
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand, values)
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_value(argument, values) for argument in node.args))
    raise SyntaxError(ast.dump(node))


def _binary(op: ast.operator, left: Number, right: Number) -> Number:
    match op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Mult():
            return left * right
        case ast.FloorDiv():
            return left // right
        case ast.Div():
            return left / right
        case ast.Pow() if abs(right) < 1e4:  # cannot be used to grow a number without bound
            return float(left) ** right
    raise SyntaxError(type(op).__name__)


# ---------------------------------------------------------------------------------------------- dressing


def plain(value: Number) -> str:
    """A number for a formula: all digits where whole, six significant ones otherwise."""
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.6g}" if math.isfinite(value) else "∞"
    return f"{int(value):,}".replace(",", "_") if abs(value) >= 10_000 else str(int(value))


_COUNTED = ("requests", "tokens", "blocks", "devices", "layers", "experts", "stages")  # 1 request, 2 requests
_RATES = {"FLOP/s": 1e12, "B/s": 1e9}
_RATE_NAMES = {"FLOP/s": "TFLOP/s", "B/s": "GB/s"}


def dress(value: Number, unit: str) -> str:
    """A number for a person: `2.50 GiB`, `20.9 ms`, `989 TFLOP/s`, `$1.20`, `6 requests`."""
    if not math.isfinite(value):
        return "∞"
    if unit == "B":
        return format_bytes(value)
    if unit == "s":
        return format_seconds(value)
    if unit == "$":
        return format_money(value)
    if unit in _RATES:
        return f"{value / _RATES[unit]:,.4g} {_RATE_NAMES[unit]}"
    if unit == "%":
        return f"{value:.3g} %"
    if unit == "×":
        return f"{value:,.4g}×"
    text = (
        f"{int(value):,}"
        if value == int(value)
        else f"{value:,.4g}"
        if abs(value) < 1000
        else format_count(round(value))
    )
    return f"{text} {unit[:-1] if value == 1 and unit in _COUNTED else unit}".rstrip()
