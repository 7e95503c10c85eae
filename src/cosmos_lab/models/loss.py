"""Cross-entropy of a linear head, chunk by chunk over the tokens, so that the logits never exist all at once.

Legend: N = tokens, d = width, V = vocabulary. H is (N, d), W is (V, d), logits = H W' (N, V).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import row_padding

# Elements of one chunk of logits: 8,192 tokens of a 32,000-token vocabulary, half a gigabyte in bf16. Smaller chunks
# save little beside the activations, and each one passes once more over the gradient of W.
CHUNK_ELEMENTS = 2**28


def _logits(hidden: Tensor, weight: Tensor, vocab: int) -> Tensor:
    """hidden W' in fp32 (or wider), with the padded columns at -inf."""
    logits = hidden @ weight.mT
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if weight.shape[0] == vocab:
        return logits
    return torch.where(torch.arange(weight.shape[0], device=logits.device) < vocab, logits, float("-inf"))


def _nll(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of log sum exp(z) - z[target] over the rows, and the log sum exp of each row (rows, 1)."""
    lse = torch.logsumexp(logits, dim=-1, keepdim=True)
    return (lse - logits.gather(-1, targets[:, None])).sum(), lse


def _operands(hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> tuple[Tensor, Any]:
    """W in the compute type with aligned rows, and the (hidden, targets) chunks."""
    pad = row_padding(weight.shape[0], dtype)
    aligned = F.pad(weight.to(dtype), (0, 0, 0, pad)) if pad else weight.to(dtype)
    chunks = max(1, -(-hidden.shape[0] * aligned.shape[0] // CHUNK_ELEMENTS))
    return aligned, list(zip(hidden.chunk(chunks), targets.chunk(chunks), strict=True))


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss with both gradients taken in the forward pass, while each chunk of logits is at hand.

        P = softmax(H W') - onehot(targets);  dH = P W / N;  dW = P' H / N

    The same three products as the plain form, none repeated. P is kept unscaled in the compute type (|P| <= 1, so
    that fp16 does not underflow); dW is summed over chunks in fp32.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
        vocab = weight.shape[0]
        aligned, chunks = _operands(hidden, weight, targets, dtype)
        columns = torch.arange(aligned.shape[0], device=hidden.device)
        losses, grads = [], []
        grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for rows, labels in chunks:
            rows = rows.to(dtype)
            logits = _logits(rows, aligned, vocab)
            loss, lse = _nll(logits, labels)
            probs = torch.exp(logits - lse)
            delta = torch.where(columns == labels[:, None], probs - 1, probs).to(dtype)
            losses.append(loss)
            grads.append((delta @ aligned).to(hidden.dtype))
            grad_weight.add_((delta.mT @ rows)[:vocab])
        ctx.save_for_backward(torch.cat(grads), grad_weight.to(weight.dtype))
        return torch.stack(losses).sum() / hidden.shape[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_outputs[0] / grad_hidden.shape[0]
        return (grad_hidden * scale).to(grad_hidden.dtype), (grad_weight * scale).to(grad_weight.dtype), None, None


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean over N of -log softmax(H W')[target], with softmax in fp32 and the matrix products in ``dtype``."""
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, dtype)  # type: ignore[no-untyped-call]
        return loss
    aligned, chunks = _operands(hidden, weight, targets, dtype)
    losses = [_nll(_logits(rows.to(dtype), aligned, weight.shape[0]), labels)[0] for rows, labels in chunks]
    return torch.stack(losses).sum() / hidden.shape[0]
