"""When a sequence ends by itself: the rules, in the order in which they are asked. Pure."""

from __future__ import annotations

from kvledger.sched.sequence import Sequence


def ending(seq: Sequence) -> tuple[str, int | None] | None:
    """(finish reason, stop reason) if the newest token ends the sequence, else None.

    End of text gives no stop reason, a stop token gives its id. Before `min_tokens` neither ends anything (the
    sampler does not choose them then; a scripted executor might).
    """
    token, params = seq.token_ids[-1], seq.params
    if seq.num_output_tokens > params.min_tokens or seq.num_output_tokens == params.max_tokens:
        if token in seq.eos_token_ids and not params.ignore_eos:
            return "stop", None
        if token in params.stop_token_ids:
            return "stop", token
    if seq.constraint is not None and seq.constraint.is_finished:
        return "stop", None
    return ("length", None) if seq.num_tokens >= seq.max_total_tokens else None
