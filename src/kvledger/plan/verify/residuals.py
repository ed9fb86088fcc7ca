"""Where the bytes of a token go: from the plain formula to what an engine's pool really spends, factor by factor.

The factors multiply to the bytes per token that the log's own figures imply, so nothing stays unnamed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvledger.plan.profiles.base import Allocation, BlockGroup, Pool
from kvledger.plan.verify.record import Record
from kvledger.spec.kv import KVStorage, KVType, LatentKV


@dataclass(frozen=True, slots=True)
class Residual:
    """One named factor; `words` say what causes it."""

    name: str
    factor: float
    words: str


@dataclass(frozen=True, slots=True)
class Account:
    """Bytes per token of the formula, the factors, and what the log implies (None: no pair of figures)."""

    plain_bytes: float
    factors: tuple[Residual, ...]
    implied_bytes: float | None

    @property
    def stored_bytes(self) -> float:
        """The formula with scales, before grouping and rounding."""
        return self.plain_bytes * next((r.factor for r in self.factors if r.name == "scales"), 1.0)

    @property
    def ours_bytes(self) -> float:
        """The formula times all factors."""
        total = self.plain_bytes
        for residual in self.factors:
            total *= residual.factor
        return total


def account(record: Record, ours: Allocation) -> Account | None:
    """The account of the first pool; None where nothing is kept per token."""
    pool = ours.pools[0]
    layers = [p for g in pool.groups if g.kind != "state" for p in g.parts]
    plain = sum(len(p.layers) * p.spec.tile_bytes(1, p.storage) for p in layers)
    if not plain:
        return None
    nominal = sum(len(p.layers) * _nominal(p.spec.tile_bytes(1, p.storage), p.storage) for p in layers)
    tokens, memory = record.kv_tokens, record.kv_bytes
    implied = memory / tokens if tokens and memory and memory > 0 else None
    factors = [*_storage_factors(pool, plain, nominal), *_pool_factors(record, ours, plain)]
    return Account(nominal, tuple(factors), implied)


def _nominal(num_bytes: int, storage: KVStorage) -> float:
    """Bytes without scales: the bits alone."""
    return num_bytes * _bits(storage) / max(1e-9, _stored_bits(storage))


def _bits(storage: KVStorage) -> float:
    return (storage.key.bits + storage.value.bits) / 2


def _stored_bits(storage: KVStorage) -> float:
    return (_with_scales(storage.key) + _with_scales(storage.value)) / 2


def _with_scales(kind: KVType) -> float:
    """Bits per element with scales, over a row of 128 elements (a head) or of a packed latent."""
    if kind.row_bytes:
        return kind.row_bytes * 8 / 576
    return kind.tile_bytes(max(1, kind.group), 128) * 8 / (128 * max(1, kind.group))


def _storage_factors(pool: Pool, plain: int, nominal: float) -> Iterator[Residual]:
    storage = next(p.storage for g in pool.groups if g.kind != "state" for p in g.parts)
    if abs(plain / nominal - 1) > 1e-6:
        yield Residual("scales", plain / nominal, f"{storage.name} keeps scales beside {_bits(storage):g}-bit numbers")


def _pool_factors(record: Record, ours: Allocation, plain: int) -> Iterator[Residual]:
    """Grouping, pages and rounding; last the meaning of the token figure."""
    pool, length = ours.pools[0], ours.max_model_len
    groups = [g for g in pool.groups if g.kind != "state"]
    largest = max(g.num_layers for g in pool.groups)
    kept = sum(g.num_layers for g in groups)
    if len(groups) * largest > kept:
        empty = len(groups) * largest - kept
        words = f"{empty} of {len(groups) * largest} slots are empty: {len(groups)} groups of {largest}"
        yield Residual("padding", len(groups) * largest / kept, words)
    per_slot = sum(largest * _page(g) / g.block_size for g in groups)
    filled = sum(largest * p.spec.tile_bytes(1, p.storage) for g in groups for p in g.parts) if groups else 0
    if filled and len(pool.groups) > 1 and abs(per_slot / filled - 1) > 1e-6:
        yield Residual("page size", per_slot / filled, "pages are padded to the largest of any group")
    base = pool.block_bytes * len(groups) / groups[0].block_size if len(groups) == 1 else per_slot
    printed = ours.kv_tokens or 1
    final = pool.num_blocks * pool.block_bytes / printed
    derived = record.engine == "vllm" and len(pool.groups) > 1 and not _is_plain_figure(record, ours)
    if derived and abs(final / base - 1) > 1e-4:
        yield _figure_factor(pool, length, final / base)
    elif len(pool.groups) > len(groups):
        words = f"blocks ÷ {len(pool.groups)} groups × block size: groups of states count like the others"
        yield Residual("derived token figure", final / base, words)
    elif abs(final / base - 1) > 1e-4:
        yield Residual("whole blocks", final / base, "blocks are handed out whole, and the remainder holds none")


def _is_plain_figure(record: Record, ours: Allocation) -> bool:
    """Whether the token figure is blocks ÷ groups × block size, as until 0.20."""
    pool = ours.pools[0]
    return ours.kv_tokens == pool.num_blocks // len(pool.groups) * pool.block_size * record.dcp


def _page(group: BlockGroup) -> int:
    return group.page_bytes or max(p.page_bytes for p in group.parts)


def _figure_factor(pool: Pool, length: int, factor: float) -> Residual:
    """On hybrids the token figure is derived: what a request of the full length holds decides it."""
    held = [(g.kind, g.blocks_for(length, pool.in_flight)) for g in pool.groups]
    parts = ", ".join(f"{sum(n for k, n in held if k == kind)} {kind}" for kind in dict.fromkeys(k for k, _ in held))
    name = "state pages" if any(k == "state" for k, _ in held) else "derived token figure"
    words = f"a request of {length:,} tokens holds {sum(n for _, n in held)} blocks ({parts}); tokens follow from that"
    return Residual(name, factor, words)


def remarks(record: Record, ours: Allocation, least_gib: float | None = None) -> list[str]:
    """Causes that are no factor of a token: draft layers, the indexer, ranks that differ."""
    found = []
    if record.draft_layers:
        found.append(f"draft layer: {record.draft_layers} layer of its own KV beside the model's")
    parts = [p for pool in ours.pools for g in pool.groups for p in g.parts]
    index = [p.spec.index_bytes for p in parts if isinstance(p.spec, LatentKV) and p.spec.index_bytes]
    if index:
        found.append(f"indexer: {index[0]} B per token and layer are keys of the sparse-attention indexer")
    if least_gib is not None and record.available_gib is not None and least_gib < record.available_gib - 0.005:
        found.append(
            f"rank minimum: ranks report {record.available_gib:.2f} to {least_gib:.2f} GiB; blocks follow the least"
        )
    return [*found, *ours.reasons]
