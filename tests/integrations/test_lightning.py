"""Lightning's Trainer and Fabric: exact continuation, the logged rate, callbacks that set rates or unfreeze layers."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import DataLoader

from cosmos_optim import Cosmos, param_groups
from cosmos_optim.integrations.lightning import configure
from tests.integrations.helpers import CUT, STEPS, changed, llama_loss, tiny_llama, tokens, weights

lightning = pytest.importorskip("lightning")
QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Module(lightning.LightningModule):
    """A tiny LLaMA that keeps its losses."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.llama = tiny_llama(seed)
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.llama(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return configure(self, lr=2e-3, rank=8, schedule=lambda opt: LinearLR(opt, total_iters=STEPS))


def batches() -> DataLoader[Any]:
    """Return one epoch. A run of two is cut between them, because this loader cannot continue inside an epoch."""
    return DataLoader(tokens(4 * CUT), batch_size=4, shuffle=False)  # type: ignore[arg-type]


def test_a_resumed_trainer_repeats_the_losses_and_logs_the_rate_of_the_hidden_matrices(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    keep = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
    log = CSVLogger(tmp_path)
    whole = Module()
    trainer = lightning.Trainer(
        max_epochs=STEPS // CUT,
        callbacks=[keep, LearningRateMonitor("step")],
        log_every_n_steps=1,
        **(QUIET | {"logger": log}),
    )
    trainer.fit(whole, batches())
    again = Module(seed=1)
    resumed = lightning.Trainer(max_epochs=STEPS // CUT, **QUIET, enable_checkpointing=False)
    resumed.fit(again, batches(), ckpt_path=str(tmp_path / f"step={CUT}.ckpt"), weights_only=True)
    assert again.losses == whole.losses[CUT:]
    assert whole.losses[-1] < whole.losses[0]
    rows = list(csv.DictReader((Path(log.log_dir) / "metrics.csv").open()))
    column = next(name for name in rows[0] if name.startswith("lr-") and name.endswith("/pg1"))
    shares = LinearLR(torch.optim.SGD([torch.zeros(1)], lr=2e-3), total_iters=STEPS)
    assert float(rows[0][column]) == shares.get_last_lr()[0], "the first rate must be that of the hidden matrices"
    assert trainer.lr_scheduler_configs[0].interval == "step"


def test_fabric_saves_and_continues_exactly(tmp_path: Path) -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1)

    def prepared(seed: int) -> Any:
        model = tiny_llama(seed)
        return fabric.setup(model, Cosmos(model, lr=2e-3, rank=8))

    def run(model: Any, opt: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = llama_loss(model, step)
            fabric.backward(loss)
            fabric.clip_gradients(model, opt, max_norm=1.0)
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        return losses

    model, opt = prepared(0)
    run(model, opt, range(CUT))
    fabric.save(tmp_path / "state.ckpt", {"model": model, "optimizer": opt})
    after = run(model, opt, range(CUT, STEPS))
    model, opt = prepared(1)
    fabric.load(tmp_path / "state.ckpt", {"model": model, "optimizer": opt})
    assert run(model, opt, range(CUT, STEPS)) == after


def fit(module: Module, *callbacks: Any, epochs: int = 3) -> Any:
    trainer = lightning.Trainer(max_epochs=epochs, callbacks=[*callbacks], **QUIET, enable_checkpointing=False)
    trainer.fit(module, batches())
    return trainer.optimizers[0]


def test_weight_averaging_takes_a_rate_for_each_group() -> None:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    options = {"swa_epoch_start": 1, "annealing_epochs": 1}
    opt = fit(Module(), StochasticWeightAveraging(swa_lrs=[1e-3, 4e-3], **options))
    assert [group["lr"] for group in opt.param_groups] == [1e-3, 4e-3]
    with pytest.raises(ValueError, match=r"SWALR\(swa_lr=\[0.001, 0.004\]\)"):
        fit(Module(), StochasticWeightAveraging(swa_lrs=1e-3, **options))


def test_the_search_for_a_rate_works_with_one_rate_and_is_refused_with_two(tmp_path: Path) -> None:
    from lightning.pytorch.tuner import Tuner

    class Searched(Module):
        lr, ratio = 1e-3, 1

        def configure_optimizers(self) -> Any:
            return configure(self, lr=self.lr, adam_lr=self.ratio * self.lr, gamma=0.25, rank=8)

    def search(module: Searched) -> None:
        trainer = lightning.Trainer(max_epochs=9, default_root_dir=tmp_path, **QUIET)
        Tuner(trainer).lr_find(module, batches(), num_training=20, min_lr=1e-5, max_lr=1e-1)

    found = Searched()
    search(found)
    assert 1e-5 < found.lr < 1e-1 and found.lr != Searched.lr
    found.ratio = 4
    with pytest.raises(ValueError, match=r"a search for a rate set .* in all groups.*adam_lr=.* if one rate is meant"):
        search(found)


def test_layers_that_a_callback_unfreezes_get_their_rules() -> None:
    from lightning.pytorch.callbacks import BaseFinetuning

    class Unfreeze(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.llama.model)

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.make_trainable(pl_module.llama.model)
                for group in param_groups(pl_module, beside=optimizer):
                    optimizer.add_param_group(group)

    module = Module()
    before = weights(module)
    opt = fit(module, Unfreeze())
    assert [(group["rule"], len(group["params"])) for group in opt.param_groups] == [
        ("adam", 1), ("cosmos", 14), ("adam", 6)
    ]  # fmt: skip
    assert changed(module, before) == {name for name, _ in module.named_parameters()}
