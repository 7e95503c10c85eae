"""timm: enter the optimizers in its registry.

register()
opt = timm.optim.create_optimizer_v2(model, "cosmos", lr=1e-3, weight_decay=0.05, param_group_fn=timm_groups)
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from cosmos_optim import OPTIMIZERS, param_groups
from cosmos_optim.integrations import build, optimizer_class
from cosmos_optim.optimizer import MatrixOptimizer
from cosmos_optim.routing.mark import mark_of


def register() -> None:
    """Enter this package's optimizers under their names, but leave names that timm has ("adam", "muon", "soap")."""
    from timm.optim import OptimInfo
    from timm.optim._optim_factory import default_registry

    taken = default_registry.list_optimizers()
    for name, kind in OPTIMIZERS.items():
        if name not in taken:
            about = f"cosmos_optim.{kind.__name__}; pass param_group_fn=cosmos_optim.integrations.timm.timm_groups"
            make = partial(_make, optimizer=name)
            default_registry.register(OptimInfo(name, make, description=about, has_betas=True))


def _make(params: Any, *, optimizer: str, **options: Any) -> MatrixOptimizer:
    """Build the optimizer, or refuse groups that timm made from a model: they hold bare tensors without names."""
    groups = list(params)
    bare = [group for group in groups if isinstance(group, dict) and "rule" not in group]
    if any(mark_of(p) is None for group in bare for p in group["params"]):
        raise ValueError(
            "timm made groups of unnamed parameters, so embeddings and the head cannot be recognized: give "
            "create_optimizer_v2(..., param_group_fn=cosmos_optim.integrations.timm.timm_groups), or call "
            "cosmos_optim.mark(model) before"
        )
    return build(groups, optimizer, **options)


def timm_groups(model: nn.Module, optimizer: str = "cosmos") -> list[dict[str, Any]]:
    """Return the groups of `param_groups`, without weight decay for `model.no_weight_decay()`."""
    exempt = set(getattr(model, "no_weight_decay", set)())
    overrides = {name: {"weight_decay": 0.0} for name, _ in model.named_parameters() if name in exempt}
    return param_groups(model, optimizer_class(optimizer).rule, overrides=overrides)
