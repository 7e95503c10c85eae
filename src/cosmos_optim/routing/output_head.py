"""Find the output heads of a model: AdamW trains their matrices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress

from torch import nn

NAMES = frozenset({
    "lm_head", "head", "output", "output_layer", "embed_out", "unembed", "unembedding", "classifier", "score",
    "to_logits", "output_projection",
})  # fmt: skip
# Wrappers that do not change what a module is: parametrizations, and the copies that adapters make.
WRAPPERS = re.compile(r"\.(parametrizations|modules_to_save|base_layer|original_module)(\.|$).*")


def find_output_heads(model: nn.Module, head: nn.Module | str | None) -> set[str]:
    """Return the paths of the output heads, given or found, and of all modules inside them."""
    modules = dict(model.named_modules())
    if head is None:
        return _search_heads(modules)
    named = {path for path, module in modules.items() if module is head or path == head}
    named |= {path for path in modules for top in named if path.startswith(f"{top}.")}
    if not named:
        raise ValueError(
            f"head={head!r} is not a module of this model: give one of its modules, or a name such as 'lm_head'"
        )
    return named


def _search_heads(modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the modules with a head's name, those from `get_output_embeddings`, and a layer shaped like the embedding.

    The last applies only if exactly one linear layer has the embedding's shape.
    """
    once = {path: module for path, module in modules.items() if not _is_repeated(path, modules)}
    found = set()
    for path, module in once.items():
        if path.rpartition(".")[2] in NAMES:
            found.add(_last_layer(path, module))
        ask = getattr(module, "get_output_embeddings", None)  # transformers' models
        with suppress(NotImplementedError, AttributeError):  # some have the method but no head
            head = ask() if callable(ask) else None
            found |= {other for other, m in modules.items() if m is head and isinstance(head, nn.Module)}
    tables = {(m.num_embeddings, m.embedding_dim) for m in modules.values() if isinstance(m, nn.Embedding)}
    wide = [path for path, m in once.items() if isinstance(m, nn.Linear) and m.out_features > m.in_features
            and (m.out_features, m.in_features) in tables]  # fmt: skip
    found |= set(wide if len(wide) == 1 else ())
    return found | {path for path in modules if WRAPPERS.sub("", path) in found}


def _is_repeated(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a module is inside a block that occurs several times."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        holder = modules[".".join(parts[:i])] if part.isdigit() else None
        if isinstance(holder, nn.ModuleList):
            return True
        if holder is not None and i < len(parts) - 1:
            kind = type(modules[".".join(parts[: i + 1])])
            if sum(type(child) is kind for child in holder.children()) > 1:
                return True
    return False


def _last_layer(path: str, module: nn.Module) -> str:
    """Return the path of the layer that computes the output: in a sequence, the last with a matrix."""
    while isinstance(module, nn.Sequential):
        children = [(n, m) for n, m in module.named_children() if any(p.dim() > 1 for p in m.parameters())]
        if not children:
            break
        path, module = f"{path}.{children[-1][0]}", children[-1][1]
    return path
