"""Stand-ins for torchvision, whose builds bring CUDA: timm imports it for image transforms, which no test here uses."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Anything(type):
    """A class with any attribute, for default arguments such as InterpolationMode.BILINEAR."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(ModuleType):
    """A module in which every public name is an empty class."""

    __path__: list[str] = []
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Anything(name, (), {})
        setattr(self, name, found)
        return found


class _Finder:
    """Finds `torchvision` and every module below it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def import_timm() -> Any:
    """Import timm, with stand-ins for torchvision while it is imported if that is not installed."""
    if importlib.util.find_spec("torchvision") is not None:
        import timm

        return timm
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        import timm
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    return timm
