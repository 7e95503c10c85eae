"""Which parameter gets which rule: ordered, first match wins, total, printable.

The routes, in order: a user's overrides; vectors and scalars; embeddings; the output head; norms; then hidden matrices
by their module: linear layers, convolutions, expert stacks. A parameter that no route claims is an error, never a
guess: in the trackers of every peer, silent misrouting is the most expensive bug.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from cosmos_optim.routing.output_head import heads_of

EMBEDDING_NAME = re.compile(r"(^|[._])(embed|wte|wpe|position|pos_emb|rel_pos)|(^|[._])\w*tokens?$")
BIAS_NAME = re.compile(r"bias(es|_\w)?$")
# A 3-D parameter is a stack of matrices where its name or its module's says so.
STACK = re.compile(r"expert|moe(?![a-z])|mixture|grouped|stack", re.IGNORECASE)
# transformers' experts say `is_transposed` where they are stored (in, out), but for these.
TRANSPOSED = ("Llama4TextExperts",)
# Modules that hold a plain matrix without being nn.Linear: a mixture's router, under its usual names.
LINEAR_KINDS = ("linear", "router", "gate")
# Queries and keys, as the common decoders name them, and rows of one of their heads: Adam-mini's blocks.
QUERY_KEY = re.compile(r"(^|[._])(q|k|q_proj|k_proj|wq|wk|query|key|q_lin|k_lin)\.weight$")
HEAD_ROWS = 64
# Row blocks of the fused weights of torch's own modules: one gate or projection each.
RECURRENT_BLOCKS: dict[type[nn.Module], int] = {
    nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3, nn.RNN: 1, nn.RNNCell: 1,
}  # fmt: skip


@dataclass(frozen=True)
class Place:
    """A parameter and the module that owns it. Under another name too (`aliases`) where it is tied.

    tensor: the module's tensor that it makes up, which is not `attribute` where that is parametrized.
    """

    name: str
    p: Tensor
    module: nn.Module
    attribute: str
    tensor: str
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
    beside: Optimizer | None = None,
) -> list[dict[str, Any]]:
    """Sort a model's parameters into groups for `Cosmos` and its peers.

    Hidden matrices get `rule`; embeddings, the output head, norms and vectors get Adam.

    Args:
        model: any module. Frozen parameters are left out.
        rule: the rule of the hidden matrices, which is that of the optimizer the groups are for ("muon" for `Muon`).
        overrides: pattern -> rule name, or a mapping of hyper-parameters and "rule"; patterns are shell-style and
            matched against parameter names, in order, before everything else. What an override does not name stays:
            the rule, and how a convolution or a fused weight is seen as matrices.
        head: the output head, as a module or its name, where nothing tells which it is.
        beside: an optimizer whose parameters are left out, so that what has thawed since can be added to it.

    >>> model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 32), nn.Linear(32, 16))
    >>> for group in param_groups(model, overrides={"0.weight": {"rule": "adam", "lr": 0.3}}):
    ...     print(group["rule"], [name for name, _ in group["params"]])
    adam ['0.weight']
    cosmos ['1.weight', '2.weight']
    adam ['1.bias', '2.bias']
    """
    groups: dict[Any, dict[str, Any]] = {}
    if not isinstance(beside, Optimizer | None):
        raise TypeError(f"beside must be an optimizer; got a {type(beside).__name__}")
    held = {id(p) for group in beside.param_groups for p in group["params"]} if beside is not None else set()
    for place, route in routes(model, rule, overrides=overrides, head=head):
        if id(place.p) in held:
            continue
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
    if not isinstance(model, nn.Module):
        raise TypeError(f"give the model, not its parameters (a {type(model).__name__}): its modules tell what each is")
    if overrides and not isinstance(overrides, Mapping):
        raise TypeError(f"overrides must map patterns to rules or settings; got {overrides!r}")
    asked = {pattern: _as_settings(pattern, value) for pattern, value in (overrides or {}).items()}
    used: set[str] = set()
    heads = heads_of(model, head)
    tied = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    found: list[tuple[Place, Route]] = []
    unclaimed: list[Place] = []
    for place in _places(model):
        _refuse_flat(place)
        names = (place.name, *place.aliases)
        matches = [pattern for pattern in asked if any(fnmatch.fnmatchcase(name, pattern) for name in names)]
        used.update(matches)
        if not place.p.requires_grad:
            continue
        route = _route(place, rule, id(place.p) in tied, place.path in heads)
        if rule == "adam-mini" and route is not None:
            route = _by_rows(place, route)
        if matches:
            route = _overridden(place, route, matches[0], asked[matches[0]])
        if route is None:
            unclaimed.append(place)
        else:
            found.append((place, route))
    _refuse_unclaimed(unclaimed, rule)
    unused = [pattern for pattern in asked if pattern not in used]
    if unused:
        known = [place.name for place in _places(model)][:3]
        raise ValueError(f"overrides that match no parameter: {unused}; names look like {known}")
    return found


def _as_settings(pattern: str, value: str | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(value, str):
        return {"rule": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"override {pattern!r}: {value!r} is neither a rule's name nor a mapping of hyper-parameters")
    return value


def _overridden(place: Place, route: Route | None, pattern: str, asked: Mapping[str, Any]) -> Route | None:
    """The route with what an override says: one that names no rule needs a route to keep."""
    if "rule" not in asked and route is None:
        return None
    rule = asked.get("rule", route.rule if route else None)
    if route is not None and route.rule == rule:
        kept = route.settings
    else:
        kept = {} if rule == "adam" else _view(place)[1]
    return Route(rule, f"override {pattern!r}", {**kept, **{k: v for k, v in asked.items() if k != "rule"}})


def _refuse_unclaimed(places: Sequence[Place], rule: str) -> None:
    """One error for all of them, by patterns: the same parameter of many layers is one line."""
    if not places:
        return
    first = places[0]
    patterns = list(dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.)", r"\1*", place.name) for place in places))
    more = f" and {len(patterns) - 8} more" if len(patterns) > 8 else ""
    others = f"; so are all of {patterns[:8]}{more}" if len(places) > 1 else ""
    raise ValueError(
        f"parameter {first.name!r} of shape {tuple(first.p.shape)} in {type(first.module).__name__} is claimed by no "
        f"route{others}: say what it is with param_groups(model, overrides={{{patterns[0]!r}: {rule!r}}}), or 'adam'"
    )


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
            tensor = attribute if owner is module else path.rpartition(".")[2]
            place = found.setdefault(id(p), Place(name, p, owner, attribute, tensor, path))
            if place.name != name:
                found[id(p)] = replace(place, aliases=(*place.aliases, name))
    return list(found.values())


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


def _route(place: Place, rule: str, is_embedding: bool, is_head: bool) -> Route | None:
    """The route of a parameter; None where nothing tells what it is."""
    p, module, kind = place.p, place.module, type(place.module).__name__.removeprefix("FSDP")
    if is_embedding or isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return Route("adam", "embedding")
    if p.dim() < 2:
        return Route("adam", "vector" if p.dim() else "scalar")
    if is_head:
        return Route("adam", "output head")
    if BIAS_NAME.search(place.attribute):  # of experts: one row each; of attention: one a head or position
        return Route("adam", "biases")
    if p.numel() == max(p.shape) and place.attribute != "weight":  # the magnitudes of weight_norm, say
        return Route("adam", "vector in effect")
    if "norm" in kind.lower() and not isinstance(module, nn.Linear):
        return Route("adam", "norm")
    why, view = _view(place)
    if why == "depthwise convolution":
        return Route("adam", why)
    if why:
        return Route(rule, why, view)
    known = isinstance(module, nn.Linear) or hasattr(module, "out_features")
    if p.dim() == 2 and (known or any(word in kind.lower() for word in LINEAR_KINDS)):
        return Route(rule, "linear")
    if 1 in p.shape[-2:]:
        return Route("adam", "vector in effect")
    near = 2 if isinstance(module, (nn.ParameterList, nn.ParameterDict)) else 1
    if EMBEDDING_NAME.search(".".join([*place.path.split(".")[-near:], place.tensor]).lower()):
        return Route("adam", "embedding")
    if isinstance(module, nn.MultiheadAttention):
        return Route(rule, "projection")
    return None


def _view(place: Place) -> tuple[str, dict[str, Any]]:
    """What a parameter is that is not one plain matrix, and its settings; "" and none for all others."""
    p, module, kind = place.p, place.module, type(place.module).__name__.removeprefix("FSDP")
    if isinstance(module, nn.modules.conv._ConvNd) and p.dim() > 2:
        return _convolution(place, module)
    if kind == "Conv1D" and hasattr(module, "nf"):
        return "Conv1D, stored (in, out)", {"layout": "in_out"}
    if isinstance(module, nn.MultiheadAttention) and place.tensor == "in_proj_weight":
        return "fused query, key, value", {"split_sizes": (p.shape[0] // 3,) * 3}
    recurrent = next((count for own, count in RECURRENT_BLOCKS.items() if isinstance(module, own)), 0)
    if recurrent and p.dim() == 2 and place.tensor.startswith("weight"):
        count = 1 if place.tensor.startswith("weight_hr") else recurrent
        return "recurrent", {"split_sizes": (p.shape[0] // count,) * count} if count > 1 else {}
    if p.dim() == 3 and 1 not in p.shape and (STACK.search(f"{kind} {place.name}") or hasattr(module, "is_transposed")):
        stored = getattr(module, "is_transposed", kind in TRANSPOSED)
        return f"{p.shape[0]} stacked matrices", {"layout": "in_out"} if stored else {}
    return "", {}


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


def _convolution(place: Place, module: nn.modules.conv._ConvNd) -> tuple[str, dict[str, Any]]:
    """Flattened to (out, in * kernel), a block for each of its groups; a depthwise kernel is no matrix."""
    rows, count = place.p.shape[0], module.groups
    if count == 1:
        return "convolution", {"layout": "conv"}
    if place.p.shape[1] == 1 or rows == count:
        return "depthwise convolution", {"layout": "conv"}
    return "grouped convolution", {"layout": "conv", "split_sizes": (rows // count,) * count}


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
