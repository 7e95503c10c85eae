"""Triton's interpreter without the work that it repeats, which is a fifth of the time of the kernel tests."""

from typing import Any


def hasten() -> None:
    """Let a device function make its module's language interpretable with its first call instead of with each.

    What that changes is never changed back, and what a launch changes back the next launch changes again. Where an
    operation has been left as it was, it raises.
    """
    from triton.runtime.interpreter import InterpretedFunction

    first, met = InterpretedFunction.__call__, set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self in met:
            return self.rewrite()(*args, **kwargs)
        met.add(self)
        return first(self, *args, **kwargs)

    InterpretedFunction.__call__ = call
