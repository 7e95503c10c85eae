"""Choose a rule for every parameter of a model: routes are tried in order, and the first match wins.

The routes, in order: embeddings; vectors and scalars; the output head; biases and single rows; norms; then hidden
matrices by their module: convolutions, fused weights, stacks of experts, linear layers. A user's override replaces the
result. A parameter that matches no route is an error, because silent misrouting is the costliest bug in the issue
trackers of similar optimizers.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from cosmos_optim.routing.output_head import find_output_heads
from cosmos_optim.sharding.other_engines import REMEDY, refuse_flat

EMBEDDING_NAME = re.compile(r"(^|[._])(embed|wte|wpe|position|pos_emb|rel_pos)|(^|[._])\w*tokens?$")
BIAS_NAME = re.compile(r"bias(es|_\w)?$")
# A 3-D parameter is a stack of matrices if its name or its module's name says so.
STACK = re.compile(r"expert|moe(?![a-z])|mixture|grouped|stack", re.IGNORECASE)
# transformers' experts that are stored (in, out) say so with `is_transposed`, except these.
TRANSPOSED = ("Llama4TextExperts",)
# Modules with a plain matrix that are not nn.Linear: usual names of a mixture's router.
LINEAR_KINDS = ("linear", "router", "gate")
# Queries and keys, as the common decoders name them, and the rows of one of their heads: Adam-mini's blocks.
QUERY_KEY = re.compile(r"(^|[._])(q|k|q_proj|k_proj|wq|wk|query|key|q_lin|k_lin)\.weight$")
HEAD_ROWS = 64
# Row blocks of the fused weights of torch's own modules: one gate or projection each.
RECURRENT_BLOCKS: dict[type[nn.Module], int] = {
    nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3, nn.RNN: 1, nn.RNNCell: 1,
}  # fmt: skip
Overrides = Mapping[str, str | Mapping[str, Any]]


@dataclass(frozen=True)
class ModelParameter:
    """A parameter of a model and the module that owns it.

    attribute: the parameter's name in the module that holds it.
    tensor_name: the owner's tensor that it is part of; not the same as `attribute` if the tensor is parametrized.
    module_path: the path of the module that holds it.
    aliases: its other names, if it is tied.
    """

    name: str
    p: Tensor
    module: nn.Module
    attribute: str
    tensor_name: str
    module_path: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Route:
    """The rule of a parameter, its group settings, and the reason."""

    rule: str
    why: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def param_groups(
    model: nn.Module, rule: str = "cosmos", *, overrides: Overrides | None = None,
    head: nn.Module | str | None = None, beside: Optimizer | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Sort a model's parameters into groups for `Cosmos` and its peers.

    Hidden matrices get `rule`; embeddings, the output head, norms and vectors get AdamW (rule "adam"). The groups of
    hidden matrices come first.

    Args:
        model: any module. Frozen parameters are left out.
        rule: the rule of the hidden matrices, that is, of the optimizer that gets the groups ("muon" for `Muon`).
        overrides: pattern -> rule name, or a mapping of hyper-parameters and "rule"; patterns are shell-style and
            matched against parameter names, in order, before everything else. An override changes only what it
            names: the rule, and how a convolution or fused weight is cut into matrices, stay otherwise.
        head: the output head, as a module or its name, if it cannot be found automatically.
        beside: an optimizer; its parameters are left out, so that layers unfrozen later can be added to it.

    >>> model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 32), nn.Linear(32, 16))
    >>> for group in param_groups(model, overrides={"0.weight": {"rule": "adam", "lr": 0.3}}):
    ...     print(group["rule"], [name for name, _ in group["params"]])
    cosmos ['1.weight', '2.weight']
    adam ['0.weight']
    adam ['1.bias', '2.bias']
    """
    groups: dict[Any, dict[str, Any]] = {}
    if not isinstance(beside, Optimizer | None):
        raise TypeError(f"beside must be an optimizer, got a {type(beside).__name__}")
    held = {id(p) for group in beside.param_groups for p in group["params"]} if beside is not None else set()
    for parameter, route in routes(model, rule, overrides=overrides, head=head):
        if id(parameter.p) in held:
            continue
        key = (route.rule, repr(sorted(route.settings.items())))
        group = groups.setdefault(key, {"params": [], "rule": route.rule, **route.settings})
        group["params"].append((parameter.name, parameter.p))
    # Hidden matrices first, because loggers show the rate of the first group.
    return sorted(groups.values(), key=lambda group: group["rule"] == "adam")


def routes(
    model: nn.Module, rule: str = "cosmos", *, overrides: Overrides | None = None, head: nn.Module | str | None = None
) -> list[tuple[ModelParameter, Route]]:
    """Return every trainable parameter with its route."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"give the model, not its parameters (got a {type(model).__name__}): routing reads its modules")
    if overrides and not isinstance(overrides, Mapping):
        raise TypeError(f"overrides must map patterns to rules or settings, got {overrides!r}")
    asked = {pattern: {"rule": x} if isinstance(x, str) else x for pattern, x in (overrides or {}).items()}
    for pattern, settings in asked.items():
        if not isinstance(settings, Mapping):
            wanted = "neither a rule's name nor a mapping of hyper-parameters"
            raise ValueError(f"override {pattern!r}: {settings!r} is {wanted}")
    used: set[str] = set()
    heads = find_output_heads(model, head)
    tied = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    found: list[tuple[ModelParameter, Route]] = []
    unknown: list[ModelParameter] = []
    for parameter in _model_parameters(model):
        _refuse_flat(parameter)
        names = (parameter.name, *parameter.aliases)
        matches = [pattern for pattern in asked if any(fnmatch.fnmatchcase(name, pattern) for name in names)]
        used.update(matches)
        if not parameter.p.requires_grad:
            continue
        route = _route(parameter, rule, id(parameter.p) in tied, parameter.module_path in heads)
        if rule == "adam-mini" and route is not None:
            route = _adam_mini_route(parameter, route)
        if matches:
            route = _overridden(parameter, route, matches[0], asked[matches[0]])
        if route is None:
            unknown.append(parameter)
        else:
            found.append((parameter, route))
    _refuse_unknown(unknown, rule)
    if unused := [pattern for pattern in asked if pattern not in used]:
        known = [parameter.name for parameter in _model_parameters(model)][:3]
        raise ValueError(f"overrides that match no parameter: {unused}; names look like {known}")
    return found


def _overridden(parameter: ModelParameter, route: Route | None, pattern: str, asked: Mapping[str, Any]) -> Route | None:
    """Return the route changed by an override; None if neither of them names a rule."""
    if "rule" not in asked and route is None:
        return None
    rule = asked.get("rule", route.rule if route else None)
    if route is not None and route.rule == rule:
        kept = route.settings
    else:
        kept = {} if rule == "adam" else _matrix_form(parameter)[1]
    return Route(rule, f"override {pattern!r}", {**kept, **{k: v for k, v in asked.items() if k != "rule"}})


def _refuse_unknown(parameters: Sequence[ModelParameter], rule: str) -> None:
    """Raise one error for all parameters without a route, with one pattern for the same parameter of many layers."""
    if not parameters:
        return
    first = parameters[0]
    patterns = list(dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.)", r"\1*", parameter.name) for parameter in parameters))
    more = f" and {len(patterns) - 8} more" if len(patterns) > 8 else ""
    others = f", and neither is any of {patterns[:8]}{more}" if len(parameters) > 1 else ""
    raise ValueError(
        f"parameter {first.name!r} of shape {tuple(first.p.shape)} in {type(first.module).__name__} is not known to "
        f"be a hidden matrix or an embedding{others}: choose its rule with "
        f"param_groups(model, overrides={{{patterns[0]!r}: {rule!r}}}), or 'adam'"
    )


def _model_parameters(model: nn.Module) -> list[ModelParameter]:
    """Return each parameter once, under its first name."""
    modules = dict(model.named_modules())
    found: dict[int, ModelParameter] = {}
    for path, module in modules.items():
        owner = module
        if isinstance(module, nn.utils.parametrize.ParametrizationList):  # at owner.parametrizations.weight
            owner = modules[path.rpartition(".")[0].rpartition(".")[0]]
        for attribute, p in module.named_parameters(recurse=False):
            name = f"{path}.{attribute}" if path else attribute
            tensor = attribute if owner is module else path.rpartition(".")[2]
            parameter = found.setdefault(id(p), ModelParameter(name, p, owner, attribute, tensor, path))
            if parameter.name != name:
                found[id(p)] = replace(parameter, aliases=(*parameter.aliases, name))
    return list(found.values())


def _refuse_flat(parameter: ModelParameter) -> None:
    """Reject the 1-D pieces of matrices that FSDP1 and ZeRO make: they would silently be trained by AdamW."""
    p, module = parameter.p, parameter.module
    matrix = isinstance(module, (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)) and parameter.attribute == "weight"
    is_piece = p.dim() < 2 and (matrix or len(getattr(p, "ds_shape", ())) > 1)
    refuse_flat(parameter.name, p, is_piece=is_piece)
    if is_piece:
        raise ValueError(
            f"parameter {parameter.name!r} of shape {tuple(p.shape)} is a flat piece of the matrix of a "
            f"{type(module).__name__} (FSDP1, DeepSpeed ZeRO), so its rows and columns are lost. {REMEDY}"
        )


def _route(parameter: ModelParameter, rule: str, is_embedding: bool, is_head: bool) -> Route | None:
    """Return the route of a parameter, or None if it is not recognized."""
    p, module, kind = parameter.p, parameter.module, type(parameter.module).__name__.removeprefix("FSDP").lower()
    form, settings = _matrix_form(parameter)
    is_linear = isinstance(module, nn.Linear)
    has_matrix = is_linear or hasattr(module, "out_features") or any(word in kind for word in LINEAR_KINDS)
    near = 2 if isinstance(module, (nn.ParameterList, nn.ParameterDict)) else 1
    path = ".".join([*parameter.module_path.split(".")[-near:], parameter.tensor_name]).lower()
    is_row = p.numel() == max(p.shape, default=1) and parameter.attribute != "weight"  # as in weight_norm
    table: list[tuple[object, Route]] = [
        (is_embedding or isinstance(module, (nn.Embedding, nn.EmbeddingBag)), Route("adam", "embedding")),
        (p.dim() < 2, Route("adam", "vector" if p.dim() else "scalar")),
        (is_head, Route("adam", "output head")),
        (BIAS_NAME.search(parameter.attribute), Route("adam", "biases")),  # a row for each expert, head or position
        (is_row, Route("adam", "vector in effect")),
        ("norm" in kind and not is_linear, Route("adam", "norm")),
        (form == "depthwise convolution", Route("adam", form)),
        (form, Route(rule, form, settings)),
        (p.dim() == 2 and has_matrix, Route(rule, "linear")),
        (1 in p.shape[-2:], Route("adam", "vector in effect")),
        (EMBEDDING_NAME.search(path), Route("adam", "embedding")),
        (isinstance(module, nn.MultiheadAttention), Route(rule, "projection")),
    ]
    return next((route for matches, route in table if matches), None)


def _matrix_form(parameter: ModelParameter) -> tuple[str, dict[str, Any]]:
    """Return the form of a parameter that is not one plain matrix, and its settings; otherwise "" and {}.

    A convolution is flattened to (out, in * kernel), one block for each group; a depthwise one is not a matrix.
    """
    p, module, kind = parameter.p, parameter.module, type(parameter.module).__name__.removeprefix("FSDP")
    if isinstance(module, nn.modules.conv._ConvNd) and p.dim() > 2:
        if module.groups == 1:
            return "convolution", {"layout": "conv"}
        if p.shape[1] == 1 or p.shape[0] == module.groups:
            return "depthwise convolution", {"layout": "conv"}
        return "grouped convolution", {"layout": "conv", "split_sizes": (p.shape[0] // module.groups,) * module.groups}
    if kind == "Conv1D" and hasattr(module, "nf"):
        return "Conv1D, stored (in, out)", {"layout": "in_out"}
    if isinstance(module, nn.MultiheadAttention) and parameter.tensor_name == "in_proj_weight":
        return "fused query, key, value", {"split_sizes": (p.shape[0] // 3,) * 3}
    recurrent = next((count for own, count in RECURRENT_BLOCKS.items() if isinstance(module, own)), 0)
    if recurrent and p.dim() == 2 and parameter.tensor_name.startswith("weight"):
        count = 1 if parameter.tensor_name.startswith("weight_hr") else recurrent
        return "recurrent", {"split_sizes": (p.shape[0] // count,) * count} if count > 1 else {}
    named_stack = STACK.search(f"{kind} {parameter.name}") or hasattr(module, "is_transposed")
    if p.dim() == 3 and 1 not in p.shape and named_stack:
        stored = getattr(module, "is_transposed", kind in TRANSPOSED)
        return f"{p.shape[0]} stacked matrices", {"layout": "in_out"} if stored else {}
    return "", {}


def _adam_mini_route(parameter: ModelParameter, route: Route) -> Route:
    """Return Adam-mini's route: a block is a head of queries or keys, or a row of any other parameter with rows.

    That includes embeddings, the output head and depthwise convolutions, which other rules leave to AdamW.
    """
    if parameter.p.dim() < 2:
        return route
    usual = "conv" if isinstance(parameter.module, nn.modules.conv._ConvNd) else "matrix"
    settings = {"layout": route.settings.get("layout", usual)}
    if QUERY_KEY.search(parameter.name):
        return Route("adam-mini", "heads of queries or keys", settings | {"block_rows": HEAD_ROWS})
    return Route("adam-mini", f"rows: {route.why}", settings)


def _listed(items: Iterable[Any]) -> list[Any]:
    """Return a list of the items; reject a set, because its order differs between runs."""
    if isinstance(items, (set, frozenset)):
        raise TypeError("params must be ordered, got a set: optimizer state is saved by position. Pass a list.")
    return list(items)


def as_groups(params: nn.Module | Iterable[Any], rule: str) -> list[Any]:
    """Return a model, or anything that torch.optim takes, as a list of groups or parameters.

    Bare tensors without a rule must all be matrices: embeddings cannot be recognized in model.parameters().
    """
    if isinstance(params, nn.Module):
        return param_groups(params, rule)
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        got = "one tensor: put it in a list" if isinstance(params, Tensor) else f"{params!r}"
        raise TypeError(f"params must be a model or an iterable of tensors or groups, got {got}")
    given = _listed(params)
    groups = [dict(x) for x in given] if given and isinstance(given[0], dict) else [{"params": given}]
    for group in groups:
        if "params" not in group:
            raise ValueError(f"a parameter group with {sorted(group)} has no 'params': list its parameters there")
        held = group["params"]
        group["params"] = [held] if isinstance(held, Tensor) else _listed(held)
        if group.get("rule", rule) != "adam":
            for i, item in enumerate(group["params"]):
                name, p = item if isinstance(item, tuple) else (f"number {i}", item)
                if isinstance(p, Tensor) and p.dim() < 2:
                    refuse_flat(name, p, is_piece=True)
                    raise ValueError(
                        f"parameter {name!r} of shape {tuple(p.shape)} is not a matrix: use param_groups(model), which "
                        "gives embeddings, heads, norms and biases to AdamW, or put it in a group with rule='adam'"
                    )
    return groups if given else given
