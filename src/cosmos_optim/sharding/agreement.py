"""Compare what the ranks of a mesh build: parameters in another order would train wrong without an error.

Ranks send a hash of their description through the store that connected their process group, and the description itself
only if the hashes differ. That needs no process group and no GPU, and waiting has an end: a rank that builds an
optimizer alone continues after some seconds, and the ranks are compared at their first step, where all must be present.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import reduce
from itertools import zip_longest
from operator import and_
from typing import Any

import torch.distributed as dist
from torch import Tensor

from cosmos_optim.engine.layout import Layout
from cosmos_optim.sharding.mesh import ranks_in
from cosmos_optim.sharding.sharded_layout import ShardedLayout

LONGEST_PAUSE_S = 0.25  # between two looks at the store

Line = tuple[str, str]  # what is described, and its value


def describe(
    groups: Mapping[int, Mapping[str, Any]], settings: Collection[str], layouts: Mapping[Tensor, Layout]
) -> Description:
    """Describe groups, by number, with these of their settings."""
    lines = []
    for i, group in groups.items():
        names = group.get("param_names") or [None] * len(group["params"])
        held = {key: group[key] for key in settings if key in group}
        lines += _lines_of(f"group {i}", held, names, [layouts[p] for p in group["params"]])
    return Description(lines)


def _lines_of(
    group: str, settings: Mapping[str, Any], names: Iterable[str | None], layouts: Sequence[Layout]
) -> list[Line]:
    """Describe a group: its settings, then its parameters. Those that are not sharded may differ between ranks."""
    keys = sorted(settings, key=lambda key: (key != "rule", key))  # another rule has other settings: name it first
    lines = [(f"{key} of {group}", _text(settings[key])) for key in keys]
    for i, (name, layout) in enumerate(zip(names, layouts, strict=True)):
        value = "not sharded"
        if isinstance(layout, ShardedLayout):
            called = "" if name is None else f"{name!r} of "
            where = f"placements {layout.placements} on a mesh of shape {tuple(layout.mesh.shape)}"
            value = f"{called}shape {layout.shape}, {layout.dtype}, {where}"
        lines.append((f"parameter {i} of {group}", value))
    return lines


def _text(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return "a tensor" if value.is_meta else repr(float(value))


def ranks_of(layouts: Sequence[Layout]) -> list[int]:
    """Return the ranks that share these parameters; none if no mesh contains the ranks of all others."""
    ranks = [ranks_in(mesh) for mesh in {x.mesh for x in layouts if isinstance(x, ShardedLayout)}]
    largest = max(ranks, key=lambda x: (len(x), sorted(x)), default=set())
    return sorted(largest) if all(largest >= x for x in ranks) else []


class Description:
    """What a rank builds, and whether all ranks that share it have built the same."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.text = json.dumps(lines)
        self.digest = _digest(self.text)
        self.agreed = False


# Descriptions that wait for other ranks, by those ranks, in the order in which they were built: several may be equal,
# and the first of one rank belongs to the first of another. They are forgotten with their optimizers.
_waiting: dict[tuple[int, ...], list[weakref.ref[Description]]] = defaultdict(list)
# The round that this rank left, because another was missing. If that one came at the same moment, it counted this rank
# too, and the round has a result.
_left: dict[tuple[int, ...], int] = {}


def compare(mine: Description, ranks: Sequence[int], seconds: float) -> bool:
    """Raise ValueError on all ranks if they build different things. Return False if some rank has not come in time.

    A round ends when all ranks are in it. It settles the descriptions that every rank waits for: a rank that continued
    without the others may wait for one more than they do. Of equal ones it settles as many as every rank has. If there
    is no such description, the ranks differ.
    """
    if len(ranks) < 2 or mine.agreed or dist.get_backend() == "fake":  # a fake process group has no other ranks
        return True
    store = dist.PrefixStore(f"cosmos_optim/{_digest(str(list(ranks)))}", dist.distributed_c10d._get_default_store())
    team, end = tuple(ranks), time.monotonic() + seconds
    waiting = _waiting[team]
    if mine not in _alive(waiting):
        waiting.append(weakref.ref(mine))
    while not mine.agreed:
        common: Counter[str] | None
        left = _left.pop(team, None)
        if left is not None and store.check([f"{left}/result"]):
            round_, common = left, _result(store, left)
        else:
            round_ = store.add("round", 0)
            common = _meet(store, round_, [x.digest for x in _alive(waiting)], ranks, end)
        if common is None:
            _left[team] = round_
            return False
        if not common:
            waiting.remove(weakref.ref(mine))
            store.set(f"{round_}/text/{dist.get_rank()}", mine.text)
            texts = [json.loads(store.get(f"{round_}/text/{rank}")) for rank in ranks]
            raise ValueError(_difference(ranks, texts))
        for x in _alive(waiting):
            if common[x.digest]:
                common[x.digest] -= 1
                x.agreed = True
        waiting[:] = [weakref.ref(x) for x in _alive(waiting) if not x.agreed]
    return True


def _alive(waiting: Iterable[weakref.ref[Description]]) -> list[Description]:
    return [x for reference in waiting if (x := reference()) is not None]


def _meet(store: dist.Store, round_: int, digests: list[str], ranks: Sequence[int], end: float) -> Counter[str] | None:
    """Return the digests that all ranks bring to this round, or None if some of them do not come in time.

    The last rank to come reads those of all, opens the next round, and writes the result.
    """
    here, pause = f"{round_}/here", 0.001
    store.set(f"{round_}/from/{dist.get_rank()}", json.dumps(digests))
    if store.add(here, 1) == len(ranks):
        common = reduce(and_, (Counter(json.loads(store.get(f"{round_}/from/{rank}"))) for rank in ranks))
        store.add("round", 1)
        store.set(f"{round_}/result", json.dumps(list(common.elements())))
        return common
    while not store.check([f"{round_}/result"]):
        if time.monotonic() > end:
            # Several ranks may leave at once: after one of them, the count no longer shows that all were here.
            if store.add(here, 0) < len(ranks) and store.add(here, -1) < len(ranks) - 1:
                return None  # this rank may come again
            end = math.inf  # all were here: the result will follow
        time.sleep(pause)  # a blocking wait would keep torch's own threads from the store
        pause = min(2 * pause, LONGEST_PAUSE_S)
    return _result(store, round_)


def _result(store: dist.Store, round_: int) -> Counter[str]:
    """Return the digests that all ranks brought to a finished round, as often as all have them."""
    return Counter(json.loads(store.get(f"{round_}/result")))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _difference(ranks: Sequence[int], texts: Iterable[list[Line]]) -> str:
    """Return the message for the first line that the first rank and another one do not share."""
    first, *others = texts
    rank, other = next((rank, x) for rank, x in zip(ranks[1:], others, strict=True) if x != first)
    pairs = zip_longest(first, other, fillvalue=("", "missing"))
    a, b = next(pair for pair in pairs if pair[0] != pair[1])
    here, there = (x[1] if a[0] == b[0] or not x[0] else f"{x[1]} ({x[0]})" for x in (a, b))
    what = a[0] or b[0]
    return (
        f"the ranks build different optimizers: {what} is {here} on rank {ranks[0]} and {there} on rank {rank}. Give "
        "every rank the same parameters in the same order, and the same settings"
    )
