"""Replayed candidates: from texts to seconds, rankings, rows and requests."""

from dataclasses import replace

import numpy as np
import pytest
from workloads import DRAFTS, KS, population, trace, visited

from harness.analysis.predicted import (
    Predicted,
    evidence_of,
    rank,
    replayed_rows,
    speedups,
    synthetic_rows,
)
from harness.analysis.replayed import replay_check, replay_drafts, replayed
from harness.analysis.round_costs import TimedVisits, latency_of, typed_latency, visits_of
from harness.analysis.verdict import Candidate, decide
from harness.records import (
    RULES,
    Cell,
    ResultRow,
    RoundTiming,
    TextTrace,
    Trial,
    UserError,
)
from harness.stats.workload import visit_error
from harness.theory.replay import by_start, replay
from harness.theory.speedup import StepTimes

TIMES = StepTimes(0.1, 1.0, tuple(1.0 + 0.05 * n for n in range(9)))
EXACT = dict.fromkeys(DRAFTS, typed_latency(TIMES, 8))


def looked_up(matches, proposed, prompt="p00000", prompt_set="easy"):
    """An n-gram's trace, [n, K] matches and [n] proposed."""
    text = trace("ngram", prompt_set, prompt, np.full(len(matches), 0.5))
    match = np.array(matches, dtype=float)
    with np.errstate(divide="ignore"):
        logprob = np.log(match)
    return replace(
        text,
        draft_temperature=0.0,
        draft_logprob=logprob,
        draft_is_argmax=match > 0,
        proposed=np.array(proposed),
        chosen=True,
    )


@pytest.fixture(scope="module")
def traces() -> dict[str, list[TextTrace]]:
    return population(3, 24)


@pytest.fixture(scope="module")
def replays(traces):
    return replay_drafts(traces, "ratio", KS, 1.0)


@pytest.fixture(scope="module")
def latency():
    rng = np.random.default_rng(0)
    paces = dict(zip(DRAFTS, (0.2, 0.1, 0.05, 0.1), strict=True))
    return {draft: visited(replace(TIMES, draft_s=pace), rng) for draft, pace in paces.items()}


def test_texts_of_uneven_length_are_replayed_as_if_each_were_alone(traces, monkeypatch):
    texts = traces["good"][:6]
    together = replayed(texts, "ratio", [1, 4])
    for row, text in enumerate(texts):
        for k in (1, 4):
            chances = by_start(np.exp(text.draft_logprob)[None], k)
            direct = replay(chances, [len(text.tokens)], [k])[k].rounds[0]
            assert together[k].rounds[row] == pytest.approx(direct, abs=1e-9)
    monkeypatch.setattr("harness.analysis.replayed.CHUNK_ENTRIES", 1)
    assert replayed(texts, "ratio", [4])[4].rounds == pytest.approx(together[4].rounds)


def test_an_ngrams_rounds_are_written_out():
    # Starts 0 and 3 propose: 0 finds 2 of which both match, 3 finds 2 of which the first does.
    text = looked_up([[1, 1], [0, 0], [0, 0], [1, 0], [0, 0], [0, 0]], [2, 0, 0, 2, 0, 0])
    for rule in RULES:
        counts = replayed([text], rule, [1, 2])
        # K = 2: [a a b] from 0, [a c] from 3, [s] from 5: a bonus, a rejection, a plain step.
        assert counts[2].proposals[0].tolist() == [1, 0, 2]
        assert (counts[2].accepted[0], counts[2].rejected[0], counts[2].bonus[0]) == (3, 1, 2)
        # K = 1: only the first of a proposal: [a b], then start 2 steps, [a b] from 3, a step.
        assert counts[1].proposals[0].tolist() == [2, 2]


def changed(traces, place, **changes):
    """Two texts, of which one is changed."""
    texts = traces["good"][:2]
    texts[place] = replace(texts[place], **changes)
    return {"good": texts}


@pytest.mark.parametrize(
    ("by_draft", "asked", "message"),
    [
        (lambda _: {}, {}, "no draft to score"),
        (lambda t: {"good": t["good"]}, {"ks": []}, "nothing to replay"),
        (lambda t: {"good": t["good"]}, {"temperature": 0.7}, r"no text at temperature 0\.7"),
        (lambda t: {"good": [*t["good"], t["good"][0]]}, {}, "has a text twice"),
        (lambda t: {"good": t["good"][:3], "fair": t["fair"][3:]}, {}, "no prompt that ev"),
        (
            lambda t: {"good": t["good"], "fair": [replace(t["good"][0], tokens=np.arange(1, 3))]},
            {},
            "not the text that 'good' scored",
        ),
        (lambda t: changed(t, 1, top_k=5), {}, "another top_k or top_p"),
        (
            lambda t: changed(t, 1, draft_logprob=np.nan * t["good"][1].draft_logprob),
            {},
            "no log-probability at pos",
        ),
        (lambda t: changed(t, 0, tokens=np.array([], dtype=np.int64)), {}, "has no text"),
        (lambda t: changed(t, 1, chosen=True), {}, "some were not"),
        (lambda _: {"ngram": [looked_up([[1, 0]], [2])]}, {"ks": [1, 3]}, "k=3: .* for K up to 2"),
    ],
)
def test_traces_that_replay_would_misread_are_refused(traces, by_draft, asked, message):
    with pytest.raises(UserError, match=message) as caught:
        replay_drafts(by_draft(traces), "ratio", **{"ks": [1], "temperature": 1.0, **asked})
    assert "\n" not in str(caught.value)


def test_candidates_are_on_the_common_prompts_with_repetitions_added(traces):
    def twice(texts):
        return [*texts, *(replace(text, repetition=1) for text in texts)]

    others = [replace(t, draft_temperature=0.5) for t in traces["good"]]
    by_draft = {"good": [*others, *twice(traces["good"])], "fair": twice(traces["fair"][2:])}
    both = replay_drafts(by_draft, "ratio", [2], 1.0)
    assert list(map(len, both.prompt_tokens)) == [2] * 22
    alone = replay_drafts({"good": traces["good"][2:]}, "ratio", [2], 1.0)
    name = Candidate("good", 2)
    assert both.candidates[name].rounds == pytest.approx(2 * alone.candidates[name].rounds)


def visit(number, seconds, draft="small", temperature=1.0, **changes):
    """A visit's lines: K and the seconds of one of its 16 rounds, plain tokens at K = 0."""
    return [
        replace(
            RoundTiming(number, "big", draft, k, temperature, 60, 1, 16, 16 * (k + 1), 16 * each),
            **({} if k else {"new_tokens": 16}),
            **changes,
        )
        for k, each in seconds.items()
    ]


def test_a_round_costs_the_trimmed_ratio_to_the_plain_token_of_its_own_visit():
    """The machine's pace drifts threefold; one visit in twelve was disturbed."""
    paces = np.linspace(1.0, 3.0, 12)
    lines = [
        line
        for number, pace in enumerate(paces)
        for line in visit(number, {0: pace, 1: 1.5 * pace, 4: (90.0 if number == 5 else 3) * pace})
    ]
    lines += visit(12, {0: 9.0, 1: 99.0})  # stopped before it was whole
    lines += visit(0, {0: 1.0, 1: 50.0, 4: 50.0}, draft="other")
    lines += visit(0, {0: 1.0, 1: 7.0, 4: 7.0}, temperature=0.0)
    visits = visits_of(lines, "small", 0.7)
    assert visits is not None
    assert (visits.temperature, visits.ks, len(visits.plain_s)) == (1.0, (1, 4), 12)
    rounds = latency_of((), visits).rounds
    assert rounds.plain_s == pytest.approx(2.0)
    assert [rounds.relative(k) for k in (1, 2, 4)] == pytest.approx([1.5, 2.0, 3.0])
    assert visits_of(lines, "small", 0.0).ratios.tolist() == [[7.0, 7.0]]  # type: ignore[union-attr]
    assert visits_of(lines[:2], "small", 1.0).ks == (1,)  # type: ignore[union-attr]
    assert visits_of(lines, "absent", 1.0) is None


def test_intervals_and_verdicts_see_how_much_visits_differ(replays):
    name, rng = Candidate("good", 4), np.random.default_rng(0)
    ratios = 1.8 * np.exp(0.2 * rng.normal(size=(12, 1)))
    noisy = latency_of((), TimedVisits(1.0, np.ones(12), (4,), ratios))
    exact = latency_of((), TimedVisits(1.0, np.ones(12), (4,), np.full((12, 1), ratios.mean())))
    one = replace(replays, candidates={name: replays.candidates[name]})
    widths = []
    for known in (exact, noisy):
        _, lo, hi = speedups(evidence_of(one, {"good": known}))[name]
        widths.append(np.log(hi / lo))
    assert widths[1] > 1.1 * widths[0]
    (error,) = evidence_of(one, {"good": noisy}).timing
    by_hand = visit_error(ratios.T / noisy.rounds.relative(4))
    assert error.moves == pytest.approx(by_hand.moves)
    assert evidence_of(one, {"good": EXACT["good"]}).timing == ()


def test_predicted_seconds_are_rounds_times_the_cost_of_a_round(replays):
    name = Candidate("small", 3)
    seconds = evidence_of(replays, EXACT).candidates[name].seconds
    rounds = replays.candidates[name].rounds
    assert seconds == pytest.approx(rounds * (3 * TIMES.draft_s + TIMES.verify_s[3]))
    # A machine that ran at half its pace when this draft was timed favours none
    slow = StepTimes(0.2, 2.0, tuple(2 * value for value in TIMES.verify_s))
    other = evidence_of(replays, {**EXACT, "small": typed_latency(slow, 8)}).candidates[name]
    assert other.seconds == pytest.approx(seconds)


def test_synthetic_acceptance_predicts_each_measured_cell():
    row = ResultRow(
        draft="small", prompt_set="easy", temperature=0.0, k=2, source="measured", new_tokens=40
    )
    plain = replace(row, k=0, draft="small")
    trials = [
        Trial("c", "easy", f"{i}", 0, k, 0.0, "ratio", "ok", new_tokens=20)
        for i in range(2)
        for k in (0, 2)
    ]
    cell = Cell("easy", 0.0, 2)
    latency = typed_latency(TIMES, 8)
    rows = synthetic_rows([plain, row], trials, {cell: (1.0, 1.0)}, {0.0: latency})
    assert [(each.k, each.source) for each in rows] == [(0, "replayed"), (2, "replayed")]
    assert (rows[0].speedup, rows[0].ms_per_token) == (1.0, 1e3)
    # Seven rounds of a text of 20 tokens, the last one cut
    assert rows[1].tokens_per_round == pytest.approx(20 / 7)
    assert rows[1].speedup == pytest.approx(20 / 7 / latency.rounds.relative(2))
    assert synthetic_rows([plain, row], trials, {cell: (1.0, 1.0)}, {}) == []


def test_evidence_serves_the_verdict_and_names_what_it_needs(replays):
    evidence = evidence_of(replays, EXACT)
    timed = evidence.candidates[Candidate("good", 4)]
    assert timed.breakeven_alpha == pytest.approx(EXACT["good"].rounds.break_even_alpha(4))
    verdict = decide(evidence, weights={"easy": 3, "hard": 1})
    assert (verdict.decision, verdict.draft) == ("speculate", "good")
    assert verdict.reason_values["draft"] == "good"

    short = typed_latency(StepTimes(0.1, 1.0, (1.0, 1.1)), 8)
    with pytest.raises(UserError, match="timed up to k=1, not at k=2"):
        evidence_of(replays, {**EXACT, "good": short})


def test_the_leaderboard_ranks_every_draft_at_its_best_k_and_not_speculating(replays, latency):
    rows = rank(Predicted(replays, latency), seed=1).rows
    assert [row.rank for row in rows] == [1, 2, 3, 4, 5]
    assert [row.speedup for row in rows] == sorted((r.speedup for r in rows), reverse=True)
    assert {row.draft for row in rows} == {None, *DRAFTS}
    assert sum(row.probability_best or 0.0 for row in rows) == pytest.approx(1.0)
    best = rows[0]
    assert best.draft is not None
    assert None not in (best.speedup_lo, best.speedup_hi, best.alpha_lo, best.alpha)
    evidence = evidence_of(replays, latency)
    shares = []
    for name in sorted(set(evidence.prompt_sets)):
        timed = evidence.only([name]).candidates[Candidate(best.draft, best.k)]
        shares.append(timed.seconds.sum() / timed.tokens.sum())
    assert best.speedup == pytest.approx(
        latency[replays.drafts[0]].rounds.plain_s / np.mean(shares)
    )


def test_a_losing_draft_ranks_below_not_speculating_and_few_prompts_have_no_interval(traces):
    few = {draft: texts[:6] for draft, texts in traces.items()}
    slow = dict.fromkeys(DRAFTS, typed_latency(StepTimes(0.9, 1.0), 8))
    rows = rank(Predicted(replay_drafts(few, "ratio", KS, 1.0), slow)).rows
    assert rows[0].draft is None
    assert all(row.speedup < 1.0 for row in rows[1:])
    assert all(row.speedup_lo is None and row.probability_best is None for row in rows)


def test_a_set_of_weight_0_makes_no_interval_of_the_leaderboard(replays):
    rows = np.flatnonzero([name == "easy" for name in replays.prompt_sets])[6:]
    few = replays.rows([row not in rows for row in range(len(replays.names))])
    ranked = rank(Predicted(few, EXACT), {"easy": 1.0, "hard": 0.0}).rows
    assert {(row.speedup_lo, row.alpha_lo) for row in ranked} == {(None, None)}, "six prompts count"


def test_an_ngram_is_ranked_with_models(traces, latency):
    ngram = [
        looked_up(np.ones((len(t.tokens), 8)), np.full(len(t.tokens), 3), t.prompt, t.prompt_set)
        for t in traces["good"]
    ]
    replays = replay_drafts({**traces, "ngram": ngram}, "ratio", KS, 1.0)
    given = {
        **latency,
        "ngram": typed_latency(StepTimes(0.01, 1.0, TIMES.verify_s), 8, lookup=True),
    }
    best = rank(Predicted(replays, given)).rows[0]
    assert (best.draft, best.k <= 3) == ("ngram", True)
    rows = replayed_rows(Predicted(replays, given), model="target")
    row = next(row for row in rows if row.draft == "ngram" and row.k == 8)
    assert row.drafted == pytest.approx(3 * (row.rounds or 0.0))


def test_a_draft_that_never_proposes_has_no_alpha(traces):
    never = [
        looked_up(np.zeros((len(t.tokens), 2)), np.zeros(len(t.tokens)), t.prompt, t.prompt_set)
        for t in traces["good"]
    ]
    replays = replay_drafts({"ngram": never}, "ratio", [2], 1.0)
    times = {"ngram": typed_latency(StepTimes(0.01, 1.0), 2, lookup=True)}
    plain, row = rank(Predicted(replays, times)).rows
    assert (plain.draft, row.alpha, row.alpha_lo) == (None, None, None)
    assert row.speedup == pytest.approx(1 / 1.01)
    assert replayed_rows(Predicted(replays, times), model="t")[1].acceptance_rate is None


def looped(replays, name, rng=None):
    """Trials whose rounds are those that replay expects, scattered where `rng` is given."""
    counts = replays.candidates[name]
    rows = zip(replays.names, counts.new_tokens, counts.rounds, strict=True)
    return [
        Trial(
            "c", prompt_set, prompt, 0, name.k, 1.0, "ratio", "ok", new_tokens=int(tokens),
            rounds=rounds * (1.0 if rng is None else np.exp(rng.normal(0, 0.15))),
        )
        for (prompt_set, prompt), tokens, rounds in rows
    ]  # fmt: skip


def test_a_loop_is_held_against_its_replay(replays):
    name, cell = Candidate("fair", 4), Cell("easy", 1.0, 4)
    equal = replay_check(cell, looped(replays, name), replays, name)
    assert equal is not None
    assert equal.gap_in_standard_errors == 0.0
    slower = [replace(t, rounds=1.1 * (t.rounds or 0)) for t in looped(replays, name)]
    check = replay_check(cell, [*slower, replace(slower[0], status="failed")], replays, name)
    assert check is not None
    assert (check.gap_in_standard_errors or 0.0) < 0
    assert replay_check(cell, [], replays, name) is None
    one = replay_check(cell, looped(replays, name)[:1], replays, name)
    assert one is not None
    assert one.gap_in_standard_errors is None


def test_prompts_that_a_loop_generated_more_often_count_by_their_mean(replays):
    """Short texts are measured again: their prompts must not outweigh those of the replay."""
    name, cell = Candidate("fair", 4), Cell("easy", 1.0, 4)
    once = looped(replays, name)
    again = [replace(trial, repetition=n) for trial in once[:4] for n in (1, 2, 3)]
    check = replay_check(cell, [*once, *again], replays, name)
    assert check is not None
    assert check.gap_in_standard_errors == pytest.approx(0.0, abs=1e-6)


def test_the_gap_of_loops_that_follow_replay_is_a_standard_normal(replays):
    """Rounds scattered around what is expected: some 5 % of the gaps lie beyond two errors."""
    rng, name, cell = np.random.default_rng(0), Candidate("fair", 4), Cell("easy", 1.0, 4)
    checks = [replay_check(cell, looped(replays, name, rng), replays, name) for _ in range(400)]
    scores = [check.gap_in_standard_errors for check in checks if check is not None]
    assert np.mean(np.abs(scores) > 2.07) == pytest.approx(0.05, abs=0.035)  # type: ignore[operator]
    assert np.std(scores) == pytest.approx(1.0, abs=0.15)  # type: ignore[arg-type]
