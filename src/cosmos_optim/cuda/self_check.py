"""Does this machine's compiler make working kernels? Asked once for each device, before the first step relies on it.

Kernels meet drivers, compilers and chips that nobody tried. A small problem through each family, compared with plain
torch, costs milliseconds beside the compilation that the first step needs anyway; a family that fails is not used,
and a warning says so.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from cosmos_optim.cuda import pointer_list as table
from cosmos_optim.cuda.kernels.correlate import correlate
from cosmos_optim.cuda.kernels.gains import finish, finish_torch, muon_gain, muon_gain_torch, norms, norms_torch
from cosmos_optim.cuda.kernels.gather import gather, scatter_
from cosmos_optim.cuda.kernels.jacobi import eigh
from cosmos_optim.cuda.kernels.launch import current
from cosmos_optim.cuda.kernels.momentum import momentum_
from cosmos_optim.cuda.kernels.power_step import power_sum, scaled
from cosmos_optim.cuda.kernels.project import overlap, project
from cosmos_optim.cuda.kernels.reductions import added
from cosmos_optim.cuda.kernels.residual import residual
from cosmos_optim.cuda.kernels.row_norm import even_rows, row_squares
from cosmos_optim.cuda.kernels.second_moment import second_moment
from cosmos_optim.cuda.kernels.soap_half import adapt
from cosmos_optim.cuda.kernels.split_precision import BASIS_SCALE, split, split_both
from cosmos_optim.cuda.kernels.syrk import squares_of, supports, symmetric_product, tiling
from cosmos_optim.cuda.kernels.thin_qr import orthonormal, thin_gram
from cosmos_optim.cuda.kernels.update import update_
from cosmos_optim.cuda.pointer_list import Matrices
from cosmos_optim.cuda.precompile import compile_ahead, rehearsing

# A wrong kernel is wrong by far more; the exact bounds are the tests' business.
CLOSE = 1e-2
# Sizes that fill more than one block: the first step then finds these kernels compiled.
SIZE = 256
# Kernels are others for every power of two: up to the usual rank, up to the paper's, and more, where blocks are larger.
RANKS = {"": 32, "middle ": 64, "wide ": 80}


def _far(*pairs: tuple[Tensor, Tensor]) -> float:
    """The largest |x - y| / |y|, infinite for NaN."""
    worst = max(float((x.double() - y.double()).norm() / y.double().norm()) for x, y in pairs)
    return worst if math.isfinite(worst) else math.inf


def _draw(*shape: int, device: torch.device) -> Tensor:
    """The same random numbers every time, without touching the user's generator."""
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device)


def _each(value: float, device: torch.device) -> Tensor:
    """A number for each of two matrices."""
    return torch.full((2, 1, 1), value, dtype=torch.float32, device=device)


def _copies(x: Tensor) -> list[Tensor]:
    """A stack as a list of matrices with memory of their own."""
    return [matrix.clone() for matrix in x]


def _columns(n: int, r: int, device: torch.device) -> Tensor:
    """Two orthonormal bases."""
    return torch.linalg.qr(_draw(2, n, r, device=device))[0].contiguous()


def _energy(x: Tensor) -> Tensor:
    return x.double().square().sum((1, 2), keepdim=True)


def _thin_products(device: torch.device, n: int, r: int) -> float:
    """G U, G'Y and the pass over the momentum."""
    g, m = _draw(2, 2, SIZE, n, device=device)
    G, M, U, top = Matrices.of(_copies(g)), Matrices.of(_copies(m)), _columns(n, r, device), g.abs().amax((1, 2))
    halves = split(U, torch.float16, scale=BASIS_SCALE)
    Y = project(G, halves, r, top)
    peak = Y.abs().amax((1, 2))
    C = correlate(G, split(Y, torch.float16, peak=peak), peak, r, top)
    GU, MU, _ = momentum_(M, G, 0.1, (halves, split(U, torch.bfloat16)), r, None, top)
    mean = torch.lerp(m, g, 0.1)
    return _far((Y, g @ U), (C, g.mT @ (g @ U)), (GU, g @ U), (MU, mean @ U), (M.stacked(), mean))


def passes(device: torch.device, size: str = "") -> float:
    """The thin products, the residual, B U and the update."""
    r = RANKS[size]
    m, w = _draw(2, 2, SIZE, SIZE, device=device)
    M, W, U = Matrices.of(_copies(m)), Matrices.of(_copies(w)), _columns(SIZE, r, device)
    minus, wide = split(m @ U, torch.bfloat16, scale=-1.0), split(U, torch.bfloat16)
    X, peak = m - (m @ U) @ U.mT, m.abs().amax((1, 2))[:, None].contiguous()
    buffer, square, factor = residual(M, M, 1.0, 0.0, minus, wide, peak, torch.float16)
    BU, left = overlap((m / 16).half(), split(U, torch.float16, scale=BASIS_SCALE), r)
    update_(W, buffer, minus, wide, torch.tensor([[0.9, 0.5]] * 2, dtype=torch.float32, device=device), None)
    found = _far(
        (buffer.float() / factor, X),
        (added(square) / factor.double().square(), _energy(X)),
        (BU, m @ U / 16),
        (added(left), _energy(X / 16)),
        (W.stacked(), 0.9 * w - 0.5 * buffer.float() - (m @ U) @ U.mT),
    )
    return max(found, _thin_products(device, SIZE, r))


def odd_rows(device: torch.device) -> float:
    """The thin products on rows that begin anywhere."""
    return _thin_products(device, SIZE + 1, RANKS[""])


def basis(device: torch.device, size: str = "") -> float:
    """Orthonormal columns and thin Gram matrices."""
    r = RANKS[size]
    Y = _draw(2, 2 * SIZE + 128, r, device=device) * torch.logspace(0, -4, r, dtype=torch.float32, device=device)
    Q = orthonormal(Y, torch.zeros_like(Y))
    exact, R = torch.linalg.qr(Y.double())
    exact = exact * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return _far((Q, exact), (thin_gram(Y, Q), Y.mT @ Q))


def products(device: torch.device, s: int = 2048) -> float:
    """Symmetric products in the blocks that results of width s get, on fewer of them."""
    width = 2 * SIZE + 128
    X = _draw(2, width + 64, width, device=device).half() / 32
    if not supports(X):
        return math.inf
    tiles = tiling(s, s)
    squares = squares_of(X, tiles)
    R = symmetric_product(X, X, weight=_each(0.5, device), tiles=tiles, squares=squares)
    Z = symmetric_product(R, R, alpha=0.5, beta=2.0, D=R, gamma=3.0, tiles=tiles)
    ZR, r, eye = symmetric_product(R, Z, tiles=tiles), R.float(), torch.eye(width, dtype=torch.float32, device=device)
    exact = 0.5 * X.float().mT @ X.float()
    Y = symmetric_product(R, R, alpha=0.5, beta=2.0, D=R, delta=0.5, E=ZR, gamma=3.0, tiles=tiles)
    first = torch.tensor([True, False], dtype=torch.bool, device=device)
    some = symmetric_product(Z, Z, tiles=tiles, out=ZR.clone(), only=(first, True))
    return _far(
        (R, exact), (Z, 0.5 * r @ r + 2 * r + 3 * eye), (ZR, r @ Z.float()), (squares.sum(1), _energy(exact).flatten()),
        (some, torch.stack([Z[0].float() @ Z[0].float(), ZR[1].float()])), (Y, Z.float() + 0.5 * ZR.float()),
    )  # fmt: skip


def eigen(device: torch.device, size: str = "") -> float:
    """Eigenvalues against torch's, and eigenvectors by what they make of them."""
    A = _draw(2, RANKS[size], RANKS[size], device=device)
    A = A @ A.mT
    values, V = eigh(A)
    return _far((values, torch.linalg.eigvalsh(A)), (V * values.unsqueeze(1) @ V.mT, A), (V.mT @ V @ A, A))


def _moments(device: torch.device, r: int) -> float:
    """The thin factors of a power step, both moments, and the SOAP half."""
    Y, N, V = _draw(3, 2, SIZE + 7, r, device=device)
    U, old = torch.linalg.qr(_draw(2, 2, SIZE + 7, r, device=device))[0].contiguous()
    S, V = Y.mT @ Y, V.abs()
    parts, peak, c = scaled(Y, S)
    e = 10 - torch.frexp(peak.view(-1, 1, 1)).exponent
    scale = (_energy(Y) + S.diagonal(dim1=1, dim2=2).sum(1).view(-1, 1, 1)).sqrt().float()
    power, _ = power_sum(U, S, Y, c, 0.5)
    new, real = second_moment(S, U, old, Y, 0.5, 0.0)
    t, ones = _each(3.0, device), _each(1.0, device).expand(-1, -1, r).contiguous()
    W, P, minus, squares = adapt(V, Y, N, ones, t, betas=(0.9, 0.5), eps=1e-8, inside=False, ahead=0.0)
    C, mean = U.mT @ old, 0.5 * V + 0.5 * Y * Y
    half, wide = split_both(U)
    exact = N / (1 - 0.9**3) / (mean / (1 - 0.5**3)).sqrt()
    return _far(
        (torch.ldexp(parts.float().sum(0)[..., :r], -e), Y / scale), (c, scale), (power, 0.5 * (U @ S / c / c + Y / c)),
        (new, 0.5 * (C @ S @ C.mT + S)), (real, ones), (W, mean), (P, exact), (-minus.float().sum(0)[..., :r], N),
        (squares.sum(2), torch.stack([_energy(P), _energy(N)]).view(2, 2)),
        (half.float().sum(0)[..., :r] / BASIS_SCALE, U), (wide.float().sum(0)[..., :r], U),
    )  # fmt: skip


def thin(device: torch.device, size: str = "") -> float:
    """The arithmetic on thin factors."""
    P, Y = _draw(2, 2, SIZE + 7, RANKS[size], device=device)
    b, norm = _each(0.3, device), _each(5.0, device).double()
    sums, rate = _energy(P).view(2, 1), torch.tensor(0.1, dtype=torch.float64, device=device)
    top = torch.tensor([2.0, 0.0], dtype=torch.float32, device=device)
    given = {"P": P, "BU": Y, "top": top, "left": sums, "squares": sums, "root": 40.0}
    (k, parts), (k_exact, exact) = (make(b, norm, rate, 0.9, **given) for make in (finish, finish_torch))
    assert parts is not None and exact is not None
    energies = (sums, b, sums, sums, norm, 3.0, 1e-5)
    homes = _copies(torch.zeros_like(P))
    scatter_([homes], gather([_copies(P)]), None)
    found = _far(
        (k, k_exact), (parts.float().sum(0), exact.float().sum(0)), (muon_gain(*energies), muon_gain_torch(*energies)),
        (torch.stack(homes), P), *zip(norms(sums, 4.0, 1e-30), norms_torch(sums, 4.0, 1e-30), strict=True),
    )  # fmt: skip
    return max(found, _moments(device, RANKS[size]))


def rows(device: torch.device) -> float:
    """Sums of squares by row, and the second moment of rows with all that follows from it."""
    X, P = (_draw(2, SIZE + 7, SIZE, device=device) / 16).half(), _draw(2, SIZE + 7, RANKS[""], device=device)
    b, norm = _each(0.3, device), _each(5.0, device).double()
    left, exact = row_squares(X), X.float().square().sum(2)
    v, g, energy = even_rows(torch.ones_like(P[..., :1]), left, norm, SIZE, 0.5, 1e-8, b=b, P=P)
    q = (0.09 / 5 * exact + P.square().sum(2))[..., None]
    mean = 0.5 + 0.5 * q / SIZE
    return _far((left, exact), (v, mean), (g, mean.rsqrt()), (energy.sum(1), (q / mean).sum((1, 2))))


FAMILIES: dict[str, Callable[[torch.device], float]] = {
    "odd_rows": odd_rows, "products": products, "small products": partial(products, s=1024), "rows": rows,
    **{f"{size}{family.__name__}": partial(family, size=size) for size in RANKS for family in (passes, basis, thin)},
    **{f"{size}eigen": partial(eigen, size=size) for size in ("", "middle ")},
}  # fmt: skip


# What was found of the families asked for so far.
_verdicts: dict[tuple[torch.device, str], bool] = {}


def at_width(s: int) -> str:
    """The family of products that stands for results of width s: each has blocks of its own."""
    return "products" if s > 1024 else "small products"


def at_rank(family: str, r: int) -> str:
    """The family of "passes", "basis", "thin" or "eigen" that stands for r columns."""
    return next((size for size, most in RANKS.items() if r <= most), "wide ") + family


def ask(device: torch.device, families: Sequence[str]) -> list[bool]:
    """Whether each family is sound; the kernels of all that were not asked for before are compiled side by side."""
    new = [family for family in dict.fromkeys(families) if (device, family) not in _verdicts]
    if new:
        compile_ahead(device, [partial(FAMILIES[family], device) for family in new])
    return [sound(device, family) for family in families]


def sound(device: torch.device, family: str) -> bool:
    """Whether a family of kernels works on this device; compared once, with a warning if it does not."""
    if (device, family) not in _verdicts:
        if rehearsing():  # a kernel that was not launched cannot be compared
            return True
        _verdicts[device, family] = _compared(device, family)
    return _verdicts[device, family]


def _compared(device: torch.device, family: str) -> bool:
    """Compile a family and compare it with torch."""
    try:
        with current(device):
            far, reason = FAMILIES[family](device), ""
    except Exception as error:  # whatever the compiler or the driver has to say
        far, reason = math.inf, f": {type(error).__name__}: {str(error)[:200]}"
    if far < CLOSE:
        return True
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    warnings.warn(
        f"the {family!r} kernels do not work on {name} (relative error {far:.1e}{reason}); plain torch does their "
        "work, slower. Please report this with the versions of torch and triton",
        stacklevel=2,
    )
    if family == "odd_rows":
        table.WIDE_ODD_ROWS = False
    return False
