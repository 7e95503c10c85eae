"""The lab's models: one decoder, with a preset for every run of the paper. Knows no optimizer."""

from .config import PRESETS, ModelConfig, resolve
from .decoder import Decoder, build

__all__ = ["PRESETS", "Decoder", "ModelConfig", "build", "resolve"]
