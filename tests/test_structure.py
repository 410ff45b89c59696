"""Modules import each other in one direction, those that are imported inside functions included."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "harness"


def imported(tree: ast.AST) -> Iterator[str]:
    """Names of modules, and of what is imported from them, but those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imported(node)


def test_no_module_is_imported_by_what_it_imports() -> None:
    modules: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        place = file.relative_to(PACKAGE.parent).with_suffix("")
        name = ".".join(place.parts).removesuffix(".__init__")
        modules[name] = set(imported(ast.parse(file.read_text(encoding="utf-8"))))
    for name, names in modules.items():
        known = {each if each in modules else each.rpartition(".")[0] for each in names}
        modules[name] = known & modules.keys() - {name}
    TopologicalSorter(modules).prepare()  # raises a CycleError that names the circle
