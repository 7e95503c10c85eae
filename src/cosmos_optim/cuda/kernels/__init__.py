"""Triton kernels, one operation per file: the formula, the kernel, and its wrapper.

L4 to L11 are lines of the paper's Algorithm 1, see `rules.cosmos.direction`. "By parts" means: one partial sum for each
block of rows, (batch, parts), which the next kernel adds up.
tests/cuda compares each kernel with the same formula in double precision.
"""
