"""The measurements of a profile: one model on one device, random tokens, any optimizer, time and memory.

The model stays while optimizers and batch sizes change, so that each shape is compiled once.
"""

from __future__ import annotations

import gc
import inspect
import math
import re
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from cosmos_lab.config import RunConfig, parse_options
from cosmos_lab.models import build as build_model
from cosmos_lab.models.loss import CHUNK_ELEMENTS
from cosmos_lab.optimizers import FIELDS, WEIGHTS, build_optimizer, hyperparameters, optimizer_class
from cosmos_lab.profile.config import ProfileConfig, split_row
from cosmos_lab.run import model_cache
from cosmos_lab.run.build import cast_weights, pick_bf16, pick_compile
from cosmos_lab.run.distributed import pick_device
from cosmos_lab.run.meters import GIB, Stopwatch

_MORE_SHAPES = 64  # the search for the largest batch compiles one graph per size; torch would stop at 8
_LOGITS_AT_ONCE = 7  # chunks of logits in fp32 that the loss holds for a moment on a CPU: 4 to 7 by the process's peak


class Profiler:
    """Builds the model; call ``set_optimizer``, then ``iterate``."""

    def __init__(self, config: ProfileConfig) -> None:
        model_cache.clear()  # the memory of a model kept from training would be counted
        torch.manual_seed(0)
        self.config, self.seq_len, self.device = config, config.seq_len, pick_device(config.device)
        self.compiled = pick_compile(config.compile, self.device)
        self.bf16 = pick_bf16(config.precision, self.device)
        sizes: dict[str, Any] = {} if config.vocab_size is None else {"vocab_size": config.vocab_size}
        self.model = build_model(config.model, device=self.device, **sizes)
        self.flops_per_token = self.model.flops_per_token(config.seq_len)
        self.runner: nn.Module = self.model
        self.recompile(dynamic=False)
        self.optimizer: torch.optim.Optimizer | None = None
        self._saved: tuple[int, int] | None = None  # by a pass over one sequence and over two
        self.forward_backward, self.update = Stopwatch(self.device), Stopwatch(self.device)

    def recompile(self, dynamic: bool) -> None:
        """Compile again: one graph for each batch size, or one for all of them (a little slower) if ``dynamic``."""
        if self.compiled == "off":
            return
        torch.compiler.reset()  # a graph for all sizes would otherwise serve every size from then on
        torch._dynamo.config.recompile_limit = _MORE_SHAPES
        if self.compiled == "blocks":
            self.model.compile_parts(dynamic=dynamic)
        else:
            self.runner = cast(nn.Module, torch.compile(self.model, dynamic=dynamic))

    def set_optimizer(self, row: str) -> None:
        """Replace the optimizer by that of a row; the old one's state is freed first."""
        self.remove_optimizer()
        run = run_of_row(row, self.config)
        self.set_weights(WEIGHTS[run.training.weights])
        self.optimizer = build_optimizer(self.model, run.optimizer)

    def set_weights(self, dtype: torch.dtype) -> None:
        """Turn the weights into this type; what depends on it is compiled and counted again."""
        if all(p.dtype is dtype for p in self.model.parameters()):
            return
        cast_weights(self.model, dtype)
        self._saved = None
        self.recompile(dynamic=False)
        self.free()

    def remove_optimizer(self) -> None:
        """Free the optimizer's state and the gradients."""
        self.optimizer = None
        self.model.zero_grad(set_to_none=True)
        self.free()

    def free(self) -> None:
        """Return cached memory to the device, so that one measurement does not affect the next."""
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        shape, vocab = (size, self.seq_len + 1), self.model.config.vocab_size
        tokens = torch.randint(vocab, shape, device=self.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def passes(self, size: int, count: int) -> None:
        """Run ``count`` forward and backward passes over ``size`` sequences, adding up gradients."""
        tokens, targets = self.batch(size)
        for _ in range(count):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
                loss = self.runner(tokens, targets) / count
            loss.backward()

    def pass_speed(self, size: int, count: int) -> float | None:
        """Return the tokens per second of forward and backward passes without an optimizer; None if they do not fit."""
        if self.missing_memory(size):
            return None
        try:
            self.passes(size, 1)
            self.sync()
            self.forward_backward.take()
            with self.forward_backward.measure():
                self.passes(size, count)
            self.sync()
            return size * count * self.seq_len / (self.forward_backward.take()[0] / 1e3)
        except torch.cuda.OutOfMemoryError:
            return None
        finally:
            self.model.zero_grad(set_to_none=True)

    def iterate(self, size: int, accumulation: int) -> None:
        """Run one iteration as the paper times it: all passes, then the optimizer."""
        assert self.optimizer is not None
        with self.forward_backward.measure():
            self.passes(size, accumulation)
        with self.update.measure():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def time(self, size: int, accumulation: int) -> tuple[float, float]:
        """Return the seconds of one iteration: the median of forward and backward, the mean of the optimizer's.

        Updates beyond ``iterations`` follow a single pass.
        """
        self.sync()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.forward_backward.take(), self.update.take()
        for _ in range(self.config.iterations):
            self.iterate(size, accumulation)
        self.sync()
        passes = self.forward_backward.take()
        for _ in range(self.config.updates - self.config.iterations):
            self.iterate(size, 1)
        self.sync()
        self.forward_backward.take()
        return statistics.median(passes) / 1e3, statistics.mean(self.update.take()) / 1e3

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_gb(self, size: int) -> tuple[float, float]:
        """Return the peak GiB since ``time`` began: held by tensors and CUDA graphs, and reserved on the device.

        On a CPU, which keeps no such count: parameters, gradients, optimizer state and what one forward pass saves.
        """
        if self.device.type == "cuda":
            graph = getattr(self.optimizer, "cuda_graph", None)
            held = torch.cuda.max_memory_allocated(self.device) + (graph.bytes if graph is not None else 0)
            return held / GIB, torch.cuda.max_memory_reserved(self.device) / GIB
        total = (2 * self._weight_bytes() + self.state_bytes() + self._activation_bytes(size)) / GIB
        return total, total

    def state_bytes(self) -> int:
        return 0 if self.optimizer is None else int(self.optimizer.state_bytes())  # type: ignore[attr-defined]

    def host_state_bytes(self) -> int:
        """Return the bytes of state in host memory that belongs to parameters on a GPU."""
        if self.optimizer is None or self.device.type != "cuda":
            return 0
        return self.state_bytes() - int(self.optimizer.state_bytes("cuda"))  # type: ignore[attr-defined]

    def missing_memory(self, size: int) -> str:
        """Say why ``size`` sequences must not be tried on this CPU: it would swap or kill the process, not raise.

        Return "" if they may be tried, and always on a GPU, which raises an error if they do not fit.
        """
        if self.device.type == "cuda":
            return ""
        logits = min(CHUNK_ELEMENTS, size * self.seq_len * self.model.config.vocab_size)
        needed = self._weight_bytes() + self._activation_bytes(size) + _LOGITS_AT_ONCE * 4 * logits
        free = free_memory()
        if needed <= free:
            return ""
        return f"it needs about {needed / GIB:,.3g} GiB more and {free / GIB:,.3g} GiB are free"

    def _weight_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def _activation_bytes(self, size: int) -> int:
        """Extrapolate what a forward pass saves from one sequence and two, without running a large pass."""
        if self._saved is None:
            self._saved = self._saved_bytes(1), self._saved_bytes(2)
        one, two = self._saved
        return one + (size - 1) * (two - one)

    def _saved_bytes(self, size: int) -> int:
        storages: dict[int, int] = {}
        own = {p.untyped_storage().data_ptr() for p in self.model.parameters()}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = self.model(*self.batch(size))
            total = sum(storages.values())
        del loss
        return total

    def fits(self, size: int) -> bool:
        """Tell whether an iteration of ``size`` sequences stays under the cap; its second pass also holds gradients."""
        if self.device.type != "cuda":
            return self.peak_gb(size)[0] <= self.config.memory_cap_gb
        try:
            with self.capped():
                self.iterate(size, 2)
                self.sync()
            return True
        except torch.cuda.OutOfMemoryError:
            return False

    @contextmanager
    def capped(self) -> Iterator[None]:
        """Limit the memory on a GPU to the cap: more raises an out-of-memory error. Free what a failed pass left."""
        if self.device.type != "cuda":
            yield
            return
        self.free()
        cap = self.config.memory_cap_gb * GIB
        fraction = min(1.0, cap / torch.cuda.get_device_properties(self.device).total_memory)
        torch.cuda.set_per_process_memory_fraction(fraction, self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)
            self.model.zero_grad(set_to_none=True)
            self.free()


def run_of_row(row: str, config: ProfileConfig) -> RunConfig:
    """Return the run that a row measures. Its own options come last, so they replace equal ones of `--options`.

    Options that are fields of the run, such as `weights` and `rank`, become those fields.
    """
    name, own = split_row(row)
    rank = config.rank if "rank" in inspect.signature(optimizer_class(name)).parameters else None
    given = (*config.options, *own)
    fields = {key: value for key, value in parse_options(given).items() if key in ("weights", *FIELDS)}
    options = tuple(option for option in given if option.partition("=")[0] not in fields)
    return RunConfig().replace(model=config.model, optimizer=name, options=options, **{"rank": rank, **fields})


def check_rows(config: ProfileConfig) -> None:
    """Build the optimizer of every row for a miniature of the model: a wrong option is a ValueError that names it."""
    for row in config.optimizers:
        try:
            hyperparameters(run_of_row(row, config).check())
        except ValueError as error:
            raise ValueError(f"row {row}: {error}") from error


def free_memory() -> float:
    """Return the bytes of main memory available now, within the container's limit; infinity if the system does not say.

    Not sysconf's SC_AVPHYS_PAGES, which does not count what the caches of files would free.
    """
    machine = 1024 * _kernel_number("/proc/meminfo", r"^MemAvailable: *(\d+)")
    group = _kernel_number("/sys/fs/cgroup/memory.max", r"^(\d+)")
    group -= _kernel_number("/sys/fs/cgroup/memory.stat", r"^anon (\d+)")
    return min(machine, group) if math.isfinite(group) else machine


def _kernel_number(path: str, pattern: str) -> float:
    try:
        found = re.search(pattern, Path(path).read_text(), re.MULTILINE)
    except OSError:
        return math.inf
    return float(found[1]) if found else math.inf
