"""Random damages of checkpoints: each one must be noticed.

``python -m tests.soak.damage 1000`` damages plain checkpoints, then sharded ones on two ranks. It fails if one is
accepted, or if the error does not name the checkpoint in one line. ``tests/lab/test_checkpoint_damage.py`` runs a few.
"""

import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from cosmos_lab.config import RunConfig
from cosmos_lab.io import json_bytes
from cosmos_lab.run import checkpoint, distributed, integrity
from cosmos_lab.run.train import Trainer, train
from tests.lab.conftest import tiny_config, write_text
from tests.lab.test_train_distributed import on_ranks

_PAGE = 4096


def damage(folder: Path, other: Path, rng: random.Random) -> str:
    """Change the checkpoint in ``folder`` at random; ``other`` is an older one. Return what was done."""
    while True:
        kind = rng.choice(list(_KINDS))
        if where := _KINDS[kind](folder, other, rng):
            return f"{kind} {where}"  # else it changed nothing, for example a page of zeros


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _flip(folder: Path, other: Path, rng: random.Random) -> str:
    path = rng.choice(_files(folder))
    content = bytearray(path.read_bytes())
    bit = rng.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return f"bit {bit} of {path}"


def _cut(folder: Path, other: Path, rng: random.Random) -> str:
    path = rng.choice(_files(folder))
    content = path.read_bytes()
    length = rng.choice((0, len(content) - 1, rng.randrange(len(content))))
    path.write_bytes(content[:length])
    return f"{path} to {length} bytes"


def _zero(folder: Path, other: Path, rng: random.Random) -> str:
    path = rng.choice(_files(folder))
    content = bytearray(path.read_bytes())
    start = rng.randrange(0, len(content), _PAGE)
    page = content[start : start + _PAGE]
    content[start : start + _PAGE] = bytes(len(page))
    path.write_bytes(content)
    return f"{path} from {start}" if any(page) else ""


def _swap(folder: Path, other: Path, rng: random.Random) -> str:
    """Exchange two files of the checkpoint, or one with that of the older checkpoint."""
    one = rng.choice(_files(folder))
    two = rng.choice([p for p in (*_files(folder), other / one.relative_to(folder)) if p != one and p.exists()])
    a, b = one.read_bytes(), two.read_bytes()
    if a == b:
        return ""
    one.write_bytes(b)
    if folder in two.parents:
        two.write_bytes(a)
    return f"{one} and {two}"


def _delete(folder: Path, other: Path, rng: random.Random) -> str:
    path = rng.choice(_files(folder))
    path.unlink()
    return str(path)


def _edit(folder: Path, other: Path, rng: random.Random) -> str:
    """Change a value of meta.json, or remove it."""
    path = folder / "meta.json"
    before = path.read_bytes()
    meta = json.loads(before)
    name = rng.choice(sorted(meta))
    if rng.random() < 0.3:
        del meta[name]
    elif isinstance(meta[name], dict):
        inner = rng.choice(sorted(meta[name]))
        meta[name][inner] = None
    else:
        meta[name] = f"{meta[name]}0" if isinstance(meta[name], str) else meta[name] + 1
    path.write_bytes(json_bytes(meta))
    return f"{name} of {path}" if path.read_bytes() != before else ""


def _whole(folder: Path, other: Path, rng: random.Random) -> str:
    """Put the older checkpoint in the place of the newer one."""
    if other == folder:
        return ""
    shutil.rmtree(folder)
    shutil.copytree(other, folder)
    return f"{folder} by {other}"


_KINDS: dict[str, Callable[[Path, Path, random.Random], str]] = {
    "flip": _flip, "cut": _cut, "zero": _zero, "swap": _swap, "delete": _delete, "edit": _edit, "replace": _whole,
}  # fmt: skip


def check_damages(config: RunConfig, count: int, seed: int) -> None:
    """Damage the newest checkpoint of a finished run ``count`` times; every one must be refused on this process.

    Each time the older checkpoint must be found with ``skip_damaged``. Runs on every rank of a sharded run.
    """
    rng, kinds, source = random.Random(seed), Counter[str](), config.folder / "checkpoints"
    with distributed.session("cpu", config.training.sharding) as world:
        with contextlib.closing(Trainer(config.replace(name="other"), world)) as trainer:
            conditions = trainer.resume_conditions
            for index in range(count):
                place = source.with_name(f"damaged_{index}")
                older, newest = place / "step_000004", place / "step_000008"
                done = ""
                if world.main:
                    shutil.copytree(source, place)
                    done = damage(newest, older, rng)
                done = world.gather(done)[0]
                kinds[done.split()[0]] += 1
                try:
                    with pytest.raises(integrity.Damaged) as caught:
                        checkpoint.resume(place, trainer.state, conditions, world, None, skip_damaged=False)
                except BaseException as error:
                    raise AssertionError(f"damage {index} of seed {seed}, {done}: not refused, {error!r}") from error
                said = str(caught.value)
                assert str(newest) in said and "--resume previous" in said and "\n" not in said, f"{done}: {said}"
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    checkpoint.resume(place, trainer.state, conditions, world, None, skip_damaged=True)
                assert trainer.state.step == 4
                world.barrier()
                assert not newest.exists()
                if world.main:
                    shutil.rmtree(place)
            if world.main:
                print(f"{config.run_name}, seed {seed}: {count} refused, {dict(kinds)}", flush=True)


def main(count: int, seed: int) -> None:
    """Damage plain and sharded checkpoints, ``count`` times in all."""
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder))
        config, begin = tiny_config(Path(folder), str(Path(folder) / "toy")), time.monotonic()
        train(config)
        check_damages(config, count // 2, seed)
        sharded = config.replace(sharding="fsdp", name="sharded")
        on_ranks(2, lambda: train(sharded))
        on_ranks(2, lambda: check_damages(sharded, count - count // 2, seed + 1), timeout=3600)
        print(f"0 of {count} damages accepted, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.randrange(10**6))
