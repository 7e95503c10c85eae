"""Find the output heads of a model: AdamW trains their matrices.

A head is what the model declares (`get_output_embeddings`, `get_classifier`), a layer with as many outputs as the model
declares classes, a module with a head's word in its name, or a layer with the embedding's shape; or the user names it.
Blocks that occur several times hold no heads, but several models, each with its own embedding, do.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from torch import nn
from torch.nn.modules.conv import _ConvNd

from cosmos_optim.routing.route import declared_number, read_attribute
from cosmos_optim.routing.words import BIAS, NUMBER, POSITION, words

# Whole words of a module's name. With one of EXCLUDED beside it, the module computes something else: pre_classifier.
WORDS = frozenset({
    "head", "heads", "classifier", "classifiers", "score", "scorer", "logits", "predictor", "predictors", "prediction",
    "predictions", "predict", "pred", "preds", "objective", "criterion",
})  # fmt: skip
EXCLUDED = frozenset({
    "pre", "pos", "query", "ref", "reference", "multi", "attn", "attention", "sa", "norm", "embed", "embedding",
    "embeddings",
})  # fmt: skip
# Whole names, or whole words at the end of a name.
NAMES = (
    "embed_out", "unembed", "unembedding", "output_projection", "qa_outputs", "class_embed", "bbox_embed",
    "seq_relationship", "sequence_summary", "ctc_proj", "classif",
)  # fmt: skip
# Names that hidden layers have too: they count only for the last layer of a model.
LAST_NAMES = frozenset({
    "output", "output_layer", "out", "proj_out", "conv_out", "fc", "fc_out", "linear", "last_linear", "final_layer",
    "final_conv", "decoder",
})  # fmt: skip
# Modules with only hidden parts, under any name.
HIDDEN = frozenset({"attn", "attention", "sa", "mha", "mlp", "ffn"})
# Containers of torch, which say nothing about what they hold.
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Names under which a model, or its `config`, declares the number of classes.
CLASSES = ("num_classes", "num_labels")
# Wrappers that do not change what a module is: parametrizations, and the copies that adapters make.
WRAPPERS = re.compile(r"\.(parametrizations|modules_to_save|base_layer|original_module)(\.|$).*")

Modules = Mapping[str, nn.Module]
Head = nn.Module | str | Sequence[nn.Module | str]


def find_output_heads(model: nn.Module, head: Head | None) -> set[str]:
    """Return the paths of the output heads that are found, and of those given with all modules inside them."""
    modules = dict(model.named_modules())
    given = () if head is None else head if isinstance(head, (list, tuple)) else (head,)
    named: set[str] = set()
    for one in given:
        paths = {path for path, module in modules.items() if module is one or path == one}
        if not paths:
            raise ValueError(
                f"head={one!r} is not a module of this model: give one of its modules, a name such as 'lm_head', or a "
                "list of them"
            )
        named |= paths
    return _search_heads(modules) | _with_parts(named, modules)


def _search_heads(modules: Modules) -> set[str]:
    """Return the heads outside of blocks. If there are none, modules with numbered names may be towers with heads."""
    return _heads_among(modules, _inside_blocks(modules)) or _heads_among(modules, _inside_blocks(modules, False))


def _heads_among(modules: Modules, repeated: set[str]) -> set[str]:
    """Return the declared heads, those found by name, and those with the embedding's shape, all not repeated."""
    unrepeated = {path: module for path, module in modules.items() if path not in repeated}
    found = _declared_heads(unrepeated, modules) | _class_layers(unrepeated) | _adaptive_softmax_layers(unrepeated)
    found |= _named_heads(unrepeated, modules, found)
    found |= _embedding_shaped_layers(unrepeated, modules)
    return found | {path for path in modules if WRAPPERS.sub("", path) in found}


def _with_parts(paths: set[str], modules: Modules) -> set[str]:
    """Return these paths and those of all modules inside them."""
    return paths | {path for path in modules for top in paths if path.startswith(f"{top}.")}


# -- declared heads ----------------------------------------------------------------------------------------------------


def _declared_heads(unrepeated: Modules, modules: Modules) -> set[str]:
    """Return what the model itself calls its head: transformers' output embeddings, timm's classifier."""
    paths = {id(module): path for path, module in modules.items()}
    outputs: set[str] = set()
    classifiers: set[str] = set()
    for module in unrepeated.values():
        for m in _ask(module, "get_output_embeddings"):
            several = m if isinstance(m, nn.ModuleList) else [m]
            outputs |= {paths[id(layer)] for layer in several if id(layer) in paths}
        classifiers |= {paths[id(m)] for m in _ask(module, "get_classifier") if id(m) in paths}
    return outputs | _with_parts(classifiers, modules)


def _ask(module: nn.Module, method: str) -> Iterable[nn.Module]:
    """Return the modules that a method without arguments returns; none if it is missing or fails."""
    try:
        found = getattr(module, method)()
    except Exception:  # Some have the method but no head, and raise any kind of error.
        return ()
    several = found if isinstance(found, (tuple, list)) else (found,)
    return [m for m in several if isinstance(m, nn.Module)]


def _class_layers(unrepeated: Modules) -> set[str]:
    """Return the linear layers with as many outputs as a module that holds them declares classes.

    A module that can name its classifier is not asked for the count.
    """
    found: set[str] = set()
    for path, module in unrepeated.items():
        if hasattr(module, "get_classifier"):
            continue
        holders = (module, read_attribute(module, "config"))
        numbers = (declared_number(holder, name) for holder in holders for name in CLASSES)
        counts = {count for count in numbers if count is not None and count > 1}
        prefix = f"{path}." if path else ""
        for inner, layer in unrepeated.items() if counts else ():
            n, m = _widths(layer) if isinstance(layer, nn.Linear) and inner.startswith(prefix) else (0, 0)
            if m in counts and n != m:
                found.add(inner)
    return found


def _adaptive_softmax_layers(unrepeated: Modules) -> set[str]:
    """Return the layers of torch's adaptive softmax that have outputs for classes: its head and the last of each tail.

    The first layer of a tail only makes the features fewer.
    """
    found: set[str] = set()
    for path, module in unrepeated.items():
        if isinstance(module, nn.AdaptiveLogSoftmaxWithLoss):
            prefix = f"{path}." if path else ""
            found |= {f"{prefix}head", *(f"{prefix}tail.{i}.1" for i in range(module.n_clusters))}
    return found


# -- heads found by shape ----------------------------------------------------------------------------------------------


def _embedding_shaped_layers(unrepeated: Modules, modules: Modules) -> set[str]:
    """Return the linear layers with the embedding's shape: the only one, or several if their output is not used inside.

    Such a layer may be hidden, as in an MLP that is as wide as the table is long. So the next layer must not take the
    output of the only one, and several are heads only if no layer takes as many features. Items of a list of such
    layers count.
    """
    tables = [m for path, m in modules.items() if _is_vocabulary(m, path)]
    alone = [path for path, m in unrepeated.items()
             if _is_transposed_table(m, tables) and not _feeds_next(path, {path}, modules)]  # fmt: skip
    taken = {_widths(m)[0] for m in modules.values()}
    unused = [m for m in tables if m.num_embeddings not in taken]
    several = {path for path, m in modules.items() if _is_transposed_table(m, unused)
               and (path in unrepeated or _is_in_list_of_heads(path, unrepeated, modules, unused))}  # fmt: skip
    return several | set(alone if len(alone) == 1 else ())


def _is_vocabulary(module: nn.Module, path: str) -> TypeGuard[nn.Embedding]:
    """Return whether a module is an embedding, and by its name not one of positions or of biases."""
    return isinstance(module, nn.Embedding) and (POSITION | BIAS).isdisjoint(words(path))


def _is_transposed_table(module: nn.Module | None, tables: Collection[nn.Embedding]) -> bool:
    """Return whether a linear layer has one output for each row of a table, and the table's width as its input."""
    return isinstance(module, nn.Linear) and module.out_features > module.in_features and any(
        (table.num_embeddings, table.embedding_dim) == (module.out_features, module.in_features) for table in tables
    )  # fmt: skip


def _is_in_list_of_heads(path: str, unrepeated: Modules, modules: Modules, tables: Collection[nn.Embedding]) -> bool:
    """Return whether a layer is, or ends, an item of a list whose items all are, or end in, layers of this shape."""
    parent = path.rpartition(".")[0]
    item = parent if isinstance(modules[parent], nn.Sequential) else path
    holder = item.rpartition(".")[0]
    if not isinstance(modules[holder], nn.ModuleList) or holder not in unrepeated:
        return False
    ends = [child[-1] if isinstance(child, nn.Sequential) and len(child) else child
            for child in modules[holder].children()]  # fmt: skip
    return modules[path] in ends and all(_is_transposed_table(end, tables) for end in ends)


# -- heads found by name -----------------------------------------------------------------------------------------------


def _named_heads(unrepeated: Modules, modules: Modules, known: set[str]) -> set[str]:
    """Return the output layers of the modules with a head's name, unless their output is used inside the model.

    That is so if a head takes it, or, below the model itself, the next layer: a model may feed its predictions back.
    """
    named = [path for path, m in unrepeated.items() if path and path not in known and _has_head_name(path, m, modules)]
    inner = [path for path in named if not any(other.startswith(f"{path}.") for other in (*named, *known))]
    first = {id(module): path for path, module in modules.items()}  # a module may be shared, and is listed once
    found = {path: _output_layers(path, modules[path]) for path in inner}
    layers = {path: {first[id(modules[""].get_submodule(layer))] for layer in own} for path, own in found.items()}
    heads = known.union(*layers.values())

    def is_hidden(path: str, own: set[str]) -> bool:
        is_part = modules[path.rpartition(".")[0]] is not _unwrapped(modules[""])
        return _feeds_head(path, own, modules, heads) or (is_part and _feeds_next(path, own, modules))

    return {layer for path, own in layers.items() if not is_hidden(path, own) for layer in own}


def _has_head_name(path: str, module: nn.Module, modules: Modules) -> bool:
    """Return whether the name of a module is that of a head, in a place where a head can be."""
    if path.rpartition(".")[2] in LAST_NAMES and not _is_in_hidden(path):
        return _is_last_layer(path, module, modules)
    return is_head_name(path)


def is_head_name(path: str) -> bool:
    """Return whether the path of a module alone says that it is a head."""
    name = path.rpartition(".")[2]
    found = set(words(name))
    is_name = any(f"_{name}".endswith(f"_{ending}") for ending in NAMES)
    return not _is_in_hidden(path) and (is_name or (not WORDS.isdisjoint(found) and EXCLUDED.isdisjoint(found)))


def _is_in_hidden(path: str) -> bool:
    """Return whether a module is a direct part of attention or of an MLP."""
    parent = path.rpartition(".")[0]
    return not HIDDEN.isdisjoint(words(parent.rpartition(".")[2]))


def _is_last_layer(path: str, module: nn.Module, modules: Modules) -> bool:
    """Return whether a layer is the last one of a model: after its embedding, convolutions or repeated blocks.

    The model is the outermost module with several parts, or a part with its own embedding, unless the next part takes
    its output: a quantizer has a codebook. A layer with as many outputs as inputs is not taken for a head.
    """
    if not _ends_in_layer(path, module):
        return False
    place = path.rpartition(".")[0]
    parent = modules[place]
    n, m = next((_widths(modules[""].get_submodule(layer)) for layer in _output_layers(path, module)), (0, 0))
    siblings = [child for child in parent.children() if _has_matrices(child)]
    if not siblings or siblings[-1] is not module or not n or n == m:
        return False
    has_vocabulary = any(_is_vocabulary(child, f"{place}.{name}") for name, child in parent.named_children())
    feeds_next = any(taken == m for _, taken in _later(place, modules)[:1])
    if parent is not _unwrapped(modules[""]) and (feeds_next or not has_vocabulary):
        return False
    return any(isinstance(part, (nn.Embedding, _ConvNd)) or _is_block_list(part)
               for child in siblings[:-1] for part in child.modules())  # fmt: skip


def _ends_in_layer(path: str, module: nn.Module) -> bool:
    """Return whether a module is a layer, a Sequential that ends in one, or a final_layer with one and modulation.

    Other modules may call their parts in any order, lists hold several layers, and a norm at the end returns features.
    """
    name = path.rpartition(".")[2]
    if isinstance(module, nn.Linear) and "conv" in words(name):
        return False  # the projection after convolutions, before blocks
    if isinstance(module, nn.Sequential):
        parts = [part for part in module.modules() if next(part.parameters(recurse=False), None) is not None]
        return any(any(_widths(part)) for part in parts[-1:])
    widths = [_widths(part) for part in module.children() if any(_widths(part))]
    is_final = name == "final_layer" and len(widths) == 1 and widths[0][0] != widths[0][1]
    return any(_widths(module)) or is_final


def _output_layers(path: str, module: nn.Module) -> set[str]:
    """Return the paths of the layers that compute a head's output.

    A list holds several heads. Of any other module with parts it is the last layer, if possible of those that are not
    in a deeper module. A module that holds blocks, or returns as many features as it takes, is a part of the trunk,
    such as a pooling.
    """
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return {layer for name, child in module.named_children() for layer in _output_layers(f"{path}.{name}", child)}
    layers = [(name, m) for name, m in module.named_modules() if any(_widths(m)) or _has_matrices(m, recurse=False)]
    wrapped = any(hasattr(module, name) for name in ("base_layer", "original_module", "parametrizations"))
    if not layers or layers[0][1] is module or wrapped:
        return {path} if layers else set()
    if any(_is_block_list(part) for part in module.modules()):
        return set()
    direct = [(name, m) for name, m in layers if "." not in name and any(_widths(m))]
    taken = _widths(layers[0][1])[0]
    returned = [name for name, m in (*direct[-1:], layers[-1]) if not taken or _widths(m)[1] != taken]
    return {WRAPPERS.sub("", f"{path}.{name}") for name in returned[:1]}


def _feeds_next(path: str, layers: set[str], modules: Modules) -> bool:
    """Return whether the next module beside this one takes as many features as this one's layers return.

    Not if its name is that of a head, because two heads may be parallel.
    """
    (name, taken), *_ = _later(path, modules) or [("", 0)]
    return taken in _returned(layers, modules) and not is_head_name(name)


def _feeds_head(path: str, layers: set[str], modules: Modules, heads: Collection[str]) -> bool:
    """Return whether a later head beside this module takes as many features as this one's layers return."""
    widths = {taken for name, taken in _later(path, modules)
              if any(head == name or head.startswith(f"{name}.") for head in heads)}  # fmt: skip
    return not widths.isdisjoint(_returned(layers, modules))


def _later(path: str, modules: Modules) -> list[tuple[str, int]]:
    """Return the path of each later module beside this one that has matrices, and the features that it takes or 0."""
    beside = [item for item in _children(path.rpartition(".")[0], modules) if _has_matrices(item[1])]
    position = next((i for i, (name, _) in enumerate(beside) if name == path), len(beside))
    return [(name, next((width for m in module.modules() if (width := _widths(m)[0])), 0))
            for name, module in beside[position + 1 :]]  # fmt: skip


def _returned(layers: set[str], modules: Modules) -> set[int]:
    return {_widths(modules[layer])[1] for layer in layers} - {0}


# -- modules -----------------------------------------------------------------------------------------------------------


def _widths(module: nn.Module) -> tuple[int, int]:
    """Return the numbers of input and output features of a layer; (0, 0) if they are not known."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, nn.MultiheadAttention):
        return module.embed_dim, module.embed_dim
    return (module.in_channels, module.out_channels) if isinstance(module, _ConvNd) else (0, 0)


def _has_matrices(module: nn.Module, recurse: bool = True) -> bool:
    """Return whether a module has a parameter with more than one row and column."""
    return any(p.dim() > 1 and p.numel() > max(p.shape) for p in module.parameters(recurse))


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the outermost module with several parts: the model inside DDP, Lightning or PEFT."""
    while len(parts := [child for child in module.children() if _has_matrices(child)]) == 1:
        module = parts[0]
    return module


def _is_block_list(module: Any) -> bool:
    """Return whether a module is a list of several blocks of one type, each with parts."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return False
    kinds = [type(child) for child in module.children() if next(child.children(), None) is not None]
    return len(kinds) > len(set(kinds))


def _children(path: str, modules: Modules) -> list[tuple[str, nn.Module]]:
    """Return the path and the module of each direct part of a module."""
    return [(f"{path}.{name}".lstrip("."), child) for name, child in modules[path].named_children()]


def _inside_blocks(modules: Modules, numbered: bool = True) -> set[str]:
    """Return the paths of all modules that are an item of a list, or inside a block that occurs several times.

    A block that is a model has its own heads. So has the only item of a list that holds everything.

    numbered: whether modules of equal class and shapes, with names that differ in a number only, are blocks.
    """
    blocks = {block for path in modules for block in _blocks_in(path, modules, numbered)}
    blocks &= modules.keys()  # a module at several places is listed once
    vocabularies = [path for path, m in modules.items() if _is_vocabulary(m, path)]
    if all(any(path.startswith(f"{block}.") for block in blocks) for path in vocabularies):  # none is for all blocks
        blocks = {block for block in blocks if not _is_language_model(modules[block])}
    inside: set[str] = set()
    for path in modules:  # a module comes before its parts
        parent = path.rpartition(".")[0]
        is_item = path in blocks and isinstance(modules[parent], nn.ModuleList)
        if is_item or parent in blocks or parent in inside:
            inside.add(path)
    return inside


def _is_language_model(module: nn.Module) -> bool:
    """Return whether a module has its own vocabulary, and blocks or a layer with the vocabulary's shape.

    A block may have a table too, such as one of time steps, of labels, or of the tokens for each layer.
    """
    tables = [m for path, m in module.named_modules() if _is_vocabulary(m, path)]
    return any(_is_block_list(m) or _is_transposed_table(m, tables) for m in module.modules()) if tables else False


def _blocks_in(path: str, modules: Modules, numbered: bool) -> set[str]:
    """Return the parts of a module that are blocks: items of a list, or alike, of one class.

    For example items of an nn.Sequential, or if `numbered`, block0 and block1 with the same shapes. Names of heads are
    left out, and torch's containers, because fc1 and fc2 may be two of those.
    """
    holder, children = modules[path], _children(path, modules)
    if isinstance(holder, nn.ModuleList):
        return {name for name, _ in children} if path or len(children) > 1 else set()
    stems = {name: NUMBER.sub("", name.rpartition(".")[2]) for name, _ in children}
    alike = {name: (type(child), stem := stems[name], stem and str([p.shape for p in child.parameters()]))
             for name, child in children}  # fmt: skip
    count = Counter(alike.values())
    may_be = {name for name, child in children if not stems[name]
              or (numbered and type(child) not in CONTAINERS and not is_head_name(name))}  # fmt: skip
    return {name for name in may_be if count[alike[name]] > 1}
