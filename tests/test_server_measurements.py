"""Break-even from a server's files: a benchmark's result, a log of rounds, a run's step times."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import FROZEN

from harness.analysis.server_measurements import ServerRound, fit_rounds
from harness.commands import breakeven
from harness.commands.breakeven import read_benchmark, read_log
from harness.config import BreakevenConfig
from harness.records import RoundTiming, UserError
from harness.storage import RunFolder, load

pytestmark = pytest.mark.usefixtures("no_plots")
PROFILE = str(FROZEN / "profile")
# A published K sweep of two prompt sets: K, ms per token, acceptance_rate.
POST = {
    "easy": [
        (0, 23.74, None),
        (1, 34.76, 0.429),
        (2, 40.66, 0.347),
        (4, 45.75, 0.342),
        (8, 66.85, 0.207),
        (16, 92.88, 0.144),
    ],
    "hard": [
        (0, 23.41, None),
        (1, 33.15, 0.368),
        (2, 40.39, 0.292),
        (4, 51.47, 0.239),
        (8, 75.89, 0.156),
        (16, 125.87, 0.088),
    ],
}
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


def log(folder: Path, *sets: str) -> str:
    lines = [
        f"{k},{'' if rate is None else rate},{time}"
        for name in sets or ("easy",)
        for k, time, rate in POST[name]
    ]
    return write(folder / "log.csv", "\n".join(["K, acceptance_rate, ms_per_token", *lines]))


def benchmark(folder: Path, **changes: Any) -> str:
    """BENCHMARK as a file; a change to None leaves the field out."""
    content = {name: value for name, value in {**BENCHMARK, **changes}.items() if value is not None}
    return write(folder / "vllm.json", json.dumps(content))


def rounds(draft_s: float, verify_s: list[float], overhead_s: float) -> list[ServerRound]:
    """A log without noise, K = 1, 2, 4, 8."""
    rows = [ServerRound(0, 1.0, verify_s[0])]
    for k in (1, 2, 4, 8):
        tokens = 1.0 + 0.4 * k
        rows.append(ServerRound(k, tokens, (k * draft_s + verify_s[k] + overhead_s) / tokens))
    return rows


@pytest.mark.parametrize(
    ("sets", "draft_ms", "rest_steps"),
    [(["easy"], 17.08, 1.53), (["hard"], 17.15, 1.30), (["easy", "hard"], 17.11, 1.42)],
)
def test_a_published_sweep_comes_apart(
    sets: list[str], draft_ms: float, rest_steps: float, tmp_path: Path
) -> None:
    fit = fit_rounds(read_log(log(tmp_path, *sets)))
    assert 1e3 * fit.draft_s == pytest.approx(draft_ms, abs=0.005)
    assert fit.rest_s / fit.target_s == pytest.approx(rest_steps, abs=0.005)
    assert fit.draft_lo_s is not None
    assert fit.draft_hi_s is not None
    assert fit.draft_lo_s < fit.draft_s < fit.draft_hi_s


def test_only_a_verify_curve_separates_the_overhead_from_the_verify() -> None:
    curve = [10.0 + 0.3 * index for index in range(9)]
    log_rows = rounds(2.0, curve, 1.5)
    without, with_curve = fit_rounds(log_rows), fit_rounds(log_rows, curve)
    assert (with_curve.draft_s, with_curve.rest_s) == (pytest.approx(2.0), pytest.approx(1.5))
    assert with_curve.separated
    assert without.draft_s == pytest.approx(2.3), "what a position adds to a verify is in the slope"
    assert without.rest_s == pytest.approx(11.5)


def test_the_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    held = []
    for _ in range(300):
        noisy = [ServerRound(k, 1.0, 2.0 * k + 12.0 + rng.normal(0, 0.5)) for k in (1, 2, 4, 8)]
        fit = fit_rounds([ServerRound(0, 1.0, 10.0), *noisy])
        assert fit.draft_lo_s is not None
        assert fit.draft_hi_s is not None
        assert fit.rest_lo_s is not None
        assert fit.rest_hi_s is not None
        held.append((fit.draft_lo_s < 2 < fit.draft_hi_s, fit.rest_lo_s < 12 < fit.rest_hi_s))
    assert np.abs(np.mean(held, axis=0) - 0.95).max() < 0.04
    two = [ServerRound(0, 1.0, 10.0), ServerRound(2, 1.0, 16.0), ServerRound(4, 1.0, 20.0)]
    assert fit_rounds(two).draft_lo_s is None, "two K leave nothing to judge the line by"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no column k, ms_per_token, tokens_per_round or acceptance_rate"),
        ("k,ms_per_token\n0,9", "no column tokens_per_round or acceptance_rate"),
        ("k,tokens_per_round,ms_per_token\nfour,2,9", "line 2: k='four' is not a number"),
        ("k,tokens_per_round,ms_per_token\n0,,9\n4,2", "line 3: ms_per_token=None"),
        ("k,tokens_per_round,ms_per_token\n1.5,2,9", "line 2: k=1.5"),
        ("k,acceptance_rate,ms_per_token\n4,42.9,9", "line 2: acceptance_rate=42.9"),
        ("k,tokens_per_round,ms_per_token\n4,,9", "line 2: acceptance_rate=None"),
        ("k,tokens_per_round,ms_per_token\n1,1.5,20\n2,2,20", "no baseline"),
        ("k,tokens_per_round,ms_per_token\n0,,10\n2,2,20\n2,2.1,20", "1 different k"),
        ("k,tokens_per_round,ms_per_token\n0,,10\n1,2.5,20\n2,2,20", "tokens_per_round=2.5 at k=1"),
        ("k,tokens_per_round,ms_per_token\n0,,10\n1,1.5,0\n2,2,20", "ms_per_token=0 at k=1"),
        ("k,tokens_per_round,ms_per_token\n0,,10\n1,1.5,20\n4,1.5,10", "do not grow with k"),
        ("k,tokens_per_round,ms_per_token\n0,,10\n1,1,5\n2,1,30", "rounds grow faster than k"),
    ],
)
def test_a_log_that_cannot_be_is_refused_in_one_line(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        fit_rounds(read_log(write(tmp_path / "log.csv", text)))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


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
        (200, 6.0, "speculate", "Serve the draft at K=2: K=2 gives 1.44x [1.35, 1.53]"),
        (8, 1.0, "does_not_pay", "Do not speculate: K=1 gives 0.60x [0.44, 0.76]"),
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
    assert "server measured 1.49x at K=4, the arithmetic says 2.00x" in summary["report"]
    assert "max_concurrency: no limit" in summary["report"]


def test_the_published_log_says_do_not_speculate(tmp_path: Path) -> None:
    summary = judged(tmp_path, log=log(tmp_path))
    assert summary["verdict"]["decision"] == "does_not_pay"
    assert summary["verdict"]["speedup"] == pytest.approx(0.683, abs=5e-4)
    assert "v + overhead (not separable)" in summary["report"]
    # The headline's number stands in the table, next to what the fit says
    (row,) = re.findall(r"\| +1 +\|[^\n]*?(\d\.\d\dx) \| +(\d\.\d\dx) \|", summary["report"])[:1]
    assert row[0] == f"{summary['verdict']['speedup']:.2f}x"
    assert "measured speedup | predicted speedup" in summary["report"]
    curve = [23.74 + 0.2 * index for index in range(17)]
    separated = judged(tmp_path, log=log(tmp_path), verify_ms=curve)
    assert "not separable" not in separated["report"]
    assert "16.88" in separated["report"], "the draft step, 0.2 ms less than without the curve"


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
    assert "atency_from times no verify for k = 99" in summary["report"]
    short = write(
        tmp_path / "short.csv", "k,tokens_per_round,ms_per_token\n0,,20\n1,1.5,18\n2,2.0,16"
    )
    separated = judged(tmp_path, log=short, latency_from=PROFILE)
    assert "not separable" not in separated["report"]
    with pytest.raises(UserError, match="positions, but the log's k=16 verifies 17"):
        judged(tmp_path, log=log(tmp_path), latency_from=PROFILE)


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
    assert "atency_from times no verify for k = 8" in summary["report"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "draft_ms: no value and no default; give draft_ms=... target_ms=..."),
        ({"draft_ms": 2.0}, "target_ms: no value and no default; give target_ms=..."),
        ({"draft_ms": 2.0, "log": "LOG"}, "draft_ms and log: give one of the two"),
        ({"target_ms": 2.0, "baseline_from": "a"}, "target_ms and baseline_from: give one"),
        ({"draft_ms": 2.0, "latency_from": "a"}, "draft_ms and latency_from: give one"),
        ({"acceptance_rate": 0.5, "acceptance_from": "a"}, "acceptance_rate and acceptance_from"),
        ({"acceptance_rate": 0.5, "log": "LOG"}, "leave out acceptance_rate"),
        ({"latency_from": "nowhere"}, "not a run folder"),
        ({"log": "nowhere.csv"}, "log=nowhere.csv: cannot be read"),
        ({"log": "LOG", "verify_ms": [23.0] * 5}, "give 17 times"),
        ({"baseline_from": "BENCHMARK", "draft_ms": 2.0}, "that server speculated"),
        ({"acceptance_from": "PLAIN", "draft_ms": 2, "target_ms": 9}, "did not speculate"),
        ({"acceptance_from": "{}{}", "draft_ms": 2, "target_ms": 9}, "not JSON"),
        ({"acceptance_from": "[1]", "draft_ms": 2, "target_ms": 9}, "not a JSON object"),
        ({"acceptance_from": "absent", "draft_ms": 2, "target_ms": 9}, "cannot be read"),
    ],
)
def test_what_cannot_be_used_is_refused_and_nothing_is_stored(
    settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    files = {
        "LOG": log(tmp_path),
        "BENCHMARK": benchmark(tmp_path),
        "PLAIN": write(tmp_path / "plain.json", json.dumps({"mean_tpot_ms": 13.4})),
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
