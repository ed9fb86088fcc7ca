"""Money: what a million tokens cost on rented devices. Prices come from the device rows, or from the person asking."""

from __future__ import annotations

from kvledger.plan.explain import Basis, Figure, Input, derive
from kvledger.spec.device import DeviceSpec


def cost_per_million(price_per_hour: float, num_devices: int, tokens_per_s: float) -> float:
    """Dollars per million tokens when `num_devices` at `price_per_hour` each give `tokens_per_s` together."""
    return price_per_hour * num_devices / (tokens_per_s * 3600) * 1e6


def price_input(device: DeviceSpec, price_per_hour: float | None = None) -> Input | None:
    """The hourly price as an input: given, else the device's own (assumed), else None."""
    if price_per_hour is not None:
        return Input("price", price_per_hour, "$", "given, per device and hour", "given")
    if device.price_per_hour is None:
        return None
    basis: Basis = "assumed" if "price_per_hour" in device.assumed else "given"
    return Input(
        "price", device.price_per_hour, "$", f"per device and hour, {device.price_source}, {device.date}", basis
    )


def cost_figure(price: Input, num_devices: int, tokens_per_s: Figure) -> Figure:
    """`cost_per_million` with its account."""
    return derive(
        "cost_per_million_tokens", "$", "price × devices ÷ (rate × 3600) × 1000000", price,
        Input("devices", num_devices), tokens_per_s.as_input("rate"), label="cost per million output tokens",
    )  # fmt: skip
