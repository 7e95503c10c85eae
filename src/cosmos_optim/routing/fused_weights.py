"""Recognize query, key and value stored as one weight, to suggest the sizes at which to cut it.

COSMOS and Muon treat a fused weight as one matrix, unless `split_sizes` says where its parts begin. Only weights that
store the three parts one after the other can be cut so. Most models that interleave them by heads name them otherwise:
query_key_value in GPT-NeoX, BLOOM and Falcon, wqkv in torchtitan and InternLM2.
"""

from __future__ import annotations

from cosmos_optim.routing.route import ModelParameter, Route, matrix_shape
from cosmos_optim.routing.words import layer_pattern

# Whole names of fused layers that store queries, keys and values one after the other: timm, GPT-2, nanoGPT, Phi-3, MPT.
FUSED = frozenset({"qkv", "qkv_proj", "c_attn", "Wqkv", "to_qkv", "attn_qkv"})


def fused_sizes(parameter: ModelParameter, route: Route, queries: int = 0) -> list[int]:
    """Return the sizes at which to cut a fused weight; none if it is not one, or is cut already.

    queries: how many of its rows are queries, if a module or config declares it, or 0.
    """
    owner = parameter.module_path.rpartition(".")[2]
    if owner not in FUSED or route.kind != "hidden" or route.settings.get("split_sizes") or parameter.p.dim() != 2:
        return []
    rows, columns = matrix_shape(parameter.p, route.settings)
    return split_sizes(rows, columns, queries)


def fused_hint(parameter: ModelParameter, sizes: list[int]) -> str:
    """Return advice to cut a fused weight at these sizes."""
    pattern = layer_pattern(parameter.name)
    return (
        f"{pattern} looks like query, key and value in one weight. If all queries come first, then all keys, then all "
        "values (some models store the three of each head together), you can cut them (not measured): "
        f'overrides={{"{pattern}": {{"split_sizes": {sizes}}}}}'
    )


def split_sizes(rows: int, columns: int, queries: int = 0) -> list[int]:
    """Return the rows of query, key and value: equal, or fewer for keys and values in grouped attention.

    queries: the rows of the query, or 0 if they are not known. Then they are as many as the columns, or a third of all.

    >>> split_sizes(2304, 768), split_sizes(1024, 768), split_sizes(700, 768)
    ([768, 768, 768], [768, 128, 128], [])
    >>> split_sizes(6144, 2560, queries=4096)
    [4096, 1024, 1024]
    """
    if rows - queries in range(2, 2 * queries + 1, 2):
        return [queries, (rows - queries) // 2, (rows - queries) // 2]
    others = rows - columns
    if others <= 0 or others % 2 or others > 2 * columns:
        return [rows // 3] * 3 if rows % 3 == 0 and others > 0 else []
    return [columns, others // 2, others // 2]
