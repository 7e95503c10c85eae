"""torchtitan: an optimizer container, and a function that makes its configuration.

trainer_config.optimizer = cosmos(lr=5e-4, adam_lr=2e-3)

torchtitan's own containers sort parameters by patterns of names; this one by `param_groups`. It writes names as
torchtitan's checkpoints have them, without the parts that torch.compile and activation checkpointing insert.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer

from cosmos_optim import param_groups
from cosmos_optim.integrations import build, optimizer_class, split_off_routing
from cosmos_optim.routing.words import matches


class CosmosContainer(OptimizersContainer):  # type: ignore[misc]
    """One optimizer of this package for each part of the model."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """Which optimizer, its arguments, and `overrides` as `param_groups` takes them."""

        optimizer: str = "cosmos"
        arguments: dict[str, Any] = field(default_factory=dict)
        overrides: dict[str, Any] = field(default_factory=dict)

    def __init__(self, config: Config, *, model_parts: list[nn.Module]) -> None:
        """Build the optimizers of all parts."""
        if config.param_groups or config.optimizer_factory_kwargs_by_name:
            raise ValueError(
                "CosmosContainer sorts parameters itself: leave torchtitan's param_groups and "
                "optimizer_factory_kwargs_by_name empty, and give overrides={pattern: rule} for exceptions"
            )
        kind = optimizer_class(config.optimizer)
        routing, arguments = split_off_routing(config.arguments)
        self.model_parts = model_parts
        self.optimizers = []
        for part in model_parts:
            groups = param_groups(part, kind.rule, overrides=_used(config.overrides, part), **routing)
            for group in groups:
                group["params"] = [(canonical_fqn(name), p) for name, p in group["params"]]
            self.optimizers.append(build(groups, config.optimizer, **arguments))
        held = [p for opt in self.optimizers for group in opt.param_groups for p in group["params"]]
        self._validate_params(held)
        self._post_init(held)


def _used(overrides: dict[str, Any], part: nn.Module) -> dict[str, Any]:
    """Return the overrides that take effect in this part: a pattern need not do so in every pipeline stage."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in part.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    first = {next((x for x in overrides if any(matches(name, x) for name in own)), None) for own in names.values()}
    return {pattern: x for pattern, x in overrides.items() if pattern in first}


def cosmos(optimizer: str = "cosmos", overrides: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """Return the configuration for torchtitan's `optimizer` field.

    Args:
        optimizer: a name in OPTIMIZERS.
        overrides: pattern of names -> rule or settings, as `param_groups` takes them.
        arguments: of the optimizer, such as lr, adam_lr and weight_decay, and of `param_groups`: decay, split_heads.
    """
    return CosmosContainer.Config(optimizer=optimizer, overrides=overrides or {}, arguments=arguments)
