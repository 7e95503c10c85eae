"""The hyper-parameters of a parameter group: their defaults, their checks, and errors that suggest the right name.

`complete` is the one validator: the optimizer uses it for its groups, `plan` for the groups that it would make.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from cosmos_optim.engine.layout import LAYOUTS
from cosmos_optim.rules import RULES, Rule
from cosmos_optim.rules.checks import require, require_number
from cosmos_optim.rules.rule import two_sided

# The hyper-parameters of every group, for any rule.
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
CHOICES: dict[str, tuple[str, ...]] = {
    "nonfinite": ("skip", "raise"),
    "missing": ("skip", "zero"),
    "side": ("input", "smaller"),
    "layout": LAYOUTS,
}
# Keys that other code keeps in a group: the optimizer itself, torch's schedulers, and people's labels for loggers.
FOREIGN = (
    "params", "param_names", "lr", "rule", "initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum",
    "name", "lr_scale",
)  # fmt: skip
ROUTING = ("overrides", "head")  # arguments of `param_groups`
SYNONYMS = {"learning_rate": "lr"}


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" with the nearest known name, or "" if none is near.

    >>> suggestion("gama", ["gamma", "rank"])
    " (did you mean 'gamma'?)"
    """
    near = [SYNONYMS[name]] if name in SYNONYMS else difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def check_arguments(optimizer: type, given: Iterable[str]) -> None:
    """Raise a TypeError if the optimizer's constructor does not have one of these arguments."""
    signature = inspect.signature(optimizer.__init__)  # type: ignore[misc]
    known = [name for name in signature.parameters if name != "self"]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        return
    for name in given:
        if name in ROUTING:
            raise TypeError(f"{name!r} is an argument of param_groups: give param_groups(model, {name}=...)")
        if name not in known:
            hint = suggestion(name, known)
            if not hint:
                hint = ": give it in a parameter group" if name in COMMON else f"; it has {', '.join(known)}"
            raise TypeError(f"{optimizer.__name__} has no argument {name!r}{hint}")


def rule_named(name: str) -> Rule:
    """Return the rule of this name; a ValueError names them all."""
    if name == "muon-norm":
        raise ValueError("rule 'muon-norm' is rule 'muon' with normalize=True now")
    if name not in RULES:
        raise ValueError(f"there is no rule {name!r}{suggestion(name, RULES)}; the rules are {sorted(RULES)}")
    return RULES[name]


def choose_rule(own: str, group: Mapping[str, Any], both_sides: bool) -> tuple[str, dict[str, Any]]:
    """Return the name of a group's rule, and the group without the keys that chose it: `rule` and `two_sided`.

    own: the optimizer's rule, for groups that name none. It may have a one-sided and a two-sided form.
    both_sides: whether a group that does not say gets the two-sided form.
    """
    rest = dict(group)
    name = rest.pop("rule", own)
    if name == own and two_sided(own) in RULES:
        name = two_sided(own) if rest.pop("two_sided", both_sides) else own
    return name, rest


def complete(group: Mapping[str, Any], rule: Rule, options: Mapping[str, Any], soap_lr: float) -> dict[str, Any]:
    """Return the group with all hyper-parameters of its rule, or raise a ValueError that names a wrong one.

    A value comes from the group itself, else from the optimizer's options, else from the defaults.

    options: the optimizer's arguments, `lr` and `adam_lr` among them.
    soap_lr: upper bound of `adam_lr` in gamma = lr / adam_lr.
    """
    defaults = {**COMMON, **rule.defaults}
    for key in group:
        if key not in defaults and key not in FOREIGN:
            hint = f"{suggestion(key, defaults)}; it has {sorted(defaults)}"
            raise ValueError(f"rule {rule.name!r} has no hyper-parameter {key!r}{hint}")
    filled = {**{key: options.get(key, default) for key, default in defaults.items()}, **group}
    for key, default in defaults.items():
        if isinstance(default, Real) and key != "row_beta2":  # which may be None
            require_number(key, filled[key], flag=isinstance(default, bool))
    filled.setdefault("lr", options["adam_lr" if rule.name == "adam" else "lr"])
    filled["lr"] = _rate(filled["lr"])
    _check_common(filled)
    rule.check(filled)
    if "gamma" in rule.defaults and filled["gamma"] is None:
        filled["gamma"] = _gamma(filled["lr"], options["adam_lr"], soap_lr)
    return filled


def _rate(lr: Any) -> Any:
    """Return a learning rate as a number or a tensor without dimensions."""
    require_number("lr", lr)
    if isinstance(lr, Tensor) and lr.dim() > 0:
        require(lr.numel() == 1, "lr", lr, "a tensor must have one element")
        return lr.view(())  # the same memory
    return lr


def _check_common(group: Mapping[str, Any]) -> None:
    """Check the values that every group has."""
    require(float(group["lr"]) >= 0, "lr", group["lr"], "it must be 0 or positive")
    require(group["weight_decay"] >= 0, "weight_decay", group["weight_decay"], "it must be 0 or positive")
    for key, choices in CHOICES.items():
        require(group[key] in choices, key, group[key], f"one of {choices}")
    sizes = group["split_sizes"]
    listed = isinstance(sizes, (list, tuple)) and all(isinstance(size, int) for size in sizes)
    require(sizes is None or listed, "split_sizes", sizes, "a list of the rows of each block")


def _gamma(lr: float | Tensor, adam_lr: float | Tensor, soap_lr: float) -> float:
    """Return the paper's gamma = lr / adam_lr, with adam_lr at most soap_lr."""
    means = "gamma=None is computed from lr and adam_lr: give gamma, or"
    require(float(adam_lr) > 0, "adam_lr", adam_lr, f"{means} a positive adam_lr")
    require(float(lr) > 0, "lr", lr, f"{means} the peak lr")
    bounded = float(adam_lr) > 1.0001 * soap_lr  # 2e-3 in a float32 tensor is more than 2e-3
    return float(lr) / (soap_lr if bounded else float(adam_lr))
