"""The matrices of a step: those of equal shape put in chunks of bounded size, and a rule run on one chunk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.cuda.fused import FusedAlgebra, chunk_matrices, fusable, polar_bytes, thin_bytes
from cosmos_optim.engine.entries import Entry, decay_of, signed_lr
from cosmos_optim.engine.layout import HERE, Place
from cosmos_optim.linalg.algebra import Algebra, sum_of_squares
from cosmos_optim.rules.common import newton_schulz_of
from cosmos_optim.rules.rule import State

# Bytes of gradients stacked at a time: on a GPU enough to fill it and little beside the model, on a CPU what stays in
# its cache, where stacks of large matrices win nothing.
CHUNK_BYTES = {"cpu": 2 << 20, "cuda": 256 << 20}
# Bytes of work buffers that the kernels may have in flight.
FUSED_BYTES = 1000 << 20

Tops = dict[Tensor, Sequence[Tensor]]  # of each parameter the largest |g| of its blocks


@dataclass(frozen=True, eq=False)
class Moving:
    """What a recorded step reads from the device instead: where the gradients of a chunk are, its rate and decay."""

    table: Tensor
    lr: Tensor
    decay: Tensor


@dataclass(frozen=True, eq=False)
class Matrix:
    """One block of an entry: 2-D views of parameter, gradient and state."""

    name: str
    index: int
    entry: Entry
    p: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    place: Place
    fresh: bool


def buckets(
    entries: Sequence[Entry], fresh: set[Tensor], copies: list[tuple[Tensor, Tensor]]
) -> Iterator[tuple[tuple[int, int], list[Matrix]]]:
    """All matrices of a group, those of equal shape, dtype and layout together.

    `copies` takes (parameter, copy) of those whose memory has no such matrices: their copies are to be written back.
    """
    found: dict[Any, list[Matrix]] = defaultdict(list)
    for e in entries:
        local = e.layout.local
        home = local(e.p)
        flat = e.layout.flat(home)
        if flat is not home:
            copies.append((home, flat))
        views = zip(e.layout.blocks(flat), e.layout.blocks(local(e.grad)),
                    e.layout.state_blocks(e.state, e.group), e.layout.blocks_mn, strict=True)  # fmt: skip
        several = len(e.layout.blocks_mn) > 1
        for i, (p, g, state, mn) in enumerate(views):
            name = f"{e.layout.name}[{i}]" if several else e.layout.name
            place = e.layout.place(i)
            key = (mn, p.shape, p.dtype, g.dtype, p.device, place, e.p in fresh)
            found[key].append(Matrix(name, i, e, p, g, state, place, e.p in fresh))
    for key, matrices in found.items():
        yield key[0], matrices


def local_algebra(matrices: list[Matrix]) -> type[Algebra]:
    """Kernels where the rule, the shapes and the memory of a bucket allow them, plain torch otherwise."""
    first = matrices[0]
    if not first.entry.rule.lazy or first.place is not HERE or not first.p.is_cuda:
        return Algebra
    lists = [[x.p for x in matrices], [x.grad for x in matrices], [x.state["M"] for x in matrices]]
    able = fusable(lists, rank_of(first), newton_schulz_of(first.entry.group), rows="v" in first.state)
    return FusedAlgebra if able else Algebra


def rank_of(matrix: Matrix) -> int:
    """Columns of the tracked basis, 1 without one."""
    return matrix.state["U"].shape[-1] if "U" in matrix.state else 1


def chunks(matrices: list[Matrix], local: type[Algebra]) -> Iterator[list[Matrix]]:
    """Parts of a bucket whose stacks or work buffers stay within the bound, as even as possible."""
    p, place = matrices[0].p, matrices[0].place
    bound = place.stack_bytes or CHUNK_BYTES.get(p.device.type, 64 << 20)
    size = max(1, bound // max(1, max(place.numel(p), matrices[0].entry.layout.undivided) * 4))
    if local is FusedAlgebra:
        size = chunk_matrices(p.shape[0], p.shape[1], rank_of(matrices[0]), FUSED_BYTES)
    return _even(matrices, size)


def starting_chunks(matrices: list[Matrix]) -> Iterator[list[Matrix]]:
    """The same for first bases by kernels, which need thin factors alone: few large stacks, or the host is too slow."""
    m, n = matrices[0].p.shape
    return _even(matrices, max(1, FUSED_BYTES // thin_bytes(m, n, rank_of(matrices[0]))))


def _even(matrices: list[Matrix], size: int) -> Iterator[list[Matrix]]:
    count = -(-len(matrices) // size)
    for i in range(count):
        yield matrices[i * len(matrices) // count : (i + 1) * len(matrices) // count]


def room_for(chunk: list[Matrix]) -> int:
    """Bytes that the products of a chunk need beside its work buffers."""
    m, n = chunk[0].p.shape
    return polar_bytes(len(chunk), m, n, newton_schulz_of(chunk[0].entry.group))


def run_chunk(
    chunk: list[Matrix],
    place: Place,
    m: int,
    n: int,
    skip: Tensor | None,
    record: dict[str, dict[str, float]] | None,
    local: type[Algebra],
    tops: Tops,
    moving: Moving | None = None,
) -> None:
    """The rule on one stack: load, start if new, direction, store, apply."""
    first, entry = chunk[0], chunk[0].entry
    rule, group = entry.rule, entry.group
    alg, lists, top = place.algebra(m, n, skip=skip, local=local), _lists(chunk), _top(chunk, tops)
    G, state, dtype = _loaded(chunk, alg, lists, top, moving)
    lr, decay = (signed_lr(group), decay_of(group)) if moving is None else (moving.lr, moving.decay)
    steps = [x.entry.state["step"] for x in chunk]
    t = torch.stack(steps).to(dtype).view(-1, 1, 1)

    def step(alg: Algebra, G: Any, state: State, t: Tensor, mine: slice) -> tuple[Any, State]:
        if first.fresh and rule.start is not None:
            state = state | rule.start(G, state, h=group, alg=alg)
        probe = None if record is None else Probe(record, [x.name for x in chunk[mine]])
        D, new = rule.direction(G, state, t, h=group, alg=alg, probe=probe)
        if probe is not None:
            moves = (top[mine] > 0).view(-1, 1, 1) if rule.constant_size else 1.0
            probe.update(alg.energy(D) / (m * n) * moves)
        return D, new

    D, new = place.run(step, alg, G, state, t)
    alg.store_state_(lists, new)
    noise = steps if group["stochastic_rounding"] else None
    alg.apply_([x.p for x in chunk], D, lr, decay, noise=noise, top=top if rule.constant_size else None)


def start_chunk(chunk: list[Matrix], m: int, n: int, skip: Tensor | None, tops: Tops) -> None:
    """The first bases of a stack, by kernels, to their homes."""
    entry, alg, lists = chunk[0].entry, FusedAlgebra(m, n, skip=skip), _lists(chunk)
    G, state, _ = _loaded(chunk, alg, lists, _top(chunk, tops), None)
    assert entry.rule.start is not None
    new = entry.rule.start(G, state, h=entry.group, alg=alg)
    alg.store_state_({name: lists[name] for name in new}, new)


def _lists(chunk: list[Matrix]) -> dict[str, list[Tensor]]:
    """The state by name."""
    return {name: [x.state[name] for x in chunk] for name in chunk[0].state}


def tops_of(entries: Sequence[Entry], peaks: Tensor) -> Tops:
    """`peaks` has a number for each block of each entry."""
    rest = iter(peaks.unbind())
    return {e.p: list(islice(rest, e.layout.count)) for e in entries}


def _top(chunk: list[Matrix], tops: Tops) -> Tensor:
    """The largest |g| of each matrix, (B,)."""
    return torch.stack([tops[x.entry.p][x.index] for x in chunk]).to(chunk[0].p.device)


def _loaded(
    chunk: list[Matrix], alg: Algebra, lists: dict[str, list[Tensor]], top: Tensor, moving: Moving | None
) -> tuple[Any, State, torch.dtype]:
    """Gradients and state as the algebra wants them, and the dtype of the arithmetic."""
    p, grads = chunk[0].p, [x.grad for x in chunk]
    dtype = torch.promote_types(p.dtype, torch.float32)
    if isinstance(alg, FusedAlgebra):
        alg.top = top.float()
    if moving is None:
        G = alg.load(grads, dtype)
    else:
        assert isinstance(alg, FusedAlgebra)
        G = alg.follow(grads, moving.table)
    return G, alg.load_state(lists, dtype), dtype


class Probe:
    """Turns what a rule shows of its insides into numbers by matrix name."""

    def __init__(self, record: dict[str, dict[str, float]], names: list[str]) -> None:
        self.record, self.names = record, names

    def __call__(self, *, G: Any, GU: Tensor, C: Tensor, soap: Tensor, muon: Tensor, alg: Algebra) -> None:
        """energy |GU|^2/|G|^2, drift 1 - |U_new'U|^2/r, ratio |A| / |gamma B sqrt(m)|."""
        total = alg.energy(G)
        values = {
            "energy": torch.where(total > 0, alg.energy_m(GU) / total, 0 * total),
            "drift": (1 - sum_of_squares(C) / C.shape[-1]).clamp_min(0),
            "ratio": (soap / muon).sqrt(),
        }
        for key, tensor in values.items():
            self._note(key, tensor)

    def update(self, mean_square: Tensor) -> None:
        """The RMS of the direction."""
        self._note("update_rms", mean_square.sqrt())

    def _note(self, key: str, tensor: Tensor) -> None:
        for name, value in zip(self.names, tensor.flatten().tolist(), strict=True):
            self.record.setdefault(name, {})[key] = value
