"""A sample of `make test-families`, and what its committed table must say."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import families
import transformers


def test_the_table_has_every_causal_model_type_and_nothing_is_wrong_in_it() -> None:
    text = families.TABLE.read_text(encoding="utf-8")
    rows = families.rows_of(text)
    assert {row.result for row in rows.values()} <= {"identical", "refused", "not built"}
    assert all(row.reason for row in rows.values() if row.result != "identical")
    if f"transformers {transformers.__version__} " in text:
        assert sorted(rows) == families.all_types()


def test_a_sample_of_model_types_does_what_the_table_says() -> None:
    tests = Path(families.__file__)
    run = subprocess.run(
        [sys.executable, str(tests), *families.SAMPLE, "--k", "1", "4"],
        env={**os.environ, "PYTHONPATH": str(tests.parent.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr + run.stdout
    found = families.rows_of(run.stdout)
    stored = families.rows_of(families.TABLE.read_text(encoding="utf-8"))
    for model_type in families.SAMPLE:
        # What was measured of logits that differ may differ in its last digits
        assert replace(found[model_type], reason="") == replace(stored[model_type], reason="")
