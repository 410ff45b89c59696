"""Replayed candidates: from texts to seconds, rankings, requests and memory."""

from dataclasses import replace

import numpy as np
import pytest
from workloads import DRAFTS, KS, Steps, population, timing, trace

from harness.analysis.candidates import ENGINES, candidates_evidence, replay_drafts, replayed
from harness.analysis.latency import Latency, latency_of, round_costs
from harness.analysis.paired import gap_in_standard_errors, measured_rounds, replayed_rounds
from harness.analysis.predicted import evidence_of, predicted_seconds
from harness.analysis.ranking import rank
from harness.analysis.replayed_rows import category_alpha, replayed_rows
from harness.analysis.requests import request_view
from harness.analysis.verdict import decide, least_regret
from harness.records import StepTiming, TextTrace, Trial, UserError
from harness.theory.replay import by_start, replay
from harness.theory.speedup import StepTimes

TIMES = StepTimes(0.1, 1.0, tuple(1.0 + 0.05 * n for n in range(9)))


def looked_up(matches, proposed, prompt="p00000", prompt_set="easy"):
    """An n-gram's trace, [n, K] matches and [n] proposed."""
    text = trace("ngram", prompt_set, prompt, np.full(len(matches), 0.5))
    return replace(
        text,
        draft_temperature=0.0,
        matches=np.array(matches, dtype=bool),
        proposed=np.array(proposed),
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
    target = Steps(0.1, 1.0, TIMES.verify_s).target_timings(rng)
    target.append(StepTiming("target", "target", "prefill", 64, 0, 1, (1.28,)))
    paces = dict(zip(DRAFTS, (0.2, 0.1, 0.05, 0.1), strict=True))
    prefill = StepTiming("draft", "draft", "prefill", 64, 0, 1, (0.64,))
    return {
        draft: latency_of([*target, timing("draft", "step", 1, pace, rng), prefill])
        for draft, pace in paces.items()
    }


# Replay of traces


def test_texts_of_uneven_length_are_replayed_as_if_each_were_alone(traces):
    texts = traces["good"][:6]
    together = replayed(texts, "ratio", [1, 4])
    for row, text in enumerate(texts):
        alone = replayed([text], "ratio", [1, 4])
        for k in (1, 4):
            assert together[k].rounds[row] == pytest.approx(alone[k].rounds[0], abs=1e-12)
            direct = replay(by_start(text.last_ratio[None], k), [len(text.tokens)], [k])[k]
            assert alone[k].accepted[0] == pytest.approx(direct.accepted[0], abs=1e-9)


def test_many_texts_are_replayed_in_chunks_without_a_difference(traces, monkeypatch):
    whole = replayed(traces["fair"], "ratio", [3])[3]
    monkeypatch.setattr("harness.analysis.candidates.CHUNK_ENTRIES", 1)
    assert replayed(traces["fair"], "ratio", [3])[3].rounds == pytest.approx(whole.rounds)


def test_a_text_of_one_token_and_a_k_beyond_the_text_are_fine():
    texts = [trace("d", "easy", "a", np.array([0.5])), trace("d", "easy", "b", np.full(3, 1.0))]
    found = replayed(texts, "ratio", [16])[16]
    assert found.rounds.tolist() == pytest.approx([1.0, 1.0])
    assert found.cut.tolist() == pytest.approx([0.5, 1.0])


def test_rules_read_their_own_columns():
    text = replace(
        trace("d", "easy", "a", np.array([0.25])),
        target_logprob=np.log([0.5]),
        draft_logprob=np.log([0.25]),
        draft_is_argmax=np.array([True]),
    )
    alphas = {rule: replayed([text], rule, [1])[1].accepted[0] for rule in ENGINES}
    assert alphas == pytest.approx({"ratio": 0.5, "exact_match": 0.25, "greedy_draft": 1.0})


def test_the_variance_reduced_form_uses_the_last_factor_of_its_rule():
    text = replace(
        trace("d", "easy", "a", np.array([0.5])),
        last_ratio=np.array([0.125]),
        last_exact_match=np.array([0.25]),
        last_greedy_draft=np.array([0.375]),
    )
    found = [replayed([text], rule, [1], smooth=True)[1].accepted[0] for rule in ENGINES]
    assert found == pytest.approx([0.125, 0.375, 0.25])


def test_an_ngrams_rounds_are_written_out():
    # Starts 0 and 3 propose: 0 finds 2 of which both match, 3 finds 2 of which the first does.
    text = looked_up([[1, 1], [0, 0], [0, 0], [1, 0], [0, 0], [0, 0]], [2, 0, 0, 2, 0, 0])
    found = replayed([text], "ratio", [1, 2])
    # K = 2: [a a b] from 0, [a c] from 3, [s] from 5: a bonus, a rejection, a plain step.
    assert found[2].rounds[0] == 3
    assert found[2].proposals[0].tolist() == [1, 0, 2]
    assert (found[2].accepted[0], found[2].rejected[0], found[2].bonus[0]) == (3, 1, 2)
    # K = 1: only the first of a proposal: [a b], then start 2 steps, [a b] from 3, a step.
    assert found[1].rounds[0] == 4
    assert found[1].proposals[0].tolist() == [2, 2]
    for rule in ENGINES:
        assert replayed([text], rule, [2])[2].rounds[0] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {"draft_logprob": np.full(len(t.tokens), np.nan)}, "no log-probability at pos"),
        (lambda _: {"tokens": np.array([], dtype=np.int64)}, "has no text"),
        (lambda _: {"matches": np.ones((1, 1), dtype=bool)}, "some texts say what was proposed"),
    ],
)
def test_a_trace_that_replay_would_misread_is_refused(traces, change, message):
    first, second = traces["good"][:2]
    with pytest.raises(UserError, match=message) as caught:
        replayed([first, replace(second, **change(second))], "ratio", [2])
    assert "'good', prompt hard/p00001" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_to_replay_and_a_proposal_too_short_are_refused():
    with pytest.raises(UserError, match="nothing to replay"):
        replayed([], "ratio", [1])
    with pytest.raises(UserError, match=r"k=3: .* proposes 2; lower k"):
        replayed([looked_up([[1, 0]], [2])], "ratio", [1, 3])


# Candidates on the prompts in common


def test_candidates_stand_on_the_common_prompts_with_repetitions_added(traces):
    again = [replace(t, repetition=1) for t in traces["good"]]
    by_draft = {"good": [*traces["good"], *again], "fair": [*traces["fair"][2:]]}
    by_draft["fair"] += [replace(t, repetition=1) for t in traces["fair"][2:]]
    found = replay_drafts(by_draft, "ratio", [2], 1.0)
    assert len(found.prompts) == 22
    assert found.texts.tolist() == [2.0] * 22
    alone = replay_drafts({"good": traces["good"][2:]}, "ratio", [2], 1.0)
    twice = 2 * alone.candidates["good", 2].rounds
    assert found.candidates["good", 2].rounds == pytest.approx(twice)


def test_other_temperatures_and_draft_temperatures_are_passed_over(traces):
    others = [replace(t, draft_temperature=0.5) for t in traces["good"]]
    others += [replace(t, temperature=0.0, draft_temperature=0.0) for t in traces["good"]]
    found = replay_drafts({"good": [*others, *traces["good"]]}, "ratio", [1], 1.0)
    assert found.texts.sum() == len(traces["good"])


def test_traces_that_do_not_belong_together_are_refused(traces):
    good, fair = traces["good"], traces["fair"]
    other = [replace(t, tokens=t.tokens + 1) for t in fair]
    with pytest.raises(UserError, match="not the text that 'good' scored"):
        replay_drafts({"good": good, "fair": other}, "ratio", [1], 1.0)
    with pytest.raises(UserError, match=r"no text at temperature 0\.7"):
        replay_drafts({"good": good}, "ratio", [1], 0.7)
    with pytest.raises(UserError, match="no prompt that every draft scored"):
        replay_drafts({"good": good[:3], "fair": fair[3:]}, "ratio", [1], 1.0)
    with pytest.raises(UserError, match="has a text twice"):
        replay_drafts({"good": [*good, good[0]]}, "ratio", [1], 1.0)
    mixed = [good[0], replace(good[1], top_k=5)]
    with pytest.raises(UserError, match="another top_k or top_p"):
        replay_drafts({"good": mixed}, "ratio", [1], 1.0)
    with pytest.raises(UserError, match="no draft to audition"):
        replay_drafts({}, "ratio", [1], 1.0)


# Seconds


def test_a_round_costs_its_drafting_and_the_verify_of_what_was_proposed():
    assert round_costs(TIMES, 2, lookup=False).tolist() == pytest.approx([1.0, 1.15, 1.3])
    assert round_costs(TIMES, 2, lookup=True).tolist() == pytest.approx([1.1, 1.15, 1.2])


def test_predicted_seconds_are_rounds_times_the_cost_of_a_round(replays):
    seconds = predicted_seconds(replays, dict.fromkeys(DRAFTS, TIMES))["fair", 4]
    rounds = replays.candidates["fair", 4].rounds
    assert seconds == pytest.approx(rounds * (4 * TIMES.draft_s + TIMES.verify_s[4]))


def test_a_draft_timed_beside_a_slower_target_is_judged_against_that(replays):
    """A machine that ran at half its pace when this draft was timed favours nobody."""
    slow = StepTimes(0.2, 2.0, tuple(2 * value for value in TIMES.verify_s))
    even = predicted_seconds(replays, dict.fromkeys(DRAFTS, TIMES))
    other = predicted_seconds(replays, {**dict.fromkeys(DRAFTS, TIMES), "small": slow})
    assert other["small", 3] == pytest.approx(even["small", 3])


def test_evidence_serves_the_verdict_and_names_what_it_needs(traces):
    times = dict.fromkeys(DRAFTS, TIMES)
    evidence = candidates_evidence(traces, times, "ratio", KS, 1.0)
    assert len(evidence.candidates) == len(DRAFTS) * len(KS)
    facts = evidence.facts["good", 4]
    assert facts.breakeven_alpha == pytest.approx(TIMES.break_even_alpha(4))
    assert facts.alpha is not None
    verdict = decide(evidence, weights={"easy": 3, "hard": 1})
    assert verdict.decision == "speculate"
    assert verdict.draft == "good"
    assert least_regret(evidence.by_set())[0] == "good"
    with pytest.raises(UserError, match="no step times for draft 'poor'"):
        candidates_evidence(traces, {d: TIMES for d in DRAFTS if d != "poor"}, "ratio", KS, 1.0)
    with pytest.raises(UserError, match=r"verify_ms: 9 entries, but k=16"):
        candidates_evidence(traces, times, "ratio", [16], 1.0)


def test_noisy_step_times_widen_the_verdicts_interval(replays):
    rng = np.random.default_rng(5)
    steps = Steps(0.1, 1.0, TIMES.verify_s)
    known = dict.fromkeys(DRAFTS, steps.latency(rng))
    widths = []
    for given in (known, {draft: own.times for draft, own in known.items()}):
        verdict = decide(evidence_of(replays, given))
        assert verdict.speedup_lo is not None
        assert verdict.speedup_hi is not None
        widths.append(verdict.speedup_hi / verdict.speedup_lo)
    assert widths[0] > widths[1]


def test_missing_steps_are_named():
    rng = np.random.default_rng(0)
    with pytest.raises(UserError, match="no draft step was timed"):
        latency_of([timing("target", "step", 1, 1.0, rng)])


# Rankings


def test_the_leaderboard_ranks_every_draft_at_its_best_k_and_not_speculating(replays, latency):
    ranking = rank(replays, latency, seed=1)
    rows = ranking.rows
    assert [row.rank for row in rows] == [1, 2, 3, 4, 5]
    assert [row.speedup for row in rows] == sorted((r.speedup for r in rows), reverse=True)
    plain = next(row for row in rows if row.draft is None)
    assert (plain.k, plain.speedup, plain.alpha) == (0, 1.0, None)
    assert sum(row.probability_best or 0.0 for row in rows) == pytest.approx(1.0)
    best = rows[0]
    assert best.draft is not None
    assert best.speedup_lo is not None
    assert best.speedup_hi is not None
    assert best.alpha_lo is not None
    assert best.alpha is not None
    assert best.speedup_lo < best.speedup < best.speedup_hi
    assert best.alpha_lo < best.alpha
    evidence = evidence_of(replays, latency)
    k = best.k
    assert best.breakeven_alpha == pytest.approx(latency[best.draft].times.break_even_alpha(k))
    shares = []
    for prompt_set in ("easy", "hard"):
        part = evidence.only([prompt_set])
        own = part.candidates[best.draft, best.k]
        shares.append(own.seconds.sum() / own.tokens.sum())
    target_s = latency[best.draft].times.target_s
    assert best.speedup == pytest.approx(target_s / np.mean(shares))


def test_a_losing_draft_ranks_below_not_speculating(replays):
    slow = {draft: Latency(StepTimes(0.9, 1.0)) for draft in DRAFTS}
    rows = rank(replays, slow).rows
    assert rows[0].draft is None
    assert all(row.speedup < 1.0 for row in rows[1:])


def test_few_prompts_have_no_interval_and_no_probability(traces, latency):
    few = {draft: own[:6] for draft, own in traces.items()}
    rows = rank(replay_drafts(few, "ratio", KS, 1.0), latency).rows
    assert all(row.speedup_lo is None and row.probability_best is None for row in rows)


def test_the_interval_of_a_speedup_is_wider_for_resampled_step_times(replays, latency):
    found = rank(replays, latency).draws
    for name in found.joint:
        assert found.joint[name][0] == pytest.approx(found.prompts_only[name][0])
        assert found.joint[name].std() > found.prompts_only[name].std()


# Rows


def test_results_rows_carry_every_count_of_the_contract(replays, latency):
    rows = replayed_rows(replays, latency, model="target")
    assert len(rows) == 2 * (1 + len(DRAFTS) * len(KS))
    plain = [row for row in rows if row.k == 0]
    assert {(row.source, row.draft, row.speedup) for row in plain} == {("theory", None, 1.0)}
    row = next(r for r in rows if (r.draft, r.k, r.prompt_set) == ("fair", 4, "hard"))
    part = replays.only(["hard"]).candidates["fair", 4]
    assert row.source == "replayed"
    assert row.rule == "ratio"
    assert row.rounds == pytest.approx(part.rounds.sum())
    assert row.drafted == pytest.approx(4 * part.rounds.sum())
    assert row.acceptance_rate == pytest.approx(part.acceptance_rate)
    assert row.new_tokens == part.new_tokens.sum()
    assert row.ms_per_token is not None
    assert row.tokens_per_second == pytest.approx(1e3 / row.ms_per_token)
    times = latency["fair"].times
    assert row.speedup == pytest.approx(1e3 * times.target_s / row.ms_per_token)
    assert row.ttft_ms is not None
    assert row.request_speedup is not None
    assert row.speedup is not None
    assert row.request_speedup < row.speedup
    counts = (row.accepted, row.rejected, row.alpha, row.alpha_lo, row.alpha_hi)
    assert None not in (*counts, row.mean_acceptance_length, row.breakeven_alpha)


def test_without_prefill_times_the_request_columns_stay_empty(replays):
    rows = replayed_rows(replays, dict.fromkeys(DRAFTS, Latency(TIMES)), model="target")
    assert all(row.ttft_ms is None and row.request_speedup is None for row in rows)


def test_an_ngram_is_ranked_beside_models(traces, latency):
    ngram = [
        looked_up(np.ones((len(t.tokens), 8)), np.full(len(t.tokens), 3), t.prompt, t.prompt_set)
        for t in traces["good"]
    ]
    found = replay_drafts({**traces, "ngram": ngram}, "ratio", KS, 1.0)
    assert found.lookups == {"ngram"}
    given = {**latency, "ngram": replace(latency["good"], draft_prefill_s=None)}
    given["ngram"] = Latency(StepTimes(0.01, given["ngram"].times.target_s, TIMES.verify_s))
    ranking = rank(found, given)
    assert ranking.rows[0].draft == "ngram"
    assert ranking.rows[0].k <= 3
    rows = replayed_rows(found, given, model="target")
    ngram_row = next(row for row in rows if row.draft == "ngram" and row.k == 8)
    assert ngram_row.drafted is not None
    assert ngram_row.rounds is not None
    assert ngram_row.drafted == pytest.approx(3 * ngram_row.rounds)


def test_a_draft_that_never_proposes_has_no_alpha_and_no_speedup_to_speak_of(traces):
    never = [
        looked_up(np.zeros((len(t.tokens), 2)), np.zeros(len(t.tokens)), t.prompt, t.prompt_set)
        for t in traces["good"]
    ]
    found = replay_drafts({"ngram": never}, "ratio", [2], 1.0)
    times = {"ngram": Latency(StepTimes(0.01, 1.0))}
    rows = rank(found, times).rows
    assert rows[0].draft is None
    assert (rows[1].alpha, rows[1].alpha_lo) == (None, None)
    assert rows[1].speedup == pytest.approx(1 / 1.01)
    assert replayed_rows(found, times, model="t")[1].acceptance_rate is None


def test_categories_have_their_own_alpha_and_an_interval_from_8_prompts(traces):
    labelled = [
        replace(t, category="code" if i < 9 else None) for i, t in enumerate(traces["good"])
    ]
    rows = category_alpha(replay_drafts({"good": labelled}, "ratio", [4], 1.0), 4)
    assert {row.category: row.prompts for row in rows} == {"code": 9, "easy": 7, "hard": 8}
    by_category = {row.category: row for row in rows}
    assert by_category["code"].alpha_lo is not None
    assert by_category["easy"].alpha_lo is None
    code = by_category["code"]
    assert code.alpha == pytest.approx(code.accepted / code.judged)
    with pytest.raises(UserError, match="k=5: not among the replayed"):
        category_alpha(replay_drafts({"good": labelled}, "ratio", [4], 1.0), 5)


# Requests, memory, cost


def test_a_request_gains_less_than_its_decoding(replays, latency):
    view = request_view(replays, ("good", 4), latency["good"])
    decoding = rank(replays, latency).draws.point(("good", 4))
    assert 1.0 < view.request_speedup < decoding
    assert view.p95_speculative_s < view.p95_baseline_s
    assert 0.0 <= view.share_slower <= 1.0
    with pytest.raises(UserError, match="no prefill time for draft 'good'"):
        request_view(replays, ("good", 4), Latency(TIMES))
    with pytest.raises(UserError, match="draft=good k=99: not replayed"):
        request_view(replays, ("good", 99), latency["good"])


# Measured beside replayed


def test_equal_rounds_leave_no_gap(replays):
    rounds = replayed_rounds(replays, "good", 4)
    gap = gap_in_standard_errors(rounds, dict(rounds))
    assert (gap.paired, gap.gap, gap.standard_error, gap.gap_in_standard_errors) == (True, 0, 0, 0)
    more = {name: (tokens, 1.1 * count) for name, (tokens, count) in rounds.items()}
    shifted = gap_in_standard_errors(more, rounds)
    assert shifted.measured == pytest.approx(shifted.replayed / 1.1)
    assert shifted.gap_in_standard_errors is not None
    assert shifted.gap_in_standard_errors < 0


def test_the_gap_of_loops_run_on_the_replayed_law_is_a_standard_normal(replays):
    """Rounds scattered around what is expected: some 5 % of the gaps lie beyond two errors."""
    rng = np.random.default_rng(0)
    expected = replayed_rounds(replays, "fair", 4)
    scores = []
    for _ in range(400):
        run = {n: (t, r * np.exp(rng.normal(0, 0.15))) for n, (t, r) in expected.items()}
        score = gap_in_standard_errors(run, expected).gap_in_standard_errors
        assert score is not None
        scores.append(score)
    assert np.mean(np.abs(scores) > 2.07) == pytest.approx(0.05, abs=0.035)
    assert np.std(scores) == pytest.approx(1.0, abs=0.15)


def test_other_prompts_make_it_a_two_sample_comparison(replays):
    rounds = list(replayed_rounds(replays, "good", 4).items())
    gap = gap_in_standard_errors(dict(rounds[::2]), dict(rounds[1::2]))
    assert not gap.paired
    assert gap.p_value is not None
    assert 0.0 < gap.p_value < 1.0
    one = gap_in_standard_errors(dict(rounds[:1]), dict(rounds[:1]))
    assert one.standard_error is None
    with pytest.raises(UserError, match="no prompt to compare"):
        gap_in_standard_errors({}, dict(rounds))
    with pytest.raises(UserError, match="no rounds to compare"):
        gap_in_standard_errors({("a", "b"): (4.0, 0.0)}, dict(rounds))


def test_measured_rounds_are_added_over_repetitions():
    trial = Trial("c", "easy", "a", 0, 2, 1.0, "ratio", "ok", new_tokens=6, rounds=3, decode_s=1.0)
    again = replace(trial, repetition=1, rounds=4)
    failed = replace(trial, prompt="b", status="failed")
    assert measured_rounds([trial, again, failed]) == {("easy", "a"): (12.0, 7.0)}
