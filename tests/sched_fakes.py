"""A scripted executor and small builders for scheduler tests. Fits on one screen."""

import hashlib

from kvledger.plan.pool import PoolPlan
from kvledger.sched.scheduler import Scheduler
from kvledger.sched.sequence import Request
from kvledger.sched.step import Sample, Step, StepResult
from kvledger.spec.config import SchedulerConfig
from kvledger.spec.kv import ChunkedKV, FullKV, KVLayout, KVStorage, LatentKV, WindowKV
from kvledger.spec.sampling import SamplingParams

FULL, WINDOW, CHUNKED = FullKV(2, 8, 8), WindowKV(2, 8, 8, 10), ChunkedKV(2, 8, 8, 12)
LAYOUTS = {
    "full": [FULL] * 2,
    "mqa": [FullKV(1, 8, 8)] * 3,
    "window": [WINDOW] * 2,
    "mix": [FULL, WINDOW, WINDOW, WINDOW],
    "chunked": [FULL, CHUNKED],
    "latent": [LatentKV(16, 4)] * 2,
}


def layout(kind="full", block_size=4):
    return KVLayout.of(LAYOUTS[kind], KVStorage.of("bf16"), block_size)


def make_scheduler(num_blocks=20, kind="full", block_size=4, max_len=64, prefix=True, tiers=None, **config):
    where = layout(kind, block_size)
    pool = PoolPlan(where, num_blocks * where.block_bytes, num_blocks, "test")
    config = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "growth_tokens": 4} | config
    return Scheduler(pool, SchedulerConfig(**config), max_len, prefix_caching=prefix, tiers=tiers)


def request(name, prompt, max_tokens=8, **kw):
    """`prompt` is a length or the ids themselves."""
    ids = tuple(range(1, prompt + 1)) if isinstance(prompt, int) else tuple(prompt)
    own = {k: kw.pop(k) for k in ("priority", "salt", "eos_token_ids", "stepwise", "constraint") if k in kw}
    return Request(str(name), ids, SamplingParams(max_tokens=max_tokens, **kw), **own)


def scripted_token(seq, vocab=50):
    """A token that depends on the text so far and the choice only, as a deterministic model's would."""
    text = f"{seq.choice}|{seq.token_ids}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") % vocab + 100


class FakeExecutor:
    """Answers every sampling chunk with `scripted_token`; checks what an executor may rely on."""

    def __init__(self, scheduler):
        self.block_size = scheduler.plan.layout.block_size
        self.groups = scheduler.plan.layout.groups
        self.num_blocks = scheduler.plan.num_blocks
        self.kv_bytes = scheduler.plan.pool_bytes
        self.steps = []
        self.chains = {}  # seq_id → chained hash of its text up to each position
        self.tier = {}
        self.content = {}  # (group, block, offset) → the text up to that token: what a real executor would have stored

    def run(self, step: Step) -> StepResult:
        self.steps.append(step.signature())
        for block, slot in step.swaps_out:
            self.tier[slot] = [self.content.get(place) for place in self._places(block)]
        for slot, block in step.swaps_in:
            self.content.update(zip(self._places(block), self.tier[slot], strict=True))
        for source, destination in step.copies:
            for old, new in zip(self._places(source), self._places(destination), strict=True):
                self.content[new] = self.content.get(old)
        written = [key for chunk in step.chunks for key in self._write(chunk)]
        assert len(set(written)) == len(written), "two chunks write one slot"
        for chunk in step.chunks:
            self._read(chunk)
        return StepResult({c.seq.seq_id: Sample(scripted_token(c.seq)) for c in step.chunks if c.samples}, 0.001)

    def _places(self, block):
        return [(group, block, offset) for group in range(len(self.groups)) for offset in range(self.block_size)]

    def _text(self, seq, position):
        """Stands for tokens [0, position] of the sequence: only computed tokens, which never change."""
        chain = self.chains.setdefault(seq.seq_id, [])
        while len(chain) <= position:
            chain.append(hash((chain[-1] if chain else 0, seq.token_ids[len(chain)])))
        return chain[position]

    def _place(self, seq, group, position):
        block = seq.tables[group][position // self.block_size]
        assert block >= 0, f"position {position} of group {group} has no block"
        return group, block, position % self.block_size

    def _write(self, chunk):
        seq = chunk.seq
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            for group in range(len(self.groups)):
                key = self._place(seq, group, position)
                self.content[key] = self._text(seq, position)
                yield key

    def _read(self, chunk):
        """Every position that a query of the chunk may read holds this sequence's own text."""
        seq = chunk.seq
        for group, g in enumerate(self.groups):
            for position in range(g.spec.first_kept(chunk.start), chunk.start + chunk.num_tokens):
                stored = self.content[self._place(seq, group, position)]
                assert stored == self._text(seq, position), (seq.request_id, group, position)


def run_all(scheduler, executor=None, limit=5000):
    """Steps until nothing is left; returns the events."""
    executor = executor or FakeExecutor(scheduler)
    events = []
    for _ in range(limit):
        if not scheduler.has_work:
            return events
        step = scheduler.schedule()
        events += scheduler.update(step, executor.run(step))
        scheduler.check()
    raise AssertionError("live-lock")
