"""Find the shard files of one split from what a user writes: a folder, a prefix, a glob, one file."""

from __future__ import annotations

import glob
import re
import shlex
from pathlib import Path
from typing import Literal, NamedTuple

from cosmos_lab.data.shards import SUFFIXES

Split = Literal["train", "val"]

# The word is alone between separators, so that "training_set" or "interval" is not a label.
_LABEL = re.compile(r"(?:^|[._-])(train|val|valid|validation)(?=[._-]|\d|$)")


class ShardName(NamedTuple):
    """What the name of a shard tells: to which set it belongs, and what it is for (None: it does not say)."""

    prefix: str
    split: Split | None


def split_name(path: Path) -> ShardName:
    """Split `wiki_t5_train_000.bin` into prefix and split, ("wiki_t5", "train"); `notes.bin` is ("notes", None)."""
    stem = path.name.removesuffix(".xz").removesuffix(".bin")
    labels = list(_LABEL.finditer(stem))
    if not labels:
        return ShardName(stem, None)
    found = labels[-1]  # The last label counts: "train_t5_val_000" is the validation part of a text called "train".
    return ShardName(stem[: found.start()], "train" if found[1] == "train" else "val")


def find_shards(spec: str, split: Split) -> list[Path]:
    """Return the shard files of `split` that a folder, the start of file names, a glob or a file names, sorted by name.

    A spec that names only the other split's files means the files beside them with the same prefix:
    `data/wiki_t5_train_000.bin` and split "val" gives `data/wiki_t5_val*.bin`.
    """
    if split not in ("train", "val"):
        raise ValueError(f'split is {split!r}; give "train" or "val"')
    candidates = _candidates(spec)
    chosen = [path for path in candidates if split_name(path).split == split]
    if not chosen:
        homes = {(path.parent, split_name(path).prefix) for path in candidates if split_name(path).split}
        chosen = [p for folder, prefix in homes for p in _shards_in(folder) if split_name(p) == (prefix, split)]
    if not chosen and split == "train":
        chosen = [path for path in candidates if split_name(path).split is None]
    if not chosen:
        raise ValueError(
            f"data {spec!r} has no {split} shard: no file with '{split}' in its name among "
            f"{_names(candidates)} or beside them; name one such, or make shards with `cosmos-lab data prepare`"
        )
    kept = set(chosen)
    return sorted(p for p in kept if p.suffix != ".xz" or p.with_suffix("") not in kept)  # x.bin without x.bin.xz


def _candidates(spec: str) -> list[Path]:
    path = Path(spec).expanduser()
    if path.is_file():
        if not path.name.endswith(SUFFIXES):
            raise ValueError(f"data {spec!r} is not a shard (.bin, .bin.xz); `cosmos-lab data prepare` makes shards")
        return [path]
    if path.is_dir():
        return _one_prefix(spec, path, _shards_in(path))
    # First take the spec literally: a set may be called `d[0-9]_t5`, or `a_t5` beside one called `a_t5_clean`.
    found = [p for p in _shards_in(path.parent) if p.name.startswith(path.name)] if path.parent.is_dir() else []
    if found:
        return [p for p in found if split_name(p).prefix == path.name] or _one_prefix(spec, path.parent, found)
    if any(sign in spec for sign in "*?["):
        found = sorted(Path(name) for name in glob.glob(str(path)) if name.endswith(SUFFIXES))
    if not found:
        beside = _shards_in(path.parent) if path.parent.is_dir() else []
        hint = f"{path.parent} holds {_names(beside)}" if path.parent.is_dir() else f"there is no folder {path.parent}"
        raise ValueError(
            f"missing shard: no .bin or .bin.xz file matches {spec!r} ({hint}); "
            "`cosmos-lab data prepare` makes shards, --data embedded needs none"
        )
    return found


def _one_prefix(spec: str, folder: Path, found: list[Path]) -> list[Path]:
    if not found:
        raise ValueError(
            f"data {spec!r} holds no token shard (.bin, .bin.xz); `cosmos-lab data prepare {shlex.quote(spec)}` makes "
            "shards of the text in it, --data embedded needs none"
        )
    prefixes = sorted({split_name(path).prefix for path in found})
    if len(prefixes) > 1:
        names = ", ".join(str(folder / prefix) for prefix in prefixes[:6])
        raise ValueError(f"data {spec!r} holds shards of several texts or tokenizers; name one set: {names}")
    return found


def _shards_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIXES) and not path.name.startswith("."))


def _names(paths: list[Path]) -> str:
    shown = ", ".join(path.name for path in paths[:6]) or "no shard"
    return shown + (f", ... ({len(paths)} files)" if len(paths) > 6 else "")
