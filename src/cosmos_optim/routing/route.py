"""Say what one parameter is, and so which rule it gets.

Evidence: the type of its module, the sizes that the module declares (`in_features`, `num_experts`), its own shape, and
whole words of its name. What AdamW should train is looked for first, then matrices. No part of a class name is
searched; a few classes of transformers are known by their whole name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from cosmos_optim.routing.words import BIAS, EXPERT, NORM, ROUTER, SCALE, holds_table, is_table, words

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
# Names under which linear layers declare the sizes of their input and output: torch and its quantized layers;
# Megatron, vLLM and JetMoE; torchtune; others.
SIZES = (
    ("in_features", "out_features"), ("input_size", "output_size"), ("in_dim", "out_dim"), ("input_dim", "output_dim"),
)  # fmt: skip
# Names under which mixtures declare how many experts they have.
EXPERTS = (
    "num_experts", "n_experts", "num_local_experts", "n_local_experts", "n_routed_experts", "num_routed_experts",
    "n_shared_experts", "num_shared_experts",
)  # fmt: skip
# Classes of transformers that hold plain matrices stored (in, out). Other experts stored so say it: `is_transposed`.
STORED_IN_OUT = frozenset({
    "transformers.models.llama4.modeling_llama4.Llama4TextExperts",
    "transformers.models.recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRglru",
    "transformers.models.gemma3.modeling_gemma3.Gemma3MultiModalProjector",
    "transformers.models.t5gemma2.modeling_t5gemma2.T5Gemma2MultiModalProjector",
})  # fmt: skip
# Queries and keys, as the common decoders name them, and the rows of one of their heads: Adam-mini's blocks.
QUERY_KEY = re.compile(r"(^|[._])(q|k|q_proj|k_proj|wq|wk|query|key|q_lin|k_lin)\.weight$")
HEAD_ROWS = 64
# Row blocks of the fused weights of torch's own modules: one gate or projection each.
RECURRENT_BLOCKS: dict[type[nn.Module], int] = {
    nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3, nn.RNN: 1, nn.RNNCell: 1,
}  # fmt: skip


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
    """The rule of a parameter, its group settings, and the reason.

    kind: what the parameter is, also if an override gives it another rule: "embedding", "output head", "norm", "bias",
        "scale", "state space", "vector", "scalar", "depthwise convolution", "hidden", or "" if nothing is known.
    """

    rule: str
    why: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    kind: str = ""


def route_of(parameter: ModelParameter, rule: str, *, is_embedding: bool, is_head: bool) -> Route | None:
    """Return the route of a parameter, or None if it is not recognized.

    is_embedding: its tensor is the weight of an embedding, perhaps under another name.
    is_head: its module is an output head.
    """
    form, settings = matrix_form(parameter)
    kind = _adam_kind(parameter, form, is_embedding, is_head)
    if kind:
        found = Route("adam", _reason(kind, parameter.p.dim()), kind=kind)
    elif form == "depthwise convolution":
        found = Route("adam", form, kind=form)
    elif form:
        found = Route(rule, form, settings, "hidden")
    else:
        return None
    return _adam_mini_route(parameter, found) if rule == "adam-mini" else found


def _reason(kind: str, dim: int) -> str:
    """Return the reason for AdamW in the words of a plan: for a vector that it is one, else the kind."""
    if dim < 2:
        return "vector" if dim else "scalar"
    return {"bias": "biases", "vector": "vector in effect"}.get(kind, kind)


def _adam_kind(parameter: ModelParameter, form: str, is_embedding: bool, is_head: bool) -> str:
    """Return what a parameter is if AdamW should train it; otherwise "" (also if nothing is known)."""
    p, module, own, path = parameter.p, parameter.module, words(own_name(parameter)), _owner_path(parameter)
    is_layer = isinstance(module, (nn.Linear, _ConvNd)) and parameter.tensor_name == "weight"
    is_norm = isinstance(module, NORMS) or (not is_layer and not NORM.isdisjoint(words(path)[-1:]))
    is_bias = not BIAS.isdisjoint(own)
    is_state_space = _is_state_space(parameter)
    if is_embedding or _declares_embedding(parameter):
        return "embedding"
    if p.dim() < 2:
        plain = "vector" if p.dim() else "scalar"
        return "norm" if is_norm else "bias" if is_bias else "state space" if is_state_space else plain
    if is_head:
        return "output head"
    if isinstance(module, nn.Linear) and parameter.tensor_name == "weight" and _is_bias_table(path):
        return "embedding"  # a linear layer of one-hot distances
    if is_state_space:
        return "state space"
    if is_table(own_name(parameter)):
        return "embedding"
    if is_bias:  # a row for each expert, head or position
        return "bias"
    if is_norm:
        return "norm"
    if p.numel() == max(p.shape) or (1 in p.shape[-2:] and not form):
        return "vector"  # in effect: one row or one column
    if form:
        return ""
    if not SCALE.isdisjoint(own):
        return "scale"
    if (p.dim() > 2 and p.shape[0] == 1) or holds_table(path):  # one table for the whole batch
        return "embedding"
    return ""


def own_name(parameter: ModelParameter) -> str:
    """Return the name of the parameter itself; in a list or dict of parameters it is that of the list."""
    if isinstance(parameter.module, (nn.ParameterList, nn.ParameterDict)):
        return _owner_path(parameter).rpartition(".")[2]
    return parameter.tensor_name


def _owner_path(parameter: ModelParameter) -> str:
    """Return the path of the module that owns the parameter."""
    path = parameter.module_path
    if parameter.tensor_name != parameter.attribute:  # at owner.parametrizations.weight
        path = path.rpartition(".")[0].rpartition(".")[0]
    return path


def _is_bias_table(path: str) -> bool:
    """Return whether a module's name says that it holds biases by relative position."""
    found = set(words(path.rpartition(".")[2]))
    return not BIAS.isdisjoint(found) and not {"rel", "relative"}.isdisjoint(found)


def _is_state_space(parameter: ModelParameter) -> bool:
    """Return whether a parameter belongs to a state space model's recurrence: A_log, and D and dt beside it."""
    first, *_ = (*words(parameter.tensor_name), "")
    beside = any(name.lower().startswith("a_log") for name, _ in parameter.module.named_parameters(recurse=False))
    return parameter.tensor_name.lower().startswith("a_log") or (beside and first in ("d", "dt"))


def _declares_embedding(parameter: ModelParameter) -> bool:
    """Return whether the module is an embedding, or declares the sizes of one and the parameter has them."""
    module, p = parameter.module, parameter.p
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return True
    rows, columns = getattr(module, "num_embeddings", None), getattr(module, "embedding_dim", None)
    if not isinstance(rows, int) or p.dim() != 2 or p.shape[1] != columns:
        return False
    return rows % max(p.shape[0], 1) == 0  # all rows, or a part of them


def matrix_form(parameter: ModelParameter) -> tuple[str, dict[str, Any]]:
    """Return the form of a hidden matrix and its settings; "" and {} if the parameter is not known to be one.

    A convolution is flattened to (out, in * kernel), one block for each group; a depthwise one is not a matrix.
    """
    p, module, name = parameter.p, parameter.module, parameter.tensor_name
    if isinstance(module, _ConvNd) and p.dim() > 2:
        if module.groups == 1:
            return "convolution", {"layout": "conv"}
        if p.shape[1] == 1 or p.shape[0] == module.groups:
            return "depthwise convolution", {"layout": "conv"}
        return "grouped convolution", {"layout": "conv", "split_sizes": (p.shape[0] // module.groups,) * module.groups}
    if "Conv1D" in _class_names(module) and p.dim() == 2 and p.shape[1] == getattr(module, "nf", None):
        return "Conv1D, stored (in, out)", {"layout": "in_out"}
    if isinstance(module, nn.MultiheadAttention) and p.dim() == 2 and name.endswith("proj_weight"):
        fused = name == "in_proj_weight"
        return ("fused query, key, value", {"split_sizes": (p.shape[0] // 3,) * 3}) if fused else ("projection", {})
    recurrent = next((count for own, count in RECURRENT_BLOCKS.items() if isinstance(module, own)), 0)
    if recurrent and p.dim() == 2 and name.startswith("weight"):
        count = 1 if name.startswith("weight_hr") else recurrent
        return "recurrent", {"split_sizes": (p.shape[0] // count,) * count} if count > 1 else {}
    in_out = not STORED_IN_OUT.isdisjoint(_class_names(module, qualified=True))
    if p.dim() == 3 and 1 not in p.shape and (in_out or _is_stack(parameter)):
        stored = getattr(module, "is_transposed", in_out)
        return f"{p.shape[0]} stacked matrices", {"layout": "in_out"} if stored else {}
    if p.dim() == 2 and in_out:
        return "matrix, stored (in, out)", {"layout": "in_out"}
    if p.dim() == 2 and _is_linear(parameter):
        return "linear", {}
    if p.dim() == 2 and _is_router(parameter):
        return "router", {}
    return "", {}


def _class_names(module: nn.Module, qualified: bool = False) -> set[str]:
    """Return the names of the module's class and its bases: fully_shard makes a subclass with another name."""
    return {f"{kind.__module__}.{kind.__qualname__}" if qualified else kind.__name__ for kind in type(module).__mro__}


def _is_linear(parameter: ModelParameter) -> bool:
    """Return whether a parameter with two dimensions is a linear layer's weight, or an adapter's matrix beside it.

    The layer may hold a part of the rows or columns that it declares, as tensor-parallel layers do.
    """
    module, (rows, columns) = parameter.module, parameter.p.shape
    is_weight = re.fullmatch(r"weight\d*", parameter.tensor_name) is not None
    if isinstance(module, nn.Linear) and is_weight:
        return True
    for into, out in SIZES:
        n, m = getattr(module, into, None), getattr(module, out, None)
        if not isinstance(m, int) or not isinstance(n, int):
            continue
        if is_weight and m % max(rows, 1) == 0 and n % max(columns, 1) == 0:
            return True
        if not is_weight and SCALE.isdisjoint(words(parameter.tensor_name)) and (rows == m or columns == n):
            return True
    return False


def _is_stack(parameter: ModelParameter) -> bool:
    """Return whether a parameter with three dimensions is a stack of experts: by the count, a mark, or a word."""
    if is_table(own_name(parameter)) or not BIAS.isdisjoint(words(own_name(parameter))):
        return False
    named = words(_owner_path(parameter).rpartition(".")[2] + "." + parameter.tensor_name)
    return (
        parameter.p.shape[0] in _declared_experts(parameter.module)
        or hasattr(parameter.module, "is_transposed")
        or not EXPERT.isdisjoint(named)
    )


def _is_router(parameter: ModelParameter) -> bool:
    """Return whether a parameter with two dimensions is the weight of a module with a router's name."""
    return parameter.tensor_name == "weight" and not ROUTER.isdisjoint(words(_owner_path(parameter).rpartition(".")[2]))


def _declared_experts(module: nn.Module) -> set[int]:
    """Return the numbers of experts that a module declares."""
    found: Iterable[Any] = (getattr(module, name, None) for name in EXPERTS)
    return {count for count in found if isinstance(count, int) and count > 1}


def _adam_mini_route(parameter: ModelParameter, route: Route) -> Route:
    """Return Adam-mini's route: a block is a head of queries or keys, or a row of any other parameter with rows.

    That includes embeddings, the output head and depthwise convolutions, which other rules leave to AdamW.
    """
    if parameter.p.dim() < 2:
        return route
    usual = "conv" if isinstance(parameter.module, _ConvNd) else "matrix"
    settings = {"layout": route.settings.get("layout", usual)}
    if QUERY_KEY.search(parameter.name):
        return replace(route, rule="adam-mini", why="heads of queries or keys",
                       settings=settings | {"block_rows": HEAD_ROWS})  # fmt: skip
    return replace(route, rule="adam-mini", why=f"rows: {route.why}", settings=settings)
