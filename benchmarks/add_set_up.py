"""Add steps, batch, sequence length and embedding rate to result files: `python -m benchmarks.add_set_up`.

They are derived afterwards: from the recipe as it was at the file's own commit, and from what the command of the run
changed (`CHANGED`, as docs/results has the commands). Where a file has validation losses by step, the last step must be
the number of steps. Each file then says so in "set_up".
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# What a command gave beside the recipe; the first beginning of a file's name that fits counts.
CHANGED: dict[str, dict[str, int]] = {
    "wiki-130m": {"steps": 1530},
    "wiki-60m-steps": {"steps": 3200, "batch": 16},
    "wiki-60m-ablations-800": {},
    "wiki-60m-ablations": {"steps": 400},
    "tiny": {"steps": 300},
}
EMBEDDING_LR = {"wiki-60m-embedding": 1e-2}  # --embedding-lr; otherwise embedding and head have the row's adam_lr
NOTE = "added afterwards by benchmarks/add_set_up.py, from the recipe at the commit and the command in docs/results"
_READ = """
import json, sys
from cosmos_lab.recipes import get_recipe
run = next(iter(get_recipe(sys.argv[1]).runs()))
find = lambda name: next(getattr(t, name) for t in (run.training, run.data) if hasattr(t, name))
print(json.dumps({name: find(name) for name in ("steps", "batch", "seq_len")}))
"""


@cache
def of_recipe(recipe: str, commit: str) -> dict[str, int]:
    """Return steps, batch and sequence length of a recipe as it was at a commit."""
    archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        read = subprocess.run(
            [sys.executable, "-c", _READ, recipe], env={"PYTHONPATH": f"{folder}/src"}, check=True, capture_output=True,
        )  # fmt: skip
    return dict(json.loads(read.stdout))


def changed(name: str) -> dict[str, int]:
    """Return what the command changed, by the name of the result file."""
    return next((fields for begin, fields in CHANGED.items() if name.startswith(begin)), {})


def set_up(name: str, kept: dict[str, Any]) -> dict[str, Any]:
    """Return the set-up of a result file; a ValueError if its commits or its curves disagree."""
    commits = kept["commit"] if isinstance(kept["commit"], list) else [kept["commit"]]
    found = [of_recipe(kept["recipe"], commit) | changed(name) for commit in commits]
    if any(other != found[0] for other in found):
        raise ValueError(f"{name}: its commits have different recipes: {found}")
    ends = {losses[-1][0] for row in kept["rows"] for losses in row.get("val_losses", []) if losses}
    ended = {row["status"][0] for row in kept["rows"] if row["status"]} == {"done"}
    if ends - {found[0]["steps"]} and ended:
        raise ValueError(f"{name}: runs ended after {sorted(ends)} steps, not {found[0]['steps']}")
    return {**found[0], "note": NOTE}


def main() -> int:
    """Complete all files of results/ that have a recipe."""
    for path in sorted((ROOT / "results").glob("*.json")):
        text = path.read_text()
        kept = json.loads(text)
        if "recipe" not in kept or "rows" not in kept or "set_up" in kept:
            continue
        kept["set_up"] = set_up(path.stem, kept)
        for row in kept["rows"]:
            row["embedding_lr"] = EMBEDDING_LR.get(path.stem, row["adam_lr"])
        path.write_text(json.dumps(kept, indent=1 if text.startswith("{\n ") else None, sort_keys=True) + "\n")
        print(path.name, {name: kept["set_up"][name] for name in ("steps", "batch", "seq_len")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
