"""Is a fact far back in the context still found: one sentence with a number, hidden in text, asked for at the end.

The answer is forced through the model, digit by digit: a number is found when each of its tokens is the most likely
one, which is when greedy decoding would have written it. No chat template: the question is the sentence's own start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random

from kvledger.errors import ConfigError
from kvledger.evaluate.contender import force
from kvledger.llm import LLM
from kvledger.text.tokenizer import Tokenizer

FACTS = (
    "The number of the old lighthouse is",
    "The code that opens the garden gate is",
    "The ticket that won the village lottery was number",
    "The telephone number of the harbour office is",
)
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass(frozen=True, slots=True)
class Needle:
    """Token ids of one trial: `prompt` ends with the question, `answer` is the number."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Retrieval:
    """Trials at one depth of one context: how many numbers were found, and the mean log-probability of a number."""

    name: str
    context: int
    depth: float
    num_trials: int
    num_found: int
    logprob: float


def retrieve(name: str, llm: LLM, filler: Sequence[int], contexts: Iterable[int]) -> list[Retrieval]:
    """Every context and depth. `filler`: the token ids of the text that hides the fact, at least as many."""
    return [_at(name, llm, filler, context, depth) for context in contexts for depth in DEPTHS]


def _at(name: str, llm: LLM, filler: Sequence[int], context: int, depth: float) -> Retrieval:
    needles = make_needles(llm.tokenizer, filler, context, depth)
    answers = [force(llm.engine, needle.prompt, needle.answer) for needle in needles]
    num_found = sum(all(sample.rank == 1 for sample in answer) for answer in answers)
    logprob = sum(sample.logprob for answer in answers for sample in answer) / len(answers)
    return Retrieval(name, context, depth, len(answers), num_found, logprob)


def make_needles(tokenizer: Tokenizer, filler: Sequence[int], context: int, depth: float) -> list[Needle]:
    """A trial for each fact; the same numbers for every contender. Raises ConfigError."""
    rng = Random(f"{context} {depth}")
    return [make_needle(tokenizer, filler, context, depth, fact, rng) for fact in FACTS]


def make_needle(
    tokenizer: Tokenizer, filler: Sequence[int], context: int, depth: float, fact: str, rng: Random
) -> Needle:
    """Prompt and answer of `context` tokens in all; the fact stands between paragraphs, nearest to `depth`.

    Raises ConfigError where fact and question leave no room for text.
    """
    number = f" {rng.randrange(10_000, 100_000)}"
    sentence = tokenizer.encode(f"{fact}{number}.\n\n")
    question, answer = tokenizer.encode(f"\n\n{fact}"), tokenizer.encode(number)
    room = context - len(sentence) - len(question) - len(answer)
    if room < 1:
        raise ConfigError(f"a context of {context} tokens hides nothing: fact and question take {context - room}")
    text = list(filler[:room])
    cut = _border(tokenizer, text, round(depth * len(text)))
    return Needle((*text[:cut], *sentence, *text[cut:], *question), tuple(answer))


def _border(tokenizer: Tokenizer, text: Sequence[int], wanted: int) -> int:
    """The index nearest to `wanted` at which a paragraph begins; `wanted` itself in a text without paragraphs."""
    pieces = [tokenizer.token_bytes(token) for token in text]
    starts = [i for i in range(1, len(pieces)) if pieces[i - 1].endswith(b"\n") and not pieces[i].startswith(b"\n")]
    return min(starts, key=lambda i: abs(i - wanted), default=wanted)
