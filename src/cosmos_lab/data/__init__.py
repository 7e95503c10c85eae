"""Token data: shards, the embedded text, batches with exact resume; `data.prepare` makes shards from text."""

from cosmos_lab.data.batches import Batches, validation_batches, validation_windows
from cosmos_lab.data.locate import Split
from cosmos_lab.data.shards import open_shard, write_shard
from cosmos_lab.data.source import TokenSource, Vocabulary, open_data

__all__ = [
    "Batches", "Split", "TokenSource", "Vocabulary", "open_data", "open_shard", "validation_batches",
    "validation_windows", "write_shard",
]  # fmt: skip
