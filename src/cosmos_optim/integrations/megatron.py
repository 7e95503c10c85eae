"""Megatron-LM: enter `Cosmos` in `emerging_optimizers.registry`, which Megatron reads when it is imported.

register()                                  # before megatron.core.optimizer is imported
OptimizerConfig(optimizer="cosmos", ...)    # or --optimizer cosmos

Megatron gives this optimizer the hidden matrices and keeps the other parameters in its own Adam.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from cosmos_optim import Cosmos

REGISTRY_READ = "megatron.core.optimizer.emerging_optimizers"


class MegatronCosmos(Cosmos):
    """`Cosmos` for Megatron: refuses matrices that tensor parallelism cut into plain tensors."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Check the matrices, and add the group. Not in the constructor: Megatron reads the names of its arguments."""
        held = param_group["params"]
        for p in [held] if isinstance(held, Tensor) else held:
            p = p[1] if isinstance(p, tuple) else p
            if getattr(p, "tensor_model_parallel", False) and _tensor_parallel_size() > 1:
                raise ValueError(
                    f"Megatron-LM's tensor parallelism cut a matrix into plain tensors of shape {tuple(p.shape)}, and "
                    "COSMOS would take each piece for a matrix: use tensor_model_parallel_size=1 (pipeline and data "
                    "parallelism work), or FSDP2 with DTensors"
                )
        super().add_param_group(param_group)


def _tensor_parallel_size() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_tensor_model_parallel_world_size())


def register(name: str = "cosmos") -> None:
    """Enter `MegatronCosmos` in the registry under this name."""
    if REGISTRY_READ in sys.modules:
        raise RuntimeError(
            "Megatron-LM has read its registry of optimizers already: call "
            "cosmos_optim.integrations.megatron.register() before megatron.core.optimizer is imported"
        )
    from emerging_optimizers import registry

    registry.register_optimizer(name)(MegatronCosmos)
