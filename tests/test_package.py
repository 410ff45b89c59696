"""The wheel, installed away from the checkout: everything a door needs is in it."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).resolve().parents[1]
EMBEDDED = ("tiny", "tiny_good", "tiny_small", "tiny_unrelated")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT))
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    python(
        "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel)
    )
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


def test_the_wheel_holds_code_conf_prompts_models_and_type_marker(wheel: Path) -> None:
    names = set(ZipFile(wheel).namelist())
    conf = {f"harness/conf/{path.relative_to(ROOT / 'conf')}" for path in yaml_files()}
    assert conf <= names
    assert "harness/reporting/metrics.md" in names
    assert {"harness/py.typed", "harness/sweep.py", "harness/prompt_sets/easy.jsonl"} <= names
    assert {f"harness/models/embedded/{name}/model.safetensors" for name in EMBEDDED} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"harness"}


def yaml_files() -> list[Path]:
    found = sorted((ROOT / "conf").rglob("*.yaml"))
    assert len(found) > 20
    return found


def test_the_installed_package_and_its_conf_are_found_away_from_the_checkout(
    installed: Path, tmp_path: Path
) -> None:
    out = python(
        "-c",
        "import harness.config as c; print(c.__file__); print(c.CONF_DIR)",
        cwd=tmp_path,
        site=installed,
    )
    assert out.split() == [str(installed / "harness/config.py"), str(installed / "harness/conf")]


def test_an_installed_door_runs_from_another_folder(installed: Path, tmp_path: Path) -> None:
    words = ("draft_ms=22.09", "target_ms=29.92", "k=[1]")
    out = python("-m", "harness.breakeven", *words, cwd=tmp_path, site=installed)
    folder = tmp_path / out.splitlines()[-1].removeprefix("run: ")
    assert (folder / "results.csv").is_file()
    assert '<dt id="m-breakeven_alpha">' in (folder / "report.html").read_text()


def test_own_conf_comes_in_through_config_dir(installed: Path, tmp_path: Path) -> None:
    own = tmp_path / "my_conf" / "draft"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("name: mine\nid: some/folder\n")
    words = ("--config-dir", "my_conf", "draft=mine", "--cfg", "job", "--package", "draft")
    out = python("-m", "harness.sweep", *words, cwd=tmp_path, site=installed)
    assert "id: some/folder" in out
    assert "attention: auto" in out


def test_the_installed_embedded_pair_is_measured_from_another_folder(
    installed: Path, tmp_path: Path
) -> None:
    words = ("new_tokens=4", "prompts.limit=1", "k=[1]", "threads=1")
    out = python("-m", "harness.profile", *words, cwd=tmp_path, site=installed)
    folder = tmp_path / out.splitlines()[-1].removeprefix("run: ")
    assert (folder / "latency.csv").is_file()
