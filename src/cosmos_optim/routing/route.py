"""Say what one parameter is, and so which rule it gets.

Evidence: the type of its module, the sizes that the module declares (`in_features`, `num_experts`), its own shape, and
whole words of its name. What AdamW should train is looked for first, then matrices. No part of a class name is
searched; a few classes of transformers are known by their whole name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from cosmos_optim.routing.words import (
    ADAPTER,
    BIAS,
    EXPERT,
    KEY,
    NORM,
    QUERY,
    ROUTER,
    SCALE,
    holds_table,
    is_table,
    words,
)

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
# Names under which linear layers declare the sizes of their input and output: torch and its quantized layers;
# Megatron, vLLM and JetMoE; torchtune; others; libraries for graphs.
SIZES = (
    ("in_features", "out_features"), ("input_size", "output_size"), ("in_dim", "out_dim"), ("input_dim", "output_dim"),
    ("in_channels", "out_channels"),
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
# What torch.nn.utils.prune and weight_norm append to the name of a weight.
WEIGHT_PART = re.compile(r"_(orig|v|g)$")
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
    """Return what a parameter is if AdamW should train it; otherwise "" (also if nothing is known).

    The first question with the answer yes decides, so their order matters.
    """
    p, own = parameter.p, own_name(parameter)
    if is_embedding or _declares_embedding(parameter):
        return "embedding"
    if p.dim() < 2:
        return _vector_kind(parameter)
    if is_head and not _has_word(own, ADAPTER):
        return "output head"
    if _is_bias_table(parameter):
        return "embedding"
    if _is_state_space(parameter):
        return "state space"
    if is_table(own):
        return "embedding"
    if _has_word(own, BIAS):  # a row for each expert, head or position
        return "bias"
    if _is_norm(parameter):
        return "norm"
    if _is_vector_in_effect(p, form):
        return "vector"
    if form:
        return ""
    if _has_word(own, SCALE):
        return "scale"
    is_kernel = p.dim() > 3 and words(own)[-1:] == ("weight",)  # StyleGAN2 stores (1, out, in, k, k)
    is_for_whole_batch = p.dim() > 2 and p.shape[0] == 1 and not is_kernel
    return "embedding" if is_for_whole_batch or holds_table(_owner_path(parameter)) else ""


def _vector_kind(parameter: ModelParameter) -> str:
    """Return what a parameter with no or one dimension is."""
    if _is_norm(parameter):
        return "norm"
    if _has_word(own_name(parameter), BIAS):
        return "bias"
    if _is_state_space(parameter):
        return "state space"
    return "vector" if parameter.p.dim() else "scalar"


def _has_word(name: str, vocabulary: Set[str]) -> bool:
    """Return whether a word of the name is in the vocabulary."""
    return not vocabulary.isdisjoint(words(name))


def own_name(parameter: ModelParameter) -> str:
    """Return the name of the parameter itself; in a list or dict of parameters it is that of the list."""
    if isinstance(parameter.module, (nn.ParameterList, nn.ParameterDict)):
        return _owner_name(parameter)
    return parameter.tensor_name


def _owner_name(parameter: ModelParameter) -> str:
    """Return the name of the module that owns the parameter, without its path."""
    return _owner_path(parameter).rpartition(".")[2]


def _owner_path(parameter: ModelParameter) -> str:
    """Return the path of the module that owns the parameter."""
    path = parameter.module_path
    if parameter.tensor_name != parameter.attribute:  # at owner.parametrizations.weight
        path = path.rpartition(".")[0].rpartition(".")[0]
    return path


def _is_bias_table(parameter: ModelParameter) -> bool:
    """Return whether a parameter is a linear layer of one-hot distances: biases by relative position."""
    owner = _owner_name(parameter)
    return _is_weight_of(parameter, nn.Linear) and _has_word(owner, BIAS) and _has_word(owner, {"rel", "relative"})


def _is_norm(parameter: ModelParameter) -> bool:
    """Return whether a parameter is a norm's: by the module's type, or by the last word of the module's name."""
    if isinstance(parameter.module, NORMS):
        return True
    last_word = words(_owner_path(parameter))[-1:]
    return not NORM.isdisjoint(last_word) and not _is_weight_of(parameter, nn.Linear, _ConvNd)


def _is_weight_of(parameter: ModelParameter, *kinds: type[nn.Module]) -> bool:
    """Return whether a parameter is the weight of a module of one of these kinds."""
    return isinstance(parameter.module, kinds) and parameter.tensor_name == "weight"


def _is_vector_in_effect(p: Tensor, form: str) -> bool:
    """Return whether a parameter with several dimensions is one vector, or has single rows or columns and no form.

    For example, (1, 8) is a vector in effect; (4, 8, 1) is one only if its form is not known, and (1, 8, 3, 3) only if
    it is known to be a convolution, and so one row.
    """
    has_one_long_dimension = p.numel() == max(p.shape)
    return has_one_long_dimension or (p.shape[0] == 1 if form else 1 in p.shape[-2:])


def _is_state_space(parameter: ModelParameter) -> bool:
    """Return whether a parameter belongs to a state space model's recurrence: A_log, and D and dt beside it."""
    if parameter.tensor_name.lower().startswith("a_log"):
        return True
    is_beside = any(name.lower().startswith("a_log") for name, _ in parameter.module.named_parameters(recurse=False))
    return is_beside and words(parameter.tensor_name)[:1] in (("d",), ("dt",))


def _declares_embedding(parameter: ModelParameter) -> bool:
    """Return whether the module is an embedding, or declares the sizes of one and the parameter has them."""
    module, p = parameter.module, parameter.p
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return True
    rows, columns = declared_number(module, "num_embeddings"), declared_number(module, "embedding_dim")
    if rows is None or p.dim() != 2 or p.shape[1] != columns:
        return False
    return rows % max(p.shape[0], 1) == 0  # all rows, or a part of them


def matrix_form(parameter: ModelParameter) -> tuple[str, dict[str, Any]]:
    """Return the form of a hidden matrix and its settings; "" and {} if the parameter is not known to be one."""
    p, module = parameter.p, parameter.module
    if isinstance(module, _ConvNd) and p.dim() > 2:
        return _convolution_form(p, module)
    is_in_out = not STORED_IN_OUT.isdisjoint(_class_names(module, qualified=True))
    if p.dim() == 3 and 1 not in p.shape and (is_in_out or _is_stack(parameter)):
        is_in_out = getattr(module, "is_transposed", is_in_out)
        return f"{p.shape[0]} stacked matrices", {"layout": "in_out"} if is_in_out else {}
    if p.dim() != 2:
        return "", {}
    known = _form_in_known_module(parameter)
    if known is not None:
        return known
    if is_in_out:
        return "matrix, stored (in, out)", {"layout": "in_out"}
    if _is_linear(parameter):
        return "linear", {}
    if _is_router(parameter):
        return "router", {}
    return "", {}


def matrix_shape(p: Tensor, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return (out, in), the shape of a hidden matrix or of each in a stack, given the settings of its route."""
    layout = settings.get("layout", "matrix")
    rows, columns = (p.shape[0], math.prod(p.shape[1:])) if "conv" in layout else p.shape[-2:]
    return (columns, rows) if "in_out" in layout else (rows, columns)


def _convolution_layout(module: _ConvNd) -> str:
    return "conv_in_out" if module.transposed else "conv"


def _convolution_form(p: Tensor, module: _ConvNd) -> tuple[str, dict[str, Any]]:
    """Return the form of a convolution, which is flattened to (out, in * kernel), one block for each group.

    A transposed one is stored (in, out, kernel). It is the matrix (out * kernel, in), because it maps the features of a
    place to those of several places. A depthwise convolution is not a matrix.
    """
    groups, kind = module.groups, "transposed convolution" if module.transposed else "convolution"
    settings = {"layout": _convolution_layout(module)}
    if groups == 1:
        return kind, settings
    if p.shape[1] == 1 or p.shape[0] == groups:
        return "depthwise convolution", settings
    side = {"split_side": "input"} if module.transposed else {}
    return f"grouped {kind}", settings | _row_blocks(p, groups) | side


def _form_in_known_module(parameter: ModelParameter) -> tuple[str, dict[str, Any]] | None:
    """Return the form of a 2-D weight of torch's attention or recurrent layers, or of a Conv1D; None for others."""
    p, module, name = parameter.p, parameter.module, WEIGHT_PART.sub("", parameter.tensor_name)
    if "Conv1D" in _class_names(module) and p.shape[1] == getattr(module, "nf", None):
        return "Conv1D, stored (in, out)", {"layout": "in_out"}
    if isinstance(module, nn.MultiheadAttention) and name == "in_proj_weight":
        return "fused query, key, value", _row_blocks(p, 3)
    if isinstance(module, nn.MultiheadAttention) and name.endswith("proj_weight"):
        return "projection", {}
    for kind, blocks in RECURRENT_BLOCKS.items():
        if isinstance(module, kind) and name.startswith("weight"):
            return "recurrent", _row_blocks(p, 1 if name.startswith("weight_hr") else blocks)
    return None


def _row_blocks(p: Tensor, count: int) -> dict[str, Any]:
    """Return the settings of a weight that has `count` equal blocks of rows."""
    return {"split_sizes": (p.shape[0] // count,) * count} if count > 1 else {}


def _class_names(module: nn.Module, qualified: bool = False) -> set[str]:
    """Return the names of the module's class and its bases: fully_shard makes a subclass with another name."""
    return {f"{kind.__module__}.{kind.__qualname__}" if qualified else kind.__name__ for kind in type(module).__mro__}


def _is_linear(parameter: ModelParameter) -> bool:
    """Return whether a parameter with two dimensions is a linear layer's weight, or a factor of an adapter beside it.

    The layer may hold a part of the rows or columns that it declares, as tensor-parallel layers do.
    """
    module, (rows, columns) = parameter.module, parameter.p.shape
    is_weight = re.fullmatch(r"weight\d*", WEIGHT_PART.sub("", parameter.tensor_name)) is not None
    if isinstance(module, nn.Linear) and is_weight:
        return True
    for input_name, output_name in SIZES:
        n, m = declared_number(module, input_name), declared_number(module, output_name)
        if m is None or n is None:
            continue
        if is_weight and m % max(rows, 1) == 0 and n % max(columns, 1) == 0:
            return True
        if not is_weight and (_is_adapter(parameter, m, n) or _is_only_matrix(parameter, m, n)):
            return True
    return _is_adapter_around(parameter)


def _is_only_matrix(parameter: ModelParameter, m: int, n: int) -> bool:
    """Return whether a parameter is the only matrix of its module, of shape (m, n): the weight by another name."""
    matrices = [p for p in parameter.module.parameters(recurse=False) if p.dim() > 1]
    return len(matrices) == 1 and tuple(parameter.p.shape) == (m, n)


def _is_adapter(parameter: ModelParameter, m: int, n: int) -> bool:
    """Return whether a parameter is (rank, n) beside one of (m, rank) in the same module, or the reverse.

    A table or a second weight is alone there. What has the shape (m, n) of the layer's weight is not a factor.
    """
    (rows, columns), whole = parameter.p.shape, (m, n)
    beside = {tuple(p.shape) for p in parameter.module.parameters(recurse=False)} - {whole}
    is_factor = (columns == n and (m, rows) in beside) or (rows == m and (columns, n) in beside)
    return is_factor and (rows, columns) != whole and not _has_word(parameter.tensor_name, SCALE)


def _is_adapter_around(parameter: ModelParameter) -> bool:
    """Return whether a parameter is, by name and shape, a factor of LoRA beside the layer that it changes.

    It is (ranks, in), or (any, rank) beside such a one: in litgpt, factors of a fused layer have other rows than it.
    """
    if not _has_word(parameter.tensor_name, ADAPTER):
        return False
    (_, columns), module = parameter.p.shape, parameter.module
    inputs = {m.in_features for m in module.children() if isinstance(m, nn.Linear)}
    ranks = [p.shape[0] for p in module.parameters(recurse=False) if p.dim() == 2 and p.shape[1] in inputs]
    return columns in inputs or any(rank % max(columns, 1) == 0 for rank in ranks)


def _is_stack(parameter: ModelParameter) -> bool:
    """Return whether a parameter with three dimensions is a stack of experts: by the count, a mark, or a word."""
    own = own_name(parameter)
    if is_table(own) or _has_word(own, BIAS):
        return False
    return (
        parameter.p.shape[0] in _declared_experts(parameter.module)
        or hasattr(parameter.module, "is_transposed")
        or _has_word(f"{_owner_name(parameter)}.{parameter.tensor_name}", EXPERT)
    )


def _is_router(parameter: ModelParameter) -> bool:
    """Return whether a parameter with two dimensions is the weight of a module with a router's name."""
    return parameter.tensor_name == "weight" and _has_word(_owner_name(parameter), ROUTER)


def _declared_experts(module: nn.Module) -> set[int]:
    """Return the numbers of experts that a module declares."""
    found = (declared_number(module, name) for name in EXPERTS)
    return {count for count in found if count is not None and count > 1}


def declared_number(holder: object, name: str) -> int | None:
    """Return the whole number that a module or its config declares under a name; None if there is none."""
    value = read_attribute(holder, name)
    return value if isinstance(value, int) else None


def read_attribute(holder: object, name: str) -> Any:
    """Return an attribute of a module or config; None if there is none, or if it cannot be read now."""
    try:
        return getattr(holder, name, None)
    except Exception:  # A property may need what is not there yet, such as the trainer of Lightning.
        return None


def _adam_mini_route(parameter: ModelParameter, route: Route) -> Route:
    """Return Adam-mini's route: a block is a head of queries or keys, or a row of any other parameter with rows.

    That includes embeddings, the output head and depthwise convolutions, which other rules leave to AdamW.
    """
    if parameter.p.dim() < 2:
        return route
    usual = _convolution_layout(parameter.module) if isinstance(parameter.module, _ConvNd) else "matrix"
    settings = {"layout": route.settings.get("layout", usual)}
    if parameter.attribute == "weight" and _owner_name(parameter) in QUERY | KEY:
        settings["block_rows"] = None  # the optimizer's head_dim
        return replace(route, rule="adam-mini", why="heads of queries or keys", settings=settings)
    return replace(route, rule="adam-mini", why=f"rows: {route.why}", settings=settings)
