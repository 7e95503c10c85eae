"""State of LoRA's factors, by plan on the meta device: A is (rank, width) and B is (width, rank)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cosmos_optim import plan

WIDTHS = (512, 768, 1024, 2048, 4096, 8192)
RANKS = (1, *range(6, 34), 48, 64, 96, 128, 192, 256)
THIN = range(2, 6)  # Row moments, one for each row, are 1 / (2 rank) of AdamW's state: more than a tenth up to rank 5.
BOUND = 1.1  # times the state of AdamW, two numbers for each parameter


def ratio(rank: int, width: int, out: int | None = None, **options: object) -> float:
    """Return the state of a pair of factors, divided by that of AdamW."""
    with torch.device("meta"):
        factors = [nn.Linear(width, rank, bias=False), nn.Linear(rank, out or width, bias=False)]
        found = plan(nn.ModuleDict(dict(zip(("lora_A", "lora_B"), factors, strict=True))), **options)
    return found.state_elements / (2 * found.parameters)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_state_of_adapters_is_at_most_a_tenth_more_than_adamws(width: int) -> None:
    assert max(ratio(rank, width) for rank in RANKS) <= BOUND
    assert max(ratio(rank, width, 4 * width) for rank in RANKS) <= BOUND


@pytest.mark.parametrize("width", WIDTHS)
def test_row_moments_are_what_adapters_of_rank_2_to_5_have_beyond_that(width: int) -> None:
    for rank in THIN:
        basis = rank / width  # U and S, rank x rank each, for rank x width parameters
        assert ratio(rank, width) == pytest.approx(1 + 1 / (2 * rank) + basis, abs=2e-3)
        assert ratio(rank, width, row_beta2=None) <= BOUND


def test_narrow_adapters_have_up_to_a_fifth_more_state() -> None:
    """Below about 300 columns the basis itself is large, at LoRA ranks near COSMOS's own rank of 32."""
    assert max(ratio(rank, 200) for rank in RANKS) == pytest.approx(1.171, abs=1e-3)
    assert max(ratio(rank, 384) for rank in RANKS) <= BOUND
