"""Choose a rule for every parameter of a model: routes are tried in order, and the first match wins.

The routes, in order: embeddings; vectors and scalars; the output head; tables, biases, norms and single rows; then
hidden matrices by their module: convolutions, fused weights, stacks of experts, linear layers. A user's override
replaces the result. A parameter that matches no route is an error, because silent misrouting is the costliest bug in
the issue trackers of similar optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from cosmos_optim.routing.attention_heads import find_attention_heads, with_heads
from cosmos_optim.routing.mark import apply_marks, leave_mark, warn_marked_otherwise, warn_unrouted
from cosmos_optim.routing.output_head import Head, find_output_heads
from cosmos_optim.routing.route import ModelParameter, Route, matrix_form, route_of
from cosmos_optim.routing.words import layer_pattern, matches
from cosmos_optim.rules import RULES
from cosmos_optim.sharding.other_engines import REMEDY, refuse_flat, return_to_shards

Overrides = Mapping[str, str | Mapping[str, Any]]
DECAYS = ("matrices", "all")
SHOWN = 6  # patterns in an error


def param_groups(
    model: nn.Module, rule: str | None = None, *, overrides: Overrides | None = None,
    head: Head | None = None, decay: str = "matrices", split_heads: bool | int = False,
    beside: Optimizer | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Sort a model's parameters into groups for `Cosmos` and its peers.

    Hidden matrices get `rule`; embeddings, the output head, norms and vectors get AdamW (rule "adam"). The groups of
    hidden matrices come first. The optimizer's `weight_decay` is for them; other groups have `weight_decay=0`.

    Args:
        model: any module. Frozen parameters are left out.
        rule: the rule of the hidden matrices, that is, of the optimizer that gets the groups ("muon" for `Muon`). None
            means that of `beside`, or "cosmos".
        overrides: pattern -> rule name, or a mapping of hyper-parameters and "rule"; patterns are shell-style and
            matched against parameter names, in order, before everything else. The first match wins, so put the
            narrower pattern first. An override changes only what it names: the rule, and how a convolution or fused
            weight is cut into matrices, stay otherwise.
        head: an output head that cannot be found automatically, as a module or its name, or a list of them. They are
            added to those that are found.
        decay: "matrices", or "all" to decay embeddings, output heads, norms, biases and scales too.
        split_heads: True updates each head of attention as its own matrix: rows of queries, keys and values, columns of
            the output projection. Their size is read from the module or its config; or give it, such as 64.
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
    if rule is None:
        rule = getattr(beside, "rule", "cosmos")  # an optimizer of another package has none
    held = {id(p) for group in beside.param_groups for p in group["params"]} if beside is not None else set()
    for parameter, route in routes(model, rule, overrides=overrides, head=head, decay=decay, split_heads=split_heads):
        if id(parameter.p) in held:
            continue
        key = (route.rule, repr(sorted(route.settings.items())))
        group = groups.setdefault(key, {"params": [], "rule": route.rule, **route.settings})
        group["params"].append((parameter.name, parameter.p))
    # Hidden matrices first, because loggers show the rate of the first group.
    return sorted(groups.values(), key=lambda group: group["rule"] == "adam")


def mark(
    model: nn.Module, rule: str = "cosmos", *, overrides: Overrides | None = None,
    head: Head | None = None, decay: str = "matrices", split_heads: bool | int = False,
) -> nn.Module:  # fmt: skip
    """Route a model's parameters once, leave each route on its parameter, and return the model.

    An optimizer then makes the groups of `param_groups` from `model.parameters()`, with names, also after
    `fully_shard`, DDP, `torch.compile`, `copy.deepcopy`, `model.to` and pickling. Mark before these, and again after
    layers were added. In a list of groups, those without a rule are split, and their own settings win. It is an error
    if some parameters there have a mark and others have none. The arguments are those of `param_groups`.

    >>> model = mark(nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 32)))
    >>> [(group["rule"], group["params"][0][0]) for group in as_groups(model.parameters(), "cosmos")]
    [('cosmos', '1.weight'), ('adam', '0.weight')]
    """
    options: dict[str, Any] = {"overrides": overrides, "head": head, "decay": decay, "split_heads": split_heads}
    routed = routes(model, rule, frozen=True, **options)
    modules = dict(model.named_modules())
    for parameter, route in routed:
        found = {"name": parameter.name, "rule": route.rule, **route.settings}
        for name in (parameter.name, *parameter.aliases):
            path, _, attribute = name.rpartition(".")
            leave_mark(modules[path], attribute, found)
    return model


def routes(
    model: nn.Module, rule: str = "cosmos", *, overrides: Overrides | None = None,
    head: Head | None = None, decay: str = "matrices", split_heads: bool | int = False,
    frozen: bool = False,
) -> list[tuple[ModelParameter, Route]]:  # fmt: skip
    """Return every trainable parameter with its route, and if `frozen`, also the others that are recognized."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"give the model, not its parameters (got a {type(model).__name__}): routing reads its modules")
    if split_heads and rule == "adam":
        raise ValueError(f"split_heads={split_heads!r}: AdamW updates each element by itself, so heads change nothing")
    if decay not in DECAYS:
        raise ValueError(f"decay={decay!r} is not valid: give one of {DECAYS}")
    settings_of = _settings_by_pattern(overrides)
    return_to_shards(model)
    taken: dict[str, set[str]] = {pattern: set() for pattern in settings_of}  # the patterns that win where it matches
    output_heads = find_output_heads(model, head)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))}
    found: list[tuple[ModelParameter, Route]] = []
    unknown: list[ModelParameter] = []
    parameters = _model_parameters(model)
    attention_heads = find_attention_heads(model, parameters, split_heads)
    for parameter in parameters:
        _refuse_piece(parameter)
        names = (parameter.name, *parameter.aliases)
        matching = [pattern for pattern in settings_of if any(matches(name, pattern) for name in names)]
        for pattern in matching:
            taken[pattern].add(pattern if settings_of[pattern] == settings_of[matching[0]] else matching[0])
        if not (parameter.p.requires_grad or frozen):
            continue
        route = _own_route(parameter, rule, embeddings, output_heads)
        override = settings_of[matching[0]] if matching else {}
        if matching:
            route = _overridden(parameter, route, matching[0], override)
        if route is not None:
            route = with_heads(parameter, route, attention_heads.get(parameter.name), override)
            found.append((parameter, route if decay == "all" else _without_decay(route)))
        elif parameter.p.requires_grad:
            unknown.append(parameter)
    _refuse_unused(taken, [parameter.name for parameter in parameters][:3])
    _refuse_unknown(unknown, rule, [name for known, _ in found for name in (known.name, *known.aliases)])
    return found


def _settings_by_pattern(overrides: Overrides | None) -> dict[str, Mapping[str, Any]]:
    """Return the settings of each override. A rule's name means {"rule": name}; any other form is an error."""
    if overrides and not isinstance(overrides, Mapping):
        raise TypeError(f"overrides must map patterns to rules or settings, got {overrides!r}")
    found = {pattern: {"rule": x} if isinstance(x, str) else x for pattern, x in (overrides or {}).items()}
    for pattern, settings in found.items():
        if not isinstance(settings, Mapping):
            wanted = "neither a rule's name nor a mapping of hyper-parameters"
            raise ValueError(f"override {pattern!r}: {settings!r} is {wanted}")
    return found


def _own_route(parameter: ModelParameter, rule: str, embeddings: Set[int], output_heads: Set[str]) -> Route | None:
    """Return the route that a parameter has without overrides, or None if it is not recognized.

    Args:
        embeddings: the ids of all weights of embeddings.
        output_heads: the paths of the output heads. A matrix that is tied to one is trained as one; a tied embedding
            stays an embedding.
    """
    is_embedding, is_head = id(parameter.p) in embeddings, parameter.module_path in output_heads
    route = route_of(parameter, rule, is_embedding=is_embedding, is_head=is_head)
    is_tied_head = any(alias.rpartition(".")[0] in output_heads for alias in parameter.aliases)
    if is_tied_head and (route is None or route.kind == "hidden"):
        return route_of(parameter, rule, is_embedding=is_embedding, is_head=True)
    return route


def _refuse_unused(taken: Mapping[str, set[str]], names: Sequence[str]) -> None:
    """Raise ValueError for patterns that match nothing, and for one whose matches all belong to earlier patterns.

    taken: for each pattern, the patterns that win where it matches; itself among them if it is used, or is the same.
    """
    if unused := [pattern for pattern, winners in taken.items() if not winners]:
        raise ValueError(f"overrides that match no parameter: {unused}; names look like {names}")
    for pattern, winners in taken.items():
        if pattern not in winners:
            earlier = " and ".join(repr(winner) for winner in taken if winner in winners)
            raise ValueError(
                f"override {pattern!r} has no effect: earlier patterns take all its parameters: {earlier}. The first "
                "match wins, so put the narrower pattern first"
            )


def _without_decay(route: Route) -> Route:
    """Return the route with a decay of 0 unless it is a hidden matrix; an override's own decay stays.

    The rate of what AdamW trains may be many times higher than that of hidden matrices, and the decay is multiplied by
    it. A parameter that nothing recognizes and an override gives to AdamW is most likely a table, a scale or a gate.
    """
    is_decayed = route.kind == "hidden" or (not route.kind and route.rule != "adam")
    if is_decayed:
        return route
    return replace(route, settings={"weight_decay": 0.0, **route.settings})


def _overridden(
    parameter: ModelParameter, route: Route | None, pattern: str, override: Mapping[str, Any]
) -> Route | None:
    """Return the route changed by an override; None if neither of them names a rule."""
    if "rule" not in override and route is None:
        return None
    rule = override.get("rule", route.rule if route else None)
    if route is not None and route.rule == rule:
        kept = route.settings
    else:
        kept = {} if rule == "adam" else matrix_form(parameter)[1]
    settings = {**kept, **{k: v for k, v in override.items() if k != "rule"}}
    return Route(rule, f"override {pattern!r}", settings, route.kind if route else "")


def _refuse_unknown(parameters: Sequence[ModelParameter], rule: str, known: Sequence[str]) -> None:
    """Raise one error for all parameters without a route, with one pattern for the same parameter of many layers.

    known: the names of the parameters with a route; no pattern matches one of these.
    """
    if not parameters:
        return
    first = parameters[0]
    patterns: list[str] = []
    for parameter in parameters:
        if not any(matches(parameter.name, pattern) for pattern in patterns):
            patterns.append(layer_pattern(parameter.name, known))
    more = len(parameters) - 1
    others = f", and neither {'is 1 other' if more == 1 else f'are {more} others'}" if more else ""
    own = "" if rule == "cosmos" else f"{rule!r}, "
    asked = ", ".join(f"{pattern!r}: 'adam'" for pattern in patterns[:SHOWN]) + ", ..." * (len(patterns) > SHOWN)
    call = f"param_groups(model, {own}overrides={{{asked}}})"
    advice = (
        f"choose a rule with {call}. 'adam' is the safe choice for tables, scales and gates; {rule!r} is for a matrix "
        f"that multiplies features, with a row for each output; {{'rule': {rule!r}, 'layout': 'in_out'}} is for one "
        "stored (in, out), as in x @ W"
    )
    if rule == "adam":  # the kind decides only what is decayed
        advice = f"use {call}, which does not decay it, or {{'rule': 'adam', 'weight_decay': 0.1}} instead of 'adam'"
    raise ValueError(
        f"parameter {first.name!r} of shape {tuple(first.p.shape)} in {type(first.module).__name__} is not known to "
        f"be a hidden matrix or an embedding{others}: {advice}"
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


def _refuse_piece(parameter: ModelParameter) -> None:
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


def _listed(items: Iterable[Any]) -> list[Any]:
    """Return a list of the items; reject a set, because its order differs between runs."""
    if isinstance(items, (set, frozenset)):
        raise TypeError("params must be ordered, got a set: optimizer state is saved by position. Pass a list.")
    return list(items)


def as_groups(params: nn.Module | Iterable[Any], rule: str, stacklevel: int = 4) -> list[Any]:
    """Return a model, or anything that torch.optim takes, as a list of groups or parameters.

    Parameters follow their marks (`mark`). Those with neither a mark nor a rule must all be matrices, and a warning
    says if they may be embeddings or heads; `stacklevel` is as in `warnings.warn`.
    """
    if isinstance(params, nn.Module):
        groups = param_groups(params, rule)
        if not groups:
            raise ValueError(f"this {type(params).__name__} has no parameter to train: all are frozen, or it has none")
        if rule != "adam":
            warn_marked_otherwise(groups, stacklevel + 1)
        return groups
    if isinstance(params, (Tensor, dict)) or not isinstance(params, Iterable):
        got = "one tensor: put it in a list" if isinstance(params, Tensor) else f"{params!r}"
        if isinstance(params, dict):
            got = "a dict: put a group in a list, or give the items() of named parameters"
        raise TypeError(f"params must be a model or an iterable of tensors or groups, got {got}")
    given = _listed(params)
    groups = _as_dicts(given)
    for group in groups:
        if "params" not in group:
            raise ValueError(f"a parameter group with {sorted(group)} has no 'params': list its parameters there")
        group["params"] = _parameters_of(group)
    groups = apply_marks(groups, rule)
    _refuse_vectors(groups, rule)
    if rule != "adam":
        warn_unrouted(groups, stacklevel + 1)
    return groups if given else given  # torch has an error for an empty list


def _as_dicts(given: Sequence[Any]) -> list[dict[str, Any]]:
    """Return copies of the groups, or one group of the parameters; raise TypeError for a list of both."""
    if not any(isinstance(x, dict) for x in given):
        return [{"params": given}]
    for x in given:
        if not isinstance(x, dict):
            raise TypeError(f"params has groups and a {type(x).__name__} beside them: put all parameters in groups")
    return [dict(x) for x in given]


def _parameters_of(group: Mapping[str, Any]) -> list[Any]:
    """Return the tensors, or pairs of names and tensors, of a group; raise TypeError for what is neither."""
    held = group["params"]
    is_module = isinstance(held, nn.Module) and not isinstance(held, nn.ParameterList)
    if is_module or not isinstance(held, Iterable):
        hint = ": give its parameters(), or param_groups(model)" if is_module else ""
        raise TypeError(f"'params' of a group must be a tensor or a list of them, got a {type(held).__name__}{hint}")
    items = [held] if isinstance(held, Tensor) else _listed(held)
    for item in items:
        if isinstance(item, tuple) and not (len(item) == 2 and isinstance(item[0], str)):
            kinds = ", ".join(type(part).__name__ for part in item)
            raise TypeError(f"a named parameter must be a pair (name, tensor), got ({kinds})")
    return items


def _refuse_vectors(groups: Sequence[Mapping[str, Any]], rule: str) -> None:
    """Raise ValueError for a vector in a group of matrices. The optimizer refuses rules that do not exist."""
    for index, group in enumerate(groups):
        own = group.get("rule", rule)
        if own == "adam" or own not in RULES:
            continue
        for i, item in enumerate(group["params"]):
            name, p = item if isinstance(item, tuple) else (None, item)
            if isinstance(p, Tensor) and p.dim() < 2:
                refuse_flat(name or f"group {index}, parameter {i}", p, is_piece=True)
                unnamed = f"{i} of group {index}" if len(groups) > 1 else f"{i}"
                raise ValueError(
                    f"parameter {unnamed if name is None else repr(name)} has shape {tuple(p.shape)} and is not a "
                    "matrix: give the optimizer the model, or param_groups(model), which gives embeddings, heads, "
                    "norms and biases to AdamW; if other code passes the parameters, call mark(model) first; or put "
                    "this one in a group with rule='adam'"
                )
