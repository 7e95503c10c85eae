"""Finished runs as files: a bundle of many, or a folder with one file per run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.comparison import Run
from cosmos_lab.io import atomic_write

Result = dict[str, Any]  # One finished run, as its JSON file has it.
Losses = Mapping[str, float]  # Validation loss by run id; inf: diverged.


def read_results(paths: Iterable[Path]) -> dict[str, Result]:
    """Return the results by id, of bundles and of folders with one file per run; a run must not have two results."""
    found: dict[str, Result] = {}
    places: dict[str, Path] = {}
    for path in paths:
        for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
            for name, result in _read_file(file, single=path.is_dir()).items():
                if found.setdefault(name, result) != result:
                    raise ValueError(f"{places[name]} and {file} have different results of {name}: remove one of them")
                places.setdefault(name, file)
    return found


def _read_file(file: Path, single: bool) -> dict[str, Result]:
    """Return the results of a bundle or of a single run by id; a ValueError names a file that is not one."""
    try:
        content = json.loads(file.read_text())
        return {content["id"]: content} if single else dict(content["runs"])
    except FileNotFoundError:
        raise ValueError(f"there are no results at {file}") from None
    except (ValueError, KeyError, TypeError) as error:
        what = "the result of a run" if single else "a bundle of results"
        raise ValueError(f"{file} is not {what}, or it is damaged ({error!r}): remove it or copy it again") from error


def losses(results: Mapping[str, Result]) -> dict[str, float]:
    """Return the validation loss by run id, inf for runs that diverged."""
    return {name: math.inf if r["val_loss"] is None else r["val_loss"] for name, r in results.items()}


def run_of(result: Result) -> Run:
    """Return the run that made a result; earlier results lack newer fields."""
    return Run(**{name: result[name] for name in Run.__dataclass_fields__ if name in result})


def texts_of(result: Result) -> tuple[str, ...]:
    """Return the fingerprints of the training, validation and test text of a run."""
    return tuple(result["data"][name] for name in ("fingerprint", "val_fingerprint", "test_fingerprint"))


def write_bundle(path: Path, results: Mapping[str, Result]) -> None:
    """Write all results into one file, one line per run."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(r)}" for name, r in sorted(results.items()))
    with atomic_write(path) as out:
        out.write(f'{{"runs": {{\n{lines}\n}}}}\n'.encode())
