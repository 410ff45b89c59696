"""The notebooks run from end to end on the stored examples, and are committed without outputs."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_the_three_notebooks_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "01_read_a_report",
        "02_pick_a_draft",
        "03_why_is_it_slower",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert not re.search(r"/(home|root|work|Users)/", path.read_text())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the kernel's own machinery
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    book = nbformat.read(path, as_version=4)
    client = NotebookClient(book, timeout=120, resources={"metadata": {"path": str(FOLDER)}})
    client.execute()
    kinds = {
        kind
        for cell in book.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        for kind in output.get("data", {})
    }
    assert "image/png" in kinds
    assert "text/html" in kinds
