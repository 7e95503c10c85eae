"""Find the weights of attention that hold heads, and how many rows or columns one head has.

Queries, keys and values hold the heads in their rows, the output projection in its columns. A layer counts by its whole
name and by its neighbours: only beside queries, keys and values is `c_proj` or `dense` an output projection. Attention
with other parts, such as compressed keys and values or values of another size than keys, is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from cosmos_optim.routing.fused_weights import FUSED
from cosmos_optim.routing.route import ModelParameter, Route, declared_number, matrix_shape, read_attribute
from cosmos_optim.routing.words import KEY, QUERY

# Whole names of layers. In all fused forms, a head has neighbouring rows, so fused weights are cut like the others.
VALUE = frozenset({"v", "v_proj", "value", "value_proj", "wv", "w_v", "to_v", "v_lin"})
FUSED_HEADS = FUSED | {"query_key_value", "wqkv"}
OUTPUT = frozenset({
    "o", "o_proj", "out_proj", "wo", "Wo", "w_o", "to_out", "to_out.0", "out_lin", "c_proj", "proj", "projection",
    "dense", "output.dense",
})  # fmt: skip
# Names under which attention, or a model's config, declares the size of a head, or else what to compute it from.
HEAD_SIZES = ("head_dim", "attention_head_size", "head_size", "d_kv")
HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_head", "n_heads")
WIDTHS = ("hidden_size", "embed_dim", "n_embd", "d_model", "dim")


@dataclass(frozen=True)
class Heads:
    """How a weight is cut: `size` rows ("output") or columns ("input") for each head."""

    size: int
    side: str


def find_attention_heads(
    model: nn.Module, parameters: Sequence[ModelParameter], split_heads: bool | int
) -> dict[str, Heads]:
    """Return how to cut each weight of attention, by the parameter's name. Raise ValueError if there is none.

    split_heads: the size of a head, or True to read it from the attention module or from a config above it.
    """
    if not isinstance(split_heads, int) or split_heads < 0:
        raise ValueError(f"split_heads={split_heads!r} is not valid: give True, False, or the rows of one head")
    if not split_heads:
        return {}
    rows: dict[str, list[tuple[str, ModelParameter]]] = {}
    columns: dict[str, list[ModelParameter]] = {}
    for parameter in parameters:
        owner, layer = _owner_and_layer(parameter)
        if layer in QUERY | KEY | VALUE | FUSED_HEADS:
            rows.setdefault(_attention(owner), []).append((layer, parameter))
        if layer in OUTPUT:
            columns.setdefault(owner, []).append(parameter)
    found: dict[str, Heads] = {}
    for owner, held in rows.items():
        query, key, value = (_rows(held, names) for names in (QUERY, KEY, VALUE))
        if _rows(held, FUSED_HEADS) or (query and key and key == value):
            size = _size(model, _owner_and_layer(held[0][1])[0], query, split_heads)
            found |= {parameter.name: Heads(size, "output") for _, parameter in held}
            found |= {parameter.name: Heads(size, "input") for parameter in columns.get(owner, ())}
    if not found:
        raise ValueError(
            f"split_heads={split_heads!r} matches no parameter: no module has layers with the names of queries, keys "
            "and values, such as q_proj, k_proj, v_proj, or qkv. Cut other names by overrides: "
            '{"*.queries.weight": {"split_sizes": 64}, "*.outputs.weight": {"split_sizes": 64, "split_side": "input"}}'
        )
    return found


def with_heads(parameter: ModelParameter, route: Route, heads: Heads | None, override: Mapping[str, Any]) -> Route:
    """Return the route with the cut into heads, unless AdamW trains the parameter or an override cuts it.

    override: the settings of the override that the parameter matches.
    """
    if heads is None or route.rule == "adam" or "split_sizes" in override or parameter.p.dim() != 2:
        return route
    rows, columns = matrix_shape(parameter.p, route.settings)
    length, unit = (rows, "rows") if heads.side == "output" else (columns, "columns")
    if length % heads.size:
        raise ValueError(
            f"parameter {parameter.name!r} of shape {tuple(parameter.p.shape)}: its {length} {unit} are not a multiple "
            f"of {heads.size}, the size of a head. Leave it whole by overrides={{{parameter.name!r}: "
            f'{{"split_sizes": None}}}}, or give the size of each block there'
        )
    side = {} if heads.side == "output" else {"split_side": heads.side}
    settings = {**route.settings, "split_sizes": heads.size, **side}
    count = length // heads.size
    cut = f"{count} {'head' if count == 1 else 'heads'} of {heads.size} {unit}"
    return replace(route, why=f"{route.why}, {cut}", settings=settings)


def _owner_and_layer(parameter: ModelParameter) -> tuple[str, str]:
    """Return the path of the module that owns a layer, and the layer's name in it; ("", "") for other parameters.

    nn.MultiheadAttention holds its weights itself. Its fused one is called in_proj, which elsewhere is something else.
    """
    if isinstance(parameter.module, nn.MultiheadAttention):
        name = parameter.tensor_name.removesuffix("_weight")
        return parameter.module_path, "qkv" if name == "in_proj" else name
    if parameter.attribute != "weight":
        return "", ""
    parts = parameter.module_path.split(".")
    count = 2 if ".".join(parts[-2:]) in OUTPUT else 1
    return ".".join(parts[:-count]), ".".join(parts[-count:])


def _attention(owner: str) -> str:
    """Return the path of the whole attention.

    BERT keeps queries in attention.self, ViT in attention.attention, torchtitan in attention.qkv_linear.
    """
    outer, _, last = owner.rpartition(".")
    inner = last in {"self", "qkv_linear"} or (last == "attention" and outer.rpartition(".")[2] == "attention")
    return outer if inner else owner


def _rows(held: Sequence[tuple[str, ModelParameter]], names: frozenset[str]) -> int:
    """Return the rows of the first layer with one of these names, or 0."""
    return next((parameter.p.shape[0] for layer, parameter in held if layer in names), 0)


def _size(model: nn.Module, owner: str, query_rows: int, split_heads: bool | int) -> int:
    """Return the size of a head in the module that owns the queries: declared there or above, or else the given one."""
    sizes = (_declared_size(holder, query_rows) for holder in _holders(model, owner))
    found = next((size for size in sizes if size), None)
    called = repr(owner) if owner else "the model"
    if split_heads is True:
        if found is None:
            raise ValueError(
                f"split_heads=True: neither {called} nor a config above it declares the size of a head "
                f"({', '.join(HEAD_SIZES)}): give the number, split_heads=64"
            )
        return found
    if found not in (None, split_heads):
        raise ValueError(
            f"split_heads={split_heads} is the size of one head, but {called} or a config above it declares "
            f"{found}: give split_heads=True. Overrides with split_sizes can cut any other size"
        )
    return split_heads


def declared_queries(model: nn.Module, owner: str) -> int:
    """Return the rows of queries at this path: the declared number of heads times their size, or 0 if one is missing.

    Both are read from one place, the first that declares a number of heads: a vision tower may have other heads.
    """
    counts = ((holder, _number(holder, HEAD_COUNTS)) for holder in _holders(model, owner))
    return next((count * (_number(holder, HEAD_SIZES) or 0) for holder, count in counts if count), 0)


def _holders(model: nn.Module, owner: str) -> Iterator[object]:
    """Yield the module at this path and its config, then those of each module above it."""
    parts = owner.split(".") if owner else []
    for i in range(len(parts), -1, -1):
        module = model.get_submodule(".".join(parts[:i]))
        yield from (module, read_attribute(module, "config"))


def _number(holder: object, names: Sequence[str]) -> int | None:
    """Return the first positive number that a module or config declares under one of these names."""
    return next((x for x in (declared_number(holder, name) for name in names) if x is not None and x > 0), None)


def _declared_size(holder: object, query_rows: int) -> int | None:
    """Return the size of a head that a module or config declares, or that follows from its number of heads, or None."""
    if (size := _number(holder, HEAD_SIZES)) is not None:
        return size
    width, count = query_rows or _number(holder, WIDTHS), _number(holder, HEAD_COUNTS)
    return width // count if width and count and width % count == 0 else None
