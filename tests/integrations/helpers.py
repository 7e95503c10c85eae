"""A tiny LLaMA, token data and loops that the tests of frameworks share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 64
STEPS = 6
CUT = 3  # a run is saved after this step and continued


def tiny_llama(seed: int = 0, **changes: Any) -> Any:
    """Return a LLaMA of two layers of width 32 from transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **(shape | more | changes)))


def tokens(rows: int = 32, length: int = 12) -> Tensor:
    """Return rows of tokens that can be learnt: each token gives the next."""
    start = torch.randint(1, VOCABULARY, (rows, 1), generator=torch.Generator().manual_seed(0))
    return (start + 3 * torch.arange(length)) % (VOCABULARY - 1) + 1


def examples(rows: int = 32) -> list[dict[str, Tensor]]:
    """Return the tokens as a data set for transformers' Trainer."""
    return [{"input_ids": row, "labels": row} for row in tokens(rows)]


def batch(step: int, size: int = 4) -> Tensor:
    """Return the batch of one step."""
    return tokens()[torch.arange(step * size, (step + 1) * size) % 32]


def llama_loss(model: Any, step: int) -> Tensor:
    """Return the loss of a transformers model on the batch of one step."""
    x = batch(step)
    return model(input_ids=x, labels=x).loss


def train(model: Any, optimizer: Any, steps: range, loss_of: Callable[[Any, int], Tensor] = llama_loss) -> list[float]:
    """Train on the batches of these steps and return the losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_continues_exactly(
    build: Callable[[int], Any], wrap: Callable[[Any], Any], run: Callable[[Any, Any, range], list[float]] = train
) -> None:
    """Compare an unbroken run with one that is saved, loaded into new objects and continued.

    build: makes the model from a seed. wrap: makes the optimizer of a model. run: trains and returns the losses.
    """
    model = build(0)
    opt = wrap(model)
    run(model, opt, range(CUT))
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    after = run(model, opt, range(CUT, STEPS))
    other = build(1)
    again = wrap(other)
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert run(other, again, range(CUT, STEPS)) == after


def weights(model: nn.Module) -> list[Tensor]:
    """Return copies of all parameters."""
    return [p.detach().clone() for p in model.parameters()]


def changed(model: nn.Module, before: list[Tensor]) -> set[str]:
    """Return the names of the parameters that differ from their copies."""
    named = zip(model.named_parameters(), before, strict=True)
    return {name for (name, p), old in named if not torch.equal(p.detach(), old)}
