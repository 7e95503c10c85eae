"""The lab's models: one decoder, with a preset for every run of the paper. Knows no optimizer."""

from .decoder import Decoder, build
from .presets import PRESETS, ModelConfig, resolve

__all__ = ["PRESETS", "Decoder", "ModelConfig", "build", "resolve"]
