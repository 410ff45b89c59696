"""What the documents name exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEST = re.compile(r"`(test_\w+)?::(test_\w+)`")


def test_every_row_of_reliability_md_names_tests_that_exist() -> None:
    lines = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ")][1:]
    assert len(rows) > 50
    missing: list[str] = []
    for row in rows:
        module, names = "", TEST.findall(row)
        if not names:
            missing.append(f"no test in: {row[:80]}")
        for file, name in names:
            module = file or module
            source = ROOT / "tests" / f"{module}.py"
            if not source.is_file() or f"def {name}(" not in source.read_text(encoding="utf-8"):
                missing.append(f"{module}::{name}")
    assert not missing
