"""Break-even from a given acceptance, and from a run's step times."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import FROZEN

from harness.analysis import analyse
from harness.analysis.breakeven import acceptance_rows, answers_of, suggested_k
from harness.analysis.cells import priced
from harness.commands import breakeven
from harness.config import BreakevenConfig
from harness.records import RoundTiming, UserError
from harness.storage import RunFolder, load
from harness.summary import Answer
from harness.theory.speedup import RoundTimes, StepTimes

pytestmark = pytest.mark.usefixtures("no_plots")
PROFILE = str(FROZEN / "profile")
POSITIONS = [0.8, 0.6, 0.45, 0.35]


def judged(root: Path, **settings: Any) -> dict[str, Any]:
    config = BreakevenConfig(results_root=str(root / "out"), **settings)
    folder = breakeven.run(config).folder
    assert folder is not None
    summary = json.loads((folder / "summary.json").read_text())
    return {**summary, "report": " ".join((folder / "report.md").read_text().split())}


def test_an_acceptance_and_two_latencies_are_a_verdict(tmp_path: Path) -> None:
    summary = judged(tmp_path, acceptance_by_position=POSITIONS, draft_ms=2.0, target_ms=13.4)
    verdict = summary["verdict"]
    assert (verdict["decision"], verdict["k"], verdict["draft"]) == ("speculate", 4, None)
    assert verdict["speedup"] == pytest.approx(3.2 / (4 * 2 / 13.4 + 1))
    assert "Serve the draft at K=4" in summary["report"]
    slow = judged(tmp_path, acceptance_by_position=POSITIONS, draft_ms=12.0, target_ms=13.4)
    assert (slow["verdict"]["decision"], slow["verdict"]["k"]) == ("does_not_pay", 0)
    assert "needs alpha >= 0.90 and has 0.80" in slow["report"]


def answer_of(positions: Sequence[float], requests: int, draft_s: float, plain_s: float) -> Answer:
    """The verdict of counters that rest on so many requests."""
    ks = range(1, len(positions) + 1)
    times = RoundTimes.from_steps(StepTimes(draft_s, plain_s), len(positions))
    rows = [priced(row, times) for row in acceptance_rows({}, positions, ks)]
    (answer,) = answers_of(rows, positions, requests)
    return answer


@pytest.mark.parametrize(
    ("requests", "plain_s", "decision"),
    [
        (7, 13.4, "undecided"),
        (8, 6.0, "undecided"),
        (200, 6.0, "speculate"),
        (8, 1.0, "does_not_pay"),
    ],
)
def test_few_requests_decide_only_what_they_can(
    requests: int, plain_s: float, decision: str
) -> None:
    answer = answer_of(POSITIONS, requests, 2.0, plain_s)
    assert answer.decision == decision
    assert (answer.speedup_lo is None) == (requests < 8)


def test_the_interval_is_that_of_requests_whose_rounds_accept_alike() -> None:
    accepted = np.array([0, 4, 4, 1, 2, 4, 0, 3, 4, 4, 2, 0, 1, 4, 4, 3])  # of every round of each
    joint = [float((accepted >= position).mean()) for position in range(1, 5)]
    answer = answer_of(joint, 16, 0.1, 10.0)  # so that K=4 is the best of four
    student = 2.8366  # of 15 degrees, two-sided 95 % for each of four
    assert (answer.k, answer.speedup is None) == (4, False)
    error = student * accepted.std() / 4 / (1 + accepted.mean())
    ends = [(answer.speedup or 0.0) * (1 - error), (answer.speedup or 0.0) * (1 + error)]
    assert [answer.speedup_lo, answer.speedup_hi] == pytest.approx(ends, rel=1e-4)


def without_rounds(folder: Path) -> Path:
    """The stored profile, stopped before it timed any round."""
    run = Path(shutil.copytree(PROFILE, folder))
    (run / "rounds.jsonl").unlink()
    return run


def test_step_times_may_come_from_a_run(tmp_path: Path) -> None:
    run = without_rounds(tmp_path / "run")
    summary = judged(tmp_path, latency_from=str(run), acceptance_by_position=[0.9, 0.8], k=[2, 99])
    profile = load(PROFILE)
    timed = next(timing for timing in profile.timings if timing.kind == "step")
    steps = profile.latency.query(f"context_tokens == {timed.context_tokens} and batch == 1")
    medians = steps.set_index(["role", "kind", "tokens"])["median_ms"].to_dict()
    draft_ms, target_ms = (medians[role, "step", 1] for role in ("draft", "target"))
    expected = 2.7 * target_ms / (2 * draft_ms + medians["target", "verify", 3])
    assert summary["verdict"]["speedup"] == pytest.approx(expected, rel=1e-3)
    assert "K = 99 is left out" in summary["report"]


def test_a_run_that_timed_rounds_gives_them_and_not_what_its_steps_add_up_to(
    tmp_path: Path,
) -> None:
    run = without_rounds(tmp_path / "timed")
    folder = RunFolder.reopen(load(run))
    for k, seconds in {0: 0.010, 1: 0.016, 4: 0.028}.items():
        rounds = RoundTiming(0, "tiny", "tiny_good", k, 0.0, 30, 1, 16, 16, 16 * seconds)
        folder.rounds.append(rounds)
    del folder  # gives the run's lock back
    summary = judged(
        tmp_path, latency_from=str(run), acceptance_by_position=[0.9, 0.8, 0.7], k=[1, 2, 3, 8]
    )
    assert summary["round_times"] == [
        {"draft": "", "temperature": None, "source": "rounds", "plain_s": 0.01,
         "round_s": {"1": 0.016, "2": 0.020, "3": 0.024}, "visits": 0, "other_plain_s": None,
         "engine": "own", "run": None, "basis": "measured"}
    ]  # fmt: skip
    assert summary["verdict"]["speedup"] == pytest.approx(3.4 * 10 / 24)
    ideal = {entry["k"]: entry["ideal_speedup"] for entry in summary["ceilings"]}
    assert ideal == pytest.approx({1: 2 * 10 / 16, 2: 3 * 10 / 20, 3: 4 * 10 / 24})
    assert "K = 8 is left out: latency_from= times no rounds there" in summary["report"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "draft_ms: no value and no default; give draft_ms=... target_ms=..."),
        ({"draft_ms": 2.0}, "target_ms: no value and no default; give target_ms=..."),
        ({"target_ms": 2.0, "latency_from": "a"}, "target_ms and latency_from: give one"),
        ({"draft_ms": 2.0, "latency_from": "a"}, "draft_ms and latency_from: give one"),
        (
            {"acceptance_rate": 0.5, "acceptance_by_position": [0.5]},
            "acceptance_rate and acceptance_by_position: give one",
        ),
        ({"latency_from": "nowhere"}, "not a run folder"),
    ],
)
def test_what_cannot_be_used_is_refused_and_nothing_is_stored(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        breakeven.run(BreakevenConfig(results_root=str(tmp_path / "out"), **settings))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("target_ms", "decision"),
    [(13.4, "speculate"), (3.8, "undecided"), (3.5, "undecided"), (3.0, "does_not_pay")],
)
def test_near_1_numbers_without_an_interval_decide_nothing(
    target_ms: float, decision: str, tmp_path: Path
) -> None:
    settings = {"acceptance_rate": {4: 0.55}, "k": [4], "draft_ms": 2.0, "target_ms": target_ms}
    assert judged(tmp_path, **settings)["verdict"]["decision"] == decision


@pytest.mark.parametrize(
    ("rate", "k"), [(0.2, 2), (0.399, 2), (0.4, 4), (0.74, 4), (0.75, 8), (0.84, 8), (0.85, 16)]
)
def test_the_rule_of_thumb_for_k_has_its_documented_bounds(rate: float, k: int) -> None:
    assert suggested_k(rate) == k


@pytest.mark.parametrize(
    ("given", "met"),
    [
        ({"draft_ms": 10.0}, {"step_ratio": False}),  # no acceptance, no verdict
        (
            {"draft_ms": 10.0, "acceptance_rate": 0.342},
            {"step_ratio": False, "suggested_k": False, "accepted_over_emitted": True},
        ),
        (
            {"draft_ms": 2.0, "acceptance_rate": 0.5},
            {"step_ratio": True, "suggested_k": True, "accepted_over_emitted": True},
        ),
        # Within the margin of 1: undecided, so that no K can be the rule's
        (
            {"draft_ms": 6.84, "acceptance_rate": 0.342},
            {"step_ratio": False, "suggested_k": None, "accepted_over_emitted": True},
        ),
    ],
)
def test_rules_of_thumb_are_held_against_the_arithmetic(
    given: dict[str, Any], met: dict[str, bool | None], tmp_path: Path
) -> None:
    config = BreakevenConfig(target_ms=20.0, k=[4], results_root=str(tmp_path), **given)
    folder = breakeven.run(config).folder
    assert folder is not None
    made = analyse(load(folder))
    assert {rule.code: rule.met for rule in made.rules_of_thumb} == met
    for rule in made.rules_of_thumb:
        if rule.code == "accepted_over_emitted":  # accepted of 1 + accepted
            accepted = 4 * given["acceptance_rate"]
            assert rule.value == pytest.approx(accepted / (1 + accepted))
            assert rule.values["speedup"] == made.answers[0].speedup
