"""What a parameter group may hold beside its parameters, whatever its rule, and the errors for all else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cosmos_optim.engine.layout import LAYOUTS
from cosmos_optim.rules import RULES, Rule
from cosmos_optim.rules.rule import require, two_sided
from cosmos_optim.suggest import close_to

# What every group has, whatever its rule.
COMMON: dict[str, Any] = {
    "weight_decay": 0.0,
    "maximize": False,
    "nonfinite": "skip",
    "missing": "skip",
    "stochastic_rounding": False,
    "side": "input",
    "split_sizes": None,
    "layout": "matrix",
}
NONFINITE = ("skip", "raise")
MISSING = ("skip", "zero")
# Keys that other code keeps in a group: the optimizer itself, torch's schedulers, and people's labels for loggers.
FOREIGN = (
    "params", "param_names", "lr", "rule", "initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum",
    "name", "lr_scale",
)  # fmt: skip
ROUTING = ("overrides", "head")  # arguments of `param_groups`


def rule_named(name: str) -> Rule:
    """The rule of this name, or the error that names them all."""
    if name not in RULES:
        raise ValueError(f"there is no rule {name!r}{close_to(name, RULES)}; the rules are {sorted(RULES)}")
    return RULES[name]


def in_one_form(own: str, group: Mapping[str, Any], both: bool) -> tuple[str, dict[str, Any]]:
    """The name of a group's rule, and the group without what told it: `rule` and `two_sided`.

    own: the optimizer's rule, which is the group's unless it names one, and may have two forms to choose from.
    both: the form of a group that does not ask.
    """
    left = dict(group)
    name = left.pop("rule", own)
    if name == own and two_sided(own) in RULES:
        name = two_sided(own) if left.pop("two_sided", both) else own
    return name, left


def check_keys(group: Mapping[str, Any], rule: Rule) -> None:
    """Nothing in a group that its rule does not know."""
    known = {**COMMON, **rule.hyper}
    for key in group:
        if key not in known and key not in FOREIGN:
            hint = f"{close_to(key, known)}; it has {sorted(known)}"
            raise ValueError(f"rule {rule.name!r} has no hyper-parameter {key!r}{hint}")
    layout = group.get("layout", "matrix")
    require(layout in LAYOUTS, "layout", layout, f"one of {LAYOUTS}")


def check_values(group: Mapping[str, Any]) -> None:
    """Values that every group has, within their ranges."""
    require(float(group["lr"]) >= 0, "lr", group["lr"], "it must be 0 or positive")
    require(group["weight_decay"] >= 0, "weight_decay", group["weight_decay"], "it must be 0 or positive")
    require(group["nonfinite"] in NONFINITE, "nonfinite", group["nonfinite"], f"one of {NONFINITE}")
    require(group["missing"] in MISSING, "missing", group["missing"], f"one of {MISSING}")
    require(group["side"] in ("input", "smaller"), "side", group["side"], "'input' or 'smaller'")
    sizes = group["split_sizes"]
    listed = isinstance(sizes, (list, tuple)) and all(isinstance(size, int) for size in sizes)
    require(sizes is None or listed, "split_sizes", sizes, "a list of the rows of each block")
