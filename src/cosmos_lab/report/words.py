"""Say in one sentence what the runs showed, and list the cautions that a reader of that sentence needs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from cosmos_lab.formatting import format_count, format_digits, format_rate
from cosmos_lab.report.curves import finite_points
from cosmos_lab.results.ranking import Group, Task, at_edge
from cosmos_lab.results.reading import METRICS, Run, Status

_SAME_LENGTH = 0.01  # lengths that differ by a smaller share are equal: the last batch may be cut
_FEW_POINTS = 5  # a line with fewer points has no shape


def summary(task: Task, noise: float | None = None) -> str:
    """Say which method ended lowest and by how much, unless the gap may be chance.

    ``noise`` is the standard deviation of the final loss over seeds, if it is known: it judges runs of one seed each.
    """
    ranking = task.ranking
    if not ranking:
        return _so_far(task)
    if lengths := unequal(task):
        return f"These runs are not ranked, because {lengths}: compare runs of the same length."
    if len(ranking) == 1:
        return f"{_at_rate(ranking[0])} ended at a {_result(task)} of {_value(task, ranking[0])}."
    if any(len(group.counted) > 1 for group in ranking):
        noise = None  # these seeds tell more
    field = f"Of {len(ranking)} {task.kind}s" + (", each at the best rate tried" if task.sweeps else "")
    if noise is not None and (near := _ties([task.score(group) for group in ranking], noise)) > 1:
        return f"{field}, {_tied(task, ranking[:near], ranking[near:])}."
    first, *rivals = _named(ranking)
    doubt = _doubt(task, first, rivals) if noise is None else ""
    return f"{field}, {_lead(task, first, rivals)}{doubt}."


def cautions(task: Task) -> list[str]:
    """List unfinished and unreadable runs, best rates at the edge of the sweep, and single seeds."""
    notes = []
    if states := Counter(run.status for group in task.groups for run in group.runs if run.status != Status.DONE):
        total = sum(len(group.runs) for group in task.groups)
        notes.append(f"Of {total} runs, " + ", ".join(f"{n} {state}" for state, n in sorted(states.items())) + ".")
    if edges := [f"{group.method} ({edge})" for group in task.ranking if (edge := at_edge(group, task.groups))]:
        notes.append(f"The best rate is at the edge of the rates tried for {', '.join(edges)}.")
    if {len(group.counted) for group in task.ranking} == {1} and len(task.ranking) > 1:
        notes.append("One seed each: small differences may be chance.")
    runs = [run for group in task.groups for run in group.runs]
    notes += [f"{run.name}: {note}." for run in runs for note in run.notes if not note.startswith(METRICS)]
    if not task.validated:
        notes.append("No run has a validation loss, so training losses are compared.")
    return notes


def unequal(task: Task) -> str:
    """Say in what the ranked runs differ in length, or return "": a longer run ends lower with any optimizer."""
    for what, key, form in (("tokens", "tokens", format_count), ("steps", "steps", lambda x: f"{x:,.0f}")):
        found = [spread.mean for group in task.ranking if (spread := group.stat(key))]
        if found and max(found) - min(found) > _SAME_LENGTH * max(found):
            return f"they trained on between {form(min(found))} and {form(max(found))} {what}"
    return ""


def missing_curves(task: Task) -> list[str]:
    """Say which runs have no curve, or a part of one, and why: for the place in which a reader looks for it."""
    notes = []
    for group in task.groups:
        for run in group.runs:
            problems = [note for note in run.notes if note.startswith(METRICS)]
            drawn = finite_points((*run.validation, *run.train))
            if problems or not drawn:
                why = "; ".join(problems) or f"{METRICS} has no finite loss"
                notes.append(f"{'' if drawn else 'No curve for '}{group.title} (folder {run.folder.name}): {why}.")
    few = [len(run.validation) for group in task.groups if group.shown for run in group.runs if run.validation]
    if few and max(few) < _FEW_POINTS:
        notes.append(
            f"Only {max(few)} validation{'s' * (max(few) > 1)} a run, too few to show a curve: "
            "set --val-every to validate more often."
        )
    return notes


def missing_diagnostics(task: Task) -> str:
    """Say why there is no heat map, if there could be one."""
    if not any(group.optimizer.startswith("cosmos") for group in task.groups):
        return ""
    return "No run of COSMOS has logged diagnostics: --diagnostics-every 100 logs them every 100 steps."


def unreadable(runs: Sequence[Run]) -> str:
    """Say how many folders hold no run that can be shown."""
    return "One folder could not be shown." if len(runs) == 1 else f"{len(runs)} folders could not be shown."


def reason(run: Run) -> str:
    """Say why a folder cannot be shown."""
    return "; ".join(run.notes) or "config.json names no optimizer"


def _so_far(task: Task) -> str:
    """Say which run leads while none is ranked, or why none leads."""
    runs = [run for group in task.groups for run in group.runs]
    started = [group for group in task.groups if math.isfinite(task.score(group))]
    if started:
        why = "No setting can be ranked yet" if any(run.finished for run in runs) else "No run has finished"
        lead = min(started, key=task.score)
        return f"{why}; the lowest {_result(task)} so far is {_value(task, lead)}, by {_at_rate(lead)}."
    if any(finite_points((*run.validation, *run.train)) for run in runs):
        diverged = all(group.status == Status.DIVERGED for group in task.groups)
        loss = "" if diverged else f" or logged no {'validation' if task.validated else 'training'} loss"
        return f"No setting can be ranked: in each of them, a run diverged{loss}."
    return "No run has logged a finite loss yet."


def _named(ranking: Sequence[Group]) -> list[Group]:
    """Return the groups that the sentence names: the first, the second, and AdamW's if it is neither."""
    first, second, *others = ranking
    adam = [group for group in others if group.optimizer == "adam" != second.optimizer]
    return [first, second, *adam[:1]]


def _lead(task: Task, first: Group, rivals: Sequence[Group]) -> str:
    """Say by how much the first is below its rivals."""
    gaps = " and ".join(_gap(task, first, rival) for rival in rivals)
    return f"{_who(first)} ended lowest, at a {_result(task)} of {_value(task, first)}: {gaps}"


def _result(task: Task) -> str:
    """Name the number that the sentences give."""
    return "validation perplexity" if task.validated else "training loss"


def _ties(losses: Sequence[float], noise: float) -> int:
    """Return how many of the losses, lowest first and one seed each, cannot be told from the lowest."""
    return sum(loss - losses[0] <= _chance_gap(noise) for loss in losses)


def _chance_gap(noise: float) -> float:
    """Return the largest gap that may be chance: two deviations of the difference of two runs."""
    return 2 * math.sqrt(2) * noise


def _listed(names: Sequence[str]) -> str:
    """Join names with commas, and "and" before the last."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _value(task: Task, group: Group) -> str:
    spread = group.stat(task.result_key)
    if spread is None:
        return "–"
    return format_digits(spread.mean) + (f" ± {format_digits(spread.deviation, 2)}" if spread.n > 1 else "")


def _at_rate(group: Group) -> str:
    return f"{_who(group)} at learning rate {format_rate(group.lr)}"


def _who(group: Group) -> str:
    """Return the method, with the user's name for the run if there is one."""
    return f"{group.method} ({group.name})" if group.name else group.method


def _gap(task: Task, first: Group, rival: Group) -> str:
    """Say by what share the first is below a rival, if the means of the number shown have the order of the ranking."""
    ours, theirs = first.stat(task.result_key), rival.stat(task.result_key)
    if ours is None or theirs is None or theirs.mean == 0 or ours.mean > theirs.mean:
        return f"ahead of {_who(rival)}"
    share = 100 * (1 - ours.mean / theirs.mean)
    return f"{format_digits(share, 2)} % below {_who(rival)} ({format_digits(theirs.mean)})"


def _tied(task: Task, near: Sequence[Group], far: Sequence[Group]) -> str:
    """Say that the nearest groups cannot be told apart, and which ended higher."""
    names, ends = _listed([_who(group) for group in near]), f"{_value(task, near[0])} to {_value(task, near[-1])}"
    behind = f"; {_listed([_who(group) for group in far])} ended higher" if far else ""
    return f"{names} cannot be told apart: {_result(task)} {ends}, a gap that seeds alone can make{behind}"


def _doubt(task: Task, first: Group, rivals: Sequence[Group]) -> str:
    """Say which gaps may be chance, and why."""
    if single := [_who(group) for group in (first, *rivals) if len(group.counted) == 1]:
        whose = "each" if len(single) == 1 + len(rivals) else f"of {_listed(single)}"
        return f"; one seed {whose}, so small differences may be chance"
    small = [rival for rival in rivals if _overlap(task, first, rival)]
    if not small:
        return ""
    if len(rivals) == 1:
        return ", a gap no larger than the spread over seeds"
    if len(small) > 1:
        return ", gaps no larger than the spread over seeds"
    return f"; the gap to {_who(small[0])} is no larger than the spread over seeds"


def _overlap(task: Task, first: Group, second: Group) -> bool:
    ours, theirs = first.stat(task.score_key), second.stat(task.score_key)
    if ours is None or theirs is None or ours.n < 2 or theirs.n < 2:
        return False
    return theirs.mean - ours.mean <= math.hypot(ours.deviation, theirs.deviation)
