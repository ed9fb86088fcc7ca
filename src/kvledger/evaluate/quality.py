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
from typing import get_args

import numpy as np

from kvledger.errors import ConfigError, UnsupportedModel, about_file
from kvledger.evaluate.contender import Contender, Ours, arithmetic_name
from kvledger.evaluate.divergence import Divergence, Reference, Tally, log_softmax
from kvledger.evaluate.peer import LlamaCpp, check_peer
from kvledger.evaluate.retrieval import DEPTHS, Retrieval, make_needles, retrieve
from kvledger.evaluate.text import BUNDLED, begin_of_text, read_text, windows
from kvledger.spec.config import Activations, CacheConfig, ExecConfig
from kvledger.spec.from_gguf import model_from_gguf
from kvledger.spec.kv_computed import COMPUTED, kind_of
from kvledger.spec.model import ModelSpec
from kvledger.text.tokenizer import Tokenizer
from kvledger.weights.open import open_weights
from kvledger.weights.store import resolve

KV_DTYPES = tuple(sorted(COMPUTED, key=lambda name: name not in ("bf16", "fp32")))  # those that round least first
ACTIVATIONS: tuple[str, ...] = get_args(Activations)
WINDOW, CONTEXTS = 2048, (1024, 2048)
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """What to evaluate. `text` None: the bundled one; `contexts`: of retrieval; `peer_python` has llama.cpp.

    `kv_activations`: under which KV types are compared, and by the first of which facts are retrieved. `kv_dtypes`,
    `window` and `contexts` None: the usual ones, as far as model and text allow. Raises ConfigError, UnknownName for
    what no model could answer.
    """

    model: str = "smollm2"
    text: Path | None = None
    kv_dtypes: tuple[str, ...] | None = None
    activations: tuple[str, ...] = ACTIVATIONS
    kv_activations: tuple[str, ...] = ("int8x2",)
    num_tokens: int = 8192
    window: int | None = None
    contexts: tuple[int, ...] | None = None
    peer_python: Path | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_tokens", 2), ("window", 8)):
            if (value := getattr(self, name)) is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        for name in self.kv_dtypes or ():
            CacheConfig(kv_dtype=name)
        for mode in (*self.activations, *self.kv_activations):
            ExecConfig(self.threads, mode)  # type: ignore[arg-type]  # what it is here to find out
        self._check_something_to_compare()

    def _check_something_to_compare(self) -> None:
        no_types = self.kv_dtypes == ()
        if no_types and not self.activations and not self.peer_python:
            raise ConfigError("nothing to compare: name KV types, arithmetics or a Python with llama.cpp")
        if not no_types and not self.kv_activations:
            raise ConfigError("KV types are compared under an arithmetic, and none is named; int8x2 is usual")
        if no_types and self.contexts:
            raise ConfigError("facts are retrieved with each KV type, and none is named; bf16 is usual")


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
    notes: tuple[str, ...]  # what the user should know of the model, each once


@dataclass(frozen=True, slots=True)
class _Job:
    """What is asked, with everything found that the studies need."""

    asked: Asked
    spec: ModelSpec
    path: Path
    windows: list[list[int]]
    filler: list[int]
    kv_dtypes: tuple[str, ...]
    contexts: tuple[int, ...]
    progress: Progress

    @property
    def max_model_len(self) -> int:
        """Window or context of retrieval, and one sampled token."""
        longest = max(map(len, self.windows))
        return min(max(longest, *self.contexts, 1) + 1, self.spec.max_context)

    def ours(self, name: str, kv_dtype: str, activations: str) -> Ours:
        self.progress(f"loading {name}")
        threads, say = self.asked.threads, self.progress
        return Ours(name, str(self.path), kv_dtype, activations, self.max_model_len, threads, say)


def evaluate(asked: Asked, progress: Progress = lambda text: None) -> Quality:
    """Measure. Raises ConfigError, UnknownName, UnsupportedModel, FetchError, DamagedFile, DoesNotFit."""
    job = _prepare(asked, progress)
    studies: list[Study] = []
    found: list[list[Retrieval]] = []
    notes: list[str] = []
    for mode in asked.kv_activations if job.kv_dtypes else ():
        with _kv_contenders(job, mode) as contenders:
            title = f"KV types against bf16 KV, arithmetic {arithmetic_name(mode)}"
            studies.append(Study(title, compare(contenders, job.windows, progress)))
            notes += [note for contender in contenders for note in contender.notes]
            found += [_retrieve(job, contender) for contender in contenders if mode == asked.kv_activations[0]]
    if asked.activations or asked.peer_python:
        with _arithmetic_contenders(job) as contenders:
            title = "arithmetic against float32 throughout"
            studies.append(Study(title, compare(contenders, job.windows, progress)))
            notes += [note for contender in contenders for note in contender.notes]
    text = str(asked.text) if asked.text else BUNDLED
    retrieval = tuple(item for items in found for item in items)
    return Quality(
        job.spec.name, text, sum(map(len, job.windows)), max(map(len, job.windows)), tuple(studies), retrieval,
        tuple(dict.fromkeys(notes)),
    )  # fmt: skip


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
    if asked.peer_python:
        check_peer(asked.peer_python)
    progress(f"looking for {asked.model}")
    path = resolve(asked.model)
    if asked.peer_python and not path.is_file():
        raise ConfigError(f"llama.cpp reads GGUF files; {path} is a folder")
    with about_file(path.name):
        weights = open_weights(path)
        spec = model_from_gguf(weights.metadata, weights.facts, str(path))
        tokenizer = Tokenizer.from_metadata(weights.metadata)
    kv_dtypes, window = _kv_dtypes(asked, spec), _window(asked, spec)
    text = read_text(asked.text, max(asked.num_tokens, *(asked.contexts or CONTEXTS)))
    token_ids = tokenizer.encode(text, parse_special=False)
    prefix = begin_of_text(tokenizer)
    cut = windows(token_ids[: asked.num_tokens], prefix, window)
    if not cut:
        raise ConfigError(f"the text has {len(token_ids)} tokens; at least 2 are needed")
    filler = prefix + token_ids
    contexts = _contexts(asked, spec, tokenizer, filler) if kv_dtypes else ()
    return _Job(asked, spec, path, cut, filler, kv_dtypes, contexts, progress)


def _kv_dtypes(asked: Asked, spec: ModelSpec) -> tuple[str, ...]:
    """Those that were asked for, else those that this model's caches are computed with. Raises UnsupportedModel."""
    if asked.kv_dtypes is None:
        return tuple(name for name in KV_DTYPES if _is_computed(spec, name))
    for name in asked.kv_dtypes:
        _kind(spec, name)
    return asked.kv_dtypes


def _is_computed(spec: ModelSpec, kv_dtype: str) -> bool:
    try:
        return bool(_kind(spec, kv_dtype))
    except (ConfigError, UnsupportedModel):
        return False


def _kind(spec: ModelSpec, kv_dtype: str) -> str:
    return kind_of(spec.kv_layout(kv_dtype, CacheConfig(kv_dtype=kv_dtype).tokens_per_block))


def _window(asked: Asked, spec: ModelSpec) -> int:
    if asked.window is None:
        return min(WINDOW, spec.max_context)
    if asked.window > spec.max_context:
        raise ConfigError(
            f"a window of {asked.window:,} tokens is beyond {spec.name}, whose context is {spec.max_context:,}"
        )
    return asked.window


def _contexts(asked: Asked, spec: ModelSpec, tokenizer: Tokenizer, filler: list[int]) -> tuple[int, ...]:
    """Of retrieval. Raises ConfigError for one that was asked for and hides nothing, or more than there is."""
    room = min(spec.max_context - 1, len(filler))
    if asked.contexts is None:
        return tuple(context for context in CONTEXTS if context <= room)
    for context in asked.contexts:
        if context > room:
            what = "the text" if room == len(filler) else f"{spec.name} beside an answer"
            raise ConfigError(f"a context of {context:,} tokens to hide a fact in is more than {what} has: {room:,}")
        for depth in DEPTHS:
            make_needles(tokenizer, filler, context, depth)
    return asked.contexts


@contextmanager
def _kv_contenders(job: _Job, activations: str) -> Iterator[list[Ours]]:
    """One arithmetic with each KV type, bf16 first."""
    with ExitStack() as stack:
        opened = []
        for kv_dtype in dict.fromkeys(("bf16", *job.kv_dtypes)):
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
    threads = job.asked.threads or len(os.sched_getaffinity(0))
    return LlamaCpp(python, job.path, job.max_model_len, threads, job.spec.vocab_size)


def _retrieve(job: _Job, contender: Ours) -> list[Retrieval]:
    if job.contexts:
        job.progress(f"retrieving with {contender.name}")
    return retrieve(contender.name, contender.llm, job.filler, job.contexts)
