"""Checks of hyper-parameters that several rules share."""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor

from cosmos_optim.linalg.coefficients import COEFFICIENTS
from cosmos_optim.rules.rule import Settings


def require(condition: bool, name: str, value: object, wanted: str) -> None:
    """Raise ValueError for a hyper-parameter that is out of its range."""
    if not condition:
        raise ValueError(f"{name}={value!r} is not valid: {wanted}")


def require_number(name: str, value: object, *, flag: bool = False) -> None:
    """Raise ValueError if `value` is not a number; a `flag` may also be True or False."""
    hint = " (YAML reads 5e-4 as text, and 5.0e-4 as a number)" if isinstance(value, str) else ""
    is_bool = type(value).__name__ in ("bool", "bool_")  # numpy's, too
    is_valid = flag if is_bool else isinstance(value, (Real, Tensor))
    require(is_valid, name, value, f"give {'True or False, or ' if flag else ''}a number{hint}")


def require_integer(name: str, settings: Settings) -> None:
    """Raise ValueError if a setting is not a positive integer."""
    value = settings[name]
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    require(is_integer and value >= 1, name, value, "it must be a positive integer")


def require_fraction(name: str, value: object) -> None:
    """Raise ValueError if a value is not a number in [0, 1)."""
    require_number(name, value)
    require(0 <= value < 1, name, value, "it must lie in [0, 1)")  # type: ignore[operator]


def check_betas(settings: Settings) -> None:
    """Check the decay rates of both moments."""
    betas = settings["betas"]
    require(isinstance(betas, (tuple, list)) and len(betas) == 2, "betas", betas, "give two numbers (beta1, beta2)")
    for i, beta in enumerate(betas):
        require_fraction(f"betas[{i}]", beta)


def check_eps(settings: Settings) -> None:
    """Check epsilon. Zero is legal: 0/0 counts as 0."""
    require(settings["eps"] >= 0.0, "eps", settings["eps"], "it must be 0 or positive")


def check_momentum(settings: Settings) -> None:
    """Check what every rule with a momentum of whole matrices shares."""
    nesterov, dtype = settings["nesterov"], settings["momentum_dtype"]
    require(type(nesterov).__name__ in ("bool", "bool_"), "nesterov", nesterov,
            "give True or False (a number of steps to look ahead was measured to be worse than one)")  # fmt: skip
    require(dtype in (None, torch.float32, torch.bfloat16), "momentum_dtype", dtype, "torch.float32 or torch.bfloat16")


def check_newton_schulz(settings: Settings) -> None:
    """Check what every rule with a Newton-Schulz iteration shares."""
    require_integer("ns_steps", settings)
    known, dtype = sorted(COEFFICIENTS), settings["ns_dtype"]
    require(settings["ns_coefficients"] in known, "ns_coefficients", settings["ns_coefficients"], f"one of {known}")
    ok = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    require(ok, "ns_dtype", dtype, "a floating-point torch.dtype, or None to choose by device")
