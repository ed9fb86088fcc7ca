"""One scheduler: the same trace through the CPU executor and the simulated one gives the same Steps, block for block.

Arrivals are tied to step numbers, and the simulator says the tokens that the CPU run said (full blocks are found by
content). What differs is only who spends the time. The same runs show that text does not depend on the schedule.
"""

import itertools
from dataclasses import dataclass, field, replace

import pytest

from golden_models import described, write_folder
from kvledger.build import assemble
from kvledger.cache.tiers import TierPlan
from kvledger.clock import VirtualClock
from kvledger.exec.simulated import Script, SimulatedExecutor
from kvledger.plan.pool import PoolPlan
from kvledger.sched.events import Admitted, Finished, Preempted, TokenEvent
from kvledger.sched.sequence import Request
from kvledger.spec.config import CacheConfig, EngineConfig, ExecConfig, SchedulerConfig
from kvledger.spec.from_gguf import model_from_gguf
from kvledger.spec.sampling import SamplingParams
from kvledger.weights.gguf import open_gguf
from kvledger.weights.open import open_weights
from tiny_model import write_tiny_model

BLOCKS = {"roomy": 200, "tight": 16}


@dataclass
class Run:
    """What an engine did with the trace."""

    steps: list = field(default_factory=list)
    events: list = field(default_factory=list)

    @property
    def texts(self):
        found = {}
        for e in self.events:
            if isinstance(e, TokenEvent):
                found.setdefault((e.request_id, e.choice), []).append(e.sample.token_id)
        return found

    def count(self, kind, **having):
        return sum(isinstance(e, kind) and all(getattr(e, k) == v for k, v in having.items()) for e in self.events)


class Recorder:
    """An executor that writes down every step it is given."""

    def __init__(self, inner, steps):
        self.inner, self.steps = inner, steps

    num_blocks = property(lambda self: self.inner.num_blocks)
    kv_bytes = property(lambda self: self.inner.kv_bytes)

    def run(self, step):
        self.steps.append(step.signature())
        return self.inner.run(step)

    def close(self):
        self.inner.close()


class FixedTime:
    def seconds(self, shape):
        return 1e-3 * len(shape)


def trace():
    """(step, request): two conversations that share a start, several choices, different lengths and parameters."""
    start = tuple(b"You are a helpful assistant. Answer in one word, please. ")
    prompts = [start + tuple(b"Where?"), tuple(range(40, 90)), start + tuple(b"When then?"), tuple(b"hm"), start * 2]
    params = [
        SamplingParams(temperature=0.0, max_tokens=40),
        SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=30),
        SamplingParams(temperature=0.7, seed=4, max_tokens=50, top_p=0.9, repetition_penalty=1.2),
        SamplingParams(temperature=1.5, seed=5, max_tokens=25, top_k=20),
    ]
    steps = [0, 0, 2, 3, 3, 4, 9, 20, 21, 40]
    items = zip(steps, itertools.cycle(prompts), itertools.cycle(params), strict=False)
    return [(at, Request(f"r{i}", prompt, p, priority=i % 3)) for i, (at, prompt, p) in enumerate(items)]


def play(engine, requests, recorder):
    run, pending = Run(recorder.steps), list(requests)
    for number in range(5000):
        while pending and pending[0][0] <= number:
            engine.add(pending.pop(0)[1])
        run.events += engine.step()
        engine.scheduler.check()
        if not pending and not engine.has_work:
            return run
    raise AssertionError("never ends")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    files = {w: open_gguf(write_tiny_model(folder / f"tiny-{w}.gguf", window=w)) for w in (None, 24)}
    return {w: (f, model_from_gguf(f.metadata, f.facts)) for w, f in files.items()}


def configure(spec, num_blocks, prefix=True, kv="bf16", **sched):
    options = {"max_num_batched_tokens": 48, "max_num_seqs": 6, "growth_tokens": 0} | sched
    config = EngineConfig(CacheConfig(kv_dtype=kv, prefix_caching=prefix), SchedulerConfig(**options))
    layout = spec.kv_layout(kv, config.cache.tokens_per_block)
    return config, PoolPlan(layout, num_blocks * layout.block_bytes, num_blocks, "test")


def run_cpu(model, num_blocks, requests=None, swap=0, activations="auto", **options):
    from kvledger.exec.block_store import BlockStore
    from kvledger.exec.cpu import CpuExecutor

    gguf, spec = model
    config, pool = configure(spec, num_blocks, **options)
    store, how = BlockStore(swap), ExecConfig(activations=activations)
    recorder = Recorder(CpuExecutor(gguf, spec, pool.layout, num_blocks, how, store=store), [])
    engine = assemble(spec, pool, config, recorder, tiers=TierPlan(swap))
    try:
        return play(engine, requests or trace(), recorder)
    finally:
        engine.close()


def run_simulated(model, num_blocks, texts, swap=0, **options):
    config, pool = configure(model[1], num_blocks, **options)
    recorder = Recorder(SimulatedExecutor(pool, FixedTime(), Script(texts)), [])
    engine = assemble(model[1], pool, config, recorder, tiers=TierPlan(swap))
    engine.clock = VirtualClock()
    return play(engine, trace(), recorder)


CASES = [
    {"policy": "continuous"},
    {"policy": "continuous", "prefix": False},
    {"policy": "continuous", "swap": 60},
    {"policy": "continuous", "queueing": "priority"},
    {"policy": "continuous", "chunked_prefill": False},
    {"policy": "orca"},
    {"policy": "static"},
]


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("options", CASES, ids=lambda o: "-".join(map(str, o.values())))
def test_the_simulator_takes_the_same_steps(models, options, blocks, window):
    real = run_cpu(models[window], BLOCKS[blocks], **options)
    predicted = run_simulated(models[window], BLOCKS[blocks], real.texts, **options)
    assert len(real.steps) > 30
    assert predicted.steps == real.steps
    assert [type(e) for e in predicted.events] == [type(e) for e in real.events]
    if options == CASES[0] and window is None:
        assert bool(real.count(Preempted)) == (blocks == "tight")
    if blocks == "tight" and window is None:
        assert (real.count(Preempted, is_swapped=True) > 0) == ("swap" in options)
    assert any(isinstance(e, Admitted) and e.num_cached for e in real.events) == options.get("prefix", True)


@pytest.mark.parametrize("window", [None, 24])
def test_text_does_not_depend_on_the_schedule(models, window):
    """Every policy, pool size, chunking and prefix setting: the same tokens for every request and choice."""
    alone = {}
    for _, request in trace():
        alone |= run_cpu(models[window], 200, [(0, request)], prefix=False).texts
    settings = [
        *((blocks, options) for blocks in BLOCKS for options in CASES),
        ("roomy", {"max_num_batched_tokens": 7}),
        ("roomy", {"max_num_batched_tokens": 512, "max_num_seqs": 64}),
        ("tight", {"max_num_batched_tokens": 13, "prefix": False}),
    ]
    for blocks, options in settings:
        run = run_cpu(models[window], BLOCKS[blocks], **options)
        assert run.count(Finished) == len(alone)
        assert run.texts == alone, (blocks, options)


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("kv", ["int8", "int4"])
def test_nor_on_any_kv_type(models, kv, window):
    """Alone and uncached, in small chunks, hit, preempted by recompute and by swap, forked: the same tokens.

    The long request reads most of its context quantised; beside it run those that share beginnings with it.
    """
    prompt = tuple(range(60, 160)) * 2
    long = [(0, Request("long", prompt, SamplingParams(max_tokens=60, temperature=0.9, seed=6, n=2)))]
    again = [(at, replace(long[0][1], request_id=f"{at}")) for at in (20, 90)]  # while it runs, and when it is gone
    requests = [*long, *trace()[:6], *again]

    def run(num_blocks, wanted=requests, **options):
        return run_cpu(models[window], num_blocks, wanted, kv=kv, **options)

    alone = {}
    for _, request in requests:
        alone |= run(300, [(0, request)], prefix=False).texts
    room = max(18, configure(models[window][1], 1, kv=kv)[1].layout.blocks_for(261, in_flight=48) + 4)
    runs = [
        run(300), run(300, max_num_batched_tokens=7), run(300, max_num_batched_tokens=512), run(room),
        run(room, swap=200, prefix=False),
    ]  # fmt: skip
    for number, found in enumerate(runs):
        assert found.texts == alone, number
    assert any(isinstance(e, Admitted) and e.num_cached for e in runs[0].events)
    if window is None:
        assert runs[3].count(Preempted)
        assert runs[4].count(Preempted, is_swapped=True)


@pytest.mark.parametrize(
    ("name", "kv"),
    [("gemma3", "bf16"), ("deepseek2", "bf16"), ("deepseek2", "int8"), ("deepseek2", "fp8"), ("qwen3moe", "bf16")],
)
def test_nor_on_any_layout(tmp_path, name, kv):
    """Windows and full layers in one pool, latents, experts: alone, in chunks, preempted, swapped, the same tokens."""
    row = described()[name]
    weights = open_weights(write_folder(tmp_path, row))
    model, vocab = (weights, model_from_gguf(weights.metadata, weights.facts)), row["config"]["vocab_size"]
    groups = len(model[1].kv_layout().groups)
    requests = [
        (at, replace(r, prompt_token_ids=tuple(t % vocab for t in r.prompt_token_ids))) for at, r in trace()[:6]
    ]

    def played(num_blocks, wanted=requests, **options):
        return run_cpu(model, num_blocks * groups, wanted, kv=kv, **options)

    alone = {}
    for _, request in requests:
        alone |= played(100, [(0, request)], prefix=False).texts
    runs = [
        played(100, max_num_batched_tokens=7), played(14), played(14, swap=60, prefix=False),
    ]  # fmt: skip
    for number, found in enumerate(runs):
        assert found.texts == alone, number
    assert any(isinstance(e, Admitted) and e.num_cached for e in runs[0].events)
    if groups == 1:
        assert runs[1].count(Preempted)
        assert runs[2].count(Preempted, is_swapped=True)
