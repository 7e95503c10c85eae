"""The documentation's Python runs, its commands exist, and its links lead somewhere.

Blocks of a page run in order and in one namespace, which begins with `given()`. A comment on the line before a block
says why it does not run here: `<!-- not run here: needs a GPU -->`. Such a block is compiled. A ```text block right
after a Python block is the output of that block.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "_build" not in path.parts)
OTHERS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
# Pages with code that tests/integrations runs, in the frameworks themselves.
IN_FRAMEWORKS = {"frameworks", "fine-tuning"}
LANGUAGES = {"python", "bash", "text", "yaml"}
FENCE = re.compile(r"^(?:<!-- not run here: (.+?) -->\n)?^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FIRST_WORDS = {"cosmos-lab", "make", "python", "pip", "torchrun", "srun", "export"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, why it does not run here, and what is between it and the one before."""

    language: str
    text: str
    reason: str | None
    before: str
    line: int


@cache
def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, without directives of the site."""
    text, found, end = page.read_text(), [], 0
    for match in FENCE.finditer(text):
        line = text[: match.start(3)].count("\n")
        if not match[2].startswith("{"):
            found.append(Block(match[2], match[3], match[1], text[end : match.start()], line))
        end = match.end()
    return found


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/")


def ids(pages: list[Path]) -> list[str]:
    return [name_of(page) for page in pages]


with_python = [page for page in PAGES if any(block.language == "python" for block in blocks(page))]
with_bash = [page for page in PAGES if any(block.language == "bash" for block in blocks(page))]


# -- Python ------------------------------------------------------------------------------------------------------------


class SmallModel(nn.Module):
    """A language model with the names that a reader's model has."""

    def __init__(self, vocabulary: int = 64, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        """Return logits and, if labels are given, the loss."""
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x).relu()
        logits = self.lm_head(self.norm(x))
        loss = None if labels is None else nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(logits=logits, loss=loss)


def given() -> dict[str, Any]:
    """Return the names that pages take as given: a model and its batches."""
    torch.manual_seed(0)
    tokens = torch.arange(128).reshape(8, 16) % 64
    batches = [{"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}] * 4
    return {"model": SmallModel(), "batches": batches, "steps": len(batches), "__name__": "page"}


def runs(page: Path) -> bool:
    return name_of(page).split("/")[0] not in IN_FRAMEWORKS


@pytest.mark.parametrize("page", with_python, ids=ids(with_python))
def test_the_python_of_a_page_runs_and_prints_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    space, printed = given(), None
    for block in blocks(page):
        if block.language == "text" and printed is not None and not block.before.strip():
            assert block.text.strip() == printed.strip(), f"{page.name}, line {block.line}: the code prints this"
        printed = None
        if block.language != "python":
            continue
        code = compile("\n" * block.line + block.text, str(page), "exec")
        if block.reason is None and runs(page):
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(code, space)
            printed = output.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_every_block_names_its_language(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= LANGUAGES


# -- commands ----------------------------------------------------------------------------------------------------------


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each command in the bash blocks of a page, without comments and variables before it."""
    for block in blocks(page):
        if block.language != "bash":
            continue
        for line in re.sub(r"\\\n", " ", block.text).splitlines():
            words = shlex.split(line, comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                yield words[: words.index("|")] if "|" in words else words


class Parsed(Exception):
    """The flags of a command were read without an error."""


def check_lab(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the flags of a command of the lab, and stop before it does anything."""
    from cosmos_lab.cli import flags
    from cosmos_lab.cli.commands import COMMANDS

    parse = flags.parse

    def parse_and_stop(*given: Any, **options: Any) -> None:
        parse(*given, **options)
        raise Parsed

    if words[0] in ("--version", "recipes"):
        return
    assert words[0] in COMMANDS, f"cosmos-lab has no command {words[0]}"
    with monkeypatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(flags, "parse", parse_and_stop)
        COMMANDS[words[0]](words[1:])


def check_module(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check `python -m MODULE --flags`: the module exists and its source has the flags."""
    name, rest = words[0], words[1:]
    if name == "cosmos_lab":
        return check_lab(rest, monkeypatch)
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None, f"there is no module {name}"
    source = Path(found.origin).read_text()
    for word in rest:
        if word.startswith("--") and name.split(".")[0] in ("benchmarks", "tests"):
            flag = word.partition("=")[0]
            field = flag.removeprefix("--").replace("-", "_")
            assert flag in source or field in source, f"{name} has no flag {flag}"


def check(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check one command as far as it can be checked without running it."""
    first, rest = words[0], words[1:]
    assert first in FIRST_WORDS, f"{first}: add a check for this command, or mark the block as text"
    if first == "cosmos-lab":
        check_lab(rest, monkeypatch)
    elif first == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert {word for word in rest if "=" not in word and not word.startswith("-")} <= set(targets)
    elif first == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = {extra for word in rest for extra in "".join(re.findall(r"^\.\[(.*)\]$", word)).split(",") if extra}
        assert asked <= set(extras)
    elif "-m" in words:
        check_module(words[words.index("-m") + 1 :], monkeypatch)
    elif first in ("python", "torchrun"):
        (script, *_) = [word for word in rest if word.endswith(".py")]
        assert (ROOT / script).exists() or script in ("train.py", "my_script.py"), f"there is no {script}"


@pytest.mark.parametrize("page", with_bash, ids=ids(with_bash))
def test_the_commands_of_a_page_exist_with_their_flags(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tyro", reason="the commands need the extra lab")
    for words in commands(page):
        check(words, monkeypatch)


# -- links -------------------------------------------------------------------------------------------------------------


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    text = FENCE.sub("", page.read_text())
    included = [page.parent / path for path in re.findall(r"^```\{include\} (\S+)$", page.read_text(), re.MULTILINE)]
    found = {slug(title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}
    return found.union(*map(anchors, included))


def slug(title: str) -> str:
    """Return the anchor of a heading.

    >>> slug("Code that passes `model.parameters()`")
    'code-that-passes-modelparameters'
    """
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def links(page: Path) -> list[str]:
    """Return the links of a page to other files and to its own headings, images included."""
    text = re.sub(r"`[^`\n]+`", "", FENCE.sub("", page.read_text()))
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("page", PAGES + OTHERS, ids=ids(PAGES + OTHERS))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link} does not exist"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link} has no such heading"


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = set()
    for page in PAGES:
        for entries in re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            listed |= {(page.parent / f"{entry}.md").resolve() for entry in entries.split() if ":" not in entry}
    assert {page.resolve() for page in PAGES} - listed == {DOCS / "index.md"}


def test_the_reference_has_every_public_name() -> None:
    import cosmos_optim

    page = (DOCS / "api.md").read_text()
    shown = set(re.findall(r"^\.\. (?:auto|py:)\w+:: (\w+)$", page, re.MULTILINE))
    assert shown == set(cosmos_optim.__all__)


# -- numbers -----------------------------------------------------------------------------------------------------------


def column_of(title: str, model: str) -> dict[str, str]:
    """Return the cells of a model in the table of docs/memory.md with this title."""
    from benchmarks import memory

    lines = (DOCS / "memory.md").read_text().split(f"### {title}\n\n")[1].split("\n\n")[0].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines]
    return {row[0]: row[1 + list(memory.MODELS).index(model)] for row in rows[2:]}


@pytest.mark.parametrize(("gpus", "model"), [(1, "LLaMA-60M"), (1, "LLaMA-1B"), (8, "LLaMA-60M"), (64, "LLaMA-130M")])
def test_the_memory_tables_are_those_of_the_script(gpus: int, model: str) -> None:
    """Compare some columns, since all of them take half a minute."""
    from benchmarks import memory

    shown = column_of("State on one GPU" if gpus == 1 else f"State on {gpus} GPUs with FSDP2", model)
    assert shown.pop("weights and gradients in fp32")
    shape = memory.MODELS[model]
    assert shown == {form.name: memory.human(memory.state_bytes(shape, form, gpus)) for form in memory.FORMS}


def test_the_table_of_weights_gradients_and_state_is_that_of_the_script() -> None:
    from benchmarks import memory

    model = "LLaMA-1B"
    counted = {form.name: memory.human(memory.whole_bytes(memory.MODELS[model], form)) for form in memory.WHOLE}
    assert column_of(memory.WHOLE_TITLE, model) == counted
