"""A hint for a mistyped name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def close_to(name: str, known: Iterable[str]) -> str:
    """A "(did you mean ...?)" with the nearest known name, or nothing.

    >>> close_to("gama", ["gamma", "rank"])
    " (did you mean 'gamma'?)"
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
