"""The routes of models of transformers: as in the committed table, and by rules that are independent of the router."""

from __future__ import annotations

import pytest
from torch import nn

from cosmos_optim import param_groups
from cosmos_optim.routing.param_groups import routes
from tests.routing import oracle, tables
from tests.routing import transformers_models as models

# Written by reading the models. Heads that do not predict the labels of a configuration:
NAMED_HEADS = (
    "lm_head.weight", "*.seq_relationship.weight", "multiple_choice_head.summary.weight",
    "discriminator_predictions.dense_prediction.weight", "qa_outputs.weight", "qa_classifier.qa_outputs.weight",
    "*bbox_predictor.layers.2.weight", "*class_labels_classifier.weight", "class_labels_classifier.layers.2.weight",
    "*bbox_embed*.layers.2.weight",
    "*bbox_head.layers.2.weight", "box_head.dense2.weight", "decoder.decoder_pred.weight", "classifier.weight",
    "mask_decoder.iou_prediction_head.proj_out.weight", "model.decoder.output_projection.weight",
    "text_model.head.weight", "predict_state.weight", "predict_action.0.weight",
)  # fmt: skip
# Linear layers that are tables of biases:
TABLES = ("*.rel_pos_bias.weight", "*.rel_pos_?_bias.weight")
# Plain parameters, or parameters of layers that are not torch's own, that are hidden matrices:
HIDDEN = (
    "*.experts.gate_up_proj", "*.experts.up_proj", "*.experts.down_proj", "*.mlp.gate.weight", "*.mixer.gate.weight",
    "*.router.weight", "*.input_linear.weight", "*.output_linear.weight", "*.rg_lru.*_gate_weight",
    "*.mm_input_projection_weight", "*.c_attn.weight", "*.c_fc.weight", "*.c_proj.weight",
    "ibert.encoder.layer.*.dense.weight", "ibert.encoder.layer.*.self.*.weight", "*.parametrizations.weight.original1",
    "*_hc.fn", "*.hc_fn",
)  # fmt: skip


def declared_heads(model: nn.Module) -> list[nn.Module]:
    """Return the output embeddings, if there are any."""
    try:
        found = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return []
    return [found] if isinstance(found, nn.Module) else []


@pytest.mark.parametrize("name", models.NAMES)
def test_routes_are_those_of_the_table_and_of_the_oracle(name: str) -> None:
    model, overrides = models.build(name), models.UNCLAIMED.get(name)
    assert tables.table(model, overrides) == tables.read("transformers")[name]
    rules = {parameter.name: route.rule for parameter, route in routes(model, overrides=overrides)}
    wrong = oracle.wrong_routes(
        model, rules, declared_heads(model), models.LABELS, named_heads=NAMED_HEADS, tables=TABLES, hidden=HIDDEN
    )
    assert wrong == []


@pytest.mark.parametrize("name", models.UNCLAIMED)
def test_a_parameter_that_nothing_recognizes_is_an_error_that_suggests_adam_first(name: str) -> None:
    with pytest.raises(ValueError, match=r"is not known to be.*overrides=\{'[^']*': 'adam'[,}]"):
        param_groups(models.build(name))


def test_the_table_has_every_model() -> None:
    assert len(models.NAMES) >= 60
    assert set(tables.read("transformers")) == set(models.NAMES)
