"""Break-even from a server's benchmark, and from a run's step times."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import FROZEN

from harness.analysis import analyse
from harness.analysis.breakeven import suggested_k
from harness.commands import breakeven
from harness.commands.breakeven import read_benchmark
from harness.config import BreakevenConfig
from harness.records import RoundTiming, UserError
from harness.storage import RunFolder, load

pytestmark = pytest.mark.usefixtures("no_plots")
PROFILE = str(FROZEN / "profile")
POSITIONS = "spec_decode_per_position_acceptance_rates"
COUNTS = ("spec_decode_num_drafts", "spec_decode_draft_tokens", "spec_decode_accepted_tokens")
BENCHMARK: dict[str, Any] = {
    "mean_tpot_ms": 9.0,
    "max_concurrency": 1,
    "failed": 0,
    "spec_decode_acceptance_rate": 55.0,
    "spec_decode_acceptance_length": 3.2,
    "spec_decode_num_drafts": 100,
    "spec_decode_draft_tokens": 400,
    "spec_decode_accepted_tokens": 220,
    POSITIONS: [0.8, 0.6, 0.45, 0.35],
}


def write(file: Path, text: str) -> str:
    file.write_text(text, encoding="utf-8")
    return str(file)


def benchmark(folder: Path, **changes: Any) -> str:
    """BENCHMARK as a file; a change to None leaves the field out."""
    content = {name: value for name, value in {**BENCHMARK, **changes}.items() if value is not None}
    return write(folder / "vllm.json", json.dumps(content))


def test_positions_counts_or_rate_and_length_give_the_same_acceptance(tmp_path: Path) -> None:
    left_out: list[dict[str, Any]] = [
        {},
        {POSITIONS: []},
        dict.fromkeys((POSITIONS, *COUNTS)),
    ]
    for changes in left_out:
        measured = read_benchmark("acceptance_from", benchmark(tmp_path, **changes))
        assert (measured.k, measured.acceptance_rate) == (4, pytest.approx(0.55))
        assert measured.positions == (() if changes else (0.8, 0.6, 0.45, 0.35))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"spec_decode_acceptance_rate": 120.0}, "is not a percentage"),
        ({"spec_decode_num_drafts": -1}, "spec_decode_num_drafts=-1"),
        ({"spec_decode_num_drafts": "many"}, "spec_decode_num_drafts='many'"),
        ({POSITIONS: [0.5, 0.6]}, "0.6 follows 0.5"),
        ({POSITIONS: [80.0, 60.0]}, f"{POSITIONS}=80.0: must be a number between 0 and 1"),
        ({POSITIONS: 0.8}, "is not a list"),
        ({POSITIONS: [0.8, 0.6]}, "does not agree with the 2.400"),
        ({POSITIONS: None, "spec_decode_accepted_tokens": 900}, "9 tokens accepted of 4 drafted"),
        (
            {**dict.fromkeys((POSITIONS, *COUNTS)), "spec_decode_acceptance_rate": 0.55},
            "is not a whole number",
        ),
        (
            {**dict.fromkeys((POSITIONS, *COUNTS)), "spec_decode_acceptance_length": None},
            "spec_decode_acceptance_length would be needed",
        ),
        (dict.fromkeys(BENCHMARK), "has neither mean_tpot_ms nor spec_decode_acceptance_rate"),
    ],
)
def test_a_benchmark_that_cannot_be_says_which_field(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"^acceptance_from=") as refused:
        read_benchmark("acceptance_from", benchmark(tmp_path, **changes))
    assert says in str(refused.value)


def judged(root: Path, **settings: Any) -> dict[str, Any]:
    config = BreakevenConfig(results_root=str(root / "out"), **settings)
    folder = breakeven.run(config).folder
    assert folder is not None
    summary = json.loads((folder / "summary.json").read_text())
    return {**summary, "report": " ".join((folder / "report.md").read_text().split())}


def test_a_benchmark_and_two_latencies_are_a_verdict(tmp_path: Path) -> None:
    summary = judged(tmp_path, acceptance_from=benchmark(tmp_path), draft_ms=2.0, target_ms=13.4)
    verdict = summary["verdict"]
    assert (verdict["decision"], verdict["k"], verdict["draft"]) == ("speculate", 4, None)
    assert verdict["speedup"] == pytest.approx(3.2 / (4 * 2 / 13.4 + 1))
    assert "Serve the draft at K=4" in summary["report"]
    slow = judged(tmp_path, acceptance_from=benchmark(tmp_path), draft_ms=12.0, target_ms=13.4)
    assert (slow["verdict"]["decision"], slow["verdict"]["k"]) == ("does_not_pay", 0)
    assert "needs alpha >= 0.90 and has 0.80" in slow["report"]


@pytest.mark.parametrize(
    ("requests", "target_ms", "decision", "says"),
    [
        (7, 13.4, "undecided", "7 requests do not decide it, and below 8 there is no interval"),
        (8, 6.0, "undecided", "8 requests do not decide it (from the numbers given, interval by"),
        (200, 6.0, "speculate", "Serve the draft at K=2: 1.44x [1.35, 1.53]"),
        (8, 1.0, "does_not_pay", "Do not speculate: K=1, the best, gives 0.60x [0.44, 0.76]"),
    ],
)
def test_a_benchmark_of_few_requests_decides_only_what_they_can(
    tmp_path: Path, requests: int, target_ms: float, decision: str, says: str
) -> None:
    measured = benchmark(tmp_path, completed=requests)
    summary = judged(tmp_path, acceptance_from=measured, draft_ms=2.0, target_ms=target_ms)
    assert summary["verdict"]["decision"] == decision
    assert ("Serve the draft" in summary["report"]) == (decision == "speculate")
    assert says in summary["report"]


def test_the_interval_of_a_benchmark_is_that_of_requests_whose_rounds_accept_alike(
    tmp_path: Path,
) -> None:
    accepted = np.array([0, 4, 4, 1, 2, 4, 0, 3, 4, 4, 2, 0, 1, 4, 4, 3])  # of every round of each
    joint = [float((accepted >= position).mean()) for position in range(1, 5)]
    counts = dict(zip(COUNTS, (1600, 6400, 100 * int(accepted.sum())), strict=True))
    length = {"spec_decode_acceptance_length": 1.0 + float(accepted.mean())}
    file = benchmark(tmp_path, completed=16, **{POSITIONS: joint}, **counts, **length)
    costs = {"draft_ms": 0.1, "target_ms": 10.0}  # so that K=4 is the best of four
    verdict = judged(tmp_path, acceptance_from=file, **costs)["verdict"]
    student = 2.8366  # of 15 degrees, two-sided 95 % for each of four
    assert verdict["k"] == 4
    error = student * accepted.std() / 4 / (1 + accepted.mean())
    ends = [verdict["speedup_lo"], verdict["speedup_hi"]]
    expected = [verdict["speedup"] * (1 - error), verdict["speedup"] * (1 + error)]
    assert ends == pytest.approx(expected, rel=1e-4)


def test_what_the_server_measured_goes_before_the_arithmetic(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.json", json.dumps({"mean_tpot_ms": 13.4}))
    measured = benchmark(tmp_path, completed=200)
    summary = judged(tmp_path, acceptance_from=measured, baseline_from=plain, draft_ms=2.0)
    assert summary["verdict"]["speedup"] == pytest.approx(13.4 / 9.0)
    # The requests bound the acceptance's error, not that of two measured times
    assert (summary["verdict"]["speedup_lo"], summary["verdict"]["speedup_hi"]) == (None, None)
    assert "measured by the server (from the numbers given, no interval)" in summary["report"]
    assert re.search(r"\| 4 \|.*1\.49x.*2\.00x", summary["report"])
    assert "max_concurrency: no limit" in summary["report"]


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
        ({"target_ms": 2.0, "baseline_from": "a"}, "target_ms and baseline_from: give one"),
        ({"draft_ms": 2.0, "latency_from": "a"}, "draft_ms and latency_from: give one"),
        ({"acceptance_rate": 0.5, "acceptance_from": "a"}, "acceptance_rate and acceptance_from"),
        ({"latency_from": "nowhere"}, "not a run folder"),
        ({"baseline_from": "BENCHMARK", "draft_ms": 2.0}, "that server speculated"),
        ({"acceptance_from": "PLAIN", "draft_ms": 2, "target_ms": 9}, "did not speculate"),
        (
            {"acceptance_from": "SGLANG", "draft_ms": 2, "target_ms": 9},
            "that server speculated (accept_length=2.81), but the file has no"
            " spec_decode_acceptance_rate and no other field of vllm bench serve, from which K is"
            " read; give k=[K] acceptance_rate=(2.81 - 1) / K",
        ),
        (
            {"baseline_from": "SGLANG", "draft_ms": 2.0},
            "that server speculated (accept_length=2.81)",
        ),
        ({"acceptance_from": "{}{}", "draft_ms": 2, "target_ms": 9}, "not JSON"),
        ({"acceptance_from": "[1]", "draft_ms": 2, "target_ms": 9}, "not a JSON object"),
        ({"acceptance_from": "absent", "draft_ms": 2, "target_ms": 9}, "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_refused_and_nothing_is_stored(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    files = {
        "BENCHMARK": benchmark(tmp_path),
        "PLAIN": write(tmp_path / "plain.json", json.dumps({"mean_tpot_ms": 13.4})),
        "SGLANG": write(
            tmp_path / "sglang.jsonl", json.dumps({"mean_tpot_ms": 9.1, "accept_length": 2.81})
        ),
        **{text: write(tmp_path / f"{len(text)}.json", text) for text in ("{}{}", "[1]")},
    }
    used: dict[str, Any] = {
        key: files.get(value, value) if isinstance(value, str) else value
        for key, value in settings.items()
    }
    with pytest.raises(UserError) as refused:
        breakeven.run(BreakevenConfig(results_root=str(tmp_path / "out"), **used))
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
