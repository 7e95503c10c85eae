"""One training run, from a config to a run folder.

The host waits for the device only for log lines, validations and checkpoints: losses add up on the device, the
optimizer is timed by events, and a background thread prepares the batches. Needs neither tyro nor rich.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from typing import Any

import torch
from torch import nn

from cosmos_lab.config import RunConfig
from cosmos_lab.data import Batches, TokenSource, validation_batches, validation_windows
from cosmos_lab.optimizers import build_optimizer, hyperparameters, optimizer_class
from cosmos_lab.results.reading import Status, last_step_before_final, read_log, read_metrics, summarize
from cosmos_lab.run import build, checkpoint, distributed, meters, model_cache, run_folder, run_log, stopping
from cosmos_lab.run.prefetch import Prefetcher
from cosmos_lab.run.run_folder import locked_or_summary
from cosmos_lab.run.schedule import lr_factor

Progress = Callable[[Mapping[str, Any]], None]

_BAD_LOSSES = 2  # log lines in a row without a finite loss that end a run: weights do not recover
_SYNC_EVERY = 10  # steps after which processes agree on whether to stop, if no log line makes them wait anyway


def train(
    config: RunConfig, *, progress: Progress | None = None, make: Callable[..., Trainer] | None = None
) -> dict[str, Any]:
    """Train as ``config`` says and return the summary, which is also in the run folder.

    A finished run is not trained again: its summary is returned. A half-finished one continues from its newest
    checkpoint. SIGTERM and SIGINT end it after its current step, with a checkpoint and ``stopping.Stopped``.
    ``progress`` is called with every record of the log, and first with one that says what was opened ("about").
    ``make`` builds the trainer if it is not ``Trainer``, from the same arguments.
    """
    config.check()
    optimizer_class(config.optimizer.optimizer)
    build.model_config(config)  # a wrong name or size is noticed before any data is unpacked
    with (
        distributed.session(config.training.device, config.training.sharding) as world,
        locked_or_summary(config, world) as summary,
    ):
        if summary is not None:
            return summary
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        build.seed_everything(config.training.seed, config.training.deterministic)
        try:
            with closing((make or Trainer)(config, world, progress)) as trainer:
                summary = trainer.run()
                model_cache.store(trainer.network)  # nothing else uses it here
                return summary
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class Trainer:
    """The live objects of one run and the loop over its steps."""

    def __init__(self, config: RunConfig, world: distributed.World, progress: Progress | None = None) -> None:
        self.config, self.world, self.progress = config, world, progress
        self.checkpoints = checkpoint.folder_of(config.folder)
        check = checkpoint.start_check(self.checkpoints, world)  # takes no time while the model is built
        self.bf16 = build.pick_bf16(config.training.precision, world.device)
        self.micro_batch = build.micro_batch(config, world.size)
        source, self.val_source, shape = build.open_text(config)
        self.network = model_cache.network(config, shape, world, self.bf16)
        self.model, self.runner = self.network.model, self.network.runner
        self.optimizer = build_optimizer(self.model, config.optimizer)
        self.base_lrs = [float(group["lr"]) for group in self.optimizer.param_groups]
        asked = hyperparameters(config)
        self.resume_conditions = checkpoint.resume_conditions(config, self.model, source, self.val_source, asked)
        if world.sharding == "ddp" and world.size > 2:  # a sum of two does not depend on their order
            self._order_buckets()
        self.state = checkpoint.TrainingState(self.model, self.optimizer)
        batch, seed = config.training.batch // world.size, config.training.seed
        batches = Batches(source, batch, config.data.seq_len, seed, world.rank, world.size)
        self._resume(batches, check)
        self.clock, self.stopwatch = meters.Clock(self.state.seconds), meters.Stopwatch(world.device)
        self.loss_sum = torch.tensor(self.state.loss_sum, device=world.device)
        self.resumed_at = self.clock_started_at = self.state.step  # steps
        self.logged_seconds = self.state.seconds
        self.log = self._open_log(source, asked) if world.main else None
        self.batches = Prefetcher(batches, world.device)

    def _open_log(self, source: TokenSource, asked: Mapping[str, Any]) -> run_log.RunLog:
        """Write config.json, drop log lines after the step to continue from, and tell ``progress`` what was opened."""
        about = run_log.about(self.config, self.model, self.optimizer, source, self.val_source, asked)
        log = run_log.RunLog.open(self.config, about, resumed_at=self.state.step)
        if self.progress is not None:
            step, steps = self.state.step, self.config.training.steps
            resumed = f"; continues after step {step} of {steps}" if step else ""
            self.progress({"step": step, "about": f"{source.describe()}; {about['parameters']:,} parameters{resumed}"})
        return log

    def _resume(self, batches: Batches, check: checkpoint.Check | None) -> None:
        """Continue from the newest checkpoint, if there is one."""
        if self.world.main:
            checkpoint.remove_unfinished(self.checkpoints)
        newest = checkpoint.latest(self.checkpoints)
        if newest is not None:
            steps = self.config.training.steps
            if checkpoint.step_of(newest) > steps:
                raise ValueError(f"{newest} is beyond --steps {steps}: choose another --out, or more steps")
            skip = self.config.logging.resume == "previous"
            checkpoint.resume(self.checkpoints, self.state, self.resume_conditions, self.world, check, skip)
            saved, now = len(self.optimizer.param_groups), len(self.base_lrs)  # loading brings the saved groups
            if saved != now:
                raise ValueError(
                    f"{newest} has other groups of parameters (number of groups: {saved}, now {now}): give the rates "
                    "that the run began with (--adam-lr, --embedding-lr, --head-lr, --vector-lr), or another --name"
                )
            if self.world.main:
                run_folder.warn_of_changes(self.config)
            assert self.state.data_state is not None
            batches.load_state_dict(self.state.data_state)

    def _order_buckets(self) -> None:
        """Make one backward pass that trains nothing.

        DDP orders its buckets by the first one, and with them the sums over processes. Without this, the first step
        after a resume would sum in another order than the same step of the unbroken run.
        """
        tokens = torch.zeros(self.micro_batch, self.config.data.seq_len, dtype=torch.long, device=self.world.device)
        with self._autocast():
            loss = self.runner(tokens, tokens)
        loss.backward()
        self.model.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Stop the data thread and close the logs."""
        self.batches.close()
        if self.log is not None:
            self.log.close()

    def run(self) -> dict[str, Any]:
        """Train to the last step and return the summary, or stop with a checkpoint when a signal asks for it."""
        steps = self.config.training.steps
        logging = self.config.logging
        before_final = last_step_before_final(steps)  # logged: the final training loss is the mean of what follows
        with stopping.watch() as request:
            signum = self.world.max(request.signum)  # a signal may have come while this run was built
            while not signum and self.state.step < steps and self.state.bad_losses < _BAD_LOSSES:
                self._step()
                step = self.state.step
                logs = step in (1, before_final, steps) or _due(step, logging.log_every)
                if logs:
                    self._log()
                if step == self.resumed_at + 1:
                    self._start_clock()
                if _due(step, logging.val_every) and step < steps:
                    self._untimed(self.validate)
                # Processes get the signal at different moments; asking each other at every step would cost time.
                if self.world.size == 1 or logs or _due(step, logging.log_every or _SYNC_EVERY):
                    signum = self.world.max(request.signum)
                if signum or (_due(step, logging.checkpoint_every) and step < steps):
                    self._untimed(self.save)
            if signum:
                kept = ", with a checkpoint" if self.state.step else ""
                raise stopping.Stopped(signum, f"at step {self.state.step} of {steps}{kept}")
            return self._finish()

    def _step(self) -> None:
        """Make one optimizer step over all its micro-batches."""
        self.state.step += 1
        share = lr_factor(self.state.step, self.config.training.steps, self.config.schedule)
        for group, lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = lr * share
        tokens, targets = (part.to(self.world.device, non_blocking=True) for part in self.batches.next())
        pieces = list(zip(tokens.split(self.micro_batch), targets.split(self.micro_batch), strict=True))
        for index, (x, y) in enumerate(pieces):
            with distributed.accumulating(self.runner, self.model, self.world, last=index == len(pieces) - 1):
                with self._autocast():
                    loss = self.runner(x, y) / len(pieces)
                loss.backward()
            self.loss_sum += loss.detach()
        if self.config.training.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.training.clip)
        with self.stopwatch.measure():
            self._update()
        self.optimizer.zero_grad(set_to_none=True)
        self.state.data_state = self.batches.data_state

    def _update(self) -> None:
        """Run the optimizer's step, with its diagnostics if they are due."""
        wanted = _due(self.state.step, self.config.logging.diagnostics_every) and hasattr(self.optimizer, "diagnostics")
        if not wanted:
            self.optimizer.step()
            return
        with self.optimizer.diagnostics() as found:  # type: ignore[attr-defined]
            self.optimizer.step()
        if found:
            self._write({"step": self.state.step, "tokens": self.tokens, "diagnostics": dict(found)})

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.bf16)

    def _start_clock(self) -> None:
        """Start the clock after the first step of this process, which mostly compiles."""
        self.world.synchronize()
        self.stopwatch.take()
        self.clock_started_at, self.logged_seconds = self.state.step, self.clock.read()
        self.clock.start()

    def _untimed(self, action: Callable[[], Any]) -> None:
        """Do something that is not training, with the clock stopped."""
        self.world.synchronize()
        self.clock.stop()
        action()
        self.clock.start()

    @property
    def tokens(self) -> int:
        """Count the tokens seen so far, on all processes."""
        return self.state.step * self.config.training.batch * self.config.data.seq_len

    def save(self) -> None:
        """Write a checkpoint; one that only a resume needs is removed when the run is finished."""
        self.state.seconds, self.state.loss_sum = self.clock.read(), self.loss_sum.item()
        every, keep = self.config.logging.checkpoint_every, self.config.logging.keep
        checkpoint.save(self.checkpoints, self.state, self.resume_conditions, self.world, keep, temporary=not every)

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """Compute and log the loss on the validation tokens, the same ones every time, on any number of processes."""
        text = (self.config.data.seq_len, self.config.logging.val_tokens)
        world, windows = self.world, validation_windows(self.val_source, *text)
        total = torch.zeros((), device=world.device)
        for x, y, count in validation_batches(self.val_source, self.micro_batch, *text, world.rank, world.size):
            smaller = len(x) < self.micro_batch  # would compile again
            with self._autocast(), torch.compiler.set_stance("force_eager") if smaller else nullcontext():
                loss = self.runner(x.to(world.device), y.to(world.device))
            if count:  # otherwise another process counts it
                total += loss * count
        mean = (world.mean(total) * world.size / windows).item()
        record = {"step": self.state.step, "tokens": self.tokens, "time": self.clock.read()}
        record |= {"val_loss": mean, "val_ppl": math.exp(mean) if mean < 700 else math.inf}
        self._write(record)
        return record

    def _write(self, record: Mapping[str, Any]) -> None:
        if self.log is not None:
            self.log.write(record)
        if self.progress is not None and self.world.main:
            self.progress(record)

    def _log(self) -> None:
        """Write one line of the training log; the host waits for the device."""
        training, seq_len = self.config.training, self.config.data.seq_len
        loss = self.world.mean(self.loss_sum / (self.state.step - self.state.last_logged_step)).item()
        self.world.synchronize()
        self.loss_sum.zero_()
        now = self.clock.read()
        timed_steps = self.state.step - max(self.state.last_logged_step, self.clock_started_at)
        speed = timed_steps * training.batch * seq_len / max(now - self.logged_seconds, 1e-9)
        mfu = meters.mfu(speed, self.model.flops_per_token(seq_len), self.world.device, self.world.size)
        optimizer_ms = self.stopwatch.take()
        has_rates = self.state.step > self.resumed_at + 1  # the clock starts after the first step
        self.logged_seconds = now
        self.state.last_logged_step = self.state.step
        self.state.bad_losses = 0 if math.isfinite(loss) else self.state.bad_losses + 1
        self._write(
            {
                "step": self.state.step,
                "tokens": self.tokens,
                "time": now,
                "loss": loss,
                "lr": self.config.optimizer.lr * lr_factor(self.state.step, training.steps, self.config.schedule),
                "tokens_per_s": speed if has_rates else None,
                "mfu": mfu if has_rates else None,
                "memory_gb": meters.peak_memory_gb(self.world.device),
                "optimizer_ms": sum(optimizer_ms) / len(optimizer_ms) if has_rates else None,
                "skipped_steps": getattr(self.optimizer, "skipped_steps", None),
            }
        )

    def _finish(self) -> dict[str, Any]:
        """Write the last checkpoint, the last validation and the summary."""
        self.world.synchronize()
        self.clock.stop()
        diverged = self.state.bad_losses > 0  # at least the last line's
        if self.config.logging.checkpoint_every and not diverged and self.state.step > self.resumed_at:
            self.save()
        records = read_metrics(self.config.folder)
        if not any(record["step"] == self.state.step for record in records if "val_loss" in record):
            self.validate()  # already done if a kill came just before the summary
        self.world.barrier()
        log = read_log(self.config.folder)
        if not log.validation:  # just written
            raise ValueError(f"{self.config.folder} was removed or emptied during training, so the run has no result")
        summary = summarize(log, self.config.training.steps)
        summary["status"] = str(Status.DIVERGED if diverged or summary["final_val_loss"] is None else Status.DONE)
        summary["peak_memory_gb"] = meters.peak_memory_gb(self.world.device)
        summary["state_bytes"] = run_log.state_bytes(self.optimizer)
        if self.log is not None:
            self.log.finish(summary)
            checkpoint.remove_temporary(self.checkpoints)
        return summary


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
