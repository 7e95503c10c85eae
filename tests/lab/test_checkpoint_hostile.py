"""Nothing in a checkpoint is executed when it is read, even if its hashes fit."""

import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_lab.config import RunConfig
from cosmos_lab.io import write_json
from cosmos_lab.run import integrity
from cosmos_lab.run.train import train
from tests.lab.test_checkpoint_damage import cut, remove_hashes
from tests.lab.test_train_distributed import on_ranks


def write_hashes(folder: Path) -> None:
    """Write the hashes of a checkpoint again, as someone who wants it to be accepted would."""
    meta = json.loads((folder / "meta.json").read_text())
    del meta["hash"]
    meta["files"] = integrity.hash_files(folder, meta["files"])
    write_json(folder / "meta.json", integrity.seal(meta))


class Hostile:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.made}",)


def hostile_metadata(folder: Path, made: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(made)))


def hostile_entry(folder: Path, made: Path) -> None:
    """Put a hostile pickle in the place of a setting of the optimizer."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn.endswith("param_groups.0.weight_decay"))
    entry, content = metadata.storage_data[index], io.BytesIO()
    torch.save(Hostile(made), content)
    shard = folder / entry.relative_path
    entry.offset, entry.length = shard.stat().st_size, len(content.getvalue())
    shard.write_bytes(shard.read_bytes() + content.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize("attack", [hostile_metadata, hostile_entry])
def test_nothing_in_a_sharded_checkpoint_is_executed(
    tiny_run: RunConfig, tmp_path: Path, attack: Callable[[Path, Path], None], hashed: bool
) -> None:
    config = tiny_run.replace(sharding="fsdp", keep=1)
    on_ranks(1, lambda: train(config))
    (config.folder / "summary.json").unlink()
    newest = config.folder / "checkpoints" / "step_000008"
    attack(newest / "shards", tmp_path / "executed")
    (write_hashes if hashed else remove_hashes)(newest)

    def refused() -> None:
        with pytest.raises(ValueError, match=r"shards cannot be read \(.*\); no older checkpoint is left"):
            train(config)

    on_ranks(1, refused)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["state.pt", "process_0.pt"])
def test_nothing_in_a_plain_checkpoint_is_executed(tiny_run: RunConfig, tmp_path: Path, name: str) -> None:
    newest = cut(tiny_run)
    torch.save({"model": Hostile(tmp_path / "executed")}, newest / name)
    write_hashes(newest)
    with pytest.raises(ValueError, match=f"{name} cannot be read .*add --resume previous"):
        train(tiny_run)
    assert not (tmp_path / "executed").exists()
