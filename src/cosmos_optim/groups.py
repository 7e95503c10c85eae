"""Which parameter gets which rule: ordered, first match wins, total, printable.

The routes, in order: a user's overrides; vectors and scalars; embeddings; the output head; norms; then hidden matrices
by their module: linear layers, convolutions, expert stacks. A parameter that no route claims is an error, never a
guess: in the trackers of every peer, silent misrouting is the most expensive bug.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

HEAD_NAMES = frozenset({"lm_head", "head", "output", "output_layer", "embed_out", "unembed", "unembedding"})
EMBEDDING_NAMES = ("embed", "wte", "wpe", "position", "pos_emb", "cls_token", "mask_token")
# Modules that hold a plain matrix without being nn.Linear: a mixture's router, under its usual names.
LINEAR_KINDS = ("linear", "router", "gate")
# Queries and keys, as the common decoders name them, and rows of one of their heads: Adam-mini's blocks.
QUERY_KEY = re.compile(r"(^|[._])(q|k|q_proj|k_proj|wq|wk|query|key|q_lin|k_lin)\.weight$")
HEAD_ROWS = 64
# Row blocks of the fused weights of torch's own modules: one gate or projection each.
RECURRENT_BLOCKS = {"LSTM": 4, "LSTMCell": 4, "GRU": 3, "GRUCell": 3, "RNN": 1, "RNNCell": 1}


@dataclass(frozen=True)
class Place:
    """A parameter and the module that owns it. Under another name too (`aliases`) where it is tied."""

    name: str
    p: Tensor
    module: nn.Module
    attribute: str
    path: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Route:
    """What becomes of a parameter: its rule, group settings, and why."""

    rule: str
    why: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def param_groups(
    model: nn.Module,
    rule: str = "cosmos",
    *,
    overrides: Mapping[str, str | Mapping[str, Any]] | None = None,
    head: nn.Module | str | None = None,
) -> list[dict[str, Any]]:
    """Sort a model's parameters into groups for `Cosmos` and its peers.

    Hidden matrices get `rule`; embeddings, the output head, norms and vectors get Adam.

    Args:
        model: any module. Frozen parameters are left out.
        rule: the rule of the hidden matrices, which is that of the optimizer the groups are for ("muon" for `Muon`).
        overrides: pattern -> rule name, or a mapping of "rule" and hyper-parameters; patterns are shell-style and
            matched against parameter names, in order, before everything else.
        head: the output head, as a module or its name, where its name does not tell.

    >>> model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 32), nn.Linear(32, 16))
    >>> for group in param_groups(model, overrides={"0.weight": {"rule": "adam", "lr": 0.3}}):
    ...     print(group["rule"], [name for name, _ in group["params"]])
    adam ['0.weight']
    cosmos ['1.weight', '2.weight']
    adam ['1.bias', '2.bias']
    """
    groups: dict[Any, dict[str, Any]] = {}
    for place, route in routes(model, rule, overrides=overrides, head=head):
        key = (route.rule, repr(sorted(route.settings.items())))
        group = groups.setdefault(key, {"params": [], "rule": route.rule, **route.settings})
        group["params"].append((place.name, place.p))
    return list(groups.values())


def routes(
    model: nn.Module,
    rule: str = "cosmos",
    *,
    overrides: Mapping[str, str | Mapping[str, Any]] | None = None,
    head: nn.Module | str | None = None,
) -> list[tuple[Place, Route]]:
    """Every trainable parameter with its route."""
    asked = {pattern: _as_settings(pattern, value, rule) for pattern, value in (overrides or {}).items()}
    used: set[str] = set()
    heads = _heads(model, head)
    tied = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    found = []
    for place in _places(model):
        _refuse_flat(place)
        names = (place.name, *place.aliases)
        matches = [pattern for pattern in asked if any(fnmatch.fnmatchcase(name, pattern) for name in names)]
        used.update(matches)
        if not place.p.requires_grad:
            continue
        if matches:
            settings = dict(asked[matches[0]])
            found.append((place, Route(settings.pop("rule"), f"override {matches[0]!r}", settings)))
        else:
            route = _route(place, rule, id(place.p) in tied, place.path in heads)
            found.append((place, _by_rows(place, route) if rule == "adam-mini" else route))
    unused = [pattern for pattern in asked if pattern not in used]
    if unused:
        known = [place.name for place in _places(model)][:3]
        raise ValueError(f"overrides that match no parameter: {unused}; names look like {known}")
    return found


def _as_settings(pattern: str, value: str | Mapping[str, Any], rule: str) -> dict[str, Any]:
    if isinstance(value, str):
        return {"rule": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"override {pattern!r}: {value!r} is neither a rule's name nor a mapping of hyper-parameters")
    return {"rule": rule, **value}


def _places(model: nn.Module) -> list[Place]:
    """Each parameter once, under the first name it has."""
    modules = dict(model.named_modules())
    found: dict[int, Place] = {}
    for path, module in modules.items():
        owner = module
        if isinstance(module, nn.utils.parametrize.ParametrizationList):  # at owner.parametrizations.weight
            owner = modules[path.rpartition(".")[0].rpartition(".")[0]]
        for attribute, p in module.named_parameters(recurse=False):
            name = f"{path}.{attribute}" if path else attribute
            place = found.setdefault(id(p), Place(name, p, owner, attribute, path))
            if place.name != name:
                found[id(p)] = replace(place, aliases=(*place.aliases, name))
    return list(found.values())


def _heads(model: nn.Module, head: nn.Module | str | None) -> set[str]:
    """Paths of modules that produce the output."""
    modules = dict(model.named_modules())
    if head is None:
        return {path for path in modules if _is_head_name(path)}
    named = {path for path, module in modules.items() if module is head or path == head}
    named |= {path for path in modules for top in named if path.startswith(f"{top}.")}
    if not named:
        raise ValueError(
            f"head={head!r} is no module of this model: give one of its modules, or a name such as 'lm_head'"
        )
    return named


def _is_head_name(path: str) -> bool:
    """A head is named as one and does not sit inside a repeated block."""
    parts = path.split(".")
    return parts[-1] in HEAD_NAMES and not any(part.isdigit() for part in parts)


def _refuse_flat(place: Place) -> None:
    """FSDP1 and ZeRO hand over 1-D pieces of matrices; taking them for vectors would silently run Adam."""
    p = place.p
    declared = getattr(p, "ds_shape", None)
    flat = type(p).__name__ == "FlatParameter" or (declared is not None and len(declared) > 1 and p.dim() < 2)
    module = place.module
    matrix = isinstance(module, (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)) and place.attribute == "weight"
    if flat or (matrix and p.dim() < 2):
        raise ValueError(
            f"parameter {place.name!r} of shape {tuple(p.shape)} is a flat piece of what {type(module).__name__} "
            "declares as a matrix (FSDP1, DeepSpeed ZeRO). COSMOS needs whole matrices or row shards: use FSDP2 "
            "(torch.distributed.fsdp.fully_shard), FSDP1 with use_orig_params and no sharding, or ZeRO stage 0"
        )


def _route(place: Place, rule: str, is_embedding: bool, is_head: bool) -> Route:
    p, module, kind = place.p, place.module, type(place.module).__name__.removeprefix("FSDP")
    if is_embedding or isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return Route("adam", "embedding")
    if p.dim() < 2:
        return Route("adam", "vector" if p.dim() else "scalar")
    if is_head:
        return Route("adam", "output head")
    if place.attribute.endswith("bias"):  # of experts: one row each
        return Route("adam", "biases")
    if p.numel() == max(p.shape) and place.attribute != "weight":  # the magnitudes of weight_norm, say
        return Route("adam", "vector in effect")
    if "norm" in kind.lower():
        return Route("adam", "norm")
    if isinstance(module, nn.modules.conv._ConvNd):
        return _convolution(place, module, rule)
    if kind == "Conv1D" and hasattr(module, "nf"):
        return Route(rule, "Conv1D, stored (in, out)", {"layout": "in_out"})
    if isinstance(module, nn.MultiheadAttention) and place.attribute == "in_proj_weight":
        return Route(rule, "fused query, key, value", {"split_sizes": (p.shape[0] // 3,) * 3})
    if kind in RECURRENT_BLOCKS and place.attribute.startswith("weight"):
        count = 1 if place.attribute.startswith("weight_hr") else RECURRENT_BLOCKS[kind]
        return Route(rule, "recurrent", {"split_sizes": (p.shape[0] // count,) * count} if count > 1 else {})
    known = isinstance(module, nn.Linear) or hasattr(module, "out_features")
    if p.dim() == 2 and (known or any(word in kind.lower() for word in LINEAR_KINDS)):
        return Route(rule, "linear")
    if any(word in place.name.lower() for word in EMBEDDING_NAMES) or 1 in p.shape[-2:]:
        return Route("adam", "embedding" if 1 not in p.shape[-2:] else "vector in effect")
    if p.dim() == 3:
        # transformers' experts say so where they are stored (in, out).
        stored = {"layout": "in_out"} if getattr(module, "is_transposed", False) else {}
        return Route(rule, f"{p.shape[0]} stacked matrices", stored)
    if isinstance(module, nn.MultiheadAttention):
        return Route(rule, "projection")
    raise ValueError(
        f"parameter {place.name!r} of shape {tuple(p.shape)} in {kind} is claimed by no route: say what it is with "
        f"param_groups(model, overrides={{{place.name!r}: {rule!r}}}), or 'adam'"
    )


def _by_rows(place: Place, route: Route) -> Route:
    """Adam-mini's partition: heads of queries and keys, else rows, of all that has rows, embedding and head included.

    Every convolution has output rows, the depthwise ones too, which are no matrices to other rules.
    """
    if place.p.dim() < 2:
        return route
    usual = "conv" if isinstance(place.module, nn.modules.conv._ConvNd) else "matrix"
    settings = {"layout": route.settings.get("layout", usual)}
    if QUERY_KEY.search(place.name):
        return Route("adam-mini", "heads of queries or keys", settings | {"block_rows": HEAD_ROWS})
    return Route("adam-mini", f"rows: {route.why}", settings)


def _convolution(place: Place, module: nn.modules.conv._ConvNd, rule: str) -> Route:
    """Flattened to (out, in * kernel), a block for each of its groups; a depthwise kernel is no matrix."""
    rows, count = place.p.shape[0], module.groups
    if count == 1:
        return Route(rule, "convolution", {"layout": "conv"})
    if place.p.shape[1] == 1 or rows == count:
        return Route("adam", "depthwise convolution")
    return Route(rule, "grouped convolution", {"layout": "conv", "split_sizes": (rows // count,) * count})


def _listed(items: Iterable[Any]) -> list[Any]:
    """A list, but not of a set: state is saved by position."""
    if isinstance(items, (set, frozenset)):
        raise TypeError("a set has another order in every run, and state is saved by position: give a list instead")
    return list(items)


def as_groups(params: nn.Module | Iterable[Any], rule: str) -> list[Any]:
    """Whatever torch.optim takes, or a model, as a list of groups or parameters.

    Bare tensors without a rule must all be matrices: a list from model.parameters() would hide what is an embedding.
    """
    if isinstance(params, nn.Module):
        return param_groups(params, rule)
    if isinstance(params, Tensor):
        raise TypeError("params must be a model or an iterable of tensors or groups, not one tensor: put it in a list")
    given = _listed(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    listed = []
    for group in groups:
        group = dict(group)
        if "params" not in group:
            raise ValueError(f"a parameter group with {sorted(group)} lacks 'params': list its parameters there")
        held = group["params"]
        group["params"] = [held] if isinstance(held, Tensor) else _listed(held)
        if group.get("rule", rule) != "adam":
            for i, item in enumerate(group["params"]):
                name, p = item if isinstance(item, tuple) else (f"number {i}", item)
                if isinstance(p, Tensor) and p.dim() < 2:
                    raise ValueError(
                        f"parameter {name!r} of shape {tuple(p.shape)} is not a matrix: use param_groups(model), which "
                        "gives embeddings, heads, norms and biases to Adam, or put it in a group with rule='adam'"
                    )
        listed.append(group)
    return listed if given else given
