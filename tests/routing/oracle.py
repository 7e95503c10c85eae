"""What a parameter's rule should be, by rules that are independent of the router's: types, and lists in the test.

The router looks at names; these rules look at what the test knows: which modules the library calls its classifier, how
many labels the test asked for, and a list of further heads that was written by reading the models.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

MATRIX = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)


def wrong_routes(
    model: nn.Module, rules: dict[str, str], heads: Iterable[nn.Module], labels: int = 0,
    named_heads: Iterable[str] = (), tables: Iterable[str] = (), hidden: Iterable[str] = (),
) -> list[str]:  # fmt: skip
    """Return the parameters with another rule than expected.

    heads: the modules that the library declares as its outputs.
    labels: a width that only classifiers have.
    named_heads, tables, hidden: patterns of names of other heads, of linear layers that are tables, and of plain
        parameters that are hidden matrices.
    """
    outputs = {id(p) for head in heads for p in head.parameters()}
    tied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    wrong = []
    for path, module in model.named_modules():
        for attribute, p in module.named_parameters(recurse=False):
            name = f"{path}.{attribute}" if path else attribute
            if name not in rules:
                continue
            is_output = id(p) in outputs | tied or any(fnmatch.fnmatchcase(name, x) for x in (*named_heads, *tables))
            is_listed = p.shape[:1] != (1,) and any(fnmatch.fnmatchcase(name, x) for x in hidden)  # one row is a vector
            is_matrix = _is_matrix(module, attribute, p) or is_listed
            expected = "cosmos" if is_matrix and not is_output and (not labels or p.shape[0] != labels) else "adam"
            if rules[name] != expected:
                wrong.append(f"{name} {tuple(p.shape)} in {type(module).__name__}: {rules[name]}, not {expected}")
    return wrong


def _is_matrix(module: nn.Module, attribute: str, p: Tensor) -> bool:
    """Return whether a parameter is a layer's matrix: not a row, and not a kernel for each channel."""
    if p.dim() < 2 or p.numel() == max(p.shape):
        return False
    if isinstance(module, _ConvNd) and attribute == "weight":
        return p.shape[0] > module.groups and (module.groups == 1 or p.shape[1] > 1)
    return (isinstance(module, nn.Linear) and attribute == "weight") or (
        isinstance(module, MATRIX) and "weight" in attribute
    )
