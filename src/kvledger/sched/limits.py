"""What may enter at all: a request that can never be served is refused before it waits. Pure checks, no state."""

from __future__ import annotations

from kvledger.errors import BadRequest, ContextTooLong
from kvledger.plan.pool import PoolPlan
from kvledger.sched.sequence import Request


def check_request(request: Request, pool: PoolPlan, max_model_len: int, vocab_size: int | None = None) -> int:
    """The most tokens (prompt and output) that the request may come to.

    Raises BadRequest for an empty prompt or ids outside the vocabulary, and ContextTooLong where the prompt and one
    token pass the context or the whole pool, or prompt and `max_tokens` pass the context. An output that could
    outgrow the pool is admitted and ends there with finish reason `length`.
    """
    prompt, limit = len(request.prompt_token_ids), request.params.max_tokens
    if not prompt:
        raise BadRequest("the prompt is empty; give at least one token", "prompt")
    if vocab_size is not None:
        _check_ids(request, vocab_size)
    if prompt + (limit or 1) > max_model_len:
        raise ContextTooLong(_context_message(prompt, limit, max_model_len), "max_tokens" if limit else "prompt")
    held = pool.longest(max_model_len)
    if prompt + 1 > held:
        raise ContextTooLong(
            f"the prompt's {prompt} tokens and one more need {pool.layout.blocks_for(prompt + 1)} blocks, the whole "
            f"pool has {pool.num_blocks} (at most {held} tokens): shorten it or give more KV memory", "prompt",
        )  # fmt: skip
    longest = prompt + limit if limit else max_model_len
    return min(longest, max_model_len, held + 1)  # the last token is sampled, never computed


def _context_message(prompt: int, limit: int | None, max_model_len: int) -> str:
    head = f"the context is {max_model_len} tokens; the prompt has {prompt}"
    if prompt + 1 > max_model_len:
        return f"{head}, which leaves no room for an answer: shorten it to at most {max_model_len - 1}"
    return f"{head} and max_tokens asks for {limit} more: ask for at most {max_model_len - prompt}"


def _check_ids(request: Request, vocab_size: int) -> None:
    fields = {
        "prompt": request.prompt_token_ids,
        "stop_token_ids": request.params.stop_token_ids,
        "allowed_token_ids": request.params.allowed_token_ids or (),
        "logit_bias": request.params.logit_bias,
    }
    for name, ids in fields.items():
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            worst = next(i for i in ids if not 0 <= i < vocab_size)
            raise BadRequest(f"token id {worst} in {name} is outside the vocabulary of {vocab_size}", name)
