"""The optimizers of benchmarks/trials.py: against small independent formulas, and a few steps of every variant."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import cosmos_optim
from benchmarks import small_model, trials
from benchmarks.comparison import Run
from benchmarks.kept_runs import Result
from benchmarks.protocol import Protocol
from benchmarks.sweep_options import Options
from benchmarks.variants import QUALITY, VARIANTS, Variant
from cosmos_lab.config import OptimizerOptions
from cosmos_lab.models import build, resolve
from cosmos_lab.optimizers import build_optimizer
from cosmos_optim import Cosmos
from cosmos_optim.linalg.subspace import take_first_bases
from cosmos_optim.rules import RULES, cosmos, soap

ROUNDING = 1e-9  # float64, a few products


@pytest.fixture(autouse=True)
def registered(only_the_packages_rules: None) -> None:
    """Enter the trial optimizers by name."""
    trials.register()


def test_trials_are_no_part_of_the_package() -> None:
    assert "soap-polar" not in dir(cosmos_optim) and trials.SOAP_POLAR.name in RULES


def gradients(count: int, m: int = 12, n: int = 8) -> list[Tensor]:
    """Return gradients with a few strong directions."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.linspace(3, 0.1, n, dtype=torch.float64)
    return [torch.randn(m, n, generator=generator, dtype=torch.float64) * scale for _ in range(count)]


def numpy_ns5(X: np.ndarray) -> np.ndarray:
    """Return five Newton-Schulz iterations of X / |X|."""
    X = X / np.linalg.norm(X)
    for _ in range(5):
        R = X.T @ X
        X = X @ (3.4445 * np.eye(len(R)) - 4.775 * R + 2.0315 * R @ R)
    return X


def test_soap_polar_orthogonalizes_adam_in_both_eigenbases() -> None:
    (G,) = gradients(1)
    zeros = [torch.zeros(shape, dtype=torch.float64) for shape in ((12, 8), (12, 8), (8, 8), (8, 8))]
    state = soap.TwoSidedSoapState(*zeros, *(torch.zeros(12, 12, dtype=torch.float64) for _ in range(2)))
    D, new = trials.soap_polar(G, take_first_bases(G, state), torch.tensor([[1.0]], dtype=torch.float64))
    O, U = new.O.numpy(), new.U.numpy()
    assert np.allclose(U.T @ U, np.eye(8), atol=1e-7) and np.allclose(O.T @ O, np.eye(12), atol=1e-7)
    inner = O.T @ G.numpy() @ U
    # In the first step the momentum over the root of the second moment is the sign, here also looking a step ahead.
    adam = inner / (np.abs(inner) + 1e-8)
    assert np.allclose(D.numpy(), 12**0.5 * numpy_ns5(O @ adam @ U.T), atol=1e-6)


def cosmos_state(G: Tensor, rank: int) -> cosmos.CosmosState:
    m, n = G.shape
    shapes = ((m, n), (n, rank), (rank, rank), (m, rank), (m, 1))
    return take_first_bases(G, cosmos.CosmosState(*(torch.zeros(s, dtype=G.dtype) for s in shapes)))


def test_the_trial_rule_without_a_change_is_cosmos() -> None:
    grads = gradients(4)
    state = cosmos_state(grads[0], 3)
    trial = trials.TrialState(*state, torch.zeros(1, 1, dtype=torch.float64))
    for t, G in enumerate(grads, 1):
        step = torch.tensor([[float(t)]], dtype=torch.float64)
        D, state = cosmos.direction(G, state, step)
        D_trial, trial = trials.cosmos_trial(G, trial, step)
        assert torch.equal(D, D_trial)


def test_balance_weighs_the_muon_half_by_its_own_momentum_over_gradient() -> None:
    grads, energy, mean = gradients(4), 0.0, np.zeros((12, 8))
    trial = trials.TrialState(*cosmos_state(grads[0], 3), torch.zeros(1, 1, dtype=torch.float64))
    for t, G in enumerate(grads, 1):
        before, step = trial, torch.tensor([[float(t)]], dtype=torch.float64)
        D, trial = trials.cosmos_trial(G, before, step, balance=1.0)
        g, U = G.numpy(), trial.U.numpy()
        outside = np.eye(8) - U @ U.T
        energy = 0.98 * energy + 0.02 * np.sum((g @ outside) ** 2)
        mean = 0.9 * mean + 0.1 * g
        X = (0.9 * mean + 0.1 * g) @ outside
        ratio = np.linalg.norm(X) / (1 - 0.9 ** (t + 1)) / np.sqrt(energy / (1 - 0.98**t))
        same, _ = trials.cosmos_trial(G, before, step, gamma=float((5 / 8) ** 0.5 * ratio))
        assert torch.allclose(D, same, atol=ROUNDING)


def test_rows_of_adam_have_equal_size_and_the_whole_keeps_its_size() -> None:
    state = trials.AdamRowsState(*(torch.zeros(6, 4, dtype=torch.float64) for _ in range(3)))
    G = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    G[5] = 0  # a token that did not occur
    D, new = trials.adam_rows(G, state, torch.tensor(1.0, dtype=torch.float64))
    assert torch.allclose(D[:5], G[:5].sign(), atol=1e-6) and not D[5].any()  # Adam's first step is the sign
    G = G * torch.tensor([0.1, 1, 1, 1, 1, 1], dtype=torch.float64)[:, None]
    later, _ = trials.adam_rows(G, new, torch.tensor(2.0, dtype=torch.float64))
    plain, _ = trials.adam.direction(G, trials.adam.AdamState(*new[:2]), torch.tensor(2.0, dtype=torch.float64))
    assert torch.isclose(later.norm(), plain.norm()) and later[0].norm() > plain[0].norm()


def one_block() -> torch.nn.Module:
    torch.manual_seed(0)
    return build(resolve("tiny"), width=128, depth=1, mlp=96, vocab_size=64, max_seq_len=16)


def losses_of(variant: Variant | None, row: str, steps: int = 6) -> list[float]:
    """Train a small model for a few steps with a warm-up and a decay, as the sweep would build its optimizer."""
    run = Run("tiny", "B", row, 1e-3, 2e-3, variant=variant.name if variant else "")
    model = one_block()
    optimizer = build_optimizer(model, Protocol().config(run).optimizer)
    base = [group["lr"] for group in optimizer.param_groups]
    tokens, found = torch.arange(32).remainder(17).view(2, 16), []
    for step in range(steps):
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * min((step + 1) / 2, 1 - step / steps / 2)
        loss = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("variant", QUALITY, ids=lambda v: v.name)
def test_every_lever_trains_and_changes_something(variant: Variant) -> None:
    for row in variant.rows[:1] if variant.rows == ("cosmos",) else (variant.rows[0], variant.rows[-1]):
        with_it, without = losses_of(variant, row), losses_of(None, row)
        assert with_it[-1] < with_it[0] - 0.01 and with_it != without and with_it[0] == without[0]


@pytest.mark.parametrize("part", ["hidden", "embedding", "head", "vectors"])
def test_decays_give_a_weight_decay_to_one_part_of_the_model(part: str) -> None:
    groups = trials.TrialCosmos(one_block(), lr=1e-3, decays={part: 0.5}).param_groups
    decays = {name: group["weight_decay"] for group in groups for name in group["param_names"]}
    kinds = {"embed.weight": "embedding", "head.weight": "head"}
    of = {name: kinds.get(name, "vectors" if "norm" in name else "hidden") for name in decays}
    assert set(of.values()) >= {"embedding", "head", "vectors", "hidden"}
    assert {name for name, decay in decays.items() if decay} == {name for name, kind in of.items() if kind == part}


def test_hidden_rates_are_factors_of_lr_and_leave_gamma() -> None:
    groups = trials.TrialCosmos(one_block(), lr=1e-3, adam_lr=2e-2, hidden_rates={".q.": 2, ".down.": 0.5}).param_groups
    rates = {name: group["lr"] for group in groups if group["rule"] == "cosmos" for name in group["param_names"]}
    factors = {"blocks.0.attn.q.weight": 2, "blocks.0.mlp.down.weight": 0.5}
    assert rates == {name: 1e-3 * factors.get(name, 1) for name in rates}
    usual = Cosmos(one_block(), lr=1e-3, adam_lr=2e-2).param_groups[0]["gamma"]
    assert {group["gamma"] for group in groups if group["rule"] == "cosmos"} == {usual}


def test_the_small_comparison_compares_every_change_with_an_unchanged_run_of_its_seed() -> None:
    runs = small_model.changes()
    changed = [run for run in runs if run.variant]
    assert len(set(runs)) == len(runs)
    assert {run.plain for run in changed} < set(runs)
    assert len(set(changed)) == len(small_model.SEEDS) * len({run.variant for run in changed})
    sizes = {small_model.PROTOCOL.config(run).model.vocab_size for run in runs}
    assert sizes == {4096}


@pytest.mark.parametrize("row", sorted(Protocol().entries))
def test_every_row_trains(row: str) -> None:
    found = losses_of(None, row)
    assert found[-1] < found[0] - 0.01


def test_muon_keeps_its_momentum_with_trial_options() -> None:
    run = Run("tiny", "B", "muon", 1e-3, 2e-3, variant="outer-rows")
    optimizer = build_optimizer(one_block(), Protocol().config(run).optimizer)
    rules = {group["rule"]: group for group in optimizer.param_groups}
    assert rules["muon"]["momentum"] == 0.9 and rules["adam-rows"]["lr"] == 2e-3 and "adam" in rules


def test_adam_has_the_same_freedom_of_rates_as_the_others() -> None:
    for row in ("adamw", "cosmos"):
        run = Run("tiny", "B", row, 1e-3, 2e-3, variant="embed-x4")
        groups = build_optimizer(one_block(), Protocol().config(run).optimizer).param_groups
        rates = {name: group["lr"] for group in groups for name in group["param_names"]}
        assert (rates["embed.weight"], rates["head.weight"], rates["norm.weight"]) == (8e-3, 2e-3, 2e-3)
        assert rates["blocks.0.attn.q.weight"] == 1e-3


def test_a_cautious_decay_shrinks_only_weights_that_the_update_shrinks() -> None:
    torch.manual_seed(0)
    layer, twin = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
    twin.load_state_dict(layer.state_dict())
    old, grad = layer.weight.detach().clone(), torch.randn(8, 8)
    for module, decay in ((layer, 0.0), (twin, 0.5)):
        module.weight.grad = grad.clone()
        groups = [{"params": [("w", module.weight)], "rule": "muon"}]
        trials.TrialMuon(groups, 0.1, cautious_decay=decay).step()
    agrees = (old - layer.weight.detach()) * old >= 0
    expected = layer.weight.detach() - 0.1 * 0.5 * old * agrees
    assert torch.allclose(twin.weight.detach(), expected) and 0 < agrees.sum() < 64


@pytest.mark.parametrize("row", ["cosmos", "adamw"])
def test_a_cautious_decay_leaves_embedding_head_and_norms_alone(row: str) -> None:
    run = Run("tiny", "B", row, 1e-3, 2e-3, variant="cautious")
    optimizer = build_optimizer(one_block(), Protocol().config(run).optimizer)
    decayed = {name for group in optimizer.param_groups for name in group["param_names"] if optimizer._decays(group)}
    kinds = {name.rsplit(".", 2)[-2] for name in decayed}
    assert kinds == {"q", "k", "v", "o", "gate", "up", "down"}


def test_a_trial_of_adamw_keeps_both_rates_of_its_row() -> None:
    """Given `adam_lr`, AdamW would run its hidden matrices at that rate too."""
    run = Run("tiny", "B", "adamw", 1e-3, 2e-2)
    rates = [
        {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
        for optimizer in (
            build_optimizer(one_block(), Protocol().config(run).optimizer),
            build_optimizer(one_block(), Protocol().config(replace(run, variant="cautious")).optimizer),
        )
    ]
    assert rates[0] == rates[1] and set(rates[0].values()) == {1e-3, 2e-2}


def test_a_look_ahead_moves_the_weights_along_the_mean_of_their_steps() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    groups = [{"params": [("w", layer.weight)], "rule": "muon"}]
    optimizer = trials.TrialMuon(groups, 0.1, lookahead=0.5)
    x, mean = layer.weight.detach().clone(), torch.zeros(4, 4)
    for step, share in enumerate((0.5, 1.0, 0.8, 0.2)):
        optimizer.param_groups[0]["lr"] = 0.1 * share
        layer.weight.grad = torch.eye(4)
        layer_before = layer.weight.detach().clone()
        optimizer.step()
        moved = 0.1 * share * 2 * numpy_ns5(np.eye(4))[0, 0] * torch.eye(4)
        new = layer_before - moved
        mean = torch.zeros(4, 4) if step == 0 else 0.99 * mean + 0.01 * (new - x)
        x, b = new, 0.5 * share if step == 2 else 0.0  # not in the warm-up, not below a quarter of the peak
        assert torch.allclose(layer.weight.detach(), x + b * mean, atol=1e-4)


def test_a_run_with_look_ahead_continues_exactly() -> None:
    def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()

    options = OptimizerOptions("trial-cosmos", lr=1e-2, rank=8, options=("lookahead=0.6",))
    unbroken, stopped, resumed = one_block(), one_block(), one_block()
    steps(unbroken, build_optimizer(unbroken, options), 0, 8)
    optimizer = build_optimizer(stopped, options)
    steps(stopped, optimizer, 0, 4)
    resumed.load_state_dict(stopped.state_dict())
    other = build_optimizer(resumed, options)
    other.load_state_dict(optimizer.state_dict())
    steps(resumed, other, 4, 8)
    assert all(torch.equal(p, q) for p, q in zip(unbroken.parameters(), resumed.parameters(), strict=True))
    assert not any(torch.equal(p, q) for p, q in zip(unbroken.parameters(), stopped.parameters(), strict=True))


def test_names_of_variants_are_unique_and_say_what_they_do() -> None:
    assert len(VARIANTS) == len({v.name for v in VARIANTS.values()}) and all(v.formula for v in VARIANTS.values())


def test_the_small_model_is_not_compared_on_another_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    def check_texts(protocol: Protocol, options: Options, runs: list[Run], results: Iterable[Result]) -> None:
        assert runs and {result["model"] for result in results} == {protocol.model}
        raise ValueError(f"{options.data} is another text")

    monkeypatch.setattr(small_model, "check_texts", check_texts)
    known = Path(small_model.__file__).parents[1] / "results" / "small-model-rows.json"
    with pytest.raises(SystemExit):
        small_model.main(["rows", "data", str(tmp_path), "--known", str(known)])
    assert "data is another text" in capsys.readouterr().err
