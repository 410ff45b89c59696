"""A server run: costs found again, the gate, rows, predictions and what the report says of them."""

import re
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import FROZEN, ran, sample

from harness.analysis import analyse
from harness.analysis.batch_schedule import LoadResults
from harness.analysis.comparison import compare
from harness.analysis.server_costs import (
    Requests,
    ServerCosts,
    TimedRequests,
    fit_costs,
    left_out_costs,
    timed_rounds,
)
from harness.analysis.server_lossless import gates
from harness.analysis.server_predictions import served_rows, timed_server
from harness.analysis.server_run import served_run, served_summary
from harness.analysis.server_texts import served_texts
from harness.analysis.settled_times import (
    NO_SHARED_VISIT,
    least_squares,
    least_varying,
    settled,
    undisturbed,
)
from harness.analysis.setup import Setup
from harness.analysis.user_latency import one_by_one
from harness.engine_facts.llamacpp import PROBABILISTIC
from harness.engine_facts.spec import Counting
from harness.records import RoundTiming, Rule, ServerClock, Trial
from harness.reporting import html, markdown, serving_commands
from harness.reporting.content import content_of
from harness.reporting.html import column_definition
from harness.reporting.pages import tables_of
from harness.stats import jackknife
from harness.storage import StoredRun, load
from harness.summary import (
    Schedule,
    Summary,
    TextCheck,
    TextLikelihood,
    UserLatency,
    Visits,
    from_json,
    to_json,
)
from harness.theory.replay import Replayed, by_start, replay
from harness.theory.speedup import RoundTimes

pytestmark = pytest.mark.usefixtures("few_samples")
LLAMACPP = Counting(1, shortens_last_draft=True)
COSTS = ServerCosts(
    plain_start_s=0.003,
    start_s=0.006,
    times=RoundTimes(0.5e-3, ((1, 0.9e-3), (2, 1.2e-3), (4, 1.8e-3))),
)
SMALL_VISITS = 3
SMALL = (
    *("prompts.limit=4", "new_tokens=16", "threads=1", "k=[1,2,4]"),
    f"repetitions={SMALL_VISITS}",
)


# ---- costs ---------------------------------------------------------------------------------------


def counts_of(k: int, lengths: list[int], seed: int = 0) -> Replayed:
    """Rounds of texts that fill their budgets, counted as llama.cpp does."""
    chances = np.random.default_rng(seed).random((len(lengths), max(lengths)))
    proposed = np.zeros(chances.shape, dtype=np.intp)
    for row, length in enumerate(lengths):
        proposed[row, :length] = LLAMACPP.proposed(k, length + 1)
    return replay(by_start(chances, k), lengths, [k], proposed=proposed)[k]


def requests_of(
    ks: tuple[int, ...], lengths: list[int], costs: ServerCosts = COSTS
) -> TimedRequests:
    """What such texts take at these costs."""
    tokens = np.array(lengths, dtype=np.float64)
    counts = {k: counts_of(k, lengths) for k in ks}
    prompts = tuple(range(len(lengths)))
    plain = {0: Requests(costs.plain_s(tokens), tokens[:, None], prompts)}
    return TimedRequests(
        plain
        | {k: Requests(costs.speculative_s(c), c.proposals, prompts) for k, c in counts.items()}
    )


def speedup_variance(
    timed: TimedRequests, tokens: jackknife.Array, counts: Replayed
) -> jackknife.Variance | None:
    """The variance that the error of costs gives the logarithm of a predicted speedup."""
    logs = np.log([each.speedup(tokens, counts) for each in left_out_costs(timed, counts.k)])
    return jackknife.left_out_variance(logs, np.ones(len(logs))) if len(logs) else None


def assert_found(found: ServerCosts | None, costs: ServerCosts = COSTS) -> None:
    assert found is not None
    assert (found.plain_start_s, found.start_s) == pytest.approx(
        (costs.plain_start_s, costs.start_s), rel=1e-6
    )
    for n in range(costs.times.largest + 1):
        assert found.times.at(n) == pytest.approx(costs.times.at(n), rel=1e-6)


@pytest.mark.parametrize("ks", [(1, 2, 4), (1, 4)])
def test_costs_are_found_from_requests_that_cost_a_start_and_their_rounds(
    ks: tuple[int, ...],
) -> None:
    # Of two K alone, the one between lies on their line, as its costs do here
    assert_found(fit_costs(requests_of(ks, [12, 60, 33, 47, 20, 55])))
    assert_found(fit_costs(requests_of(ks, [12, 60, 33]) + requests_of(ks[:1], [47, 20, 55])))
    assert fit_costs(requests_of(ks, [33, 33])) is None, "one length cannot part start and rounds"


@pytest.mark.parametrize(
    "round_ms",
    [
        {4: 2.4},
        {8: 3.8},
        {4: 2.4, 8: 3.8},
        {2: 1.2, 4: 2.4, 8: 3.8},  # shorter drafts lie on the line from the plain token
        {2: 2.0, 8: 3.8},  # or on that through the first two
    ],
)
def test_drafts_shorter_than_every_k_cost_in_the_fit_what_a_prediction_takes(
    round_ms: dict[int, float],
) -> None:
    times = RoundTimes(1e-3, tuple((k, 1e-3 * each) for k, each in round_ms.items()))
    costs = ServerCosts(0.7e-3, 1.5e-3, times)
    timed = requests_of(tuple(round_ms), [12, 60, 33, 5, 20, 7], costs)
    assert_found(fit_costs(timed), costs)


def test_rounds_in_which_a_lookup_finds_nothing_cost_other_than_plain_tokens() -> None:
    times = RoundTimes(0.5e-3, ((0, 0.6e-3), (2, 1.2e-3), (8, 3.0e-3)))
    costs, lengths = ServerCosts(0.7e-3, 1.5e-3, times), [12, 60, 33, 47, 20, 55]
    tokens, random = np.array(lengths, dtype=np.float64), np.random.default_rng(1)
    prompts = tuple(range(len(lengths)))
    by_k = {0: Requests(costs.plain_s(tokens), tokens[:, None], prompts)}
    for k in (2, 8):
        chances = by_start(random.random((len(lengths), max(lengths))), k)
        # From most starts nothing, from a few as many tokens as there are after the match
        found = random.integers(1, k + 1, chances.shape[:2])
        proposed = np.where(random.random(chances.shape[:2]) < 0.7, 0, found)
        counts = replay(chances, lengths, [k], proposed=proposed)[k]
        by_k[k] = Requests(costs.speculative_s(counts), counts.proposals, prompts)
    timed = TimedRequests(by_k, looked_up=True)
    assert_found(fit_costs(timed), costs)
    left_out = left_out_costs(timed, 8)
    assert len(left_out) == len(lengths)
    for found in left_out:
        assert_found(found, costs)
    as_plain = fit_costs(replace(timed, looked_up=False))
    assert as_plain is not None
    assert as_plain.times.at(0) == pytest.approx(0.5e-3)
    assert as_plain.times.at(2) > 1.3e-3, "what they take longer is then put on the others"


def test_a_predicted_speedups_variance_is_that_of_costs_from_other_requests() -> None:
    rng, lengths = np.random.default_rng(3), [12, 60, 33, 47, 20, 55, 41, 28] * 3
    exact, tokens, counts = requests_of((1, 4), lengths), np.array([40.0]), counts_of(4, [40])
    logs, variances = [], []
    for _ in range(60):
        factors = np.exp(0.05 * rng.standard_normal((3, len(lengths))))
        timed = TimedRequests(
            {
                k: replace(each, seconds=each.seconds * factor)
                for (k, each), factor in zip(exact.by_k.items(), factors, strict=True)
            }
        )
        costs, variance = fit_costs(timed), speedup_variance(timed, tokens, counts)
        assert costs is not None
        assert variance is not None
        logs.append(np.log(costs.speedup(tokens, counts)))
        variances.append(float(variance.value))
    assert np.mean(variances) ** 0.5 == pytest.approx(np.std(logs), rel=0.25)
    same = speedup_variance(exact, tokens, counts)
    assert same is not None
    assert float(same.value) == pytest.approx(0.0, abs=1e-12)
    assert speedup_variance(requests_of((1, 4), lengths[:2]), tokens, counts) is None


def test_the_requests_of_a_prompt_share_a_pace_and_are_left_out_together() -> None:
    rng, number, sampled = np.random.default_rng(5), 16, 12
    lengths = rng.integers(20, 60, number * sampled).tolist()
    exact, tokens, counts = requests_of((1, 4), lengths), np.array([40.0]), counts_of(4, [40])
    prompts = tuple(prompt for prompt in range(number) for _ in range(sampled))
    truth = float(np.log(COSTS.speedup(tokens, counts)))
    held = 0
    for _ in range(100):
        paces = np.exp(0.05 * rng.standard_normal((3, number))).repeat(sampled, axis=1)
        timed = TimedRequests(
            {
                k: replace(each, seconds=each.seconds * pace, prompts=prompts)
                for (k, each), pace in zip(exact.by_k.items(), paces, strict=True)
            }
        )
        costs, variance = fit_costs(timed), speedup_variance(timed, tokens, counts)
        assert costs is not None
        assert variance is not None
        error = abs(np.log(costs.speedup(tokens, counts)) - truth)
        held += bool(error < jackknife.half_width(variance, 0.95))
    assert held >= 88


def rejected(visit: int, k: int, tokens: int, pace: float) -> RoundTiming:
    """What a server that rejects every draft takes for a text of so many tokens."""
    seconds, drafted = COSTS.plain_s(np.array([tokens]))[0], None
    if k:
        chances = by_start(np.zeros((1, tokens)), k)
        proposed = LLAMACPP.proposed(k, tokens + 1)[None]
        counts = replay(chances, [tokens], [k], proposed=proposed)[k]
        seconds, drafted = COSTS.speculative_s(counts)[0], round(counts.drafted[0])
    return RoundTiming(
        visit, "tiny", "small", k, 0.0, 9, 1, tokens, tokens, pace * float(seconds), drafted
    )


def test_costs_are_found_from_servers_that_reject_every_draft() -> None:
    timings = [
        rejected(visit, k, tokens, pace)
        for visit, pace in enumerate((1.0, 1.0, 1.0, 1.3, 2.5, 9.0))  # others use the machine
        for tokens in (15, 63)
        for k in (0, 1, 2, 4)
    ]
    early = replace(timings[1], rounds=9, new_tokens=9, drafted=9)  # ended by an end of text
    timed = timed_rounds([*timings, early], LLAMACPP)
    assert timed is not None
    assert_found(fit_costs(timed))
    assert timed_rounds([t for t in timings if t.k], LLAMACPP) is None


def trial(
    visit: int, seconds: float | None, *, text: int = 0, temperature: float = 0.0, rounds: int = 1
) -> Trial:
    status = "failed" if seconds is None else "ok"
    return Trial(
        "", "easy", "a", visit, 2, temperature, None, status, new_tokens=2 * rounds, rounds=rounds,
        tokens=(text,), decode_s=seconds,
    )  # fmt: skip


def test_a_greedy_requests_time_is_the_lowest_tenth_of_its_visits() -> None:
    visits = [trial(number, float(seconds)) for number, seconds in enumerate([9, *range(1, 12)])]
    other_text, failed = trial(20, 0.1, text=1), trial(21, None)
    (one,) = settled([*visits, other_text, failed])
    assert (one.decode_s, one.tokens, one.repetition) == (pytest.approx(2.1), (0,), 0)
    assert settled([failed]) == [replace(failed, repetition=0)]


def noisy(kind: str) -> list[list[float]]:
    """Requests of 20 visits on a machine that others use now and then, or that varies in speed."""
    rng = np.random.default_rng(1)
    base = 1.0 + 0.01 * rng.standard_normal((40, 20))
    others = rng.exponential(0.8, (40, 20))
    if kind == "mostly used":
        base += others
    elif kind == "varies":
        base *= rng.choice([0.7, 1.0, 1.1], (40, 20), p=[0.2, 0.6, 0.2])
    elif kind == "seldom used":
        base += others * (rng.random((40, 20)) < 0.3)
    return base.tolist()


@pytest.mark.parametrize(
    ("kind", "time"), [("mostly used", 1.12), ("varies", 1.0), ("seldom used", 1.0)]
)
def test_the_quantile_that_settles_requests_is_one_that_the_visits_fix(
    kind: str, time: float
) -> None:
    requests = noisy(kind)
    settle = least_varying(requests)
    found = [settle(seconds) for seconds in requests]
    assert np.mean(found) == pytest.approx(time, rel=0.02)
    lowest = [undisturbed(seconds) for seconds in requests]
    assert np.std(found) <= np.std(lowest)
    few = least_varying([seconds[:4] for seconds in requests])
    assert few([1.0, 2.0, 3.0]) == undisturbed([1.0, 2.0, 3.0])


def test_a_greedy_text_that_plain_decoding_returned_in_other_visits_alone_has_no_time() -> None:
    def at(visit: int, k: int, text: int, seconds: float) -> Trial:
        return replace(trial(visit, seconds, text=text), k=k)

    plain = [at(visit, 0, int(visit > 2), 1.0 + visit % 3) for visit in range(5)]
    apart = [at(visit, 4, 0, 0.5) for visit in (3, 4)]
    of_plain, failed = settled([*plain, *apart])
    assert (of_plain.status, of_plain.tokens, failed.status) == ("ok", (0,), "failed")
    assert failed.error == NO_SHARED_VISIT
    _, shared = settled([*plain, *apart, at(0, 4, 0, 0.25)])
    assert shared.decode_s == pytest.approx(0.25 * (of_plain.decode_s or 0.0) / 1.0)


def test_the_time_of_a_resumed_run_is_that_of_the_text_that_counts() -> None:
    first = [trial(visit, 1.0, text=0) for visit in (0, 1)]
    again = [trial(visit, 2.0, text=1) for visit in (0, 1)]
    (one,) = settled([*first, *again])
    assert (one.tokens, one.decode_s) == ((1,), pytest.approx(2.0))


def test_texts_of_one_round_set_no_pace_where_a_start_is_nearly_a_round_below_0() -> None:
    round_s, start = 0.02, -0.9
    made = [
        replace(
            trial(visit, seconds, text=visit, temperature=1.0, rounds=rounds),
            one_token_s=0.0304 if visit else 0.03,
        )
        for visit, rounds in enumerate((1, 12, 1, 9, 1, 15, 1, 12))
        for seconds in [1e-6 if rounds == 1 else round_s * (start + rounds)]
    ]
    found = [(one.rounds, one.decode_s) for one in settled(made) if one.rounds != 1]
    assert found == [(n, pytest.approx(round_s * (start + n), rel=0.02)) for n in (12, 9, 15, 12)]


@pytest.mark.parametrize("dead_after", [2, 12, 40])
def test_rounds_of_a_server_that_died_early_cost_what_its_shared_visits_say(
    dead_after: int,
) -> None:
    rng, found = np.random.default_rng(4), []
    for _ in range(12):
        timings = [
            rejected(visit, k, tokens, 1.0 + rng.exponential(0.8))
            for visit in range(40)
            for tokens in (15, 31, 63)
            for k in (0, 1, 4)
            if k != 4 or visit < dead_after
        ]
        timed = timed_rounds(timings, LLAMACPP)
        assert timed is not None
        costs = fit_costs(timed)
        assert costs is not None
        found.append(np.log(costs.times.relative(4) / COSTS.times.relative(4)))
    assert abs(np.mean(found)) < 0.12


def test_a_sampled_text_keeps_its_rounds_at_the_time_that_an_undisturbed_one_takes() -> None:
    visits = [
        trial(number, rounds * pace, text=number, temperature=1.0, rounds=rounds)
        for number, (rounds, pace) in enumerate([(10, 0.02), (5, 0.02), (20, 0.09), (8, 0.03)])
    ]
    failed = trial(9, None, temperature=1.0)
    made = settled([*visits, failed])
    assert [each.decode_s for each in made] == pytest.approx([0.2, 0.1, 0.4, 0.16, None])
    untold = [replace(each, rounds=None) for each in visits]
    assert [each.decode_s for each in settled(untold)] == pytest.approx([0.2, 0.1, 0.4, 0.16])


@pytest.mark.parametrize("start", [0.0, 1.0, 6.0])
def test_a_sampled_text_keeps_its_time_whatever_a_request_takes_beside_its_rounds(
    start: float,
) -> None:
    seconds = {rounds: 0.02 * (start + rounds) for rounds in (10, 5, 20, 8)}
    visits = [
        trial(number, each, text=number, temperature=1.0, rounds=rounds)
        for number, (rounds, each) in enumerate(seconds.items())
    ]
    assert [each.decode_s for each in settled(visits)] == pytest.approx([*seconds.values()])


def test_decoding_that_was_timed_apart_in_some_visits_is_settled_with_the_others() -> None:
    apart = [trial(number, 0.1) for number in range(4)]
    by_two = [replace(trial(number, 0.1), one_token_s=0.02) for number in range(4, 8)]
    (made,) = settled([*apart, *by_two])
    assert made.decode_s == pytest.approx(0.1)


@pytest.mark.parametrize("disturbed", ["one-token request", "request"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_disturbed_request_for_one_token_makes_decoding_no_faster(
    disturbed: str, temperature: float
) -> None:
    prefill_s, decode_s, rounds = 0.02, 0.1, 10
    others = [0.03 * (number % 2) for number in range(8)]  # others use the machine in every second
    visits = [
        (other, -other) if disturbed == "one-token request" else (0.0, other) for other in others
    ]
    trials = [
        replace(
            trial(number, decode_s + more, temperature=temperature, rounds=rounds),
            one_token_s=prefill_s + taken,
        )
        for number, (taken, more) in enumerate(visits)
    ]
    made = [each.decode_s for each in settled(trials)]
    assert made == pytest.approx([decode_s] * len(made))
    timings = [
        replace(rejected(number, k, 15, 1.0), one_token_s=prefill_s + taken)
        for number, (taken, _) in enumerate(visits)
        for k in (0, 2)
    ]
    timed = timed_rounds(
        [
            replace(timing, seconds=timing.seconds + visits[timing.visit][1])
            for timing in timings
        ],
        LLAMACPP,
    )  # fmt: skip
    assert timed is not None
    for k, made in timed.by_k.items():
        assert made.seconds == pytest.approx(rejected(0, k, 15, 1.0).seconds)


# ---- a run ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    """Our own loop through the door of servers, both temperatures."""
    root = tmp_path_factory.mktemp("served")
    asked = ["engine=own", f"results_root={root}", *SMALL, "temperature=[0,1]"]
    return ran("server", *asked)


@pytest.fixture(scope="module")
def summary(stored: StoredRun) -> Summary:
    return analyse(stored)


def test_every_cell_is_measured_and_predicted_in_the_engines_rows_alone(summary: Summary) -> None:
    cells = {
        source: {(r.prompt_set, r.temperature, r.k) for r in summary.results if r.source == source}
        for source in ("measured", "replayed")
    }
    assert cells["measured"] == cells["replayed"]
    assert len(cells["measured"]) == 2 * 2 * 4
    assert {(row.engine, row.concurrency) for row in summary.results} == {("own", 1)}
    assert {answer.engine for answer in summary.answers} == {"own"}
    greedy = {
        (r.prompt_set, r.k, r.source): r for r in summary.results if r.temperature == 0 and r.k
    }
    for (prompt_set, k, source), row in greedy.items():
        if source == "measured":
            assert row.rounds == pytest.approx(greedy[prompt_set, k, "replayed"].rounds)
            assert row.new_tokens == greedy[prompt_set, k, "replayed"].new_tokens
    assert from_json(to_json(summary)) == summary


def test_a_lossless_server_passes_its_gate(summary: Summary) -> None:
    assert summary.served is not None
    assert summary.served.lossless
    greedy = [gate for gate in summary.served.gates if gate.temperature == 0]
    assert [(g.k, g.texts, g.equal_texts, g.equal_rounds, g.equal_drafted) for g in greedy] == [
        (k, 8, 8, 8, 8) for k in (1, 2, 4)
    ]
    sampled = [gate for gate in summary.served.gates if gate.temperature == 1]
    assert [gate.k for gate in sampled] == [0, 1, 2, 4]
    assert all(abs(gate.text_z or 0.0) < 4 for gate in sampled)
    assert all(gate.rounds_z is not None for gate in sampled if gate.k)


def test_a_prediction_stands_next_to_each_measurement_with_its_error(summary: Summary) -> None:
    cells = summary.predicted_cells
    assert len(cells) == 2 * 2 * 3
    for measured, predicted in cells:
        assert predicted.speedup is not None
        assert measured.speedup is not None
    report = markdown.report(content_of(summary), (), Path("run"))
    assert "## Cells on the harness's loop" in report
    assert "## Is the server lossless?" in report
    assert "Predicted against measured speedup: median error" in report


def as_told(run: StoredRun) -> StoredRun:
    """The run, had its first tokens come from the prefill."""
    return with_engine(first_position=1)(run)


def of_an_older_version(run: StoredRun) -> StoredRun:
    """The run, had it not stored what the client saw."""
    trials = (replace(trial, user_s=None, user_decode_s=None) for trial in run.trials)
    return replace(run, trials=tuple(trials))


def test_what_users_wait_for_is_each_request_on_the_clients_clock(
    stored: StoredRun, summary: Summary
) -> None:
    made = analyse(as_told(stored))
    served = made.served
    assert served is not None
    rows = {(row.temperature, row.k): row for row in served.latencies}
    assert set(rows) == {(t, k) for t in (0.0, 1.0) for k in (0, 1, 2, 4)}
    for cell, row in rows.items():
        trials = [t for t in stored.trials if (t.temperature, t.k) == cell]
        assert (row.requests, row.load, row.clock, len(trials)) == (24, False, "client", 24)
        assert (row.first_token, row.per_token, row.request) != (None, None, None)
        waits = {
            row.first_token: [(t.user_s or 0.0) - (t.user_decode_s or 0.0) for t in trials],
            row.per_token: [(t.user_decode_s or 0.0) / (t.new_tokens or 1) for t in trials],
            row.request: [t.user_s or 0.0 for t in trials],
        }
        for percentiles, seconds in waits.items():
            assert percentiles is not None
            ordered = sorted(seconds)
            assert (percentiles.p50, percentiles.p95) == pytest.approx((ordered[11], ordered[22]))
            assert percentiles.p99 is None  # of 24 requests none can be expected beyond it
    page = markdown.report(content_of(made), (), Path("run"))
    assert "## What a user waits for on the harness's loop" in page
    assert "TTFT p50 | TTFT p95 | TPOT p50" in page
    (table,) = (t for t in tables_of(made) if "waits" in t.title)
    assert not [each.title for each in table.columns if column_definition(each) is None]
    # A run of which everything is from rounds has no time of the first token
    assert summary.served is not None
    assert {row.first_token for row in summary.served.latencies} == {None}


def test_a_run_that_did_not_store_what_the_client_saw_has_its_own_clocks_waits(
    stored: StoredRun,
) -> None:
    older = of_an_older_version(stored)

    def latencies(clock: ServerClock) -> list[UserLatency]:
        engine = Setup(with_engine(first_position=1, clock=clock)(older)).engine
        assert engine is not None
        return [*one_by_one(older.trials, engine, None)]

    rows = latencies("engine")
    assert len(rows) == 2 * 4
    for row in rows:
        trials = [t for t in older.trials if (t.temperature, t.k) == (row.temperature, row.k)]
        prefills = sorted(t.prefill_s or 0.0 for t in trials)
        assert row.clock == "engine"
        assert row.first_token is not None
        assert row.first_token.p50 == pytest.approx(prefills[11])
    # Processor time is not what a user waits for
    assert latencies("cpu") == []


def test_a_text_has_the_trace_of_its_own_first_token(stored: StoredRun) -> None:
    trial = next(t for t in stored.trials if (t.temperature, t.k) == (1.0, 0))
    trace = next(t for t in stored.traces if (t.key, t.k) == (trial.key, 0))
    tokens = trial.tokens or ()
    one, other = (
        replace(trial, repetition=number, tokens=(first, *tokens))
        for number, first in enumerate((7, 8))
    )
    traces = [replace(trace, repetition=number) for number in (0, 1)]
    run = with_engine(first_position=1)(replace(stored, trials=(one, other)))
    run.__dict__["traces"] = traces
    texts = served_texts(Setup(run))
    assert [texts.trace_of(each) for each in (one, other)] == traces
    assert texts.trace_of(replace(other, tokens=(9, *tokens))) is None


def timed_at(
    run: StoredRun, varied: float, costs: ServerCosts = COSTS, one_token_s: float | None = None
) -> StoredRun:
    """The run, had its rounds cost so much, but for a relative standard deviation.

    With `one_token_s` a request of that was taken off each.
    """
    rng = np.random.default_rng(1)

    def seconds(k: int, rounds: int) -> dict[str, Any]:
        start_s = costs.start_s if k else costs.plain_start_s
        all_s = (start_s + rounds * costs.times.at(k)) * float(np.exp(varied * rng.normal()))
        return {"seconds": all_s, "one_token_s": one_token_s}

    trials = tuple(
        replace(t, decode_s=timed.pop("seconds"), **timed)
        for t in run.trials
        for timed in [seconds(t.k, (t.rounds if t.k else t.new_tokens) or 0)]
    )
    rounds = tuple(replace(t, **seconds(t.k, t.rounds)) for t in run.rounds)
    return replace(run, trials=trials, rounds=rounds)


# Processor time of llama.cpp: 1.84 ms for one token, 1.98 for two, 0.44 for each further one. So
# what is left of a request after the one-token request has a start of 0.14 - 0.44 ms
CPU_COSTS = ServerCosts(
    plain_start_s=-0.30e-3,
    start_s=-0.55e-3,
    times=RoundTimes(0.44e-3, ((1, 0.92e-3), (2, 1.20e-3), (4, 1.73e-3))),
)


@pytest.mark.parametrize("synthetic", [True, False])
@pytest.mark.parametrize("varied", [0.0, 0.01])
def test_a_request_for_one_token_that_costs_more_than_a_prefill_biases_no_prediction(
    stored: StoredRun, synthetic: bool, varied: float
) -> None:
    timed = timed_at(stored, varied, CPU_COSTS, 1.84e-3)
    if not synthetic:  # then requests for a part of the budget tell the start
        parts = (
            replace(t, cell=f"{t.cell}-short", tokens=t.tokens[:4], new_tokens=4, rounds=4)
            for t in timed.trials
            if t.k == 0 and t.tokens
        )
        short = timed_at(replace(timed, trials=tuple(parts)), varied, CPU_COSTS, 1.84e-3).trials
        timed = replace(with_engine(synthetic=False)(timed), rounds=(), starts=short)
    server = timed_server(served_texts(Setup(timed)))
    costs, run = server.costs_by_temperature[0.0], served_rows(server)
    assert (costs.plain_start_s, costs.start_s) == pytest.approx(
        (CPU_COSTS.plain_start_s, CPU_COSTS.start_s), abs=1e-6 if not varied else 0.25e-3
    )
    pairs = zip(run.measured, run.predicted, strict=True)
    greedy = [(row, found) for row, found in pairs if found and row.temperature == 0]
    assert len(greedy) == 2 * 4
    errors: list[float] = []
    for row, found in greedy:
        if row.k == 0:
            assert found.ms_per_token == pytest.approx(row.ms_per_token, rel=0.015)
        else:
            errors.append(abs((found.speedup or 0.0) / (row.speedup or np.inf) - 1.0))
    assert np.median(errors) < 0.02


def visited(
    run: StoredRun,
    temperature: float,
    seed: int,
    *,
    lacking: range = range(0),
    later: float | None = None,
) -> StoredRun:
    """The run of one temperature in 40 visits, had its rounds cost what `COSTS` says, and others
    used the machine heavily; in some visits K=4 was not measured.

    Args:
        run: of at least one visit.
        temperature: whose requests are kept.
        seed: of the others' use.
        lacking: visits that K=4 lacks.
        later: how many times slower the machine was when the run was resumed, K=4 was measured in
            the visits that it lacked, and plain decoding again with it; None: it was not.
    """
    rng = np.random.default_rng(seed)
    texts = [trial for trial in run.trials if trial.temperature == temperature]
    first: list[Trial] = []
    second: list[Trial] = []
    for visit in range(40):
        for text in texts:
            if text.repetition != visit % SMALL_VISITS:
                continue
            rounds = (text.rounds if text.k else text.new_tokens) or 0
            start_s = COSTS.start_s if text.k else COSTS.plain_start_s
            seconds = start_s + rounds * COSTS.times.at(text.k)

            # Drawn whether it is used or not, so that the others' use is the same
            others, then = 1.0 + rng.exponential(0.8, 2)
            name = f"{text.cell}-{visit}"
            made = replace(text, cell=name, repetition=visit, decode_s=others * seconds)
            if not (text.k == 4 and visit in lacking):
                first.append(made)
            if later is not None and visit in lacking and text.k in (0, 4):
                second.append(replace(made, decode_s=later * then * seconds))
    config = {**run.config, "repetitions": 40, "temperature": [temperature]}
    made = replace(run, trials=(*first, *second), config=config, rounds=())
    made.__dict__["traces"] = run.traces
    return made


def speedups(run: StoredRun) -> tuple[dict[tuple[str | None, int], float], set[str]]:
    """What is measured, by prompt set and K, and the statuses of K=4."""
    rows = served_rows(timed_server(served_texts(Setup(run)))).measured
    found = {(row.prompt_set, row.k): row.speedup for row in rows}
    assert found
    assert None not in found.values()
    statuses = {row.status for row in rows if row.k == 4}
    return {key: speedup or 0.0 for key, speedup in found.items()}, statuses


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("temperature", "later"),
    [
        (0.0, None),
        (0.0, 3.0),
        (1.0, None),
        (1.0, 3.0),
    ],
)
def test_a_server_that_died_early_has_the_speedup_of_the_visits_that_it_shares(
    stored: StoredRun, temperature: float, later: float | None
) -> None:
    errors: list[float] = []
    for seed in range(4):
        truth, _ = speedups(visited(stored, temperature, seed))
        run = visited(stored, temperature, seed, lacking=range(2, 40), later=later)
        found, statuses = speedups(run)
        for (prompt_set, k), speedup in found.items():
            if k == 4:
                errors.append(float(np.log(speedup / truth[prompt_set, k])))
            else:
                assert speedup == pytest.approx(truth[prompt_set, k], rel=0.01)
        assert statuses == {"partial" if later is None else "complete"}
    # The low end of two visits against that of forty is 27 % too slow
    assert abs(np.mean(errors)) < 0.12


@pytest.mark.parametrize("temperature", sample([0.0, 1.0], 1.0))
def test_a_k_that_lacks_visits_is_partial_and_no_answers_while_another_has_them(
    stored: StoredRun, temperature: float
) -> None:
    made = analyse(visited(stored, temperature, 0, lacking=range(2, 40)))
    statuses = {(row.k, row.status, row.error) for row in made.results}
    few = "timed in 2 of 40 visits next to plain decoding"
    assert statuses == {*((k, "complete", None) for k in (0, 1, 2)), (4, "partial", few)}
    of_server = [answer for answer in made.answers if answer.source == "measured"]
    assert of_server
    for answer in of_server:
        assert 4 not in (answer.k, answer.reason_values.get("k"))
        assert answer.visits is None
    report = markdown.report(content_of(made), (), Path("run"))
    assert "K=4 at temperature" in report
    assert "was timed in 2 of 40 visits" in report
    assert "no answer names it while another K has many more" in report


@pytest.mark.parametrize("temperature", sample([0.0, 1.0], 1.0))
def test_a_k_that_lacks_few_visits_is_partial_and_still_chosen_from(
    stored: StoredRun, temperature: float
) -> None:
    made = analyse(visited(stored, temperature, 0, lacking=range(39, 40)))
    assert {(row.k, row.status) for row in made.results if row.source == "measured"} == {
        *((k, "complete") for k in (0, 1, 2)),
        (4, "partial"),
    }
    assert made.served is not None
    assert [entry.k for entry in made.served.by_k] == [1, 2, 4]
    of_server = [answer for answer in made.answers if answer.source == "measured"]
    assert of_server
    for answer in of_server:
        named = 4 in (answer.k, answer.reason_values.get("k"))
        assert answer.visits == (Visits(39, 40) if named else None)
    assert any("was timed in 39 of 40 visits" in text for text in content_of(made).caveats)


@pytest.mark.parametrize("temperature", sample([0.0, 1.0], 1.0))
def test_where_no_k_has_all_visits_the_answer_says_on_how_many_it_rests(
    stored: StoredRun, temperature: float
) -> None:
    run = visited(stored, temperature, 0)
    kept = tuple(t for t in run.trials if t.repetition < 2 or (t.repetition, t.k) == (2, 1))
    made = analyse(replace(run, trials=kept))
    assert {row.status for row in made.results} == {"partial"}
    of_server = [answer for answer in made.answers if answer.source == "measured"]
    assert {answer.visits for answer in of_server} == {Visits(2, 40)}
    assert all(answer.speedup is not None for answer in of_server)
    content = content_of(made)
    assert "(in 2 of 40 visits)" in " ".join(content.verdicts[:2])
    assert any("was timed in 2 of 40 visits" in text for text in content.caveats)


@pytest.mark.parametrize("varied", [0.0, 0.1])
def test_a_predictions_interval_has_the_error_of_the_costs(
    stored: StoredRun, monkeypatch: pytest.MonkeyPatch, varied: float
) -> None:
    monkeypatch.setattr(jackknife, "MIN_PROMPTS", 4)
    server = timed_server(served_texts(Setup(timed_at(stored, varied))))
    # Greedy texts take the rounds that replay expects, sampled ones vary
    made = [row for row in served_rows(server).predicted if row is not None]
    rows = [row for row in made if row.k and row.temperature == 0]
    assert len(rows) == 6
    for row in rows:
        costs = server.fits[0.0, row.prompt_set].costs
        texts = server.texts.texts(server.texts.settled, 0, 0.0).of([row.prompt_set])
        plain_s = costs.plain_s(texts.tokens)
        seconds = costs.speculative_s(server.texts.replayed(texts, row.k))
        _, of_text = np.unique([t.prompt for t in texts.trials], return_inverse=True)
        before_s, tokens, after_s = (
            np.bincount(of_text, each).astype(np.float64)
            for each in (plain_s, texts.tokens, seconds)
        )
        log = jackknife.log_speedup(before_s, tokens, after_s, tokens)
        alone = jackknife.exponential(log.interval(skew=True))
        assert alone is not None
        if varied == 0.0:
            assert (row.speedup_lo, row.speedup_hi) == pytest.approx(alone)
        elif row.prompt_set == "easy":
            assert alone.lo == pytest.approx(alone.hi)  # all prompts are alike
            assert (row.speedup_hi or 0.0) > 1.02 * (row.speedup_lo or np.inf)


def drifting(run: StoredRun, ks: tuple[int, ...], nats: float = 2.0) -> StoredRun:
    """The run, had its servers at these K returned texts at temperature 1 so unlikely per token."""
    checks = tuple(
        replace(check, excess=-nats * check.tokens)
        if isinstance(check, TextLikelihood) and check.k in ks
        else check
        for check in run.checks
    )
    return replace(run, checks=checks)


def shifted(run: StoredRun) -> StoredRun:
    """The run, had its target been quantised: K=0 passes just so, and every K would not."""
    checks = tuple(
        replace(check, excess=-(4.5 if check.k else 3.8) * check.variance**0.5)
        if isinstance(check, TextLikelihood)
        else check
        for check in run.checks
    )
    return replace(run, checks=checks)


def repeating(run: StoredRun, ks: tuple[int, ...]) -> StoredRun:
    """The run, had its servers at these K ignored the seeds of requests: each visit is the first's.

    The target is not sure of any text.
    """
    first = {(t.k, t.prompt): t for t in run.trials if t.temperature == 1 and not t.repetition}
    trials = (
        replace(trial, tokens=first[trial.k, trial.prompt].tokens)
        if trial.temperature == 1 and trial.k in ks
        else trial
        for trial in run.trials
    )
    checks = (
        replace(check, log_probability=-0.5 * check.tokens)
        if isinstance(check, TextLikelihood)
        else check
        for check in run.checks
    )
    return replace(run, trials=tuple(trials), checks=tuple(checks))


PASSED = dict.fromkeys((0, 1, 2, 4), True)
REPEAT = "all visits of the server returned the same"


@pytest.mark.parametrize(
    ("change", "lossless", "caveat", "decision_stands"),
    [
        (
            lambda run: drifting(run, (2,)),
            {**PASSED, 2: False},
            "NOT LOSSLESS at temperature 1, K=2",
            False,
        ),
        (
            lambda run: drifting(run, (0, 1, 2, 4)),
            {0: False, 1: None, 2: None, 4: None},
            "other weights",
            True,
        ),
        # Speculation changes them even so
        (
            lambda run: drifting(drifting(run, (0, 1, 2)), (4,), nats=9.0),
            {0: False, 1: None, 2: None, 4: False},
            "NOT LOSSLESS at temperature 1, K=4",
            False,
        ),
        (shifted, PASSED, None, True),
        (
            lambda run: repeating(run, (0, 1, 2, 4)),
            {**dict.fromkeys((1, 2, 4)), 0: False},
            REPEAT,
            True,
        ),
        (lambda run: repeating(run, (2,)), {**PASSED, 2: False}, REPEAT, False),
    ],
)
def test_a_server_that_is_not_lossless_is_named_and_gets_no_verdict_there(
    stored: StoredRun,
    change: Callable[[StoredRun], StoredRun],
    lossless: dict[int, bool | None],
    caveat: str | None,
    decision_stands: bool,
) -> None:
    made = analyse(change(stored))
    assert made.served is not None
    gates = [gate for gate in made.served.gates if gate.temperature == 1]
    assert {gate.k: gate.lossless for gate in gates} == lossless
    content = content_of(made)
    unlike = [
        text for text in content.caveats if re.search(f"LOSSLESS|other weights|{REPEAT}", text)
    ]
    assert any(caveat in text for text in unlike) if caveat else not unlike
    sampled = [answer for answer in made.answers if answer.temperature == 1]
    distrusted = {answer.reason == "server_not_lossless" for answer in sampled}
    assert distrusted == {not decision_stands}
    # Nor is it predicted there, by tokens per round that its texts do not have
    predicted = [row for row, _ in made.predicted_cells if row.temperature == 1]
    assert bool(predicted) == decision_stands
    assert (1 in [costs.temperature for costs in made.served.costs]) == decision_stands
    greedy = {answer.reason for answer in made.answers if answer.temperature == 0}
    assert greedy
    assert "server_not_lossless" not in greedy


def changing(run: StoredRun, k: int) -> StoredRun:
    """The run, had its server at this K returned other greedy texts than plain decoding."""
    faults = [
        TextCheck(t.prompt_set, t.prompt, t.repetition, k, "FAIL", 3)
        for t in run.trials
        if (t.temperature, t.k) == (0, k)
    ]
    return replace(run, checks=(*run.checks, *faults))


STARTED = [
    {"k": k, "slots": 1, "line": f"serve --port-like {k}", "production": f"serve K{k}"}
    for k in (0, 1, 2, 4)
]


def answered(made: Summary, temperature: float, **values: Any) -> Summary:
    """The summary, had it this answer, for a run that was asked for one temperature."""
    answers = [a for a in made.answers if a.temperature == temperature]
    changed = tuple(replace(each, draft="tiny_good", speedup=1.3, **values) for each in answers)
    return replace(made, answers=changed)


def test_a_k_that_changes_texts_is_named_and_not_recommended(
    stored: StoredRun,
) -> None:
    loads = LoadResults((), (Schedule(0.0, ()), Schedule(1.0, ())), ())
    run = with_engine(name="llamacpp", version="b11549", commands=STARTED)(stored)
    cases: tuple[tuple[StoredRun, float, str], ...] = (
        (
            drifting(run, (1,)),
            1.0,
            "server is NOT LOSSLESS at temperature 1, K=1 ",
        ),
        (
            drifting(run, (0, 1, 2, 4)),
            1.0,
            "temperature 1 the plain server's own texts are not the target's",
        ),
        (changing(run, 2), 0.0, r"16 of 24 greedy texts, .* equal .*; not lossless: K=2\."),
    )
    for changed, temperature, sentence in cases:
        served = replace(served_run(Setup(changed)), loads=loads)
        made = replace(analyse(changed), served=served_summary(served))
        assert made.served is not None
        content = content_of(made)
        text = " ".join((*content.reasons, *content.caveats))
        assert re.search(sentence, text), text
        assert ("Sampled texts follow" in text) == (temperature == 0)
        failed = made.served.not_lossless(temperature)
        assert [each.temperature for each in made.served.schedules] == [
            value for value in (0.0, 1.0) if value != temperature or not failed
        ]
        undecided = {"decision": "undecided", "k": 0, "reason_values": {"k": 1}}
        (snippet,) = serving_commands.snippets_of(answered(made, temperature, **undecided))[:1]
        assert ("to try" in snippet.code) == (not failed)
        if not failed:
            continue
        # A K that is served at another temperature is not for requests of this one
        (other,) = {0.0, 1.0} - {temperature}
        wins = answered(made, other, decision="speculate", k=failed[0], reason="held_out_gain")
        notes = " ".join(serving_commands.snippets_of(wins)[0].notes)
        assert f"At temperature {temperature:g} K={failed[0]} is not lossless" in notes


Change = Callable[[StoredRun], StoredRun]


def with_engine(**changes: Any) -> Change:
    def changed(run: StoredRun) -> StoredRun:
        engine = {**run.manifest.entries["engine"], **changes}
        return replace(run, manifest=run.manifest.updated(engine=engine))

    return changed


def with_rounds(run: StoredRun, rule: Rule, more: int = 0) -> StoredRun:
    """The run, had its servers taken an acceptance rule's expected rounds at temperature 1."""
    served = served_texts(Setup(run))
    rounds: dict[str, int] = {}
    for k in served.ks:
        texts = served.texts(run.trials, k, 1.0)
        expected, _ = served.rounds_expected(texts, k, rule)
        rounds |= {t.cell: round(e) + more for t, e in zip(texts.trials, expected, strict=True)}
    trials = (replace(trial, rounds=rounds.get(trial.cell, trial.rounds)) for trial in run.trials)
    return replace(run, trials=tuple(trials))


@pytest.mark.parametrize(
    ("rule", "taken", "more", "caveat"),
    [
        ("ratio", "ratio", 0, None),
        ("ratio", "ratio", 3, "rounds are not those of replay"),
        ("greedy_draft", "greedy_draft", 0, None),
        # Each text alike off is far from chance, where nothing is left to it
        ("greedy_draft", "greedy_draft", 1, "0 of 24 texts exactly"),
        (
            "ratio",
            "greedy_draft",
            0,
            "not those of decode.rule=ratio (* those of greedy_draft: leave decode.rule out",
        ),
    ],
)
def test_rounds_unlike_replays_are_the_drafts_and_leave_the_verdict(
    stored: StoredRun, rule: Rule, taken: Rule, more: int, caveat: str | None
) -> None:
    made = analyse(with_rounds(with_engine(rule=rule)(stored), taken, more))
    assert made.served is not None
    gates = [gate for gate in made.served.gates if gate.temperature == 1]
    assert {gate.k: gate.lossless for gate in gates} == PASSED
    for gate in gates[1:]:
        assert (gate.rounds_z is None) == (rule == "greedy_draft")
        assert gate.equal_rounds == (None if rule == "ratio" else 0 if more else 24)
    unlike = [text for text in content_of(made).caveats if "rounds are not those" in text]
    assert len(unlike) == (caveat is not None)
    assert caveat is None or fnmatch(unlike[0], f"*{caveat}*")
    assert made.answers
    assert "server_not_lossless" not in {answer.reason for answer in made.answers}


def without_traces(run: StoredRun) -> StoredRun:
    changed = replace(run)
    changed.__dict__["traces"] = []
    return changed


def without_weights(run: StoredRun) -> StoredRun:
    return without_traces(replace(run, config={**run.config, "score": False}))


@pytest.mark.parametrize(
    ("change", "why", "sentence"),
    [
        (without_weights, "no_weights", "not loaded here"),
        (without_traces, "no_texts", "no text of plain decoding was scored"),
        (with_engine(first_position=None), "no_counting", "counts no rounds"),
        (with_engine(rule=None), "no_counting", "counts no rounds"),
    ],
)
def test_what_cannot_be_predicted_is_measured_and_said(
    stored: StoredRun, change: Change, why: str, sentence: str
) -> None:
    made = analyse(change(stored))
    assert made.served is not None
    assert made.served.not_predicted == why
    assert {row.source for row in made.results} == {"measured"}
    assert made.answers
    assert any(sentence in text for text in content_of(made).reasons)


def without_synthetic(run: StoredRun) -> StoredRun:
    """The run, had its engine no synthetic acceptance: it asks for parts of the budget instead."""
    starts = tuple(
        replace(
            trial,
            cell=f"{trial.cell}-short",
            tokens=(trial.tokens or ())[:4],
            new_tokens=4,
            stop_reason="budget",
            decode_s=0.3 * (trial.decode_s or 0.0),
        )
        for trial in run.trials
    )
    return replace(with_engine(synthetic=False)(run), rounds=(), starts=starts)


def test_round_times_of_other_prompt_sets_serve_where_acceptance_cannot_be_set(
    stored: StoredRun,
) -> None:
    made = analyse(without_synthetic(stored))
    assert made.served is not None
    assert {costs.source for costs in made.served.costs} == {"other_sets"}
    assert len(made.predicted_cells) == 2 * 2 * 3
    easy = tuple(trial for trial in stored.trials if trial.prompt_set == "easy")
    one_set = analyse(without_synthetic(replace(stored, trials=easy)))
    assert one_set.served is not None
    assert one_set.served.not_predicted == "no_costs"


def test_why_nothing_is_predicted_is_what_happened(stored: StoredRun) -> None:
    run = without_synthetic(stored)

    def failed(trial: Trial) -> Trial:
        return replace(trial, status="failed", decode_s=None, tokens=None, error="no answer")

    def not_predicted(run: StoredRun) -> str | None:
        served = analyse(run).served
        assert served is not None
        return served.not_predicted

    # Three prompt sets or one: where the servers of every K failed, that is why
    without_k = tuple(failed(trial) if trial.k else trial for trial in run.trials)
    starts = tuple(trial for trial in run.starts if not trial.k)
    assert not_predicted(replace(run, trials=without_k, starts=starts)) == "servers_failed"
    # Two sets were timed, and every text is of one length
    alike = [
        replace(trial, tokens=(trial.tokens or ())[:5], new_tokens=4, stop_reason="budget")
        for trial in run.trials
    ]
    assert not_predicted(replace(run, trials=tuple(alike), starts=())) == "costs_untold"


def test_a_prompt_that_failed_at_a_k_is_no_visit_that_the_others_lack(stored: StoredRun) -> None:
    first = next(trial for trial in stored.trials if trial.k == 4)
    lost = [
        replace(trial, status="failed", decode_s=None, tokens=None, error="refused")
        if (trial.k, trial.prompt_set, trial.prompt) == (4, first.prompt_set, first.prompt)
        else trial
        for trial in stored.trials
    ]
    made = analyse(replace(stored, trials=tuple(lost)))
    assert "server_visits_lacking" not in {caveat.code for caveat in made.caveats}
    assert {row.status for row in made.results if row.k == 4 and row.speedup} >= {"partial"}


@pytest.mark.parametrize("rule", sample(["greedy_draft", "ratio"], "ratio"))
def test_the_line_to_paste_is_that_of_the_server_that_was_measured(
    stored: StoredRun, rule: str
) -> None:
    made = analyse(with_engine(name="llamacpp", version="b11549", rule=rule)(stored))
    gain: dict[str, Any] = {"decision": "speculate", "draft": "tiny_good", "k": 2, "speedup": 1.3}
    gains = tuple(replace(a, **gain, reason="held_out_gain") for a in made.answers)
    content = content_of(replace(made, answers=gains))
    assert content.verdicts[0].startswith("Use ")
    (snippet,) = content.snippets
    assert "--spec-draft-n-max 2" in snippet.code
    assert (PROBABILISTIC in snippet.code) == (rule == "ratio")
    assert "measured on llama.cpp b11549" in snippet.notes[0]


# A whole answer, whatever the run's own was
LOSES: dict[str, Any] = {
    "decision": "does_not_pay",
    "k": 0,
    "reason": "held_out_loss",
    "reason_values": {"draft": "tiny_good", "k": 2, "alpha": 0.3, "breakeven_alpha": 0.5},
}


LINES = [(0, 1, "vllm serve T"), (2, 1, "vllm serve T --two"), (2, 4, "vllm serve T --load")]


@pytest.fixture(scope="module")
def with_lines(stored: StoredRun) -> Summary:
    """Of the run, had its servers been started by these lines."""
    commands = [
        {"k": k, "slots": slots, "line": f"{line} --max-num-seqs 1", "production": line}
        for k, slots, line in LINES
    ]
    return analyse(with_engine(name="vllm", version="0.32.0", commands=commands)(stored))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"decision": "speculate", "k": 2}, "vllm serve T --two"),
        (LOSES, "vllm serve T"),
        (
            {"decision": "undecided", "k": 0, "reason_values": {"k": 2}},
            "# without a draft\nvllm serve T\n# to try K=2\nvllm serve T --two",
        ),
        ({"decision": "undecided", "k": 0, "reason_values": {}}, "vllm serve T"),
    ],
)
def test_the_commands_that_were_measured_are_those_to_paste(
    with_lines: Summary, answer: dict[str, Any], expected: str
) -> None:
    gains = [replace(a, draft="tiny_good", speedup=1.3, **answer) for a in with_lines.answers]
    made = replace(with_lines, answers=tuple(gains))
    (snippet,) = serving_commands.snippets_of(made)
    assert snippet.code == expected
    served = [line for line in expected.splitlines() if not line.startswith("#")]
    used = [line for line in snippet.measured.splitlines() if not line.startswith("#")]
    assert used == [f"{line} --max-num-seqs 1" for line in served]
    if "reason_values" not in answer:
        content = content_of(made)
        for page in (markdown.report(content, (), Path("run")), html.report(content, ())):
            assert page.index(expected) < page.index("What the measurement used:")
    assert "(vLLM 0.32.0)" in snippet.title
    assert "--max-model-len" in snippet.notes[-1]


def test_a_draft_that_a_server_holds_in_another_dtype_than_it_was_scored_in_is_said(
    stored: StoredRun, summary: Summary
) -> None:
    code = "draft_served_in_other_dtype"
    assert code not in {each.code for each in summary.caveats}
    in_16_bits = with_engine(name="vllm", dtype="bfloat16")(stored)
    assert code in {each.code for each in analyse(in_16_bits).caveats}


@pytest.mark.parametrize("kv_type", sample(["f16", "q8_0"], "q8_0"))
def test_the_memory_of_a_draft_is_that_of_the_servers_configuration(
    stored: StoredRun, kv_type: str
) -> None:
    weights = {k: (2 + (k > 0)) * 2**20 for k in (0, 1, 2, 4)}
    commands = [
        {**each, "slots": slots, "context_tokens": 100, "weights_bytes": weights[each["k"]]}
        for slots in (1, 4)
        for each in STARTED
    ]
    run = with_engine(name="llamacpp", version="b11549", commands=commands)(stored)
    flags = ["--cache-type-k", kv_type, f"--spec-draft-type-k={kv_type}"]
    made = analyse(replace(run, config={**run.config, "flags": flags}))
    assert made.served is not None
    memory = made.served.memory
    assert memory is not None
    assert (memory.slots, memory.context_tokens, memory.kv_type) == (4, 100, kv_type)
    assert (memory.target_weights_bytes, memory.draft_weights_bytes) == (2 * 2**20, 2**20)
    described = stored.manifest.models["draft"].entries  # in float32
    loaded = 2 * described["layers"] * described["kv_heads"] * described["head_dim"] * 4
    width = {"f16": 2.0, "q8_0": 34 / 32}[kv_type]
    assert memory.draft_kv_bytes_per_token == pytest.approx(loaded * width / 4)
    others = tuple(each for each in made.caveats if each.code != "embedded_models")
    (text,) = [t for t in content_of(replace(made, caveats=others)).reasons if "cache" in t]
    assert "1 MiB of weights, where the target has 2 MiB; and" in text
    assert f"of cache in {kv_type} for 4 requests of 100 tokens" in text
    assert "KV tokens" not in text


def test_latency_csv_has_prefills_and_what_rounds_take_without_their_start(
    stored: StoredRun, summary: Summary
) -> None:
    rows = {(row.kind, row.tokens, row.temperature): row for row in summary.latency}
    lengths = {trial.prompt_tokens for trial in stored.trials}
    assert {tokens for kind, tokens, _ in rows if kind == "prefill"} == lengths
    for times in summary.round_times:
        for k, seconds in {0: times.plain_s, **times.round_s}.items():
            row = rows["round", k, times.temperature]
            assert (row.role, row.samples) == (
                "draft" if k else "target",
                8 if times.temperature == 0 else 24,
            )
            # Milliseconds of a round; other work moves both
            assert 0.2 < row.median_ms / (1e3 * seconds) < 5.0
            assert row.p10_ms <= row.median_ms <= row.p90_ms
    assert len(load(stored.folder).latency) == len(rows)


# ---- runs of several engines ---------------------------------------------------------------------


def on_vllm(run: StoredRun, pace: float = 1.0, at: int | None = None) -> StoredRun:
    """The run, had vLLM made it without telling rejections, at one K (at every K) slower."""
    paces = {trial.k: pace if at in (None, trial.k) else 1.0 for trial in run.trials}
    trials = tuple(
        replace(trial, decode_s=(trial.decode_s or 0.0) * paces[trial.k], rejected=None)
        for trial in run.trials
    )
    made = with_engine(name="vllm", version="0.32.0")(replace(run, trials=trials))
    return replace(made, folder=Path("on_vllm"))


def test_engines_are_compared_by_what_each_gained_from_the_pair(
    stored: StoredRun, summary: Summary
) -> None:
    comparison = compare([stored, on_vllm(stored, 2.0, at=4)])
    differing = {entry.name: entry.values for entry in comparison.differences}
    assert differing["engine.name"] == ("own", "vllm")
    assert summary.served is not None
    speedups = {(entry.temperature, entry.k): entry.speedup for entry in summary.served.by_k}
    rows = [row for row in comparison.rows if row.prompt_set == "all" and row.k]
    assert len(rows) == 2 * 3
    for row in rows:
        if row.temperature == 0.0:  # sampled texts have other lengths at each K
            assert row.reference_speedup == pytest.approx(speedups[0.0, row.k])
        assert row.speedup_ratio == pytest.approx(0.5 if row.k == 4 else 1.0)
        assert row.alpha_difference is None


@pytest.mark.parametrize(
    ("other", "codes"),
    [
        (lambda run: on_vllm(run, 2.0), []),  # another engine may take longer
        (lambda run: on_vllm(drifting(run, (2,))), ["speedups_not_compared"]),
    ],
)
def test_what_differs_between_engines_is_no_fault(
    stored: StoredRun, other: Change, codes: list[str]
) -> None:
    comparison = compare([stored, other(stored)])
    assert list(dict.fromkeys(entry.code for entry in comparison.caveats)) == codes
    lossy = {(1.0, 2)} if codes else set()
    assert comparison.rows
    for row in comparison.rows:
        assert (row.speedup_ratio is None) == (row.k == 0 or (row.temperature, row.k) in lossy)


def test_a_request_that_took_no_time_by_its_clock_is_left_out_of_a_fit() -> None:
    """Processor time has steps: a very short request may take none of them."""
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0], [1.0, 4.0]])
    fitted = least_squares(columns, np.array([3.0, 5.0, 0.0, 9.0]), np.array([0.0, 0.0, 1.0, 0.0]))
    assert fitted == pytest.approx([1.0, 2.0])


def test_rounds_are_held_against_another_rule_only_where_the_target_s_probabilities_are_known() -> (
    None
):
    run = load(FROZEN / "server")
    traces = [
        replace(trace, target_logprob=np.full_like(trace.target_logprob, np.nan))
        if trace.temperature
        else trace
        for trace in run.traces
    ]
    trials = tuple(
        replace(trial, rounds=trial.rounds + 1) if trial.k and trial.temperature else trial
        for trial in run.trials
    )
    changed = replace(run, trials=trials)
    vars(changed)["traces"] = traces
    for gate in gates(served_texts(Setup(changed))):
        if gate.k and gate.temperature:
            assert gate.other_rule is None
            assert (gate.equal_rounds or 0) < (gate.replayed_texts or 0)
