"""Lightning's Trainer: what `configure_optimizers` returns.

def configure_optimizers(self):
    steps = self.trainer.estimated_stepping_batches
    return configure(self, lr=1e-3, schedule=lambda opt: CosineAnnealingLR(opt, steps))

Fabric needs nothing of this: `model, opt = fabric.setup(model, Cosmos(model))`. LightningCLI passes bare
`model.parameters()`: call `cosmos_optim.mark(self)` at the end of the module's `__init__`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from cosmos_optim.integrations import build
from cosmos_optim.optimizer import MatrixOptimizer


def configure(
    module: nn.Module, *, schedule: Callable[[MatrixOptimizer], Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Return what `configure_optimizers` returns: the optimizer, and a scheduler that steps after every batch.

    Args:
        module: the LightningModule.
        schedule: makes a scheduler from the optimizer. Lightning would step it once an epoch; here it is every step.
        options: arguments of `cosmos_optim.integrations.build`: `lr`, `adam_lr`, `optimizer="muon"`, `decay="all"` and
            so on.
    """
    optimizer = build(module, **options)
    configured: dict[str, Any] = {"optimizer": optimizer}
    if schedule is not None:
        configured["lr_scheduler"] = {"scheduler": schedule(optimizer), "interval": "step"}
    return configured
