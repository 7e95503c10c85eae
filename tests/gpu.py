"""What tests on a GPU share."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def never_waiting() -> Iterator[None]:
    """Raise an error if the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
