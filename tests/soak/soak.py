"""Kill, damage and resume tiny runs at random, and compare each with the run that nothing disturbed.

``make soak MINUTES=30`` tells one story after another: 1 to 4 gloo ranks, plain or sharded, train a tiny model through
the command line. Again and again all or one of them get SIGKILL or SIGTERM, or the newest checkpoint is damaged; then
the run continues, sometimes on another number of ranks. At its end, the log and the weights equal those of the unbroken
run: to the bit if the number of ranks never changed, else within ROUNDING. Each story prints its seed;
``make soak ARGS='--seed N --times 5'`` tells one again, a few times, because the moments of the kills vary.
"""

import argparse
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before the ranks are forked: each would take seconds for it
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from cosmos_lab.cli import commands  # noqa: F401
from cosmos_lab.cli.main import main as command_line
from cosmos_lab.config import RunConfig
from cosmos_lab.results.reading import read_metrics
from cosmos_lab.run import checkpoint, integrity, train  # noqa: F401
from tests.lab.conftest import tiny_config, write_text
from tests.lab.outcomes import assert_same, log_of
from tests.soak.damage import damage

STEPS = 12
# Sums over another number of ranks round differently, and twelve steps amplify it.
ROUNDING = 1e-3
ALONE_S, ALL_S = 3.0, 120.0  # time for the other ranks after one was killed, as torchrun gives them; for a whole run


class Ranks:
    """Forked processes, set up as torchrun would, that run one command."""

    def __init__(self, arguments: list[str], count: int, said: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.said = [said / f"rank_{rank}" for rank in range(count)]
        self.pids = [self._fork(arguments, rank, count, port) for rank in range(count)]
        self.codes: dict[int, int] = {}  # by process id

    def _fork(self, arguments: list[str], rank: int, count: int, port: int) -> int:
        sys.stdout.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            out = os.open(self.said[rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
            code = command_line(arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def alive(self) -> list[int]:
        """Return the processes that have not ended."""
        for pid in self.pids:
            if pid not in self.codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        return [pid for pid in self.pids if pid not in self.codes]

    def wait(self, seconds: float) -> bool:
        """Wait until all have ended, or until the time is over; tell whether they have."""
        end = time.monotonic() + seconds
        while self.alive() and time.monotonic() < end:
            time.sleep(0.01)
        return not self.alive()

    def signal(self, pids: list[int], signum: int) -> None:
        for pid in pids:
            if pid in self.alive():
                os.kill(pid, signum)

    def output(self) -> str:
        return "".join(path.read_text() for path in self.said if path.exists())


class Story:
    """One run that is disturbed until it is finished."""

    def __init__(self, base: RunConfig, seed: int) -> None:
        self.seed, self.rng = seed, random.Random(seed)
        rng = self.rng
        self.sharding, self.ranks = rng.choice(("ddp", "fsdp")), rng.randint(1, 4)
        self.config = base.replace(
            name=f"story_{seed}", sharding=self.sharding, optimizer=rng.choice(("adam", "cosmos")),
            checkpoint_every=rng.choice((1, 2, 3)), keep=rng.choice((1, 2, 3)),
        )  # fmt: skip
        if self.config.optimizer.optimizer == "adam":
            self.config = self.config.replace(rank=None)
        self.moves = rng.random() < 0.4  # to other numbers of ranks
        self.counts: set[int] = set()
        self.events: list[str] = []

    def tell(self, references: dict[Any, RunConfig]) -> str:
        """Disturb the run until it is finished and compare it; return what happened."""
        first = self.ranks
        for _ in range(self.rng.randint(2, 5)):
            self._disturb()
            if self.rng.random() < 0.5:
                self._damage()
            if self.moves:
                self.ranks = self.rng.randint(1, 4)
        self._finish(self.config)
        counts = set(self.counts)
        key = (self.sharding, first, self.config.optimizer.optimizer)
        if key not in references:
            references[key] = self.config.replace(name="-".join(map(str, ("whole", *key))))
            self.ranks = first
            self._finish(references[key])
        self._compare(references[key], exactly=counts == {first})
        return f"{self.sharding}, {self.config.optimizer.optimizer}, {first} ranks: {', '.join(self.events)}"

    def _start(self, config: RunConfig, *more: str) -> Ranks:
        start = RunConfig().flat()
        given = {name: value for name, value in config.flat().items() if value != start[name] and name != "recipe"}
        words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        self.counts.add(self.ranks)
        said = config.folder.parent / "said"
        said.mkdir(parents=True, exist_ok=True)
        return Ranks(["train", "tiny", *words, *more], self.ranks, said)

    def _step(self) -> int:
        return max((record["step"] for record in read_metrics(self.config.folder)), default=0)

    def _log_file(self) -> int:
        """Return the number of the log's file, of which each start makes a new one."""
        path = self.config.folder / "metrics.jsonl"
        return path.stat().st_ino if path.exists() else 0

    def _disturb(self) -> None:
        """Start the run and send one or all ranks a signal at a random moment."""
        if (self.config.folder / "summary.json").exists():
            return
        rng = self.rng
        step, signum = rng.randint(0, STEPS), rng.choice((signal.SIGKILL, signal.SIGTERM))
        alone, pause = rng.random() < 0.4, rng.random() * rng.choice((0.01, 0.3))
        early, before = rng.random() < 0.2, self._log_file()  # early: while the ranks start
        ranks, end = self._start(self.config), time.monotonic() + ALL_S
        while ranks.alive() and not early and time.monotonic() < end:
            if self._log_file() != before and self._step() >= step:
                break
            time.sleep(0.005)
        time.sleep(pause)
        targets = [rng.choice(ranks.pids)] if alone else list(ranks.pids)
        ranks.signal(targets, signum)
        # One rank tells the others of a SIGTERM; if one is gone, torchrun ends the others.
        if not ranks.wait(ALONE_S):
            ranks.signal(ranks.alive(), signal.SIGTERM)
            if not ranks.wait(ALONE_S):
                ranks.signal(ranks.alive(), signal.SIGKILL)
                ranks.wait(ALL_S)
        name = signal.Signals(signum).name
        self.events.append(f"{name} to {'one of ' if alone else ''}{len(ranks.pids)} after step {self._step()}")
        self._expect(ranks, allowed={0, 1, 128 + signal.SIGTERM, -signal.SIGTERM, -signal.SIGKILL})

    def _damage(self) -> None:
        """Damage the newest checkpoint: the run is refused by all ranks, and continues from the older one."""
        checkpoints = self.config.folder / "checkpoints"
        found = sorted(path for path in checkpoints.glob("step_*"))
        if not found or (self.config.folder / "summary.json").exists():
            return
        try:
            integrity.check(found[-1])
        except ValueError:
            return  # the ranks were killed before they found the last damage
        other = found[-2] if len(found) > 1 else found[-1]
        done = damage(found[-1], other, self.rng)
        self.events.append(f"damage ({done.split()[0]})")
        ranks = self._start(self.config.replace(resume="auto"))
        ended = ranks.wait(ALL_S)
        said = ranks.output()
        assert ended, f"{done}: a rank waits forever; {said}"
        self._expect(ranks, allowed={2})
        assert said.count("\n") == 1 and str(found[-1]) in said, f"{done}: not one line about it: {said}"
        if len(found) == 1:
            assert "start again" in said
            shutil.rmtree(checkpoints)
        else:
            assert "--resume previous" in said
            self.config = self.config.replace(resume="previous")

    def _finish(self, config: RunConfig) -> None:
        ranks = self._start(config)
        assert ranks.wait(ALL_S), f"a rank of {config.run_name} waits forever: {ranks.output()}"
        self._expect(ranks, allowed={0})

    def _expect(self, ranks: Ranks, allowed: set[int]) -> None:
        codes = list(ranks.codes.values())
        assert set(codes) <= allowed, f"exit codes {codes}: {ranks.output()}"

    def _compare(self, whole: RunConfig, exactly: bool) -> None:
        mine, theirs = log_of(self.config.folder), log_of(whole.folder)
        if exactly:
            assert_same(mine, theirs, "log")
            assert_same(weights(self.config), weights(whole), "weights")
            return
        numbers = [[record.get("loss", record.get("val_loss")) for record in log] for log in (mine, theirs)]
        assert len(numbers[0]) == len(numbers[1]), "the logs have different lengths"
        worst = max(abs(a - b) / abs(b) for a, b in zip(*numbers) if b is not None)
        assert worst <= ROUNDING, f"a loss differs by {worst:.1e} of its size"


def weights(config: RunConfig) -> Any:
    """Return the weights in the last checkpoint of a run."""
    newest = checkpoint.latest(config.folder / "checkpoints")
    assert newest is not None
    path = newest / "state.pt"
    if config.training.sharding == "fsdp":
        path = config.folder / "joined.pt"
        dcp_to_torch_save(newest / "shards", path)
    return torch.load(path, weights_only=True)["model"]


def main() -> None:
    """Tell stories until the time is over; stop at the first that fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, help="tell only this story")
    parser.add_argument("--times", type=int, default=1, help="how often, with --seed")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    end, begin = time.monotonic() + 60 * asked.minutes, time.monotonic()
    told, seeds = 0, random.Random()
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder))
        base = tiny_config(Path(folder), str(Path(folder) / "toy"))
        base = base.replace(
            steps=STEPS, batch=12, log_every=1, val_every=4, diagnostics_every=0, micro_batch=1, val_tokens=576
        )
        references: dict[Any, RunConfig] = {}
        while told < asked.times if asked.seed is not None else time.monotonic() < end:
            seed = asked.seed if asked.seed is not None else seeds.randrange(10**6)
            shutil.rmtree(base.folder.parent / f"story_{seed}", ignore_errors=True)
            print(f"seed {seed}: ", end="", flush=True)
            story = Story(base, seed)
            try:
                print(story.tell(references), flush=True)
            except BaseException as error:
                print(f"FAILED after {', '.join(story.events)}: {error}")
                print(f"repeat it with: make soak ARGS='--seed {seed} --times 5'", flush=True)
                raise
            told += 1
            shutil.rmtree(base.folder.parent / f"story_{seed}", ignore_errors=True)
    print(f"{told} stories, no difference, {(time.monotonic() - begin) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
