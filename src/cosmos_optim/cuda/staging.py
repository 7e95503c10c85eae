"""Bring state that is in host memory to the GPU and back, a chunk at a time, while other chunks compute.

A `Ring` has a few slots of GPU memory, used in turn. A `Lease` is one use of a slot: `load` copies tensors from the
host into it on the ring's upload stream, and the current stream waits for that; `store` copies them back on the ring's
download stream, after what the current stream has done so far. The next lease of the slot loads after that download.
The order is kept by events on the device: the host never waits, and a CUDA graph can capture all this.

A chunk has two leases. M and its scales are stored as soon as the schedule has read them for the last time, before
Newton-Schulz, so two slots are enough for them. The rest, thin factors, stays until the chunk ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cosmos_optim.engine.batching import Batch
from cosmos_optim.rules.rule import MOMENTUM

# The slots of each ring. "rest": two chunks compute, one loads, one stores. "pieces": see `cuda.pieces`.
SLOTS = {"M": 2, "rest": 4, "pieces": 3}
# Larger slots are two in any ring: the copies then take far longer than what more of them could hide.
LARGE_SLOT = 32 << 20
# A tensor begins at a multiple of this many bytes in a slot, plus its own offset from a multiple of 16.
ALIGN = 512

Pairs = Sequence[tuple[Tensor, Tensor]]  # (on the host, in a slot), flat


def in_host_memory(x: Tensor, device: torch.device) -> bool:
    """Return whether a state tensor must be brought to this device for a step."""
    return x.device != device


class CopyStreams:
    """A stream for each direction, for one ring of one device. On a CPU, copies are made at once."""

    _known: dict[tuple[torch.device, str], CopyStreams] = {}

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.up, self.down = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))

    @classmethod
    def of(cls, device: torch.device, ring: str) -> CopyStreams:
        """Return the streams of a ring; create them on the first call."""
        if (device, ring) not in cls._known:
            cls._known[device, ring] = cls(device)
        return cls._known[device, ring]

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Let both streams wait for the caller's stream, and let it wait for them at the end."""
        if self.up is None or self.down is None:
            yield
            return
        caller = torch.cuda.current_stream(self.device)
        for stream in (self.up, self.down):
            stream.wait_stream(caller)
        try:
            yield
        finally:
            for stream in (self.up, self.down):
                caller.wait_stream(stream)

    def upload(self, pairs: Pairs, free: Any) -> None:
        """Copy to the device after the event `free`; the current stream waits for the copies."""
        if self.up is None:
            for on_host, staged in pairs:
                staged.copy_(on_host)
            return
        with torch.cuda.stream(self.up):
            if free is not None:
                self.up.wait_event(free)
            for on_host, staged in pairs:
                staged.copy_(on_host, non_blocking=True)
        torch.cuda.current_stream(self.device).wait_stream(self.up)

    def download(self, pairs: Pairs) -> Any:
        """Copy to the host after what the current stream has done; return the event of the end."""
        if self.down is None:
            for on_host, staged in pairs:
                on_host.copy_(staged)
            return None
        self.down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.down):
            for on_host, staged in pairs:
                on_host.copy_(staged, non_blocking=True)
        return self.down.record_event()


@dataclass(eq=False)
class StagingSlot:
    """One part of a ring's memory: its user, and the event after which it is free."""

    memory: Tensor
    user: Lease | None = None
    free: Any = None


class Ring:
    """Slots of equal size, lent in turn."""

    def __init__(self, copies: CopyStreams, count: int, size: int) -> None:
        self.copies = copies
        self.slots = [StagingSlot(torch.empty(size, dtype=torch.uint8, device=copies.device)) for _ in range(count)]
        self._next = 0

    def lend(self, tensors: Sequence[Tensor]) -> Lease:
        """Place these host tensors in the next slot. Leases must be loaded in the order in which they were made."""
        slot = self.slots[self._next % len(self.slots)]
        self._next += 1
        return Lease(self.copies, slot, tensors)


class Lease:
    """One use of a slot: `tensors` are the copies in it, with the shapes and strides of those on the host."""

    def __init__(self, copies: CopyStreams, slot: StagingSlot, on_host: Sequence[Tensor]) -> None:
        self.copies, self.slot = copies, slot
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.tensors: list[Tensor] = []
        for begin, x in zip(packed(on_host)[0], on_host, strict=True):
            staged = slot.memory[begin : begin + x.numel() * x.element_size()].view(x.dtype)
            self.pairs.append((x.as_strided((x.numel(),), (1,)), staged))
            self.tensors.append(staged.as_strided(x.shape, x.stride()))

    def load(self) -> None:
        """Copy the tensors to the device; the current stream waits for them."""
        assert self.slot.user is None, "a slot is lent again before its last user has stored"
        self.slot.user = self
        self.copies.upload(self.pairs, self.slot.free)

    def store(self) -> None:
        """Copy the tensors to the host, once the current stream has written them. The second call does nothing."""
        if self.slot.user is self:
            self.slot.free = self.copies.download(self.pairs)
            self.slot.user = None


def packed(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return where each tensor begins in a slot, and the bytes of all.

    Kernels load 16 bytes at a time if a matrix is aligned, so each has the offset that it would have in its own tensor.
    """
    begins, end = [], 0
    for x in tensors:
        begins.append(-(-end // ALIGN) * ALIGN + x.data_ptr() % 16)
        end = begins[-1] + x.numel() * x.element_size()
    return begins, end


@dataclass(eq=False)
class StagedBatch:
    """A batch with its state in slots; without leases it is the batch itself."""

    batch: Batch
    leases: dict[str, Lease] = field(default_factory=dict)

    def store_M(self) -> None:
        """Store the momentum, which the step does not need any more."""
        if "M" in self.leases:
            self.leases["M"].store()

    @contextmanager
    def loaded(self) -> Iterator[Batch]:
        """Load the state, yield the batch, and store what is not stored yet. After an error, nothing more is stored."""
        for lease in self.leases.values():
            lease.load()
        yield self.batch
        for lease in self.leases.values():
            lease.store()


class Staging:
    """The rings of one step on one device. Reserve memory for all that will be placed, then fork, then place."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sizes: dict[str, int] = {}
        self.rings: dict[str, Ring] = {}

    @property
    def bytes(self) -> int:
        """GPU memory of all slots."""
        return sum(slot.memory.numel() for ring in self.rings.values() for slot in ring.slots)

    def reserve(self, ring: str, tensors: Sequence[Tensor], *, any_address: bool = False) -> None:
        """Make the slots of a ring large enough for these tensors, or for such tensors at any address."""
        if tensors:
            more = ALIGN * len(tensors) if any_address else 0  # each may begin up to ALIGN bytes later in its slot
            self.sizes[ring] = max(self.sizes.get(ring, 0), packed(tensors)[1] + more)

    def reserve_batch(self, batch: Batch, names: Collection[str] | None = None) -> None:
        """Reserve memory for the state of a batch, or for the state with these names."""
        for ring, found in self._in_host_memory(batch, names).items():
            self.reserve(ring, [batch.matrices[i].state[name] for i, name in found])

    def allocate(self) -> None:
        """Allocate the slots."""
        for ring, size in self.sizes.items():
            count = SLOTS[ring] if size <= LARGE_SLOT else 2
            self.rings[ring] = Ring(CopyStreams.of(self.device, ring), count, size)

    @contextmanager
    def forked(self) -> Iterator[None]:
        """Fork the copy streams from the caller's stream, and join them at the end."""
        if not self.rings:
            self.allocate()
        with ExitStack() as forks:
            for ring in self.rings.values():
                forks.enter_context(ring.copies.forked())
            yield

    def place(self, batch: Batch, names: Collection[str] | None = None) -> StagedBatch:
        """Return a batch with its state, or that with these names, in slots. State on the device stays where it is."""
        found = self._in_host_memory(batch, names)
        if not found:
            return StagedBatch(batch)
        states, leases = [dict(x.state) for x in batch.matrices], {}
        for ring, places in found.items():
            leases[ring] = self.rings[ring].lend([states[i][name] for i, name in places])
            for (i, name), staged in zip(places, leases[ring].tensors, strict=True):
                states[i][name] = staged
        matrices = [replace(x, state=state) for x, state in zip(batch.matrices, states, strict=True)]
        return StagedBatch(replace(batch, matrices=matrices), leases)

    def _in_host_memory(self, batch: Batch, names: Collection[str] | None) -> dict[str, list[tuple[int, str]]]:
        """Return for each ring the state that it must bring: the position of a matrix, and a name."""
        found: dict[str, list[tuple[int, str]]] = {}
        for i, x in enumerate(batch.matrices):
            for name, tensor in x.state.items():
                if (names is None or name in names) and in_host_memory(tensor, self.device):
                    found.setdefault("M" if name in MOMENTUM else "rest", []).append((i, name))
        return found


class StagingByDevice(dict[torch.device, Staging]):
    """The staging of each device of a step, made when it is first asked for."""

    def __missing__(self, device: torch.device) -> Staging:
        self[device] = Staging(device)
        return self[device]
