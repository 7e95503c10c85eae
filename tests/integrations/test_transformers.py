"""transformers' Trainer with CosmosFactory: rates from the arguments, exact continuation, adapters of peft."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from cosmos_optim import Cosmos, mark
from cosmos_optim.integrations import build
from cosmos_optim.integrations.transformers import CosmosFactory
from tests.integrations.helpers import CUT, STEPS, changed, examples, tiny_llama, weights

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
from transformers import Trainer, TrainingArguments


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    given: dict[str, Any] = {"max_steps": STEPS, "save_steps": CUT, "logging_steps": 1, "learning_rate": 2e-3,
                             "per_device_train_batch_size": 4, "warmup_steps": 1}  # fmt: skip
    return TrainingArguments(str(folder), report_to=[], use_cpu=True, disable_tqdm=True, **(given | changes))


def trainer(model: Any, args: TrainingArguments, **options: Any) -> Trainer:
    made = (CosmosFactory, {"args": args, "rank": 8, **options})
    return Trainer(model, args, train_dataset=examples(), optimizer_cls_and_kwargs=made)


def logged(run: Trainer, key: str) -> list[float]:
    return [entry[key] for entry in run.state.log_history if key in entry]


def test_a_resumed_trainer_repeats_the_losses_of_the_unbroken_run(tmp_path: Path) -> None:
    whole = trainer(tiny_llama(), arguments(tmp_path))
    whole.train()
    again = trainer(tiny_llama(seed=1), arguments(tmp_path))
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{CUT}"))
    assert logged(again, "loss")[CUT:] == logged(whole, "loss")[CUT:]
    assert logged(whole, "loss")[-1] < logged(whole, "loss")[0]
    assert not changed(again.model, weights(whole.model))


def test_the_rate_and_weight_decay_of_the_arguments_reach_the_optimizer(tmp_path: Path) -> None:
    run = trainer(tiny_llama(), arguments(tmp_path, weight_decay=0.1, warmup_steps=0, save_strategy="no"))
    run.train()
    rates = {group["rule"]: (group["initial_lr"], group["weight_decay"]) for group in run.optimizer.param_groups}
    assert rates["cosmos"] == (2e-3, 0.1)
    assert rates["adam"][0] == 8e-3
    assert logged(run, "learning_rate")[0] == 2e-3, "the log must show the rate of the hidden matrices"


def test_given_rates_win_over_the_arguments() -> None:
    class Arguments:
        learning_rate, weight_decay = 1e-4, 0.1

    model = tiny_llama()
    opt = CosmosFactory()(model, Arguments(), lr=3e-3, adam_lr=5e-3, weight_decay=0.0)  # as axolotl calls it
    assert [(g["lr"], g["weight_decay"]) for g in opt.param_groups][0] == (3e-3, 0.0)
    assert opt.param_groups[-1]["lr"] == 5e-3
    muon = CosmosFactory()(model, Arguments(), optimizer="muon", overrides={"*.q_proj.weight": "adam"})
    assert muon.param_groups[0]["rule"] == "muon" and muon.param_groups[-1]["lr"] == 2e-4
    adam = {name for group in muon.param_groups if group["rule"] == "adam" for name in group["param_names"]}
    assert "model.layers.0.self_attn.q_proj.weight" in adam


def test_a_factory_takes_the_arguments_of_param_groups() -> None:
    opt = CosmosFactory()(tiny_llama(), lr=1e-3, weight_decay=0.1, decay="all", split_heads=True, head=None)
    assert {group["weight_decay"] for group in opt.param_groups} == {0.1}
    assert any(group.get("split_sizes") for group in opt.param_groups)
    with pytest.raises(TypeError, match="decay and split_heads need the model: pass it instead of its parameters"):
        build(tiny_llama().parameters(), decay="all", split_heads=True)


def test_a_factory_without_a_rate_says_what_to_write() -> None:
    with pytest.raises(ValueError, match=r'\{"args": training_args\}'):
        CosmosFactory()(tiny_llama())
    with pytest.raises(ValueError, match="there is no optimizer 'adamw'"):
        CosmosFactory()(tiny_llama(), lr=1e-3, optimizer="adamw")


def test_a_factory_that_was_called_says_to_give_the_class(tmp_path: Path) -> None:
    run = Trainer(tiny_llama(), arguments(tmp_path), train_dataset=examples(),
                  optimizer_cls_and_kwargs=(CosmosFactory(), {"lr": 1e-3}))  # fmt: skip
    with pytest.raises(TypeError, match=r"give transformers the class: \(CosmosFactory, "):
        run.train()


def test_the_class_itself_asks_for_marks_and_works_with_them(tmp_path: Path) -> None:
    """Trainer passes bare parameters."""
    args = arguments(tmp_path, save_strategy="no", weight_decay=0.1)
    given = {"args": args, "train_dataset": examples(), "optimizer_cls_and_kwargs": (Cosmos, {"lr": 2e-3, "rank": 8})}
    with pytest.raises(ValueError, match=r"if other code passes the parameters, call mark\(model\) first"):
        Trainer(tiny_llama(), **given).train()
    run = Trainer(mark(tiny_llama()), **given)
    run.train()
    factory = trainer(tiny_llama(), arguments(tmp_path, save_strategy="no"))
    factory.train()
    rules = [{name: group["rule"] for group in x.optimizer.param_groups for name in group["param_names"]}
             for x in (run, factory)]  # fmt: skip
    assert rules[0] == rules[1]


def test_an_optimizer_built_before_works_too(tmp_path: Path) -> None:
    model = tiny_llama()
    opt = Cosmos(model, lr=2e-3, adam_lr=8e-3, rank=8)
    early = Trainer(model, arguments(tmp_path), train_dataset=examples(), optimizers=(opt, None))
    early.train()
    late = trainer(tiny_llama(), arguments(tmp_path))
    late.train()
    assert logged(early, "loss") == logged(late, "loss")


@pytest.mark.parametrize("kind", ["LoraConfig", "IA3Config"])
def test_adapters_of_peft_train_alone_and_continue_exactly(kind: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted(seed: int) -> Any:
        return peft.get_peft_model(tiny_llama(), getattr(peft, kind)(task_type="CAUSAL_LM"))

    model = adapted(0)
    before = weights(model)
    whole = trainer(model, arguments(tmp_path))
    whole.train()
    moved = changed(model, before)
    assert moved and all("lora" in name or "ia3" in name for name in moved)
    again = trainer(adapted(1), arguments(tmp_path))
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{CUT}"))
    assert logged(again, "loss")[CUT:] == logged(whole, "loss")[CUT:]


def test_changed_settings_of_adam_are_reported_unless_the_optimizer_has_its_own() -> None:
    class Arguments:
        learning_rate, weight_decay, adam_beta2 = 1e-3, 0.0, 0.95

    with pytest.warns(UserWarning, match=r"does not read adam_beta2=0\.95 of TrainingArguments: give betas or eps"):
        CosmosFactory()(tiny_llama(), Arguments())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CosmosFactory()(tiny_llama(), Arguments(), betas=(0.9, 0.95))


def test_bfloat16_weights_are_reported_unless_their_rounding_is_chosen() -> None:
    model = tiny_llama().to(torch.bfloat16)
    with pytest.warns(UserWarning, match=r"trained tensors are bfloat16, and lose updates"):
        CosmosFactory()(model, lr=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for options in ({"stochastic_rounding": True}, {"stochastic_rounding": False}, {"weight_correction": True}):
            CosmosFactory()(model, lr=1e-5, **options)
        CosmosFactory()(tiny_llama(), lr=1e-5)


def test_options_in_optim_args_are_reported() -> None:
    class Arguments:
        learning_rate, weight_decay, optim_args = 1e-3, 0.0, "rank=64"

    with pytest.warns(UserWarning, match=r"does not read optim_args='rank=64' of TrainingArguments.* beside \"args\""):
        CosmosFactory()(tiny_llama(), Arguments())
