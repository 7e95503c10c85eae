"""The commands of ``cosmos-lab``: each takes its arguments and does its work, or raises a ValueError.

A recipe's values are the defaults of its flags, so the recipe and ``--scale`` are read first, the flags after them.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path
from typing import Any

from cosmos_lab.cli import flags
from cosmos_lab.cli.recipe_list import HELP, recipes_command
from cosmos_lab.config import COMPARABLE, RunConfig, marked
from cosmos_lab.recipes import Recipe, get_recipe


def _take(arguments: list[str], what: str, usage: str) -> tuple[str, list[str]]:
    """Return the first argument, which must be a word, and the rest."""
    if arguments and arguments[0] in HELP:
        print(f"usage: {usage}")
        raise SystemExit(0)
    if not arguments or arguments[0].startswith("-"):
        raise ValueError(f"{what} comes first: {usage}")
    return arguments[0], arguments[1:]


def _take_flag(arguments: list[str], flag: str) -> tuple[str | None, list[str]]:
    """Return the value of a flag that other flags' defaults depend on (the last one counts), and the rest."""
    rest: list[str] = []
    found: str | None = None
    words = iter(arguments)
    for word in words:
        name, given, value = word.partition("=")
        if name != flag:
            rest.append(word)
            continue
        found = value if given else next(words, "--")
        if found.startswith("--"):
            raise ValueError(f"{flag} takes one value; got none")
    return found, rest


def _given(arguments: list[str], flag: str) -> bool:
    """Tell whether the arguments have a flag, written with hyphens or underscores."""
    return f"--{flag}" in (word.partition("=")[0].replace("_", "-") for word in arguments)


def _take_recipe(arguments: list[str], command: str, default: Any) -> tuple[Recipe, str, list[str]]:
    """Return the recipe that the first argument names (shrunk by ``--scale``), its description, and the rest.

    Help without a recipe shows the flags of ``default``.
    """
    usage = f"cosmos-lab {command} RECIPE [--scale S]"
    if arguments and arguments[0] in HELP:
        about = (
            "`cosmos-lab recipes` lists the recipes; --scale S shrinks model, batch and tokens together. "
            f"A recipe has its own defaults: `cosmos-lab {command} tiny --help` shows those of tiny."
        )
        flags.parse(default, ["--help"], prog=usage, description=about)
    name, rest = _take(arguments, "the recipe", f"{usage} [flags]; `cosmos-lab recipes` lists the recipes")
    text, rest = _take_flag(rest, "--scale")
    try:
        scale = 1.0 if text is None else float(text)
    except ValueError:
        raise ValueError(f"--scale takes a number in (0, 1]; got {text!r}") from None
    recipe = get_recipe(name, scale)
    shrunk = f"Shrunk by --scale {scale:g}." if scale != 1 else "--scale S shrinks model, batch and tokens together."
    return recipe, f"{recipe.title} ({recipe.source}). {shrunk}", rest


def train_command(arguments: list[str]) -> None:
    """Train one run: cosmos-lab train RECIPE [flags]."""
    from cosmos_lab.display import TrainDisplay
    from cosmos_lab.run.train import train

    recipe, about, rest = _take_recipe(arguments, "train", RunConfig())
    optimizer, rest = _take_flag(rest, "--optimizer")
    default = recipe.config if optimizer is None else recipe.start(optimizer)
    config = flags.parse(default, rest, prog=f"cosmos-lab train {recipe.name}", description=about)
    if default.optimizer.adam_lr == default.optimizer.lr and not _given(rest, "adam-lr"):
        config = config.replace(adam_lr=config.optimizer.lr)  # the recipe gives this optimizer one rate
    with TrainDisplay(config) as display:
        summary = train(config, progress=display)
    earlier = "" if display.began else " earlier"
    if os.environ.get("RANK", "0") != "0":
        return
    result = ", ".join(f"{key} {summary[key]:.4g}" for key in ("final_val_loss", "final_val_ppl") if summary.get(key))
    print(f"{summary['status']}{earlier}: {result or 'no finite validation loss'}; in {config.folder}")


def compare_command(arguments: list[str]) -> None:
    """Run a grid: cosmos-lab compare RECIPE [flags]."""
    from cosmos_lab.grid.compare import compare
    from cosmos_lab.optimizers import optimizer_class

    recipe, about, rest = _take_recipe(arguments, "compare", flags.CompareCommand())
    default = flags.CompareCommand(run=recipe.config)
    asked = flags.parse(default, rest, prog=f"cosmos-lab compare {recipe.name}", description=about)
    for one, many in (("optimizer", "optimizers"), ("lr", "lrs"), ("seed", "seeds")):
        if _given(rest, one):
            raise ValueError(f"a comparison takes --{many}, not --{one}")
    if _given(rest, "name"):
        raise ValueError("a comparison names its runs itself: choose their folder with --out instead of --name")
    options = asked.compare
    chosen = [name.strip() for name in (options.optimizers or "").split(",") if name.strip()] or None
    for optimizer in chosen or ():
        optimizer_class(optimizer)
    runs = recipe.runs(
        asked.run,
        optimizers=chosen,
        lrs=flags.parse_lrs(options.lrs),
        seeds=flags.numbers(options.seeds, int, "--seeds"),
        only=options.only.split(",") if options.only else None,
        extra=flags.parse_extra(options.extra),
    )
    result = compare(
        runs, metric=recipe.metric, parallel=options.parallel, minutes=options.minutes, report=options.report
    )
    own = get_recipe(recipe.name).config.identity()
    changed = {name for name, value in asked.run.identity().items() if value != own[name]}
    # The text may be another one: the line says so.
    if recipe.published and changed <= {"data", *marked(COMPARABLE)} and not options.extra:
        listed = ", ".join(f"{run} {ppl}" for run, ppl in recipe.published.items())
        print(f"published perplexity, on the paper's data: {listed}")
    if failed := sum(len(row["failures"]) for row in result["rows"]):
        raise ValueError(f"{failed} of {len(runs)} runs failed (see the table); the same command tries them again")


_LISTS = ("--optimizers", "--tables", "--micro-batches")  # flags of `profile`


def profile_command(arguments: list[str]) -> None:
    """Measure time and memory: cosmos-lab profile MODEL [flags]."""
    from cosmos_lab.profile.config import PROFILES, ProfileConfig
    from cosmos_lab.profile.profile import profile

    usage = (
        f"cosmos-lab profile MODEL [flags], MODEL such as llama-1b, or one of {', '.join(PROFILES)}\n"
        "`cosmos-lab profile llama-1b --help` lists the flags"
    )
    name, rest = _take(arguments, "the model", usage)
    default = PROFILES[name]() if name in PROFILES else dataclasses.replace(ProfileConfig(), model=name)
    default.check()
    about = "Measure memory and time of a training step, the largest batch, and MFU."
    profile(flags.parse(default, _spaced(rest), prog=f"cosmos-lab profile {name}", description=about))


def _spaced(arguments: list[str]) -> list[str]:
    """Split the comma-separated values of list flags, which `compare` takes as they are, into words.

    >>> _spaced(["--optimizers", "adam,cosmos", "--out", "a,b.json", "--tables=memory,mfu"])
    ['--optimizers', 'adam', 'cosmos', '--out', 'a,b.json', '--tables', 'memory', 'mfu']
    """
    found: list[str] = []
    listed = False
    for word in arguments:
        flag, given, value = word.partition("=")
        if word.startswith("--"):
            listed = flag in _LISTS
            found.append(flag if listed else word)
            word = value if listed and given else ""
        found += [part for part in word.split(",") if part] if listed else [word] * bool(word)
    return found


def report_command(arguments: list[str]) -> None:
    """Write a page about runs: cosmos-lab report RUNS... -o DIR."""
    from cosmos_lab.report import write_report

    runs, rest = _words(arguments, "RUNS", "cosmos-lab report RUNS... -o DIR")
    asked = flags.parse(flags.ReportCommand(), rest, prog="cosmos-lab report RUNS...")
    print(write_report([Path(run) for run in runs], Path(asked.out), title=asked.title).page)


def _words(arguments: list[str], what: str, usage: str) -> tuple[list[str], list[str]]:
    """Return the leading words (none if only help is asked for), and the flags after them with -o as --out."""
    if arguments and arguments[0] in HELP:
        return [], ["--help"]
    _take(arguments, what, usage)
    count = next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    return arguments[:count], ["--out" if word == "-o" else word for word in arguments[count:]]


def data_command(arguments: list[str]) -> None:
    """Make token shards: cosmos-lab data prepare SOURCE... [flags]."""
    from cosmos_lab.data.prepare import Progress, prepare
    from cosmos_lab.data.raw import UNKNOWN

    usage = "cosmos-lab data prepare c4|fineweb|wikitext-103|PATH... [flags]"
    verb, rest = ("prepare", arguments) if arguments and arguments[0] in HELP else _take(arguments, "prepare", usage)
    if verb != "prepare":
        raise ValueError(f"data has one subcommand, prepare: {usage}")
    sources, rest = _words(rest, "the source", usage)
    asked = flags.parse(flags.PrepareCommand(), rest, prog=usage.removesuffix(" [flags]"))

    shown: list[str] = []

    def show(now: Progress) -> None:
        counts = {"documents": now.documents, "tokens": now.train_tokens + now.val_tokens}
        parts = [f"{count:,} {name}" for name, count in counts.items() if count]
        parts += [] if now.fraction is None else [f"{100 * now.fraction:.1f} %"]
        print(f"\r{now.task}: {', '.join(parts)}".ljust(79), end="", flush=True)
        shown[:] = ["\n"]

    try:
        made = prepare(sources, asked.out, asked.tokenizer, asked.settings, prefix=asked.prefix, progress=show)
    finally:
        print(*shown, end="")  # ends the line of progress
    guess = made.tokenizer == UNKNOWN and asked.settings.vocab_size is None
    ids = f"{made.vocab_size:,} ids" + (" (the largest token + 1; --vocab-size sets another number)" if guess else "")
    print(f"{made.spec}: {made.tokens['train']:,} tokens to train on, {made.tokens['val']:,} to validate with, {ids}; "
          f"use them with --data {shlex.quote(made.spec)}")  # fmt: skip


def export_command(arguments: list[str]) -> None:
    """Export a model to transformers: cosmos-lab export RUN -o DIR."""
    from cosmos_lab.run.export import export_run

    runs, rest = _words(arguments, "the run folder", "cosmos-lab export RUN -o DIR")
    asked = flags.parse(flags.ExportCommand(), rest, prog="cosmos-lab export RUN")
    if len(runs) > 1:
        raise ValueError(f"export takes one run folder; got {', '.join(runs)}: export each with its own -o")
    code = export_run(runs[0], asked.out, tokenizer=asked.tokenizer, step=asked.step)
    print(f"wrote {asked.out}; this loads it and generates:\n\n{code}")


def evaluate_command(arguments: list[str]) -> None:
    """Compute losses by position: cosmos-lab evaluate RUN... [flags]."""
    from cosmos_lab.io import explained, write_json
    from cosmos_lab.run.evaluate import evaluate, format_positions

    runs, rest = _words(arguments, "a run folder", "cosmos-lab evaluate RUN... [flags]")
    asked = flags.parse(flags.EvaluateCommand(), rest, prog="cosmos-lab evaluate RUN...")
    options = {name: getattr(asked, name) for name in ("data", "tokens", "seq_len", "step", "device")}
    results = [evaluate(run, **options) for run in runs]
    print(format_positions(results))
    if asked.out:
        with explained(Path(asked.out)):
            write_json(Path(asked.out), results)


def demo_command(arguments: list[str]) -> None:
    """Run the demo: cosmos-lab demo [flags]."""
    from cosmos_lab.demo import DemoConfig, demo

    about = "Train a tiny LLaMA with AdamW, Muon, SOAP and COSMOS on this machine's CPU, and compare them."
    demo(flags.parse(DemoConfig(), arguments, prog="cosmos-lab demo", description=about))


_ALL = (
    train_command, compare_command, profile_command, report_command, data_command, export_command, evaluate_command,
    demo_command, recipes_command,
)  # fmt: skip
COMMANDS = {command.__name__.removesuffix("_command"): command for command in _ALL}
