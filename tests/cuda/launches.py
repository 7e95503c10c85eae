"""Count the kernels that a piece of code launches, on a CPU: torch's operators and the interpreter's launches."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

# These operators only allocate memory or make a view.
FREE = {
    "view", "_unsafe_view", "expand", "unbind", "slice", "select", "unsqueeze", "squeeze", "transpose", "diagonal",
    "alias", "detach", "as_strided", "t", "split", "permute", "empty", "new_empty", "empty_like", "set_", "lift_fresh",
    "empty_strided", "promote_types", "new_empty_strided", "narrow", "resize_",
}  # fmt: skip


class _OperatorCounter(TorchDispatchMode):
    """Count torch's operators, except those that the interpreter runs inside of a kernel (`depth[0]` > 0)."""

    def __init__(self, counts: Counter[str], depth: list[int]) -> None:
        super().__init__()
        self.counts, self.depth = counts, depth

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.depth[0] and name not in FREE:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count launches by name; the names of our kernels begin with an underscore."""
    counts: Counter[str] = Counter()
    depth = [0]
    call = GridExecutor.__call__

    def launch(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        counts[self.fn.__name__] += 1
        depth[0] += 1
        try:
            call(self, *args, **kwargs)
        finally:
            depth[0] -= 1

    GridExecutor.__call__ = launch
    try:
        with _OperatorCounter(counts, depth), torch.no_grad():
            yield counts
    finally:
        GridExecutor.__call__ = call
