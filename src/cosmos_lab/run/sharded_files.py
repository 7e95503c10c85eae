"""The files of a sharded checkpoint: torch writes and reads them, but nothing in them is executed."""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cosmos_lab.io import first_line


def save(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Write the shards of model and optimizer of every process into the folder ``path``."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    try:
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    except dcp.CheckpointException as error:  # not an Exception: `checkpoint.save` would not clean up after a full disk
        raise next(problem for problem, _ in error.failures.values()) from error


def load(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Read what `save` wrote, on any number of processes; shards that cannot be read are an OSError."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    fill(state, path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def fill(state: dict[str, Any], path: Path) -> None:
    """Fill the tensors of ``state`` from shards, on all processes or in one without a process group.

    torch would execute the pickles in ``.metadata`` and in the entries that are not tensors. Here they are data only.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
    from torch.distributed.checkpoint.planner import ReadItem

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
            metadata: Metadata = _MetadataUnpickler(io.BytesIO((path / ".metadata").read_bytes())).load()
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    class Planner(dcp.DefaultLoadPlanner):
        def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
            plain = io.BytesIO()
            torch.save(torch.load(value, weights_only=True), plain)
            plain.seek(0)
            super().load_bytes(read_item, plain)

    try:
        with warnings.catch_warnings():
            # torch warns that it reads in one process only, which is what an export or an evaluation does.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, storage_reader=Reader(path), planner=Planner())
    except dcp.CheckpointException as error:  # every process has it
        first = next(problem for problem, _ in error.failures.values())
        raise OSError(f"{path} cannot be read ({first_line(first)})") from error


_METADATA_CLASSES = {  # by module
    "torch.distributed.checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.serialization": "_get_layout",
    "torch": "Size",
    "pathlib": "PosixPath WindowsPath",
    "pathlib._local": "PosixPath WindowsPath",  # Python 3.13
}


class _MetadataUnpickler(pickle.Unpickler):
    """Reads torch's ``.metadata``, and refuses everything that is not one of its classes."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not dtype and name not in _METADATA_CLASSES.get(module, "").split():
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which does not belong in a checkpoint")
        return super().find_class(module, name)
