"""A sample of `make test-families`, and what its committed table must show."""

from dataclasses import replace

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
