"""Triton kernels, one operation a file: the formula, the kernel, and its wrapper.

tests/cuda compares each kernel with the same formula in double precision.
"""
