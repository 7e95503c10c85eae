"""Render the page: template, style, script and data in one file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from importlib import resources
from string import Template
from typing import NamedTuple

from cosmos_lab.formatting import format_count
from cosmos_lab.report import charts, tables, words
from cosmos_lab.report.charts import Section
from cosmos_lab.report.heat import HeatSection
from cosmos_lab.report.style import theme_css
from cosmos_lab.results.ranking import Task
from cosmos_lab.results.reading import Run

_PARTS = ("base.js", "legend.js", "lines.js", "heat.js", "page.js")  # in this order
_HINTS = {"curves": "Drag across a chart to zoom. ", "heat": "One row per layer; training runs from left to right."}


def render(
    title: str,
    tasks: Sequence[Task],
    specs: Sequence[Sequence[Section | HeatSection]],
    not_shown: Sequence[Run],
    remark: str | None = None,
    noise: float | None = None,
) -> str:
    """Return the whole page as text; ``remark`` says why there are no figures, ``noise`` is for the first sentence."""
    script = '"use strict";\n(() => {\n' + "\n".join(map(_static, _PARTS)) + "\n})();"
    # The policy allows this script alone and no connection: a mistake here could neither run nor fetch anything else.
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    parts = zip(tasks, specs, strict=True)
    body = "".join(_task(i, task, own, remark is None, len(tasks) > 1) for i, (task, own) in enumerate(parts))
    if not tasks:
        body = '<p class="notice">None of the folders holds a run that can be shown.</p>'
    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return Template(_static("page.html")).substitute(
        policy=policy,
        title=escape(title),
        style=theme_css() + _static("style.css"),
        lead=_lead(tasks, not_shown, noise),
        body=body + tables.not_shown(not_shown),
        footer=escape(f"Written by cosmos-lab on {made}. This page loads nothing from the network. {remark or ''}"),
        data=charts.embed(specs),
        script=script,
    )


def _static(name: str) -> str:
    return resources.files("cosmos_lab.report").joinpath("static", name).read_text(encoding="utf-8")


def _lead(tasks: Sequence[Task], not_shown: Sequence[Run], noise: float | None) -> str:
    """Return the sentences, the facts below them and links to the tasks."""
    several = len(tasks) > 1
    lines = ""
    for task in tasks:
        name = f"<b>{escape(task.title)}:</b> " if several else ""
        lines += f'<p class="lead">{name}{escape(words.summary(task, noise)).replace(" %", "&nbsp;%")}</p>'
    if several:
        lines += '<p class="lead">Runs of different models, data or recipes are not compared with each other.</p>'
    items = "".join(f"<li>{escape(fact)}</li>" for fact in _facts(tasks))
    if not_shown:
        items += f'<li><a href="#not-shown">{words.unreadable(not_shown)}</a></li>'
    links = "".join(f'<a href="#task-{index}">{escape(task.title)}</a>' for index, task in enumerate(tasks))
    navigation = f'<nav class="tasks" aria-label="Models">{links}</nav>' if several else ""
    return f'{lines}<ul class="facts">{items}</ul>{navigation}'


def _facts(tasks: Sequence[Task]) -> list[str]:
    """List the number of runs, what was trained, its number of parameters, and the GPUs."""
    runs = [run for task in tasks for group in task.groups for run in group.runs]
    facts = [f"{len(runs)} run{'' if len(runs) == 1 else 's'}"]
    if len(tasks) == 1:
        facts.append(tasks[0].title)
    if parameters := sorted({run.stats["parameters"] for run in runs if "parameters" in run.stats}):
        facts.append(" / ".join(map(format_count, parameters)) + " parameters")
    versions = [run.about.get("versions") for run in runs]
    return facts + sorted({v["gpu"] for v in versions if isinstance(v, Mapping) and isinstance(v.get("gpu"), str)})


class _Part(NamedTuple):
    """One part of a task on the page: its heading, a line beside it, and its HTML (none: the part is left out)."""

    head: str
    about: str
    content: str


def _task(index: int, task: Task, specs: Sequence[Section | HeatSection], drawn: bool, titled: bool) -> str:
    """Return the part of the page about one task, with a heading if there are several."""
    level = "h3" if titled else "h2"
    sections = "".join(
        f'<section><div class="head"><{level}>{head}</{level}><p>{about}</p></div>{content}</section>'
        for head, about, content in (_results(task), *_charts(task, specs, drawn), _all_settings(task))
        if content
    )
    heading = f"<h2>{escape(task.title)}</h2>" if titled else ""
    return f'<section class="task" id="task-{index}" data-task="{index}">{heading}{sections}</section>'


def _results(task: Task) -> _Part:
    """Return the table of the best group of each method, with the cautions below it."""
    cautions = "".join(f"<li>{escape(note)}</li>" for note in words.cautions(task))
    content = tables.table(task, task.ranking, f"Best of each {task.kind}", state=False) if task.ranking else ""
    content += f'<ul class="cautions">{cautions}</ul>' if cautions else ""
    return _Part("Results", f"Each {task.kind} at the best learning rate tried." if task.sweeps else "", content)


def _charts(task: Task, specs: Sequence[Section | HeatSection], drawn: bool) -> Iterator[_Part]:
    """Yield a place for the charts of each section, which the script draws, with notes on what is missing."""
    of = "COSMOS diagnostics" if any(group.optimizer.startswith("cosmos") for group in task.groups) else "Diagnostics"
    by_name = {spec.name: spec for spec in specs}
    for name, head in (("curves", "Loss curves"), ("sweep", "Learning-rate sweep"), ("heat", of)):
        spec = by_name.get(name)
        notes = words.missing_curves(task) if name == "curves" else []
        if name == "heat" and spec is None:
            notes = [words.missing_diagnostics(task)]
        hint = _HINTS.get(name, "") if spec else ""
        saved = _saved(spec) if drawn and isinstance(spec, Section) else ""
        content = "".join(f'<p class="notice">{escape(note)}</p>' for note in notes if note)
        content += f'<div data-chart="{name}"></div>' if spec else ""
        yield _Part(head, hint + saved, content)


def _all_settings(task: Task) -> _Part:
    """Return the table of all groups, if some of them are not in the table of results."""
    every = ""
    if len(task.ranking) != len(task.groups):
        every = tables.table(task, task.groups, "All settings", state=True)
    return _Part("All settings", f"★ marks the best rate of each {task.kind}.", every)


def _saved(spec: Section) -> str:
    """Return links to a section's figures, each with a word on what it shows."""
    links = []
    for chart in spec.charts:
        word, stem = chart.about.partition(";")[0] if len(spec.charts) > 1 else "", f"figures/{escape(chart.file)}"
        links.append(f'{word} <a href="{stem}.png" title="{stem}.png">PNG</a> <a href="{stem}.svg">SVG</a>')
    return "Saved: " + ", ".join(links)
