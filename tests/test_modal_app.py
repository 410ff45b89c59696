"""The cloud app, as far as it goes without a cloud: help, no token, the work itself run here."""

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import modal_app
from harness.records import UserError
from harness.storage import load

ROOT = Path(__file__).resolve().parents[1]


def modal(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`modal run modal_app.py::profile ...` as someone without an account would type it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MODAL_")}
    return subprocess.run(
        [sys.executable, "-m", "modal", "run", "modal_app.py::profile", *words],
        cwd=ROOT,
        env={**env, "MODAL_CONFIG_PATH": str(tmp_path / "no-such.toml"), "HOME": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_help_works_without_a_token_and_names_the_parameters(tmp_path: Path) -> None:
    ended = modal(tmp_path, "--help")
    assert ended.returncode == 0
    assert all(word in ended.stdout for word in ("--model", "--draft", "--gpu", "--overrides"))


def test_without_a_token_one_message_says_so(tmp_path: Path) -> None:
    ended = modal(tmp_path)
    assert ended.returncode != 0
    lines = (ended.stdout + ended.stderr).strip().splitlines()
    assert "Token missing" in " ".join(lines)
    assert len(lines) <= 5, "one line, or the box that some versions draw around it"


def test_a_typing_error_is_refused_before_anything_is_rented() -> None:
    with pytest.raises(UserError, match="no_such_model"):
        modal_app.checked(["model=no_such_model"])
    with pytest.raises(UserError, match=r"k: -1"):
        modal_app.checked(["k=[-1]"])
    with pytest.raises(UserError, match="dry_run"):
        modal_app.checked(["dry_run=true"])


def test_a_good_configuration_says_where_results_go() -> None:
    assert modal_app.checked(["results_root=elsewhere"]) == "elsewhere"


def test_a_packed_run_is_unpacked_under_its_own_name(tmp_path: Path) -> None:
    folder = tmp_path / "far" / "20260101-000000_profile_a_b"
    (folder / "plots").mkdir(parents=True)
    (folder / "results.csv").write_text("a,b\n")
    (folder / "plots" / "one.svg").write_text("<svg/>")
    copy = modal_app.unpack(modal_app.pack(folder), tmp_path / "near")
    assert copy == tmp_path / "near" / folder.name
    assert (copy / "results.csv").read_text() == "a,b\n"
    assert (copy / "plots" / "one.svg").read_text() == "<svg/>"


def test_an_archive_cannot_write_outside_the_results(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../escaped"))
    with pytest.raises(tarfile.TarError):
        modal_app.unpack(buffer.getvalue(), tmp_path / "results")
    assert not (tmp_path / "escaped").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The profile_on_gpu function is executing locally")
def test_the_remote_function_measures_the_embedded_pair_when_called_here(tmp_path: Path) -> None:
    overrides = ["new_tokens=4", "prompts.limit=1", "k=[1]", "threads=1"]
    archive = modal_app.profile_on_gpu.local(overrides, results_root=str(tmp_path / "runs"))
    stored = load(modal_app.unpack(archive, tmp_path / "results"))
    assert (stored.door, stored.manifest["status"]) == ("profile", "complete")
    assert not stored.latency.empty
