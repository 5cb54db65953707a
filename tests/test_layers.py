"""Imports point down, tensors and net do not import each other, and each heavy library is imported in one layer."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "p2p_diloco"

BELOW: dict[str, frozenset[str]] = {}
"""Which of our layers each layer may import, itself included."""
_base = frozenset({"errors", "addresses", "config", "settings", "remembered", "interrupts", "standard_streams"})
for name in sorted(_base):
    BELOW[name] = _base
BELOW["core"] = frozenset({"core", "errors"})
BELOW["tensors"] = _base | {"core", "tensors"}
BELOW["data"] = _base | {"data"}
BELOW["planning"] = _base | {"core", "tensors", "planning"}
BELOW["net"] = _base | {"core", "net"}
BELOW["node"] = _base | {"core", "tensors", "net", "data", "node"}
BELOW["peer"] = BELOW["node"] | {"peer"}
BELOW["integrations"] = BELOW["peer"] | {"integrations"}
BELOW["history"] = BELOW["node"] | {"history"}
for name in ("cli", "trainer", "observe"):
    BELOW[name] = BELOW["peer"] | {"cli", "trainer", "observe", "history"}
BELOW["cli"] |= {"planning", "integrations"}

PURE = frozenset(sys.stdlib_module_names) - {
    "asyncio", "datetime", "logging", "multiprocessing", "os", "random", "secrets", "select", "signal",
    "socket", "subprocess", "tempfile", "threading", "time", "uuid",
}  # fmt: skip
"""Modules that core may import: no clock, no randomness, no log, no loop and no network."""


PARTS_OF_TENSORS = {"p2p_diloco.tensors.partition"}
"""What planning may import of tensors: no torch."""


def modules(*layers: str) -> list[Path]:
    """All modules, or those of these layers."""
    return [path for path in sorted(PACKAGE.rglob("*.py")) if not layers or layer(path) in layers]


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file imports, at its top or later, except for type checkers only."""
    return frozenset(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    package = ("p2p_diloco", *path.relative_to(PACKAGE).parts[:-1])
    for node in _run_nodes(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                start = ".".join(package[: len(package) - level + 1]) if level else ""
                base = ".".join(part for part in (start, module or "") if part)
                yield base
                yield from (f"{base}.{alias.name}" for alias in names if base == "p2p_diloco")


def _run_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from _run_nodes(child)


def test_imports_point_down() -> None:
    """A module imports only lower layers of ours, or modules of its own layer."""
    for path in modules(*BELOW):
        outside = {name.split(".")[0] for name in imports(path)} & {"tests", "examples"}
        assert outside == set(), f"{path}: an installed package has no checkout"
        ours = {name.split(".")[1] for name in imports(path) if name.startswith("p2p_diloco.")}
        assert ours - BELOW[layer(path)] - {"__version__"} == set(), f"{path} may not import these"
    assert {layer(path) for path in modules()} == {*BELOW, "__init__", "__main__"}


def test_core_and_planning_are_pure() -> None:
    """They import only the standard library, and no part of it that has effects; planning loads no torch either: of the
    layers below it uses pure modules only."""
    for path in modules("core", "planning"):
        foreign = {name.split(".")[0] for name in imports(path)} - PURE - {"p2p_diloco"}
        assert foreign == set(), path
        assert {name for name in imports(path) if name.startswith("p2p_diloco.tensors")} <= PARTS_OF_TENSORS, path


@pytest.mark.parametrize(
    ("library", "homes"),
    [
        ("hivemind", {"net/hivemind_library.py"}),
        ("torch", {"tensors", "node", "peer", "trainer", "integrations"}),
        ("transformers", {"integrations/transformers.py", "integrations/sizes.py"}),
        ("accelerate", {"integrations/transformers.py"}),
        ("lightning", {"integrations/lightning.py"}),
        ("opentelemetry", {"node/otlp.py"}),
        ("typer", {"cli"}),
        ("rich", {"cli", "observe"}),
    ],
)
def test_a_heavy_library_has_one_home(library: str, homes: set[str]) -> None:
    """A library is imported in one layer only, so that it can be replaced there and other layers stay light."""
    users = {
        str(path.relative_to(PACKAGE))
        for path in modules()
        if library in {name.split(".")[0] for name in imports(path)}
    }
    assert {user for user in users if user not in homes and user.split("/")[0] not in homes} == set()


def test_the_reader_of_imports_sees_them() -> None:
    """Checks the tests above: late imports are found, and those for types are skipped."""
    tree = "from __future__ import annotations\nif TYPE_CHECKING:\n    import a\ndef f():\n    import b.c\n"
    found = [node for node in _run_nodes(ast.parse(tree)) if isinstance(node, ast.Import)]
    assert [alias.name for node in found for alias in node.names] == ["b.c"]


def test_one_module_knows_what_a_gpu_needs() -> None:
    assert [str(path.relative_to(PACKAGE)) for path in modules() if "torch.cuda" in path.read_text()] == [
        "peer/devices.py"
    ]


MAKERS = frozenset({"arange", "empty", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"})
"""Functions of torch whose result is on the default device, and often of the default dtype, if the call names none."""


def _made_by_torch(path: Path) -> Iterator[tuple[str, set[str | None]]]:
    """Each call in a file that makes a tensor, as text, with the names of its arguments."""
    for call in ast.walk(ast.parse(path.read_text())):
        match call:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=maker)) if maker in MAKERS:
                yield f"line {call.lineno}: torch.{maker}", {keyword.arg for keyword in call.keywords}


def test_every_buffer_names_its_device_and_beside_a_script_its_dtype() -> None:
    """A script may choose other defaults (`torch.set_default_device("cuda")`, `torch.set_default_dtype(...)`); this
    package's memory is where it says."""
    for path in modules("node", "peer", "tensors"):
        for argument in ("device", "dtype") if layer(path) == "peer" else ("device",):
            assert [call for call, named in _made_by_torch(path) if not named & {argument, "out"}] == [], path


def test_what_is_imported_for_types_alone_is_no_value() -> None:
    """Such a name stands in annotations only: at run time there is nothing behind it."""
    assert {path: used for path in modules() if (used := _values_for_types(path))} == {}


def _values_for_types(path: Path) -> list[str]:
    """The uses as a value of what a module imports for types alone."""
    tree = ast.parse(path.read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    names = {one.asname or one.name for block in blocks for one in _imported(block)}
    parts = [getattr(node, kind, None) for node in ast.walk(tree) for kind in ("annotation", "returns")]
    annotations = {id(inner) for part in parts if part is not None for inner in ast.walk(part)}
    used = list[str]()

    def visit(node: ast.AST, known: frozenset[str]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            known |= {one.asname or one.name for one in _imported(node)}
        if isinstance(node, ast.Name) and node.id in names - known and id(node) not in annotations:
            used.append(f"{node.id} in line {node.lineno}")
        for child in ast.iter_child_nodes(node):
            visit(child, known)

    visit(tree, frozenset())
    return used


def _imported(node: ast.AST) -> Iterator[ast.alias]:
    """What is imported anywhere in a part of a module."""
    yield from (one for inner in ast.walk(node) if isinstance(inner, ast.ImportFrom) for one in inner.names)
