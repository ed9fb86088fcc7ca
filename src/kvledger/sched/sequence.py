"""A request and the sequences that answer it: token ids and counters, the rest is derived. No tensors, no text."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvledger.spec.sampling import Constraint, SamplingParams


@dataclass(frozen=True, slots=True)
class Request:
    """What a user sends, in token ids. `seed` 0 stands in when the parameters give none."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0  # lower runs first
    seed: int = 0
    salt: bytes = b""  # separates prefixes in the cache
    eos_token_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None
    stepwise: bool = False  # stop after every token until told to go on: beam search


class Status(enum.Enum):
    """Where a sequence stands with the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """What runs: one choice of one request.

    Positions [0, num_computed) have their K/V in the blocks of `tables` (one list of block ids per layer group, in
    the order of `KVLayout.groups`; block i of a list holds positions [i × block_size, (i + 1) × block_size), and
    −1 stands where a window has passed and the block was given back). Tokens [num_computed, num_tokens) are to be
    computed. The newest token is sampled but not yet computed.
    """

    seq_id: int
    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    max_total_tokens: int  # prompt + output may not pass this
    choice: int = 0  # index among the request's n
    priority: int = 0  # lower runs first
    seed: int = 0
    salt: bytes = b""
    constraint: Constraint | None = None
    eos_token_ids: tuple[int, ...] = ()
    num_computed: int = 0
    num_cached: int = 0  # prompt tokens found in the prefix cache at first admission; recompute never counts
    tables: tuple[list[int], ...] = ()
    status: Status = Status.WAITING
    slots: tuple[list[int], ...] = ()  # of the host tier, in the shape of `tables`, while SWAPPED
    num_preemptions: int = 0
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: int | str | None = None  # the stop token id or string that ended it
    extra: dict[str, object] = field(default_factory=dict)
    arrival: int = 0  # order in which requests came
    num_forks: int = 0  # further choices that split off at the first token
    is_stepwise: bool = False
    is_held: bool = False  # stepwise and waiting to be told to go on
    num_scored: int = 0  # prompt tokens whose logprobs were delivered
    digests: list[bytes] = field(default_factory=list)  # chain of hashes of the full blocks, see cache.prefix_cache
    num_entered: int = 0  # blocks that were offered to the prefix cache

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED
