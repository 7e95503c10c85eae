"""The hyper-parameters of a parameter group: defaults, checks, and errors that suggest the right name.

`complete` is the only validator: the optimizer calls it for its groups, `plan` for the groups it would make.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cosmos_optim.engine.layout import LAYOUTS, SPLIT_SIDES
from cosmos_optim.linalg.coefficients import COEFFICIENTS
from cosmos_optim.rules import RULES, Rule
from cosmos_optim.rules.adam_mini import HEAD_ROWS
from cosmos_optim.rules.muon import SCALINGS
from cosmos_optim.rules.rule import TWO_SIDED_SUFFIX, two_sided_name

if TYPE_CHECKING:
    from cosmos_optim.optimizer import MatrixOptimizer

# The hyper-parameters of every group, for any rule.
COMMON: dict[str, Any] = {
    "weight_decay": 0.0, "maximize": False, "nonfinite": "skip", "missing": "skip", "stochastic_rounding": False,
    "weight_correction": False, "side": "auto", "split_sizes": None, "split_side": "output", "layout": "matrix",
}  # fmt: skip
# Names with a meaning here. In a group of a rule without such a setting they are errors; any other key is left alone.
SETTING_NAMES = frozenset(("rule", "two_sided", *COMMON)).union(*(rule.defaults for rule in RULES.values()))
# The settings that a group has once it is added, by its rule.
SETTINGS_BY_RULE = {name: frozenset(("lr", *COMMON, *rule.defaults)) for name, rule in RULES.items()}
ONLY_ARGUMENTS = ("adam_lr", "cuda_graphs", "offload", "head_dim")  # of optimizers, not keys of groups
ROUTING = ("overrides", "head", "decay", "split_heads")  # arguments of `param_groups`
SYNONYMS = {"learning_rate": "lr", "learnrate": "lr", "wd": "weight_decay"}
TORCHS_OWN = ("fused", "foreach", "capturable", "differentiable", "amsgrad")  # arguments of torch's optimizers only
# torch's optimizers have these in every group, so frameworks write them into every group. Muon has them for AdamW.
OF_EVERY_GROUP = ("params", "lr", "rule", "betas", "eps")

Check = Callable[[str, Any], None]


def require(condition: bool, name: str, value: object, wanted: str) -> None:
    """Raise ValueError for a hyper-parameter that is out of its range."""
    if not condition:
        raise ValueError(f"{name}={value!r} is not valid: {wanted}")


def require_number(name: str, value: object) -> None:
    """Raise ValueError if `value` is not a number."""
    hint = " (YAML reads 5e-4 as text, and 5.0e-4 as a number)" if isinstance(value, str) else ""
    require(isinstance(value, (Real, Tensor)) and not is_bool(value), name, value, f"give a number{hint}")


def is_bool(value: object) -> bool:
    """Return whether `value` is a bool, including numpy's."""
    return type(value).__name__ in ("bool", "bool_")


def require_bool(name: str, value: object) -> None:
    """Raise ValueError if `value` is neither a bool nor a number."""
    require(is_bool(value) or isinstance(value, (Real, Tensor)), name, value, "give True or False, or a number")


def _number(low: float, below: float, wanted: str, optional: bool = False) -> Check:
    """Return a check for a number in [low, below), or None if that is allowed."""

    def check(name: str, value: Any) -> None:
        if not (optional and value is None):
            require_number(name, value)
            require(low <= value < below, name, value, wanted)

    return check


def _integer(name: str, value: Any) -> None:
    require_number(name, value)
    require(isinstance(value, Integral) and int(value) >= 1, name, value, "it must be a positive integer")


def _integer_or_none(name: str, value: Any) -> None:
    if value is not None:
        _integer(name, value)


def _check(is_valid: Callable[[Any], bool], wanted: str) -> Check:
    return lambda name, value: require(is_valid(value), name, value, wanted)


def _one_of(*choices: Any) -> Check:
    return _check(lambda value: value in choices, f"give one of {choices}")


def _betas(name: str, value: Any) -> None:
    require(isinstance(value, (tuple, list)) and len(value) == 2, name, value, "give two numbers (beta1, beta2)")
    for i, beta in enumerate(value):
        _FRACTION(f"{name}[{i}]", beta)


def _rate(name: str, value: Any) -> None:
    require_number(name, value)
    if isinstance(value, Tensor):
        require(value.numel() == 1, name, value, "a tensor must have one element")
    _NOT_NEGATIVE(name, value)


def _is_sizes(value: Any) -> bool:
    sizes = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
    return all(isinstance(size, Integral) and not is_bool(size) for size in sizes)


_NOT_NEGATIVE = _number(0, math.inf, "it must be finite, and 0 or positive")
_FRACTION = _number(0, 1, "it must be in [0, 1)")
# A hyper-parameter means the same in every rule, so one check is enough.
CHECKS: dict[str, Check] = {
    **dict.fromkeys(("weight_decay", "eps"), _NOT_NEGATIVE),  # at eps = 0, 0/0 counts as 0
    **dict.fromkeys(("lr", "adam_lr"), _rate),
    **dict.fromkeys(("momentum", "beta2"), _FRACTION),
    **dict.fromkeys(("rank", "ns_steps", "frequency", "update_gap"), _integer),
    **dict.fromkeys(("head_dim", "block_rows"), _integer_or_none),
    **dict.fromkeys(("maximize", "normalize", "equal_rows", "two_sided", "cuda_graphs"), require_bool),
    **dict.fromkeys(("stochastic_rounding", "weight_correction"), require_bool),
    "betas": _betas,
    "gamma": _number(0, math.inf, "give 0 or a positive number, or None to compute it from the rates", optional=True),
    "row_beta2": _number(0, 1, "it must be in [0, 1); None is off", optional=True),
    "residual_guard": _number(0, 1, "it must be in [0, 1); 0 is off"),
    "scale": _number(1e-300, math.inf, "it must be positive"),
    "nesterov": _check(is_bool, "give True or False (looking ahead more than one step performed worse)"),
    "eps_placement": _one_of("outside", "inside"),
    "scaling": _one_of(*sorted(SCALINGS)),
    "squares": _one_of("gradient", "momentum"),
    "ns_coefficients": _one_of(*sorted(COEFFICIENTS)),
    "ns_dtype": _one_of(None, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    "momentum_dtype": _one_of(None, torch.float32, torch.bfloat16, torch.int8),
    "offload": _one_of(None, "cpu"),
    "adam_dtype": _one_of(None, torch.float32, torch.int8),
    "nonfinite": _one_of("skip", "raise"),
    "missing": _one_of("skip", "zero"),
    "side": _one_of("auto", "input", "smaller"),
    "layout": _one_of(*LAYOUTS),
    "split_sizes": _check(_is_sizes, "give the size of each block: one number, or a list"),
    "split_side": _one_of(*SPLIT_SIDES),
}


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" with the nearest known name, or "" if none is near.

    >>> suggestion("gama", ["gamma", "rank"])
    " (did you mean 'gamma'?)"
    """
    near = [SYNONYMS[name]] if name in SYNONYMS else difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def near_miss(key: str) -> str | None:
    """Return the name of ours that `key` misspells, or None if it is another word.

    A letter more or less, two swapped, or one other letter in a long name is a slip. One other letter in a short name
    is usually another word (role, size, beta1), and so is a name with a word more (no_weight_decay).

    >>> near_miss("gama"), near_miss("weight_decy"), near_miss("rnak"), near_miss("lr_scale"), near_miss("role")
    ('gamma', 'weight_decay', 'rank', None, None)
    """
    known = sorted({*SETTING_NAMES, *SYNONYMS})
    swapped = [name for name in known if sorted(name) == sorted(key)]
    # The cutoff allows one letter more or less in four (0.89) and another in eight (0.875), but not "eps2" (0.857).
    alike = [name for name in known if abs(len(name) - len(key)) <= 2]
    near = swapped or difflib.get_close_matches(key, alike, n=1, cutoff=0.86)
    if not near and key.isalpha():  # beta1 and beta3 are not slips for betas
        alike = [name for name in known if len(name) == len(key)]
        near = difflib.get_close_matches(key, alike, n=1, cutoff=0.8)
    return SYNONYMS.get(near[0], near[0]) if near else None


def check_options(options: Mapping[str, Any]) -> None:
    """Raise a ValueError for the first wrong value. Names that are not ours are not checked."""
    for name, value in options.items():
        if name in CHECKS:
            CHECKS[name](name, value)


def fill_in_defaults(group: dict[str, Any]) -> None:
    """Add settings that a group lacks because an older version made it."""
    for key, default in {**COMMON, **RULES[group["rule"]].defaults}.items():
        group.setdefault(key, default)


def adam_rate(lr: Any, adam_lr: Any, ratio: float) -> Any:
    """Return `adam_lr`, or `ratio` times lr if it is None. One constant for every lr would be wrong for fine-tuning."""
    if adam_lr is not None:
        return adam_lr
    check_options({"lr": lr})
    with torch.inference_mode(False):  # schedulers write into a rate that is a tensor
        return lr if ratio == 1 else ratio * lr


def check_arguments(optimizer: type[MatrixOptimizer], given: Iterable[str]) -> None:
    """Raise a TypeError if the optimizer's constructor does not have one of these arguments."""
    signature = inspect.signature(optimizer.__init__)
    known = [name for name in signature.parameters if name != "self"]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()):
        return
    for name in given:
        if name in ROUTING:
            own = "" if optimizer.rule == "cosmos" else f"{optimizer.rule!r}, "
            raise TypeError(f"{name!r} is an argument of param_groups: give param_groups(model, {own}{name}=...)")
        if name not in known:
            hint = suggestion("betas" if name == "momentum" else name, known)  # beta1 is COSMOS's momentum
            if name in TORCHS_OWN:
                hint = ": leave it out, it is for torch's optimizers"
            if not hint:
                is_key = name in COMMON and (name != "side" or RULES[optimizer.rule].one_sided)
                hint = ": give it in a parameter group" if is_key else f"; it has {', '.join(known)}"
            raise TypeError(f"{optimizer.__name__} has no argument {name!r}{hint}")


def rule_named(name: str) -> Rule:
    """Return the rule of this name; a ValueError names them all."""
    if not isinstance(name, str):  # the class of an optimizer, for example
        raise ValueError(f"rule={name!r} is not valid: give the name of a rule, one of {sorted(RULES)}")
    if name == "muon-norm":
        raise ValueError("rule 'muon-norm' is rule 'muon' with normalize=True now")
    if name not in RULES:
        raise ValueError(f"there is no rule {name!r}{suggestion(name, RULES)}; the rules are {sorted(RULES)}")
    return RULES[name]


def choose_rule(own: str, group: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[Rule, dict[str, Any]]:
    """Return the rule of a group, and the group without the keys that chose it: `rule` and `two_sided`.

    own: the optimizer's rule, for groups that name none. It may have a one-sided and a two-sided form.
    options: the optimizer's arguments; `two_sided` among them is the default of a group's.
    """
    rest = dict(group)
    name = rest.pop("rule", own)
    if name == own and two_sided_name(own) in RULES:
        name = two_sided_name(own) if rest.pop("two_sided", options.get("two_sided", False)) else own
    return rule_named(name), rest


def complete(group: Mapping[str, Any], rule: Rule, options: Mapping[str, Any], soap_lr: float) -> dict[str, Any]:
    """Return the group with its rule's name and hyper-parameters, or raise a ValueError that names a wrong one.

    A value comes from the group itself, else from the optimizer's options, else from the defaults.

    options: the optimizer's arguments, `lr` and `adam_lr` among them. `first_rates` are these two before any scheduler
        changed them, for gamma.
    soap_lr: upper bound of `adam_lr` in gamma = lr / adam_lr.
    """
    defaults = {**COMMON, **rule.defaults}
    for key in group:
        _check_key(key, rule, defaults)
    filled = {**{key: options.get(key, default) for key, default in defaults.items()}, **group}
    filled.setdefault("lr", options["adam_lr" if rule.name == "adam" else "lr"])
    check_options(filled)
    if filled["side"] == "smaller" and not rule.one_sided:
        _refuse_side(group, rule, options)
        filled["side"] = COMMON["side"]  # the optimizer's side is for its other groups
    if filled["weight_correction"] and filled["stochastic_rounding"]:
        raise ValueError(
            "weight_correction=True keeps updates below the last place of bfloat16, so stochastic_rounding=True has "
            "nothing to round: give a group one of them"
        )
    if isinstance(filled["lr"], Tensor) and filled["lr"].dim():
        filled["lr"] = filled["lr"].view(())  # a view, not a copy
    if "block_rows" in rule.defaults and filled["block_rows"] is None:
        filled["block_rows"] = options.get("head_dim") or HEAD_ROWS
    if "gamma" in rule.defaults and filled["gamma"] is None:
        lr, adam_lr = options.get("first_rates", (options["lr"], options["adam_lr"]))
        filled["gamma"] = _gamma(group.get("lr", lr), adam_lr, soap_lr)
    return filled | {"rule": rule.name}


def _check_key(key: str, rule: Rule, defaults: Mapping[str, Any]) -> None:
    """Raise a ValueError for a key of a group that has no effect, but that its author expects to have one."""
    if key in defaults or key in OF_EVERY_GROUP:
        return
    meant = key if key in SETTING_NAMES or key in ONLY_ARGUMENTS else near_miss(key)
    if meant is not None:
        hint = f" (did you mean {meant!r}?)" if meant != key else ""
        having = sorted(other.name for other in RULES.values() if meant in other.defaults)
        others = f" (the rules {having} have {meant!r})" if having and meant not in defaults else ""
        if meant == "two_sided" and two_sided_name(rule.name) in RULES:
            others = f" (its two-sided form is rule {two_sided_name(rule.name)!r})"
        if meant in ONLY_ARGUMENTS:
            instead = "; in a group, lr is AdamW's rate" if meant == "adam_lr" else ""
            others = f" ({meant!r} is an argument of the optimizer{instead})"
        raise ValueError(f"rule {rule.name!r} has no hyper-parameter {key!r}{hint}; it has {sorted(defaults)}{others}")


def _refuse_side(group: Mapping[str, Any], rule: Rule, options: Mapping[str, Any]) -> None:
    """Raise a ValueError if side="smaller" was asked for a rule that does not track a basis on one side.

    Without an error, the matrix would be transposed, and some rules depend on which side has the rows.
    """
    if "side" in group or (options.get("two_sided") and rule.name.endswith(TWO_SIDED_SUFFIX)):
        having = sorted(other.name for other in RULES.values() if other.one_sided)
        raise ValueError(
            f"rule {rule.name!r} does not track a basis on one side of a matrix, so side='smaller' means nothing for "
            f"it: leave it out (only the rules {having} have a side to choose)"
        )


def _gamma(lr: float | Tensor, adam_lr: float | Tensor, soap_lr: float) -> float:
    """Return the paper's gamma = lr / adam_lr, with adam_lr at most soap_lr."""
    means = "gamma=None is computed from lr and adam_lr: give gamma, or"
    require(float(lr) > 0, "lr", lr, f"{means} the peak lr")
    require(float(adam_lr) > 0, "adam_lr", adam_lr, f"{means} a positive adam_lr")
    bounded = float(adam_lr) > 1.0001 * soap_lr  # 2e-3 in a float32 tensor is more than 2e-3
    return float(lr) / (soap_lr if bounded else float(adam_lr))
