"""The order of the layers: a file imports only from its own layer and those below, as its source shows."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"

# Layers of cosmos_optim, from the bottom up: a file imports from its own layer and from those before it.
ORDER = (
    "linalg",
    "rules",
    "engine",
    "cuda",
    "sharding",
    "routing",
    "hyperparameters",
    "saved_groups",
    "group_checks",
    "checkpoint",
    "optimizer",
    "optimizers",
    "plan_table",
    "learning_rates",
    "",  # the package itself
    "integrations",
)
# The code that starts and joins processes; everything else gets the layout from the parameters.
MAY_DISTRIBUTE = ("cosmos_optim.sharding", "cosmos_lab.run.distributed", "cosmos_lab.run.sharded_files")
MAY_TRITON = ("cosmos_optim.cuda",)
MAY_PICKLE = ("cosmos_lab.run.sharded_files",)  # which refuses what it does not know
# Functions of torch that take the default device and dtype unless told otherwise.
FACTORIES = (
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint",
    "randn", "randperm", "scalar_tensor", "tensor", "zeros",
)  # fmt: skip
# What would make a model depend on how it is trained.
NOT_IN_MODELS = ("cosmos_optim", "torch.optim", "cosmos_lab.optimizers", "cosmos_lab.run.train", "cosmos_lab.recipes")


def name_of(file: Path) -> str:
    """`src/a/b/__init__.py` and `src/a/b.py` are the module `a.b`."""
    parts = file.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {name_of(file): file for file in sorted(SRC.rglob("*.py"))}


def within(module: str, names: tuple[str, ...]) -> bool:
    """Return whether a dotted name is one of these or below one."""
    return any(module == name or module.startswith(name + ".") for name in names)


@cache
def tree_of(module: str) -> ast.Module:
    """Return the parsed source of a module of ours."""
    return ast.parse(FILES[module].read_text(), str(FILES[module]))


def without_types(tree: ast.Module) -> ast.Module:
    """Return the tree without its `if TYPE_CHECKING:` blocks, which never run."""
    body = [n for n in tree.body if not (isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING"))]
    return ast.Module(body, tree.type_ignores)


def imports(tree: ast.Module, module: str, is_package: bool = False) -> Iterator[str]:
    """Dotted names of all that a source imports, at any depth; `from a import b` yields `a.b`."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def attributes(tree: ast.Module) -> Iterator[str]:
    """Dotted names that a source spells out, such as `torch.distributed.all_reduce`."""
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name):
            yield ".".join([node.id, *reversed(parts)])


def imports_of(module: str, *, runtime: bool = False) -> set[str]:
    """Return what a module of ours imports, or only what it imports when it runs."""
    tree = without_types(tree_of(module)) if runtime else tree_of(module)
    return set(imports(tree, module, FILES[module].name == "__init__.py"))


def names_of(module: str) -> set[str]:
    """Return what a module of ours imports or spells out."""
    return imports_of(module) | set(attributes(tree_of(module)))


def owner(name: str) -> str:
    """Return the module that an imported name comes from: `cosmos_optim.rules.cosmos.RULE` -> `...rules.cosmos`."""
    while name not in FILES:
        name = name.rpartition(".")[0]
    return name


def layer(module: str) -> int:
    """Return the position of a module's layer in `ORDER`."""
    first = module.removeprefix("cosmos_optim").removeprefix(".").partition(".")[0]
    assert first in ORDER, f"{module} is in no layer: add {first!r} to ORDER in {__file__}"
    return ORDER.index(first)


def modules(package: str) -> list[str]:
    """Our modules below a package; empty ones need no place."""
    return [m for m, file in FILES.items() if within(m, (package,)) and file.read_text().strip()]


def test_the_modules_of_both_packages_are_found() -> None:
    """Otherwise the tests below would check nothing."""
    assert {"cosmos_optim", "cosmos_optim.rules.cosmos", "cosmos_optim.linalg.algebra", "cosmos_lab"} <= set(FILES)


@pytest.mark.parametrize("module", modules("cosmos_optim"))
def test_a_file_imports_only_from_its_own_layer_and_those_below(module: str) -> None:
    """Linear algebra, rules, engine, GPU, shards, optimizers: never upwards; imports for type checking do not count."""
    ours = {owner(name) for name in imports_of(module, runtime=True) if within(name, ("cosmos_optim",))} - {module}
    ours = {name for name in ours if FILES[name].read_text().strip()}
    wrong = sorted(name for name in ours if layer(name) > layer(module))
    assert not wrong, f"{module} imports {wrong}, which come after it in {ORDER}"


def test_no_two_files_of_the_library_share_a_name() -> None:
    """A newcomer who reads a name knows which file is meant."""
    files = [file for module, file in FILES.items() if within(module, ("cosmos_optim",))]
    stems = [file.stem for file in files if file.name != "__init__.py"]
    assert sorted(stems) == sorted(set(stems)), sorted(stem for stem in set(stems) if stems.count(stem) > 1)


def test_no_two_public_classes_of_the_library_share_a_name() -> None:
    """One name, one meaning."""
    names = [
        node.name
        for module in modules("cosmos_optim")
        for node in tree_of(module).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert sorted(names) == sorted(set(names)), sorted(name for name in set(names) if names.count(name) > 1)


def test_a_step_on_a_cpu_runs_the_files_that_contributing_md_lists() -> None:
    """No other one, so none for CUDA, Triton or torch.distributed; optimizers.py only has the class."""
    import torch

    from cosmos_optim import Cosmos

    model = torch.nn.Sequential(torch.nn.Embedding(9, 8), torch.nn.Linear(8, 12), torch.nn.LayerNorm(12))
    opt = Cosmos(model, rank=4)
    visited: set[str] = set()

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call" and str(SRC / "cosmos_optim") in frame.f_code.co_filename:
            visited.add(str(Path(frame.f_code.co_filename).relative_to(SRC / "cosmos_optim")))

    for step in range(2):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        sys.setprofile(note if step else None)
        try:
            opt.step()
        finally:
            sys.setprofile(None)
    text = (SRC.parent / "CONTRIBUTING.md").read_text()
    walk = text.partition("**A step of `Cosmos` on a CPU**")[2].partition("\n\n")[0]
    listed = {file.rpartition("/")[2] for file in re.findall(r"`([\w/]+\.py)`", walk)}
    assert {Path(file).name for file in visited} | {"optimizers.py"} == listed
    assert f"({len(visited)} files" in walk
    assert not [file for file in visited if file.startswith(("cuda", "sharding"))]


@pytest.mark.parametrize("module", modules("cosmos_optim"))
def test_every_new_tensor_names_its_device_and_dtype(module: str) -> None:
    """So torch.set_default_device and torch.set_default_dtype have no effect on it."""
    factories = {f"torch.{name}" for name in FACTORIES}
    calls = [node for node in ast.walk(tree_of(module)) if isinstance(node, ast.Call)]
    made = [call for call in calls if ast.unparse(call.func) in factories]
    for call in made:
        assert {"device", "dtype"} <= {key.arg for key in call.keywords}, f"{module}:{call.lineno} {ast.unparse(call)}"
    for call in calls:
        assert ast.unparse(call.func) != "torch.Generator" or call.args, f"{module}:{call.lineno} names no device"


def test_imports_have_no_cycles() -> None:
    """Also within one layer; imports for type checking do not count."""
    ours = ("cosmos_optim", "cosmos_lab")
    edges = {m: {owner(n) for n in imports_of(m, runtime=True) if within(n, ours)} for m in FILES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"a cycle: {' -> '.join([*path[path.index(module) :], module])}"
        if module not in done:
            for name in edges[module] - {module}:
                visit(name, (*path, module))
            done.add(module)

    for module in FILES:
        visit(module, ())


@pytest.mark.parametrize(
    ("name", "allowed"), [("torch.distributed", MAY_DISTRIBUTE), ("triton", MAY_TRITON), ("pickle", MAY_PICKLE)]
)
def test_processes_kernels_and_pickles_are_used_only_in_their_own_files(name: str, allowed: tuple[str, ...]) -> None:
    """Processes, kernels and files that could hold code are the work of few files."""
    wrong = [
        module
        for module in FILES
        if not within(module, allowed) and any(within(used, (name,)) for used in names_of(module))
    ]
    assert not wrong, f"{name} is used in {wrong}; only {allowed} may"


@pytest.mark.parametrize("module", modules("cosmos_lab"))
def test_the_lab_uses_only_public_names_of_the_library(module: str) -> None:
    """`from cosmos_optim import X` with X in `cosmos_optim.__all__`, and nothing from its modules."""
    import cosmos_optim

    used = {name for name in names_of(module) if within(name, ("cosmos_optim",))}
    public = {f"cosmos_optim.{name}" for name in cosmos_optim.__all__}
    wrong = sorted(n for n in used - {"cosmos_optim"} if not within(n, tuple(public)))
    assert not wrong, f"{module} uses {wrong}, which cosmos_optim does not offer"


@pytest.mark.parametrize("module", modules("cosmos_lab.models"))
def test_models_import_no_optimizer_or_training_code(module: str) -> None:
    """A model can be read, exported and timed without knowing how it is trained."""
    wrong = [name for name in imports_of(module) if within(name, NOT_IN_MODELS)]
    assert not wrong, f"{module} imports {wrong}"


@pytest.mark.parametrize("module", modules("cosmos_lab.recipes"))
def test_recipes_do_not_import_the_profiler(module: str) -> None:
    """A recipe says what to run; nothing that measures or trains is needed to read it."""
    wrong = [name for name in imports_of(module) if within(name, ("cosmos_lab.profile", "cosmos_lab.run"))]
    assert not wrong, f"{module} imports {wrong}"


def test_every_form_of_import_is_seen() -> None:
    """Check the reader itself: plain, from, relative, inside a function, and a spelled-out attribute."""
    source = "import a.b\nfrom c import d\nfrom . import e\nfrom ..f import g\ndef h():\n    import triton\n"
    assert set(imports(ast.parse(source), "p.q.r")) == {"a.b", "c.d", "p.q.e", "p.f.g", "triton"}
    assert set(imports(ast.parse("from . import e"), "p.q", is_package=True)) == {"p.q.e"}
    typed = ast.parse("if TYPE_CHECKING:\n    import a\nimport b")
    assert (set(imports(typed, "p")), set(imports(without_types(typed), "p"))) == ({"a", "b"}, {"b"})
    assert "torch.distributed.all_reduce" in set(attributes(ast.parse("x = torch.distributed.all_reduce(y)")))
