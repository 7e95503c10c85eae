"""How many kernels a stretch of code asks for, counted on a CPU: torch's operators and the interpreter's launches."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

# These only make memory or look at it in another way.
FREE = {
    "view", "_unsafe_view", "expand", "unbind", "slice", "select", "unsqueeze", "squeeze", "transpose", "diagonal",
    "alias", "detach", "as_strided", "t", "split", "permute", "empty", "new_empty", "empty_like", "set_", "lift_fresh",
    "empty_strided", "promote_types", "new_empty_strided", "narrow", "resize_",
}  # fmt: skip


class _Operators(TorchDispatchMode):
    def __init__(self, seen: Counter[str], inside: list[int]) -> None:
        super().__init__()
        self.seen, self.inside = seen, inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.inside[0] and name not in FREE:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Launches by name; kernels of ours begin with an underscore."""
    seen: Counter[str] = Counter()
    inside = [0]
    call = GridExecutor.__call__

    def launch(self: GridExecutor, *args: Any, **kwargs: Any) -> None:
        seen[self.fn.__name__] += 1
        inside[0] += 1
        try:
            call(self, *args, **kwargs)
        finally:
            inside[0] -= 1

    GridExecutor.__call__ = launch
    try:
        with _Operators(seen, inside), torch.no_grad():
            yield seen
    finally:
        GridExecutor.__call__ = call
