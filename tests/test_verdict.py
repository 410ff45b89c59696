"""The verdict: seldom wrong on null effects, usually right on real ones, and clear about why."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from harness.analysis.evidence import Candidate, Evidence, Facts, Timed, evidence_from_trials
from harness.analysis.verdict import decide, least_regret
from harness.records import Trial, UserError
from harness.stats.crossfit import cross_fit, deal, workload_of
from harness.theory.speedup import StepTimes

KS = (1, 2, 3, 4, 5, 6, 8, 16)


def simulated(seed, n, speedups, noise=0.2, sets=("easy", "hard")):
    """Prompts that differ in pace; every run of one adds noise of its own and some shared."""
    rng = np.random.default_rng(seed)
    pace = np.exp(rng.normal(0.0, 0.3, n))
    shared = rng.normal(0.0, noise / 2, n)
    tokens = np.full(n, 48.0)

    def run(speedup):
        return Timed(pace / speedup * np.exp(shared + rng.normal(0.0, noise, n)), tokens)

    return Evidence(
        temperature=1.0,
        prompts=tuple(f"p{i}" for i in range(n)),
        prompt_sets=tuple(sets[i % len(sets)] for i in range(n)),
        baseline=Timed(pace * np.exp(rng.normal(0.0, noise / 2, n)), tokens),
        candidates={Candidate("small", k): run(s) for k, s in zip(KS, speedups, strict=False)},
        facts={Candidate("small", k): Facts(0.5, 0.7) for k in KS},
    )


def bounds(verdict):
    """Speedup, lower and upper bound of a verdict that has them."""
    assert verdict.speedup is not None
    assert verdict.speedup_lo is not None
    assert verdict.speedup_hi is not None
    return verdict.speedup, verdict.speedup_lo, verdict.speedup_hi


def held_out(evidence, folds=4, seed=0):
    held = cross_fit(workload_of(evidence, None), folds, seed)
    assert held is not None
    return held


def decisions(sims, n, speedups, **kwargs):
    found = (decide(simulated(i, n, speedups, **kwargs), seed=i).decision for i in range(sims))
    return Counter(found)


@pytest.mark.parametrize(
    ("n", "speedups"), [(8, [1.0] * 8), (16, [1.0, 0.99, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9])]
)
def test_null_effects_are_seldom_told_to_speculate(n, speedups):
    """At most 5 % of the time; 150 simulations allow for three standard errors above that."""
    sims = 150
    assert (
        decisions(sims, n, speedups)["speculate"] <= sims * 0.05 + 3 * (sims * 0.05 * 0.95) ** 0.5
    )


def test_the_best_looking_of_eight_nulls_would_win_far_more_often_without_held_out_prompts():
    """The reason for cross-fitting: with the choice scored on its own prompts, many nulls win."""
    sims, wins = 60, 0
    for seed in range(sims):
        evidence = simulated(seed, 16, [1.0] * 8)
        workload = workload_of(evidence, None)
        best = workload.candidates[int(np.argmax(workload.plain()))]
        chosen = replace(evidence, candidates={best: evidence.candidates[best]})
        wins += held_out(chosen, seed=seed).interval.lo > 1.0
    assert wins / sims > 0.08


def test_a_real_effect_is_usually_found_with_16_prompts():
    found = decisions(60, 16, [0.9, 1.1, 1.2, 1.15, 1.1, 1.0, 0.9, 0.8], noise=0.1)
    assert found["speculate"] >= 45
    assert found["does_not_pay"] == 0


def test_losing_everywhere_does_not_pay():
    verdict = decide(simulated(0, 16, [0.68, 0.6, 0.5], noise=0.05))
    assert verdict.decision == "does_not_pay"
    assert not verdict.speculate
    assert (verdict.draft, verdict.k) == (None, 0)
    _, lo, hi = bounds(verdict)
    assert lo < 0.68 < hi
    assert verdict.reason == "held_out_loss"
    values = {"draft": None, "k": 1, "alpha": 0.5, "breakeven_alpha": 0.7}
    assert verdict.reason_values == values


def test_winning_names_the_best_k_and_its_held_out_speedup():
    verdict = decide(simulated(1, 24, [1.1, 1.6, 1.3], noise=0.05))
    assert verdict.decision == "speculate"
    assert verdict.speculate
    assert (verdict.draft, verdict.k, verdict.prompt_set) == ("small", 2, "all")
    _, lo, hi = bounds(verdict)
    assert 1.0 < lo < 1.6 < hi
    assert verdict.reason == "held_out_gain"
    assert verdict.reason_values == {"draft": None, "k": 2}


def test_too_much_noise_is_undecided_and_says_how_many_prompts_would_do():
    verdict = decide(simulated(3, 12, [1.1], noise=0.4))
    assert verdict.decision == "undecided"
    assert (verdict.draft, verdict.k) == ("small", 1)
    speedup, lo, hi = bounds(verdict)
    assert lo < 1.0 < hi
    assert verdict.reason == "interval_spans_one"
    needed = verdict.reason_values["prompts_needed"]
    half = np.log(hi / lo) / 2
    assert needed == np.ceil(12 * (half / np.log(speedup)) ** 2)


def test_no_difference_at_all_asks_for_more_prompts_than_anyone_has():
    """Half of the prompts gain and half lose the same."""
    gain = np.array([0.5, 2.0] * 8)
    evidence = replace(simulated(0, 16, []), prompt_sets=("easy",) * 16)
    tokens = np.ones(16)
    even = replace(
        evidence,
        baseline=Timed(np.ones(16), tokens),
        candidates={Candidate("small", 1): Timed(gain / gain.mean(), tokens)},
    )
    assert decide(even, seed=0).reason_values["prompts_needed"] is None


def test_few_prompts_are_undecided_but_the_best_so_far_is_named():
    verdict = decide(simulated(0, 6, [1.2, 3.0], noise=0.01))
    assert verdict.decision == "undecided"
    assert (verdict.draft, verdict.k) == ("small", 2)
    assert verdict.speedup == pytest.approx(3.0, rel=0.1)
    assert verdict.speedup_lo is None
    assert verdict.reason == "too_few_prompts"
    assert verdict.reason_values == {"draft": None, "k": 2, "prompts": 6, "needed": 8}


def test_a_set_of_one_prompt_is_undecided_for_the_workload():
    evidence = replace(simulated(0, 9, [2.0]), prompt_sets=("easy",) * 8 + ("hard",))
    verdict = decide(evidence)
    assert (verdict.reason, verdict.reason_values["prompt_set"]) == ("too_few_in_set", "hard")


def test_one_set_is_judged_on_its_own_prompts():
    evidence = simulated(0, 40, [1.0], noise=0.02)
    hard = np.array([name == "hard" for name in evidence.prompt_sets])
    seconds = evidence.baseline.seconds / np.where(hard, 0.5, 2.0)
    evidence = replace(
        evidence, candidates={Candidate("small", 1): Timed(seconds, evidence.baseline.tokens)}
    )
    assert decide(evidence, prompt_set="easy").decision == "speculate"
    assert decide(evidence, prompt_set="hard").decision == "does_not_pay"
    assert decide(evidence, prompt_set="easy").prompt_set == "easy"
    mostly_easy = decide(evidence, weights={"easy": 9.0, "hard": 1.0})
    mostly_hard = decide(evidence, weights={"easy": 1.0, "hard": 9.0})
    assert (mostly_easy.decision, mostly_hard.decision) == ("speculate", "does_not_pay")
    assert decide(evidence, weights={"easy": 1.0, "hard": 0.0}).speedup == pytest.approx(2.0)


def test_weights_for_a_set_that_nothing_completed_leave_the_workload_undecided():
    verdict = decide(simulated(0, 16, [2.0]), weights={"easy": 1, "hard": 1, "code": 1})
    assert verdict.decision == "undecided"
    assert verdict.reason == "no_complete_prompt"
    assert verdict.reason_values == {"prompt_set": "code"}
    with pytest.raises(UserError, match="no weight for prompt set 'hard'"):
        decide(simulated(0, 16, [2.0]), weights={"easy": 1.0})


def test_nothing_measured_is_undecided():
    for evidence in (simulated(0, 0, [1.0]), simulated(0, 16, [])):
        verdict = decide(evidence)
        assert (verdict.decision, verdict.speedup) == ("undecided", None)
        assert verdict.reason_values == {"prompt_set": None}


def test_every_k_losing_is_seen_even_if_a_fold_was_fooled():
    """The ceiling: one lucky fold does not excuse candidates that all lose."""
    found = [decide(simulated(i, 48, [0.93], noise=0.15), seed=i) for i in range(20)]
    assert {verdict.decision for verdict in found} == {"does_not_pay", "undecided"}


def test_several_drafts_compete_and_the_winner_is_named():
    one, two = simulated(0, 24, [1.5], noise=0.05), simulated(0, 24, [0.7], noise=0.05)
    both = replace(
        one,
        candidates={**one.candidates, Candidate("other", 1): two.candidates[Candidate("small", 1)]},
    )
    verdict = decide(both)
    assert verdict.draft == verdict.reason_values["draft"] == "small"


def test_the_same_seed_gives_the_same_verdict():
    evidence = simulated(0, 16, [1.1, 1.2])
    assert decide(evidence, seed=3) == decide(evidence, seed=3)
    assert decide(evidence, seed=3) != decide(evidence, seed=4)


def test_folds_hold_every_set_in_equal_parts():
    strata = ["easy"] * 10 + ["hard"] * 6
    fold = deal(strata, 4, 0)
    assert sorted(np.bincount(fold)) == [4, 4, 4, 4]
    assert max(np.bincount(fold[:10])) - min(np.bincount(fold[:10])) <= 1
    assert (deal(strata, 4, 1) != fold).any()


def test_held_out_times_are_those_of_the_candidate_the_other_folds_chose():
    """Each half prefers what the other half loses with: held out, the choice loses."""
    tokens = np.ones(8)
    fold = deal(["easy"] * 8, 2, 0)
    good_here = np.where(fold == 0, 0.5, 4.0)
    good_there = np.where(fold == 1, 0.5, 4.0)
    evidence = Evidence(
        1.0,
        tuple("abcdefgh"),
        ("easy",) * 8,
        Timed(np.ones(8), tokens),
        {
            Candidate("small", 1): Timed(good_here, tokens),
            Candidate("small", 2): Timed(good_there, tokens),
        },
        {},
    )
    held = held_out(evidence, folds=2)
    assert held.speedup == pytest.approx(0.25)
    assert (held.chose, held.folds) == (2, 2)


def regrets(easy, hard):
    tokens = np.ones(4)

    def evidence(speedups):
        candidates = {
            Candidate("small", k): Timed(np.full(4, 1.0 / s), tokens) for k, s in speedups.items()
        }
        return Evidence(1.0, ("p",) * 4, ("s",) * 4, Timed(tokens, tokens), candidates, {})

    return {"easy": evidence(easy), "hard": evidence(hard)}


def test_least_regret_prefers_the_k_that_is_never_far_from_the_best():
    sets = regrets({1: 1.3, 2: 1.6, 8: 2.0}, {1: 1.1, 2: 1.05, 8: 0.6})
    assert least_regret(sets) == ("small", 2)
    assert least_regret(regrets({1: 0.9}, {1: 0.8})) == (None, 0)
    assert least_regret({}) == (None, 0)


def test_least_regret_of_a_mix_is_never_above_that_of_its_worst_set():
    sets = regrets({1: 1.3, 2: 1.6, 8: 2.0}, {1: 1.1, 2: 1.05, 8: 0.6})
    speedups = np.array([[1, 1.3, 1.6, 2.0], [1, 1.1, 1.05, 0.6]])
    worst = (speedups.max(1, keepdims=True) / speedups).max(0)
    for share in np.linspace(0, 1, 21):
        cost = np.array([share, 1 - share]) @ (1 / speedups)
        assert (cost / cost.min() <= worst + 1e-12).all()
    assert least_regret(sets)[1] == [0, 1, 2, 8][int(np.argmin(worst))]


def trial(prompt, k, seconds, *, prompt_set="easy", repetition=0, failed=False, temperature=1.0):
    return Trial(
        cell="c",
        prompt_set=prompt_set,
        prompt=prompt,
        repetition=repetition,
        k=k,
        temperature=temperature,
        rule="ratio" if k else None,
        status="failed" if failed else "ok",
        new_tokens=None if failed else 10,
        decode_s=None if failed else seconds,
        accepted=6 if k else None,
        rejected=2 if k else None,
    )


def test_evidence_holds_the_prompts_complete_in_every_cell():
    trials = [trial(p, k, 1.0 + k) for p in "cab" for k in (0, 1, 2)]
    trials += [trial("a", 0, 9.0, temperature=0.0), trial("b", 1, 0, failed=True)]
    times = StepTimes(0.001, 0.010)
    evidence = evidence_from_trials(trials, draft="small", temperature=1.0, times=times)
    assert evidence.prompts == ("a", "c")
    assert set(evidence.candidates) == {("small", 1), ("small", 2)}
    assert evidence.candidates[Candidate("small", 2)].seconds.tolist() == [3.0, 3.0]
    assert evidence.baseline.tokens.tolist() == [10, 10]
    assert evidence.facts[Candidate("small", 1)] == Facts(0.75, times.break_even_alpha(1))


def test_evidence_sums_repetitions_and_asks_for_all_of_them():
    trials = [trial(p, k, 1.0 + r, repetition=r) for p in "ab" for k in (0, 1) for r in (0, 1)]
    evidence = evidence_from_trials(trials[:-1], draft="small", temperature=1.0, times=None)
    assert evidence.prompts == ("a",)
    assert evidence.baseline.seconds.tolist() == [3.0]
    assert evidence.facts[Candidate("small", 1)] == Facts(0.75, None)


def test_evidence_leaves_out_a_k_that_mostly_failed_rather_than_the_prompts():
    trials = [trial(p, k, 1.0) for p in "abcd" for k in (0, 1)]
    trials += [trial(p, 8, 1.0, failed=p != "a") for p in "abcd"]
    evidence = evidence_from_trials(trials, draft="small", temperature=1.0, times=None)
    assert evidence.prompts == ("a", "b", "c", "d")
    assert set(evidence.candidates) == {("small", 1)}


def test_evidence_without_a_baseline_is_empty_and_splits_by_set():
    trials = [trial("a", 1, 1.0), trial("b", 1, 1.0, prompt_set="hard")]
    nothing = evidence_from_trials(trials, draft="small", temperature=1.0, times=None)
    assert nothing.prompts == ()
    assert decide(nothing).decision == "undecided"
    both = [*trials, trial("a", 0, 2.0), trial("b", 0, 3.0, prompt_set="hard")]
    evidence = evidence_from_trials(both, draft="small", temperature=1.0, times=None)
    split = evidence.by_set()
    assert {name: part.prompts for name, part in split.items()} == {"easy": ("a",), "hard": ("b",)}
    assert split["hard"].baseline.seconds.tolist() == [3.0]
