"""From trials to result rows, against sums done by hand."""

from dataclasses import replace

import numpy as np
import pytest

from harness.analysis.cells import measured_rows
from harness.records import Trial
from harness.stats.jackknife import exponential, log_speedup, share_interval
from harness.theory.speedup import RoundTimes

TIMES = RoundTimes(0.010, ((1, 0.012), (2, 0.014)))


def plain(prompt, seconds, tokens=10, *, prompt_set="easy", repetition=0, temperature=0.0):
    return Trial(
        cell=f"{prompt_set}-{prompt}-{repetition}-0",
        prompt_set=prompt_set,
        prompt=prompt,
        repetition=repetition,
        k=0,
        temperature=temperature,
        rule=None,
        status="ok",
        new_tokens=tokens,
        prefill_s=0.5,
        decode_s=seconds,
        first_token_s=0.01,
        peak_memory_bytes=100,
    )


def drafted(prompt, seconds, tokens=10, *, lengths=(1, 1, 3), k=2, **kwargs):
    """Rounds by accepted length; the last one, if `tokens` asks for it, was cut."""
    rounds = sum(lengths)
    accepted = sum(j * count for j, count in enumerate(lengths))
    bonus = lengths[-1]
    return replace(
        plain(prompt, seconds, tokens, **kwargs),
        cell=f"{prompt}-{k}",
        k=k,
        rule="ratio",
        rounds=rounds,
        drafted=k * rounds,
        accepted=accepted,
        rejected=rounds - bonus,
        bonus=bonus,
        cut=0,
        accepted_lengths=tuple(lengths),
        draft_prefill_s=0.25,
        first_token_s=0.03,
        peak_memory_bytes=150,
    )


def failed(trial):
    nothing = dict.fromkeys(("new_tokens", "accepted_lengths", "decode_s"))
    return replace(trial, status="failed", error="out of memory", **nothing)


def rows(trials):
    return measured_rows(trials, model="big", draft="small", times={0.0: TIMES, 1.0: TIMES})


def test_a_baseline_row_is_ratios_of_sums_and_leaves_every_draft_column_empty():
    (row,) = rows([plain("a", 1.0, 10), plain("b", 6.0, 20), plain("c", 1.0, 20)])
    assert (row.source, row.status, row.prompts, row.new_tokens) == ("measured", "complete", 3, 50)
    assert row.ms_per_token == pytest.approx(8000 / 50)
    assert row.ms_per_token_p90 == pytest.approx(np.percentile([100, 300, 50], 90))
    assert row.ttft_ms == pytest.approx(510.0)
    assert (row.speedup, row.request_speedup) == (1.0, 1.0)
    empty = "rounds drafted accepted rejected acceptance_rate alpha alpha_lo mean_acceptance_length"
    empty += " tokens_per_round rule speedup_lo speedup_hi breakeven_alpha"
    assert [name for name in empty.split() if getattr(row, name) is not None] == []


def test_a_speculative_row_derives_its_rates_from_counts():
    row = rows([plain("a", 2.0, 10), drafted("a", 1.0, 12)])[1]
    assert (row.rounds, row.drafted, row.accepted, row.rejected) == (5, 10, 7, 2)
    expected = {
        "acceptance_rate": 0.7,
        "alpha": 7 / 9,
        "mean_acceptance_length": 1 + 7 / 5,
        "tokens_per_round": 12 / 5,
        "speedup": (2.0 / 10) / (1.0 / 12),
        "request_speedup": (2.5 / 10) / (1.75 / 12),
        "ttft_ms": 780.0,
        "breakeven_alpha": TIMES.break_even_alpha(2),
    }
    assert {name: getattr(row, name) for name in expected} == pytest.approx(expected)
    assert (row.rule, row.peak_memory_bytes, row.alpha_lo) == ("ratio", 150, None)


@pytest.mark.parametrize(("untold", "expected"), [(1, 108 / 45), (9, None)])
def test_few_texts_that_tell_their_rounds_stand_for_no_cell(untold, expected):
    done = [drafted(str(number), 1.0, 12) for number in range(10)]
    done[:untold] = [replace(trial, rounds=None) for trial in done[:untold]]
    (row,) = rows(done)
    assert row.rounds is None
    assert row.tokens_per_round == (expected and pytest.approx(expected))


def test_a_speedup_counts_only_generations_that_finished_on_both_sides():
    trials = [plain("a", 2.0), plain("b", 50.0), failed(plain("c", 1.0)), drafted("a", 1.0)]
    baseline, row = rows([*trials, failed(drafted("b", 1.0)), drafted("c", 90.0)])
    assert row.speedup == pytest.approx(2.0)
    assert row.ms_per_token == pytest.approx(1e3 * 91 / 20)
    assert (baseline.status, row.status) == ("partial", "partial")
    assert row.error == "1 of 3 generations failed, first: out of memory"


def test_a_repetition_pairs_with_its_own_repetition():
    trials = [plain("a", 2.0), plain("a", 9.0, repetition=1), drafted("a", 1.0)]
    baseline, row = rows(trials)
    assert (row.speedup, baseline.prompts) == (pytest.approx(2.0), 1)


@pytest.mark.parametrize(
    ("trials", "status", "speedup"),
    [
        ([plain("a", 2.0), failed(drafted("a", 1.0))], "failed", None),  # it failed throughout
        ([plain("a", 2.0), failed(drafted("a", 1.0)), drafted("a", 1.0)], "complete", 2.0),  # retry
        ([drafted("a", 1.0)], "complete", None),  # no baseline
    ],
)
def test_a_cell_says_what_became_of_it(trials, status, speedup):
    row = rows(trials)[-1]
    assert (row.status, row.speedup) == (status, speedup)
    assert (row.ms_per_token is None) == (status == "failed")
    assert row.breakeven_alpha is not None


def test_rows_come_by_set_then_temperature_then_k():
    trials = [
        drafted("a", 1.0, k=2, temperature=1.0),
        plain("a", 1.0, temperature=1.0),
        plain("b", 1.0, prompt_set="a-set"),
        plain("a", 1.0),
    ]
    keys = [(row.prompt_set, row.temperature, row.k) for row in rows(trials)]
    assert keys == [("a-set", 0.0, 0), ("easy", 0.0, 0), ("easy", 1.0, 0), ("easy", 1.0, 2)]


def test_intervals_leave_out_prompts_with_their_repetitions_summed():
    rng = np.random.default_rng(0)
    before, after = rng.gamma(9, 0.1, (10, 2)), rng.gamma(9, 0.05, (10, 2))
    trials = [
        trial
        for i in range(10)
        for r in range(2)
        for trial in (
            plain(f"{i}", before[i, r], repetition=r),
            drafted(f"{i}", after[i, r], lengths=(i % 3 + 1, 1, i % 4), repetition=r),
        )
    ]
    row = rows(trials)[1]
    tokens = np.full(10, 20.0)
    log = log_speedup(before.sum(1), tokens, after.sum(1), tokens)
    expected = exponential(log.interval(skew=True))
    assert (row.speedup_lo, row.speedup_hi) == pytest.approx(expected)
    accepted = np.array([2.0 * (1 + 2 * (i % 4)) for i in range(10)])
    judged = accepted + np.array([2.0 * (i % 3 + 2) for i in range(10)])
    assert (row.alpha_lo, row.alpha_hi) == pytest.approx(share_interval(accepted, judged))


def test_a_disturbed_generation_moves_a_measured_speedup_little_and_its_interval_holds_it():
    """With the price of rounds; without one the speedup is the ratio of sums."""
    trials = [
        trial
        for i in range(16)
        for trial in (
            plain(f"{i:02}", 2.0 + 0.01 * (i % 3)),
            drafted(f"{i:02}", (1.0 + 0.01 * (i % 2)) * (1.0 if i != 5 else 9.0)),
        )
    ]
    priced = {"model": "big", "draft": "small", "times": {0.0: TIMES, 1.0: TIMES}}
    steady = measured_rows(trials, **priced, steady=True)[1]
    raw = measured_rows(trials, **priced)[1]
    assert steady.speedup == pytest.approx(2.0, rel=0.01)
    after = sum((1.0 + 0.01 * (i % 2)) * (1.0 if i != 5 else 9.0) for i in range(16))
    assert raw.speedup == pytest.approx(sum(2.0 + 0.01 * (i % 3) for i in range(16)) / after)
    assert steady.ms_per_token == raw.ms_per_token, "seconds are shown as they were measured"
    assert steady.speedup_lo is not None
    assert steady.speedup_hi is not None
    assert steady.speedup_lo < 2.0 < steady.speedup_hi < 2.1
