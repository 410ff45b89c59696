"""The wheel, installed away from the checkout, and how the package's modules import each other."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[1]
EMBEDDED = ("tiny", "tiny_eagle3", "tiny_good", "tiny_small", "tiny_unrelated")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    python("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What pip makes of a wheel without compiled code: its files, unpacked."""
    target = tmp_path_factory.mktemp("site")
    with ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def python(*arguments: str, cwd: Path | None = None, site: Path | None = None) -> str:
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, **({"PYTHONPATH": str(site)} if site else {})},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_wheel_holds_code_conf_prompts_models_and_nothing_else(wheel: Path) -> None:
    names = set(ZipFile(wheel).namelist())
    conf = [path.relative_to(ROOT / "conf") for path in (ROOT / "conf").rglob("*.yaml")]
    assert len(conf) > 20
    assert {f"harness/conf/{path}" for path in conf} <= names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"harness"}
    assert "harness/reporting/metrics.md" in names
    assert {"harness/py.typed", "harness/sweep.py", "harness/prompt_sets/easy.jsonl"} <= names
    files = ("model.safetensors", "{0}.gguf")
    assert {
        f"harness/models/embedded/{name}/{file.format(name)}" for name in EMBEDDED for file in files
    } <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.parametrize(
    ("command", "words", "file"),
    [
        ("breakeven", ("draft_ms=22.09", "target_ms=29.92", "k=[1]"), "report.html"),
        pytest.param(
            "snapshot",
            ("new_tokens=4", "prompts.limit=1", "k=[1]", "temperature=0"),
            "report.html",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_an_installed_command_runs_from_another_folder(
    command: str, words: tuple[str, ...], file: str, installed: Path, tmp_path: Path
) -> None:
    run = "import runpy, sys; runpy.run_module(sys.argv.pop(1), run_name='__main__')"
    where = f"import harness.config as c; print(c.__file__); print(c.CONF_DIR); {run}"
    out = python("-c", where, f"harness.{command}", *words, cwd=tmp_path, site=installed)
    assert out.split()[:2] == [
        str(installed / "harness/config.py"),
        str(installed / "harness/conf"),
    ]
    assert (tmp_path / out.splitlines()[-1].removeprefix("run: ") / file).is_file()


def test_own_conf_comes_in_through_config_dir(installed: Path, tmp_path: Path) -> None:
    group = tmp_path / "my_conf" / "draft"
    group.mkdir(parents=True)
    (group / "mine.yaml").write_text("name: mine\nid: some/folder\n")
    words = ("--config-dir", "my_conf", "draft=mine", "--cfg", "job", "--package", "draft")
    out = python("-m", "harness.sweep", *words, cwd=tmp_path, site=installed)
    assert "id: some/folder" in out
    assert "attention: auto" in out


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


def sources() -> Iterator[tuple[str, ast.Module]]:
    """The package's modules by name."""
    for file in (ROOT / "harness").rglob("*.py"):
        place = file.relative_to(ROOT).with_suffix("")
        name = ".".join(place.parts).removesuffix(".__init__")
        yield name, ast.parse(file.read_text(encoding="utf-8"))


def imports() -> dict[str, set[str]]:
    """The package's modules that each of them imports, lazily or not."""
    modules = {name: set(imported(tree)) for name, tree in sources()}
    for name, names in modules.items():
        known = {each if each in modules else each.rpartition(".")[0] for each in names}
        modules[name] = known & modules.keys() - {name}
    return modules


def test_no_module_is_imported_by_what_it_imports() -> None:
    TopologicalSorter(imports()).prepare()  # raises a CycleError that names the circle


def test_imports_inside_the_analysis_are_at_most_eight_deep() -> None:
    modules = imports()

    @cache
    def depth(name: str) -> int:
        inside = (each for each in modules[name] if each.startswith("harness.analysis"))
        return 1 + max(map(depth, inside), default=0)

    analysis = [name for name in modules if name.startswith("harness.analysis")]
    assert {name: depth(name) for name in analysis if depth(name) > 8} == {}


# Rows and entries of files, which are flat, and records that a command or an engine fills
LARGE = {
    *("Trial", "ResultRow", "ModelEntry", "Manifest", "Summary", "Answer"),
    *("EngineSpec", "StartedEngine"),
}


def test_functions_have_at_most_60_lines_and_classes_25_members() -> None:
    large: set[str] = set()
    for module, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{module}.{node.name}"
            if isinstance(node, ast.ClassDef):
                kinds = (ast.FunctionDef, ast.AnnAssign, ast.Assign)
                large |= {node.name} if sum(isinstance(n, kinds) for n in node.body) > 25 else set()
    assert large == LARGE
