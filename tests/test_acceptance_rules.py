"""Every acceptance rule is known wherever one is decided on; an unknown one is nowhere another."""

from collections.abc import Callable
from typing import cast

import pytest
from stubs import TableModel, generation_of
from test_verification import CASES

from harness.analysis.server_lossless import SERVED_RULES
from harness.decoding.drafters import ModelDrafter
from harness.decoding.loops import Verifier
from harness.decoding.sampling import SamplingParameters
from harness.decoding.verification import VERIFY
from harness.engine_facts import sglang, vllm
from harness.engine_facts.engines import ENGINES, OWN
from harness.measurement.confidences import draft_confidences
from harness.measurement.lossless import distribution_tests
from harness.records import RULES, Rule
from harness.theory.acceptance_rules import ACCEPTANCE_RULES, accept_probabilities

SAMPLED = SamplingParameters(1.0)
UNKNOWN = cast("Rule", "typical")


def test_every_rule_has_its_record_its_verification_and_its_enumeration() -> None:
    assert set(RULES) == set(ACCEPTANCE_RULES) == set(VERIFY) == {rule for _, rule, _ in CASES}


def test_rounds_of_a_server_are_held_against_every_rule_that_servers_accept_by() -> None:
    counted = [spec for spec in ENGINES.values() if spec.counting and spec is not OWN]
    assert set(SERVED_RULES) == {rule for spec in counted for rule in spec.rules}


def test_each_rule_of_an_engine_is_another_setting_of_it() -> None:
    settings = [str(vllm.speculative_config("eagle3", "e", 4, rule)) for rule in vllm.SPEC.rules]
    assert len(set(settings)) == len(vllm.SPEC.rules)
    flags = [str(sglang.speculative_flags("eagle3", "e", 4, rule)) for rule in sglang.SPEC.rules]
    assert len(set(flags)) == len(sglang.SPEC.rules)


@pytest.mark.parametrize(
    "use",
    [
        lambda: accept_probabilities(UNKNOWN, -1.0, -1.0, True),
        lambda: Verifier(TableModel(5), generation_of([1], sampling=SAMPLED, rule=UNKNOWN)),
        lambda: ModelDrafter(TableModel(5), SAMPLED, UNKNOWN),
        lambda: draft_confidences(
            [], None, TableModel(5), draft_name="d", rule=UNKNOWN, num_draft_tokens=2, least=0.1
        ),
        lambda: distribution_tests(
            *(TableModel(5), TableModel(5), [[1]]),
            num_draft_tokens=2, sampling=SAMPLED, rule=UNKNOWN, draws=2, seed=0,
        ),
        lambda: vllm.speculative_config("model", "d", 4, UNKNOWN),
        lambda: sglang.speculative_flags("model", "d", 4, UNKNOWN),
    ],
)  # fmt: skip
def test_a_rule_that_no_table_has_is_refused_and_not_taken_for_another(
    use: Callable[[], object],
) -> None:
    with pytest.raises(KeyError, match="typical"):
        use()
