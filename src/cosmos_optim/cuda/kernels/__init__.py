"""Triton kernels, one operation per file: the formula, the kernel, and its wrapper.

L4 to L11 and the letters are those of `rules.cosmos.direction`, the paper's Algorithm 1. In a kernel, a lower-case
letter is a pointer to the matrix, or to the table of addresses of a list. The strides of a matrix along m and n are sm
and sn, of B b_sm and b_sn, and u_part_stride is the distance between the two parts of U (see `tiles`). "By parts"
means: one partial sum for each block of rows, (batch, parts), which the next kernel adds up.
tests/cuda compares each kernel with the same formula in double precision.
"""
