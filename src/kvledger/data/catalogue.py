"""The bundled models: rows of facts in data/models/*.json, found by hub id, short name or alias.

A row holds the fields of the public config.json that decide memory, the published parameter count, a source and a
date. Quantised and fine-tuned variants have the shape of their base: their names are peeled back to it. Parsing a
row into a ModelSpec is `spec.from_config`'s work and happens per model, when asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any

from kvledger.errors import UnknownName
from kvledger.spec.from_config import model_from_config
from kvledger.spec.model import ModelSpec


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model. `num_params` is the published count, exact unless `is_rounded`; None where none was found."""

    id: str
    names: tuple[str, ...]  # short names
    also: tuple[str, ...]  # hub ids of the same shape
    config: Mapping[str, Any]
    num_params: int | None
    is_rounded: bool
    source: str
    date: str
    notes: str = ""


@dataclass(frozen=True, slots=True)
class Match:
    """A row, and how the name asked for says its weights are stored (None: as published)."""

    row: ModelRow
    scheme: str | None


# What may follow a base name, and the weight scheme it means (None: a fine-tune or a container of the same shape).
_SUFFIXES: tuple[tuple[str, str | None], ...] = (
    (r"(?:i1-|ud-)?(q\d(?:-\d|-k(?:-[smlx]+)?)|iq\d-[a-z]+|tq\d-\d)", ""),  # a GGUF type: the scheme is its own name
    (r"fp8-(?:dynamic|channel)", "fp8_channel"),
    (r"fp8-block", "fp8_block"),
    (r"fp8(?:-(?:static|kv|tensorwise))*", "fp8"),
    (r"nvfp4(?:a16)?|fp4", "nvfp4"),
    (r"mxfp4(?:-moe)?", "mxfp4"),
    (r"gptq-int8|gptq-8bit|int8|w8a8|w8a16|8bit|quantized\.w8a8|quantized\.w8a16", "int8"),
    (r"awq(?:-(?:int4|4bit|marlin))?", "awq"),
    (r"gptq(?:-(?:int4|4bit|marlin))?|w4a16|quantized\.w4a16", "gptq"),
    (r"(?:unsloth-)?bnb-4bit|nf4", "bnb4"),
    (r"int4|4bit", "int4"),
    (r"bf16", "bf16"), (r"fp16|f16", "fp16"), (r"fp32|f32", "fp32"),
    (r"gguf|mlx|hf|instruct|it|chat|base|pt|thinking|reasoning|unsloth|qat|preview|sft|dpo|abliterated|heretic", None),
    (r"optimized|original|full|safetensors|latest|autoround|class", None),
)  # fmt: skip
_PATTERNS = tuple((re.compile(rf"(.+?)[-.](?:{text})"), scheme) for text, scheme in _SUFFIXES)
_MAX_NAME = 200


@lru_cache(maxsize=1)
def rows() -> tuple[ModelRow, ...]:
    """All rows, in the order of their files."""
    folder = resources.files("kvledger.data") / "models"
    files = sorted((x for x in folder.iterdir() if x.name.endswith(".json")), key=lambda x: x.name)
    return tuple(_row(item) for file in files for item in json.loads(file.read_text(encoding="utf-8")))


def _row(item: Mapping[str, Any]) -> ModelRow:
    return ModelRow(
        id=item["id"], names=tuple(item.get("names", ())), also=tuple(item.get("also", ())), config=item["config"],
        num_params=item.get("params"), is_rounded=item.get("params_rounded", False), source=item["source"],
        date=item["date"], notes=item.get("notes", ""),
    )  # fmt: skip


def _fold(name: str) -> str:
    """One spelling for lower and upper case, spaces, underscores, colons and brackets."""
    return re.sub(r"[\s_()+,:]+", "-", name.strip().lower()).strip("-")


@lru_cache(maxsize=1)
def _index() -> dict[str, ModelRow]:
    """Folded name → row. Full ids win over short names, earlier rows over later ones."""
    index: dict[str, ModelRow] = {}
    for row in rows():
        for full in (row.id, *row.also):
            index.setdefault(_fold(full), row)
    for row in rows():
        for short in (*row.names, *(full.partition("/")[2] for full in (row.id, *row.also))):
            index.setdefault(_fold(short), row)
    return index


def _peel(name: str) -> Iterator[tuple[str, str | None]]:
    """The folded name, then what is left as suffixes are taken off, with the scheme seen so far."""
    scheme: str | None = None
    current: str | None = name
    while current:
        yield current, scheme
        rest: str | None = None
        for pattern, meaning in _PATTERNS:
            found = pattern.fullmatch(current)
            if found:
                own = found[2].replace("-", "_") if meaning == "" else meaning
                rest, scheme = found[1], scheme or own
                break
        current = rest


def find(name: str) -> Match:
    """The row that `name` means: id, short name or alias in any case, or a variant of one. Raises UnknownName."""
    index, asked = _index(), name[:_MAX_NAME]
    without_remark = re.split(r"[(+]", asked, maxsplit=1)[0]  # "gemma-3-4b (QAT)", "Llama-3.1-8B + EAGLE"
    for candidate, scheme in (*_peel(_fold(asked)), *_peel(_fold(without_remark))):
        short = candidate.rpartition("/")[2]
        row = index.get(candidate) or index.get(short) or index.get(short.removeprefix("meta-"))
        if row is not None:
            return Match(row, scheme)
    raise UnknownName("model", name[:_MAX_NAME], names())


def names() -> list[str]:
    """Short names where a row has one, ids otherwise: what `--help` and suggestions show."""
    return [name for row in rows() for name in (row.names or (row.id,))]


@lru_cache(maxsize=256)
def _base_model(row_id: str) -> ModelSpec:
    row = _index()[_fold(row_id)]
    return model_from_config(row.config, row.id, row.source)


def model(name: str) -> ModelSpec:
    """The model that `name` means, weights stored as the name says. Raises UnknownName."""
    match = find(name)
    base = _base_model(match.row.id)
    notes = (*base.notes, match.row.notes) if match.row.notes else base.notes
    return replace(base, dtype=match.scheme or base.dtype, notes=notes)
