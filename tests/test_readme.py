"""The README's Python blocks run unchanged and in order; its plan and links, and the table of options, are true."""

import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch

from cosmos_optim import Cosmos

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
OPTIONS = (ROOT / "docs" / "options.md").read_text()
LEARNED = 0.75  # ten steps reach 0.66 of the first loss, on any seed tried
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of one language, padded so that tracebacks show the README's line numbers."""
    found = [(m.start(2), m[2]) for m in FENCE.finditer(README) if m[1] == language]
    return ["\n" * README[:start].count("\n") + code for start, code in found]


def test_the_readme_code_runs_and_its_loss_falls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run all blocks in one namespace, like a reader who pastes them one after the other."""
    monkeypatch.chdir(tmp_path)
    first, *rest = blocks("python")
    space: dict[str, object] = {}
    exec(compile(first, "README.md", "exec"), space)
    shown = capsys.readouterr().out.strip()
    assert shown == blocks("text")[0].strip(), "the plan in the README differs from the one that its code prints"
    loss = space["loss"]
    assert isinstance(loss, torch.Tensor)
    assert loss.item() < LEARNED * math.log(256)
    for code in rest:
        exec(compile(code, "README.md", "exec"), space)


def test_the_first_screen_says_what_it_is_and_how_to_start() -> None:
    """Look for the install line, the paper, the licence, the picture and the snippet before the first heading."""
    first = README.split("\n## ")[0]
    for needed in ("pip install", "arxiv.org", "Apache-2.0", "docs/figures/evidence.svg", "import Cosmos, plan"):
        assert needed in first


def test_the_readme_has_at_most_150_lines() -> None:
    assert README.count("\n") <= 150


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!https:)([^)#]+?)(?:#[^)]*)?\)", README))))
def test_every_linked_file_exists(link: str) -> None:
    """Check each file that the README links to."""
    assert (ROOT / link).exists()


def test_the_option_table_shows_the_true_defaults() -> None:
    """Compare the table of options with the optimizer's parameter group."""
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    own, adam = Cosmos([{"params": [matrix]}, {"params": [vector], "rule": "adam"}]).param_groups
    group = adam | own | {"two_sided": False}
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \| (.+?) \| .* \|$", OPTIONS.split("## Options")[1].split("\n## ")[0], re.M)
    shown = {}
    for names, defaults in rows:
        values = re.findall(r"`([^`]+)`", defaults)
        shown |= dict(zip(re.findall(r"`([a-z_]+)`", names), values, strict=True))
    assert len(shown) >= 15
    assert {name: eval(value) for name, value in shown.items()} == {name: group[name] for name in shown}


@pytest.mark.parametrize("name", ["cosmos", "adamw"])
def test_the_quickstart_example_learns_and_prints_the_plan_of_cosmos_only(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run `examples/quickstart.py` with fewer steps."""
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "examples" / "quickstart.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "STEPS", 20)
    assert example.main(name) < math.log(len(set(Path(example.__file__).read_text())))
    shown = capsys.readouterr().out
    assert ("total:" in shown) == (name == "cosmos") and "hint" not in shown  # the example gives both rates
