"""Run the comparison of docs/protocol.md as a queue: several runs at a time, until a deadline.

    python -m benchmarks.sweep --data data/wiki_t5 --out sweep --seconds 3600 --parallel 2
    python -m benchmarks.sweep --table results/protocol-*.json

Every finished run is one file, OUT/runs/ID.json, with all its settings. OUT/bundle.json has all of them, those of
--known included. A run that is finished in either place is not trained again; one that the deadline cuts off is.
Needs torch and numpy, and Triton on a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import BEGAN, rate_runs, trials
from benchmarks.protocol import STAGES, Phase, Protocol, Result, Run, losses, read_results, table
from benchmarks.variants import VARIANTS
from cosmos_lab.data import TokenSource, validation_batches
from cosmos_lab.io import atomic_write, read_json
from cosmos_lab.optimizers import hyperparameters
from cosmos_lab.results.reading import CONFIG
from cosmos_lab.run.distributed import pick_device
from cosmos_lab.run.train import Trainer
from cosmos_lab.run.train import train as lab_train

TEXTS = ("val", "test")
CLOSING = 2.0  # seconds of --seconds that are kept for ending processes, the archive and the table
MOST_FAILURES = 4  # failed runs after which the queue ends: something is wrong with the machine or the code


@dataclasses.dataclass(frozen=True)
class Filters:
    """Which runs may begin; an empty tuple allows all."""

    variants: tuple[str, ...] = ()  # With names here, only these; "none" is a run without a variant.
    seeds: tuple[int, ...] = ()

    def allow(self, run: Run) -> bool:
        """Return whether a run may begin."""
        named = (run.variant or "none") in self.variants or not self.variants
        return named and (run.seed in self.seeds or not self.seeds)


@dataclasses.dataclass(frozen=True)
class Options:
    """How to run the queue."""

    data: str  # Shards, as the lab's --data.
    out: Path
    known: tuple[Path, ...] = ()  # Bundles of earlier results.
    seconds: float = math.inf
    parallel: int = 1
    beside: int = 0  # Runs of another queue on the same GPU.
    mps: bool = False
    device: str = "auto"
    compile: str = "auto"
    cache: str | None = None
    commit: str | None = None
    keep: Filters = Filters()
    runs: tuple[Run, ...] = ()  # Only these, instead of those that the search asks for.

    @property
    def at_a_time(self) -> int:
        """Return how many runs share the GPU."""
        return self.parallel + self.beside


# -- one run ----------------------------------------------------------------------------------------------------------


def split(source: TokenSource, cut: int, cache_dir: str | None = None) -> tuple[TokenSource, TokenSource]:
    """Cut a text after the first document that ends at token ``cut`` or later: validation text and test text."""
    ends = source.documents[1:]
    index = int(np.searchsorted(ends, cut))
    if len(source.shards) != 1 or index + 1 >= len(ends):
        raise ValueError(f"{source}: the text to cut at token {cut} must be one shard with a document after that")
    (shard,), at = source.shards, int(ends[index])

    def part(tokens: Any, name: str) -> TokenSource:
        digest = hashlib.sha256(np.ascontiguousarray(tokens).data).hexdigest()
        top = int(tokens.argmax())
        piece = dataclasses.replace(shard, tokens=tokens, sha256=digest, max_id=int(tokens[top]), max_at=top)
        return TokenSource([piece], source.vocabulary, f"{source.name}, {name}", cache_dir)

    return part(shard.tokens[:at], "validation part"), part(shard.tokens[at:], "test part")


class TwoTextTrainer(Trainer):
    """The lab's trainer with a validation text and a test text; its summary has the losses on all of both."""

    def __init__(self, protocol: Protocol, epochs: int, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.block, self.epochs = protocol.block, epochs
        self.texts = dict(zip(TEXTS, split(self.val_source, protocol.cut, self.config.data.cache_dir), strict=True))

    def run(self) -> dict[str, Any]:
        """Train if no token would be seen too often; return the summary with groups, fingerprints and final losses."""
        tokens = self.config.training.steps * self.config.training.batch * self.config.data.seq_len
        found = read_json(self.config.folder / CONFIG)["data"]["tokens"]
        if tokens >= found * self.epochs:
            raise ValueError(f"{tokens:,} tokens asked for, {found:,} found, epochs {self.epochs}: add a shard")
        summary = super().run()
        groups = [
            {"rule": g["rule"], "tensors": len(g["params"]), "numbers": sum(p.numel() for p in g["params"]),
             "peak_lr": lr} for g, lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True)
        ]  # fmt: skip
        fingerprints = {f"{name}_fingerprint": source.fingerprint for name, source in self.texts.items()}
        return {**summary, "groups": groups, "fingerprints": fingerprints, "final": self.final()}

    @torch.no_grad()
    def read(self, source: TokenSource, tokens: int) -> list[float]:
        """Return the mean loss of each batch of the first tokens; only whole batches, so that nothing recompiles."""
        length = self.config.data.seq_len
        whole = self.micro * length
        tokens = max(1, min(tokens, len(source) - 1) // whole) * whole
        found = []
        for x, y in validation_batches(source, self.micro, length, tokens):
            with self._autocast():
                found.append(self.runner(x.to(self.world.device), y.to(self.world.device)).float())
        return [float(loss) for loss in torch.stack(found).tolist()]

    def validate(self) -> dict[str, Any]:
        """Log one point of both curves."""
        record: dict[str, Any] = {"step": self.state.step, "tokens": self.tokens, "time": self.clock.read()}
        for name, source in self.texts.items():
            record[f"{name}_loss"] = statistics.fmean(self.read(source, self.config.logging.val_tokens))
        self._write(record)
        return record

    def final(self) -> dict[str, Any]:
        """Return the losses on both texts, over all their whole blocks and in each block."""
        found: dict[str, Any] = {}
        batches = max(1, self.block // (self.micro * self.config.data.seq_len))
        for name, source in self.texts.items():
            values = self.read(source, (len(source) - 1) // self.block * self.block)
            loss = _finite(statistics.fmean(values))
            found |= {f"{name}_loss": loss, f"{name}_ppl": None if loss is None else math.exp(loss)}
            found[f"{name}_tokens"] = len(values) * self.micro * self.config.data.seq_len
            groups = (values[i : i + batches] for i in range(0, len(values), batches))
            found[f"{name}_blocks"] = [_finite(statistics.fmean(group)) for group in groups]
        return found


def train(protocol: Protocol, options: Options, run: Run) -> Result:
    """Train one run and return its result; the lab's run folder is removed."""
    began = time.monotonic()
    out = options.out / "unfinished" / str(os.getpid())
    shutil.rmtree(out, ignore_errors=True)
    config = protocol.config(run).replace(
        data=options.data, cache_dir=options.cache, out=str(out), device=options.device, compile=options.compile
    )
    curve: list[list[Any]] = []
    train_curve: list[list[Any]] = []

    def note(record: Mapping[str, Any]) -> None:
        if "val_loss" in record:
            values = (_finite(record[f"{name}_loss"]) for name in TEXTS)
            curve.append([record["step"], record["tokens"], *values])
        elif "loss" in record:
            train_curve.append([record["step"], _finite(record["loss"])])

    epochs = protocol.regimes[run.regime].epochs
    summary = lab_train(config, progress=note, make=functools.partial(TwoTextTrainer, protocol, epochs))
    about, final = read_json(config.folder / CONFIG), summary["final"]
    shutil.rmtree(out, ignore_errors=True)
    if summary["status"] != "done":
        final = {name: value if name.endswith("_tokens") else None for name, value in final.items()}
    folders = ("out", "name", "cache_dir", "data")
    return {
        "id": run.id, **dataclasses.asdict(run), "status": summary["status"],
        "optimizer": config.optimizer.optimizer, "options": list(config.optimizer.options),
        "steps": summary["steps"], "batch": config.training.batch, "seq_len": config.data.seq_len,
        "tokens": summary["tokens"], "clip": config.training.clip,
        "betas": [config.optimizer.beta1, config.optimizer.beta2], "groups": summary["groups"],
        "settings": about["settings"], "config": {k: v for k, v in config.flat().items() if k not in folders},
        "parameters": about["parameters"], "state_bytes": about["state_bytes"],
        "commit": options.commit or about["commit"], "versions": about["versions"], "date": about["date"],
        "data": about["data"] | summary["fingerprints"], "at_a_time": options.at_a_time,
        "device": torch.cuda.get_device_name() if pick_device(options.device).type == "cuda" else "cpu",
        "wall_s": round(time.monotonic() - began, 2), "train_s": round(summary["time"], 2),
        **{name: summary[name] for name in ("step_ms", "optimizer_ms", "tokens_per_s", "peak_memory_gb")},
        "train_loss": _finite(summary["final_train_loss"]), **final,
        "curve_columns": ["step", "tokens", "val_loss", "test_loss"], "curve_tokens": config.logging.val_tokens,
        "curve": curve, "train_curve": train_curve,
    }  # fmt: skip


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 6)


# -- files ------------------------------------------------------------------------------------------------------------


def write_bundle(path: Path, results: Mapping[str, Result]) -> None:
    """Write all results into one file, one line per run."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(r)}" for name, r in sorted(results.items()))
    with atomic_write(path) as out:
        out.write(f'{{"runs": {{\n{lines}\n}}}}\n'.encode())


# -- the queue --------------------------------------------------------------------------------------------------------


def serve(pipe: Connection, protocol: Protocol, options: Options) -> None:
    """Train what the queue sends, one run after the other; end after a failure, because the GPU's state is unknown."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    trials.register()
    with pipe:
        while True:
            try:
                run = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send(train(protocol, options, run))
            except Exception:
                pipe.send(traceback.format_exc())
                return


def _end_with_parent() -> None:
    """End this process as soon as the queue's process has ended: nobody would read the result."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class Worker:
    """A process that trains, and the run that it trains now."""

    def __init__(self, protocol: Protocol, options: Options) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, protocol, options))
        self.process.start()
        theirs.close()
        self.run: Run | None = None

    def begin(self, run: Run) -> None:
        """Begin a run; if the process has died, `answer` says so."""
        self.run = run
        with suppress(BrokenPipeError):
            self.pipe.send(run)

    def answer(self) -> Result | str:
        """Return the result, or why there is none."""
        self.run = None
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return f"its process ended with {self.process.exitcode}"

    def end(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Queue:
    """Hands runs to workers until nothing is left to do or no run fits into the time."""

    def __init__(self, protocol: Protocol, options: Options, began: float | None = None) -> None:
        self.protocol, self.options = protocol, options
        self.began = time.monotonic() if began is None else began
        self.folder = options.out / "runs"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.results = read_results([*options.known, self.folder])
        self.failed: dict[str, str] = {}
        self.possible: dict[tuple[str, str], bool] = {}  # by row and variant
        self.finished: list[str] = []
        if protocol.tuned_on and not options.runs:
            rows = dict.fromkeys((regime, entry) for regime, entries, _ in protocol.phases for entry in entries)
            missing = [f"{e} in {r}" for r, e in rows if not protocol.has_source(r, e, losses(self.results))]
            if missing:
                self._say(f"skipped, because --known has no search of {protocol.tuned_on}: {', '.join(missing)}")

    def work(self) -> bool:
        """Run the queue; return whether every run that began and was not cut off has finished."""
        self._bundle()
        workers: list[Worker] = []
        try:
            while True:
                self._begin_runs(workers)
                running = [worker for worker in workers if worker.run]
                if not running:
                    break
                left = self._left()
                ready = wait([worker.pipe for worker in running], None if math.isinf(left) else max(0.0, left))
                if not ready:
                    for worker in running:
                        self._say(f"cut off by the deadline: {worker.run.id if worker.run else ''}")
                    break
                for worker in running:
                    if worker.pipe in ready and not self._receive(worker):
                        workers.remove(worker)
                        worker.end()
        finally:
            for worker in workers:
                worker.process.kill()  # all of them before waiting for one: a process with a GPU ends slowly
            for worker in workers:
                worker.end()
            shutil.rmtree(self.options.out / "unfinished", ignore_errors=True)
        self._say(f"{len(self.finished)} runs finished, {len(self.failed)} failed, {self._rest()}")
        return not self.failed

    def _rest(self) -> str:
        """Return how many runs can begin now, and the expected seconds of the first."""
        runs = self.next()
        if not runs:
            return "none left that can begin"
        return f"{len(runs)} can begin now; the first, {runs[0].id}, takes about {self.estimate(runs[0]):.0f} s"

    def _begin_runs(self, workers: list[Worker]) -> None:
        """Give runs to idle workers, and start further workers if more runs can begin."""
        for worker in workers:
            if worker.run is None and (run := self._first_fitting(workers, cold=False)):
                worker.begin(run)
        while len(workers) < self.options.parallel and len(self.failed) < MOST_FAILURES:
            if (run := self._first_fitting(workers, cold=True)) is None:
                return
            workers.append(Worker(self.protocol, self.options))
            workers[-1].begin(run)

    def _first_fitting(self, workers: list[Worker], cold: bool) -> Run | None:
        """Return the next run that no worker has and that is expected to end in time."""
        busy = [worker.run.id for worker in workers if worker.run]
        return next((run for run in self.next(busy) if self.estimate(run, cold) < self._left()), None)

    def plan(self) -> str:
        """Return the runs that can begin now, one a line, with expected seconds on a started process and in all."""
        lines = [f"{'s':>5}{'sum':>7}  run ({self.options.parallel} at a time; the first of a process takes longer)"]
        total = 0.0
        for run in self.next():
            seconds = self.estimate(run, cold=False)
            total += seconds / self.options.parallel
            lines.append(f"{seconds:5.0f}{total:7.0f}  {run.id}")
        return "\n".join(lines)

    def _left(self) -> float:
        """Return the seconds until the workers must end."""
        return self.began + self.options.seconds - CLOSING - time.monotonic()

    def next(self, busy: Iterable[str] = ()) -> list[Run]:
        """Return the runs that can begin now, in order; skip those with options that do not exist here, and say so."""
        pending = {*busy, *self.failed}
        if self.options.runs:
            runs = [r for r in self.options.runs if r.id not in pending and r.id not in self.results]
        else:
            runs = [r for r in self.protocol.candidates(losses(self.results), pending) if self.options.keep.allow(r)]
        return [run for run in runs if not run.variant or self._can_run(run)]

    def _can_run(self, run: Run) -> bool:
        """Return whether this version has the options of a variant; say so once if it does not."""
        kind = (run.entry, run.variant)
        if kind not in self.possible:
            try:
                hyperparameters(self.protocol.config(run))
                self.possible[kind] = True
            except ValueError as error:
                self.possible[kind] = False
                self._say(f"skipped {run.entry} with {run.variant}: this version cannot run it: {error}")
        return self.possible[kind]

    def estimate(self, run: Run, cold: bool = True) -> float:
        """Return the expected seconds of a run: the usual training of its kind, and the start of a process if cold.

        An entry without runs in the regime takes its time of another regime, else the usual one of all times its cost,
        for the same number of tokens. Only runs without a variant count, if there are any: some variants double the
        time. Without any result the answer is 0, so that one run is tried.
        """
        done = [r for r in self.results.values() if r["val_loss"] is not None]  # a diverged run has few, slow steps
        mine = [r for r in done if r["at_a_time"] == self.options.at_a_time]
        mine = [r for r in mine if not r.get("variant")] or mine
        mine = [r for r in mine if r["model"] == run.model] or mine
        if not mine:
            return 0.0
        same = [r for r in mine if r["entry"] == run.entry]
        cost = 1.0 if same else self.protocol.entries[run.entry].cost
        alike = [r for r in same if r["regime"] == run.regime] or same or mine
        tokens = self.protocol.tokens(run)
        starts = [r["wall_s"] - r["train_s"] for r in mine]
        start = max(starts) if cold else statistics.median(starts)
        return start + cost * statistics.median(r["train_s"] / r["tokens"] for r in alike) * tokens

    def _receive(self, worker: Worker) -> bool:
        """Keep a worker's result; return False if there is none."""
        assert worker.run is not None
        name, answer = worker.run.id, worker.answer()
        if isinstance(answer, str):
            self.failed[name] = answer
            self._say(f"FAILED {name}: {answer}")
            return False
        text = json.dumps(answer)
        self.results[name] = json.loads(text)  # as a later queue reads it
        self.finished.append(name)
        with atomic_write(self.folder / f"{name}.json") as out:
            out.write(text.encode() + b"\n")
        self._bundle()
        shown = "diverged" if answer["val_loss"] is None else f"validation perplexity {answer['val_ppl']:.3f}"
        self._say(f"{name}: {shown}, {answer['wall_s']:.0f} s")
        return True

    def _bundle(self) -> None:
        write_bundle(self.options.out / "bundle.json", self.results)

    def _say(self, line: str) -> None:
        print(f"[{time.monotonic() - self.began:7.1f}] {line}", flush=True)


@contextmanager
def compile_cache(archive: Path | None, folder: Path) -> Iterator[None]:
    """Unpack compiled code of an earlier machine, and write the archive again at the end."""
    if archive is None:
        yield
        return
    shutil.rmtree(folder, ignore_errors=True)
    if archive.exists():
        try:
            shutil.unpack_archive(archive, folder, "gztar", filter="data")
        except (shutil.ReadError, EOFError, OSError, zlib.error) as error:
            print(f"{archive} is damaged and is made again ({error!r})", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {f"{name}_CACHE_DIR": str(folder.resolve() / name.lower()) for name in ("TORCHINDUCTOR", "TRITON")}
    try:
        yield
    finally:
        # At level 1, 100 MB take 1 s; at gzip's usual level 13 s, which nobody expects after the deadline.
        with atomic_write(archive) as out, tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as packed:
            packed.add(folder, ".")
        shutil.rmtree(folder)


@contextmanager
def shared_gpu(wanted: bool) -> Iterator[None]:
    """Run NVIDIA's MPS daemon, so that kernels of several processes run at the same time."""
    if not wanted:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, timeout=20)
        try:
            yield
        finally:
            with suppress(subprocess.TimeoutExpired):  # all clients have ended, so there is nothing to wait for
                subprocess.run(["nvidia-cuda-mps-control"], input="quit -t 1\n", text=True, timeout=5)


def runs_at(model: str, a: argparse.Namespace) -> tuple[Run, ...]:
    """Return single runs at the setting of --at, for the rows, regimes, seeds and variants of the command line."""
    values = {name: float(value) for name, _, value in (item.partition("=") for item in a.at)}
    if not {"lr", "adam_lr"} <= set(values) <= {"lr", "adam_lr", "beta2"} or not (a.only and a.regimes):
        raise ValueError("--at takes lr=, adam_lr= and, if not 0.98, beta2=; it needs --only and --regimes")
    variants = ["" if name == "none" else name for name in a.variants] or [""]
    return tuple(
        Run(model, regime, entry, **values, seed=seed, variant=variant)
        for seed in a.seeds or [0] for regime in a.regimes for entry in a.only for variant in variants
    )  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    p.add_argument("--table", nargs="+", type=Path, metavar="RESULTS", help="print the bundles or folders, by model")
    p.add_argument("--plan", action="store_true", help="print the runs that can begin now, and stop")
    p.add_argument("--data", help="folder or prefix of the shards: for training, and one for validation")
    p.add_argument("--out", type=Path, help="folder for results")
    p.add_argument("--known", nargs="*", type=Path, default=[], help="bundles of earlier results")
    p.add_argument("--seconds", type=float, default=math.inf, help="end after this time, imports included")
    p.add_argument("--parallel", type=int, default=1, help="runs at a time on one GPU")
    p.add_argument("--beside", type=int, default=0, help="runs of another queue on the same GPU, for the records")
    p.add_argument("--mps", action="store_true", help="share the GPU through NVIDIA's MPS daemon")
    p.add_argument("--model", default=Protocol.model)
    p.add_argument("--tuned-on", default="", metavar="MODEL", help="take settings from the search of this model")
    p.add_argument("--regimes", nargs="*", help="these regimes")
    p.add_argument("--only", nargs="*", help="these rows of the comparison")
    p.add_argument("--variants", nargs="*", default=[], help='only these changes; "none" is a run without a change')
    p.add_argument("--seeds", nargs="*", type=int, default=[], help="only these seeds")
    p.add_argument("--at", nargs="+", metavar="NAME=VALUE", help="single runs at this setting, such as lr=1e-3 "
                   "adam_lr=1.6e-2 beta2=0.95, for --only, --regimes and --seeds (if not given, 0)")  # fmt: skip
    p.add_argument("--stages", nargs="*", default=[], choices=STAGES, help="only these stages of the comparison")
    p.add_argument("--device", default="auto")
    p.add_argument("--compile", default="auto")
    p.add_argument("--cache", help="folder for unpacked shards")
    p.add_argument("--compiled", type=Path, help="archive (.tar.gz) of compiled code: read if it exists, then written")
    p.add_argument("--rates", choices=list(rate_runs.SIZES), help="run the list of benchmarks/rate_runs.py for a size")
    p.add_argument("--commit", help="commit of the code, if this folder is not a repository")
    return p


def check_names(a: argparse.Namespace, protocol: Protocol) -> None:
    """Raise a ValueError if a flag names something that the comparison does not have."""
    known: dict[str, Iterable[Any]] = {
        "variants": ("none", *VARIANTS), "regimes": protocol.regimes, "only": protocol.entries,
        "seeds": (*protocol.seeds, *protocol.more_seeds),
    }  # fmt: skip
    for flag, values in known.items():
        names = [str(value) for value in values]
        if unknown := [str(value) for value in getattr(a, flag) or () if str(value) not in names]:
            raise ValueError(f"--{flag}: unknown: {', '.join(unknown)}; there are {', '.join(names)}")


def chosen_phases(a: argparse.Namespace, protocol: Protocol) -> list[Phase]:
    """Return the phases that --regimes, --only and --stages leave; a ValueError if nothing is left."""
    phases = []
    for regime, entries, stages in protocol.phases:
        entries = tuple(entry for entry in entries if entry in (a.only or protocol.entries))
        stages = tuple(stage for stage in stages if stage in (a.stages or STAGES))
        if regime in (a.regimes or protocol.regimes) and entries and stages:
            phases.append((regime, entries, stages))
    if not phases and not a.at:
        raise ValueError("no phase of the comparison has these --only, --regimes and --stages; --at needs no phase")
    return phases


def main(arguments: list[str] | None = None, began: float | None = None) -> int:
    """Do what the command line says; `began` is when --seconds begin to count, usually now."""
    p = parser()
    a = p.parse_args(arguments)
    trials.register()
    protocol = rate_runs.protocol(a.rates) if a.rates else Protocol(model=a.model, tuned_on=a.tuned_on)
    try:
        check_names(a, protocol)
        if a.table:
            print_tables(protocol, a.table)
            return 0
        if not a.out or not (a.data or a.plan):
            raise ValueError("--out and --data are needed, or --table")
        protocol = dataclasses.replace(protocol, phases=chosen_phases(a, protocol))
        options = Options(
            data=a.data, out=a.out, known=tuple(a.known), seconds=a.seconds, parallel=a.parallel,
            beside=a.beside, mps=a.mps, device=a.device, compile=a.compile, cache=a.cache, commit=a.commit,
            keep=Filters(variants=tuple(a.variants), seeds=tuple(a.seeds)),
            runs=runs_at(protocol.model, a) if a.at else (),
        )  # fmt: skip
        queue = Queue(protocol, options, began)
    except ValueError as error:
        p.error(str(error))
    if a.plan:
        print(queue.plan())
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the workers too
    with compile_cache(a.compiled, options.out / "compiled"), shared_gpu(options.mps):
        good = queue.work()
    print(table(protocol, queue.results))
    return 0 if good else 1


def print_tables(protocol: Protocol, paths: Sequence[Path]) -> None:
    """Print the table of each model in the results."""
    results = read_results(paths)
    for model in sorted({result["model"] for result in results.values()}):
        print(table(dataclasses.replace(protocol, model=model), results), end="\n\n")


if __name__ == "__main__":
    sys.exit(main(began=BEGAN))
