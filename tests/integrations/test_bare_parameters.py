"""Frameworks that pass bare `model.parameters()` (litgpt, torchtune, LightningCLI, timm), with `mark`."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cosmos_optim import Cosmos, mark
from tests.integrations.helpers import CUT, STEPS, VOCABULARY, batch, changed, tiny_llama, tokens, train, weights
from tests.integrations.torchvision_stub import import_timm


def next_token_loss(model: Any, step: int) -> torch.Tensor:
    x = batch(step)
    logits = model(x)
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def rules_of(opt: Any) -> dict[str, str]:
    return {name: group["rule"] for group in opt.param_groups for name in group["param_names"]}


def assert_continues_exactly(model_of: Callable[[int], Any], optimizer_of: Callable[[Any], Any]) -> Any:
    """Compare an unbroken run with one that is saved, loaded into new objects and continued; return the optimizer."""
    model = model_of(0)
    opt = optimizer_of(model)
    train(model, opt, range(CUT), next_token_loss)
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    after = train(model, opt, range(CUT, STEPS), next_token_loss)
    other = model_of(1)
    again = optimizer_of(other)
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert train(other, again, range(CUT, STEPS), next_token_loss) == after
    return opt


def test_litgpt_trains_a_marked_model_exactly() -> None:
    pytest.importorskip("litgpt")
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import instantiate_torch_optimizer

    def model_of(seed: int) -> Any:
        torch.manual_seed(seed)
        shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "padded_vocab_size": VOCABULARY}
        model = GPT(Config(**shape))
        mark(model)
        return model

    def optimizer_of(model: Any) -> Any:
        asked = {"class_path": "cosmos_optim.Cosmos", "init_args": {"lr": 2e-3, "adam_lr": 8e-3, "rank": 8}}
        return instantiate_torch_optimizer(asked, model.parameters(), fused=False)  # as litgpt.pretrain does

    opt = assert_continues_exactly(model_of, optimizer_of)
    rules = rules_of(opt)
    assert rules["transformer.wte.weight"] == rules["lm_head.weight"] == "adam"
    assert rules["transformer.h.0.mlp.fc.weight"] == "cosmos"
    assert opt.param_groups[0]["rule"] == "cosmos", "the first group must be one of hidden matrices"


def test_adapters_of_litgpt_train_alone() -> None:
    """Its LoRA layers hold the linear layer, and q and v of a fused one have one A and one B."""
    pytest.importorskip("litgpt")
    from litgpt.lora import GPT, Config, mark_only_lora_as_trainable

    sizes = {"n_layer": 2, "n_head": 4, "n_query_groups": 2, "n_embd": 32, "block_size": 32}
    places = {f"lora_{name}": True for name in ("query", "value", "projection", "mlp", "head")}
    model = GPT(Config(**sizes, padded_vocab_size=VOCABULARY, lora_r=4, lora_alpha=8, **places))
    mark(model)
    mark_only_lora_as_trainable(model)
    opt = Cosmos(model.parameters(), lr=1e-2)
    expected = {name for name, p in model.named_parameters() if p.requires_grad}
    assert rules_of(opt) == dict.fromkeys(expected, "cosmos")
    assert {"lm_head.lora_A", "transformer.h.0.attn.qkv.lora_B", "transformer.h.1.mlp.proj.lora_A"} < expected
    before = weights(model)
    losses = train(model, opt, range(3), next_token_loss)
    assert changed(model, before) == expected and losses[-1] < losses[0]


def test_torchtune_trains_a_marked_model_exactly() -> None:
    pytest.importorskip("torchtune")
    from omegaconf import OmegaConf
    from torchtune import config
    from torchtune.models.llama3 import llama3

    def model_of(seed: int) -> Any:
        torch.manual_seed(seed)
        model = llama3(
            vocab_size=VOCABULARY, num_layers=2, num_heads=2, num_kv_heads=1, embed_dim=32, max_seq_len=32,
            intermediate_dim=48,
        )  # fmt: skip
        mark(model)
        return model

    asked = OmegaConf.create({"_component_": "cosmos_optim.Cosmos", "lr": 2e-3, "adam_lr": 8e-3, "rank": 8})
    opt = assert_continues_exactly(model_of, lambda model: config.instantiate(asked, model.parameters()))
    rules = rules_of(opt)
    assert rules["tok_embeddings.weight"] == rules["output.weight"] == "adam"
    assert rules["layers.0.attn.q_proj.weight"] == "cosmos"


def test_lightning_cli_trains_a_module_that_marks_itself(tmp_path: Any) -> None:
    lightning = pytest.importorskip("lightning")
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.llama = tiny_llama()
            mark(self)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.llama(input_ids=batch, labels=batch).loss

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(tokens(), batch_size=4)  # type: ignore[arg-type]

    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "max_steps": 2,
             "default_root_dir": str(tmp_path), "enable_model_summary": False}  # fmt: skip
    arguments = ["fit", "--optimizer=cosmos_optim.Cosmos", "--optimizer.lr=2e-3", "--optimizer.adam_lr=8e-3"]
    cli = LightningCLI(Module, args=arguments, trainer_defaults=quiet, save_config_callback=None)
    opt = cli.trainer.optimizers[0]
    rules = rules_of(opt)
    assert rules["llama.model.embed_tokens.weight"] == rules["llama.lm_head.weight"] == "adam"
    assert opt.param_groups[0]["rule"] == "cosmos" and opt.param_groups[0]["lr"] == 2e-3
    assert opt.param_groups[-1]["lr"] == 8e-3


def test_layer_decay_of_timm_works_with_a_marked_model() -> None:
    if importlib.util.find_spec("timm") is None:
        pytest.skip("could not import 'timm'")
    timm = import_timm()
    from timm.optim import create_optimizer_v2

    from cosmos_optim.integrations.timm import register

    register()
    model = timm.create_model("vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2)
    mark(model)
    opt = create_optimizer_v2(model, "cosmos", lr=1e-3, weight_decay=0.05, layer_decay=0.7)
    groups = {name: group for group in opt.param_groups for name in group["param_names"]}
    first, last = groups["blocks.0.mlp.fc1.weight"], groups["blocks.1.mlp.fc1.weight"]
    assert first["rule"] == last["rule"] == "cosmos" and first["lr_scale"] < last["lr_scale"]
    assert groups["head.weight"]["rule"] == "adam" and groups["head.weight"]["lr"] == 4e-3
    assert groups["norm.bias"]["weight_decay"] == 0.0


def test_unmarked_parameters_are_refused_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"mark\(model\)|param_groups\(model\)"):
        Cosmos(tiny_llama().parameters())
