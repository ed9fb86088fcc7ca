"""Jinja for templates nobody has read: sandboxed, and bounded in rounds, calls, sizes and time.

Jinja's own sandbox keeps templates away from Python's internals; it does not stop four nested loops or `"x" * 10**10`.
Here every loop round, call and operator draws on one budget per rendering; every value that a template makes weighs
at most MAX_SIZE, measured before or while it grows; and only the filters that chat templates use exist.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, parser
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvledger.errors import BadRequest, UnsupportedModel

MAX_ROUNDS = 1_000_000  # loop rounds, calls and operators of one rendering
MAX_SIZE = 4_000_000  # characters of any one value with all it contains, and of the result
ITEM_SIZE = 16  # an item of a list weighs as much as so many characters
MAX_DEPTH = 64
MAX_SECONDS = 5.0
_FILTERS = [
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby", "int",
    "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "round",
    "safe", "select", "selectattr", "sort", "string", "sum", "title", "trim", "unique", "upper",
]  # fmt: skip
_PADDING_METHODS = {"center", "ljust", "rjust", "zfill", "expandtabs", "format_map", "translate"}
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")


class Budget:
    """What is left of one rendering."""

    def __init__(self) -> None:
        self.rounds_left = MAX_ROUNDS
        self.deadline_s = time.monotonic() + MAX_SECONDS

    def draw(self) -> None:
        """One round, call or operator. Raises SecurityError when there are no more, or no time."""
        self.rounds_left -= 1
        if self.rounds_left < 0:
            raise SecurityError(f"more than {MAX_ROUNDS:,} loop rounds, calls and operators")
        if time.monotonic() > self.deadline_s:
            raise SecurityError(f"more than {MAX_SECONDS:g} seconds")


# ---------------------------------------------------------------------------------------------- weights


def check_size(size: int) -> None:
    """Raises SecurityError beyond MAX_SIZE."""
    if size > MAX_SIZE:
        raise SecurityError(f"a value of {size:,} characters or more; {MAX_SIZE:,} are allowed")


def weigh(value: Any, depth: int = 0) -> int:
    """Characters of a value with all it contains. Raises SecurityError beyond MAX_SIZE or MAX_DEPTH."""
    if isinstance(value, str | bytes):
        size = len(value)
    elif isinstance(value, dict):
        size = _weigh_all([*value.keys(), *value.values()], depth)
    elif isinstance(value, list | tuple | set | frozenset):
        size = _weigh_all(value, depth)
    else:
        size = 1
    check_size(size)
    return size


def _weigh_all(items: Iterable[Any], depth: int) -> int:
    if depth >= MAX_DEPTH:
        raise SecurityError(f"a value nested more than {MAX_DEPTH} deep")
    size = 1
    for item in items:
        size += ITEM_SIZE + weigh(item, depth + 1)
        check_size(size)
    return size


def gather(value: Any) -> Any:
    """A generator as a list, weighed while it grows; any other value itself, weighed."""
    if not isinstance(value, Iterator):
        weigh(value)
        return value
    items: list[Any] = []
    size = 0
    for item in value:
        size += ITEM_SIZE + weigh(item)
        check_size(size)
        items.append(item)
    return items


def _guarded(function: Any) -> Callable[..., Any]:
    """A filter whose arguments are weighed first."""

    @functools.wraps(function)  # keeps the marks of jinja2.pass_context and its like
    def guarded(*args: Any, **kwargs: Any) -> Any:
        return function(*[gather(a) for a in args], **{k: gather(v) for k, v in kwargs.items()})

    return guarded


# ---------------------------------------------------------------------------------------------- environment


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}`, marks that training tools put into templates: the body alone counts."""

    tags = {"generation"}  # noqa: RUF012 (the name and type are Jinja's)

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment of one template; the budget of the rendering under way is per thread."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        extensions: Sequence[type[Extension]] = [loopcontrols, _Generation]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_shown)
        self._running = threading.local()
        allowed = {name: _guarded(self.filters[name]) for name in _FILTERS}
        ours = {"join": _join, "replace": _replace, "indent": _indent, "tojson": _tojson}
        self.filters.clear()
        self.filters.update(allowed | {name: _guarded(f) for name, f in ours.items()})
        self.filters.update(_counted=_counted, _weighed=_weighed, _joined=_joined)
        self.globals.pop("lipsum", None)
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    @property
    def budget(self) -> Budget:
        """Of this thread's rendering."""
        found: Budget = self._running.budget
        return found

    @budget.setter
    def budget(self, value: Budget) -> None:
        self._running.budget = value

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _filtered(loop.iter, "_counted")
        for parent in list(tree.find_all(nodes.Node)):
            _wrap_children(parent)
        tree.set_environment(self)
        return tree

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call: drawn, and what it makes of its arguments weighed."""
        self.budget.draw()
        _check_method(__obj, [gather(a) for a in args])
        return gather(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Every `+`, `*`, `**` and `%`."""
        self.budget.draw()
        _check_operands(operator, left, right)
        result = super().call_binop(context, operator, left, right)
        check_size(_length(result))  # what a list holds was weighed when it was made; it may grow item by item
        return result


def _filtered(node: Any, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _wrap_children(parent: nodes.Node) -> None:
    """Every list, tuple, dict and `~` that an expression makes passes through a filter that weighs it."""
    for field, value in parent.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(parent, field, _wrap(value))
        elif isinstance(value, list):
            value[:] = [_wrap(v) if isinstance(v, nodes.Node) else v for v in value]


def _wrap(node: nodes.Node) -> nodes.Node:
    if isinstance(node, nodes.Concat):
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "_joined")
    if isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
        return _filtered(node, "_weighed")
    return node


@jinja2.pass_context
def _counted(context: Any, items: Iterable[Any]) -> Iterator[Any]:
    """The rounds of a loop."""
    for item in items:
        context.environment.budget.draw()
        yield item


@jinja2.pass_context
def _shown(context: Any, value: Any) -> Any:
    """`{{ value }}`: drawn, and weighed, as blocks may collect what is shown."""
    context.environment.budget.rounds_left -= weigh(value) // 64
    context.environment.budget.draw()
    return value


def _weighed(value: Any) -> Any:
    weigh(value)
    return value


def _joined(parts: list[Any]) -> str:
    weigh(parts)
    return "".join(map(str, parts))


# ---------------------------------------------------------------------------------------------- what could grow


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | bytes) else 1


def _check_operands(operator: str, left: Any, right: Any) -> None:
    if operator == "+":
        check_size(_length(left) + _length(right))
    elif operator == "%" and isinstance(left, str):
        if _WIDE_FORMAT.search(left):
            raise SecurityError("a width of four digits in a format")
        weigh(right)
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > 4096:
            raise SecurityError("a number of more than 4,096 bits")
    elif operator == "*":
        count, value = (left, right) if isinstance(left, int) else (right, left)
        check_size(count * weigh(value) if isinstance(count, int) else 0)


def _check_method(function: Any, args: Sequence[Any]) -> None:
    """Methods of strings that can make much of little."""
    function = getattr(function, "__wrapped__", function)  # Jinja's sandbox wraps str.format
    text, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if not isinstance(text, str):
        return
    if name in _PADDING_METHODS or (name == "format" and ":" in text):
        raise SecurityError(f"the method {name} is not available here")
    if name == "replace" and len(args) >= 2:
        _check_replace(text, args[0], args[1])
    elif name == "join" and args:
        check_size(weigh(args[0]) + len(text) * _length(args[0]))


def _check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        check_size(len(text) + text.count(old) * len(new))


def _join(items: Sequence[Any], d: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        raise SecurityError("join by attribute is not available; write map(attribute=…) | join")
    check_size(weigh(items) + len(items) * len(d))
    return d.join(map(str, items))


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    _check_replace(str(text), old, new)
    return str(text).replace(old, new, -1 if count is None else count)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    step = len(width) if isinstance(width, str) else width
    check_size(len(text) + (text.count("\n") + 1) * step)
    return str(do_indent(text, width, first, blank))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """As transformers defines it: no HTML escaping."""
    if indent is not None and not 0 <= indent <= 16:
        raise SecurityError(f"tojson with an indent of {indent}")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return "".join(_measured(encoder.iterencode(value)))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > 64 or any(digit in form for digit in "0123456789"):
        raise SecurityError("a format of more than 64 characters, or with widths")
    return datetime.now().strftime(form)


def _measured(parts: Iterable[str]) -> Iterator[str]:
    size = 0
    for part in parts:
        size += len(part)
        check_size(size)
        yield part


# ---------------------------------------------------------------------------------------------- compile, render


def compile_bounded(source: str) -> jinja2.Template:
    """Raises UnsupportedModel, saying what is wrong in which line."""
    try:
        return BoundedEnvironment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise UnsupportedModel(f"the chat template is wrong in line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError, ValueError) as error:
        raise UnsupportedModel(f"the chat template cannot be compiled: {error}") from error


def render_bounded(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """The text. Raises BadRequest: what the template itself refuses, what it lacks, or the bound that was passed."""
    environment = template.environment
    assert isinstance(environment, BoundedEnvironment)
    environment.budget = Budget()
    try:
        return "".join(_measured(template.generate(variables)))
    except SecurityError as error:
        raise BadRequest(f"the chat template was stopped: {error}", "messages") from error
    except Exception as error:  # a template may raise whatever Python's operators raise
        raise BadRequest(f"the chat template refuses these messages: {error}", "messages") from error
