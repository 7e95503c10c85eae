"""Format numbers and tables as text: rates, token counts, durations, bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Align cells as text, the columns in ``left`` to the left.

    >>> print(format_table(("name", "ppl"), [("adam", "21.28")]))
    name    ppl
    adam  21.28
    """
    cells = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    signs = ["<" if i in left else ">" for i in range(len(head))]
    lines = ([f"{cell:{sign}{width}}" for cell, sign, width in zip(line, signs, widths)] for line in cells)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def format_rate(value: float | None) -> str:
    """Format a learning rate: ``2e-3`` instead of ``0.002``."""
    if value is None:
        return "?"
    if value == 0 or not math.isfinite(value) or 0.1 <= abs(value) < 1000:
        return f"{value:g}"
    digits, exponent = f"{value:e}".split("e")
    return f"{float(digits):.4g}e{int(exponent)}"


def format_digits(value: float | None, digits: int = 4) -> str:
    """Format a plain decimal with this many significant digits, or a dash."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    power = math.floor(math.log10(abs(value)))
    return f"{value:.{digits - 1}e}" if power >= 7 or power < -4 else f"{value:,.{max(0, digits - 1 - power)}f}"


def format_count(value: float | None, like: float | None = None) -> str:
    """Format a number of tokens: 1.31 B, 300 M, 65.5 k; in the unit that suits ``like``, if it is given."""
    units = ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k"), (0, ""))
    return _in_units(value, like, units, 0.9995, lambda x, _: f"{x:.3g}" if abs(x) < 1000 else f"{x:,.0f}")


def format_seconds(value: float | None, like: float | None = None) -> str:
    """Format a duration in a suitable unit: 41.2 s, 22.7 min, 3.20 h; or in the unit that suits ``like``."""
    units = ((86400, " d"), (3600, " h"), (60, " min"), (0, " s"))
    return _in_units(value, like, units, 1.5, lambda x, _: format_digits(x, 3))


def format_bytes(value: float | None, like: float | None = None) -> str:
    """Format a number of bytes in binary units; in the unit that suits ``like``, if it is given."""
    units = ((2**40, " TiB"), (2**30, " GiB"), (2**20, " MiB"), (2**10, " KiB"), (0, " B"))
    return _in_units(value, like, units, 1.0, lambda x, unit: format_digits(x, 3) if unit else f"{x:.0f}")


def format_clock(seconds: float) -> str:
    """Format seconds as m:ss or h:mm:ss.

    >>> format_clock(75), format_clock(3700)
    ('1:15', '1:01:40')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _in_units(
    value: float | None, like: float | None, units: Sequence[tuple[float, str]], least: float,
    form: Callable[[float, float], str],
) -> str:  # fmt: skip
    """Format the value in the first unit of which it, or ``like``, has at least ``least``; a unit of 0 means 1."""
    if value is None or not math.isfinite(value):
        return "–"
    scale = abs(value if like is None else like)
    unit, name = next((unit, name) for unit, name in units if scale >= least * unit)
    return form(value / (unit or 1), unit) + name
