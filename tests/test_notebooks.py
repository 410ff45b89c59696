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


@pytest.mark.filterwarnings("ignore")  # of the kernel's own machinery
def test_the_notebooks_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other in one kernel, which forgets every name in between."""
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    books = [nbformat.read(path, as_version=4) for path in NOTEBOOKS]
    cells = [[cell for cell in book.cells if cell.cell_type == "code"] for book in books]
    forget = nbformat.v4.new_code_cell("%reset -f")
    every = nbformat.v4.new_notebook(cells=[each for of in cells for each in (forget, *of)])
    client = NotebookClient(every, timeout=120, resources={"metadata": {"path": str(FOLDER)}})
    client.execute()
    for of_book in cells:
        outputs = [output for cell in of_book for output in cell.outputs]
        assert {"image/png", "text/html"} <= {each for o in outputs for each in o.get("data", {})}
