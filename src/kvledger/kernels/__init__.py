"""Numba kernels, and the slow obvious version of each in reference.py. A program of kernels is run by a team of threads.

isa.py          which vector instructions       jit.py        compiling and caching
simd.py         vectors, the emitter            team.py       threads that run a program together
matmul.py       quantised products              attention.py  paged attention, rope and KV write
elementwise.py  embedding, norms, gates         reference.py  all of it in NumPy
"""
