"""Routing and updates of modules that are not quite nn.Linear: parametrized, recurrent, experts, heads of layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from cosmos_optim import AdamMini, Cosmos, param_groups
from cosmos_optim.routing.param_groups import routes
from tests.optim.helpers import decoder, gradient


def rules(model: nn.Module, **kwargs: object) -> dict[str, tuple[str, dict[str, object]]]:
    found = routes(model, decay="all", **kwargs)  # with "matrices", most have weight_decay=0
    return {parameter.name: (route.rule, dict(route.settings)) for parameter, route in found}


def test_parametrized_weights_are_routed_by_their_module() -> None:
    model = nn.ModuleDict(
        {
            "normed": parametrizations.weight_norm(nn.Linear(4, 8)),
            "conv": parametrizations.weight_norm(nn.Conv1d(4, 8, 1)),
            "spectral": parametrizations.spectral_norm(nn.Linear(4, 8)),
            "table": parametrizations.weight_norm(nn.Embedding(10, 4)),
        }
    )
    found = rules(model)
    assert found["normed.parametrizations.weight.original0"] == ("adam", {})
    assert found["normed.parametrizations.weight.original1"] == ("cosmos", {})
    assert found["conv.parametrizations.weight.original0"] == ("adam", {})
    assert found["conv.parametrizations.weight.original1"] == ("cosmos", {"layout": "conv"})
    assert found["spectral.parametrizations.weight.original"] == ("cosmos", {})
    assert found["table.parametrizations.weight.original1"] == ("adam", {})
    Cosmos(model, rank=2)


def test_pruned_and_normed_weights_of_attention_are_cut_as_the_weights() -> None:
    model = nn.ModuleDict({"fused": nn.MultiheadAttention(8, 2), "apart": nn.MultiheadAttention(8, 2, kdim=4, vdim=4)})
    prune.random_unstructured(model["fused"], "in_proj_weight", 0.5)
    prune.random_unstructured(model["apart"], "k_proj_weight", 0.5)
    with pytest.warns(FutureWarning, match="deprecated"):
        nn.utils.weight_norm(model["apart"], "q_proj_weight")
    found = rules(model)
    assert found["fused.in_proj_weight_orig"] == ("cosmos", {"split_sizes": (8, 8, 8)})
    assert found["apart.k_proj_weight_orig"] == found["apart.q_proj_weight_v"] == ("cosmos", {})
    assert found["apart.q_proj_weight_g"] == ("adam", {})


def test_recurrent_projections_are_one_block() -> None:
    found = rules(nn.ModuleDict({"lstm": nn.LSTM(4, 5, proj_size=3)}))
    assert found["lstm.weight_hr_l0"] == ("cosmos", {})
    assert found["lstm.weight_hh_l0"] == ("cosmos", {"split_sizes": (5, 5, 5, 5)})


class TopKRouter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 8))


class Experts(nn.Module):
    """The experts of GPT-OSS as transformers stores them: (expert, in, out), with biases."""

    is_transposed = True

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 8, 12, generator=torch.Generator().manual_seed(0)))
        self.up_bias = nn.Parameter(torch.zeros(3, 12))


def test_experts_stored_in_out_are_updated_as_the_transposed_ones() -> None:
    """The update of (expert, in, out) stacks is the transpose of the update of (expert, out, in) ones."""
    model = nn.ModuleDict({"router": TopKRouter(), "experts": Experts()})
    assert rules(model) == {
        "router.weight": ("cosmos", {}),
        "experts.up": ("cosmos", {"layout": "in_out"}),
        "experts.up_bias": ("adam", {}),
    }
    stored, plain = model["experts"].up, nn.Parameter(model["experts"].up.detach().mT.contiguous())
    a, b = Cosmos(model, lr=0.1, rank=3), Cosmos([plain], lr=0.1, rank=3)
    assert a.state[stored]["U"].shape == (3, 8, 3)
    for step in range(3):
        plain.grad = gradient((3, 12, 8), step)
        stored.grad = plain.grad.mT.clone()
        a.step()
        b.step()
    torch.testing.assert_close(stored.mT, plain, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="a stack of matrices: leave split_sizes out"):
        Cosmos([{"params": [plain], "split_sizes": (6, 6)}])


def test_head_covers_all_its_layers_and_overrides_match_tied_names() -> None:
    model = decoder()
    model.classify = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 3))
    assert rules(model, head="classify")["classify.0.weight"][0] == "adam"
    assert rules(model)["classify.0.weight"][0] == "cosmos"
    model.lm_head.weight = model.embed.weight
    groups = param_groups(model, overrides={"lm_head.weight": {"rule": "adam", "lr": 0.3}})
    assert [name for name, _ in groups[1]["params"]] == ["embed.weight"]
    assert groups[1]["lr"] == 0.3


def test_adam_mini_has_a_second_moment_for_each_output_row() -> None:
    """Output rows of every convolution and of (in, out) weights, for any storage."""
    model = nn.ModuleDict(
        {"conv": nn.Conv2d(3, 8, 3), "depthwise": nn.Conv2d(4, 4, 3, groups=4), "query": nn.Linear(6, 8)}
    )
    opt = AdamMini(model, head_dim=4)
    shapes = {name: tuple(opt.state[p]["v"].shape) for name, p in model.named_parameters() if p.dim() > 1}
    assert shapes == {"conv.weight": (8, 1), "depthwise.weight": (4, 1), "query.weight": (2, 1)}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
