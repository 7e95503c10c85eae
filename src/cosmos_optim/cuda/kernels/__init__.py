"""Triton kernels, one operation a file: the formula, the kernel, its wrapper, and the same in plain torch."""

from cosmos_optim.cuda.kernels.launch import available

__all__ = ["available"]
