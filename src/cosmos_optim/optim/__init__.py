"""The optimizer classes: thin shells that bind a rule to the one engine."""

from cosmos_optim.optim.base import MatrixOptimizer
from cosmos_optim.optim.cosmos import Cosmos

OPTIMIZERS: dict[str, type[MatrixOptimizer]] = {"cosmos": Cosmos}

__all__ = ["OPTIMIZERS", "Cosmos", "MatrixOptimizer"]
