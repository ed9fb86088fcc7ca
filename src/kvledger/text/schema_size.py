"""How large a JSON schema becomes once its references are followed: a bound before anything is compiled.

Forty definitions that each name the next twice in `allOf` are 2^40 schemas. llguidance bounds everything else itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from kvledger.errors import BadRequest

MAX_EXPANSION = 20_000
_INLINE = ("allOf", "anyOf", "oneOf")


def check_expansion(schema: Any) -> None:
    """Raises BadRequest if `allOf`, `anyOf`, `oneOf` and `$ref` expand to more than MAX_EXPANSION schemas."""
    count = 0
    for start in _objects(schema):
        stack = list(_inlined(start, schema))
        while stack:
            count += 1
            if count > MAX_EXPANSION:
                raise _bad(f"the JSON schema's references expand to more than {MAX_EXPANSION:,} schemas")
            stack.extend(_inlined(stack.pop(), schema))


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object in the document."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            if node is not schema and isinstance(node.get("$id"), str):
                raise _bad("a JSON schema within the schema may not have an $id of its own")
            yield node
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)


def _inlined(node: Any, root: Any) -> Iterator[Any]:
    """Schemas that become part of `node`."""
    if not isinstance(node, dict):
        return
    for key in _INLINE:
        if isinstance(members := node.get(key), list):
            yield from members
    if isinstance(reference := node.get("$ref"), str):
        yield _resolve(reference, root)


def _resolve(reference: str, root: Any) -> Any:
    """The part of the document that `#/…` points to (RFC 6901); None where there is nothing."""
    if not (reference == "#" or reference.startswith("#/")):
        raise _bad(f"the reference {reference!r} leaves the schema; references within it begin with #/")
    node = root
    for step in reference[2:].split("/") if len(reference) > 1 else []:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(step)
        elif isinstance(node, list) and step.isdigit() and int(step) < len(node):
            node = node[int(step)]
        else:
            return None
    return node


def _bad(message: str) -> BadRequest:
    return BadRequest(message, "response_format")
