"""Two processes of a sharded run leave with the right exit code: at the end, after an error, and on SIGTERM."""

import signal
import socket
import subprocess
from pathlib import Path

import pytest

from cosmos_lab.cli import main as cli
from cosmos_lab.config import RunConfig
from cosmos_lab.results.reading import read_metrics
from tests.lab.outcomes import start, wait_until
from tests.lab.test_stopping import flags_of

pytestmark = pytest.mark.slow
HANGS_S = 100
# Run the command; in process 1, the third step raises.
FAILING = """
import os, sys
from cosmos_lab.cli.main import run_and_leave
from cosmos_lab.run.train import Trainer
steps, taken = Trainer._step, []
def failing(self):
    taken.append(0)
    if os.environ["RANK"] == "1" and len(taken) == 3:
        raise RuntimeError("the third step failed")
    return steps(self)
Trainer._step = failing
run_and_leave()
"""


def start_two(*arguments: str) -> list[subprocess.Popen[str]]:
    """Start ``python ARGUMENTS`` twice, with the environment that torchrun would give."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [start(*arguments, RANK=rank, LOCAL_RANK=rank, **names) for rank in ("0", "1")]


def ends(processes: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    """Return exit codes and error output; a process that does not leave fails the test."""
    try:
        errors = [process.communicate(timeout=HANGS_S)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], errors


def command(config: RunConfig) -> list[str]:
    """Return the arguments of a sharded run."""
    return ["train", "tiny", *flags_of(config.replace(sharding="fsdp", diagnostics_every=0))]


def test_a_finished_run_leaves_with_0(tiny_run: RunConfig) -> None:
    codes, errors = ends(start_two("-m", "cosmos_lab", *command(tiny_run)))
    assert codes == [0, 0], errors


def test_an_error_in_one_process_ends_both(tiny_run: RunConfig) -> None:
    codes, errors = ends(start_two("-c", FAILING, *command(tiny_run)))
    assert codes[1] == 1 and "the third step failed" in errors[1]
    assert codes[0] in (1, 2), errors[0]  # its message was lost: gloo's own error


def test_sigterm_ends_both_with_its_code(tiny_run: RunConfig) -> None:
    config = tiny_run.replace(steps=400, log_every=1)
    processes = start_two("-m", "cosmos_lab", *command(config))
    wait_until(lambda: any(read_metrics(Path(config.folder))), processes[0])
    for process in processes:
        process.send_signal(signal.SIGTERM)
    codes, errors = ends(processes)
    assert codes == [143, 143], errors


def test_only_a_process_of_a_distributed_run_skips_the_shutdown(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []

    def leave(code: int) -> None:
        left.append(code)
        raise SystemExit(code)

    monkeypatch.setattr("os._exit", leave)
    monkeypatch.setattr(cli, "main", lambda: 3)
    for variables, expected in (({}, []), ({"RANK": "0"}, [3])):
        monkeypatch.delenv("RANK", raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as end:
            cli.run_and_leave()
        assert end.value.code == 3 and left == expected
