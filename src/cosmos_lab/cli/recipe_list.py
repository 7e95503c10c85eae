"""The command ``cosmos-lab recipes``: in its own file, because it needs no torch, which takes seconds to import."""

from __future__ import annotations

from cosmos_lab.formatting import format_table
from cosmos_lab.profile.config import PROFILES
from cosmos_lab.recipes import RECIPES

HELP = ("-h", "--help")
FIRST = "tiny"


def recipes_command(arguments: list[str]) -> None:
    """List the recipes: cosmos-lab recipes."""
    if words := [word for word in arguments if word not in HELP]:
        raise ValueError(f"recipes takes no arguments; got {' '.join(words)}: `cosmos-lab train tiny --help` shows one")
    recipes = sorted((make() for make in RECIPES.values()), key=lambda recipe: recipe.name)
    of_paper = [r for r in recipes if r.source != "this project"]
    own = [r for r in recipes if r.source == "this project" and r.name != FIRST]
    groups = {
        f"Begin here, without data or GPU: `cosmos-lab train {FIRST}`, then `cosmos-lab compare {FIRST}`": [
            (r.name, str(len(r.grid)), r.title) for r in recipes if r.name == FIRST
        ],
        "Comparisons of this project, sized for one GPU": [(r.name, str(len(r.grid)), r.title) for r in own],
        "Comparisons of the paper and of public records; `--scale 0.1` makes a small one": [
            (r.name, str(len(r.grid)), f"{r.title} ({r.source})") for r in of_paper
        ],
        "Profiles: `cosmos-lab profile NAME`": [
            (name, "", (make.__doc__ or "").splitlines()[0].removesuffix(".")) for name, make in PROFILES.items()
        ],
    }
    # One table, so that the columns of all groups are aligned.
    lines = format_table(("name", "runs", "what it does"), [row for rows in groups.values() for row in rows], (0, 2))
    head, *rest = lines.splitlines()
    print(f"  {head}")
    for heading, rows in groups.items():
        print(f"\n{heading}", *(f"  {rest.pop(0)}" for _ in rows), sep="\n")
