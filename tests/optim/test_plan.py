"""The plan: complete, right about the state, and as strict as the optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cosmos_optim import Cosmos, param_groups, plan
from tests.optim.helpers import Decoder, decoder


@pytest.mark.parametrize(
    ("overrides", "error", "message"),
    [
        ({"up.weight": "adamw"}, ValueError, "there is no rule 'adamw' .did you mean 'adam'"),
        ({"up.weight": {"wd": 1}}, ValueError, "no hyper-parameter 'wd'"),
        ({"up.weight": {"layout": "transposed"}}, ValueError, "layout='transposed'"),
        (["up.weight"], TypeError, "must map patterns"),
    ],
)
def test_a_plan_refuses_what_the_optimizer_would(overrides: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan(decoder(), overrides=overrides)
    with pytest.raises(error, match=message):
        Cosmos(param_groups(decoder(), overrides=overrides))


def test_a_plan_knows_both_sides_in_an_override() -> None:
    overrides = {"up.weight": {"two_sided": True}, "down.weight": {"two_sided": False}}
    groups = Cosmos(param_groups(decoder(), overrides=overrides)).param_groups
    rules = {name: group["rule"] for group in groups for name in group["param_names"]}
    assert {row.name: row.rule for row in plan(decoder(), overrides=overrides).rows} == rules
    assert rules["up.weight"] == "cosmos-two-sided"


def test_the_plan_names_every_parameter_and_adds_up() -> None:
    model = Decoder()
    text = str(plan(model, rank=4))
    for name, _ in model.named_parameters():
        assert name in text
    assert "cosmos: 2 tensors, 480 parameters" in text
    opt = Cosmos(model, rank=4)
    assert plan(model, rank=4).state_bytes == plan(opt).state_bytes == opt.state_bytes()
    with pytest.raises(ValueError, match="did you mean 'rank'"):
        plan(model, rnak=4)
    with pytest.raises(ValueError, match="no rule 'sopa'"):
        plan(model, "sopa")


# The paper's Table 1, in units of d^2, for four d x d and two d x 4d matrices and r = 0.05 d.
PAPER_TABLE = {"adam": 24, "adam-mini": 12, "soap": 66, "muon": 12, "cosmos-paper": 13}


@pytest.mark.parametrize("rule", PAPER_TABLE)
def test_the_papers_table_of_state_sizes(rule: str) -> None:
    d = 1000
    with torch.device("meta"):
        shapes = [(d, d)] * 4 + [(d, 4 * d), (4 * d, d)]
        model = nn.Sequential(*(nn.Linear(n, m, bias=False) for m, n in shapes))
    hyper = {"rank": 50} if rule == "cosmos-paper" else {}
    # The paper rounds to whole d^2: COSMOS needs 12.915, Adam-mini 12 and 9 vectors.
    assert plan(model, rule, **hyper).state_elements / d**2 == pytest.approx(PAPER_TABLE[rule], abs=0.1)
