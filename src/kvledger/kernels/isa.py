"""Which vector instructions the kernels use: AMX, AVX-512, AVX2 or whatever LLVM makes of plain vectors.

`KVLEDGER_SIMD=amx|avx512|avx2|generic` forces a path; without it the best that the CPU has is taken. Knows nothing of
the kernels. The choice is made once, at import, because compiled code cannot change its mind.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
import numba

from kvledger.errors import ConfigError

ENV = "KVLEDGER_SIMD"
_ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA, _SYS_ARCH_PRCTL = 0x1023, 18, 158  # linux/arch/x86: AMX must be asked for


@dataclass(frozen=True, slots=True)
class Isa:
    """A path. `vnni`: u8 × s8 dot products; `bf16`: bf16 dot products; `amx`: tiles of them; `half`: float16 loads."""

    name: str
    vnni: bool = False
    bf16: bool = False
    amx: bool = False
    half: bool = True
    cpu: str | None = None  # what LLVM is told to compile for; None: this machine


def host_features() -> frozenset[str]:
    """LLVM's names of what this CPU has."""
    return frozenset(name for name, has in llvm.get_host_cpu_features().items() if has)


def available() -> dict[str, Isa]:
    """The paths this CPU can run, best first. `generic` is always there."""
    has = host_features()
    wide = {"avx512f", "avx512bw", "avx512vl", "avx512vnni"} <= has
    bf16 = "avx512bf16" in has
    found = []
    if wide and bf16 and {"amx-tile", "amx-bf16", "avx512fp16"} <= has and _amx_permitted():
        found.append(Isa("amx", vnni=True, bf16=True, amx=True))
    if wide:
        found.append(Isa("avx512", vnni=True, bf16=bf16))
    if "avx2" in has and "fma" in has:
        found.append(Isa("avx2", cpu="haswell" if found else None))
    found.append(Isa("generic", half=False, cpu="x86-64-v2" if platform.machine() in ("x86_64", "AMD64") else None))
    return {isa.name: isa for isa in found}


def _amx_permitted() -> bool:
    """Ask Linux for the tile registers' state; threads started later inherit the permission."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


def choose(name: str | None) -> Isa:
    """The path called `name`, or the best one. Raises ConfigError for a path this CPU cannot run."""
    paths = available()
    if not name:
        return next(iter(paths.values()))
    if name not in paths:
        raise ConfigError(f"{ENV}={name}: this CPU runs {', '.join(paths)}")
    return paths[name]


def _narrow(isa: Isa) -> Isa:
    """Tell Numba to compile for less than the machine has, before anything is compiled."""
    if isa.cpu is not None:
        config: Any = numba.config
        config.CPU_NAME, config.CPU_FEATURES = isa.cpu, ""
    return isa


def target() -> str:
    """What code is compiled for: the CPU and its features, as LLVM calls them."""
    config: Any = numba.config
    features = llvm.get_host_cpu_features().flatten() if config.CPU_FEATURES is None else config.CPU_FEATURES
    return f"{config.CPU_NAME or llvm.get_host_cpu_name()} {features}"


ISA = _narrow(choose(os.environ.get(ENV)))
