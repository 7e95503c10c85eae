"""Check that the groups of an optimizer built with two learning rates still have two.

Hidden matrices run at `lr`, other parameters at `adam_lr`. Schedulers and loops that know only one rate write it into
all groups. The functions here explain that to their author. Their arguments:

built: the rates that the optimizer was built with, {"lr": ..., "adam_lr": ...}, or only one of them.
shared: the rates that all groups have in common, by their key in the groups, in the order of `KEYS`.
name: the class of the optimizer.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

# Rates that torch's schedulers write into every group when built: who does, and how to give one for each group.
OF_SCHEDULERS = {
    "max_lr": ("OneCycleLR", "OneCycleLR(max_lr={})"),
    "swa_lr": ("SWALR", "SWALR(swa_lr={})"),
    "initial_lr": ("a scheduler or a loop", "CyclicLR(base_lr={}), and max_lr in the same ratio"),
}
KEYS = (*OF_SCHEDULERS, "lr")


def check_one_rate(
    groups: Sequence[Mapping[str, Any]], shared: Mapping[str, float], last_shared: Mapping[str, float] | None, *,
    built: Mapping[str, float], name: str,
) -> None:  # fmt: skip
    """Raise a ValueError if a scheduler gave all groups one rate, and they were built with two. Warn if a loop did.

    A loop without a scheduler may mean it, such as in a warm-up. Rates that differed, meet and then stay are at a floor
    (ReduceLROnPlateau's min_lr), which needs no warning.

    last_shared: `shared` at the last step; None before the first.
    """
    has_both_kinds = len({group["rule"] == "adam" for group in groups}) == 2
    if not _has_two_rates(built) or built["lr"] == 0 or not has_both_kinds:
        return
    key, rate = next(iter(shared.items()))
    rates_built = f"{name} was built with lr={built['lr']:g} for the hidden matrices and adam_lr={built['adam_lr']:g}"
    if_meant = f"(build it with adam_lr={built['lr']:g} if one rate is meant)"
    if key in OF_SCHEDULERS:  # not repaired here, because schedulers also keep rates themselves
        writer, argument = OF_SCHEDULERS[key]
        ratio = built["adam_lr"] / built["lr"]
        rates = ", ".join(f"{rate * (ratio if group['rule'] == 'adam' else 1.0):g}" for group in groups)
        raise ValueError(
            f"{writer} set {key}={rate:g} in all groups, but {rates_built}: give one value for each group, "
            f"{argument.format(f'[{rates}]')} {if_meant}"
        )
    at_floor = last_shared is not None and last_shared.get("lr", rate) == rate
    has_scheduler = any("initial_lr" in group for group in groups)  # it may have a floor too
    if not at_floor and not has_scheduler:
        warnings.warn(
            # Without the rate, so that Python shows the same text only once, not at every step of a schedule.
            f"all groups run at one lr, but {rates_built}: scale each group's own rate by the same factor {if_meant}",
            stacklevel=2,
        )


def adopt_one_rate(shared: Mapping[str, float], *, built: dict[str, float], name: str) -> dict[str, float]:
    """Return `built` after a checkpoint is loaded. If a scheduler drove it with one rate, that is meant for both."""
    key = next((key for key in OF_SCHEDULERS if key in shared), None)
    if key is None or not _has_two_rates(built):
        return built
    replaced = " and ".join(f"{key}={rate:g}" for key, rate in built.items())
    warnings.warn(
        f"the checkpoint was saved with one rate for all groups, {key}={shared[key]:g}, which replaces {replaced} of "
        f"this {name}: to train with both, write lr and {key} into each group after loading",
        stacklevel=3,
    )
    return dict.fromkeys(built, shared[key])


def _has_two_rates(built: Mapping[str, float]) -> bool:
    return len(set(built.values())) == 2
