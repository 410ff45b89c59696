"""A sample of `make test-families`, and what its committed table must show."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import transformers

from tools import model_families


def test_the_table_has_every_causal_model_type_and_nothing_is_wrong_in_it() -> None:
    text = model_families.TABLE.read_text(encoding="utf-8")
    rows = model_families.rows_of(text)
    assert {row.result for row in rows.values()} <= {"identical", "refused", "not built"}
    assert all(row.reason for row in rows.values() if row.result != "identical")
    if f"transformers {transformers.__version__} " in text:
        assert sorted(rows) == model_families.all_types()


def test_a_sample_of_model_types_gets_the_result_in_the_table() -> None:
    script = Path(model_families.__file__)
    run = subprocess.run(
        [sys.executable, str(script), *model_families.SAMPLE, "--k", "1", "4"],
        env={**os.environ, "PYTHONPATH": str(script.parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr + run.stdout
    results = model_families.rows_of(run.stdout)
    stored = model_families.rows_of(model_families.TABLE.read_text(encoding="utf-8"))
    for model_type in model_families.SAMPLE:
        # What was measured of logits that differ may differ in its last digits
        assert replace(results[model_type], reason="") == replace(stored[model_type], reason="")
