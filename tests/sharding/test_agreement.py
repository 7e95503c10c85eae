"""Ranks take the same decisions and keep equal copies."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from cosmos_optim import OPTIMIZERS, SOAP, Cosmos
from tests.sharding.cases import Case, FewShapes, full, full_weights, gradient, hsdp, placed, take_steps
from tests.sharding.ranks import run_ranks

CLOSE_64 = 1e-9
SHAPE = torch.Size((6, 5))


def matrix(mesh: Any, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(placed(gradient(seed, SHAPE, 0, torch.float64), mesh, (Shard(0),)))


def one_bad_rank(rank: int, nonfinite: str) -> Any:
    """Take three steps; the second has a NaN in the part of rank 1 only."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    p, b = matrix(mesh), nn.Parameter(torch.ones(3, dtype=torch.float64))
    groups = [{"params": [p]}, {"params": [b], "rule": "adam"}]
    opt = Cosmos(groups, lr=0.01, rank=2, gamma=0.25, nonfinite=nonfinite)
    seen: list[Any] = []
    for step in range(3):
        p.grad = placed(gradient(0, SHAPE, step, torch.float64), mesh, (Shard(0),))
        b.grad = torch.ones_like(b)
        if step == 1 and rank == 1:
            p.grad.to_local()[0, 0] = float("nan")
        try:
            opt.step()
        except FloatingPointError as error:
            seen.append(str(error))
        seen.append((p.full_tensor().detach().clone(), b.detach().clone(), float(opt.state[p]["step"])))
    assert opt.skipped_steps == (nonfinite == "skip")
    return seen


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_a_nan_on_one_rank_changes_nothing_on_any_rank(nonfinite: str) -> None:
    """No parameter group changes, and all ranks take the next step."""
    for seen in run_ranks(3, one_bad_rank, nonfinite):
        errors = [x for x in seen if isinstance(x, str)]
        first, second, third = (x for x in seen if not isinstance(x, str))
        assert len(errors) == (nonfinite == "raise")
        assert all(torch.equal(a, b) for a, b in zip(first[:2], second[:2], strict=True))
        assert (first[2], second[2], third[2]) == (1.0, 1.0, 2.0)
        assert not torch.equal(second[0], third[0])
        assert third[0].isfinite().all()


def other_matrices(rank: int, nonfinite: str) -> tuple[list[str], bool, float]:
    """Take a step with the gradient of another matrix on each rank, between two with both."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    p, q = matrix(mesh), matrix(mesh, 1)
    bias = nn.Parameter(placed(torch.ones(4, dtype=torch.float64), mesh, (Shard(0),)))
    groups = [{"params": [("p", p), ("q", q)]}, {"params": [("b", bias)], "rule": "adam"}]
    opt, errors = Cosmos(groups, lr=0.01, rank=2, gamma=0.25, nonfinite=nonfinite), []
    for step in range(3):
        for i, x in enumerate((p, q, bias)):
            x.grad = placed(gradient(i, x.shape, step, torch.float64), mesh, (Shard(0),))
        before = [full(x).clone() for x in (p, q)]
        if step == 1:
            (p, q)[rank].grad = None
        try:
            opt.step()
        except RuntimeError as error:
            errors.append(str(error))
            unchanged = all(torch.equal(a, full(b)) for a, b in zip(before, (p, q), strict=True))
    return errors, unchanged, float(opt.state[p]["step"])


def other_experts(rank: int) -> str:
    """Take a step in which the two ranks of one small mesh have gradients of different experts; all have a matrix."""
    whole, pairs = init_device_mesh("cpu", (4,)), [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    mesh = pairs[rank // 2]
    dense, experts = matrix(whole), [matrix(mesh, 1), matrix(mesh, 2)]
    opt = Cosmos([("dense", dense), ("a", experts[0]), ("b", experts[1])], lr=0.01, rank=2, gamma=0.25)
    for step in range(2):
        dense.grad = placed(gradient(0, SHAPE, step, torch.float64), whole, (Shard(0),))
        for i, p in enumerate(experts):
            p.grad = placed(gradient(i, SHAPE, step, torch.float64), mesh, (Shard(0),))
        if step and rank < 2:
            experts[rank].grad = None
        try:
            opt.step()
        except RuntimeError as error:
            return str(error)
    return "no error"


def test_gradients_of_different_experts_on_some_ranks_are_an_error_on_all() -> None:
    for text in run_ranks(4, other_experts):
        assert "gradients of different matrices" in text


@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_gradients_of_different_matrices_are_an_error_on_all_ranks(nonfinite: str) -> None:
    """Their shards have equal shapes, so a step would put rows of both into one matrix."""
    for errors, unchanged, steps in run_ranks(2, other_matrices, nonfinite):
        assert len(errors) == 1 and "gradients of different matrices" in errors[0] and "missing='zero'" in errors[0]
        assert unchanged and steps == 2.0


def skips_of_a_stage(rank: int, bad: int) -> int | None:
    """Take a step on a mesh of 2 x 2 of 5 ranks, with a NaN on one of them; return the skipped steps."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
    if rank == 4:
        return None
    p = nn.Parameter(placed(gradient(0, SHAPE, 0, torch.float64), mesh, (Shard(0), Shard(1))))
    opt = Cosmos([p], lr=0.01, rank=2, gamma=0.25)
    p.grad = placed(gradient(0, SHAPE, 1, torch.float64), mesh, (Shard(0), Shard(1)))
    if rank == bad:
        p.grad.to_local()[0, 0] = float("nan")
    opt.step()
    return opt.skipped_steps


@pytest.mark.parametrize("bad", [0, 3])
def test_all_ranks_of_a_stage_skip_together_if_its_mesh_has_two_dimensions(bad: int) -> None:
    """Pipeline stages shard over a part of the ranks, in groups along each dimension."""
    assert run_ranks(5, skips_of_a_stage, bad) == [1, 1, 1, 1, None]


def late_matrices(rank: int) -> list[torch.Tensor]:
    """Take steps of SOAP on whole matrices, each of which has its first gradient at another step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    wholes = [gradient(i, torch.Size((6, 6)), -1, torch.float64) for i in range(5)]
    params = [nn.Parameter(x if mesh is None else placed(x, mesh, (Shard(0),))) for x in wholes]
    opt = SOAP(params, lr=0.01, two_sided=True, eps=1e-2, frequency=2)
    for step in range(7):
        for i, p in enumerate(params):
            grad = gradient(i, p.shape, step, torch.float64) * (step >= i)
            p.grad = grad if mesh is None else placed(grad, mesh, (Shard(0),))
        opt.step()
    return [full(p).clone() for p in params]


def test_an_owner_takes_the_step_counts_of_the_matrices_that_it_owns() -> None:
    """Bias corrections and updates of the bases depend on them."""
    expected = late_matrices(0)
    for found in run_ranks(3, late_matrices):
        for a, b in zip(found, expected, strict=True):
            assert float((a - b).abs().max()) < CLOSE_64


def step_with_denormal_momentum(rank: int, name: str) -> bool:
    """Take a step with a zero gradient and a momentum of the smallest number; return whether weights stay finite."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shape = torch.Size((64, 16))
    p = nn.Parameter(placed(gradient(0, shape, 0, torch.float32), mesh, (Shard(0),)))
    opt = OPTIMIZERS[name]([("w", p)], lr=0.01)
    p.grad = placed(gradient(0, shape, 1, torch.float32), mesh, (Shard(0),))
    opt.step()
    opt.state[p]["M"].to_local().fill_(5e-45)
    p.grad = placed(torch.zeros(shape), mesh, (Shard(0),))
    opt.step()
    return bool(p.full_tensor().isfinite().all())


@pytest.mark.parametrize("name", ["cosmos", "muon", "normuon"])
def test_a_momentum_that_has_decayed_to_denormals_does_no_harm(name: str) -> None:
    """1 / |X| is beyond float32 there. A layer without gradients gets there after about a thousand steps."""
    assert run_ranks(2, step_with_denormal_momentum, name) == [True, True]


def first_rows_zero(rank: int) -> torch.Tensor:
    """Take three steps; the first and last gradients are zero on rank 0 alone."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    start = gradient(0, SHAPE, 0, torch.float64)
    p = nn.Parameter(start if mesh is None else placed(start, mesh, (Shard(0),)))
    opt = Cosmos([p], lr=0.01, rank=2, gamma=0.25, ns_dtype=torch.float64)
    for step in range(3):
        G = gradient(0, SHAPE, step, torch.float64)
        if step in (0, 2):
            G[:2] = 0
        p.grad = G if mesh is None else placed(G, mesh, (Shard(0),))
        opt.step()
    return full(p)


@pytest.mark.parametrize("world", [3, 8])
def test_a_gradient_that_is_zero_on_one_rank_starts_the_basis_on_all(world: int) -> None:
    """All ranks take their first basis in the same step. Two of eight ranks hold no row."""
    expected = first_rows_zero(0)
    for found in run_ranks(world, first_rows_zero):
        assert float((found - expected).abs().max()) < CLOSE_64


def partly_zero_experts(rank: int, placements: Any, experts: int, nonfinite: str) -> torch.Tensor:
    """Train experts on a mesh of 2 x 2: one has a zero gradient in every other step, two have zeros in part of it."""
    mesh = init_device_mesh("cpu", (2, 2)) if dist.is_initialized() else None
    shape = torch.Size((experts, 6, 4))
    start = gradient(0, shape, 0, torch.float64)
    p = nn.Parameter(start if mesh is None else placed(start, mesh, placements))
    opt = Cosmos([p], lr=0.01, rank=2, gamma=0.25, weight_decay=0.1, ns_dtype=torch.float64, nonfinite=nonfinite)
    for step in range(5):
        G = gradient(1, shape, step, torch.float64)
        G[1] *= step % 2 == 0
        if step:
            G[-2, :, :2] = 0
            G[-1, 3:] = 0
        p.grad = G if mesh is None else placed(G, mesh, placements)
        opt.step()
    return full(p)


@pytest.mark.parametrize(
    "placements",
    [(Shard(0), Shard(1)), (Shard(1), Shard(0)), (Shard(2), Shard(1)), (Shard(0), Replicate()), (Shard(0), Shard(0))],
)
@pytest.mark.parametrize(("experts", "nonfinite"), [(5, "skip"), (4, "raise")])  # four: some ranks have one each
def test_experts_with_zero_gradients_end_as_on_one_process(placements: Any, experts: int, nonfinite: str) -> None:
    """Ranks that hold parts of one matrix decide together: zeros in one part do not make the gradient zero."""
    expected = partly_zero_experts(0, placements, experts, nonfinite)
    for found in run_ranks(4, partly_zero_experts, placements, experts, nonfinite):
        assert float((found - expected).abs().max()) < CLOSE_64


def without_tokens(rank: int, placements: Any, bad_step: int, nonfinite: str) -> torch.Tensor:
    """Train experts; those of the last expert-parallel rank have the gradient None in one step."""
    mesh = init_device_mesh("cpu", (2, 2)) if dist.is_initialized() else None
    shape = torch.Size((4, 6, 5))
    start = gradient(0, shape, 0, torch.float64)
    stacks = [nn.Parameter(start.clone() if mesh is None else placed(start, mesh, placements)) for _ in range(3)]
    groups = [{"params": stacks[:2]}, {"params": stacks[2:], "rule": "adam"}]
    options = {"weight_decay": 0.1, "ns_dtype": torch.float64, "nonfinite": nonfinite, "missing": "zero"}
    opt = Cosmos(groups, lr=0.01, rank=2, gamma=0.25, **options)
    for step in range(3):
        for i, p in enumerate(stacks):
            G = gradient(i, shape, step, torch.float64)
            if step == bad_step and i > 0:
                G[2:] = 0
            p.grad = G if mesh is None else placed(G, mesh, placements)
        if mesh is not None and step == bad_step and mesh.get_coordinate()[0] == 1:
            stacks[1].grad = stacks[2].grad = None
        opt.step()
    return torch.stack([full(p) for p in stacks])


@pytest.mark.parametrize("placements", [(Shard(0), Replicate()), (Shard(0), Shard(1))])
@pytest.mark.parametrize(("bad_step", "nonfinite"), [(0, "skip"), (1, "skip"), (1, "raise")])
def test_with_missing_zero_experts_without_tokens_may_have_the_gradient_none(
    placements: Any, bad_step: int, nonfinite: str
) -> None:
    """On the ranks that hold them, with any rule: the other ranks have a gradient, and no rank waits."""
    expected = without_tokens(0, placements, bad_step, nonfinite)
    for found in run_ranks(4, without_tokens, placements, bad_step, nonfinite):
        assert float((found - expected).abs().max()) < CLOSE_64


def local_experts(rank: int, idle: str, nonfinite: str, expert: int | None = None) -> list[Any]:
    """Train a sharded matrix beside an expert that only this rank has; the last expert has no tokens for two steps.

    expert: train this one without a mesh.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if expert is None else None
    number = rank if expert is None else expert
    start = gradient(0, SHAPE, 0, torch.float64)
    dense = nn.Parameter(start if mesh is None else placed(start, mesh, (Shard(0),)))
    local = nn.Parameter(gradient(number, SHAPE, 1, torch.float64))
    groups = [{"params": [("dense", dense)]}, {"params": [(f"experts.{number}", local)]}]
    opt = Cosmos(groups, lr=0.01, rank=2, gamma=0.25, ns_dtype=torch.float64, nonfinite=nonfinite)
    for step in range(4):
        G = gradient(0, SHAPE, step, torch.float64)
        dense.grad = G if mesh is None else placed(G, mesh, (Shard(0),))
        local.grad = gradient(1 + number, SHAPE, step, torch.float64)
        if number == 1 and step < 2:
            local.grad = None if idle == "none" else torch.zeros_like(local)
        opt.step()
    return [full(dense), local.detach(), opt.state[local]["step"]]


@pytest.mark.parametrize(("idle", "nonfinite"), [("none", "skip"), ("zero", "skip"), ("zero", "raise")])
def test_experts_of_single_ranks_that_start_late_train_as_without_a_mesh(idle: str, nonfinite: str) -> None:
    """Each starts with its own first gradient, and no rank waits for a gradient that it does not share."""
    for rank, found in enumerate(run_ranks(2, local_experts, idle, nonfinite)):
        for x, expected in zip(found, local_experts(0, idle, nonfinite, expert=rank), strict=True):
            assert float((x - expected).abs().max()) < CLOSE_64


def experts_on_half_of_the_ranks(rank: int, idle: str, half: int | None = None) -> list[Any]:
    """Train a matrix on four ranks, and two experts on each half of them. Some experts have no tokens in some steps.

    half: train those of this half without a mesh.
    """
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])] if half is None else []
    number = rank // 2 if half is None else half
    shape = torch.Size((2, *SHAPE))

    def divided(whole: torch.Tensor, mesh: Any, dim: int) -> torch.Tensor:
        return whole if half is not None else placed(whole, mesh, (Shard(dim),))

    everywhere, here = (init_device_mesh("cpu", (4,)), meshes[number]) if half is None else (None, None)
    dense = nn.Parameter(divided(gradient(0, SHAPE, 0, torch.float64), everywhere, 0))
    experts = nn.Parameter(divided(gradient(1 + number, shape, 0, torch.float64), here, 1))
    opt = Cosmos([("dense", dense), ("experts", experts)], lr=0.01, rank=2, gamma=0.25, ns_dtype=torch.float64)
    for step in range(5):
        dense.grad = divided(gradient(0, SHAPE, step, torch.float64), everywhere, 0)
        G = gradient(1 + number, shape, step, torch.float64)
        if number == 1 and step < 2:
            G.zero_()
        elif step == 3:
            G[number] = 0  # an expert that had tokens before
        experts.grad = divided(G, here, 1)
        if idle == "none" and number == 1 and step < 2:
            experts.grad = None
        opt.step()
    return [full(dense), full(experts), opt.state[experts]["step"]]


@pytest.mark.parametrize("idle", ["none", "zero"])
def test_experts_on_a_part_of_the_ranks_do_not_follow_those_on_another_part(idle: str) -> None:
    """Both have the same name and place in the optimizer, but only their own gradients start and move them."""
    for rank, found in enumerate(run_ranks(4, experts_on_half_of_the_ranks, idle)):
        for x, expected in zip(found, experts_on_half_of_the_ranks(0, idle, half=rank // 2), strict=True):
            assert float((x - expected).abs().max()) < CLOSE_64


def nan_in_a_local_expert(rank: int) -> tuple[float, float]:
    """Take a step in which only the expert of rank 1 has a NaN, then one without."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dense, local = matrix(mesh), nn.Parameter(gradient(rank, SHAPE, 0, torch.float64))
    opt = Cosmos([("dense", dense), (f"experts.{rank}", local)], rank=2)
    counts = []
    for step in range(2):
        dense.grad = placed(gradient(0, SHAPE, step, torch.float64), mesh, (Shard(0),))
        local.grad = gradient(rank, SHAPE, step, torch.float64)
        if rank == 1 and step == 0:
            local.grad[0, 0] = float("nan")
        opt.step()
        counts.append(float(opt.state[dense]["step"]))
    return counts[0], counts[1]


def test_a_nan_in_an_expert_of_one_rank_skips_the_step_of_all() -> None:
    assert run_ranks(2, nan_in_a_local_expert) == [(0.0, 1.0)] * 2


def limits_that_differ(rank: int) -> list[float]:
    """Take a step with a gradient of 1e18, which is too large for a matrix of the size of rank 0's expert alone."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dense = nn.Parameter(placed(torch.ones(SHAPE), mesh, (Shard(0),)))
    local = nn.Parameter(torch.ones(200, 200))
    opt = Cosmos([("dense", dense), (f"experts.{rank}", local)], rank=2)
    counts = []
    for size in (1e18, 1.0):
        dense.grad = placed(torch.full(SHAPE, size), mesh, (Shard(0),))
        local.grad = torch.ones(200, 200) if rank == 0 else None
        opt.step()
        counts.append(float(opt.state[dense]["step"]))
    return counts


def test_ranks_skip_together_if_the_largest_allowed_gradient_differs() -> None:
    assert run_ranks(2, limits_that_differ) == [[0.0, 1.0]] * 2


def expert_in_another_dtype(rank: int, is_late: bool) -> float:
    """Take two steps with an expert in float64 on rank 1 alone, from the start or from the second step."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dense = nn.Parameter(placed(torch.ones(SHAPE), mesh, (Shard(0),)))
    local = nn.Parameter(torch.ones(SHAPE, dtype=torch.float64 if rank == 1 or is_late else torch.float32))
    opt = Cosmos([("dense", dense), (f"experts.{rank}", local)], rank=2)
    for step in range(2):
        dense.grad = placed(gradient(0, SHAPE, step, torch.float32), mesh, (Shard(0),))
        has_tokens = rank == 1 or not is_late or step == 1
        local.grad = gradient(rank, SHAPE, step, local.dtype) if has_tokens else None
        opt.step()
    return float(opt.state[dense]["step"])


@pytest.mark.parametrize("is_late", [False, True])
def test_ranks_send_the_same_dtype_if_an_expert_of_one_rank_has_another(is_late: bool) -> None:
    """The message about shared parameters would otherwise have eight bytes a number on one rank and four on another."""
    assert run_ranks(2, expert_in_another_dtype, is_late) == [2.0] * 2


def one_overflow(rank: int, shape: torch.Size) -> list[float]:
    """Take three steps; in the second, the gradient is inf on the first rank alone."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    p = nn.Parameter(placed(gradient(0, shape, 0, torch.float64), mesh, (Shard(0),)))
    opt = Cosmos([p], lr=0.01, rank=2, gamma=0.25)
    counts = []
    for step in range(3):
        p.grad = placed(gradient(0, shape, step, torch.float64), mesh, (Shard(0),))
        if rank == 0 and step == 1:
            p.grad.to_local().flatten()[0] = float("inf")
        opt.step()
        counts.append(float(opt.state[p]["step"]))
    return counts


@pytest.mark.parametrize("shape", [(6, 5), (2, 6, 5)])  # the last of three ranks holds none of two experts
def test_an_overflow_on_one_rank_skips_the_step_of_all(shape: tuple[int, ...]) -> None:
    assert run_ranks(3, one_overflow, torch.Size(shape)) == [[1.0, 1.0, 2.0]] * 3


def unused_experts(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Take two steps with a gradient and two without."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shape = torch.Size((4, 6, 5))
    p, q = (nn.Parameter(placed(gradient(0, shape, 0, torch.float64), mesh, (Shard(0),))) for _ in range(2))
    opt = Cosmos([p, q], lr=0.01, rank=2, gamma=0.25, weight_decay=0.1)
    for step in range(4):
        for x in (p, q):
            x.grad = placed(gradient(0, shape, step, torch.float64), mesh, (Shard(0),))
        if step == 2:
            before = p.full_tensor().detach().clone()
        if step >= 2:
            p.grad = None
        opt.step()
    return before, p.full_tensor().detach()


def test_a_gradient_that_is_none_on_all_ranks_leaves_the_parameter_unchanged() -> None:
    for before, after in run_ranks(2, unused_experts):
        assert torch.equal(before, after)


def fifty_steps(rank: int) -> dict[str, bytes]:
    """Return the bytes of all weights and state on this rank after fifty steps."""
    case = Case(FewShapes, dtype=torch.float32)
    model, opt = case.build(hsdp)
    take_steps(model, opt, case.dtype, range(50))
    held = {}
    for name, p in model.named_parameters():
        for key, value in {"weight": p, **opt.state[p]}.items():
            local = value.to_local() if isinstance(value, DTensor) else value
            held[f"{name} {key}"] = local.detach().contiguous().numpy().tobytes()
    assert full_weights(model)["odd.weight"].isfinite().all()
    return held


def test_replicas_stay_equal_bit_for_bit() -> None:
    """HSDP on 2 x 2 ranks: replicas hold the same parts, and state that every rank holds whole is equal on all."""
    a, b, c, d = run_ranks(4, fifty_steps)
    assert a == c
    assert b == d
    whole = [key for key in a if key.endswith(" step") or (key.startswith("blocks") and key[-2:] in (" U", " S"))]
    assert len(whole) > 7
    for key in whole:
        assert a[key] == b[key], key


def partial_gradient(rank: int) -> tuple[float, float]:
    """Step with a gradient that is a partial sum, as sequence parallelism leaves it for replicated parameters."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = gradient(0, SHAPE, 0, torch.float64)
    p, q = (nn.Parameter(placed(whole, mesh, (Replicate(),))) for _ in range(2))
    opt = Cosmos([p, q], lr=0.01, rank=2, gamma=0.25)
    p.grad = placed(whole, mesh, (Replicate(),))
    share = whole * (0.25 if rank == 0 else 0.75)
    q.grad = DTensor.from_local(share, mesh, (Partial(),), run_check=False)
    opt.step()
    return float((p.to_local() - q.to_local()).abs().max()), float((p.to_local() - whole).abs().max())


def test_a_partial_gradient_steps_as_its_sum_does() -> None:
    for between, moved in run_ranks(2, partial_gradient):
        assert between < 1e-12
        assert moved > 1e-3
