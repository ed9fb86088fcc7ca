"""Numba kernels, and the slow obvious version of each in reference.py."""
