"""Ranks for tests: forked processes with gloo between them, started in a tenth of a second.

What the ranks import is imported here, once, before the fork. torch must not have started a pool of threads by then
(conftest keeps it to one): a forked child would wait for threads that it does not have.
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

PATIENCE = 100.0


def run_ranks(world: int, work: Callable[..., Any], *args: Any, dying: tuple[int, ...] = ()) -> list[Any]:
    """work(rank, *args) on each of `world` ranks; its results in order. An error on any rank is raised here.

    Ranks in `dying` are meant to end without a result.
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
        assert tuple(missing) == dying, f"ranks {missing} of {world} gave no result within {PATIENCE} s"
        return [pickle.loads((Path(folder) / f"result{r}").read_bytes()) for r in range(world) if r not in dying]


def _child(rank: int, world: int, folder: Path, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), world), rank=rank, world_size=world)
        result = work(rank, *args)
        (folder / f"result{rank}").write_bytes(pickle.dumps(result))
        with contextlib.suppress(RuntimeError):  # of a rank that was meant to die
            dist.barrier()
    except BaseException:
        (folder / f"error{rank}").write_text(f"rank {rank}:\n{traceback.format_exc()}")
    finally:
        os._exit(0)


def _wait(pids: dict[int, int]) -> None:
    """Until all ranks are gone; ranks that outlive a failed one, or the time, are ended."""
    end = time.monotonic() + PATIENCE
    left = dict(pids)
    while left and time.monotonic() < end:
        for pid in list(left):
            if os.waitpid(pid, os.WNOHANG)[0]:
                del left[pid]
        time.sleep(0.005)
    for pid in left:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
