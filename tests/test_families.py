"""A sample of `make test-families`, and what its committed table must show."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from runs import sample

from tools import model_families

# Of the sample one of each: attention, experts, sliding windows, positions as inputs, recurrence
KEPT = ("llama", "gpt_oss", "gemma4_text", "roberta", "rwkv")
ROWS = model_families.rows_of(model_families.TABLE.read_text(encoding="utf-8"))


def test_the_table_has_every_causal_model_type_and_nothing_is_wrong_in_it() -> None:
    assert {row.result for row in ROWS.values()} <= {"identical", "refused", "not built"}
    assert all(row.reason for row in ROWS.values() if row.result != "identical")
    if f"transformers {transformers.__version__} " in model_families.TABLE.read_text("utf-8"):
        assert sorted(ROWS) == model_families.all_types()


@pytest.mark.filterwarnings("ignore")  # of transformers' networks
@pytest.mark.parametrize(
    "model_type",
    sample(model_families.SAMPLE, *KEPT),
)
def test_a_sample_of_model_types_gets_the_result_in_the_table(model_type: str) -> None:
    result = model_families.check(model_type, (4,))
    # What was measured of logits that differ may differ in its last digits
    assert replace(result, reason="") == replace(ROWS[model_type], reason="")


@pytest.mark.exhaustive
def test_the_tool_checks_a_type_as_a_command_of_its_own_with_torchs_own_number_of_threads() -> None:
    """Torch has started threads by then, which a process that is forked off does not have."""
    root = Path(model_families.__file__).parents[1]
    kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "tools/model_families.py", "--k", "2", "--", "llama"],
        cwd=root,
        env={**kept, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = model_families.rows_of(done.stdout).values()
    assert (row.model_type, row.result) == ("llama", "identical")
