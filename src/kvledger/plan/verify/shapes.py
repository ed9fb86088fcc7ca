"""The model behind a record: from the catalogue, or from the plain formula that a case row carries.

A formula gives one rank's heads, so its model counts as already sharded. Knows no engines.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

from kvledger.data import catalogue
from kvledger.errors import ConfigError, UnknownName
from kvledger.plan.verify.record import Record
from kvledger.spec.kv import CacheSpec, FullKV, LatentKV
from kvledger.spec.model import Layer, ModelSpec

_HEADS = re.compile(
    r"(\d{1,4})L .{0,30}?x (\d{1,3}) (?:kv|heads)[^x]{0,20}x \((\d{1,4})(?: K)? ?\+ ?(\d{1,4})(?: V)?\)"
)
_LATENT = re.compile(r"(\d{1,4})L x (\d{2,4}) x ([\d.]+) B")
_SPARSE = re.compile(r"(\d{1,4})L .{0,20}?x \(656[^+]*\+\s*132")


@dataclass(frozen=True, slots=True)
class Shape:
    """A model, where it is from, and whether its heads are already one rank's."""

    model: ModelSpec
    source: str
    is_sharded: bool = False
    draft_layers: int = 0  # layers that the record counts beyond the model's


def shape_of(record: Record) -> Shape:
    """The model of `record`. Raises UnknownName when neither name nor formula tells."""
    try:
        found = named(record.model)
        if _is_expanded(found, record):
            return from_formula(record.formula) or Shape(found, f"catalogue: {found.name}")
        found = as_listed(found, record)
        model = _part(found, record.part or part_of(found, record))
        return Shape(model, f"catalogue: {found.name}", draft_layers=_beyond(found, record))
    except UnknownName:
        shape = from_formula(record.formula)
        if shape is None:
            raise
        return shape


def named(name: str) -> ModelSpec:
    """The catalogue's model; GGUF headers write `Openai_Gpt Oss 20b`, the maker before an underscore."""
    try:
        return catalogue.model(name)
    except UnknownName:
        maker, _, rest = name.partition("_")
        if not rest or " " in maker:
            raise
        return catalogue.model(rest)


def as_listed(model: ModelSpec, record: Record) -> ModelSpec:
    """Without the indexer's keys where a row lists only the latents among its groups."""
    listed = sum(count for _, count in record.groups)
    latent = [x.cache for x in model.layers if isinstance(x.cache, LatentKV)]
    if not any(s.index_bytes for s in latent) or listed != len(latent):
        return model
    return without_indexer(model)


def without_indexer(model: ModelSpec) -> ModelSpec:
    """The same latents without the keys of a sparse-attention indexer."""
    bare = (replace(x, cache=replace(x.cache, index_bytes=0)) if isinstance(x.cache, LatentKV) else x
            for x in model.layers)  # fmt: skip
    return replace(model, layers=tuple(bare))


def _is_expanded(model: ModelSpec, record: Record) -> bool:
    """Whether the record counts heads of an MLA model, as engines without MLA kernels keep them."""
    latent = any(isinstance(x.cache, LatentKV) for x in model.layers)
    return latent and re.match(r"\d{1,4}L x \d{1,3} heads x ", record.formula) is not None


def _beyond(model: ModelSpec, record: Record) -> int:
    """Draft layers that the record's formula counts: one or two more layers than the model keeps KV in."""
    counted = re.match(r"(\d{1,4})L ", record.formula)
    kept = sum(x.cache is not None and x.cache.kind != "state" for x in model.layers)
    more = int(counted[1]) - kept if counted and record.engine == "vllm" else 0
    return more if more in (1, 2) else 0


def part_of(model: ModelSpec, record: Record) -> str:
    """The kind of layers that a figure of SGLang or llama.cpp is about, from its formula's layer count."""
    counted = re.match(r"(\d{1,4})L ", record.formula)
    if counted is None or record.engine == "vllm":
        return ""
    kinds = Counter(x.cache.kind for x in model.layers if x.cache is not None and x.cache.kind != "state")
    matching = [k for k, n in kinds.items() if n == int(counted[1])]
    return matching[0] if len(kinds) > 1 and len(matching) == 1 else ""


def _part(model: ModelSpec, part: str) -> ModelSpec:
    """Only the layers of kind `part`; the model itself where that is empty."""
    if not part:
        return model
    kept = tuple(x for x in model.layers if x.cache is not None and (x.cache.kind == part))
    if not kept:
        raise ConfigError(f"{model.name} has no {part} layers")
    return replace(model, layers=kept)


def from_formula(text: str) -> Shape | None:
    """`80L x 4 kv-heads/GPU x (128+128) x 2 B` and its like → a model of equal layers; None for anything else."""
    found = _SPARSE.match(text)
    if found:
        return _uniform(LatentKV(512, 64, 132), int(found[1]), text)
    found = _HEADS.match(text)
    if found:
        return _uniform(FullKV(int(found[2]), int(found[3]), int(found[4])), int(found[1]), text)
    found = _LATENT.match(text)
    if found and int(found[2]) > 64:
        return _uniform(LatentKV(int(found[2]) - 64, 64), int(found[1]), text)
    return None


def _uniform(spec: CacheSpec, num_layers: int, text: str) -> Shape | None:
    if not 0 < num_layers <= 1000:
        return None
    layers = (Layer(spec, 0),) * num_layers
    model = ModelSpec("unnamed", "unknown", 0, 0, 1 << 20, layers, 1, 0, 0, source="the record's formula")
    return Shape(model, f"the record's formula: {text}", is_sharded=True)
