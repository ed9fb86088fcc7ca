"""A team of threads that run a program of kernels together. Knows neither the kernels nor what they compute.

A program is an int64 array of ops, one row each: [kernel's address, arguments, work counter]. All threads run every
op; within one they take items of work from the op's counter; the next begins when all are done. The workers
wait in native code
(a short spin, then a condition variable), so waking them needs no GIL, and Python's other threads run meanwhile.
Waiting is POSIX threads': Linux and macOS.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import numpy as np
from numba.core import types

from kvledger.kernels import simd
from kvledger.kernels.jit import cached_njit, inline

OP_WORDS = 30
OP_BYTES = OP_WORDS * 8
COUNTER = 24 * 8  # byte offset of an op's work counter
_ENTERED, _EXPECTED, _LEFT = 25 * 8, 26 * 8, 27 * 8  # threads that work on an op; as many as must leave; that have left
MEMORY = 28  # words of an op: the memory that it reads beside its arguments' buffers (its weights), and its bytes
_PIECE = 1024  # bytes asked for between two looks at the other threads
_CLOSED = 1 << 32  # added to a count of entries: whoever comes later stays out

# words of the shared state, each on a cache line of its own
_RUN_ENTERED, _RUN_LEFT, _GENERATION, _STOP, _NUM_THREADS, _PROGRAM, _NUM_OPS, _CTX = (64 * i for i in range(8))
_MUTEX, _COND = 64 * 8, 64 * 10
_STATE_WORDS = 8 * 12
_SPINS_BEFORE_SLEEP = 2000  # pauses; some 50 µs
_SPINS_BEFORE_YIELD = 500

_i32: Any = types.int32
_i64: Any = types.int64
_mutex_lock = types.ExternalFunction("pthread_mutex_lock", _i32(_i64))
_mutex_unlock = types.ExternalFunction("pthread_mutex_unlock", _i32(_i64))
_cond_wait = types.ExternalFunction("pthread_cond_wait", _i32(_i64, _i64))
_cond_broadcast = types.ExternalFunction("pthread_cond_broadcast", _i32(_i64))
_mutex_init = types.ExternalFunction("pthread_mutex_init", _i32(_i64, _i64))
_cond_init = types.ExternalFunction("pthread_cond_init", _i32(_i64, _i64))
_sched_yield = types.ExternalFunction("sched_yield", _i32())


@inline
def _next_memory(op, ops_left):  # type: ignore[no-untyped-def]
    """Address of the words of the next memory that an op after this one reads; 0: none."""
    for i in range(1, ops_left):
        at = op + i * OP_BYTES + MEMORY * 8
        if simd.get_i64(at) != 0:
            return at
    return 0


@inline
def _wait_for(left, expected, memory, end, step):  # type: ignore[no-untyped-def]
    """Until the number at address `left` is the one at `expected`, and that is not 0.

    Meanwhile asks for memory from `memory` on, a piece in every `step` bytes; returns how far it came.
    """
    spins = 0
    while True:
        target = simd.load_acquire(expected)
        if target != 0 and simd.load_acquire(left) == target:
            return memory
        if memory < end:
            for line in range(0, _PIECE, 64):
                simd.prefetch(memory + line)
            memory += step
            continue
        spins += 1
        simd.pause(0)
        if spins > _SPINS_BEFORE_YIELD:
            _sched_yield()


@inline
def next_item(op: int) -> Any:
    """The next item of work of this op: 0, 1, 2 … over all threads."""
    return simd.fetch_add(op + COUNTER, 1)


@inline
def _run_ops(state: int, thread: int) -> None:
    """Every op in turn. The first thread that finds no more items closes the op; only those inside are waited for, so
    a thread that the system has put aside holds nobody up. Who waits asks for the weights of the next product: small
    ops leave the memory idle, which is what limits a step of few rows.
    """
    op = simd.get_i64(state + _PROGRAM)
    ctx = simd.get_i64(state + _CTX)
    num_ops, step = simd.get_i64(state + _NUM_OPS), simd.get_i64(state + _NUM_THREADS) * _PIECE
    asked, known = 0, 0  # where asking for the next weights has come to; the words that name them
    for i in range(num_ops):
        if simd.fetch_add(op + _ENTERED, 1) < _CLOSED:
            simd.call_kernel(simd.get_i64(op), op, ctx, thread)
            entered = simd.fetch_or(op + _ENTERED, _CLOSED)
            if entered < _CLOSED:
                simd.store_release(op + _EXPECTED, entered)
            simd.fetch_add(op + _LEFT, 1)
        words = _next_memory(op, num_ops - i)
        end = 0
        if words != 0:
            end = simd.get_i64(words) + simd.get_i64(words + 8)
            if words != known:
                asked, known = simd.get_i64(words) + thread * _PIECE, words
        asked = _wait_for(op + _LEFT, op + _EXPECTED, asked, end, step)
        op += OP_BYTES


@cached_njit
def _init(state):  # type: ignore[no-untyped-def]
    _mutex_init(state + _MUTEX, 0)  # type: ignore[call-overload]
    _cond_init(state + _COND, 0)  # type: ignore[call-overload]


@cached_njit
def _post(state, stop):  # type: ignore[no-untyped-def]
    """A new generation: workers wake and look what is to be done."""
    _mutex_lock(state + _MUTEX)
    simd.put_i64(state + _STOP, stop)
    simd.store_release(state + _GENERATION, simd.get_i64(state + _GENERATION) + 1)
    _cond_broadcast(state + _COND)
    _mutex_unlock(state + _MUTEX)


@cached_njit
def _lead(state, program, num_ops, ctx):  # type: ignore[no-untyped-def]
    """Run a program as thread 0."""
    simd.put_i64(state + _PROGRAM, program)
    simd.put_i64(state + _NUM_OPS, num_ops)
    simd.put_i64(state + _CTX, ctx)
    for i in range(num_ops):
        for word in (COUNTER, _ENTERED, _EXPECTED, _LEFT):
            simd.put_i64(program + i * OP_BYTES + word, 0)
    simd.put_i64(state + _RUN_LEFT, 0)
    simd.store_release(state + _RUN_ENTERED, 0)
    if simd.get_i64(state + _NUM_THREADS) > 1:
        _mutex_lock(state + _MUTEX)
        simd.store_release(state + _GENERATION, simd.get_i64(state + _GENERATION) + 1)
        _cond_broadcast(state + _COND)
        _mutex_unlock(state + _MUTEX)
    _run_ops(state, 0)
    workers = simd.fetch_or(state + _RUN_ENTERED, _CLOSED)
    while simd.load_acquire(state + _RUN_LEFT) != workers:
        simd.pause(0)


@cached_njit
def _work(state, thread):  # type: ignore[no-untyped-def]
    """A worker's life."""
    seen = 0
    while True:
        spins = 0
        while simd.load_acquire(state + _GENERATION) == seen:
            spins += 1
            simd.pause(0)
            if spins > _SPINS_BEFORE_SLEEP:
                _mutex_lock(state + _MUTEX)
                while simd.load_acquire(state + _GENERATION) == seen:
                    _cond_wait(state + _COND, state + _MUTEX)
                _mutex_unlock(state + _MUTEX)
        seen = simd.load_acquire(state + _GENERATION)
        if simd.get_i64(state + _STOP) != 0:
            return
        if simd.fetch_add(state + _RUN_ENTERED, 1) < _CLOSED:
            _run_ops(state, thread)
            simd.fetch_add(state + _RUN_LEFT, 1)


def num_cpus() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Team:
    """`num_threads` threads, the caller's own included. One program at a time; `close` ends the workers."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._buffer = np.zeros(_STATE_WORDS + 8, np.int64)
        self._state = aligned(self._buffer)
        view = self._buffer[(self._state - self._buffer.ctypes.data) // 8 :]
        view[_NUM_THREADS // 8] = num_threads
        _init(self._state)
        workers = [
            threading.Thread(target=_work, args=(self._state, t), name=f"kvledger-{t}", daemon=True)
            for t in range(1, num_threads)
        ]
        for worker in workers:
            worker.start()
        # runs at garbage collection or before the interpreter ends, and holds the memory that the workers wait in
        self._finish = weakref.finalize(self, _dismiss, self._state, workers, self._buffer)

    def run(self, program: np.ndarray, ctx: np.ndarray) -> None:
        """Run int64[num_ops, OP_WORDS] `program` over int64 `ctx`; returns when all threads are done."""
        _lead(self._state, program.ctypes.data, len(program), ctx.ctypes.data)

    def close(self) -> None:
        """End the workers. Idempotent."""
        self._finish()


def _dismiss(state: int, workers: list[threading.Thread], memory: np.ndarray) -> None:
    """Wake the workers for the last time and wait for them; `memory` is what they wait in."""
    if workers:
        _post(state, 1)
    for worker in workers:
        worker.join()


def aligned(buffer: np.ndarray, alignment: int = 64) -> int:
    """The first address in `buffer` that is a multiple of `alignment`."""
    address = int(buffer.ctypes.data)
    return address + -address % alignment


def empty_program(ops: list[list[int]]) -> Any:
    """int64[num_ops, OP_WORDS], rows padded with zeros."""
    program = np.zeros((len(ops), OP_WORDS), np.int64)
    for row, op in zip(program, ops, strict=True):
        assert not any(op[COUNTER // 8 : MEMORY]), "an op's arguments reach into its counters"
        row[: len(op)] = op
    return program
