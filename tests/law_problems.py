"""Problems for the laws: what hypothesis draws, and how to run a rule on it without an optimizer.

Shapes: G (steps, batch, m, n) gradients; the state of a rule has a leading batch dimension.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from cosmos_optim.linalg.algebra import Algebra
from cosmos_optim.rules import cosmos
from cosmos_optim.rules.rule import Rule, Settings

# The paper's options, except the rank, which is drawn.
PAPER = {name: value for name, value in cosmos.PAPER.items() if name != "rank"}
# Options to draw from; {} is the defaults. `gamma` has no default here because the optimizer chooses it.
OPTIONS: Mapping[str, list[dict[str, Any]]] = {
    "cosmos": [{}, PAPER, {"row_beta2": None}, {"nesterov": False}, {"eps_placement": "inside"}, {"row_beta2": 0.5},
               {"equal_rows": True}],
    "muon": [{}, {"nesterov": False}, {"scaling": "original"}, {"normalize": True}, {"equal_rows": True}],
    "normuon": [{}, {"nesterov": False}, {"equal_rows": True}],
    "soap": [{}, {"frequency": 2}, {"squares": "momentum"}],
    "galore": [{}, {"update_gap": 2}],
    # O'GU is diagonal at the first step and its other entries are rounding noise: epsilon must exceed that noise.
    "cosmos-two-sided": [
        {"eps": 0.01},
        {"eps": 0.01, **PAPER},
        {"eps": 0.01, "eps_placement": "inside"},
        {"eps": 0.01, "row_beta2": 0.5},
    ],
    "soap-two-sided": [{"eps": 0.01}, {"eps": 0.01, "frequency": 2}],
}


@dataclass(frozen=True)
class Problem:
    """Gradients (steps, batch, m, n), a rank, a seed for what a law draws itself, and the number of an option."""

    drawn: Tensor
    rank: int
    seed: int
    option: int

    def gradients(self, rule: Rule) -> Tensor:
        """Return the gradients, cut so that G'G (two-sided: GG' too) has full rank if the rule has full bases."""
        m, n = self.drawn.shape[-2:]
        if rule.name == "soap-two-sided":
            return self.drawn[..., : min(m, n), : min(m, n)]
        return self.drawn[..., : min(m, n)] if rule.name == "soap" else self.drawn

    def hyper(self, rule: Rule, **more: Any) -> dict[str, Any]:
        """Return the rule's hyper-parameters for this problem, replaced by `more`."""
        options = OPTIONS.get(rule.name, [{}])
        return default_hyper(rule, self.rank) | options[self.option % len(options)] | more


def default_hyper(rule: Rule, rank: int) -> dict[str, Any]:
    """Return the defaults, with a small rank and a number for gamma if the rule has them."""
    h = dict(rule.defaults)
    return h | {k: v for k, v in {"rank": rank, "gamma": 0.3}.items() if k in h}


def random(seed: int, *shape: int) -> Tensor:
    """Return Gaussian numbers in fp64."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Draw gradients of shapes up to 40 x 40. The rank never exceeds a side: the basis would be arbitrary then."""
    m, n = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    batch, steps = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    seed = draw(st.integers(0, 10_000))
    G = random(seed, steps, batch, m, n) * 10.0 ** draw(st.integers(-3, 3))
    return Problem(G, draw(st.integers(1, min(m, n))), seed, draw(st.integers(0, 9)))


def initial_state(rule: Rule, G: Tensor, h: Settings) -> Any:
    """Return the state before the first step, for a stack of matrices G."""
    m, n = (G[0].numel(), 1) if rule.elementwise else G.shape[-2:]
    state = {}
    for name, slot in rule.slots(m, n, h).items():
        shape = G.shape if slot.axes == "*" else (*G.shape[:-2], *slot.shape)
        state[name] = torch.zeros(shape, dtype=slot.dtype or G.dtype)
    return rule.State(**state)


def advance(rule: Rule, G: Tensor, state: Any, step: int, h: Settings) -> tuple[Tensor, Any]:
    """Run one step of the rule; step 1 also computes its first basis."""
    alg = {} if rule.elementwise else {"alg": Algebra(*G.shape[-2:])}
    if step == 1 and rule.start is not None:
        state = rule.start(G, state, **alg)
    t = torch.full((*G.shape[:-2], 1, 1), float(step), dtype=G.dtype)
    return rule.direction(G, state, t, **alg, **rule.arguments(h))


def run(rule: Rule, G: Tensor, h: Settings) -> tuple[Tensor, Any]:
    """Return the directions of all steps, stacked, and the final state."""
    state, directions = initial_state(rule, G[0], h), []
    for step, gradient in enumerate(G, start=1):
        D, state = advance(rule, gradient, state, step, h)
        directions.append(D)
    return torch.stack(directions), state
