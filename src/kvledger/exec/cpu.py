"""The executor that computes: packed weights, the KV pool, and a team of threads that runs the model's program.

Owns the memory that the bookkeeping above only counts. Knows nothing of requests, queues or time budgets.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import numpy as np

from kvledger.data.host import return_freed_memory
from kvledger.exec.batch import Batch, Segment, cut, make_batch, read
from kvledger.exec.block_store import BlockStore
from kvledger.exec.sampler import sample_rows, score
from kvledger.kernels import attention as att
from kvledger.kernels import elementwise as ew
from kvledger.kernels import matmul as mm
from kvledger.kernels.attention_loops import SPLIT_ROWS
from kvledger.kernels.isa import ISA
from kvledger.kernels.packed import aligned, aligned_zeros
from kvledger.kernels.team import Team, num_cpus
from kvledger.kernels.warmup import common_kernels, warmup
from kvledger.model.decoder import HEAD_ROWS, build
from kvledger.model.limits import unexplained
from kvledger.model.linear import MAX_ROWS
from kvledger.model.registry import read_decoder
from kvledger.sched.step import Chunk, Sample, Step, StepResult
from kvledger.spec.config import ExecConfig
from kvledger.spec.kv import KVLayout
from kvledger.spec.kv_computed import kind_of
from kvledger.spec.model import ModelSpec
from kvledger.weights.open import WeightsFile, open_weights

Array = np.ndarray[Any, Any]
MODES = {
    "auto": "bf16" if ISA.amx else "mixed",
    "int8": "int8",
    "int8x2": "int8x2",
    "fp32": "fp32",
}
_PAD_BYTES = 1 << 16  # kernels may read, never write, a little past the last page


class CpuExecutor:
    """Runs steps of `spec` over a pool of `num_blocks` blocks of `layout`.

    `weights`: an open model file or its path. Raises UnsupportedModel, DamagedFile. `progress` is told the share of
    tensors packed. One step at a time; the GIL is free while kernels run. `unread`: tensors of the file that no op
    reads and without which the answers may be wrong.
    """

    def __init__(self, weights: WeightsFile | str | Path, spec: ModelSpec, layout: KVLayout, num_blocks: int,
                 config: ExecConfig | None = None, progress: Callable[[float], None] = lambda share: None,
                 store: BlockStore | None = None) -> None:  # fmt: skip
        config = config or ExecConfig()
        gguf = open_weights(weights) if isinstance(weights, str | Path) else weights
        self.layout, self._num_blocks = layout, num_blocks
        decoder = read_decoder(gguf.metadata, spec, gguf.tensors)
        positions = layout.longest_in(num_blocks, decoder.max_context)
        mode = MODES[config.activations]
        # the first half of the progress is compiling, which after the first start takes no time
        warmup(common_kernels(mode, kind_of(layout)), lambda share: progress(share / 2))

        def packed(share: float) -> None:
            gguf.release()  # a file as large as the weights would be in memory beside them
            progress((1 + share) / 2)

        self.model = build(decoder, gguf.tensors, layout, mode, positions, packed)
        return_freed_memory()
        self.unread = unexplained(self.model.unread, decoder.num_layers)
        self._pool = aligned_zeros(num_blocks * layout.block_bytes + _PAD_BYTES)
        self._blocks = self._pool[: num_blocks * layout.block_bytes].reshape(layout.pool_shape(num_blocks))
        self._team = Team(config.num_threads or num_cpus())
        self._scratch = aligned_zeros(self._team.num_threads * self.model.scratch_bytes)
        self._store = store or BlockStore()  # blocks outside the pool, by tier slot
        self._partials = np.empty(0, np.float32)
        self._ctx = np.zeros(ew.TABLES + max(40, len(layout.groups)), np.int64)
        self._ctx[[mm.SCRATCH, mm.SCRATCH_BYTES, mm.NUM_THREADS]] = (
            self._scratch.ctypes.data, self.model.scratch_bytes, self._team.num_threads)  # fmt: skip
        self._ctx[ew.POOL] = self._pool.ctypes.data

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_threads(self) -> int:
        """Threads that compute."""
        return self._team.num_threads

    @property
    def kv_bytes(self) -> int:
        return int(self._blocks.nbytes)

    def run(self, step: Step) -> StepResult:
        """Tier moves and copies, then all chunks in one forward pass, then a sample per sampling chunk."""
        start = time.perf_counter()
        self._move_blocks(step)
        samples: dict[int, Sample] = {}
        scores: dict[int, list[Sample]] = {}
        failed: dict[int, str] = {}
        for chunks, logits in self._logit_blocks(step):
            for (chunk, index), row in zip(chunks, logits, strict=True):
                self._score_prompt(chunk, index, row, scores)
            last = [i for i, (chunk, index) in enumerate(chunks) if chunk.samples and index == chunk.num_tokens - 1]
            new, bad = sample_rows([logits[i] for i in last], [chunks[i][0].seq for i in last])
            samples |= new
            failed |= bad
        return StepResult(samples, time.perf_counter() - start, {k: tuple(v) for k, v in scores.items()}, failed)

    def logits(self, step: Step) -> Array:
        """float32[rows, vocabulary] of every row that the step asks logits of, in order."""
        self._move_blocks(step)
        blocks = [logits.copy() for _, logits in self._logit_blocks(step)]
        return np.concatenate(blocks) if blocks else np.empty((0, self.model.decoder.vocab), np.float32)

    def close(self) -> None:
        """End the threads and give the pool back. Idempotent."""
        self._team.close()
        self._pool, self._blocks = np.empty(0, np.uint8), np.empty((0, 0), np.uint8)

    # ------------------------------------------------------------------------------------------ inside

    def _move_blocks(self, step: Step) -> None:
        for block, slot in step.swaps_out:
            self._store[slot] = self._blocks[block].copy()
        for slot, block in step.swaps_in:
            self._blocks[block] = self._store.pop(slot)
        for source, destination in step.copies:
            self._blocks[destination] = self._blocks[source]

    @staticmethod
    def _score_prompt(chunk: Chunk, index: int, row: Array, scores: dict[int, list[Sample]]) -> None:
        """Logprob of the prompt token that follows row `index` of the chunk, where the request asks for it."""
        seq, following = chunk.seq, chunk.start + index + 1
        if seq.params.prompt_logprobs is None or following >= seq.num_prompt_tokens:
            return
        scores.setdefault(seq.seq_id, []).append(score(row, seq.token_ids[following], seq.params.prompt_logprobs))

    def _logit_blocks(self, step: Step) -> Any:
        """Yields (rows as (chunk, index within it), their logits), at most HEAD_ROWS at a time."""
        if not step.chunks:
            return
        rows = [(c, i) for c in step.chunks for i in range(c.num_tokens - c.num_logits, c.num_tokens)]
        waiting, done = 0, 0
        for segments in cut(step.chunks, MAX_ROWS):
            left = self.model.x[: self._forward(segments)]
            while len(left):
                take = left[: HEAD_ROWS - waiting]
                self.model.head_x[waiting : waiting + len(take)] = take
                waiting, left = waiting + len(take), left[len(take) :]
                if waiting == HEAD_ROWS:
                    yield rows[done : done + waiting], self._head(waiting)
                    waiting, done = 0, done + waiting
        if waiting:
            yield rows[done:], self._head(waiting)

    def _forward(self, segments: Items[Segment]) -> int:
        """The body over `segments`. Returns how many rows are read, which are then the first of the residual stream.

        Of the last layer the others need no more than that their keys and values are written.
        """
        body, tail = self.model.body, self.model.tail
        batch = self._batch(segments)
        rows, num_read = batch.logit_rows, len(batch.logit_rows)
        if num_read == batch.num_rows:
            self._run(body, batch)
            return num_read
        self._run(body[:tail], batch)
        if num_read:
            for x in (self.model.x, *self.model.q):
                x[:num_read] = x[rows]
            self._run(body[tail:], self._batch(read(segments)))
        return num_read

    def _batch(self, segments: Items[Segment]) -> Batch:
        d = self.model.decoder
        return make_batch(segments, self.layout, d.ratio, d.kv_heads, self._team.num_threads)

    def _run(self, program: Array, batch: Batch) -> None:
        """Ops of the body over the rows of `batch`."""
        d = self.model.decoder
        partial_floats = batch.num_partials * d.kv_heads * SPLIT_ROWS * (d.value_dim + 16)
        if partial_floats > self._partials.size:
            self._partials = aligned((2 * partial_floats,))
        ctx = self._ctx
        ctx[mm.ROWS], ctx[ew.TABLE_STRIDE] = batch.num_rows, batch.table_stride
        for word, array in (
            (ew.TOKENS, batch.tokens), (ew.POSITIONS, batch.positions), (ew.SEGMENT_OF, batch.segment_of),
            (att.SEGMENTS, batch.segments), (att.UNITS, batch.units), (att.MERGES, batch.merges),
            (att.PARTIALS, self._partials), *((ew.TABLES + g, t) for g, t in enumerate(batch.tables)),
        ):  # fmt: skip
            ctx[word] = array.ctypes.data
        ctx[att.NUM_UNITS], ctx[att.NUM_MERGES] = len(batch.units), len(batch.merges)
        self._team.run(program, ctx)

    def _head(self, num_rows: int) -> Array:
        self._ctx[mm.ROWS] = num_rows
        self._team.run(self.model.head, self._ctx)
        return self.model.logits[:num_rows, : self.model.decoder.vocab]
