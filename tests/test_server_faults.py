"""A sample of benchmarks/server_faults.py: no run is lost, nothing waits in silence."""

from functools import cache
from typing import Any

import pytest
from runs import needs_llamacpp
from test_benchmarks import script

pytestmark = needs_llamacpp
# Each with the status of the run that meets it
FAULTS = {
    "503, once, K=2": 0,
    "hang, under load, K=2": 1,
    "redirect, once, plain": 1,
    "trickle, once, K=2": 1,
    "429, Retry-After 1 h, once, plain": 1,
    "garbled JSON, always, K=2": 1,
    "401, once, K=2": 1,
    "killed in visit 2, plain": 1,
}


@cache
def results() -> dict[str, Any]:
    """What became of each, on the same servers."""
    # A busy machine may be late with its lines
    return {each.name: each for each in script("server_faults").results(tuple(FAULTS), 10.0)}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_server_loses_no_run_and_shows_no_key(fault: str) -> None:
    result = results()[fault]
    assert result.wrong == []
    assert result.first.status == FAULTS[fault]
    assert result.reported
    assert 0 < result.trials < 17
