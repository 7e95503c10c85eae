"""Settings of Sphinx for this documentation: `make docs` builds it.

Docstrings here are plain text with a few habits: `name` for code, indented formulas, "Args:" and "Options ...:" with
one line for each argument. `to_rst` turns these habits into the markup that Sphinx reads.
"""

from __future__ import annotations

import inspect
import re
import warnings
from typing import Any

warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch looks for it; nothing here needs it

from cosmos_optim import __version__  # noqa: E402
from cosmos_optim.optimizer import MatrixOptimizer  # noqa: E402

project = "cosmos-optim"
author = "the authors of cosmos-optim"
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
suppress_warnings = ["config.cache"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
highlight_language = "none"  # formulas in docstrings; other blocks name their language

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_mock_imports = ["torchtitan"]
autodoc_preserve_defaults = True
add_module_names = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"cosmos-optim {release}"
html_show_sphinx = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
linkcheck_timeout = 10
linkcheck_retries = 1

SECTION = re.compile(r"^(\s*)(Args|Returns|Raises|Options [^:]*|Options):$")


def inline(line: str) -> str:
    """Return a line with `code` as ``code``, and with bars that are not markup."""
    if line.lstrip().startswith(">>>"):
        return line
    parts = re.split(r"(`[^`]+`)", line)
    return "".join(f"`{part}`" if part.startswith("`") else part.replace("|", r"\|") for part in parts)


def to_rst(lines: list[str]) -> list[str]:
    """Return the lines of a docstring as reStructuredText with sections that napoleon knows."""
    found: list[str] = []
    in_section = in_formula = False
    for line in lines:
        if line.strip() and not line.startswith(" "):
            in_section = in_formula = False
        text = line if in_formula else inline(line)
        heading = SECTION.match(text)
        if heading:
            in_section, in_formula = True, False
            if heading[2].startswith("Options"):
                found += [f"{heading[1]}{heading[2]}:", "", f"{heading[1]}Keyword Args:"]
            else:
                found.append(text)
            continue
        starts_block = line.startswith("    ") and found and not found[-1].strip()
        if starts_block and not in_section and not in_formula:
            in_formula, text = True, line
            found += ["::", ""]
        if in_section and found and found[-1].rstrip().endswith(",") and ":" not in found[-1]:
            found[-1] = f"{found[-1].rstrip()} {text.strip()}"  # names of arguments that take two lines
            continue
        found.append(text)
    return found


def rewrite(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring in place. Sphinx calls this for each, before napoleon."""
    lines[:] = to_rst(lines)


def signature(app: Any, what: str, name: str, obj: Any, *rest: Any) -> tuple[str, str] | None:
    """Return the arguments of an optimizer's constructor. Sphinx would show those of `__new__`, which are any."""
    if not (what == "class" and issubclass(obj, MatrixOptimizer)):
        return None
    found = inspect.signature(obj.__init__)
    plain = [p.replace(annotation=p.empty) for p in found.parameters.values() if p.name != "self"]
    return str(inspect.Signature(plain)), ""


def setup(app: Any) -> None:
    """Connect the functions above to Sphinx."""
    app.connect("autodoc-process-signature", signature)
    app.connect("autodoc-process-docstring", rewrite, priority=100)
