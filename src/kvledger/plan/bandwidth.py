"""Ledger 4, bandwidth: what one decode step must move, the floor that sets, and when arithmetic takes over.

First with weights alone, as the roofline is usually told, then with KV and touched experts, as `plan.roofline`
prices the steps of the simulator. Floors: no step is faster; engines are slower.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvledger.errors import ConfigError
from kvledger.plan.explain import Basis, Figure, Input, derive, given
from kvledger.plan.ledger import Cell, Ledger, Table
from kvledger.plan.roofline import StepCost
from kvledger.plan.timing import Timing
from kvledger.spec.device import DeviceSpec

BATCHES = (1, 8, 32, 64, 128, 256, 295)
_ROOFLINE = "roofline: Williams, Waterman, Patterson, CACM 52(4), 2009"


def device_inputs(device: DeviceSpec, kind: str) -> tuple[Input, Input]:
    """(bandwidth, peak) of one device as inputs with their source and basis."""
    where = f"{device.name}: {device.source}"

    def basis(field: str) -> Basis:
        return "measured" if device.measured else "assumed" if field in device.assumed else "given"

    return (
        Input("BW", device.bandwidth_bytes_per_s, "B/s", where, basis("bandwidth_bytes_per_s")),
        Input("P", device.peak_flops[kind], "FLOP/s", f"{where}; dense {kind}", basis("peak_flops")),
    )


def weights_only(params: float, weights_bytes: float, device: DeviceSpec, kind: str = "bf16", tp: int = 1) -> Ledger:
    """The step floor with weights alone: `params` multiplied per token, `weights_bytes` read per device.

    Raises ConfigError where the device states no peak for `kind`.
    """
    if kind not in device.peak_flops:
        raise ConfigError(f"{device.name} states no peak for {kind}; it has {', '.join(device.peak_flops)}")
    bandwidth, peak = device_inputs(device, kind)
    weights = Input("W", weights_bytes, "B", "weights of one device, read once a step")
    n, ranks = Input("N", params, "weights", "weights multiplied per token"), Input("tp", tp, "devices")
    floor = derive(
        "step_floor_s", "s", "W ÷ BW", weights, bandwidth, source=_ROOFLINE, label="step floor, weights alone"
    )
    rate = derive("tokens_per_s_single", "tokens/s", "1 ÷ t", floor.as_input("t"), label="single request, at most")
    flops = derive("step_flops", "FLOP", "2 × N", n, source="a multiplication and an addition per weight")
    moved = derive("step_bytes", "B", "W × tp", weights, ranks, label="bytes moved over all devices")
    intensity = derive(
        "intensity", "FLOP/B", "F ÷ M", flops.as_input("F"), moved.as_input("M"), label="intensity at batch 1"
    )
    ridge = derive("ridge", "FLOP/B", "P ÷ BW", peak, bandwidth, source=_ROOFLINE, label="ridge point")
    gap = derive("gap", "×", "R ÷ I", ridge.as_input("R"), intensity.as_input("I"), label="below the ridge by")
    idle = derive("idle_share", "%", "100 × (1 − I ÷ R)", intensity.as_input("I"), ridge.as_input("R"),
                  label="arithmetic units idle")  # fmt: skip
    turn = derive("batch_at_ridge", "requests", "R ÷ I", ridge.as_input("R"), intensity.as_input("I"),
                  label="batch at the ridge, weights alone")  # fmt: skip
    return Ledger("weights", "Weights alone", (floor, rate, flops, moved, intensity, ridge, gap, idle, turn))


def batch_row(alone: Ledger, batch: int) -> tuple[Figure, Figure, Figure]:
    """(intensity, gap to the ridge, tokens/s) at `batch`, with weights alone."""
    b = Input("B", batch, "requests")
    intensity = derive(f"intensity_{batch}", "FLOP/B", "B × I", b, alone["intensity"].as_input("I"))
    gap = derive(f"gap_{batch}", "×", "R ÷ I", alone["ridge"].as_input("R"), intensity.as_input("I"))
    rate = derive(f"rate_{batch}", "tokens/s", "B ÷ t", b, alone["step_floor_s"].as_input("t"))
    return intensity, gap, rate


def bandwidth(timing: Timing, context: int = 8192, batches: Sequence[int] = BATCHES) -> Ledger:
    """The ledger of a model on a device: weights alone, then steps with KV at `context`. Raises ConfigError."""
    if min(context, *batches) < 1:
        raise ConfigError("context and batch sizes must be at least 1")
    kind = timing.roofline.compute_dtype
    alone = weights_only(timing.model.matmul_params, timing.weights_bytes, timing.device, kind, timing.tp)
    rows = tuple((str(b), *batch_row(alone, b)[:2], *_step_cells(timing, b, context)) for b in batches)
    columns = (
        "batch",
        "intensity, weights",
        "below ridge",
        "KV read",
        "step",
        "bound by",
        "tokens/s",
        "intensity, all",
    )
    tables: tuple[Table, ...] = (Table(f"decode steps at {context:,} tokens of context", columns, rows),)
    if any(layer.num_experts for layer in timing.model.layers):
        tables += (experts_table(timing, batches),)
    figures = (*alone.figures, *turning_point(timing, context))
    return Ledger("bandwidth", f"Moving bytes: {timing.model.name} on {timing.device.name}", figures, tables)


def _step_cells(timing: Timing, batch: int, context: int) -> tuple[Cell, ...]:
    cost = timing.decode(batch, context)
    kv = given(f"kv_read_{batch}", cost.kv_bytes, "B", "KVLayout.read_bytes of every request", "derived")
    step, rate = step_figures(timing, batch, context, f"_{batch}")
    both = derive(f"intensity_all_{batch}", "FLOP/B", "F ÷ M", Input("F", cost.flops / timing.tp, "FLOP"),
                  Input("M", cost.bytes, "B"))  # fmt: skip
    return (kv, step, cost.bound, rate, both)


def step_figures(timing: Timing, batch: int, context: int, tag: str = "") -> tuple[Figure, Figure]:
    """(seconds, tokens/s) of a decode step with KV, experts and exchange."""
    cost, micro = timing.decode(batch, context), -(-batch // timing.pp)
    step = timed_figure(timing, cost, micro, f"step_time_s{tag}", f"decode step, batch {batch}")
    rate = derive(f"step_rate{tag}", "tokens/s", "B ÷ t", Input("B", batch, "requests"), step.as_input("t"),
                  label=f"decode rate, batch {batch}")  # fmt: skip
    return step, rate


def timed_figure(timing: Timing, cost: StepCost, num_tokens: int, name: str, label: str) -> Figure:
    """Seconds of a step of `num_tokens` that costs `cost`: the larger of two times, and exchange."""
    bandwidth_in, peak = device_inputs(timing.device, timing.roofline.compute_dtype)
    inputs = (
        Input("W", cost.weight_bytes, "B", "weights read, per device"),
        Input("K", cost.kv_bytes, "B", "KV read and written, per device"),
        Input("F", cost.flops, "FLOP", "products and attention, all ranks"), bandwidth_in, peak,
        Input("tp", timing.tp, "devices"), Input("e", timing.efficiency, "", "share of peak and bandwidth reached"),
        Input("x", timing.exchange_s(num_tokens), "s", "exchange between ranks"),
    )  # fmt: skip
    formula = "max((W + K) ÷ (BW × e), F ÷ (P × tp × e)) + x"
    note = f"bound by {cost.bound}"
    return Figure(name, cost.seconds, "s", formula, inputs, _ROOFLINE, label=label, note=note)


def turning_point(timing: Timing, context: int, most: int = 1 << 16) -> tuple[Figure, ...]:
    """The batch from which a step at `context` is bound by arithmetic; none where KV reads keep it bound by memory."""
    if timing.decode(most, context).bound == "memory":
        return ()
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if timing.decode(middle, context).bound == "memory" else (low, middle)
    source = f"search over plan.roofline at {context:,} tokens"
    return (given("turns_compute_bound", high, "requests", source, "derived",
                  "compute-bound from batch"),)  # fmt: skip


def experts_table(timing: Timing, batches: Sequence[int]) -> Table:
    """Experts of a mixture that a step touches: routing is taken as uniform."""
    layer = next(x for x in timing.model.layers if x.num_experts)
    e, k = Input("E", layer.num_experts, "experts"), Input("k", layer.experts_per_token, "experts per token")
    rows = []
    for batch in batches:
        touched = derive(f"experts_{batch}", "experts", "E × (1 − (1 − k ÷ E) ^ B)", e, k, Input("B", batch, "tokens"),
                         source="uniform routing, an assumption")  # fmt: skip
        share = derive(f"experts_share_{batch}", "%", "100 × T ÷ E", touched.as_input("T"), e)
        rows.append((str(batch), touched, share))
    return Table("experts read by a step, per layer", ("batch", "touched", "of all"), tuple(rows))
