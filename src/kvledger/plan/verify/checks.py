"""One record against the rules: expected, ours, difference, and whether that is within its tolerance.

Capacity is checked with the memory that the record itself reports; the budget with device, weights and utilisation
alone. Knows no file formats.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from kvledger.errors import KvledgerError
from kvledger.plan.profiles.base import Allocation, Band, Setup, get_profile
from kvledger.plan.profiles.overhead import cuda_bytes
from kvledger.plan.profiles.sglang import key_bytes
from kvledger.plan.profiles.vllm import NEWEST, VllmProfile, printed_tokens
from kvledger.plan.profiles.vllm_groups import describe, is_listed, shard_spec
from kvledger.plan.verify import infer
from kvledger.plan.verify.devices import device_of
from kvledger.plan.verify.record import ROUNDING_GIB, Record
from kvledger.plan.verify.shapes import Shape, shape_of
from kvledger.spec.device import DeviceSpec
from kvledger.spec.kv import LatentKV, StateKV
from kvledger.units import GIB, MIB

Status = Literal["ok", "explained", "off", "skipped"]
TOLERANCE = 0.01
SWAP_BYTES = 4 * GIB  # vLLM's swap_space, from which `# CPU blocks` follows
PLENTY = 1 << 44
ERAS = ("0.7", "0.11", "0.19", NEWEST)  # a version of each way to profile


@dataclass(frozen=True, slots=True)
class Check:
    """One figure. `tolerance` is relative (0: equal); `band` replaces it where the plan prints one."""

    name: str
    expected: float | str
    ours: float | str | None
    tolerance: float
    status: Status
    cause: str = ""
    band: tuple[float, float] | None = None

    @property
    def difference(self) -> float | None:
        """Ours over expected, less one; None where that means nothing."""
        if isinstance(self.expected, str) or isinstance(self.ours, str) or self.ours is None or not self.expected:
            return None
        return self.ours / self.expected - 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """All checks of one record, and where its model's shape is from."""

    record: Record
    source: str
    checks: tuple[Check, ...]
    remarks: tuple[str, ...] = ()

    @property
    def is_off(self) -> bool:
        """Whether any figure is outside its tolerance without a cause."""
        return any(c.status == "off" for c in self.checks)

    @property
    def is_outside(self) -> bool:
        """Whether any figure is outside its tolerance, explained or not."""
        return any(c.status in ("off", "explained") for c in self.checks)


def compare(name: str, expected: float, ours: float, tolerance: float, cause: str = "") -> Check:
    """A check of two numbers."""
    off = abs(ours - expected) > tolerance * abs(expected) + 1e-9
    return Check(name, expected, ours, tolerance, "off" if off else "ok", cause)


def check(record: Record) -> Verdict:
    """Everything in `record` that the rules can say something about."""
    try:
        shape = shape_of(record)
    except KvledgerError as error:
        cause = str(error) if record.model else "the log does not name the model; give --model"
        return Verdict(record, "", (Check("shape", record.model, None, 0, "skipped", cause),))
    if record.engine == "vllm" and any(isinstance(x.cache, LatentKV) and x.cache.ratio > 1 for x in shape.model.layers):
        reason = "compressed latents are not followed to the token"
        return Verdict(record, shape.source, (Check("shape", record.model, None, 0, "skipped", reason),))
    try:
        found = checks_of(record, shape)
    except KvledgerError as error:
        found = [Check("rules", record.model, None, 0, "off", str(error))]
    if any(c.status == "off" for c in found) and not record.is_exact:
        found = infer.explain(record, shape, found)
    if not found:
        found = [Check("figures", record.model, None, 0, "skipped", "no pair of figures that the rules connect")]
    return Verdict(record, shape.source, tuple(found))


def checks_of(record: Record, shape: Shape) -> list[Check]:
    """Checks of one record and shape, without looking for causes."""
    if record.is_exact:
        return exact_checks(record, shape)
    if record.engine == "llama.cpp" or ((record.engine == "sglang" and record.kv_mib) or record.key_mib):
        return size_checks(record, shape)
    return [*capacity_checks(record, shape), *swap_checks(record, shape), *budget_checks(record, shape)]


# ---------------------------------------------------------------------------------------------- rules applied


def setup_of(record: Record, shape: Shape, available: int | None) -> Setup:
    """What the engine was told, as far as the record says."""
    tp = 1 if shape.is_sharded else record.tp
    pp = 1 if shape.is_sharded else record.pp
    return Setup(
        tp=tp, pp=pp, dcp=record.dcp, kv_dtype=record.kv_dtype, block_size=record.block_size,
        max_model_len=record.max_model_len, max_num_batched_tokens=record.max_num_batched_tokens,
        max_num_seqs=record.max_num_seqs, memory_fraction=record.memory_fraction,
        draft_layers=max(record.draft_layers, shape.draft_layers),
        draft_tokens=record.draft_tokens, available_bytes=available, concurrent_batches=record.concurrent_batches,
        prefix_caching=record.prefix_caching, hybrid=record.hybrid,
        weights_bytes=None if record.weights_gib is None else int(record.weights_gib * GIB),
    )  # fmt: skip


def allocate(record: Record, shape: Shape, setup: Setup) -> Allocation:
    """The record's engine and version on the record's device."""
    device = None if record.is_exact else device_of(record.gpu)
    return get_profile(record.engine, record.version).allocate(shape.model, device, setup)


def exact_checks(record: Record, shape: Shape) -> list[Check]:
    """An allocator's own answer: everything must be equal."""
    ours = allocate(record, shape, setup_of(record, shape, record.kv_bytes))
    checks = [compare("num_blocks", record.num_blocks or 0, ours.num_blocks, 0)]
    if record.kv_tokens is not None:
        checks.append(compare("kv_tokens", record.kv_tokens, ours.kv_tokens, 0))
    if record.max_concurrency is not None:
        checks.append(compare("max_concurrency", record.max_concurrency, round(ours.max_concurrency, 4), 0))
    if record.groups:
        groups = ours.pools[0].groups
        same = len(groups) == len(record.groups) and all(map(is_listed, groups, *zip(*record.groups, strict=True)))
        found = _words(tuple(map(describe, groups)))
        checks.append(Check("groups", _words(record.groups), found, 0, "ok" if same else "off"))
    return checks


def _words(groups: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in groups)


# ---------------------------------------------------------------------------------------------- capacity


def known_bytes(record: Record, shape: Shape) -> int | None:
    """KV memory: as logged, or the blocks times their bytes, or the tokens times theirs."""
    if record.kv_bytes is not None:
        return record.kv_bytes if record.kv_bytes > 0 else None
    if record.engine != "vllm" or not (record.num_blocks or record.kv_tokens):
        return None
    trial = allocate(record, shape, setup_of(record, shape, PLENTY))
    blocks = record.num_blocks
    if blocks is None and record.kv_tokens is not None:
        if record.max_concurrency is None:
            return None
        blocks = _blocks_from_tokens(record, trial)
    return (blocks or 0) * trial.block_bytes


def _blocks_from_tokens(record: Record, trial: Allocation) -> int:
    """Blocks behind a token figure; concurrency × length and blocks ÷ groups × size differ on hybrids only."""
    tokens, pool = record.kv_tokens or 0, trial.pools[0]
    derived = round(tokens / trial.max_model_len * pool.blocks_for(trial.max_model_len))
    plain = tokens // (pool.block_size * record.dcp) * len(pool.groups)
    by_concurrency = (record.max_concurrency or 0) * pool.blocks_for(trial.max_model_len)
    return min((derived, plain), key=lambda n: abs(n - by_concurrency))


def capacity_checks(record: Record, shape: Shape) -> list[Check]:
    """Blocks, tokens and concurrency from the memory that the record reports."""
    available = known_bytes(record, shape)
    if available is None:
        return []
    setup = setup_of(record, shape, available)
    ours = allocate(record, shape, setup)
    rounding = ROUNDING_GIB * GIB / available if record.kv_bytes is not None else 0.0
    checks = []
    if record.num_blocks and record.kv_bytes is not None:
        checks.append(compare("num_blocks", record.num_blocks, ours.num_blocks, TOLERANCE + rounding))
    if record.kv_tokens:
        tokens, note = best_reading(record, ours)
        checks.append(compare("kv_tokens", record.kv_tokens, tokens, TOLERANCE + rounding, note))
    if record.max_concurrency and record.max_model_len:
        tolerance = TOLERANCE + rounding + 0.005 / record.max_concurrency
        checks.append(compare("max_concurrency", record.max_concurrency, ours.max_concurrency, tolerance))
    return checks


def best_reading(record: Record, ours: Allocation) -> tuple[int, str]:
    """Our token figure as the record's version prints it; where the version is unknown, the reading that is nearer."""
    if record.engine != "vllm" or record.version is not None:
        return ours.kv_tokens, ""
    pool, length = ours.pools[0], ours.max_model_len
    readings = {
        "read as until 0.20: blocks ÷ groups × block size":
            printed_tokens(pool, ours.max_concurrency, length, (0, 20, 0), record.dcp),
        "read as since 0.21: concurrency × length":
            printed_tokens(pool, ours.max_concurrency, length, (0, 21, 0), record.dcp),
        "read as blocks × block size, states included": pool.num_blocks * pool.block_size,
    }  # fmt: skip
    note = min(readings, key=lambda name: abs(readings[name] - (record.kv_tokens or 0)))
    return readings[note], note if len(pool.groups) > 1 else ""


def swap_checks(record: Record, shape: Shape) -> list[Check]:
    """`# CPU blocks` is 4 GiB ÷ bytes per block: the KV bytes of a token without any memory line."""
    if record.engine != "vllm" or not record.cpu_blocks:
        return []
    ours = allocate(record, shape, setup_of(record, shape, PLENTY))
    return [compare("cpu_blocks", record.cpu_blocks, SWAP_BYTES // ours.block_bytes, TOLERANCE)]


def size_checks(record: Record, shape: Shape) -> list[Check]:
    """Bytes of a cache of so many cells or tokens (llama.cpp, SGLang)."""
    if not record.kv_tokens:
        return []
    whole, keys = _pool_mib(record, shape)
    checks = []
    pairs = (("kv_mib", record.kv_mib, whole), ("key_mib", record.key_mib, keys),
             ("value_mib", record.value_mib, whole - keys))  # fmt: skip
    for name, logged, ours in pairs:
        if logged:
            rounding = (0.005 if record.engine == "llama.cpp" else 5.12) / logged  # MiB, or GiB with two decimals
            checks.append(compare(name, logged, ours, TOLERANCE + rounding))
    return [*checks, *state_checks(record, shape)]


def state_checks(record: Record, shape: Shape) -> list[Check]:
    """GiB of SGLang's pool of states: one slot more than it counts."""
    specs = [shard_spec(x.cache, record.tp) for x in shape.model.layers if isinstance(x.cache, StateKV)]
    if not record.state_slots or not record.state_gib or not specs:
        return []
    size = (record.state_slots + 1) * sum(s.state_bytes for s in specs if isinstance(s, StateKV)) / GIB
    return [compare("state_gib", record.state_gib, size, TOLERANCE + 0.01 / record.state_gib)]


def _pool_mib(record: Record, shape: Shape) -> tuple[float, float]:
    """(MiB of the whole cache, of its keys) for the record's tokens, layers of the record's part only."""
    drafts = 0 if record.engine == "llama.cpp" else record.draft_layers  # llama.cpp prints a draft context apart
    setup = replace(setup_of(record, shape, PLENTY), draft_layers=drafts, block_size=1, max_model_len=1)
    ours = get_profile("sglang").allocate(shape.model, None, setup)
    parts = [p for pool in ours.pools if pool.name != "states" for g in pool.groups for p in g.parts]
    tokens = record.kv_tokens or 0
    whole = sum(len(p.layers) * p.page_bytes for p in parts) * tokens
    keys = sum(key_bytes(p) for p in parts if not isinstance(p.spec, LatentKV)) * tokens
    return whole / MIB, keys / MIB


# ---------------------------------------------------------------------------------------------- budget


def budget_checks(record: Record, shape: Shape) -> list[Check]:
    """Available KV memory from device, weights and utilisation alone, inside the printed band."""
    device = device_of(record.gpu)
    if not _can_budget(record, shape) or device is None:
        return []
    setup = setup_of(record, shape, None)
    band = budget_band(record, shape, setup, device)
    logged, ours = record.available_gib or 0.0, band.mid / GIB
    low, high = band.low / GIB, band.high / GIB
    contradiction = contradicts(record, device)
    inside = low - ROUNDING_GIB <= logged <= high + ROUNDING_GIB
    status: Status = "ok" if inside else "explained" if contradiction else "off"
    return [Check("available_gib", logged, round(ours, 2), 0.0, status, contradiction, (round(low, 2), round(high, 2)))]


def _can_budget(record: Record, shape: Shape) -> bool:
    needed = (record.available_gib, record.weights_gib, record.memory_fraction)
    return record.engine == "vllm" and not record.is_fork and not shape.is_sharded and None not in needed


def budget_band(record: Record, shape: Shape, setup: Setup, device: DeviceSpec) -> Band:
    """KV bytes of the first stage, which the log prints. Without a version the band spans those of all eras."""
    if record.version is not None:
        return VllmProfile(record.version).budget(shape.model, device, setup)[0]
    bands = [VllmProfile(v).budget(shape.model, device, setup)[0] for v in ERAS]
    return Band(min(b.low for b in bands), bands[-1].mid, max(b.high for b in bands))


def contradicts(record: Record, device: DeviceSpec) -> str:
    """What is wrong where a record's own parts do not add up to the utilisation it states, else nothing."""
    parts = (record.weights_gib, record.activation_gib, record.available_gib)
    if any(p is None for p in parts) or record.memory_fraction is None:
        return ""
    total = cuda_bytes(device) / GIB
    known = sum(p for p in parts if p is not None) + (record.non_torch_gib or 0.0)
    share = known / total
    allowance = 0.01 if record.non_torch_gib is not None else 0.03
    if record.memory_fraction - allowance <= share <= record.memory_fraction + 0.01:
        return ""
    return (
        f"the record contradicts itself: its parts add up to {known:.2f} GiB = {share:.3f} of {total:.2f} GiB, "
        f"not to the utilisation of {record.memory_fraction} it states"
    )
