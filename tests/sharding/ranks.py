"""Run a function on several ranks: forked processes connected by gloo, started in a tenth of a second.

This file imports everything that the ranks need, once, before the fork. torch must not have started a pool of threads
by then (conftest keeps it to one): a forked child would wait for threads that it does not have.
"""

import contextlib
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # DTensor imports it with its first operation: a second on every rank
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

TIMEOUT_S = 100.0


def run_ranks(world: int, work: Callable[..., Any], *args: Any, dying: tuple[int, ...] = ()) -> list[Any]:
    """Call work(rank, *args) on each of `world` ranks and return the results in order. Raise an error of any rank.

    Ranks in `dying` are expected to end without a result.
    """
    with tempfile.TemporaryDirectory() as folder:
        pids = {}
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                _child(rank, world, Path(folder), work, args)
            pids[pid] = rank
        _wait(pids)
        errors = [p.read_text() for p in sorted(Path(folder).glob("error*"))]
        assert not errors, f"{len(errors)} of {world} ranks failed; the first:\n{errors[0]}"
        missing = [r for r in range(world) if not (Path(folder) / f"result{r}").exists()]
        assert tuple(missing) == dying, f"ranks {missing} of {world} gave no result within {TIMEOUT_S} s"
        return [pickle.loads((Path(folder) / f"result{r}").read_bytes()) for r in range(world) if r not in dying]


def _child(rank: int, world: int, folder: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
        result = work(rank, *args)
        (folder / f"result{rank}").write_bytes(pickle.dumps(result))
        with contextlib.suppress(RuntimeError):  # a rank that was expected to die is missing
            dist.barrier()
    except BaseException:
        (folder / f"error{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        os._exit(0)


def _wait(pids: dict[int, int]) -> None:
    """Wait until all ranks have ended; kill those that are left after the timeout."""
    end = time.monotonic() + TIMEOUT_S
    left = dict(pids)
    while left and time.monotonic() < end:
        for pid in list(left):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del left[pid]
        time.sleep(0.005)
    for pid in left:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
