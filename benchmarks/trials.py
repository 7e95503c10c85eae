"""Optimizers and changes that are only tried: rules outside the package, and classes that take them as options.

A baseline at any memory, to see what COSMOS's memory costs:

    SoapPolar two-sided SOAP with an orthogonalized update: D = sqrt(max(m, n)) NS5(O P U')

Single changes, as options of TrialCosmos, TrialMuon, TrialNorMuon, TrialSoap and TrialAdam: see `TrialOptions`.

Letters are those of the rules: G (m, n) gradient, M momentum, N Nesterov's momentum, U O bases, V second moment.
`register()` enters everything by name, so that the lab finds it. Nothing here runs by kernels, unless a class keeps
the package's own rule.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import cosmos_optim
from cosmos_optim import Adam, Cosmos, Muon, NorMuon, param_groups
from cosmos_optim.hyperparameters import adam_rate, complete
from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.linalg.newton_schulz import NewtonSchulz
from cosmos_optim.linalg.normalization import bias_correction, normalize_rows, quotient, unit_rms
from cosmos_optim.linalg.subspace import power_step, take_first_bases
from cosmos_optim.optimizer import MatrixOptimizer
from cosmos_optim.optimizers import SOAP
from cosmos_optim.rules import RULES, adam, cosmos, muon, soap
from cosmos_optim.rules.rule import Rule, Settings, Slot, as_stored

NS5 = NewtonSchulz()
OUTER = {"embed.weight": "embedding", "head.weight": "head"}  # what the lab's names are


# -- baselines --------------------------------------------------------------------------------------------------------


def soap_polar(
    G: Tensor, state: soap.TwoSidedSoapState, t: Tensor, *, betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-8, frequency: int = 1, nesterov: bool = True, ns: NewtonSchulz = NS5, alg: Algebra | None = None,
) -> tuple[Tensor, soap.TwoSidedSoapState]:  # fmt: skip
    """Return the orthogonalized direction of two-sided SOAP: sqrt(max(m, n)) NS5(O P U')."""
    alg = alg or Algebra(*G.shape[-2:])
    (b1, b2), (M, V, L, U, K, O) = betas, state
    M = torch.lerp(M, G, 1 - b1)
    L = b2 * L + alg.tn((1 - b2) * G, G)
    K = b2 * K + alg.T.tn((1 - b2) * G.mT, G.mT)
    U, O = soap.updated_basis(U, L, t, frequency), soap.updated_basis(O, K, t, frequency)
    V = b2 * V + (1 - b2) * (O.mT @ G @ U).square()
    N = torch.add(b1 * M, G, alpha=1 - b1) if nesterov else M
    P = quotient(O.mT @ N @ U / bias_correction(b1, t + int(nesterov)), (V / bias_correction(b2, t)).sqrt() + eps)
    D = O @ P @ U.mT
    D = muon.SCALINGS["paper"](alg.m, alg.n) * alg.polar(D, alg.norm_sq(D), ns)
    return D, soap.TwoSidedSoapState(M, V, L, U, K, O)


_ITERATION = {"ns_steps": 5, "ns_coefficients": "ns5", "ns_dtype": None}
SOAP_POLAR = Rule(
    "soap-polar", {"betas": (0.9, 0.98), "eps": 1e-8, "frequency": 1, "nesterov": True, **_ITERATION},
    soap.TwoSidedSoapState, soap.slots_two_sided, soap_polar, take_first_bases, constant_size=True, shardable_sides="",
)  # fmt: skip


class SoapPolar(SOAP):
    """Two-sided SOAP, then Newton-Schulz; the arguments are those of `SOAP`."""

    rule = "soap-polar"


# -- changes of COSMOS and of AdamW -----------------------------------------------------------------------------------


class TrialState(NamedTuple):
    """COSMOS's state, and e (1, 1): the second moment of the gradient outside the basis."""

    M: Tensor
    U: Tensor
    S: Tensor
    V: Tensor
    v: Tensor | None
    e: Tensor


# fmt: off
def cosmos_trial(
    G: Tensor, state: TrialState, t: Tensor, *, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8,
    gamma: float = 0.25, nesterov: bool = True, row_beta2: float | None = 0.95, residual_guard: float = 1e-5,
    momentum_dtype: torch.dtype | None = None, basis_beta2: float | None = None, balance: float | None = None,
    ns: NewtonSchulz = cosmos.DEFLATED, alg: Algebra | None = None,
) -> tuple[Tensor, TrialState]:
    """Return COSMOS's direction, changed in two places.

    basis_beta2: decay of S, which turns the basis; None is that of V.
    balance: weight of the Muon half relative to sqrt(1 - r / n) |X| / sqrt(e): its momentum over its gradient, as the
        SOAP half has for each element. One eigenvalue for all directions outside of the basis is Pro-KLShampoo's model
        (arXiv 2605.06316); this weight is our reading of it. None is gamma.
    """
    alg = alg or Algebra(*G.shape[-2:])
    (b1, b2), (M, U_old, S, V, v, e), extra_step = betas, state, int(nesterov)
    b_S = b2 if basis_beta2 is None else basis_beta2
    c1, c2 = bias_correction(b1, t + extra_step), bias_correction(b2, t)

    M = as_stored(torch.lerp(M, G, 1 - b1), momentum_dtype)
    U = power_step(G, U_old, S, b_S, alg)
    GU, C = alg.mm(G, U), alg.un(U, U_old)
    E = alg.tn((1 - b_S) * GU, GU)
    S = cosmos.symmetric(b_S * C @ S @ C.mT + E)
    V = b2 * V + (1 - b2) * GU * GU
    e = b2 * e + (1 - b2) * (alg.norm_sq(G) - alg.norm_sq_m(GU)).clamp_min(0).to(e.dtype)
    N = torch.add(b1 * M, G, alpha=1 - b1) if nesterov else M
    NU = alg.mm(N, U)
    P = quotient(NU / c1, (V / c2).sqrt() + eps) * cosmos.resolved(V, GU, residual_guard)
    P = P * cosmos.tracked(S, E, residual_guard)
    X = N - NU @ U.mT
    X_sq = alg.norm_sq(X)
    B = unit_rms(alg.polar(X, X_sq, ns), alg)
    B = B * cosmos.above_noise(X_sq, alg.norm_sq_m(NU), residual_guard)
    weight: float | Tensor = gamma
    if balance is not None:
        ratio = quotient(X_sq.sqrt().to(e.dtype) / c1, (e / c2).sqrt())
        weight = balance * math.sqrt(1 - U.shape[-1] / alg.n) * ratio
    D = weight * B + P @ U.mT
    D, v = normalize_rows(D, v, row_beta2, max(eps, cosmos.ROW_FLOOR), alg)
    return unit_rms(D, alg), TrialState(M, U, S, V, v, e)


# fmt: on


def cosmos_trial_slots(m: int, n: int, settings: Settings) -> dict[str, Slot]:
    """Return COSMOS's state, and e (1, 1)."""
    return cosmos.slots(m, n, settings) | {"e": Slot("oo", (1, 1))}


class AdamRowsState(NamedTuple):
    """Adam's two moments, and the mean squares of the update's rows, kept at the parameter's size."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    row_sq: Tensor


def adam_rows(
    G: Tensor, state: AdamRowsState, t: Tensor, *, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-8,
    row_beta2: float = 0.95, alg: Algebra | None = None,
) -> tuple[Tensor, AdamRowsState]:  # fmt: skip
    """Return Adam's direction with rows of equal size on average, scaled back to the size of the whole.

    Each row is divided by the root of its running mean square. The mean squares are stored once for each element,
    because an elementwise rule has no other shape: this is a trial, and its memory does not count.
    """
    D, (m, v) = adam.direction(G, adam.AdamState(state.exp_avg, state.exp_avg_sq), t, betas=betas, eps=eps)
    row_sq = row_beta2 * state.row_sq + (1 - row_beta2) * D.square().mean(-1, keepdim=True)
    rows = quotient(D, row_sq.sqrt() + cosmos.ROW_FLOOR)
    return rows * quotient(D.norm(), rows.norm()), AdamRowsState(m, v, row_sq)


def adam_rows_slots(m: int, n: int, settings: Settings) -> dict[str, Slot]:
    """Return Adam's moments, and one more of their shape."""
    return adam.slots(m, n, settings) | {"row_sq": Slot("*", (m, n))}


COSMOS_TRIAL = Rule(
    "cosmos-trial", {**cosmos.DEFAULTS, "basis_beta2": None, "balance": None}, TrialState, cosmos_trial_slots,
    cosmos_trial, take_first_bases, deflates=True, constant_size=True, transposes_few_rows=True,
)  # fmt: skip
ADAM_ROWS = Rule(
    "adam-rows", {**adam.DEFAULTS, "row_beta2": 0.95}, AdamRowsState, adam_rows_slots, adam_rows, elementwise=True
)


class TrialOptions(MatrixOptimizer):
    """An optimizer with options that are only tried. Every default leaves it as it is.

    head_rule: True updates the output head as a hidden matrix, at the head's rate.
    outer_rows: True updates embedding and head by `adam_rows`.
    embedding_betas, head_betas: betas of AdamW there.
    gamma_attention, gamma_mlp: factors of gamma in attention and in the MLP.
    basis_beta2, balance: as in `cosmos_trial`.
    hidden_rates: factors of lr for the hidden matrices with these words in their names; gamma stays.
    decays: weight decay of "embedding", "head", "hidden", "vectors"; what is not named has that of the optimizer.
    cautious_decay: decay of those elements of hidden matrices for which it does not oppose the update, times lr, as in
        W <- W - lr decay W.
    lookahead: gradient and step start from x + b m instead of x, with m = 0.99 m + 0.01 (x_new - x_old) and b =
        `lookahead` times the share of the peak rate, from the peak until a quarter of it (EMA-Nesterov, arXiv
        2605.25395).
    """

    def __init_subclass__(cls) -> None:
        """Show the arguments of both parents: the lab looks there for the name of beta1."""
        super().__init_subclass__()
        both = [inspect.signature(base.__init__).parameters for base in cls.__bases__]  # type: ignore[misc]
        merged = {name: p for found in both for name, p in found.items() if p.kind is not p.VAR_KEYWORD}
        own = [p for name, p in merged.items() if name != "self"]
        cls.__signature__ = inspect.Signature(sorted(own, key=lambda p: p.kind))  # type: ignore[attr-defined]

    def __init__(
        self, params: Any, lr: float, *, head_rule: bool = False, outer_rows: bool = False,
        embedding_betas: tuple[float, float] | None = None, head_betas: tuple[float, float] | None = None,
        gamma_attention: float | None = None, gamma_mlp: float | None = None, basis_beta2: float | None = None,
        balance: float | None = None, hidden_rates: dict[str, float] | None = None,
        decays: dict[str, float] | None = None, cautious_decay: float = 0.0, lookahead: float = 0.0, **options: Any,
    ) -> None:  # fmt: skip
        groups = param_groups(params, self.rule) if isinstance(params, torch.nn.Module) else list(params)
        adam_lr = adam_rate(lr, options.get("adam_lr"), self.adam_ratio)
        usual = complete({}, RULES[self.rule], {**options, "lr": lr, "adam_lr": adam_lr}, self.soap_lr)
        gammas = {".attn.": gamma_attention, ".mlp.": gamma_mlp}
        betas = {"embed.weight": embedding_betas, "head.weight": head_betas}
        changed = []
        for group in (one for several in groups for one in _single(several)):
            ((name, _),) = group["params"]
            outer, hidden = name in OUTER, group["rule"] == self.rule and self.rule != "adam"
            part = OUTER.get(name, "hidden" if hidden else "vectors")
            if decays and part in decays:
                group["weight_decay"] = decays[part]
            if outer:
                group.setdefault("lr", adam_lr)
            if outer and betas[name] is not None:
                group["betas"] = betas[name]
            if name == "head.weight" and head_rule:
                group["rule"] = self.rule
            elif outer and outer_rows:
                group["rule"] = ADAM_ROWS.name
            if hidden and (basis_beta2 is not None or balance is not None):
                group |= {"rule": COSMOS_TRIAL.name, "basis_beta2": basis_beta2, "balance": balance}
            for module, factor in gammas.items():
                if hidden and factor is not None and module in name:
                    group["gamma"] = factor * usual["gamma"]
            for word, factor in (hidden_rates or {}).items():
                if hidden and word in name:
                    group["lr"] = factor * lr
                    if "gamma" in usual:
                        group.setdefault("gamma", usual["gamma"])
            changed.append(group)
        self._cautious_decay, self._lookahead = cautious_decay, lookahead
        self._peak = 0.0
        self._mean_step: dict[Tensor, Tensor] = {}
        self._at: dict[Tensor, Tensor] = {}  # x of the look-ahead, while the parameters hold x + b m
        super().__init__(_merged(changed), lr, **options)

    def _check_rules(self, groups: list[Any]) -> None:
        """Accept the rules of trials, in addition to AdamW's."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take one step, with the cautious decay and the look-ahead if they are on."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        decayed = [(p, group["lr"]) for group in self.param_groups for p in group["params"] if self._decays(group)]
        before = torch._foreach_mul([p for p, _ in decayed], 1.0) if decayed else []
        super().step()
        for (p, lr), old in zip(decayed, before, strict=True):
            p.sub_(old * ((old - p) * old >= 0), alpha=lr * self._cautious_decay)
        if self._lookahead:
            self._look_ahead()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state with that of the look-ahead, so that a run can be continued."""
        saved = super().state_dict()
        if self._at:
            at, mean_step = list(self._at.values()), list(self._mean_step.values())
            saved["lookahead"] = {"peak": self._peak, "at": at, "mean_step": mean_step}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the state of `state_dict`, look-ahead included."""
        rest = dict(state_dict)
        ahead = rest.pop("lookahead", None)
        super().load_state_dict(rest)
        if ahead is not None:
            params = [p for group in self.param_groups for p in group["params"]]
            self._peak = ahead["peak"]
            self._at, self._mean_step = (
                {p: saved.to(p.device, copy=True) for p, saved in zip(params, ahead[name], strict=True)}
                for name in ("at", "mean_step")
            )

    def _decays(self, group: dict[str, Any]) -> bool:
        hidden = all(p.dim() > 1 for p in group["params"]) and OUTER.keys().isdisjoint(group["param_names"])
        return bool(self._cautious_decay) and hidden

    def _look_ahead(self) -> None:
        """Move the parameters from x to x + b m."""
        rate = float(self.param_groups[0]["lr"])
        share = rate / self._peak if self._peak else 0.0
        rising, self._peak = rate > self._peak, max(self._peak, rate)
        b = 0.0 if rising or share < 0.25 else self._lookahead * share
        params = [p for group in self.param_groups for p in group["params"]]
        if not self._at:
            self._at = {p: p.clone() for p in params}
            self._mean_step = {p: torch.zeros_like(p) for p in params}
            return
        at, mean = list(self._at.values()), list(self._mean_step.values())
        torch._foreach_lerp_(mean, torch._foreach_sub(params, at), 0.01)
        torch._foreach_copy_(at, params)
        if b:
            torch._foreach_add_(params, mean, alpha=b)


def _single(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return a group for each parameter of a group."""
    for pair in group["params"]:
        yield {**group, "params": [pair]}


def _merged(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join groups with equal settings; hidden matrices stay first."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        key = repr(sorted((k, v) for k, v in group.items() if k != "params"))
        found.setdefault(key, {**group, "params": []})["params"] += group["params"]
    return list(found.values())


class TrialCosmos(TrialOptions, Cosmos):
    """COSMOS with `TrialOptions`."""


class TrialMuon(TrialOptions, Muon):
    """Muon with `TrialOptions`."""


class TrialNorMuon(TrialOptions, NorMuon):
    """NorMuon with `TrialOptions`."""


class TrialSoap(TrialOptions, SOAP):
    """SOAP with `TrialOptions`."""


class TrialAdam(TrialOptions, Adam):
    """AdamW with `TrialOptions`."""


OPTIMIZERS: dict[str, type[MatrixOptimizer]] = {
    "soap-polar": SoapPolar, "trial-cosmos": TrialCosmos, "trial-muon": TrialMuon,
    "trial-normuon": TrialNorMuon, "trial-soap": TrialSoap, "trial-adam": TrialAdam,
}  # fmt: skip


def register() -> None:
    """Enter the rules and the optimizers by name, next to the package's; a second call changes nothing."""
    RULES.update({rule.name: rule for rule in (SOAP_POLAR, COSMOS_TRIAL, ADAM_ROWS)})
    cosmos_optim.OPTIMIZERS.update(OPTIMIZERS)
