"""What this package's kernels take for a KV cache: which types, and for each which blocks and heads.

A `KVLayout` counts under any type; other engines' rules are in their profiles. Asked before weights are read, by the
plan for this engine, by the configuration and by the program alike. `kernels.kv_pages` has a kind for each type.
"""

from __future__ import annotations

from kvledger.errors import ConfigError, UnknownName, UnsupportedModel
from kvledger.spec.kv import FullKV, KVLayout, LatentKV
from kvledger.spec.kv_types import KVStorage, KVType

COMPUTED = ("bf16", "int8", "fp8", "int4", "fp32")
OF_LATENTS = ("bf16", "int8", "fp8", "fp32")


def computed_storage(name: str) -> KVStorage:
    """The storage that a name means. Raises UnknownName, or ConfigError for a type that no kernel computes."""
    try:
        storage = KVStorage.of(name)
    except UnknownName:
        raise UnknownName("KV type", name, COMPUTED) from None
    if storage not in map(KVStorage.of, COMPUTED):
        raise ConfigError(f"keys and values in {storage.name} are not computed here; {', '.join(COMPUTED)} are")
    return storage


def offered_name(storage: KVStorage) -> str:
    """The name under which a computed type is offered, where it has several: `fp8`, not `fp8_e4m3`."""
    return next((name for name in COMPUTED if KVStorage.of(name) == storage), storage.name)


def check_block_size(storage: KVStorage, block_size: int) -> None:
    """Raises ConfigError for a block that splits the tokens that share a scale."""
    _check_groups(storage, storage.span, "tokens per block", block_size)


def kind_of(layout: KVLayout) -> str:
    """The layout's type as the kernels call it.

    Raises UnsupportedModel for a type that they do not compute, ConfigError for blocks or heads that split a group.
    """
    storage, latent = layout.storage, any(isinstance(g.spec, LatentKV) for g in layout.groups)
    known = OF_LATENTS if latent else COMPUTED
    if storage not in map(KVStorage.of, known):
        kept = "MLA's latents" if latent else "keys and values"
        raise UnsupportedModel(f"{kept} in {storage.name} are not computed here; {', '.join(known)} are")
    check_block_size(storage, layout.block_size)
    for spec in (g.spec for g in layout.groups if isinstance(g.spec, FullKV)):
        for kind, channels in ((storage.key, spec.key_dim), (storage.value, spec.value_dim)):
            _check_groups(storage, _channels_together(kind), "channels per head", channels)
    return storage.name


def _channels_together(kind: KVType) -> int:
    return kind.group if kind.axis == "row" and kind.group else 1


def _check_groups(storage: KVStorage, group: int, what: str, number: int) -> None:
    if number % group:
        nearest = max(1, round(number / group)) * group
        raise ConfigError(f"{storage.name} KV needs a multiple of {group} {what}, got {number}; nearest: {nearest}")
