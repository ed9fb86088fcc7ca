"""Text that comes token by token: whole characters, stop strings across borders, constraints."""

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvledger.errors import BadRequest
from kvledger.text.detokenizer import Detokenizer
from kvledger.text.stop import StopChecker
from kvledger.text.structured import GrammarCompiler
from kvledger.text.tokenizer import Tokenizer


def byte_tokenizer():
    """256 bytes, a few words, and two marks that end a text."""
    names = [f"<0x{i:02X}>" for i in range(256)] + ["<unk>", "<|im_end|>", "▁the", "the", "é", "true", '":']
    types = [6] * 256 + [2, 3, 1, 1, 1, 1, 1]
    keys = {"model": "llama", "tokens": names, "token_type": types, "scores": [0.0] * len(names), "eos_token_id": 257}
    return Tokenizer.from_metadata({f"tokenizer.ggml.{k}": v for k, v in keys.items()})


TOKENIZER = byte_tokenizer()
END = 257


# ---------------------------------------------------------------------------------------------- characters


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30))
def test_pieces_join_to_the_whole(ids):
    """Any tokens at all, valid UTF-8 or not."""
    stream = Detokenizer(TOKENIZER, skip_special=False)
    parts = [stream.push(i) for i in ids] + [stream.finish()]
    whole = b"".join(TOKENIZER.token_bytes(i) for i in ids).decode("utf-8", "replace")
    assert "".join(parts) == whole


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_never_half_a_character(text):
    stream = Detokenizer(TOKENIZER)
    shown = ""
    for byte in text.encode():
        shown += stream.push(byte)
        assert text.startswith(shown), "no replacement character before the end"
    assert shown == text
    assert stream.finish() == ""


def test_replacement_only_at_the_real_end():
    stream = Detokenizer(TOKENIZER)
    assert [stream.push(byte) for byte in "🙂".encode()[:3]] == ["", "", ""]
    assert stream.finish() == "\ufffd"


def test_special_tokens_are_skipped_or_shown():
    assert Detokenizer(TOKENIZER).push(END) == ""
    assert Detokenizer(TOKENIZER, skip_special=False).push(END) == "<|im_end|>"


# ---------------------------------------------------------------------------------------------- stop strings


def feed(stops, parts, **options):
    """(text shown, stop string) of a stream of parts."""
    checker = StopChecker(stops, **options)
    shown = "".join(checker.push(part) for part in parts)
    return (shown if checker.matched else shown + checker.finish()), checker.matched


def slow(stops, text, include):
    """The rule said plainly: go on letter by letter until the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


@settings(max_examples=400)
@given(
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("ab\n", max_size=3), max_size=12),
    st.booleans(),
)
def test_any_border(stops, parts, include):
    assert feed(stops, parts, include_stop=include) == slow(stops, "".join(parts), include)


@settings(max_examples=200)
@given(
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3), st.lists(st.text("ab\n", max_size=3), max_size=12)
)
def test_holds_back_no_more_than_needed(stops, parts):
    """What is held is the beginning of a stop string; what is shown can never be taken back."""
    checker = StopChecker(stops)
    text = shown = ""
    for part in parts:
        text += part
        shown += checker.push(part)
        if checker.matched:
            break
        held = text[len(shown) :]
        assert text.startswith(shown)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_first_complete_wins_and_the_rest_is_dropped():
    assert feed(["END", "abc"], ["xa", "b", "cEND"]) == ("x", "abc")
    assert feed(["b", "ab"], ["a", "b"]) == ("", "ab")
    assert feed(["\n\n"], ["one\n", "two\n", "\nthree"]) == ("one\ntwo", "\n\n")
    assert feed(["stop"], ["sto"]) == ("sto", None)


def test_before_min_tokens_nothing_stops():
    checker = StopChecker(["a"])
    assert checker.push("banana", can_stop=False) == "banana"
    assert checker.push("xa") == "x"
    assert checker.matched == "a"
    assert checker.push("more") == ""


# ---------------------------------------------------------------------------------------------- structured output

COMPILER = GrammarCompiler(TOKENIZER)


def walk(constraint, seed, most=400):
    """Random allowed tokens until the constraint ends; the text."""
    rng, ids = random.Random(seed), []
    for _ in range(most):
        mask = constraint.mask()
        allowed = [i for i in range(TOKENIZER.vocab_size) if mask[i // 8] >> i % 8 & 1]
        token = rng.choice(allowed)
        if token == END:
            break
        constraint.accept(token)
        ids.append(token)
        if constraint.is_finished:
            break
    return b"".join(TOKENIZER.token_bytes(i) for i in ids).decode()


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(5))
def test_any_walk_obeys(seed):
    value = json.loads(walk(COMPILER.compile("json", SCHEMA), seed))
    assert isinstance(value["ok"], bool)
    assert 0 <= value["n"] <= 999
    assert re.fullmatch(r"[0-9]{3}-[a-f]{2}", walk(COMPILER.compile("regex", r"[0-9]{3}-[a-f]{2}"), seed))
    assert walk(COMPILER.compile("choice", ["yes", "no", "né\n"]), seed) in ("yes", "no", "né\n")
    assert walk(COMPILER.compile("grammar", 'start: "a" ("b" | "c")'), seed) in ("ab", "ac")


def test_the_end_is_allowed_exactly_when_it_may_come():
    constraint = COMPILER.compile("regex", "ab?")
    assert not constraint.mask()[END // 8] >> END % 8 & 1
    constraint.accept(ord("a"))
    assert constraint.mask()[END // 8] >> END % 8 & 1
    assert not constraint.is_finished
    constraint.accept(ord("b"))
    assert constraint.is_finished


def test_masks_do_not_mutate_and_forks_are_independent():
    constraint = COMPILER.compile("choice", ["ab", "ac"])
    constraint.accept(ord("a"))
    assert constraint.mask() == constraint.mask()
    fork = constraint.fork()
    fork.accept(ord("b"))
    assert fork.is_finished
    assert not constraint.is_finished
    constraint.accept(ord("c"))


def test_a_token_that_is_not_allowed():
    with pytest.raises(BadRequest, match="structured output failed"):
        COMPILER.compile("choice", ["ab"]).accept(ord("x"))


def test_requests():
    assert COMPILER.from_response_format(None) is None
    assert COMPILER.from_response_format({"type": "text"}) is None
    assert COMPILER.from_structured_outputs({}) is None
    made = COMPILER.from_response_format({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}})
    assert json.loads(walk(made, 1))
    assert walk(COMPILER.from_response_format({"type": "json_object"}), 0).startswith("{")
    assert walk(COMPILER.from_structured_outputs({"choice": ["one"]}), 0) == "one"


DOUBLING = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(40)} | {"a40": {"type": "string"}}


@pytest.mark.parametrize(
    ("kind", "value", "match"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "a" * 70_000, "70,000 characters; 65,536 are accepted"),
        ("regex", 5, "must be text, not int"),
        ("grammar", "start: foo", "the grammar cannot be used: .*unknown name"),
        ("grammar", 'root ::= "a"', "as Lark has them"),
        ("json", "{", "not JSON"),
        ("json", [1], "an object, not list"),
        ("json", {"type": "foo"}, "Invalid type: foo"),
        ("json", {"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ("json", {"$ref": "#/$defs/a0", "$defs": DOUBLING}, "expand to more than 20,000"),
        ("json", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "expand to more than"),
        ("json", {"$ref": "https://example.com/s"}, "leaves the schema"),
        ("choice", "abc", "list of non-empty texts"),
        ("choice", ["a"] * 2000, "2,000 choices; 1,024 are accepted"),
    ],
)
def test_what_cannot_be_meant_is_the_requests_fault(kind, value, match):
    with pytest.raises(BadRequest, match=match) as caught:
        COMPILER.compile(kind, value)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    "request_", [{"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}]
)
def test_malformed_response_formats(request_):
    with pytest.raises(BadRequest):
        COMPILER.from_response_format(request_)
    with pytest.raises(BadRequest, match="regex and choice"):
        COMPILER.from_structured_outputs({"regex": "a", "choice": ["b"]})
