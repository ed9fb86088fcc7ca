"""Numba kernels, and the slow obvious version of each in reference.py. A program of them is run by a team of threads.

isa.py           which vector instructions        jit.py, warmup.py   compiling and caching
simd.py          vectors and the emitter          team.py             threads that run a program together
matmul*.py       products: integer, AMX, float32  ceilings.py         what the machine can do at best
packed.py        how both operands lie            turned.py           activations after a Hadamard matrix
joined.py        parts of a matrix put together   quantise.py, gated.py   activations for products
elementwise.py   embedding, norms, gates          routing.py          mixture of experts
kv_pages.py      how keys and values lie          kv_write.py, latent.py   rope and writing them
attention.py     attention over pages             kv_round.py      which way int8 rounds keys
"""
