"""llama.cpp through its Python binding's C functions: `python peer_llamacpp.py MODEL.gguf SHAPES THREADS`.

All sequences share one unified KV buffer; prompts are decoded one after the other, then all sequences step together.
"""

import ctypes
import json
import random
import sys
import time

import llama_cpp as lib


def quiet() -> object:
    @lib.llama_log_callback
    def drop(level, text, data):
        return None

    lib.llama_log_set(drop, ctypes.c_void_p(0))
    return drop  # the library keeps only a pointer


class Context:
    """One context of `cells` KV cells for `sequences` sequences."""

    def __init__(self, model, cells, sequences, threads):
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = cells, 2048, 512, max(1, sequences)
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self.handle = lib.llama_init_from_model(model, params)
        assert self.handle, "no context"

    def decode(self, entries):
        """entries: (token, position, sequence, wants logits)."""
        batch = lib.llama_batch_init(len(entries), 0, 1)
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, logits) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, logits
        status = lib.llama_decode(self.handle, batch)
        lib.llama_batch_free(batch)
        assert status == 0, f"llama_decode: {status}"
        lib.llama_get_logits(self.handle)  # waits

    def clear(self):
        lib.llama_memory_clear(lib.llama_get_memory(self.handle), True)

    def close(self):
        lib.llama_free(self.handle)


def run(model, batch, prompt, output, threads):
    rng = random.Random(0)
    context = Context(model, batch * (prompt + output) + 256, batch, threads)
    context.decode([(5, 0, 0, 0), (6, 1, 0, 1)])  # warm up
    context.clear()
    start = time.perf_counter()
    for s in range(batch):
        context.decode([(rng.randrange(100, 40000), p, s, int(p == prompt - 1)) for p in range(prompt)])
    prefill = time.perf_counter() - start
    start = time.perf_counter()
    for g in range(output):
        context.decode([(rng.randrange(100, 40000), prompt + g, s, 1) for s in range(batch)])
    decode = time.perf_counter() - start
    context.close()
    return {"prefill": batch * prompt / prefill, "decode": batch * output / decode}


def main():
    path, shapes, threads = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    keep = quiet()
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    assert model, "not loaded"
    for shape in shapes:
        print(json.dumps(run(model, *shape, threads)), flush=True)
    del keep


main()
