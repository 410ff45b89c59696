"""Numbers of elsewhere: a benchmark's file, a run's step times, a server's own log."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.analysis.fit import LogRow, fit_rounds
from harness.analysis.given_verdict import Given, decide_given
from harness.analysis.latency import latency_rows
from harness.commands import breakeven
from harness.commands.given import gathered
from harness.commands.server_log import read_log
from harness.commands.vllm_bench import read_bench
from harness.config import BreakevenConfig
from harness.records import StepTiming, UserError
from harness.storage import RunFolder

# REFERENCE section 1, the founding post's K sweep: K, ms per token, acceptance_rate.
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
BENCH: dict[str, Any] = {
    "mean_tpot_ms": 9.0,
    "max_concurrency": 1,
    "failed": 0,
    "spec_decode_acceptance_rate": 55.0,
    "spec_decode_acceptance_length": 3.2,
    "spec_decode_num_drafts": 100,
    "spec_decode_draft_tokens": 400,
    "spec_decode_accepted_tokens": 220,
    "spec_decode_per_position_acceptance_rates": [0.8, 0.6, 0.45, 0.35],
}


def post_rows(*names: str) -> list[LogRow]:
    return [
        LogRow(k, 1.0 + k * (rate or 0.0), time) for name in names for k, time, rate in POST[name]
    ]


@pytest.mark.parametrize(
    ("sets", "draft_ms", "c", "rest"),
    [
        (("easy",), 17.08, 0.72, 1.53),
        (("hard",), 17.15, 0.73, 1.30),
        (("easy", "hard"), 17.11, 0.73, 1.42),
    ],
)
def test_the_founding_posts_sweep_comes_apart(
    sets: tuple[str, ...], draft_ms: float, c: float, rest: float
) -> None:
    fit = fit_rounds(post_rows(*sets))
    assert fit.draft_ms == pytest.approx(draft_ms, abs=0.005)
    assert fit.c == pytest.approx(c, abs=0.005)
    assert fit.rest_steps == pytest.approx(rest, abs=0.005)
    assert fit.draft is not None
    assert fit.draft.lo < draft_ms < fit.draft.hi
    assert fit.rows[0].round_ms == pytest.approx(
        1.429 * 34.76 if "easy" in sets else 45.35, abs=0.1
    )


def log_of(draft: float, verify: list[float], overhead: float, ks: list[int]) -> list[LogRow]:
    rows = [LogRow(0, 1.0, verify[0])]
    for k in ks:
        tokens = 1.0 + 0.4 * k
        rows.append(LogRow(k, tokens, (k * draft + verify[k] + overhead) / tokens))
    return rows


def test_a_log_without_noise_gives_back_its_parts() -> None:
    fit = fit_rounds(log_of(2.0, [10.0] * 9, 1.5, [1, 2, 4, 8]))
    assert (fit.draft_ms, fit.rest_ms) == (pytest.approx(2.0), pytest.approx(11.5))
    assert not fit.separated
    times = fit.step_times(8)
    assert times.v(3) == pytest.approx(1.15)
    assert times.round_s(4) == pytest.approx((4 * 2.0 + 11.5) / 1e3)


def test_only_a_verify_curve_parts_the_overhead_from_the_verify() -> None:
    curve = [10.0 + 0.3 * index for index in range(9)]
    rows = log_of(2.0, curve, 1.5, [1, 2, 4, 8])
    blind, seeing = fit_rounds(rows), fit_rounds(rows, curve)
    assert (seeing.draft_ms, seeing.rest_ms) == (pytest.approx(2.0), pytest.approx(1.5))
    assert seeing.separated
    assert blind.draft_ms == pytest.approx(2.3), "what a position adds to a verify is in the slope"
    assert blind.rest_ms == pytest.approx(11.5)
    assert seeing.step_times(8).round_s(8) == pytest.approx(blind.step_times(8).round_s(8))


def test_the_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(0)
    held = []
    for _ in range(300):
        rows = [LogRow(0, 1.0, 10.0)]
        for k in (1, 2, 4, 8):
            rows.append(LogRow(k, 1.0, 2.0 * k + 12.0 + float(rng.normal(0, 0.5))))
        fit = fit_rounds(rows)
        assert fit.draft is not None
        assert fit.rest is not None
        held.append((fit.draft.lo < 2.0 < fit.draft.hi, fit.rest.lo < 12.0 < fit.rest.hi))
    assert np.abs(np.mean(held, axis=0) - 0.95).max() < 0.04


def test_two_k_leave_nothing_to_judge_the_line_by() -> None:
    fit = fit_rounds(log_of(2.0, [10.0] * 5, 1.0, [2, 4]))
    assert fit.draft_ms == pytest.approx(2.0)
    assert fit.draft is fit.rest is None


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([(1, 1.5, 20.0), (2, 2.0, 20.0)], "no baseline"),
        ([(0, 1.0, 10.0), (2, 2.0, 20.0)], "1 different k"),
        ([(0, 1.0, 10.0), (2, 2.0, 20.0), (2, 2.1, 20.0)], "1 different k"),
        ([(0, 1.0, 10.0), (1, 2.5, 20.0), (2, 2.0, 20.0)], "tokens_per_round=2.5 at k=1"),
        ([(0, 1.0, 10.0), (1, 0.5, 20.0), (2, 2.0, 20.0)], "tokens_per_round=0.5 at k=1"),
        ([(0, 1.0, 10.0), (1, 1.5, 0.0), (2, 2.0, 20.0)], "ms_per_token=0 at k=1"),
        ([(0, 1.0, 10.0), (1, 1.5, 20.0), (4, 1.5, 10.0)], "rounds do not grow with k"),
        ([(0, 1.0, 10.0), (1, 1.0, 5.0), (2, 1.0, 30.0)], "rounds grow faster than k"),
    ],
)
def test_logs_that_cannot_be_are_refused(rows: list[tuple[int, float, float]], says: str) -> None:
    with pytest.raises(UserError, match=says):
        fit_rounds([LogRow(*row) for row in rows])


def write(file: Path, text: str) -> str:
    file.write_text(text, encoding="utf-8")
    return str(file)


def post_csv(folder: Path, *names: str) -> str:
    lines = [
        f"{k},{'' if rate is None else rate},{time}"
        for name in names or ("easy",)
        for k, time, rate in POST[name]
    ]
    return write(folder / "log.csv", "\n".join(["K, acceptance_rate, ms_per_token", *lines]))


def test_a_log_is_read_with_rates_or_with_tokens(tmp_path: Path) -> None:
    found = read_log(post_csv(tmp_path))
    assert [row.k for row in found] == [0, 1, 2, 4, 8, 16]
    assert found == post_rows("easy")
    other = "server,k,tokens_per_round,ms_per_token\na,0,,9.5\n\na,3,2.5,6\n"
    assert read_log(write(tmp_path / "other.csv", other)) == [
        LogRow(0, 1.0, 9.5),
        LogRow(3, 2.5, 6.0),
    ]


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
    ],
)
def test_a_log_that_cannot_be_read_says_where(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        read_log(write(tmp_path / "log.csv", text))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def bench(folder: Path, name: str = "vllm.json", **changes: Any) -> str:
    """BENCH as a file; a change to None leaves the field out."""
    content = {key: value for key, value in {**BENCH, **changes}.items() if value is not None}
    return write(folder / name, json.dumps(content))


POSITIONS = "spec_decode_per_position_acceptance_rates"
COUNTS = ("spec_decode_num_drafts", "spec_decode_draft_tokens", "spec_decode_accepted_tokens")


def test_positions_counts_or_rate_and_length_give_the_same_acceptance(tmp_path: Path) -> None:
    whole = read_bench("acceptance_from", bench(tmp_path))
    empty: dict[str, Any] = {POSITIONS: []}
    counts = read_bench("acceptance_from", bench(tmp_path, **empty))
    derived = read_bench("acceptance_from", bench(tmp_path, **dict.fromkeys((POSITIONS, *COUNTS))))
    for found in (whole, counts, derived):
        assert (found.k, found.acceptance_rate) == (4, pytest.approx(0.55))
    assert whole.positions == (0.8, 0.6, 0.45, 0.35)
    assert counts.positions == derived.positions == ()


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
            "spec_decode_num_drafts, spec_decode_draft_tokens, spec_decode_accepted_tokens,"
            " spec_decode_acceptance_length would be needed",
        ),
        (dict.fromkeys(BENCH), "has neither mean_tpot_ms nor spec_decode_acceptance_rate"),
    ],
)
def test_a_benchmark_that_cannot_be_says_which_field(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as refused:
        read_bench("acceptance_from", bench(tmp_path, **changes))
    assert says in str(refused.value)
    assert str(refused.value).startswith("acceptance_from=")


def test_what_is_no_benchmark_is_refused_in_one_line(tmp_path: Path) -> None:
    cases = {
        str(tmp_path / "absent.json"): "cannot be read",
        str(tmp_path): "cannot be read",
        write(tmp_path / "a.json", "{}{}"): "not JSON",
        write(tmp_path / "b.json", "[1]"): "not a JSON object",
    }
    for file, says in cases.items():
        with pytest.raises(UserError, match=says) as refused:
            read_bench("acceptance_from", file)
        assert "\n" not in str(refused.value)


def judged(root: Path, **settings: Any) -> dict[str, Any]:
    config = BreakevenConfig(results_root=str(root / "out"), **settings)
    folder = breakeven.run(config).folder
    assert folder is not None
    summary = json.loads((folder / "summary.json").read_text())
    return {**summary, "report": " ".join((folder / "report.md").read_text().split())}


def test_a_benchmark_and_two_latencies_are_a_verdict(tmp_path: Path) -> None:
    found = judged(tmp_path, acceptance_from=bench(tmp_path), draft_ms=2.0, target_ms=13.4)
    verdict = found["verdict"]
    assert (verdict["decision"], verdict["k"], verdict["draft"]) == ("speculate", 4, None)
    assert verdict["speedup"] == pytest.approx(3.2 / (4 * 2 / 13.4 + 1))
    assert verdict["speedup_lo"] is verdict["temperature"] is None
    assert "Serve the draft at K=4" in found["report"]
    slow = judged(tmp_path, acceptance_from=bench(tmp_path), draft_ms=12.0, target_ms=13.4)
    assert slow["verdict"]["decision"] == "does_not_pay"
    assert slow["verdict"]["k"] == 0
    assert "needs alpha >= 0.90 and has 0.80" in slow["report"]


def test_what_the_server_measured_goes_before_the_arithmetic(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.json", json.dumps({"mean_tpot_ms": 13.4}))
    found = judged(tmp_path, acceptance_from=bench(tmp_path), baseline_from=plain, draft_ms=2.0)
    assert found["verdict"]["speedup"] == pytest.approx(13.4 / 9.0)
    assert "the server measured 1.49x at K=4, the arithmetic says 2.00x" in found["report"].replace(
        "The server", "the server"
    )
    assert "max_concurrency: no limit" in found["report"]


def test_the_posts_log_says_do_not_speculate(tmp_path: Path) -> None:
    found = judged(tmp_path, log=post_csv(tmp_path))
    assert found["verdict"]["decision"] == "does_not_pay"
    assert found["verdict"]["speedup"] == pytest.approx(0.683, abs=5e-4)
    assert found["headline"]["c"] == pytest.approx(0.719, abs=5e-4)
    assert found["log_fit"]["rest_steps"] == pytest.approx(1.53, abs=5e-3)
    assert "v + overhead (not separable)" in found["report"]
    both = judged(tmp_path, log=post_csv(tmp_path, "easy", "hard"))
    assert both["log_fit"]["draft_ms"] == pytest.approx(17.11, abs=5e-3)


def test_a_typed_verify_curve_is_said_to_part_the_overhead(tmp_path: Path) -> None:
    curve = [23.74 + 0.2 * index for index in range(17)]
    found = judged(tmp_path, log=post_csv(tmp_path), verify_ms=curve)
    assert found["log_fit"]["separated"]
    assert found["log_fit"]["draft_ms"] == pytest.approx(17.08 - 0.2, abs=0.01)
    assert "not separable" not in found["report"]
    with pytest.raises(UserError, match="give 17 times"):
        judged(tmp_path, log=post_csv(tmp_path), verify_ms=curve[:5])


def timed_run(root: Path, drafts: tuple[str, ...] = ("d",)) -> str:
    """A profile's folder: target 10 ms, drafts 1 ms, verify 10 + 1 ms a position up to K = 4."""
    folder = RunFolder.create(root, "profile", ("m",), {})
    timings = [StepTiming("draft", name, "step", 1, 16, 1, (0.001, 0.001)) for name in drafts]
    timings.append(StepTiming("target", "m", "step", 1, 16, 1, (0.01, 0.01)))
    for tokens in range(1, 6):
        seconds = 0.009 + 0.001 * tokens
        timings.append(StepTiming("target", "m", "verify", tokens, 16, 1, (seconds, seconds)))
    folder.write_latency(latency_rows(timings), timings)
    return str(folder.path)


def test_step_times_may_come_from_a_run(tmp_path: Path) -> None:
    run = timed_run(tmp_path)
    found = judged(tmp_path, latency_from=run, acceptance_by_position=[0.9, 0.8, 0.7, 0.6])
    assert found["verdict"]["k"] == 4
    assert found["verdict"]["speedup"] == pytest.approx(4.0 / (4 * 0.1 + 1.4))
    assert "latency_from times no verify for k = 5, 6, 8, 10" in found["report"].replace(
        "Latency_from", "latency_from"
    )
    log = "k,tokens_per_round,ms_per_token\n0,,20\n1,1.5,18\n2,2.0,16\n4,2.5,17.2"
    parted = gathered(BreakevenConfig(log=write(tmp_path / "l.csv", log), latency_from=run))
    assert parted.extra["log_fit"]["separated"]
    assert parted.extra["log_fit"]["verify_ms"][1] == pytest.approx(22.0), "in the log's own ms"
    assert max(parted.config.k) == 4
    with pytest.raises(UserError, match="verifies of up to 5 positions, but the log's k=16"):
        gathered(BreakevenConfig(log=post_csv(tmp_path), latency_from=run))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "draft_ms: no value and no default; give draft_ms=... target_ms=..."),
        ({"draft_ms": 2.0}, "target_ms: no value and no default; give target_ms=..."),
        ({"draft_ms": 2.0, "log": "a.csv"}, "draft_ms and log: give one of the two"),
        ({"target_ms": 2.0, "baseline_from": "a"}, "target_ms and baseline_from: give one"),
        ({"draft_ms": 2.0, "latency_from": "a"}, "draft_ms and latency_from: give one"),
        ({"acceptance_rate": 0.5, "acceptance_from": "a"}, "acceptance_rate and acceptance_from"),
        ({"acceptance_rate": 0.5, "log": "a.csv"}, "leave out acceptance_rate"),
        ({"latency_from": "nowhere"}, "not a run folder"),
        ({"log": "nowhere.csv"}, "log=nowhere.csv: cannot be read"),
    ],
)
def test_one_source_for_each_number(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        breakeven.run(BreakevenConfig(results_root=str(tmp_path / "out"), **settings))
    assert says in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_files_of_the_wrong_kind_are_told_apart(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain.json", json.dumps({"mean_tpot_ms": 13.4}))
    typed = {"draft_ms": 2.0, "results_root": str(tmp_path / "out")}
    cases = [
        ({"baseline_from": bench(tmp_path)}, "that server speculated"),
        ({"target_ms": 9.0, "acceptance_from": plain}, "that server did not speculate"),
    ]
    for settings, says in cases:
        with pytest.raises(UserError, match=says):
            gathered(BreakevenConfig(**typed, **settings))
    with pytest.raises(UserError, match="name a run with one draft"):
        gathered(BreakevenConfig(latency_from=timed_run(tmp_path, ("d", "e"))))


@pytest.mark.parametrize(
    ("speedup", "decision", "k"),
    [
        (1.3, "speculate", 2),
        (1.04, "undecided", 2),
        (0.96, "undecided", 2),
        (0.9, "does_not_pay", 0),
    ],
)
def test_near_1_numbers_without_an_interval_decide_nothing(
    speedup: float, decision: str, k: int
) -> None:
    verdict = decide_given({1: Given(0.5, 0.4, 0.6), 2: Given(speedup, 0.6, 0.7)})
    assert verdict is not None
    assert (verdict.decision, verdict.k) == (decision, k)
    assert decide_given({}) is None


def test_an_imported_verdict_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import runpy, sys\n"
        "try: runpy.run_module('harness.breakeven', run_name='__main__')\n"
        "except SystemExit as end: print('status', end.code)\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    words = [f"acceptance_from={bench(tmp_path)}", "draft_ms=2", "target_ms=13.4", "k=[4]"]
    ended = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = ended.stdout.splitlines()
    assert lines[-3].startswith("run: results/")
    assert lines[-2:] == ["status 0", "set()"]
