"""Which modules of a model make its output: their matrices are no hidden ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress

from torch import nn

NAMES = frozenset({
    "lm_head", "head", "output", "output_layer", "embed_out", "unembed", "unembedding", "classifier", "score",
    "to_logits", "output_projection",
})  # fmt: skip
# What wraps a module without changing what it is: parametrizations, adapters' copies.
WRAPPERS = re.compile(r"\.(parametrizations|modules_to_save|base_layer|original_module)(\.|$).*")


def heads_of(model: nn.Module, head: nn.Module | str | None) -> set[str]:
    """Paths of modules that produce the output."""
    modules = dict(model.named_modules())
    if head is None:
        return _found_heads(modules)
    named = {path for path, module in modules.items() if module is head or path == head}
    named |= {path for path in modules for top in named if path.startswith(f"{top}.")}
    if not named:
        raise ValueError(
            f"head={head!r} is no module of this model: give one of its modules, or a name such as 'lm_head'"
        )
    return named


def _found_heads(modules: Mapping[str, nn.Module]) -> set[str]:
    """Heads are named as such, or returned by `get_output_embeddings`, or the one layer that undoes the embedding."""
    once = {path: module for path, module in modules.items() if not _repeated(path, modules)}
    found = set()
    for path, module in once.items():
        if path.rpartition(".")[2] in NAMES:
            found.add(_last_of(path, module))
        ask = getattr(module, "get_output_embeddings", None)  # transformers' models
        with suppress(NotImplementedError, AttributeError):  # some of them have the method and no head
            head = ask() if callable(ask) else None
            found |= {other for other, m in modules.items() if m is head and isinstance(head, nn.Module)}
    tables = {(m.num_embeddings, m.embedding_dim) for m in modules.values() if isinstance(m, nn.Embedding)}
    wide = [path for path, m in once.items() if isinstance(m, nn.Linear) and m.out_features > m.in_features
            and (m.out_features, m.in_features) in tables]  # fmt: skip
    found |= set(wide if len(wide) == 1 else ())
    return found | {path for path in modules if WRAPPERS.sub("", path) in found}


def _repeated(path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a module sits inside a block of which there are several."""
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


def _last_of(path: str, module: nn.Module) -> str:
    """The layer that makes the output: of a sequence the last one with a matrix."""
    while isinstance(module, nn.Sequential):
        children = [(n, m) for n, m in module.named_children() if any(p.dim() > 1 for p in m.parameters())]
        if not children:
            break
        path, module = f"{path}.{children[-1][0]}", children[-1][1]
    return path
