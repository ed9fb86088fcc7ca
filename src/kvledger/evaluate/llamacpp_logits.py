"""Logits of llama.cpp, written to stdout: `PEER_PYTHON llamacpp_logits.py MODEL.gguf CONTEXT THREADS`.

Run by a Python that has llama-cpp-python, never imported by kvledger. Says one line of JSON first; then reads lines of
JSON from stdin, each the token ids of one text, and answers each with float32[tokens, vocabulary] in native bytes. KV
cache in f16, micro-batches of 512, flash attention as llama.cpp chooses: its defaults. Without arguments it only finds
out whether the library can be loaded.
"""

import ctypes
import json
import os
import sys
from typing import Any, BinaryIO

import llama_cpp as lib

MICRO_BATCH = 512


def take_stdout() -> BinaryIO:
    """The real stdout for logits; whatever the library prints goes to stderr."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return out


def open_context(path: str, context: int, threads: int) -> tuple[Any, Any]:
    """Model and context. Exits with what went wrong."""
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    if not model:
        sys.exit(f"llama.cpp cannot load {path}")
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = context, MICRO_BATCH, MICRO_BATCH
    params.n_threads = params.n_threads_batch = threads
    handle = lib.llama_init_from_model(model, params)
    if not handle:
        sys.exit(f"llama.cpp has no context of {context} tokens")
    return model, handle


def decode(handle: Any, token_ids: list[int], first: int) -> Any:
    """One micro-batch at positions from `first` on, with logits of all its rows."""
    batch = lib.llama_batch_init(len(token_ids), 0, 1)
    batch.n_tokens = len(token_ids)
    for i, token in enumerate(token_ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, first + i, 1
        batch.seq_id[i][0], batch.logits[i] = 0, 1
    status = lib.llama_decode(handle, batch)
    lib.llama_batch_free(batch)
    if status:
        sys.exit(f"llama_decode says {status}")
    return lib.llama_get_logits(handle)


def main() -> None:
    """Answer every line of stdin."""
    if len(sys.argv) == 1:
        return
    out = take_stdout()
    model, handle = open_context(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    out.write(json.dumps({"vocab_size": vocab, "version": lib.__version__}).encode() + b"\n")
    out.flush()
    for line in sys.stdin:
        token_ids = json.loads(line)
        lib.llama_memory_clear(lib.llama_get_memory(handle), True)
        for first in range(0, len(token_ids), MICRO_BATCH):
            part = token_ids[first : first + MICRO_BATCH]
            logits = decode(handle, part, first)
            out.write(ctypes.string_at(logits, 4 * vocab * len(part)))
        out.flush()


if __name__ == "__main__":
    main()
