"""The entry for the optimizer track of modded-NanoGPT: its optimizer is ours, and it trains on one and two ranks."""

import ast
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from cosmos_optim import Cosmos
from examples.modded_nanogpt_track import train_cosmos
from examples.modded_nanogpt_track.train_cosmos import GPT, Settings
from tests.sharding.ranks import run_ranks

TOY = Settings(
    vocabulary=61, depth=1, width=32, head_dim=16, length=16, batch=16, val_batch=16, micro_batch=4, steps=30,
    val_every=10, val_every_at_the_end=4, dtype=torch.float32,
)  # fmt: skip
# Both compute the same formulas in another order; each step feeds its rounding to the next one by a power step.
ROUNDING = {torch.float64: 1e-11, torch.float32: 1e-3}
CLOSE_32 = 1e-3  # of a loss: the same batch, summed in another order
# Loss of the model in the track's train_gpt_simple.py (August 2026), two layers of width 256 in float32, with the
# weights and tokens of the test below.
TRACK_LOSS = 132.59366
CPU = torch.device("cpu")


def write_shard(path: Path, tokens: Tensor, magic: int = 20240520) -> None:
    """Write tokens as the track's data is stored: 256 int32 (magic, version, count, zeros), then uint16."""
    header = torch.zeros(256, dtype=torch.int32)
    header[:3] = torch.tensor([magic, 1, len(tokens)])
    path.write_bytes(header.numpy().tobytes() + tokens.to(torch.uint16).numpy().tobytes())


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a folder with two training shards and one for validation; each token nearly fixes the next one."""
    for i, name in enumerate(("train_000001", "train_000002", "val_000000")):
        jumps = torch.randint(3, (6000,), generator=torch.Generator().manual_seed(i))
        write_shard(tmp_path / f"fineweb_{name}.bin", (7 + jumps).cumsum(0) % TOY.vocabulary)
    return tmp_path


def matrices(dtype: torch.dtype) -> list[nn.Parameter]:
    """Return a square, a tall and a wide matrix, and one with fewer columns than the rank."""
    return [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((48, 48), (96, 40), (40, 96), (64, 20))]


def low_rank_noise(p: Tensor) -> Tensor:
    """Return a gradient with a steep spectrum, as real ones have."""
    scale = torch.logspace(0, -2, p.shape[1], dtype=p.dtype)
    return torch.randn_like(p) * scale + 0.1 * torch.randn_like(p)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("gradient", [torch.randn_like, low_rank_noise])
def test_the_inlined_optimizer_steps_as_the_library_does(
    dtype: torch.dtype, gradient: Callable[[Tensor], Tensor]
) -> None:
    ours, theirs = matrices(dtype), matrices(dtype)
    start = [p.detach().clone() for p in ours]
    for a, b in zip(ours, theirs, strict=True):
        b.data.copy_(a)
    # Two groups with different rates, as in the script; gamma=None is then different in each.
    groups = [(slice(0, 2), 1e-2, 0.3), (slice(2, 4), 4e-3, 0.0)]
    inlined = train_cosmos.Cosmos([{"params": ours[i], "lr": lr, "weight_decay": wd} for i, lr, wd in groups])
    library = Cosmos([{"params": theirs[i], "lr": lr, "weight_decay": wd} for i, lr, wd in groups])
    for step in range(8):
        for a, b in zip(ours, theirs, strict=True):
            # A zero gradient at first, as the matrices before zero-initialized ones have.
            a.grad = gradient(a.detach()) if step > 1 else torch.zeros_like(a)
            b.grad = a.grad.clone()
        inlined.step()
        library.step()
        for a, b, first in zip(ours, theirs, start, strict=True):
            moved = (b - first).norm() if step > 1 else 1.0
            assert (a - b).norm() <= ROUNDING[dtype] * moved, (step, a.shape)


def test_the_inlined_direction_compiles_without_a_graph_break() -> None:
    p = matrices(torch.float32)[0]
    opt = train_cosmos.Cosmos([p])
    p.grad = torch.randn_like(p)
    opt.step()
    settings = {key: opt.param_groups[0][key] for key in ("gamma", "betas", "eps", "row_beta2", "guard", "ns_steps")}
    compiled = torch.compile(train_cosmos.direction, fullgraph=True, backend="eager")
    expected, _ = train_cosmos.direction(p.grad, **opt.state[p], **settings)
    D, _ = compiled(p.grad, **opt.state[p], **settings)
    assert (D - expected).norm() <= ROUNDING[torch.float32] * expected.norm()


def losses_on(rank: int, settings: Settings, logs: Path) -> list[tuple[int, float]]:
    """Train the toy on a rank, with a log."""
    torch.manual_seed(rank)  # the weights of rank 0 count
    return train_cosmos.train(GPT(settings), settings, train_cosmos.open_log(logs, CPU))


def test_one_and_two_ranks_learn_alike_and_log_the_code_and_every_validation(data: Path, tmp_path: Path) -> None:
    settings = replace(TOY, data=data)
    (alone,) = run_ranks(1, losses_on, settings, tmp_path / "one")
    first, second = run_ranks(2, losses_on, settings, tmp_path / "two")
    assert [step for step, _ in alone] == [0, 10, 20, 28, 30]
    assert alone[0][1] == pytest.approx(math.log(TOY.vocabulary), abs=1e-4)  # the head starts at zero
    assert alone[-1][1] < 0.6 * alone[0][1]
    assert first == second
    assert [loss for _, loss in first] == pytest.approx([loss for _, loss in alone], abs=CLOSE_32)
    (log,) = (tmp_path / "two").iterdir()
    code, _, lines = log.read_text().split("=" * 100 + "\n")
    assert code.rstrip() == Path(train_cosmos.__file__).read_text().rstrip()
    assert "===" not in code  # the track cuts a log there to get the code of a run
    assert [line.split()[0] for line in lines.splitlines()] == [f"step:{step}/30" for step, _ in first]
    assert lines.splitlines()[-1].split()[1] == f"val_loss:{first[-1][1]:.5f}"


def batches_of(rank: int, settings: Settings) -> list[Tensor]:
    """Return the inputs and targets of all training batches that a rank reads."""
    found = []
    with pytest.raises(ValueError, match="add shards"):
        for inputs, targets in train_cosmos.batches(settings, "train", settings.batch, CPU):
            assert torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])
            found.append(inputs)
    return found


def test_ranks_read_consecutive_parts_of_each_batch_and_no_batch_spans_two_shards(data: Path) -> None:
    settings = replace(TOY, data=data)
    first, second = run_ranks(2, batches_of, settings)
    size, read = TOY.batch * TOY.length, [torch.cat(parts).flatten() for parts in zip(first, second, strict=True)]
    shards = [train_cosmos.read_shard(data / f"fineweb_train_00000{i}.bin").long() for i in (1, 2)]
    whole = 6000 // size
    expected = [shard[i * size : (i + 1) * size] for shard in shards for i in range(whole)]
    assert len(read) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(read, expected, strict=True))


def test_a_file_that_is_not_a_whole_shard_is_refused(tmp_path: Path) -> None:
    good, other, cut = (tmp_path / name for name in ("good.bin", "other.bin", "cut.bin"))
    write_shard(good, torch.arange(60_000))
    assert train_cosmos.read_shard(good).long().equal(torch.arange(60_000))
    write_shard(other, torch.arange(10), magic=1)
    cut.write_bytes(good.read_bytes()[:-2])
    for path in (other, cut):
        with pytest.raises(ValueError, match="not a whole token shard"):
            train_cosmos.read_shard(path)


def test_the_model_has_the_tracks_parameters_and_each_is_optimized_once() -> None:
    with torch.device("meta"):
        model = GPT(Settings())
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    block = 12 * 768**2 + 9 * 768 + 2 * 768  # four attention and two MLP matrices, their biases, two norms
    assert counts == {
        "embedding": 50_304 * 768, "norm_in": 768, "norm_out": 768, "blocks": 12 * block, "head": 50_304 * 769,
    }  # fmt: skip
    opts = train_cosmos.optimizers(model)
    held = [p for opt in opts for group in opt.param_groups for p in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, model.parameters()))
    rates = {group["params"][0].shape[1]: (group["lr"], group["weight_decay"]) for group in opts[0].param_groups}
    for n, (lr, decay) in rates.items():
        assert lr == pytest.approx(0.025 / math.sqrt(n))
        assert lr * decay == pytest.approx(0.025 * 0.05)
    assert set(rates) == {768, 3072}


def test_the_model_computes_the_loss_of_the_tracks_model() -> None:
    model = GPT(replace(TOY, depth=2, width=256, head_dim=128, length=32))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            wave = torch.arange(i, i + p.numel(), dtype=torch.float64).square().sin()
            p.copy_(((0.1 if p.ndim == 2 else 0.5) * wave).view_as(p))
    tokens = torch.arange(33).square() % TOY.vocabulary
    assert model(tokens[None, :-1], tokens[None, 1:]).item() == pytest.approx(TRACK_LOSS, rel=1e-6)


def test_the_script_imports_only_torch_and_the_standard_library() -> None:
    """The track's rule: all code of an optimizer is in the log."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(Path(train_cosmos.__file__).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module).split(".")[0])
    assert names - sys.stdlib_module_names == {"torch"}
