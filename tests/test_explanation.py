"""What prevents a gain, for the founding experiment and for each factor alone."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from runs import FROZEN

from harness.analysis import analyse
from harness.analysis.answers import explain
from harness.analysis.predicted import Predicted
from harness.analysis.replayed import Replays
from harness.analysis.round_costs import Latency
from harness.analysis.verdict import Candidate
from harness.storage import load
from harness.summary import Answer, Explanation
from harness.theory.replay import replay
from harness.theory.speedup import RoundTimes, StepTimes


def predicted(alphas: Mapping[int, float], steps: StepTimes, loop: float = 0.0) -> Predicted:
    """A text on which every draft token of a K is accepted with one chance, and what it costs.

    `loop` is what a round takes besides its forwards, in seconds.
    """
    length, names = 400, (("easy", "a"),)
    counts = {
        Candidate("small", k): replay(np.full((1, length, k), alpha), [length], [k])[k]
        for k, alpha in alphas.items()
    }
    replays = Replays("ratio", 0.0, names, ((8,),), counts, frozenset())
    rounds = RoundTimes(steps.target_s, tuple((k, steps.round_s(k) + loop) for k in alphas))
    return Predicted(replays, {"small": Latency(rounds, steps=steps)})


def explained(made: Predicted, k: int) -> Explanation | None:
    named = {"draft": "small", "k": k}
    verdict = Answer("does_not_pay", None, 0, 0.0, "all", 0.9, 0.8, 0.95, "held_out_loss", named)
    return explain(made, verdict, "small")


def of_one_k(
    k: int, alpha: float, c: float, v: float = 1.0, loop: float = 0.0
) -> Explanation | None:
    return explained(predicted({k: alpha}, StepTimes(c, 1.0, (*[1.0] * k, v)), loop), k)


def test_the_draft_of_the_founding_post_is_slow() -> None:
    """Qwen3-4B with 0.6B on one A10G, eager."""
    explanation = explained(predicted({1: 0.429}, StepTimes(0.02209, 0.02992)), 1)
    assert explanation is not None
    assert explanation.factors == ("slow_draft", "acceptance")
    assert explanation.c == pytest.approx(0.738, abs=1e-3)
    assert explanation.largest_c == pytest.approx(0.429, abs=2e-3)


def test_a_draft_as_fast_as_is_named_breaks_even() -> None:
    steps = StepTimes(0.4, 1.0, (1.0, 1.1, 1.2))
    slow = explained(predicted({2: 0.5}, steps, 0.2), 2)
    assert slow is not None
    fast = predicted({2: 0.5}, replace(steps, draft_s=slow.largest_c), 0.2)
    (speedup,) = fast.evidence.speedups(None).values()
    assert speedup == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("explanation", "factors"),
    [
        (of_one_k(2, 0.5, 0.1, 1.6), ("expensive_verify", "acceptance")),
        (of_one_k(1, 0.4, 1.2, 1.1), ("slow_draft",)),  # even alpha = 1 loses
        (of_one_k(2, 0.5, 0.2, 1.2, 0.5), ("slow_loop", "acceptance")),
    ],
)
def test_what_alone_would_turn_a_loss_is_named(
    explanation: Explanation, factors: tuple[str, ...]
) -> None:
    assert explanation.factors == factors


def test_a_gain_lacks_nothing() -> None:
    assert of_one_k(3, 0.8, 0.1, 1.1) is None


def test_the_k_of_a_verdict_is_explained_though_another_looks_better() -> None:
    made = predicted({1: 0.6, 2: 0.5}, StepTimes(0.8, 1.0))
    gains = made.evidence.speedups(None)
    assert gains[Candidate("small", 1)] > gains[Candidate("small", 2)]
    explanation = explained(made, 2)
    assert explanation is not None
    assert explanation.k == 2


def test_steps_are_launch_bound_by_a_bandwidth_that_no_other_work_disturbed_alone() -> None:
    """A draft is the smaller model, so it is not read far slower than the target."""
    run = load(FROZEN / "sweep")
    bandwidth = run.manifest.bandwidth
    assert bandwidth is not None
    assert bandwidth.target_gb_s is not None
    for draft_gb_s, told in ((bandwidth.draft_gb_s, 1), (0.3 * bandwidth.target_gb_s, 0)):
        manifest = run.manifest.updated(bandwidth=replace(bandwidth, draft_gb_s=draft_gb_s))
        caveats = [each.code for each in analyse(replace(run, manifest=manifest)).caveats]
        assert caveats.count("launch_bound") == told
