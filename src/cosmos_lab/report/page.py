"""The page: template, style, script and data put together into one file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from importlib import resources
from string import Template

from cosmos_lab.display import count
from cosmos_lab.report import payload, tables, words
from cosmos_lab.report.style import theme_css
from cosmos_lab.results.ranking import Task
from cosmos_lab.results.reading import DIAGNOSTICS, Run

_PARTS = ("1_base.js", "2_lines.js", "3_sweep.js", "4_heat.js", "5_main.js")


def render(
    title: str,
    tasks: Sequence[Task],
    misfits: Sequence[Run],
    figures: Mapping[str, str],
    remark: str = "",
) -> str:
    """The whole page as text.

    Args:
        figures: names of the figures that were written, each with its path relative to the page, less the ending.
        remark: a sentence on the figures, where they could not be written.
    """
    script = '"use strict";\n(() => {\n' + "\n".join(map(_static, _PARTS)) + "\n})();"
    # The policy allows this script alone and no connection: a mistake here could neither run nor fetch anything else.
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    body = "".join(_task(index, task, figures, len(tasks) > 1) for index, task in enumerate(tasks))
    if not tasks:
        body = '<p class="notice">None of the folders holds a run that can be shown.</p>'
    return Template(_static("page.html")).substitute(
        policy=policy,
        title=escape(title),
        style=theme_css() + _static("style.css"),
        lead=_lead(tasks, misfits),
        body=body + tables.misfits(misfits),
        footer=_footer(remark),
        data=payload.embed(tasks),
        script=script,
    )


def _static(name: str) -> str:
    return resources.files("cosmos_lab.report").joinpath("static", name).read_text(encoding="utf-8")


def _lead(tasks: Sequence[Task], misfits: Sequence[Run]) -> str:
    lines = []
    for task in tasks:
        name = f"<b>{escape(task.title)}:</b> " if len(tasks) > 1 else ""
        lines.append(f'<p class="lead">{name}{escape(words.summary(task)).replace(" %", "&nbsp;%")}</p>')
    runs = [run for task in tasks for group in task.groups for run in group.runs]
    parameters = sorted({run.stats["parameters"] for run in runs if "parameters" in run.stats})
    facts = [f"{len(runs)} run{'' if len(runs) == 1 else 's'}"]
    if len(tasks) == 1:
        facts.append(tasks[0].title)
    if parameters:
        facts.append(" / ".join(map(count, parameters)) + " parameters")
    facts += sorted({run.config["versions"]["gpu"] for run in runs if _has_gpu(run)})
    listed = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    if misfits:
        listed += f'<li><a href="#not-shown">{words.unreadable(misfits)}</a></li>'
    return "".join(lines) + f'<ul class="facts">{listed}</ul>' + _navigation(tasks)


def _has_gpu(run: Run) -> bool:
    versions = run.config.get("versions")
    return isinstance(versions, Mapping) and isinstance(versions.get("gpu"), str)


def _navigation(tasks: Sequence[Task]) -> str:
    if len(tasks) < 2:
        return ""
    links = "".join(f'<a href="#task-{index}">{escape(task.title)}</a>' for index, task in enumerate(tasks))
    return f'<nav class="tasks" aria-label="Models">{links}</nav>'


def _task(index: int, task: Task, figures: Mapping[str, str], titled: bool) -> str:
    """The part of the page about one task; under a heading of its own where there are several."""
    cautions = words.cautions(task)
    notes = f'<ul class="cautions">{"".join(f"<li>{escape(note)}</li>" for note in cautions)}</ul>' if cautions else ""
    about = "Each optimizer at the best learning rate tried." if task.sweeps else ""
    loss = _saved(figures, {f"{index}-loss-tokens": "by tokens", f"{index}-loss-time": "by time"})
    parts = [
        _Part("Results", about, (tables.best_table(task) if task.ranking else "") + notes),
        _Part("Loss curves", f"Drag across a chart to zoom. {loss}", _place("curves")),
    ]
    if task.sweeps:
        parts.append(_Part("Learning-rate sweep", _saved(figures, {f"{index}-sweep": ""}), _place("sweep")))
    if payload.heats(task, 2):
        names = {f"{index}-heat-{metric}": metric.replace("_", " ") for metric in DIAGNOSTICS}
        parts.append(_Part("COSMOS diagnostics", _saved(figures, names), _place("heat")))
    if len(task.ranking) != len(task.groups):
        parts.append(_Part("All settings", "★ marks the best of each optimizer.", tables.full_table(task)))
    parts.append(_Part("Configurations", "What differs between runs is coloured.", tables.configurations(task)))
    heading = f"<h2>{escape(task.title)}</h2>" if titled else ""
    sections = "".join(part.html("h3" if titled else "h2") for part in parts if part.content)
    return f'<section class="task" id="task-{index}" data-task="{index}">{heading}{sections}</section>'


@dataclass(frozen=True)
class _Part:
    """A section: its title, a line beside it, and what stands below; the last two are HTML."""

    title: str
    about: str
    content: str

    def html(self, level: str) -> str:
        head = f"<{level}>{escape(self.title)}</{level}><p>{self.about}</p>"
        return f'<section><div class="head">{head}</div>{self.content}</section>'


def _place(chart: str) -> str:
    """Where the script draws a chart."""
    return f'<div data-chart="{chart}"></div>'


def _saved(figures: Mapping[str, str], names: Mapping[str, str]) -> str:
    """Links to figures as files, each with a word on what it shows."""
    links = []
    for key, word in names.items():
        if key in figures:
            stem = escape(figures[key])
            links.append(f'{word} <a href="{stem}.png" title="{stem}.png">PNG</a> <a href="{stem}.svg">SVG</a>')
    return "Saved: " + ", ".join(links) if links else ""


def _footer(remark: str) -> str:
    made = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    note = f" {escape(remark)}" if remark else ""
    return f"Written by cosmos-lab report on {made}. This page loads nothing from the network.{note}"
