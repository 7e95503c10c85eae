"""Command-line flags from dataclasses: by tyro where it is installed, by argparse over the same fields elsewhere."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import typing
from collections.abc import Callable, Iterator, Sequence
from types import NoneType, UnionType
from typing import Any, TypeVar

from cosmos_lab.config import parse_options

T = TypeVar("T")


def parse(default: T, arguments: Sequence[str], *, prog: str, description: str = "") -> T:
    """The dataclass ``default`` with the flags in ``arguments`` applied; nested dataclasses give flat flags."""
    try:
        import tyro
    except ImportError:
        return parse_plain(default, arguments, prog=prog, description=description)
    return tyro.cli(
        type(default),
        default=default,
        args=list(arguments),
        prog=prog,
        description=description,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
    )


def parse_plain(default: T, arguments: Sequence[str], *, prog: str, description: str = "") -> T:
    """The same with argparse: shorter help, same flags."""
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    for field, annotation, value in _fields(default):
        _add(parser, field.name, annotation, value)
    return _replace(default, vars(parser.parse_args(list(arguments))))


def _fields(value: Any) -> Iterator[tuple[dataclasses.Field[Any], Any, Any]]:
    """Every leaf field with its type and value."""
    hints = typing.get_type_hints(type(value))
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            yield from _fields(inner)
        else:
            yield field, hints[field.name], inner


def _replace(value: T, new: dict[str, Any]) -> T:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        inner = getattr(value, field.name)
        changes[field.name] = _replace(inner, new) if dataclasses.is_dataclass(inner) else new[field.name]
    return dataclasses.replace(value, **changes)  # type: ignore[type-var]


def _add(parser: argparse.ArgumentParser, name: str, annotation: Any, value: Any) -> None:
    flag = "--" + name.replace("_", "-")
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=value)
    elif origin is tuple:
        literal = typing.get_origin(inner[0]) is typing.Literal
        choices, kind = (typing.get_args(inner[0]), str) if literal else (None, inner[0])
        parser.add_argument(flag, nargs="*", type=kind, default=value, choices=choices, action=_AsTuple)
    elif origin is typing.Literal:
        parser.add_argument(flag, choices=inner, default=value)
    elif origin in (UnionType, typing.Union):
        kind = next(kind for kind in inner if kind is not NoneType)
        parser.add_argument(flag, type=_optional(kind), default=value, metavar=kind.__name__.upper())
    else:
        parser.add_argument(flag, type=annotation, default=value, metavar=annotation.__name__.upper())


class _AsTuple(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, tuple(values))


def _optional(kind: type) -> Any:
    def read(text: str) -> Any:
        return None if text == "None" else kind(ast.literal_eval(text) if kind is bool else text)

    read.__name__ = kind.__name__
    return read


def parse_lrs(text: str | None) -> dict[str, list[float]] | list[float] | None:
    """Rates as the flag gives them.

    >>> parse_lrs("1e-3,2e-3"), parse_lrs("adam=2e-3;cosmos=5e-4,1e-3")
    ([0.001, 0.002], {'adam': [0.002], 'cosmos': [0.0005, 0.001]})
    """
    if text is None:
        return None
    if "=" not in text:
        return numbers(text, float, "--lrs")
    pairs = (part.partition("=") for part in text.split(";") if part)
    return {name.strip(): numbers(rates, float, "--lrs") for name, _, rates in pairs}


def numbers(text: str, kind: Callable[[str], Any], flag: str) -> list[Any]:
    """``1,2,3`` as numbers of a kind."""
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{flag} takes numbers separated by commas; got {text!r}") from None


def parse_extra(text: str | None) -> list[tuple[str, dict[str, Any]]]:
    """Fields by optimizer as the flag gives them.

    >>> parse_extra("soap:frequency=10;cosmos:;cosmos:rank=32,side=smaller")
    [('soap', {'frequency': 10}), ('cosmos', {}), ('cosmos', {'rank': 32, 'side': 'smaller'})]
    """
    found = []
    for part in (text or "").split(";"):
        if not part.strip():
            continue
        name, colon, fields = part.partition(":")
        if not colon:
            raise ValueError(f"--extra takes optimizer:name=value, for example soap:frequency=10; got {part!r}")
        found.append((name.strip(), parse_options(tuple(f.strip() for f in fields.split(",") if f.strip()), "--extra")))
    return found
