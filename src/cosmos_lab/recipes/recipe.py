"""What a recipe is, the registry, and how a recipe shrinks."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cosmos_lab.config import RunConfig
from cosmos_lab.recipes.variants import Variant, label, plain, select, with_fields, with_rates

RECIPES: dict[str, Callable[[], Recipe]] = {}
Setup = tuple[RunConfig, Iterable[Variant]]
_EVERY = ("val_every", "checkpoint_every", "diagnostics_every")


@dataclass(frozen=True)
class Recipe:
    """A published comparison: one set-up and the runs made in it."""

    name: str
    title: str
    source: str  # where the paper reports it, or "this project"
    config: RunConfig  # the set-up, which is also the best COSMOS run: ``train`` starts from it
    grid: tuple[Variant, ...]  # the runs, each as the fields in which it differs; ``compare`` makes them all
    metric: str = "final_val_loss"
    published: Mapping[str, float] = field(default_factory=dict)  # perplexities by optimizer or variant's label

    def start(self, optimizer: str) -> RunConfig:
        """Return the set-up with another optimizer, as the grid runs it, at the middle one of its rates."""
        if optimizer == self.config.optimizer.optimizer:
            return self.config
        own = [variant for variant in self.grid if variant["optimizer"] == optimizer]
        return self.config.replace(**(own[len(own) // 2] if own else plain(optimizer)))

    def runs(
        self,
        config: RunConfig | None = None,
        *,
        optimizers: Sequence[str] | None = None,
        lrs: Mapping[str, Sequence[float]] | Sequence[float] | None = None,
        seeds: Iterable[int] = (0,),
        only: Sequence[str] | None = None,
        extra: Sequence[tuple[str, Mapping[str, Any]]] = (),
    ) -> list[RunConfig]:
        """Return the runs of the grid, named.

        Args:
            optimizers: only these; one that the recipe does not run gets its ``lrs``.
            lrs: rates in place of the recipe's, for all optimizers or by name.
            only: variants by what sets them apart, such as "rank-32", or "rank-32+gamma-0.5" for both at once.
            extra: (optimizer, fields) to set in its variants; an optimizer that occurs twice runs in both ways.
        """
        base = config or self.config
        chosen = [v for v in self.grid if optimizers is None or v["optimizer"] in optimizers]
        if lrs is not None:
            chosen = with_rates(self.grid, optimizers or list(dict.fromkeys(v["optimizer"] for v in self.grid)), lrs)
        if missing := sorted(set(optimizers or ()) - {v["optimizer"] for v in chosen}):
            raise ValueError(f"recipe {self.name!r} has no rates for {', '.join(missing)}: give them with --lrs")
        if only is not None:
            chosen = select(chosen, only)
        return [
            base.replace(**variant, seed=seed, name=f"{base.logging.recipe}-{label(variant, shown)}-s{seed}")
            for variant, shown in with_fields(chosen, extra, base.optimizer.options)
            for seed in seeds
        ]


def recipe(
    source: str, *, metric: str = "final_val_loss", published: Mapping[str, float] | None = None
) -> Callable[[Callable[[], Setup]], Callable[[], Setup]]:
    """Register a function as the recipe of its name, with the first line of its docstring as the title.

    The arguments are fields of `Recipe`; the function returns the other two, set-up and grid.
    """

    def register(setup: Callable[[], Setup]) -> Callable[[], Setup]:
        name, title = setup.__name__.replace("_", "-"), (setup.__doc__ or "").splitlines()[0].removesuffix(".")

        def make() -> Recipe:
            config, grid = setup()
            return Recipe(name, title, source, config.replace(recipe=name), tuple(grid), metric, published or {})

        RECIPES[name] = make
        return setup

    return register


def get_recipe(name: str, scale: float = 1.0) -> Recipe:
    """Return the recipe of that name, shrunk by ``scale``; an unknown name is a ValueError with the close ones."""
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ValueError(f"unknown recipe {name!r}; {hint}`cosmos-lab recipes` lists all {len(RECIPES)}")
    whole = RECIPES[name]()
    return whole if scale == 1 else replace(whole, config=shrink(whole.config, scale))


def shrink(config: RunConfig, scale: float) -> RunConfig:
    """Shrink model, batch and tokens together by ``scale`` in (0, 1].

    Hidden parameters and tokens shrink by ``scale``, so that tokens per parameter stay; width and depth each by its
    cube root, batch and steps each by its square root. Compute falls by about scale². Rates and sequence length stay.
    """
    if not 0 < scale <= 1:
        raise ValueError(f"--scale must be in (0, 1]; got {scale}")
    from cosmos_lab.models import resolve  # brings torch, which takes seconds: a list of recipes needs none

    model = resolve(config.model.model)
    edge, root = scale ** (1 / 3), scale**0.5
    width = max(2, round(model.width * edge / model.head_dim)) * model.head_dim
    every = {name: max(1, round(config.get(name) * root)) if config.get(name) else 0 for name in _EVERY}
    return config.replace(
        width=width,
        depth=max(2, round(model.depth * edge)),
        mlp=max(8, round(model.mlp * width / model.width / 8) * 8),  # a multiple of 8 suits the matrix units
        batch=max(8, round(config.training.batch * root / 8) * 8),
        steps=max(20, round(config.training.steps * root)),
        val_tokens=max(65_536, round(config.logging.val_tokens * scale)),
        **every,
    )
