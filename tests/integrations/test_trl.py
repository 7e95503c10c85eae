"""TRL's trainers, whose `peft_config` adds the adapters after the trainer got the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cosmos_optim.integrations.transformers import CosmosFactory
from tests.integrations.helpers import CUT, STEPS, VOCABULARY, tiny_llama, tokens, weights

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
from datasets import Dataset

COMMON = {"max_steps": STEPS, "save_steps": CUT, "logging_steps": 1, "learning_rate": 2e-3, "report_to": [],
          "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 4, "bf16": False}  # fmt: skip


def tokenizer() -> Any:
    """Return a tokenizer of numbers."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, **{str(i): i for i in range(1, VOCABULARY)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="1", unk_token="<pad>")


def sft(folder: Path, adapters: bool) -> Any:
    args = trl.SFTConfig(str(folder), **COMMON)
    rows = Dataset.from_dict({"text": texts()})
    return trl.SFTTrainer(
        tiny_llama(), args, train_dataset=rows, processing_class=tokenizer(),
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM") if adapters else None,
        optimizer_cls_and_kwargs=(CosmosFactory, {"args": args, "rank": 8}),
    )  # fmt: skip


def reward(folder: Path) -> Any:
    from transformers import LlamaForSequenceClassification

    args = trl.RewardConfig(str(folder), **COMMON)
    rows = Dataset.from_dict({"chosen": texts(), "rejected": [text[::-1] for text in texts()]})
    model = LlamaForSequenceClassification._from_config(tiny_llama(num_labels=1).config)
    return trl.RewardTrainer(
        model, args, train_dataset=rows, processing_class=tokenizer(),
        peft_config=peft.LoraConfig(task_type="SEQ_CLS"),
        optimizer_cls_and_kwargs=(CosmosFactory, {"args": args, "rank": 8}),
    )  # fmt: skip


def texts() -> list[str]:
    return [" ".join(map(str, row)) for row in tokens().tolist()]


def dpo(folder: Path) -> Any:
    """Return a trainer that does not take optimizer_cls_and_kwargs."""
    args = trl.DPOConfig(str(folder), **COMMON)
    halves = {"prompt": [x[:12] for x in texts()], "chosen": [x[12:] for x in texts()],
              "rejected": [x[:11:-1] for x in texts()]}  # fmt: skip
    run = trl.DPOTrainer(
        tiny_llama(), args=args, train_dataset=Dataset.from_dict(halves), processing_class=tokenizer(),
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM"),
    )  # fmt: skip
    run.optimizer_cls_and_kwargs = (CosmosFactory, {"args": args, "rank": 8})
    return run


def losses(run: Any) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.parametrize("kind", ["sft", "sft with adapters", "reward with adapters", "dpo with adapters"])
def test_trl_trainers_learn_and_continue_exactly(kind: str, tmp_path: Path) -> None:
    def make() -> Any:
        import torch

        torch.manual_seed(0)
        if "sft" in kind:
            return sft(tmp_path, "adapters" in kind)
        return reward(tmp_path) if "reward" in kind else dpo(tmp_path)

    whole = make()
    before = weights(whole.model)
    whole.train()
    trained = {name for (name, p), old in zip(whole.model.named_parameters(), before) if not p.equal(old)}
    assert trained
    if "adapters" in kind:
        assert all("lora" in name or "modules_to_save" in name for name in trained)
    again = make()
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{CUT}"))
    assert losses(again)[CUT:] == losses(whole)[CUT:]
    assert again.optimizer.param_groups[0]["rule"] == "cosmos"


def test_grpo_trains_with_the_factory(tmp_path: Path) -> None:
    args = trl.GRPOConfig(
        str(tmp_path), **(COMMON | {"max_steps": 2, "save_strategy": "no"}), num_generations=2, max_completion_length=4
    )
    rows = Dataset.from_dict({"prompt": [text[:12] for text in texts()]})
    run = trl.GRPOTrainer(
        tiny_llama(), reward_funcs=lambda completions, **_: [float(len(x)) for x in completions], args=args,
        train_dataset=rows, processing_class=tokenizer(),
    )  # fmt: skip
    run.optimizer_cls_and_kwargs = (CosmosFactory, {"args": args, "rank": 8})
    before = weights(run.model)
    run.train()
    assert run.optimizer.param_groups[0]["rule"] == "cosmos"
    assert any(not p.equal(old) for p, old in zip(run.model.parameters(), before, strict=True))
