"""One training run, from a config to a run folder.

    summary = train(RunConfig().replace(model="tiny", steps=100))

The host never waits for the device between log lines: losses add up on the device, the optimizer is timed by events,
batches arrive through a background thread. Needs neither tyro nor rich.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing
from typing import Any

import torch
from torch import nn

from cosmos_lab.config import RunConfig
from cosmos_lab.data import Batches, validation_batches
from cosmos_lab.optimizers import build_optimizer, optimizer_class, settings
from cosmos_lab.results.reading import begin_of_final, read_log, summarize
from cosmos_lab.run import build, checkpoint, launch, meters, run_folder, run_log, stopping
from cosmos_lab.run.prefetch import Feed
from cosmos_lab.run.run_folder import alone, finished
from cosmos_lab.run.schedule import factor

Progress = Callable[[Mapping[str, Any]], None]

_BAD_LOSSES = 2  # log lines in a row without a finite loss that end a run: weights do not come back from there
_MEET_EVERY = 10  # steps after which processes agree on whether to stop, where no log line makes them wait anyway


def train(config: RunConfig, *, progress: Progress | None = None) -> dict[str, Any]:
    """Train as ``config`` says and return the summary, which is also in the run folder.

    A finished run folder is not trained again: its summary comes back. A half-finished one continues from its newest
    checkpoint. SIGTERM and SIGINT end it after the step it is in, with a checkpoint: ``stopping.Stopped`` says so.

    Args:
        config: the run.
        progress: called with every record of the log, and first with one whose "about" says what was opened.
    """
    config.check()
    optimizer_class(config.optimizer.optimizer)
    build.model_config(config)  # a wrong name or size is noticed before any data is unpacked
    made = finished(config)
    if made is not None:
        return made
    with launch.session(config.training.device, config.training.sharding) as world, alone(config, world) as made:
        if made is not None:
            return made
        build.seed_everything(config.training.seed, config.training.deterministic)
        try:
            with closing(Trainer(config, world, progress)) as trainer:
                summary = trainer.run()
                build.keep(trainer.network)  # here alone nobody else can have it
                return summary
        finally:
            torch.use_deterministic_algorithms(False)


class Trainer:
    """The live objects of one run and the loop over its steps."""

    def __init__(self, config: RunConfig, world: launch.World, progress: Progress | None = None) -> None:
        self.config, self.world, self.progress = config, world, progress
        self.folder = run_log.run_folder(config)
        self.checkpoints = self.folder / "checkpoints"
        self.bf16 = launch.pick_bf16(config.training.precision, world.device)
        self.micro = build.micro_batch(config, world.size)
        source, self.val_source = build.load_source(config, "train"), build.load_source(config, "val")
        shape = build.model_config(config, source, self.val_source)
        self.network = build.network(config, shape, world, self.bf16)
        self.model, self.runner = self.network.model, self.network.runner
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        asked = settings(config.optimizer, config.model.model)
        self.identity = build.identity(config, self.model, source, self.val_source, asked)
        self.at = checkpoint.Training(self.model, self.optimizer)
        batch, seed = config.training.batch // world.size, config.training.seed
        batches = Batches(source, batch, config.data.seq_len, seed, world.rank, world.size)
        self._resume(batches)
        self.clock, self.stopwatch = meters.Clock(self.at.seconds), meters.Stopwatch(world.device)
        self.loss_sum = torch.tensor(self.at.loss_sum, device=world.device)
        self.first = self.timed = self.at.step
        self.logged_seconds = self.at.seconds
        self.log = None
        if world.main:
            about = build.header(config, self.model, self.optimizer, source, self.val_source, asked)
            self.log = run_log.RunLog(config, about, resumed_at=self.at.step)
            if progress is not None:
                goes_on = f"; goes on after step {self.at.step} of {config.training.steps}" if self.at.step else ""
                progress({"step": self.at.step, "about": f"{source}; {about['parameters']:,} parameters{goes_on}"})
        self.feed = Feed(batches, world.device)

    def _resume(self, batches: Batches) -> None:
        """Continue from the newest checkpoint, if there is one."""
        if self.world.main:
            for unfinished in self.checkpoints.glob(".writing_*"):
                shutil.rmtree(unfinished, ignore_errors=True)
        newest = checkpoint.latest(self.checkpoints)
        if newest is not None:
            steps = self.config.training.steps
            if checkpoint.step_of(newest) > steps:
                raise ValueError(f"{newest} is beyond --steps {steps}: choose another --name or --out, or more steps")
            if self.world.main:
                run_folder.tell_changes(self.folder, self.config)
            checkpoint.load(newest, self.at, self.identity, self.world)
            assert self.at.position is not None
            batches.load_state_dict(self.at.position)

    def close(self) -> None:
        """Stop the data thread and close the logs."""
        self.feed.close()
        if self.log is not None:
            self.log.close()

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the last step and return the summary, or stop with a checkpoint when a signal asks for it."""
        steps, every = self.config.training.steps, self.config.logging
        late = begin_of_final(steps)  # a line there, so that the final training loss is of the steps after it alone
        with stopping.watch() as request:
            told = self.world.most(request.signum)  # a comparison may have been told while this run was built
            while not told and self.at.step < steps and self.at.bad_losses < _BAD_LOSSES:
                self._step()
                step = self.at.step
                logs = step in (1, late, steps) or _due(step, every.log_every)
                if logs:
                    self._log()
                if step == self.first + 1:
                    self._start_clock()
                if _due(step, every.val_every) and step < steps:
                    self._aside(self.validate)
                # Processes get the signal at different moments; asking each other at every step would cost time.
                if self.world.size == 1 or logs or _due(step, every.log_every or _MEET_EVERY):
                    told = self.world.most(request.signum)
                if told or (_due(step, every.checkpoint_every) and step < steps):
                    self._aside(self.save)
            if told:
                kept = ", with a checkpoint" if self.at.step else ""
                raise stopping.Stopped(told, f"at step {self.at.step} of {steps}{kept}")
            return self._finish()

    def _step(self) -> None:
        """One optimizer step over all its micro-batches."""
        self.at.step += 1
        share = factor(self.at.step, self.config.training.steps, self.config.schedule)
        for group, lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = lr * share
        tokens, targets = (part.to(self.world.device, non_blocking=True) for part in self.feed.next())
        pieces = list(zip(tokens.split(self.micro), targets.split(self.micro), strict=True))
        for index, (x, y) in enumerate(pieces):
            with launch.accumulating(self.runner, self.model, self.world, last=index == len(pieces) - 1):
                with self._autocast():
                    loss = self.runner(x, y) / len(pieces)
                loss.backward()
            self.loss_sum += loss.detach()
        if self.config.training.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.training.clip)
        with self.stopwatch.measure():
            self._update()
        self.optimizer.zero_grad(set_to_none=True)
        self.at.position = self.feed.position

    def _update(self) -> None:
        """The optimizer's step, with its diagnostics where they are due."""
        wanted = _due(self.at.step, self.config.logging.diagnostics_every) and hasattr(self.optimizer, "diagnostics")
        if not wanted:
            self.optimizer.step()
            return
        with self.optimizer.diagnostics() as found:  # type: ignore[attr-defined]
            self.optimizer.step()
        if found:
            self._write({"step": self.at.step, "tokens": self.tokens, "diagnostics": dict(found)})

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.bf16)

    def _start_clock(self) -> None:
        """After the first step of this process, which compiles: its time would say nothing."""
        self.world.synchronize()
        self.stopwatch.take()
        self.timed, self.logged_seconds = self.at.step, self.clock.read()
        self.clock.start()

    def _aside(self, action: Callable[[], Any]) -> None:
        """Do something that is not training with the clock stopped."""
        self.world.synchronize()
        self.clock.stop()
        action()
        self.clock.start()

    @property
    def tokens(self) -> int:
        """Tokens seen so far, on all processes."""
        return self.at.step * self.config.training.batch * self.config.data.seq_len

    def save(self) -> None:
        """Write a checkpoint."""
        self.at.seconds, self.at.loss_sum = self.clock.read(), self.loss_sum.item()
        every, keep = self.config.logging.checkpoint_every, self.config.logging.keep
        checkpoint.save(self.checkpoints, self.at, self.identity, self.world, keep, passing=not every)

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Loss on the same validation tokens every time, logged."""
        length, world = self.config.data.seq_len, self.world
        whole = self.micro * length * world.size  # whole batches only: a smaller last one would compile anew
        tokens = max(1, self.config.logging.val_tokens // whole) * whole
        total, count = torch.zeros((), device=world.device), 0
        for x, y in validation_batches(self.val_source, self.micro, length, tokens, world.rank, world.size):
            with self._autocast():
                total += self.runner(x.to(world.device), y.to(world.device)) * len(x)
            count += len(x)
        loss = self.world.mean(total / count).item()
        record = {"step": self.at.step, "tokens": self.tokens, "time": self.clock.read()}
        record |= {"val_loss": loss, "val_ppl": _exp(loss)}
        self._write(record)
        return record

    # -- what is written ----------------------------------------------------------------------------------------------

    def _write(self, record: Mapping[str, Any]) -> None:
        if self.log is not None:
            self.log.write(record)
        if self.progress is not None and self.world.main:
            self.progress(record)

    def _log(self) -> None:
        """One line of the training log; the only place in the loop where the host waits for the device."""
        c, timed = self.config, self.at.step - max(self.at.logged, self.timed)
        loss = self.world.mean(self.loss_sum / (self.at.step - self.at.logged)).item()
        self.world.synchronize()
        self.loss_sum.zero_()
        before, self.logged_seconds = self.logged_seconds, self.clock.read()
        optimizer_ms = self.stopwatch.take()
        rates = self.at.step > self.first + 1
        speed = timed * c.training.batch * c.data.seq_len / max(self.logged_seconds - before, 1e-9)
        share = meters.mfu(speed, self.model.flops_per_token(c.data.seq_len), self.world.device, self.world.size)
        self.at.logged = self.at.step
        self.at.bad_losses = 0 if math.isfinite(loss) else self.at.bad_losses + 1
        self._write(
            {
                "step": self.at.step,
                "tokens": self.tokens,
                "time": self.logged_seconds,
                "loss": loss,
                "lr": c.optimizer.lr * factor(self.at.step, c.training.steps, c.schedule),
                "tokens_per_s": speed if rates else None,
                "mfu": share if rates else None,
                "memory_gb": meters.peak_memory_gb(self.world.device),
                "optimizer_ms": sum(optimizer_ms) / len(optimizer_ms) if rates else None,
                "skipped_steps": getattr(self.optimizer, "skipped_steps", None),
            }
        )

    def _finish(self) -> dict[str, Any]:
        """Last checkpoint, last validation, summary."""
        self.world.synchronize()
        self.clock.stop()
        diverged = self.at.bad_losses > 0  # the last line's at least
        if self.config.logging.checkpoint_every and not diverged and self.at.step > self.first:
            self.save()
        if not any(r["step"] == self.at.step for r in run_log.read_metrics(self.folder) if "val_loss" in r):
            self.validate()  # a kill just before the summary leaves this one already done
        self.world.barrier()
        summary = summarize(read_log(self.folder), self.config.training.steps)
        summary["status"] = "diverged" if diverged or summary["final_val_loss"] is None else "done"
        summary["peak_memory_gb"] = meters.peak_memory_gb(self.world.device)
        summary["state_bytes"] = build.state_bytes(self.optimizer)
        if self.log is not None:
            self.log.finish(summary)
            checkpoint.drop_passing(self.checkpoints)  # what a stop has left, which nobody asked to keep
        return summary


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _exp(loss: float) -> float:
    return math.inf if loss >= 700 else math.exp(loss)
