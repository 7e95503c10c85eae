"""Gradients of small matrices that leave something open: low rank, blocks, zeros, subspaces that change.

In exact arithmetic a rule's path is the same for all of them, however they are computed. Where a product is zero or a
column depends on others, rounding must not decide instead.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

F64 = torch.float64
# The gradient of shape (m, n) at a step, from a seed.
Family = Callable[[int, int, int, int], Tensor]

# From 1 to 40 rows: fewer than the rank (32) and more, with one column and with several hundred.
SHAPES = [
    (1, 1), (1, 600), (2, 40), (3, 17), (5, 3), (7, 100), (8, 8), (8, 64), (12, 1), (15, 500), (16, 64), (17, 20),
    (24, 33), (31, 31), (31, 200), (32, 64), (33, 31), (33, 64), (36, 100), (40, 2), (40, 20), (40, 600),
]  # fmt: skip
STEPS = 30


def draw(seed: int, *shape: int) -> Tensor:
    """Return normal numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def _low_rank(k: Callable[[int, int], int], every: int = 1) -> Family:
    """Return gradients of rank k(m, n) with a row space that changes after `every` steps."""
    return lambda m, n, t, s: draw(s + t, m, k(m, n)) @ draw(s + 500 + t // every, k(m, n), n)


def _quarter(m: int, n: int) -> int:
    return math.ceil(min(m, n) / 4)


def _alternating(m: int, n: int, t: int, s: int) -> Tensor:
    return draw(s + t, m, _quarter(m, n)) @ draw(s + 900 + t % 3, _quarter(m, n), n)


def _few_rows(m: int, n: int, t: int, s: int) -> Tensor:
    live = draw(s + 300 + t, m).argsort() < math.ceil(m / 4)
    return draw(s + t, m, n) * live[:, None]


def _dead(m: int, n: int, t: int, s: int) -> Tensor:
    """Return a gradient with rows and columns that are always zero."""
    return draw(s + t, m, n) * (draw(s + 998, m, 1) > 0) * (draw(s + 999, 1, n) > 0)


def _repeated_rows(m: int, n: int, t: int, s: int) -> Tensor:
    rows = draw(s + t, math.ceil(m / 3), n)
    return rows[torch.arange(m) % len(rows)]


def _blocks(count: int, equal: bool = False, at_once: bool = True) -> Family:
    """Return gradients of diagonal blocks of different sizes; or of equal ones; or of one block at a time."""

    def family(m: int, n: int, t: int, s: int) -> Tensor:
        G, p = torch.zeros(m, n, dtype=F64), min(count, m, n)
        for i in range(p):
            if at_once or t % p == i:
                rows, cols = slice(m * i // p, m * (i + 1) // p), slice(n * i // p, n * (i + 1) // p)
                block = G[rows, cols]
                block.copy_(draw(s + t if equal else s + 40 * i + t, *block.shape) * (1 if equal else 1 + i))
        return G

    return family


FAMILIES: dict[str, Family] = {
    "random": lambda m, n, t, s: draw(s + t, m, n),
    "a few directions and noise": lambda m, n, t, s: draw(s, m, 3) @ draw(s + 999, 3, n) + 0.3 * draw(s + t, m, n),
    "low rank that changes": _low_rank(_quarter),
    "low rank that changes after 7 steps": _low_rank(_quarter, every=7),
    "low rank that stays": _low_rank(_quarter, every=STEPS),
    "rank one": _low_rank(lambda m, n: 1),
    "three subspaces in turn": _alternating,
    "few rows": _few_rows,
    "few columns": lambda m, n, t, s: _few_rows(n, m, t, s).mT,
    "dead rows and columns": _dead,
    "repeated rows": _repeated_rows,
    "repeated columns": lambda m, n, t, s: _repeated_rows(n, m, t, s).mT,
    "blocks": _blocks(4),
    "equal blocks": _blocks(2, equal=True),
    "one block at a time": _blocks(4, at_once=False),
    "zero at first": lambda m, n, t, s: draw(s + t, m, n) * (t > 3),
    "zero at times": lambda m, n, t, s: draw(s + t, m, n) * (t % 3 == 0),
    "rank one, then full rank": lambda m, n, t, s: draw(s + t, m, n) if t > 7 else FAMILIES["rank one"](m, n, t, s),
    "signs": lambda m, n, t, s: draw(s + t, m, n).sign(),
    "identity": lambda m, n, t, s: torch.eye(m, n, dtype=F64),
}
