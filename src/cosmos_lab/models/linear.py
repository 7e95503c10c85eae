"""Linear layers on copies of the weights in the compute type, with rows joined and aligned for the matrix units."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def compute_dtype(device: torch.device, weight: Tensor) -> torch.dtype:
    """Return the type of the matrix products: autocast's if it is on, else the weight's."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return weight.dtype


def row_padding(size: int, dtype: torch.dtype) -> int:
    """Return how many elements to pad: 16-bit rows that are not 16-byte aligned run at quarter speed."""
    return -size % 64 if dtype.itemsize == 2 and size % 8 else 0


def joined_linear(x: Tensor, layers: Sequence[nn.Linear], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Compute several layers that read the same x with one matrix product over their joined weights.

    Each output is padded with zeros to an aligned size if its size is odd. The copy in `dtype` has to be made
    anyway; joining makes one long product of several short ones, forward and backward.
    """
    weights, biases = [], []
    for layer in layers:
        pad = row_padding(layer.out_features, dtype)
        weight = layer.weight.to(dtype)
        weights.append(F.pad(weight, (0, 0, 0, pad)) if pad else weight)
        if layer.bias is not None:
            biases.append(F.pad(layer.bias.to(dtype), (0, pad)))
    bias = torch.cat(biases) if biases else None
    out = F.linear(x.to(dtype), torch.cat(weights) if len(weights) > 1 else weights[0], bias)
    return torch.split(out, [weight.shape[0] for weight in weights], dim=-1)


def output_linear(x: Tensor, layer: nn.Linear, dtype: torch.dtype) -> Tensor:
    """Compute layer(x) for an x that may have joined_linear's padding: the weight gets zero columns to match."""
    weight = layer.weight.to(dtype)
    pad = x.shape[-1] - layer.in_features
    bias = None if layer.bias is None else layer.bias.to(dtype)
    return F.linear(x.to(dtype), F.pad(weight, (0, pad)) if pad else weight, bias)
