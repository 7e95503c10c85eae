"""The order of the modules: a file imports only what stands above it, read from the sources themselves."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[1] / "src"

# From the bottom up. A module belongs to the longest name here that begins its own; "" is the package itself.
ORDER = (
    "suggest",
    "kernels",
    "rounding",
    "linalg.coefficients",
    "linalg.newton_schulz",
    "linalg.orthonormal",
    "linalg.thin",
    "algebra",
    "fused_thin",
    "fused",
    "linalg.subspace",
    "rules",
    "layout",
    "heads",
    "groups",
    "distributed",
    "optim",
    "plan",
    "",
)
# The code that starts and joins processes; everything else gets the layout from the parameters.
MAY_DISTRIBUTE = ("cosmos_optim.distributed", "cosmos_lab.run.launch")
MAY_TRITON = ("cosmos_optim.kernels",)
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
    """Whether a dotted name is one of these or lies below one."""
    return any(module == name or module.startswith(name + ".") for name in names)


@cache
def tree_of(module: str) -> ast.Module:
    """The parsed source of a module of ours."""
    return ast.parse(FILES[module].read_text(), str(FILES[module]))


def without_types(tree: ast.Module) -> ast.Module:
    """The tree less its `if TYPE_CHECKING:` blocks, which never run."""
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
    """What a module of ours imports, or only what it imports when it runs."""
    tree = without_types(tree_of(module)) if runtime else tree_of(module)
    return set(imports(tree, module, FILES[module].name == "__init__.py"))


def names_of(module: str) -> set[str]:
    """What a module of ours imports or spells out."""
    return imports_of(module) | set(attributes(tree_of(module)))


def owner(name: str) -> str:
    """The module of ours that an imported name comes from: `cosmos_optim.rules.cosmos.RULE` -> `...rules.cosmos`."""
    while name not in FILES:
        name = name.rpartition(".")[0]
    return name


def layer(module: str) -> int:
    """The place of a module of cosmos_optim in `ORDER`."""
    inner = module.removeprefix("cosmos_optim").removeprefix(".")
    places = [i for i, name in enumerate(ORDER) if name and within(inner, (name,))]
    if inner == "":
        return len(ORDER) - 1
    assert places, f"{module} has no place in the order of the modules: add it to ORDER in {__file__}"
    return max(places, key=lambda i: len(ORDER[i]))


def modules(package: str) -> list[str]:
    """Our modules below a package; empty ones need no place."""
    return [m for m, file in FILES.items() if within(m, (package,)) and file.read_text().strip()]


def test_the_packages_are_found() -> None:
    """The tests below read something."""
    assert {"cosmos_optim", "cosmos_optim.rules.cosmos", "cosmos_optim.algebra", "cosmos_lab"} <= set(FILES)


@pytest.mark.parametrize("module", modules("cosmos_optim"))
def test_a_file_imports_only_what_stands_above_it(module: str) -> None:
    """Kernels, algebra, linear algebra, rules, layouts, optimizers: never upwards."""
    ours = {owner(name) for name in imports_of(module) if within(name, ("cosmos_optim",))} - {module}
    ours = {name for name in ours if FILES[name].read_text().strip()}
    wrong = sorted(name for name in ours if layer(name) > layer(module))
    assert not wrong, f"{module} imports {wrong}, which stand below it in {ORDER}"


@pytest.mark.parametrize("module", modules("cosmos_optim"))
def test_a_new_tensor_says_where_and_of_what(module: str) -> None:
    """Whatever torch.set_default_device and torch.set_default_dtype say."""
    factories = {f"torch.{name}" for name in FACTORIES}
    calls = [node for node in ast.walk(tree_of(module)) if isinstance(node, ast.Call)]
    made = [call for call in calls if ast.unparse(call.func) in factories]
    for call in made:
        assert {"device", "dtype"} <= {key.arg for key in call.keywords}, f"{module}:{call.lineno} {ast.unparse(call)}"
    for call in calls:
        assert ast.unparse(call.func) != "torch.Generator" or call.args, f"{module}:{call.lineno} names no device"


def test_no_cycles() -> None:
    """Also within one layer; names for types alone are free."""
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


@pytest.mark.parametrize(("name", "allowed"), [("torch.distributed", MAY_DISTRIBUTE), ("triton", MAY_TRITON)])
def test_one_place_for(name: str, allowed: tuple[str, ...]) -> None:
    """`torch.distributed` and `triton` are known in their own folders only."""
    wrong = [
        module
        for module in FILES
        if not within(module, allowed) and any(within(used, (name,)) for used in names_of(module))
    ]
    assert not wrong, f"{name} is used in {wrong}; only {allowed} may"


@pytest.mark.parametrize("module", modules("cosmos_lab"))
def test_the_lab_uses_public_names(module: str) -> None:
    """`from cosmos_optim import X` with X in `cosmos_optim.__all__`, and nothing from its modules."""
    import cosmos_optim

    used = {name for name in names_of(module) if within(name, ("cosmos_optim",))}
    public = {f"cosmos_optim.{name}" for name in cosmos_optim.__all__}
    wrong = sorted(n for n in used - {"cosmos_optim"} if not within(n, tuple(public)))
    assert not wrong, f"{module} uses {wrong}, which cosmos_optim does not offer"


@pytest.mark.parametrize("module", modules("cosmos_lab.models"))
def test_models_know_no_optimizer(module: str) -> None:
    """A model can be read, exported and timed without knowing how it is trained."""
    wrong = [name for name in imports_of(module) if within(name, NOT_IN_MODELS)]
    assert not wrong, f"{module} imports {wrong}"


@pytest.mark.parametrize("module", modules("cosmos_lab.recipes"))
def test_recipes_do_not_import_the_profiler(module: str) -> None:
    """A recipe says what to run; nothing that measures or trains is needed to read it."""
    wrong = [name for name in imports_of(module) if within(name, ("cosmos_lab.profile", "cosmos_lab.run"))]
    assert not wrong, f"{module} imports {wrong}"


def test_every_form_of_import_is_seen() -> None:
    """The reader itself: plain, from, relative, inside a function, and a spelled-out attribute."""
    source = "import a.b\nfrom c import d\nfrom . import e\nfrom ..f import g\ndef h():\n    import triton\n"
    assert set(imports(ast.parse(source), "p.q.r")) == {"a.b", "c.d", "p.q.e", "p.f.g", "triton"}
    assert set(imports(ast.parse("from . import e"), "p.q", is_package=True)) == {"p.q.e"}
    typed = ast.parse("if TYPE_CHECKING:\n    import a\nimport b")
    assert (set(imports(typed, "p")), set(imports(without_types(typed), "p"))) == ({"a", "b"}, {"b"})
    assert "torch.distributed.all_reduce" in set(attributes(ast.parse("x = torch.distributed.all_reduce(y)")))


def test_the_order_is_strict() -> None:
    """Places of a few modules, so that a change of `ORDER` is a decision."""
    names = "kernels.x linalg.newton_schulz algebra linalg.subspace rules.cosmos distributed.x optim.x"
    places = [layer(f"cosmos_optim.{name}") for name in names.split()]
    assert places == sorted(places)
    assert len(set(places)) == len(places)
    assert layer("cosmos_optim") == len(ORDER) - 1
