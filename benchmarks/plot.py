"""Plot the device time of a step by kind of kernel: `python -m benchmarks.plot FILE... OUT`.

The files come from `benchmarks.step --profile`. With several files, the rows of all except the last are labelled
"before". Kernels of two chunks overlap, so the parts of a bar may add up to more than the step. The black line is the
time of the step itself.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def main(sources: list[Path], target: Path, names: tuple[str, ...] = ("cosmos", "cosmos-paper", "muon")) -> None:
    """Draw one bar of device time by kind for each profiled row, the step as a line, and the roofline."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results = [json.loads(source.read_text()) for source in sources]
    result, rows = results[-1], []
    for found in results:
        suffix = "" if found is result else ", before"
        chosen = [row for row in found["rows"] if row.get("profile") and row["name"] in names]
        rows += [row | {"name": row["name"] + suffix} for row in chosen]
    names = tuple(row["name"] for row in rows)
    kinds = list(dict.fromkeys(kind for row in rows for kind, ms in row["profile"]["kinds_ms"].items() if ms))
    figure, axes = plt.subplots(figsize=(8, 1.8 + 0.6 * (len(rows) + 1)))
    left = [0.0] * len(rows)
    for kind, color in zip(kinds, plt.colormaps["tab20"](range(len(kinds))), strict=True):
        widths = [row["profile"]["kinds_ms"].get(kind, 0.0) for row in rows]
        axes.barh(names, widths, left=left, label=kind, color=color)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for i, row in enumerate(rows):
        axes.plot([row["median_ms"]] * 2, [i - 0.45, i + 0.45], color="black", linewidth=2)
    bound = result["roofline"]
    axes.barh(["roofline"], [bound["arithmetic_ms"]], color="0.6")
    axes.barh(["roofline"], [bound["traffic_ms"]], left=[bound["arithmetic_ms"]], color="0.8")
    axes.invert_yaxis()
    axes.set_xlabel(f"ms, {result['model']}, {result['versions']['device']} (line: the step)")
    axes.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.45, -0.2))
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Plot the device time of a step by kind of kernel.")
    parser.add_argument("files", nargs="+", type=Path, help="of benchmarks.step --profile; the last is the newest")
    parser.add_argument("target", type=Path, help="the picture")
    asked = parser.parse_args()
    main(asked.files, asked.target)
