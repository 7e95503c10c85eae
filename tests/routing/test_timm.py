"""The routes of every family of timm: as in the committed table, and by rules that are independent of the router."""

from __future__ import annotations

import pytest
from torch import nn

from cosmos_optim import param_groups
from cosmos_optim.routing.param_groups import routes
from tests.routing import oracle, tables, timm_models

NAMED_HEADS = ("aux_head.weight",)  # volo's; get_classifier returns the other


def declared_heads(model: nn.Module) -> list[nn.Module]:
    """Return what the model calls its classifiers; an encoder alone has none."""
    found = model.get_classifier() if hasattr(model, "get_classifier") else ()
    return list(found) if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("name", timm_models.NAMES)
def test_routes_are_those_of_the_table_and_of_the_oracle(name: str) -> None:
    model = timm_models.build(name)
    assert tables.table(model) == tables.read("timm")[name]
    rules = {parameter.name: route.rule for parameter, route in routes(model)}
    assert oracle.wrong_routes(model, rules, declared_heads(model), named_heads=NAMED_HEADS) == []
    assert set(rules) == {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("name", timm_models.REFUSED)
def test_a_parameter_that_nothing_recognizes_is_an_error_that_suggests_adam_first(name: str) -> None:
    with pytest.raises(ValueError, match=r"is not known to be.*overrides=\{'[^']*': 'adam'[,}]"):
        param_groups(timm_models.build(name))


def test_the_table_has_every_family() -> None:
    assert len(timm_models.FAMILIES) >= 97
    assert set(tables.read("timm")) == set(timm_models.NAMES)
