"""A process with recorded steps and an NCCL group leaves at once: at the end, after an error, and on SIGTERM."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
HANGS_S = 120
# One NCCL process trains with DDP until its step is recorded, then ends as its argument says.
SCRIPT = """
import sys, time
import torch, torch.distributed as dist
from torch import nn
from cosmos_optim import Cosmos

torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)).cuda())
opt = Cosmos(model.module, rank=16)
for _ in range(20):
    model(torch.randn(32, 64, device="cuda")).square().mean().backward()
    opt.step()
    opt.zero_grad()
assert opt.cuda_graph.recording is not None
print("recorded", flush=True)
if sys.argv[1] == "error":
    raise RuntimeError("after the step was recorded")
if sys.argv[1] == "signal":
    time.sleep(600)
if sys.argv[1] == "destroy":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("way", "code"), [("end", 0), ("destroy", 0), ("error", 1), ("signal", -signal.SIGTERM)], ids=str
)
def test_a_process_with_recorded_steps_and_nccl_leaves_at_once(way: str, code: int) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, way], env=env, **pipes)  # type: ignore[call-overload]
    assert process.stdout is not None
    try:
        if way == "signal":
            assert process.stdout.readline() == "recorded\n"
            process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=HANGS_S)[1]
    finally:
        process.kill()
    assert process.returncode == code, errors
