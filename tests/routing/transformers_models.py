"""The models of transformers whose routes are tested: all kinds of heads, and every architecture in wide use.

Each is built from its default configuration with two layers, on the meta device, so nothing is allocated.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import transformers
from torch import nn

LABELS = 7  # no layer of these models has this width, so that classifiers are recognized by it
DEPTHS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_encoder_layers",
    "num_decoder_layers", "depth",
)  # fmt: skip
PER_LAYER = ("layer_types", "mlp_layer_types", "layers_block_type", "attention_types")

_NAMES = """
    LlamaForCausalLM MistralForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM GemmaForCausalLM Gemma2ForCausalLM
    Gemma3ForCausalLM PhiForCausalLM Phi3ForCausalLM GPT2LMHeadModel GPTNeoXForCausalLM GPTJForCausalLM
    GPTNeoForCausalLM OPTForCausalLM BloomForCausalLM FalconForCausalLM StableLmForCausalLM CohereForCausalLM
    OlmoForCausalLM Olmo2ForCausalLM GraniteForCausalLM SmolLM3ForCausalLM Starcoder2ForCausalLM MptForCausalLM
    CodeGenForCausalLM
    MixtralForCausalLM Qwen2MoeForCausalLM Qwen3MoeForCausalLM DeepseekV3ForCausalLM GptOssForCausalLM OlmoeForCausalLM
    GraniteMoeForCausalLM Llama4ForCausalLM Glm4MoeForCausalLM PhimoeForCausalLM JetMoeForCausalLM
    MambaForCausalLM Mamba2ForCausalLM FalconMambaForCausalLM RwkvForCausalLM RecurrentGemmaForCausalLM JambaForCausalLM
    BambaForCausalLM Qwen3NextForCausalLM ZambaForCausalLM
    DeepseekV2ForCausalLM DeepseekV4ForCausalLM KimiLinearForCausalLM LongcatFlashForCausalLM MiniMaxForCausalLM
    NemotronHForCausalLM FalconH1ForCausalLM GraniteMoeHybridForCausalLM OlmoHybridForCausalLM xLSTMForCausalLM
    AriaTextForCausalLM
    LlamaForSequenceClassification LlamaForTokenClassification LlamaForQuestionAnswering GPT2ForSequenceClassification
    GPT2DoubleHeadsModel
    BertForPreTraining BertForMaskedLM BertForSequenceClassification BertForTokenClassification BertForQuestionAnswering
    BertForMultipleChoice BertForNextSentencePrediction BertModel RobertaForMaskedLM RobertaForSequenceClassification
    RobertaForTokenClassification RobertaForQuestionAnswering DistilBertForMaskedLM DistilBertForSequenceClassification
    DistilBertForQuestionAnswering ElectraForPreTraining ElectraForMaskedLM ElectraForSequenceClassification
    ElectraForMultipleChoice AlbertForMaskedLM AlbertForSequenceClassification DebertaV2ForMaskedLM
    DebertaV2ForSequenceClassification ModernBertForMaskedLM ModernBertForSequenceClassification
    XLNetForSequenceClassification XLMForSequenceClassification FunnelForSequenceClassification
    LayoutLMv3ForTokenClassification BigBirdForQuestionAnswering ConvBertForMaskedLM IBertForMaskedLM
    LongformerForQuestionAnswering
    T5ForConditionalGeneration T5EncoderModel MT5ForConditionalGeneration BartForConditionalGeneration
    BartForSequenceClassification PegasusForConditionalGeneration MarianMTModel FSMTForConditionalGeneration
    LEDForConditionalGeneration M2M100ForConditionalGeneration
    Wav2Vec2ForCTC Wav2Vec2ForPreTraining Wav2Vec2ForSequenceClassification Wav2Vec2ForXVector HubertForCTC
    HubertForSequenceClassification WavLMForCTC WhisperForConditionalGeneration WhisperForAudioClassification
    SpeechT5ForTextToSpeech MusicgenForCausalLM ASTForAudioClassification Wav2Vec2ConformerForCTC EncodecModel
    ViTForImageClassification ViTMAEForPreTraining DeiTForImageClassification DeiTForImageClassificationWithTeacher
    SwinForImageClassification Swinv2ForImageClassification ConvNextForImageClassification
    ConvNextV2ForImageClassification Dinov2ForImageClassification BeitForImageClassification
    ResNetForImageClassification RegNetForImageClassification MobileNetV2ForImageClassification
    EfficientNetForImageClassification LevitForImageClassification PvtV2ForImageClassification
    CLIPModel CLIPForImageClassification SiglipModel SiglipForImageClassification CLIPTextModelWithProjection
    LlavaForConditionalGeneration Gemma3ForConditionalGeneration Blip2ForConditionalGeneration PerceiverForMaskedLM
    PaliGemmaForConditionalGeneration Qwen2VLForConditionalGeneration
    DetrForObjectDetection DetrForSegmentation YolosForObjectDetection DeformableDetrForObjectDetection
    RTDetrForObjectDetection OwlViTForObjectDetection
    SegformerForSemanticSegmentation DPTForDepthEstimation DPTForSemanticSegmentation SamModel
    HGNetV2ForImageClassification Sam2Model VJEPA2Model
    UperNetForSemanticSegmentation PatchTSTForClassification DecisionTransformerModel ViltForQuestionAnswering
    TapasForQuestionAnswering
"""
NAMES = tuple(_NAMES.split())
# Settings without which the default configuration cannot be built, or would leave out a kind of layer.
_RESNET = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None,
           "backbone_config": {"model_type": "resnet", "out_features": ["stage2", "stage3", "stage4"]}}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "DeepseekV3ForCausalLM": {"first_k_dense_replace": 1},
    "Glm4MoeForCausalLM": {"first_k_dense_replace": 1},
    "JambaForCausalLM": {"num_hidden_layers": 8},
    "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3},
    "Qwen3NextForCausalLM": {"num_hidden_layers": 4},
    "BambaForCausalLM": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "FunnelForSequenceClassification": {"block_sizes": [1, 1]},
    "Wav2Vec2ConformerForCTC": {"vocab_size": 32},
    "DetrForObjectDetection": {**_RESNET, "backbone_config": {"model_type": "resnet", "out_features": ["stage4"]}},
    "DetrForSegmentation": _RESNET,
    "DeformableDetrForObjectDetection": {**_RESNET, "with_box_refine": True},
}
# Parameters that nothing claims: matrices in three dimensions, of which no name says how they are cut, and those of
# hyper-connections.
UNCLAIMED = {
    "DeepseekV4ForCausalLM": {"*hc.fn": "cosmos", "*.hc_fn": "cosmos"},
    "XLNetForSequenceClassification": {"*.rel_attn.[qkvor]": "adam"},
    "FunnelForSequenceClassification": {"*.r_kernel": "adam"},
    "ZambaForCausalLM": {"*.x_proj_weight": "adam"},
}


def build(name: str) -> nn.Module:
    """Return a model without memory, with two layers unless its settings say otherwise."""
    kind, settings = getattr(transformers, name), SETTINGS.get(name, {})
    config = kind.config_class(**settings)
    _shrink(config, settings)
    if name != "DistilBertForQuestionAnswering":  # it accepts two only
        config.num_labels = LABELS
    with torch.device("meta"):
        return kind(config)


def _shrink(config: transformers.PretrainedConfig, settings: dict[str, Any]) -> None:
    """Leave two layers in a configuration and in those inside it."""
    for name in (*DEPTHS, *PER_LAYER):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 2 and name not in settings:
            with suppress(NotImplementedError):  # a sum of other settings
                setattr(config, name, 2)
        elif isinstance(value, list) and len(value) > 2 and "num_hidden_layers" not in settings:
            setattr(config, name, value[:2])
    for value in list(vars(config).values()):
        if isinstance(value, transformers.PretrainedConfig):
            _shrink(value, settings)
