"""Structured output: which tokens may come next under a JSON schema, a regular expression, a choice or a grammar.

The parsing is llguidance's; here are the limits, the errors and the `spec.sampling.Constraint` around it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvledger.errors import BadRequest
from kvledger.text.schema_size import check_expansion
from kvledger.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_SOURCE_CHARS = 64 * 1024
MAX_CHOICES = 1024
# Parsing stops by itself: fuel is counted in regex and parser operations, 50,000 or so per millisecond.
_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
# A small model that may write any white space writes nothing else: at most one line break with its indent.
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_pattern": r"(\n {0,32}| )?"}
_KINDS = ("json", "json_object", "regex", "choice", "grammar")


class GrammarConstraint:
    """Follows one sequence; a `Constraint` of spec/sampling."""

    def __init__(self, matcher: LLMatcher, num_mask_bytes: int) -> None:
        self._matcher = matcher
        self._num_mask_bytes = num_mask_bytes

    def mask(self) -> bytes | None:
        """Bit i of byte i // 8 says whether token i may come next. Raises BadRequest if the parser gave up."""
        bits = self._matcher.compute_bitmask()
        self._check()
        return bits[: self._num_mask_bytes]

    def accept(self, token_id: int) -> None:
        """The sequence has grown by `token_id`. Raises BadRequest if the grammar does not allow it."""
        self._matcher.consume_token(token_id)
        self._check()

    @property
    def is_finished(self) -> bool:
        return bool(self._matcher.is_stopped())

    def fork(self) -> GrammarConstraint:
        return GrammarConstraint(self._matcher.deep_copy(), self._num_mask_bytes)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise BadRequest(f"structured output failed: {_first_line(self._matcher.get_error())}", "response_format")


class GrammarCompiler:
    """Makes constraints for one tokenizer. Safe to share between threads: its prefix tree is built once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _prefix_tree(self) -> LLTokenizer:
        ends = list(self._tokenizer.eos_token_ids)
        if not ends:
            raise BadRequest("structured output needs an end-of-text token; this model names none", "response_format")
        return LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer)),
            n_vocab=self._tokenizer.vocab_size,
            eos_token=ends,
        )

    def from_response_format(self, response_format: Mapping[str, Any] | None) -> GrammarConstraint | None:
        """OpenAI's field: `{"type": "text" | "json_object" | "json_schema", "json_schema": {"schema": …}}`.

        None where any text will do. Raises BadRequest naming the field.
        """
        kind = (response_format or {}).get("type", "text")
        if response_format is None or kind == "text":
            return None
        if kind == "json_object":
            return self.compile("json_object", True)
        if kind != "json_schema":
            raise _bad(f"response_format type {kind!r} is unknown; known: text, json_object, json_schema")
        described = response_format.get("json_schema")
        schema = described.get("schema") if isinstance(described, Mapping) else None
        if schema is None:
            raise _bad("response_format of type json_schema needs json_schema.schema")
        return self.compile("json", schema)

    def from_structured_outputs(self, structured: Mapping[str, Any] | None) -> GrammarConstraint | None:
        """vLLM's field: one of json, json_object, regex, choice, grammar. Raises BadRequest."""
        asked = {kind: (structured or {}).get(kind) for kind in _KINDS}
        given = {kind: value for kind, value in asked.items() if value not in (None, False, "", [])}
        if len(given) > 1:
            raise BadRequest(f"structured_outputs has {' and '.join(given)}; one is allowed", "structured_outputs")
        for kind, value in given.items():
            return self.compile(kind, value)
        return None

    def compile(self, kind: str, value: object) -> GrammarConstraint:
        """`kind` is json (a schema), json_object, regex, choice or grammar (Lark). Raises BadRequest."""
        matcher = LLMatcher(self._prefix_tree, _grammar(kind, value), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise _bad(f"the {kind} cannot be used: {_first_line(matcher.get_error())}{_hint(kind, value)}")
        return GrammarConstraint(matcher, (self._tokenizer.vocab_size + 7) // 8)


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokens = list(tokenizer.pieces)
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._tokenizer = tokenizer

    def __call__(self, data: bytes | str) -> list[int]:
        """Tokens of a text that continues another, so without the space that may be put in front of a whole one."""
        text = data.decode("utf-8", "replace") if isinstance(data, bytes) else data
        if not self._tokenizer.adds_space:
            return self._tokenizer.encode(text, parse_special=False)
        ids = self._tokenizer.encode("\x02" + text, parse_special=False)  # \x02 merges with nothing
        start = next((i + 1 for i, token in enumerate(ids) if self.tokens[token] == b"\x02"), 0)
        return ids[start:]


def _grammar(kind: str, value: object) -> str:
    """The grammar in llguidance's own form. Raises BadRequest."""
    if kind == "json_object":
        return str(LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON_OPTIONS))
    if kind == "json":
        return _schema_grammar(value)
    if kind == "choice":
        return str(LLMatcher.grammar_from_lark("start: " + " | ".join(map(_literal, _choices(value)))))
    if not isinstance(value, str):
        raise _bad(f"the {kind} must be text, not {type(value).__name__}")
    _check_length(kind, value)
    return str(LLMatcher.grammar_from_regex(value) if kind == "regex" else LLMatcher.grammar_from_lark(value))


def _hint(kind: str, value: object) -> str:
    """What to write instead of the notation that other engines take."""
    gbnf = kind == "grammar" and "::=" in str(value)
    return '; grammars are written as Lark has them, `start: "a" | "b"`, not with ::=' if gbnf else ""


def _schema_grammar(schema: object) -> str:
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        _check_length("JSON schema", text)
        parsed = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise _bad(f"the JSON schema is not JSON: {error}") from error
    if not isinstance(parsed, dict | bool):
        raise _bad(f"a JSON schema is an object, not {type(parsed).__name__}")
    check_expansion(parsed)
    try:
        return str(LLMatcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS))
    except ValueError as error:
        raise _bad(f"the JSON schema cannot be used: {_first_line(str(error))}") from error


def _choices(value: object) -> list[str]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(x, str) and x for x in value):
        raise _bad("a choice is a list of non-empty texts")
    if len(value) > MAX_CHOICES:
        raise _bad(f"{len(value):,} choices; {MAX_CHOICES:,} are accepted")
    _check_length("choice", "".join(value))
    return list(value)


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _check_length(what: str, text: str) -> None:
    if len(text) > MAX_SOURCE_CHARS:
        raise _bad(f"the {what} has {len(text):,} characters; {MAX_SOURCE_CHARS:,} are accepted")


def _bad(message: str) -> BadRequest:
    return BadRequest(message, "response_format")


def _first_line(message: str) -> str:
    """llguidance explains over several lines; the last that says `error` tells most, else the first."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("error:")]
    return (telling or lines or ["unknown error"])[0]
