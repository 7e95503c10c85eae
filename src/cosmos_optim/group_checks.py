"""Check the groups before each step: other code may have changed or deleted settings, or given all groups one rate.

The state was allocated for some of the settings, so these must stay as they were. Hidden matrices run at `lr`, other
parameters at `adam_lr`: schedulers and loops that know only one rate write it into all groups. The errors and warnings
explain that to their author.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from cosmos_optim import hyperparameters
from cosmos_optim.rules import RULES
from cosmos_optim.rules.rule import Settings
from cosmos_optim.saved_groups import DTYPES, STRUCTURE, differing

# Rates that torch's schedulers write into every group when built: who does, and how to give one for each group.
OF_SCHEDULERS = {
    "max_lr": ("OneCycleLR", "OneCycleLR(max_lr={})"),
    "swa_lr": ("SWALR", "SWALR(swa_lr={})"),
    "initial_lr": ("a scheduler or a search for a rate", "CyclicLR(base_lr={}), and max_lr in the same ratio"),
}
NEARLY_ZERO = -1e-8  # A schedule may end a little below 0 by rounding, in a tensor of float32 too.
RATE_KEYS = (*OF_SCHEDULERS, "lr")
# Settings that code may change at any step. A wrong number would make the weights NaN, a wrong word have no effect.
CHANGEABLE = ("betas", "momentum", "beta2", "row_beta2", "gamma", "eps", "nonfinite", "missing")

Groups = Sequence[dict[str, Any]]


class GroupChecks:
    """Compare the groups of an optimizer with what they were when they were added.

    name: the class of the optimizer.
    kind_rates: the rate of the first group of hidden matrices ("lr") and of the first of AdamW's ("adam_lr"). Pickles
        call it `_first_rates`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.kind_rates: dict[str, float] = {}
        self._rates: dict[Tensor, float] = {}  # of each parameter when it was added; empty after a pickle
        self._last_shared: dict[str, float] | None = None  # rates at the last step, or when loaded with one lr
        self._structure: dict[Tensor, Settings] = {}  # what the state of each parameter was allocated for
        self._checked: dict[int, Settings] = {}  # the last correct `CHANGEABLE` of each group

    def add(self, groups: Groups) -> None:
        """Note the rates of new groups, and the settings that their state was allocated for."""
        for group in groups:
            self.kind_rates.setdefault(_rate_kind(group), float(group["lr"]))
            self._rates |= dict.fromkeys(group["params"], float(group["lr"]))
        self._structure |= _structure_of(groups)

    def note_structure(self, groups: Groups, *, loaded: bool = False) -> None:
        """Note the settings that the state of unknown parameters was allocated for, or of all if just loaded."""
        old = {} if loaded else self._structure
        self._structure = {p: old.get(p, settings) for p, settings in _structure_of(groups).items()}
        self._rates = {p: rate for p, rate in self._rates.items() if p in self._structure}

    def before_step(self, groups: Groups) -> None:
        """Raise ValueError for settings that are wrong or deleted, and raise or warn if all groups share a rate."""
        self.check_structure(groups)
        _check_settings(groups)
        self._check_changeable(groups)
        shared = _shared_rates(groups)
        if shared:
            self._check_one_rate(groups, shared)
        self._last_shared = shared

    def check_structure(self, groups: Groups) -> None:
        """Raise ValueError if a setting was changed that the state depends on."""
        for i, group in enumerate(groups):
            kept = self._structure.get(group["params"][0]) if group["params"] else None
            if kept is None or kept.items() <= group.items():
                continue
            for key in differing(kept, group, kept):
                raise ValueError(
                    f"group {i}: {key} is {group[key]!r} now, but its state was allocated for {key}={kept[key]!r}: set "
                    f"it back, or build another optimizer with {key}={group[key]!r}"
                )

    def _check_changeable(self, groups: Groups) -> None:
        """Raise ValueError if one of `CHANGEABLE` was changed to a value that the constructor would refuse."""
        for i, group in enumerate(groups):
            rule = RULES[group["rule"]]  # keys that it does not read belong to other code
            settings = {key: group[key] for key in CHANGEABLE if key in rule.defaults or key in hyperparameters.COMMON}
            if self._checked.get(i) == settings:
                continue
            try:
                hyperparameters.check_options(settings)
                computed = settings.get("gamma", 0) is None  # which happens only when a group is added
                hyperparameters.require(not computed, "gamma", None, "give a number, or add the group again")
            except ValueError as error:
                raise ValueError(f"group {i}: {error}. Nothing was changed by this step") from None
            self._checked[i] = settings

    def changed(self, group: Settings) -> list[Tensor]:
        """Return the parameters of a new group that were removed from another one, and had state of other settings."""
        return [p for p in group["params"] if (kept := self._structure.get(p)) and differing(kept, group, kept)]

    def _check_one_rate(self, groups: Groups, shared: Mapping[str, float]) -> None:
        """Raise ValueError if a scheduler gave all groups one rate, and they were built with more. Warn if a loop did.

        A loop without a scheduler may mean it, such as in a warm-up. Rates that differed, meet and then stay are at a
        floor (ReduceLROnPlateau's min_lr), which needs no warning.
        """
        kinds = [_rate_kind(group) for group in groups]
        if len(set(kinds)) < 2 or len(self.kind_rates) < 2 or self.kind_rates["lr"] == 0:  # older pickles have none
            return
        built = [self._rate_when_added(group) for group in groups]
        if len(set(built)) < 2:
            return
        key, rate = next(iter(shared.items()))
        lr, adam_lr = (self.kind_rates[kind] for kind in ("lr", "adam_lr"))
        if set(zip(kinds, built, strict=True)) == {("lr", lr), ("adam_lr", adam_lr)}:
            rates_built = f"{self._name} was built with lr={lr:g} for the hidden matrices and adam_lr={adam_lr:g}"
            if_meant = f" (build it with adam_lr={lr:g} if one rate is meant)"
        else:
            rates_built, if_meant = f"the groups of {self._name} were added with lr={_listed(built)}", ""
        if key in OF_SCHEDULERS:  # not repaired here, because schedulers also keep rates themselves
            writer, argument = OF_SCHEDULERS[key]
            of_most = max((group for group in groups if _rate_kind(group) == "lr"), key=_element_count)
            usual = self._rate_when_added(of_most) or lr
            rates = _listed(rate * own / usual for own in built)
            raise ValueError(
                f"{writer} set {key}={rate:g} in all groups, but {rates_built}: give one value for each group, "
                f"{argument.format(rates)}{if_meant}"
            )
        at_floor = self._last_shared is not None and self._last_shared.get("lr", rate) == rate
        has_scheduler = any("initial_lr" in group for group in groups)  # it may have a floor too
        if not at_floor and not has_scheduler:
            warnings.warn(
                # Without the rate, so that Python shows the same text only once, not at every step of a schedule.
                f"all groups run at one lr, but {rates_built}: scale each group's own rate by the same factor"
                f"{if_meant}",
                stacklevel=3,
            )

    def restore(self, kind_rates: Mapping[str, float], groups: Groups) -> None:
        """Continue with the rates of a pickle."""
        shared = _shared_rates(groups)
        self.kind_rates = dict(kind_rates)
        self._last_shared = shared if "lr" in shared else None

    def adopt_rates(self, groups: Groups) -> None:
        """Continue with the rates of a checkpoint. If a scheduler drove it with one rate, that is meant for both."""
        shared, built = _shared_rates(groups), self.kind_rates
        self.restore(built, groups)
        key = next((key for key in OF_SCHEDULERS if key in shared), None)
        if key is None or not self._has_two_rates():
            return
        replaced = " and ".join(f"{key}={rate:g}" for key, rate in built.items())
        warnings.warn(
            f"the checkpoint was saved with one rate for all groups, {key}={shared[key]:g}, which replaces {replaced} "
            f"of this {self._name}: to train with both, write lr and {key} into each group after loading",
            stacklevel=3,
        )
        self.kind_rates, self._rates = dict.fromkeys(built, shared[key]), {}

    def _rate_when_added(self, group: Mapping[str, Any]) -> float:
        """Return the rate that a group was added with, as far as it is known."""
        rate = self.kind_rates[_rate_kind(group)]
        return self._rates.get(group["params"][0], rate) if group["params"] else rate

    def _has_two_rates(self) -> bool:
        return len(set(self.kind_rates.values())) == 2


def _rate_kind(group: Mapping[str, Any]) -> str:
    """Return which of the two rates is that of a group: "lr" of the hidden matrices, or "adam_lr"."""
    return "adam_lr" if group["rule"] == "adam" else "lr"


def _element_count(group: Mapping[str, Any]) -> int:
    return sum(p.numel() for p in group["params"])


def _listed(rates: Iterable[float]) -> str:
    return f"[{', '.join(f'{rate:g}' for rate in rates)}]"


def _structure_of(groups: Groups) -> dict[Tensor, Settings]:
    """Return the settings that decide what state a group has, also its dtype, for each parameter."""
    keys = (*STRUCTURE, *DTYPES, "weight_correction")
    settings = [{key: group[key] for key in keys if key in group} for group in groups]
    return {p: kept for group, kept in zip(groups, settings, strict=True) for p in group["params"]}


def _check_settings(groups: Groups) -> None:
    """Raise a ValueError if a setting was deleted from a group, or its rate or decay is negative or not finite."""
    for i, group in enumerate(groups):
        kept = hyperparameters.SETTINGS_BY_RULE.get(group.get("rule", ""), frozenset(("rule",)))
        if not group.keys() >= kept:
            lost = sorted(kept - group.keys())
            raise ValueError(f"group {i} has lost its {lost}: set a value instead of deleting it")
        for key in ("lr", "weight_decay"):
            value = _on_host(group[key])
            if isinstance(value, Tensor):
                continue
            wanted = ""
            if not isinstance(value, Real) or not math.isfinite(value):
                wanted = "it must be a finite number"
            elif value < NEARLY_ZERO:
                wanted = "a schedule must not go on below 0 after its last step"
            if wanted:
                raise ValueError(
                    f"{key} of group {i} is {value!r}, which a scheduler or a loop has written: {wanted}. Nothing was "
                    "changed by this step"
                )


def _on_host(value: Any) -> Any:
    """Return a tensor on the CPU as a number, anything else as it is: every step would wait to read one on a GPU."""
    return value.item() if isinstance(value, Tensor) and value.device.type == "cpu" else value


def _shared_rates(groups: Groups) -> dict[str, float]:
    """Return the rates that all groups have in common, by key in the order of `RATE_KEYS`; 0 is none."""
    shared: dict[str, Any] = {}
    for key in RATE_KEYS:
        rates = [_on_host(group.get(key)) for group in groups]
        if all(isinstance(rate, (int, float)) and rate and rate == rates[0] for rate in rates):
            shared[key] = rates[0]
    return shared
