"""The whole evaluation: KV types against bf16 KV, arithmetic against float32, retrieval by KV type.

    kvledger eval smollm2 --peer-python PATH --json

Contenders go through the text side by side, a block of rows at a time, so that no logits are kept. Each holds its own
packed weights: name fewer at once where a model is large.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvledger.errors import ConfigError
from kvledger.evaluate.contender import Contender, Ours, arithmetic_name
from kvledger.evaluate.divergence import Divergence, Reference, Tally, log_softmax
from kvledger.evaluate.peer import LlamaCpp
from kvledger.evaluate.retrieval import Retrieval, retrieve
from kvledger.evaluate.text import BUNDLED, begin_of_text, read_text, windows
from kvledger.spec.from_gguf import model_from_gguf
from kvledger.spec.model import ModelSpec
from kvledger.text.tokenizer import Tokenizer
from kvledger.weights.open import open_weights
from kvledger.weights.store import resolve

KV_DTYPES = ("bf16", "fp32", "int8", "fp8", "int4")
ACTIVATIONS = ("auto", "int8", "int8x2", "fp32")
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """What to evaluate. `text` None: the bundled one; `contexts`: of retrieval; `peer_python` has llama.cpp."""

    model: str = "smollm2"
    text: Path | None = None
    kv_dtypes: tuple[str, ...] = KV_DTYPES
    activations: tuple[str, ...] = ACTIVATIONS
    kv_activations: tuple[str, ...] = ("auto",)  # arithmetic under which KV types are compared; retrieval by the first
    num_tokens: int = 8192
    window: int = 2048
    contexts: tuple[int, ...] = (1024, 2048)
    peer_python: Path | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_tokens", 2), ("window", 8)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class Study:
    """Contenders against one reference. `rows[0]` is the reference itself."""

    title: str
    rows: tuple[Divergence, ...]


@dataclass(frozen=True, slots=True)
class Quality:
    """Everything that was measured."""

    model: str
    text: str
    num_tokens: int
    window: int
    studies: tuple[Study, ...]
    retrieval: tuple[Retrieval, ...]


@dataclass(frozen=True, slots=True)
class _Job:
    """What is asked, with everything found that the studies need."""

    asked: Asked
    spec: ModelSpec
    path: Path
    windows: list[list[int]]
    filler: list[int]
    contexts: tuple[int, ...]
    progress: Progress

    @property
    def max_model_len(self) -> int:
        """Window or context of retrieval, and one sampled token."""
        longest = max(map(len, self.windows))
        return min(max(longest, *self.contexts, 1) + 1, self.spec.max_context)

    def ours(self, name: str, kv_dtype: str, activations: str) -> Ours:
        self.progress(f"loading {name}")
        return Ours(name, str(self.path), kv_dtype, activations, self.max_model_len, self.asked.threads)


def evaluate(asked: Asked, progress: Progress = lambda text: None) -> Quality:
    """Measure. Raises ConfigError, UnknownName, UnsupportedModel, FetchError, DamagedFile, DoesNotFit."""
    job = _prepare(asked, progress)
    studies: list[Study] = []
    found: list[list[Retrieval]] = []
    for mode in asked.kv_activations if asked.kv_dtypes else ():
        with _kv_contenders(job, mode) as contenders:
            title = f"KV types against bf16 KV, arithmetic {arithmetic_name(mode)}"
            studies.append(Study(title, compare(contenders, job.windows, progress)))
            found += [_retrieve(job, contender) for contender in contenders if mode == asked.kv_activations[0]]
    if asked.activations or asked.peer_python:
        with _arithmetic_contenders(job) as contenders:
            title = "arithmetic against float32 throughout"
            studies.append(Study(title, compare(contenders, job.windows, progress)))
    text = str(asked.text) if asked.text else BUNDLED
    retrieval = tuple(item for items in found for item in items)
    return Quality(
        job.spec.name, text, sum(map(len, job.windows)), max(map(len, job.windows)), tuple(studies), retrieval
    )


def compare(
    contenders: Sequence[Contender], texts: Sequence[Sequence[int]], progress: Progress = lambda text: None
) -> tuple[Divergence, ...]:
    """All contenders against the first, over every token of `texts` that has one before it."""
    tallies = [Tally() for _ in contenders]
    for number, text in enumerate(texts):
        done = 0
        for blocks in zip(*(c.logits(text[:-1]) for c in contenders), strict=True):
            progress(f"comparing {100 * (number + done / len(text)) / len(texts):.0f} %")
            targets = np.asarray(text[done + 1 : done + 1 + len(blocks[0])])
            reference = Reference(log_softmax(blocks[0]), targets)
            for tally, logits in zip(tallies, blocks, strict=True):
                tally.add(reference, logits)
            done += len(targets)
    return tuple(t.result(c.name, c.kv_bytes_per_token) for t, c in zip(tallies, contenders, strict=True))


def _prepare(asked: Asked, progress: Progress) -> _Job:
    progress(f"looking for {asked.model}")
    path = resolve(asked.model)
    weights = open_weights(path)
    spec = model_from_gguf(weights.metadata, weights.facts, str(path))
    tokenizer = Tokenizer.from_metadata(weights.metadata)
    token_ids = tokenizer.encode(read_text(asked.text, asked.num_tokens), parse_special=False)
    prefix = begin_of_text(tokenizer)
    cut = windows(token_ids[: asked.num_tokens], prefix, min(asked.window, spec.max_context))
    if not cut:
        raise ConfigError(f"the text has {len(token_ids)} tokens; at least 2 are needed")
    room = min(spec.max_context - 1, len(token_ids))
    contexts = tuple(context for context in asked.contexts if context <= room)
    return _Job(asked, spec, path, cut, prefix + token_ids, contexts, progress)


@contextmanager
def _kv_contenders(job: _Job, activations: str) -> Iterator[list[Ours]]:
    """One arithmetic with each KV type, bf16 first."""
    with ExitStack() as stack:
        opened = []
        for kv_dtype in dict.fromkeys(("bf16", *job.asked.kv_dtypes)):
            opened.append(job.ours(kv_dtype, kv_dtype, activations))
            stack.callback(opened[-1].close)
        yield opened


@contextmanager
def _arithmetic_contenders(job: _Job) -> Iterator[list[Contender]]:
    """float32 products and KV first; then each mode with bf16 KV, as it would serve; then llama.cpp."""
    with ExitStack() as stack:
        opened: list[Contender] = [job.ours("fp32, fp32 KV", "fp32", "fp32")]
        stack.callback(opened[0].close)
        for mode in dict.fromkeys(job.asked.activations):
            opened.append(job.ours(f"{arithmetic_name(mode)}, bf16 KV", "bf16", mode))
            stack.callback(opened[-1].close)
        if job.asked.peer_python:
            opened.append(_peer(job, job.asked.peer_python))
            stack.callback(opened[-1].close)
        yield opened


def _peer(job: _Job, python: Path) -> LlamaCpp:
    if not job.path.is_file():
        raise ConfigError(f"llama.cpp reads GGUF files; {job.path} is a folder")
    threads = job.asked.threads or len(os.sched_getaffinity(0))
    return LlamaCpp(python, job.path, job.max_model_len, threads, job.spec.vocab_size)


def _retrieve(job: _Job, contender: Ours) -> list[Retrieval]:
    if job.contexts:
        job.progress(f"retrieving with {contender.name}")
    return retrieve(contender.name, contender.llm, job.filler, job.contexts)
