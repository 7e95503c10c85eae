"""The models of timm whose routes are tested: the first of every module, and those with other kinds of parameters."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch import nn

if importlib.util.find_spec("timm") is None:
    pytest.skip("timm is not installed", allow_module_level=True)


class _Anything(type):
    """A class that has every attribute."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Substitute(ModuleType):
    """A module that has every class."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (nn.Module,) if name == "FrozenBatchNorm2d" else (), {})


def _import_without_torchvision() -> ModuleType:
    """Import timm. Its models need no torchvision, but its data pipeline imports it."""
    if importlib.util.find_spec("torchvision") is None:
        for name in ("", ".datasets", ".models", ".models.feature_extraction", ".ops", ".ops.misc", ".transforms",
                     ".transforms.functional", ".utils"):  # fmt: skip
            module = sys.modules[f"torchvision{name}"] = _Substitute(f"torchvision{name}")
            module.__spec__ = ModuleSpec(module.__name__, None)
            if name:
                parent, _, own = module.__name__.rpartition(".")
                setattr(sys.modules[parent], own, module)
    return importlib.import_module("timm")


timm = _import_without_torchvision()

# Distilled, clip's pooling, mixed rotary embeddings, latent pooling, lambda layers, halo attention.
FURTHER = (
    "deit_base_distilled_patch16_224", "levit_256d", "pit_b_distilled_224", "efficientvim_m1_dist", "resnet50_clip",
    "vit_base_patch16_rope_mixed_224", "vit_base_patch16_siglip_224", "naflexvit_base_patch16_map", "mvitv2_base_cls",
    "lambda_resnet26rpt_256", "eca_halonext26ts", "maxvit_base_tf_224", "hiera_base_abswin_256", "poolformer_m36",
    "coat_mini",
)  # fmt: skip
FAMILIES = tuple(names[0] for family in timm.list_modules() if (names := timm.list_models(module=family)))
NAMES = (*FAMILIES, *(name for name in FURTHER if name not in FAMILIES))
UNCLAIMED: dict[str, dict[str, str]] = {}
REFUSED = ("efficientnet_cc_b0_4e",)  # nothing claims its conditional kernels: each expert's is a row


def build(name: str) -> nn.Module:
    """Return a model without memory."""
    with torch.device("meta"):
        return timm.create_model(name, pretrained=False)
