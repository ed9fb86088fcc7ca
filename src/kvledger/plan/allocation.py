"""Ledger 6, allocation: what reserving, paging and token-level allocation waste for a distribution of lengths.

Reserved is what engines did before paging: one contiguous piece of the longest possible length per request (Orca
Max), or the next power of two (Orca Pow2; Kwon et al., SOSP 2023, section 3.1). Paged wastes the rest of each
sequence's last block. Sharing counts n samples and beams of one prompt. Knows no device: tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from statistics import fmean

from kvledger.errors import ConfigError
from kvledger.plan.explain import Figure, Input, derive, given
from kvledger.plan.ledger import Ledger, Table
from kvledger.plan.workload import Workload, mean_rounded
from kvledger.units import cdiv

BLOCK_SIZES = (1, 8, 16, 32, 64, 128, 256)
MOST_OUTPUT, MOST_WIDTH = 4096, 16  # beams are simulated step by step
PAGED = "Kwon et al., PagedAttention, SOSP 2023"
_NOTES = (
    "Measured in real engines: reserved 20.4 % (Orca Max) to 38.2 % (oracle) of KV memory used, paged 96.3 % "
    f"({PAGED}, figure 2).",
    "Paging is not free: paged kernels cost up to 37 % in prefill and 12 % in decode (vAttention, ASPLOS 2025, as "
    "the lesson quotes it); the gain is that more requests run.",
)


def allocation(workload: Workload, max_len: int, block_size: int = 16, pool_tokens: int | None = None) -> Ledger:
    """Waste and concurrency of each way to allocate, over `workload`'s lengths at their end, capped at `max_len`.

    `pool_tokens` is the size of the pool (None: 16 × `max_len`). Raises ConfigError for sizes below 1.
    """
    if min(max_len, block_size) < 1:
        raise ConfigError(f"longest length {max_len} and block size {block_size} must be at least 1")
    lengths = [min(n, max_len) for n in workload.final_tokens()]
    pool = given("pool", pool_tokens or 16 * max_len, "tokens", "given" if pool_tokens else "16 longest requests")
    used = given("used", fmean(lengths), "tokens", workload.source, "assumed" if workload.prompt.assumed else "given")
    reserved = given("reserved", max_len, "tokens", "longest length allowed")
    sizes = sorted({*BLOCK_SIZES, block_size})
    rows = [
        _way("reserved", "max", reserved, used, pool),
        _way(
            "next power of two", "pow2", _held("pow2", [min(max_len, _pow2(n)) for n in lengths], workload), used, pool
        ),
        *(_way(f"paged, {b} tokens", f"block{b}", _held(f"block{b}", lengths, workload, b), used, pool) for b in sizes),
    ]
    columns = ("allocation", "held per request", "used", "wasted", "requests in the pool", "against reserved")
    base = rows[0][4]
    assert isinstance(base, Figure)
    table = Table(f"{workload.name}, longest {max_len} tokens", columns, tuple(_against(r, base) for r in rows))
    figures = (used, reserved, pool, *reservation(used, reserved), *last_block(block_size))
    return Ledger("allocation", "Where KV memory is wasted, and what paging gives back", figures, (table,), _NOTES)


def reservation(used: Figure | Input, reserved: Figure | Input) -> tuple[Figure, Figure]:
    """(share used, share wasted) in percent when `reserved` tokens are set aside and `used` come."""
    share = derive("reserved_used", "%", "100 × used ÷ reserved", used, reserved, label="reserved: used")
    return share, derive("reserved_wasted", "%", "100 − reserved_used", share, label="reserved: wasted")


def last_block(block_size: int) -> tuple[Figure, Figure]:
    """Tokens that the last block of a sequence wastes: at worst, and on average where lengths spread evenly."""
    size = given("B", block_size, "tokens", "block size")
    return (
        derive("worst_waste", "tokens", "B − 1", size, label="last block: worst waste"),
        derive("mean_waste", "tokens", "(B − 1) ÷ 2", size, label="last block: mean waste"),
    )


def _held(name: str, lengths: list[int], workload: Workload, unit: int = 1) -> Figure:
    source = f"mean over the lengths of {workload.name}" + (f", rounded up to {unit}" if unit > 1 else "")
    return given(f"held_{name}", mean_rounded(lengths, unit), "tokens", source)


def _way(title: str, key: str, held: Figure, used: Figure, pool: Figure) -> tuple[str | Figure, ...]:
    h, u, p = Input("held", held.value, "tokens", held.source), used.as_input(), pool.as_input()
    share = derive(f"used_{key}", "%", "100 × used ÷ held", u, h)
    waste = derive(f"wasted_{key}", "%", "100 − 100 × used ÷ held", u, h)
    return (title, held, share, waste, derive(f"requests_{key}", "", "floor(pool ÷ held)", p, h))


def _against(row: tuple[str | Figure, ...], base: Figure) -> tuple[str | Figure, ...]:
    requests = row[4]
    assert isinstance(requests, Figure)
    ratio = derive(
        f"gain_{requests.name}", "×", "requests ÷ base", requests.as_input("requests"), base.as_input("base")
    )
    return (*row, ratio)


def _pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


# ---------------------------------------------------------------------------------------------- sharing


def sharing(prompt: int, output: int, widths: Sequence[int] = (2, 4, 6), block_size: int = 16) -> Ledger:
    """Blocks of `widths` samples or beams of one prompt, shared (copy-on-write) against copied."""
    if min(prompt, output, block_size, *widths) < 1:
        raise ConfigError("prompt, output, block size and width must be at least 1")
    if output > MOST_OUTPUT or max(widths) > MOST_WIDTH:
        raise ConfigError(f"sharing is worked out for at most {MOST_OUTPUT:,} output tokens and width {MOST_WIDTH}")
    rows = tuple(
        (str(w), *_samples(prompt, output, w, block_size), *_beams(prompt, output, w, block_size)) for w in widths
    )
    columns = ("width", "copied", "samples", "saved", "beams", "saved ")
    notes = (
        f"Published, OPT-13B: parallel sampling saves 6.1–9.8 % on Alpaca and 16.2–30.5 % on ShareGPT, beam search "
        f"37.6–55.2 % and 44.3–66.3 % ({PAGED}, figure 15).",
        "Beams: parents drawn at random from all beams each step, an assumption; real beams agree more or less.",
    )
    table = Table(f"{prompt} prompt and {output} output tokens, blocks of {block_size}", columns, rows)
    return Ledger("sharing", "What n samples and beams of one prompt share", (), (table,), notes)


def _samples(prompt: int, output: int, width: int, block: int) -> tuple[Figure, Figure, Figure]:
    p, o, w, b = Input("p", prompt), Input("o", output), Input("w", width), Input("B", block)
    copied = derive(f"copied_{width}", "blocks", "w × ceil((p + o) ÷ B)", w, p, o, b)
    shared = derive(f"samples_{width}", "blocks", "p // B + w × (ceil((p + o) ÷ B) − p // B)", w, p, o, b)
    return copied, shared, _saved(f"samples_saved_{width}", shared, copied)


def _beams(prompt: int, output: int, width: int, block: int) -> tuple[Figure, Figure]:
    mean = fmean(beam_blocks(prompt, output, width, block, seed) for seed in range(8))
    held = given(f"beams_{width}", round(mean, 2), "blocks", "random parents, mean of 8 seeded runs", "assumed")
    copied = Input("copied", width * cdiv(prompt + output, block), "blocks")
    return held, derive(f"beams_saved_{width}", "%", "100 × (1 − held ÷ copied)", held.as_input("held"), copied)


def _saved(name: str, held: Figure, copied: Figure) -> Figure:
    return derive(name, "%", "100 × (1 − held ÷ copied)", held.as_input("held"), copied.as_input("copied"))


def beam_blocks(prompt: int, output: int, width: int, block_size: int, seed: int = 0) -> int:
    """Blocks that `width` beams hold in the end when each step draws every beam's parent at random.

    A block is shared by two beams as long as they had the same ancestor when its last token was written.
    """
    rng = Random(seed)
    first = prompt // block_size  # whole blocks of the prompt: always shared
    tables = [[0] * max(0, cdiv(prompt, block_size) - first)] * width  # ids of the blocks after those, per beam
    fresh = 1
    for position in range(prompt, prompt + output):
        parents = [rng.randrange(width) for _ in range(width)]
        grown = []
        for parent in parents:
            kept = tables[parent] if position % block_size == 0 else tables[parent][:-1]
            grown.append([*kept, fresh])  # a new block, or a copy of a shared one before writing
            fresh += 1
        tables = grown
    return first + len({block for table in tables for block in table})
