"""The report's page and figures are complete, load nothing, and cannot be broken by the content of a run's files."""

from __future__ import annotations

import builtins
import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from cosmos_lab.formatting import format_bytes, format_count, format_digits, format_rate, format_seconds
from cosmos_lab.report import figures, write_report
from cosmos_lab.report.charts import embed, specify
from cosmos_lab.report.curves import MOST_POINTS, training, validation
from cosmos_lab.report.heat import MOST_COLUMNS, heat_map, kind_and_layer
from cosmos_lab.report.style import KNOWN, THEMES, looks
from cosmos_lab.results.reading import read_run
from tests.lab.report_runs import Tags, data_of, falling, make_run, task_of, write

# -- drawing ---------------------------------------------------------------------------------------------------------


def test_long_runs_are_thinned_and_keep_their_last_point(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", "cosmos", falling(2.5, points=1000), layers=1)
    (group,) = task_of(run).groups
    curve, (train,) = validation(group), training(group)
    assert curve is not None and len(curve.value) <= MOST_POINTS and len(train.value) <= MOST_POINTS
    assert curve.value[-1] == 2.5 and curve.tokens[-1] == 1e7
    assert statistics.fmean(train.value) == pytest.approx(statistics.fmean(falling(2.6, points=1000)), rel=0.01)
    found = heat_map(group.runs[0])
    assert found is not None and len(found.columns) <= MOST_COLUMNS and found.columns[-1].startswith("step 10000,")
    assert found.ends[-1] == "10 M tokens"


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("blocks.3.attn.q.weight", ("q", 3)),
        ("_orig_mod.blocks.0.mlp.down.weight", ("down", 0)),
        ("head.weight", ("head", None)),
        ("", ("", None)),
    ],
)
def test_kind_and_layer_follow_from_the_name_of_a_matrix(name: str, place: tuple[str, int | None]) -> None:
    assert kind_and_layer(name) == place


def test_heat_map_rows_are_layers_and_gaps_stay_empty(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", "cosmos", [3.0, 2.0], layers=11)
    extra = {"step": 30, "tokens": 30, "diagnostics": {"blocks.10.attn.q.weight": {"energy": None}, "odd": 3}}
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(extra) + "\n")
    found = heat_map(read_run(folder))
    assert found is not None
    assert [panel.kind for panel in found.panels] == ["q", "k", "v", "o", "gate", "up", "down"]
    assert found.panels[0].layers == list(range(11))
    assert found.panels[0].values["energy"][10] == [pytest.approx(0.6), pytest.approx(0.62), None]


def test_panels_of_kinds_that_the_lab_does_not_know_keep_the_order_of_the_log(tmp_path: Path) -> None:
    folder, kinds = make_run(tmp_path / "a", "cosmos", [3.0, 2.0], layers=0), ["wq", "wk", "wv", "wo"]
    values = {f"blocks.0.attn.{kind}.weight": {"energy": 0.5} for kind in kinds}
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps({"step": 30, "tokens": 30, "diagnostics": values}) + "\n")
    found = heat_map(read_run(folder))
    assert found is not None and [panel.kind for panel in found.panels] == kinds


def test_only_a_line_of_diverged_runs_ends_in_a_cross(tmp_path: Path) -> None:
    """A mean over the seeds that ended well must not look as if it had diverged, nor a run that recovered."""
    done = make_run(tmp_path / "a", "adam", falling(2.0))
    diverged = make_run(tmp_path / "b", "adam", [3.0, None], seed=1)
    recovered = make_run(tmp_path / "c", "adam", [3.0, None, 2.0])
    for runs, expected in (([done, diverged], "dot"), ([recovered], "dot"), ([diverged], "failed")):
        (line,) = [line for line in specify([task_of(*runs)])[0][0].lines if not line.faint]
        assert line.marks[len(line.y) - 1] == expected


# -- the page --------------------------------------------------------------------------------------------------------


def test_hostile_names_do_not_break_the_page(tmp_path: Path, no_figures: None) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
    config = {"note": evil, evil: evil}
    folder = make_run(tmp_path / "a", evil, falling(2.0), name=evil, model=evil, layers=1, **config)
    diagnostics = {"step": 99, "tokens": 99, "diagnostics": {evil: {"energy": 0.5}}}
    with (folder / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(diagnostics) + "\n")
    write(folder, "summary.json", {"status": evil})
    page = write_report([folder], tmp_path / "out", title=evil).page
    parsed = Tags(page.read_text())
    assert not parsed.open
    assert [tag for tag, _ in parsed.tags].count("script") == 2
    assert not any(tag == "img" or any(key.startswith("on") for key in attributes) for tag, attributes in parsed.tags)
    assert data_of(page)[0][0]["methods"][0]["name"] == evil


def test_names_that_are_not_valid_text_are_in_page_figures_and_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A name or path in another encoding reaches Python with half characters, which cannot be written."""
    run = make_run(tmp_path / "runs" / "a", "adam", falling(2.0), name="_caf\udce9 $x")
    (tmp_path / "runs" / "caf\udce9").mkdir()
    page = write_report([tmp_path / "runs"], tmp_path / "out").page
    assert "_caf? $x" in page.read_text() and "runs/caf?" in page.read_text()
    assert "runs/caf?" in caplog.text
    (specs,) = specify([task_of(run)])
    (axes,) = figures._lines(specs[0], specs[0].charts[0]).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [r" _caf? \$x"]


def test_extreme_numbers_do_not_stop_the_report(tmp_path: Path) -> None:
    for seed in (0, 1):
        make_run(tmp_path / "runs" / f"zero{seed}", "adam", [0.0, 0.0], seed=seed, validated=False, model="zero")
        make_run(tmp_path / "runs" / f"large{seed}", "adam", [1e300, -1e300], seed=seed, validated=False)
    make_run(tmp_path / "runs" / "zero", "adam", [0.0], lr=2e-3, validated=False, model="zero")
    for name, lr in (("rate", math.inf), ("nan", math.nan), ("negative", -1.0)):
        make_run(tmp_path / "runs" / name, "muon", falling(2.0), lr=lr, layers=1)
    odd = {
        "step": math.inf,
        "tokens": -math.inf,
        "time": math.nan,
        "loss": 1.0,
        "diagnostics": {"a": {"drift": -1e-300}},
    }
    with (tmp_path / "runs" / "rate" / "metrics.jsonl").open("a") as log:
        log.write(json.dumps(odd) + "\n" + json.dumps(odd | {"step": 0, "loss": 1e308}) + "\n")
    page = write_report([tmp_path / "runs"], tmp_path / "out").page
    assert not Tags(page.read_text()).open and len(data_of(page)) == 2


def test_the_page_loads_nothing(tmp_path: Path, no_figures: None) -> None:
    text = write_report([make_run(tmp_path / "a", "cosmos", falling(2.0), layers=1)], tmp_path / "out").page.read_text()
    for tag, attributes in Tags(text).tags:
        for key in ("src", "srcset", "action", "data", "poster"):
            assert key not in attributes, (tag, attributes)
        link = attributes.get("href")
        assert link is None or link.startswith(("#", "data:", "figures/")), link
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    addresses = set(re.findall(r"https?://[^\"'\s<>]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}  # the name of SVG, which no browser fetches


def test_the_table_has_every_number_and_marks_the_best(tmp_path: Path, no_figures: None) -> None:
    make_run(tmp_path / "runs" / "a", "adam", falling(2.0), lr=1e-3)
    make_run(tmp_path / "runs" / "b", "adam", falling(1.9), lr=2e-3)
    text = write_report([tmp_path / "runs"], tmp_path / "out").page.read_text()
    rows = re.findall(r'<tr class="([^"]*)">(.*?)</tr>', text)
    cells = {re.sub(r"<[^>]+>", " ", row): kind for kind, row in rows}
    (best,) = [row for row, kind in cells.items() if kind == "best"]
    for value in ("2e-3", "1.900", "6.686", "60 k", "3.00 s", "20 k", "3.50", "1.50 GiB", "2.00 MiB", "★"):
        assert value in best
    assert sum("★" in row for row in cells) == 1


def test_figures_are_written_as_png_and_svg(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "a", "adam", falling(2.0), lr=1e-3),
        make_run(tmp_path / "b", "adam", [2.0, None], lr=2e-3),
        make_run(tmp_path / "c", "cosmos", falling(1.9), lr=1e-3, layers=2, name="$x_$"),
    ]
    stale = tmp_path / "out" / "figures" / "loss-by-time-old.png"
    kept = tmp_path / "out" / "figures" / "mine.png"
    stale.parent.mkdir(parents=True)
    stale.touch()
    kept.touch()
    page = write_report(folders, tmp_path / "out").page
    stems = {"loss-by-tokens", "loss-by-time", "learning-rate-sweep"}
    names = {path.name for path in stale.parent.iterdir()}
    assert names == {f"{stem}.{ending}" for stem in stems for ending in ("png", "svg")} | {"mine.png"}
    links = {attributes.get("href") or "" for _, attributes in Tags(page.read_text()).tags}
    for stem in stems:
        assert (stale.parent / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
        assert "</svg>" in (stale.parent / f"{stem}.svg").read_text()
        assert {f"figures/{stem}.png", f"figures/{stem}.svg"} <= links


def test_the_legend_of_a_figure_has_the_marks_that_its_lines_have(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, name, falling(2.0)) for name in ("cosmos", "adam")]
    diverged = make_run(tmp_path / "muon", "muon", [3.0, *[2.9] * 40, None])  # too many points to mark, and a cross
    (specs,) = specify([task_of(*runs, diverged)])
    (axes,) = figures._lines(specs[0], specs[0].charts[0]).axes
    legend = {line.get_label(): line.get_marker() for line in axes.get_legend().get_lines()}
    assert legend == {"cosmos 1e-3": "o", "adam 1e-3": "s", "muon 1e-3": "None"}


def test_the_page_and_the_figures_draw_the_same_specifications(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("cosmos_lab.report._figures", lambda specs, folder: drawn.append(specs))
    folders = [make_run(tmp_path / str(lr), "cosmos", falling(2.0), lr=lr, layers=2) for lr in (1e-3, 2e-3)]
    page = write_report(folders, tmp_path / "out").page
    assert json.loads(embed(drawn[0])) == data_of(page)
    assert [section.name for section in drawn[0][0]] == ["curves", "sweep", "heat"]


def test_without_matplotlib_the_page_is_written_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "cosmos_lab.report.figures":  # its first line that matters imports matplotlib
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    page = write_report([make_run(tmp_path / "a", "adam", falling(2.0))], tmp_path / "out").page
    assert "pip install matplotlib" in caplog.text
    assert "pip install matplotlib" in page.read_text()
    assert not (tmp_path / "out" / "figures").exists()


def test_a_page_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, no_figures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "a", "adam", falling(2.0))
    page = write_report([run], tmp_path / "out").page
    before = page.read_bytes()

    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match=r"index\.html.*no space left"):
        write_report([run], tmp_path / "out")
    assert page.read_bytes() == before
    assert [path.name for path in page.parent.iterdir()] == ["index.html"]


# -- colours and numbers ---------------------------------------------------------------------------------------------

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
SIGHT = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
LEAST_DISTANCE = 12  # CIE76; about five times what two neighbouring patches need to be told apart
LEAST_CONTRAST = 3  # WCAG 2.1, 1.4.11: graphical objects


def linear(colour: str) -> list[float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def times(matrix: Any, vector: list[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


def lab(colour: list[float]) -> list[float]:
    to_xyz = ((0.4339, 0.3762, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8728))  # relative to white
    xyz = times(to_xyz, [min(1.0, max(0.0, part)) for part in colour])
    x, y, z = (part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in xyz)
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_differ_for_every_kind_of_colour_vision(scheme: str) -> None:
    colours = [getattr(look, scheme) for look in KNOWN.values()]
    for sight in SIGHT.values():
        seen = [lab(times(sight, linear(colour))) for colour in colours]
        for index, one in enumerate(seen):
            assert all(math.dist(one, other) > LEAST_DISTANCE for other in seen[:index])
    ground = linear(THEMES[scheme]["bg"])
    for colour in colours:
        darker, brighter = sorted(times([(0.2126, 0.7152, 0.0722)], part)[0] for part in (linear(colour), ground))
        assert (brighter + 0.05) / (darker + 0.05) >= LEAST_CONTRAST


def test_drawing_styles_are_stable_and_unknown_optimizers_get_unused_ones() -> None:
    assert looks(["cosmos"])[0] == KNOWN["cosmos"]
    first, second, known = looks(["mine", "yours", "cosmos"])
    assert len({first.light, second.light, known.light}) == 3
    for pair in (["cosmos", "cosmos"], ["cosmos", "cosmos-paper"]):
        one, other = looks(pair)
        assert one.light == other.light and one.dash != other.dash


def test_numbers_have_significant_digits_and_units() -> None:
    rates = (1e-3, 5e-4, 0.1, 2.5e-05, 0.0, None)
    assert [format_rate(x) for x in rates] == ["1e-3", "5e-4", "0.1", "2.5e-5", "0", "?"]
    assert [format_digits(x) for x in (3.14159, 123456.0, 0.00012346, math.nan, 0.0)] == [
        "3.142", "123,456", "0.0001235", "–", "0"
    ]  # fmt: skip
    assert [format_count(x) for x in (999.0, 65536, 3e8, 1.31e9, None)] == ["999", "65.5 k", "300 M", "1.31 B", "–"]
    assert [format_seconds(x) for x in (41.23, 1364, 7300, 4e5)] == ["41.2 s", "22.7 min", "2.03 h", "4.63 d"]
    assert [format_bytes(x) for x in (12, 2**20, 1.5 * 2**30)] == ["12 B", "1.00 MiB", "1.50 GiB"]
