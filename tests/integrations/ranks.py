"""Two forked gloo ranks that look like a launcher's processes to accelerate, DeepSpeed and transformers."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

from tests.sharding.ranks import run_ranks

WORLD = 2


def run_launched(work: Callable[..., Any], *args: Any) -> list[Any]:
    """Call work(rank, *args) on two ranks, with the variables that torchrun sets."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return run_ranks(WORLD, _launched, port, work, *args)


def _launched(rank: int, port: int, work: Callable[..., Any], *args: Any) -> Any:
    os.environ.update({
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "1",
    })  # fmt: skip
    return work(rank, *args)
