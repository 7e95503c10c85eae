"""What a release needs: metadata that agree, and files that the sources of a release name. `make dist` builds one."""

import re
import tomllib
from pathlib import Path

import cosmos_optim

ROOT = Path(__file__).resolve().parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = CONFIG["project"]
SDIST = CONFIG["tool"]["hatch"]["build"]["targets"]["sdist"]


def test_the_version_is_the_same_in_the_package_the_project_and_the_citation() -> None:
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert cosmos_optim.__version__ == PROJECT["version"] == cited[1]


def test_the_citation_names_the_authors_of_the_paper_as_the_readme_does() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    authors = [f"{family}, {given}" for family, given in re.findall(r"family-names: (\w+), given-names: (\w+)", text)]
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert len(authors) == 8
    assert " and ".join(authors) in readme
    assert "arxiv.org/abs/2502.17410" in text and "arxiv.org/abs/2502.17410" in readme


def test_every_file_of_the_source_release_exists_and_results_are_left_out() -> None:
    assert [path for path in SDIST["include"] if not (ROOT / path.lstrip("/")).exists()] == []
    assert "/results" not in SDIST["include"] and "/benchmarks/results" in SDIST["exclude"]
    assert all((ROOT / name).is_file() for name in (PROJECT["readme"], *PROJECT["license-files"]))


def test_the_packages_of_the_wheel_are_marked_as_typed() -> None:
    packages = CONFIG["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert [name for name in packages if not (ROOT / name / "py.typed").is_file()] == []
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_the_classifiers_begin_at_the_oldest_python_and_name_the_licence_only_once() -> None:
    versions = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert f">={versions[0]}" == PROJECT["requires-python"]
    assert not any(c.startswith("License ::") for c in PROJECT["classifiers"]), "PEP 639 has `license` instead"


def test_no_message_installs_from_an_index() -> None:
    """The project is not on one: messages name the package that is missing, or the extra of the sources."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]
    assert [path.name for path in files if re.search(r"pip install .?cosmos-optim", path.read_text())] == []


def test_no_file_has_the_marks_of_an_unfinished_merge() -> None:
    """In a docstring they break nothing, so only their text shows them."""
    folders = [ROOT / name for name in ("src", "tests", "docs", "examples", "benchmarks")]
    files = [
        *ROOT.glob("*.md"),
        *(path for folder in folders for kind in ("py", "md") for path in folder.rglob(f"*.{kind}")),
    ]
    marked = [path for path in files if re.search(r"^(<{7}|>{7}) ", path.read_text(), re.MULTILINE)]
    assert [str(path.relative_to(ROOT)) for path in marked] == []
