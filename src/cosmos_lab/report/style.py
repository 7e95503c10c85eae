"""Define the colours, dashes and markers of the page and the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cosmos_lab.results.ranking import Task


@dataclass(frozen=True)
class Look:
    """How a method is drawn: a colour for each scheme, and a dash and a marker for readers who cannot tell colours."""

    light: str
    dark: str
    dash: tuple[int, ...]
    marker: str  # matplotlib's letter; the page draws the same shapes
    name: str = ""  # of the method


# An optimizer looks the same in every report. Any two colours stay at least 12 apart (CIE76) under simulated
# protanopia, deuteranopia and tritanopia, and each has a contrast of at least 3 with its background.
KNOWN: Mapping[str, Look] = {
    "cosmos": Look("#c03a08", "#ef7d1a", (), "o"),
    "adam": Look("#47474f", "#c3bab5", (), "s"),
    "muon": Look("#1c4f96", "#47a5fd", (), "^"),
    "soap": Look("#3f8a5a", "#0f9c6a", (), "D"),
    "muon-norm": Look("#1f92d8", "#b3edff", (7, 3), "v"),
    "normuon": Look("#d9659c", "#d07ab9", (7, 3), "P"),
    "galore": Look("#ad8800", "#ffc938", (7, 3), "X"),
    "adam-mini": Look("#33106e", "#7868dc", (7, 3), "<"),
}
_DASHES: tuple[tuple[int, ...], ...] = ((2, 3), (10, 3, 2, 3), (4, 2), (12, 4))

THEMES: Mapping[str, Mapping[str, str]] = {
    "light": {
        "bg": "#fbfaf8", "card": "#ffffff", "ink": "#1b1c20", "soft": "#5a5d66", "faint": "#8b8e97", "line": "#e4e2dd",
        "grid": "#eeece8", "accent": "#c03a08", "wash": "#fdf1ea", "good": "#23683f", "warn": "#8a5a00",
        "bad": "#a8201a",
    },
    "dark": {
        "bg": "#14161a", "card": "#1b1e24", "ink": "#eceae6", "soft": "#aeb0b8", "faint": "#7f828c", "line": "#31353d",
        "grid": "#282c33", "accent": "#ef7d1a", "wash": "#2b221b", "good": "#6cc791", "warn": "#e3b558",
        "bad": "#ff8f84",
    },
}  # fmt: skip

# The viridis map at nine places: even steps of lightness, so it reads without colour and in print.
HEAT = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")


def looks(optimizers: Sequence[str]) -> list[Look]:
    """Return one look for each method, given its optimizer; variants of one optimizer differ in their dash alone.

    The paper's settings ("cosmos-paper") are such a variant, with the same dash in every report.
    """
    names = [name.removesuffix("-paper") for name in optimizers]
    unknown = [name for name in dict.fromkeys(names) if name not in KNOWN]
    spare = [look for name, look in KNOWN.items() if name not in names] or list(KNOWN.values())
    result = []
    for index, (name, optimizer) in enumerate(zip(names, optimizers, strict=True)):
        look = KNOWN.get(name) or spare[unknown.index(name) % len(spare)]
        variant = list(optimizers[:index]).count(optimizer) + 2 * (name != optimizer)
        result.append(replace(look, dash=_DASHES[(variant - 1) % len(_DASHES)]) if variant else look)
    return result


def looks_of(task: Task) -> dict[str, Look]:
    """Return the look of each method of a task, in order."""
    first = {group.method: group.optimizer for group in reversed(task.groups)}
    found = looks([first[method] for method in task.methods])
    return {method: replace(look, name=method) for method, look in zip(task.methods, found, strict=True)}


def theme_css() -> str:
    """Return the colour variables: the reader's scheme, unless the button on the page chose another."""

    def block(name: str) -> str:
        return f"color-scheme:{name};" + "".join(f"--{key}:{value};" for key, value in THEMES[name].items())

    colour = ".m{--c:var(--dark)}"
    return (
        f":root{{{block('light')}}}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{block('dark')}}}"
        f":root:not([data-theme=light]) {colour}}}\n"
        f":root[data-theme=dark]{{{block('dark')}}}\n:root[data-theme=dark] {colour}\n"
    )
