"""Adapters of peft: routes, frozen bases in bfloat16, state, exact continuation, and the code of the page."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cosmos_optim import Cosmos, plan
from tests.integrations.helpers import CUT, STEPS, changed, llama_loss, tiny_llama, train, weights

peft = pytest.importorskip("peft")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fine-tuning.md"
LAYERS = ["q_proj", "v_proj", "up_proj", "down_proj"]
MATRICES, MAGNITUDES = 2 * 2 * len(LAYERS), 2 * len(LAYERS)  # two layers; A and B, or one vector, for each
PIECES = {
    "lora": ("LoraConfig", {"r": 8, "target_modules": LAYERS}),
    "dora": ("LoraConfig", {"r": 8, "target_modules": LAYERS, "use_dora": True}),
    "pissa": ("LoraConfig", {"r": 8, "target_modules": LAYERS, "init_lora_weights": "pissa"}),
    "rslora": ("LoraConfig", {"r": 8, "target_modules": LAYERS, "use_rslora": True}),
    "vera": ("VeraConfig", {"r": 8, "target_modules": ["q_proj"]}),
    "ia3": ("IA3Config", {}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
}  # fmt: skip
# (rule, last word of the name that tells its kind) -> how many parameters
ROUTES = {
    "lora": {("cosmos", "lora_A"): MATRICES // 2, ("cosmos", "lora_B"): MATRICES // 2},
    "vera": {("adam", "vera_lambda_b"): 2, ("adam", "vera_lambda_d"): 2},
    "ia3": {("adam", "ia3_l"): 6},
    "prompt": {("adam", "prompt_encoder"): 1},
}
ROUTES |= {"pissa": ROUTES["lora"], "rslora": ROUTES["lora"]}
ROUTES["dora"] = ROUTES["lora"] | {("adam", "lora_magnitude_vector"): MAGNITUDES}
STATE_BOUND = 1.1  # times the state of AdamW


def adapted(kind: str, dtype: torch.dtype = torch.float32, adapter_fp32: bool = True, **model: Any) -> Any:
    """Return a tiny LLaMA with adapters, the same at every call; the base model has this dtype."""
    name, options = PIECES[kind]
    config = getattr(peft, name)(task_type="CAUSAL_LM", **options)
    base = tiny_llama(**model).to(dtype)
    torch.manual_seed(1)
    return peft.get_peft_model(base, config, autocast_adapter_dtype=adapter_fp32)


def kind_of(name: str) -> str:
    """Return the part of a name that tells the kind of adapter."""
    return next(part for part in name.split(".") if part.startswith(("lora_", "vera_", "ia3_", "prompt_")))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", PIECES)
def test_only_adapters_are_routed_matrices_to_cosmos_and_vectors_to_adam(kind: str, tied: bool) -> None:
    model = adapted(kind, tie_word_embeddings=tied)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    opt = Cosmos(model)
    routed = {name: group["rule"] for group in opt.param_groups for name in group["param_names"]}
    assert set(routed) == trained == {row.name for row in plan(model).rows}
    assert Counter((rule, kind_of(name)) for name, rule in routed.items()) == ROUTES[kind]


@pytest.mark.parametrize("adapter_fp32", [True, False])
@pytest.mark.parametrize("kind", PIECES)
def test_adapters_on_a_bfloat16_base_learn_and_leave_the_base_alone(kind: str, adapter_fp32: bool) -> None:
    if kind == "pissa":  # its singular value decomposition needs the base in float32 at first
        model = adapted(kind, torch.float32)
        for name, p in model.named_parameters():
            p.data = p.data if "lora_" in name and adapter_fp32 else p.data.bfloat16()
    else:
        model = adapted(kind, torch.bfloat16, adapter_fp32)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} >= {torch.bfloat16}
    before = weights(model)
    opt = Cosmos(model, lr=2e-2, adam_lr=5e-2)

    def loss(model: Any, step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return llama_loss(model, step % 2)

    losses = train(model, opt, range(12), loss)
    assert losses[-1] < losses[0] and opt.skipped_steps == 0
    moved = changed(model, before)
    assert moved <= trained
    still = {name for name in trained - moved if not name.endswith("vera_lambda_b.default")}
    assert not still, "every adapter must move"


@pytest.mark.parametrize("kind", PIECES)
def test_a_resumed_run_with_adapters_repeats_the_unbroken_one(kind: str, tmp_path: Path) -> None:
    whole, rates = adapted(kind), {"lr": 3e-3, "adam_lr": 1e-2}
    opt = Cosmos(whole, **rates)
    train(whole, opt, range(CUT))
    adapters = {name: p for name, p in whole.named_parameters() if p.requires_grad}
    torch.save({"adapters": adapters, "optimizer": opt.state_dict()}, tmp_path / "saved.pt")
    expected = train(whole, opt, range(CUT, STEPS))

    again = adapted(kind)
    later = Cosmos(again, **rates)
    saved = torch.load(tmp_path / "saved.pt")
    assert not again.load_state_dict(saved["adapters"], strict=False).unexpected_keys
    later.load_state_dict(saved["optimizer"])
    assert train(again, later, range(CUT, STEPS)) == expected
    assert not changed(again, weights(whole))


@pytest.mark.parametrize("rank", [1, 2, 4, 8, 16, 64, 256])
def test_the_state_of_adapters_on_a_model_of_width_1024(rank: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 1, "num_attention_heads": 16}
    with torch.device("meta"):
        base = LlamaForCausalLM(LlamaConfig(vocab_size=1000, **shape, num_key_value_heads=4))
        config = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(base, config)
    ratios = {
        name: found.state_elements / (2 * found.parameters)
        for name, found in (("default", plan(model)), ("without row moments", plan(model, row_beta2=None)))
    }
    assert plan(model).parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert ratios["without row moments"] <= STATE_BOUND
    if rank not in (2, 4):  # the row moments of so thin a factor are 1 / (2 rank) of AdamW's state
        assert ratios["default"] <= STATE_BOUND


def test_a_trained_copy_of_the_head_gets_adam_and_adapters_of_the_head_do_not_move_it() -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    rows = {row.name: row for row in plan(peft.get_peft_model(tiny_llama(), config)).rows}
    head = rows["base_model.model.lm_head.modules_to_save.default.weight"]
    assert (head.rule, head.why) == ("adam", "output head")

    config = peft.LoraConfig(r=4, target_modules=["embed_tokens", "lm_head"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_llama(), config)
    rules = {kind_of(row.name): row.rule for row in plan(model).rows}
    assert rules == {"lora_embedding_A": "adam", "lora_embedding_B": "adam", "lora_A": "cosmos", "lora_B": "cosmos"}
    before = weights(model)
    train(model, Cosmos(model, lr=1e-2), range(2))
    assert all("lora" in name for name in changed(model, before))


@pytest.mark.parametrize("tied", [False, True])
def test_trained_rows_of_the_embedding_get_adam(tied: bool) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[1, 2], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_llama(tie_word_embeddings=tied), config)
    rules = {row.name: (row.rule, row.why) for row in plan(model).rows if "tokens_delta" in row.name}
    assert list(rules.values()) == [("adam", "embedding")]
    before = weights(model)
    train(model, Cosmos(model, lr=1e-2), range(2))
    assert set(rules) < changed(model, before)


def test_adalora_is_an_error_that_shows_the_line_to_add() -> None:
    config = peft.AdaLoraConfig(total_step=10, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_llama(), config)
    with pytest.raises(ValueError, match=r"overrides=\{.*lora_A"):
        Cosmos(model)
    rows = plan(model, overrides={"*.lora_A.*": "cosmos", "*.lora_B.*": "cosmos"}).rows
    assert Counter(row.rule for row in rows) == {"cosmos": 4, "adam": 2}


def test_the_code_of_the_page_runs_and_trains_only_adapters() -> None:
    model = tiny_llama()
    space: dict[str, Any] = {"model": model, "batches": [{"input_ids": torch.arange(1, 13)[None]} for _ in range(3)]}
    space["batches"] = [{**batch, "labels": batch["input_ids"]} for batch in space["batches"]]
    text = PAGE.read_text()
    full, lora = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    before = weights(model)
    exec(compile(full, str(PAGE), "exec"), space)
    assert changed(model, before)
    space["model"] = tiny_llama()
    exec(compile(lora, str(PAGE), "exec"), space)
    trained = [name for group in space["opt"].param_groups for name in group["param_names"]]
    assert trained and all("lora" in name for name in trained)
