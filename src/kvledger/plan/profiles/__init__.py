"""How each serving engine turns memory into a KV pool: one profile per engine, side by side by `compare`."""

from kvledger.plan.profiles.base import Allocation, Profile, Setup, get_profile

__all__ = ["Allocation", "Profile", "Setup", "get_profile"]
