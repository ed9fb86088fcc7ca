"""What vLLM takes of a GPU beside weights and KV: activation of the profiling pass, non-torch memory, CUDA graphs.

The shapes of the terms follow from what the profiling pass does (a forward over `max_num_batched_tokens`, then a
sampler over `max_num_seqs` rows of logits); their constants are fitted to published start-up logs by
scripts/fit_overheads.py and listed with their errors in docs/accuracy.md. Knows no KV layout.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvledger.plan.profiles.base import Band, Setup, Term
from kvledger.spec.device import DeviceSpec
from kvledger.spec.kv import LatentKV
from kvledger.spec.model import ModelSpec
from kvledger.units import GIB

Version = tuple[int, int, int]
FITTED_DEVICES = ("h100",)  # most records are of these
LARGE_DEVICE_BYTES = 70 * GIB  # from here on vLLM chooses larger batches (engine/arg_utils, 0.32)


@dataclass(frozen=True, slots=True)
class Constants:
    """Fitted constants; bytes unless the name says otherwise. Eras: V0 (< 0.8), V1 up to 0.16, V1 since 0.17."""

    logit_bytes_old: float = 38.2  # per logit in the sampler, V1 up to 0.16
    logit_bytes: float = 14.7  # since 0.17
    hidden_factor: float = 1.35  # hidden states alive beside the sampler, × tokens × hidden × 2 B
    vision: float = 0.19 * GIB  # buffers of a vision tower left over
    non_torch_one: float = 0.25 * GIB  # TP 1 since 0.17: context, cuBLAS workspaces
    non_torch_old: float = 0.14 * GIB  # TP 1 in V1 up to 0.16
    non_torch_v0: float = 0.35 * GIB  # TP 1 in V0
    non_torch_many: float = 2.07 * GIB  # TP 2 on large NVLink devices since 0.19: NCCL, symmetric memory
    non_torch_many_old: float = 0.55 * GIB  # TP 2 otherwise
    non_torch_rank: float = 0.04 * GIB  # each rank beyond the second
    graph_base: float = 0.42 * GIB  # graphs as captured by 0.19; mixtures of experts take up to twice as much
    graph_layer: float = 0.0154 * GIB  # per layer of the stage


FITTED = Constants()

# What CUDA offers of what the driver reports (torch.cuda.mem_get_info against nvidia-smi), read from logs.
_CUDA_TOTAL = {
    "h100-sxm": 79.19, "h100-pcie": 79.19, "a100-80gb-sxm": 79.25, "a100-80gb-pcie": 79.25, "rtx-3090": 23.58,
    "rtx-4090": 23.52, "t4": 14.74, "l4": 22.17, "h200-sxm": 139.81, "rtx-pro-6000": 94.97,
}  # fmt: skip
_CUDA_SHARE = 0.994  # where no log was seen


def cuda_bytes(device: DeviceSpec) -> int:
    """Memory that an engine's allocator sees: on a GPU a little less than the driver reports, unless measured so."""
    if device.kind != "gpu" or device.measured:
        return device.memory_bytes
    known = _CUDA_TOTAL.get(device.name)
    return int(known * GIB) if known else int(device.memory_bytes * _CUDA_SHARE)


@dataclass(frozen=True, slots=True)
class Batch:
    """The largest step: sequences and new tokens."""

    num_seqs: int
    num_tokens: int


def default_batch(device: DeviceSpec | None, version: Version, setup: Setup, max_model_len: int) -> Batch:
    """What `vllm serve` chooses where the user says nothing."""
    large = device is not None and device.memory_bytes >= LARGE_DEVICE_BYTES and not device.name.startswith("a100")
    huge = device is not None and device.memory_bytes >= 160 * GIB and version >= (0, 15, 0)
    if version < (0, 8, 0):  # V0 profiled the longest prompt in one piece; above 32K it chunked
        seqs, tokens = 256, max_model_len if max_model_len <= 32768 else 2048
    else:
        seqs, tokens = (1024, 16384 if huge else 8192) if large else (256, 2048)
    return Batch(setup.max_num_seqs or seqs, setup.max_num_batched_tokens or tokens)


def vllm_terms(
    model: ModelSpec,
    device: DeviceSpec,
    setup: Setup,
    version: Version,
    batch: Batch,
    has_head: bool = True,
    c: Constants = FITTED,
) -> tuple[Term, ...]:
    """Activation, non-torch memory and (since 0.21) the estimate of CUDA graphs, per device."""
    terms = (
        activation_term(model, setup, version, batch, has_head, c),
        non_torch_term(device, setup, version, c),
        graph_term(model, setup, version, c),
        *unstated_terms(device, version),
    )
    return terms if device.name.startswith(FITTED_DEVICES) else tuple(map(_wider, terms))


def _wider(term: Term) -> Term:
    """A term on a device of which there are few records or none: the band is half as wide again."""
    low, mid, high = term.size.low, term.size.mid, term.size.high
    size = Band(max(0, mid - 3 * (mid - low) // 2), mid, mid + 3 * (high - mid) // 2)
    return Term(term.name, size, term.basis, f"{term.note}; fitted on another device")


# ---------------------------------------------------------------------------------------------- activation


def activation_term(
    model: ModelSpec, setup: Setup, version: Version, batch: Batch, has_head: bool = True, c: Constants = FITTED
) -> Term:
    """Peak of the profiling pass: the widest layer or the sampler, whichever is larger, and workspaces.

    `has_head` is false on pipeline stages before the last, which never sample.
    """
    width = 4 if model.activation_dtype == "fp32" else 2
    forward = forward_bytes(model, setup.tp, batch.num_tokens, width)
    sampler = sampler_bytes(model, batch, version, width, c) if has_head else 0.0
    spaces = moe_workspace(model, setup.tp, batch.num_tokens) + sparse_workspace(model, setup.max_model_len)
    spaces += c.vision if has_vision(model) else 0
    peak = int(max(forward, sampler) + spaces)
    bound = "the sampler's logits" if sampler >= forward else "the widest layer"
    slack = int(0.08 * peak + 0.15 * GIB)
    note = f"bound by {bound}: {batch.num_seqs} sequences × {model.vocab_size} logits, {batch.num_tokens} tokens"
    return Term("activation", Band(max(0, peak - slack), peak, peak + slack), "fitted", note)


def forward_bytes(model: ModelSpec, tp: int, num_tokens: int, width: int = 2) -> float:
    """Tensors alive in the widest MLP: gate, up, their product (3 × intermediate) and three hidden states."""
    return num_tokens * width * (3 * intermediate_size(model) / tp + 3 * model.hidden_size)


def sampler_bytes(model: ModelSpec, batch: Batch, version: Version, width: int, c: Constants = FITTED) -> float:
    """Logits in several copies (as computed, fp32, sorted, indices), gathered over TP, and hidden states beside."""
    if version < (0, 8, 0):
        return 0.0  # V0's profiling pass sampled from the last rows only
    per_logit = c.logit_bytes if version >= (0, 17, 0) else c.logit_bytes_old
    per_logit += 2.0 if width == 4 else 0.0
    rows = min(batch.num_seqs, batch.num_tokens)
    return rows * model.vocab_size * per_logit + c.hidden_factor * batch.num_tokens * model.hidden_size * width


def intermediate_size(model: ModelSpec) -> int:
    """Widest dense or shared MLP of any layer, from the shapes of its weights; 0 where there is none."""
    parts = ("mlp", "shared_experts")
    return max((w.rows for x in model.layers for w in x.weights if w.part in parts and w.split == "rows"), default=0)


def expert_size(model: ModelSpec) -> int:
    """Intermediate size of one routed expert; 0 for dense models."""
    return max((x.expert_params // (3 * model.hidden_size) for x in model.layers if x.num_experts), default=0)


def moe_workspace(model: ModelSpec, tp: int, num_tokens: int) -> float:
    """Buffers of the fused expert kernel: every token once per chosen expert. fp4 kernels work in place."""
    chosen = max((x.experts_per_token for x in model.layers if x.num_experts), default=0)
    if not chosen or model.dtype in ("mxfp4", "nvfp4"):
        return 0.0
    expert = expert_size(model) / tp
    return num_tokens * chosen * 2 * (max(2 * expert, model.hidden_size) + expert)


def sparse_workspace(model: ModelSpec, max_model_len: int | None) -> float:
    """Sparse MLA keeps room for 5 contexts of bf16 latents and 40 of indexer keys (flashmla_sparse, indexer; 0.32)."""
    specs = [x.cache for x in model.layers if isinstance(x.cache, LatentKV) and x.cache.index_bytes]
    if not specs:
        return 0.0
    row = 2 * (specs[0].latent_dim + specs[0].rope_dim)
    return (max_model_len or model.max_context) * (5 * row + 40 * specs[0].index_bytes)


def has_vision(model: ModelSpec) -> bool:
    """Whether a vision tower is loaded beside the text model."""
    return any(w.part == "vision" for w in model.outer_weights)


# ---------------------------------------------------------------------------------------------- the rest


def non_torch_term(device: DeviceSpec, setup: Setup, version: Version, c: Constants = FITTED) -> Term:
    """CUDA context, library workspaces and communication buffers."""
    if setup.tp == 1:
        eras = ((0, 8, 0), c.non_torch_v0), ((0, 17, 0), c.non_torch_old)
        mid = next((size for end, size in eras if version < end), c.non_torch_one)
        return _around("non_torch", mid, mid, "context and library workspaces")
    more = c.non_torch_rank * (setup.tp - 2)
    few, many = c.non_torch_many_old + more, c.non_torch_many + more
    note = f"with communication buffers of {setup.tp} ranks"
    if device.memory_bytes < LARGE_DEVICE_BYTES or version < (0, 12, 0):
        return _around("non_torch", few, few, note)
    if version >= (0, 19, 0):
        return _around("non_torch", many, many, note)
    # between 0.11 (0.55 GiB) and 0.19 (2.07 GiB) no record says when they grew
    return _around("non_torch", few, many, f"{note}; they grew in some release from 0.12 to 0.19")


def unstated_terms(device: DeviceSpec, version: Version) -> tuple[Term, ...]:
    """Memory that records of 0.11 lack without saying why: six of seven hold 0.05 of the device less than stated."""
    if version[:2] != (0, 11):
        return ()
    size = Band(0, 0, int(0.05 * cuda_bytes(device)))
    note = "six of seven published records of 0.11 add up to a utilisation 0.05 below the one they state"
    return (Term("unstated", size, "fitted", note),)


def _around(name: str, low: float, high: float, note: str) -> Term:
    """From `low` to `high`, and a little more either way."""
    slack_low, slack_high = (0.1 * GIB + 0.15 * x for x in (low, high))
    size = Band(int(max(0, low - slack_low)), int((low + high) / 2), int(high + slack_high))
    return Term(name, size, "fitted", note)


def graph_term(model: ModelSpec, setup: Setup, version: Version, c: Constants = FITTED) -> Term:
    """CUDA graphs. Since 0.21 an estimate is taken off the budget; before, they came on top of it."""
    mid = int(c.graph_base + c.graph_layer * model.num_layers / setup.pp)
    if version < (0, 21, 0):
        size = f"about {mid / GIB:.1f} GiB"
        return Term("cuda_graphs", Band.exactly(0), "computed", f"{size} are captured after the pool, outside it")
    return Term("cuda_graphs", Band(mid // 2, mid, 2 * mid), "fitted", "estimated by the engine before the pool")
