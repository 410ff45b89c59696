"""The verdict: seldom wrong on null effects, usually right on real ones, and clear about why."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import ndtri

from harness.analysis.verdict import (
    ONE_SIDED,
    Candidate,
    Evidence,
    Timed,
    decide,
    evidence_from_trials,
)
from harness.records import Trial, UserError
from harness.stats.jackknife import workload_ratio
from harness.stats.verdict_interval import Pairs, most_measured
from harness.stats.workload import visit_error
from harness.theory.speedup import RoundTimes

KS = (1, 2, 3, 4, 5, 6, 8, 16)
NULLS = [1.0] * 8
DECLINING = [1.0, 0.99, 0.98, 0.97, 0.96, 0.95, 0.93, 0.9]
FIRST = Candidate("small", 1)
SETS = ("easy", "hard")


def simulated(seed, size, speedups, noise=0.2):
    """Prompts that differ in pace; every run of one adds noise of its own and some shared."""
    rng = np.random.default_rng(seed)
    pace = np.exp(rng.normal(0.0, 0.3, size))
    shared = rng.normal(0.0, noise / 2, size)
    tokens = np.full(size, 48.0)

    def run(speedup):
        seconds = pace / speedup * np.exp(shared + rng.normal(0.0, noise, size))
        return Timed(seconds, tokens, tokens / 4, tokens / 2, 0.7)

    return Evidence(
        temperature=1.0,
        names=tuple((SETS[i % 2], f"p{i}") for i in range(size)),
        baseline=Timed(pace * np.exp(rng.normal(0.0, noise / 2, size)), tokens),
        candidates={Candidate("small", k): run(s) for k, s in zip(KS, speedups, strict=False)},
    )


def decisions(simulations, size, speedups, **noise):
    """How often each was made."""
    return Counter(
        decide(simulated(seed, size, speedups, **noise), seed=seed).decision
        for seed in range(simulations)
    )


@pytest.mark.parametrize(("size", "speedups"), [(8, NULLS), (16, DECLINING)])
def test_null_effects_seldom_speculate(size, speedups):
    """At most 5 % of the time; 150 simulations allow for three standard errors above that."""
    allowed = 150 * 0.05 + 3 * (150 * 0.05 * 0.95) ** 0.5
    assert decisions(150, size, speedups)["speculate"] <= allowed


def test_a_real_effect_is_usually_found_with_16_prompts():
    counts = decisions(60, 16, [0.9, 1.1, 1.2, 1.15, 1.1, 1.0, 0.9, 0.8], noise=0.1)
    assert counts["speculate"] >= 45
    assert counts["does_not_pay"] == 0


def test_every_k_losing_is_never_said_to_pay():
    counts = decisions(20, 48, [0.93], noise=0.15)
    assert set(counts) == {"does_not_pay", "undecided"}


@pytest.mark.parametrize(
    ("seed", "size", "speedups", "noise", "expected", "values"),
    [
        pytest.param(
            *(0, 16, [0.68, 0.6, 0.5], 0.05, ("does_not_pay", None, 0, "held_out_loss")),
            {"draft": "small", "k": 1, "level": 0.95, "alpha": 0.5, "breakeven_alpha": 0.7},
            id="losing everywhere",
        ),
        pytest.param(
            *(1, 24, [1.1, 1.6, 1.3], 0.05, ("speculate", "small", 2, "held_out_gain")),
            {"draft": "small", "k": 2, "level": 0.95},
            id="winning",
        ),
        pytest.param(
            *(0, 6, [1.2, 3.0], 0.01, ("undecided", "small", 2, "too_few_prompts")),
            {"draft": "small", "k": 2, "prompts": 6, "needed": 8},
            id="few prompts: the best so far",
        ),
        pytest.param(
            *(0, 0, [1.0], 0.2, ("undecided", None, 0, "no_complete_prompt")),
            {"prompt_set": None},
            id="no prompt",
        ),
        pytest.param(
            *(0, 16, [], 0.2, ("undecided", None, 0, "no_complete_prompt")),
            {"prompt_set": None},
            id="no candidate",
        ),
    ],
)
def test_a_verdict_names_its_choice_and_its_reason(seed, size, speedups, noise, expected, values):
    verdict = decide(simulated(seed, size, speedups, noise))
    assert (verdict.decision, verdict.draft, verdict.k, verdict.reason) == expected
    assert verdict.reason_values == values
    assert verdict.speculates == (verdict.decision == "speculate")
    if verdict.speedup_lo is not None and verdict.speedup_hi is not None:
        assert verdict.speedup_lo < max(speedups) < verdict.speedup_hi


def undecided(size, speedup, spread, timing):
    """One candidate whose prompts differ by `spread` in speedup and by `timing` in every time."""
    normal = ndtri((np.arange(size) + 0.5) / size)
    shuffled = [np.random.default_rng(seed).permutation(normal) for seed in range(2)]
    ones = np.ones(size)
    return replace(
        simulated(0, size, []),
        names=tuple(("easy", f"p{i}") for i in range(size)),
        baseline=Timed(np.exp(timing * shuffled[0]), ones),
        candidates={FIRST: Timed(np.exp(timing * shuffled[1] + spread * normal) / speedup, ones)},
    )


@pytest.mark.parametrize(
    ("evidence", "reason", "values"),
    [
        (undecided(16, 1.17, 0.25, 0.0), "interval_spans_one", {"prompts": 16}),
        (undecided(16, 1.02, 0.3, 0.0), "interval_spans_one", {"prompts_needed": None}),
        (undecided(16, 1.03, 0.02, 0.15), "timing_noise", {"measured": True}),
        (undecided(64, 1.005, 0.05, 0.0), "near_one", {"near": 0.05}),
    ],
)
def test_undecided_names_what_would_decide_it(evidence, reason, values):
    verdict = decide(evidence)
    assert (verdict.decision, verdict.reason) == ("undecided", reason)
    assert verdict.reason_values.items() >= values.items()


@pytest.mark.parametrize(("prompts", "speedup"), [(8, 1.3), (11, 1.2), (16, 1.17)])
def test_so_many_prompts_as_are_needed_decide_it(prompts, speedup):
    """Of few as of many."""
    needed = decide(undecided(prompts, speedup, 0.25, 0.0)).reason_values["prompts_needed"]
    assert isinstance(needed, int)
    assert prompts < needed <= 10 * prompts
    assert decide(undecided(needed, speedup, 0.25, 0.0)).speculates


@pytest.mark.parametrize(
    ("size", "measured", "speedup", "spread", "noise", "reason"),
    [
        (16, 16, 1.13, 0.2, 0.01, "interval_spans_one"),
        (128, 64, 1.08, 0.02, 0.35, "timing_noise"),
    ],
)
def test_of_two_phases_both_numbers_of_prompts_are_named(
    size, measured, speedup, spread, noise, reason
):
    evidence, number = undecided(size, speedup, spread, 0.0), np.arange(measured)
    normal = np.random.default_rng(5).permutation(ndtri((number + 0.5) / measured))
    ones = np.ones(measured)
    pairs = Pairs(evidence.names[:measured], np.exp(noise * normal), ones, ones, ones)
    verdict = decide(replace(evidence, named=FIRST, pairs=pairs))
    assert (verdict.decision, verdict.reason) == ("undecided", reason)
    needed, of_pairs = (verdict.reason_values[f"{each}_needed"] for each in ("prompts", "pairs"))
    assert isinstance(needed, int)
    assert size < needed <= 10 * size
    assert of_pairs == most_measured(needed)
    assert of_pairs > measured


def test_round_times_that_scatter_between_visits_are_timing_noise():
    timing = (visit_error(np.array([[0.8, 1.2] * 6])),)
    evidence = replace(undecided(24, 1.1, 0.05, 0.0), timing=timing)
    assert decide(replace(evidence, timing=())).speculates
    verdict = decide(evidence)
    assert (verdict.reason, verdict.reason_values["measured"]) == ("timing_noise", False)


def test_an_interval_is_as_wide_as_the_verdicts_part_of_the_error_asks():
    evidence = simulated(0, 32, [1.2])
    one, many = decide(evidence), decide(evidence, ONE_SIDED / 8)
    assert (one.reason_values["level"], many.reason_values["level"]) == (0.95, 1.0 - 0.05 / 8)
    assert many.speedup == one.speedup
    assert (many.speedup_lo or 0.0) < (one.speedup_lo or 0.0)


def in_sets(evidence: Evidence, sizes: Mapping[str, int]) -> Evidence:
    """The same prompts, in sets of these sizes."""
    sets = [name for name, size in sizes.items() for _ in range(size)]
    names = tuple((s, p) for s, (_, p) in zip(sets, evidence.names, strict=True))
    return replace(evidence, names=names)


@pytest.mark.parametrize(
    "sizes", [{"easy": 8, "hard": 1}, {"chat": 7, "code": 7, "edit": 2}, {"a": 2, "b": 3, "c": 9}]
)
def test_a_small_set_keeps_its_weight_and_takes_no_verdict_from_the_workload(
    sizes: dict[str, int],
) -> None:
    number = sum(sizes.values())
    evidence = in_sets(simulated(0, number, [2.0], noise=0.02), sizes)
    small = min(sizes, key=sizes.__getitem__)
    verdict = decide(evidence)
    assert verdict.decision == "speculate"
    assert decide(evidence, prompt_set=small).reason == "too_few_prompts"
    # A small set that loses by so much that the whole workload does
    loses = np.array([name == small for name in evidence.prompt_sets])
    seconds = np.where(loses, 20.0, 1.0) * evidence.candidates[FIRST].seconds
    timed = replace(evidence.candidates[FIRST], seconds=seconds)
    lost = replace(evidence, candidates={FIRST: timed})
    plain, candidate = (
        workload_ratio(timed.seconds, timed.tokens, lost.prompt_sets).value
        for timed in (lost.baseline, lost.candidates[FIRST])
    )
    assert lost.speedups(None)[FIRST] == pytest.approx(plain / candidate, rel=1e-12)
    assert decide(lost).decision != "speculate"


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (7, 2, 7)])
def test_null_effects_seldom_speculate_where_sets_are_small(sizes: tuple[int, ...]) -> None:
    """Left out within sets of two, prompts of a null would say `speculate` in 19 %."""
    named = {f"s{index}": size for index, size in enumerate(sizes)}
    verdicts = [
        decide(in_sets(simulated(seed, sum(sizes), NULLS), named), seed=seed) for seed in range(150)
    ]
    allowed = 150 * 0.05 + 3 * (150 * 0.05 * 0.95) ** 0.5
    assert sum(verdict.speculates for verdict in verdicts) <= allowed


def test_one_set_is_judged_on_its_own_prompts_and_a_workload_by_its_weights():
    evidence = simulated(0, 40, [1.0], noise=0.02)
    hard = np.array([name == "hard" for name in evidence.prompt_sets])
    seconds = evidence.baseline.seconds / np.where(hard, 0.5, 2.0)
    evidence = replace(evidence, candidates={FIRST: Timed(seconds, evidence.baseline.tokens)})
    assert decide(evidence, prompt_set="easy").decision == "speculate"
    assert decide(evidence, prompt_set="hard").decision == "does_not_pay"
    assert decide(evidence, weights={"easy": 9.0, "hard": 1.0}).decision == "speculate"
    assert decide(evidence, weights={"easy": 1.0, "hard": 9.0}).decision == "does_not_pay"
    easy_only = {"easy": 1.0, "hard": 0.0}
    assert decide(evidence, weights=easy_only).speedup == pytest.approx(2.0)
    assert decide(evidence, prompt_set="hard", weights=easy_only).decision == "does_not_pay"


def test_alpha_is_that_of_the_sets_and_weights_that_the_verdict_is_on():
    evidence = simulated(0, 40, [0.5], noise=0.02)
    judged = np.full(40, 10.0)
    accepted = np.where(np.array(evidence.prompt_sets) == "hard", 1.0, 9.0)
    timed = replace(evidence.candidates[FIRST], accepted=accepted, judged=judged)
    evidence = replace(evidence, candidates={FIRST: timed})

    def alpha(**scope):
        return decide(evidence, **scope).reason_values["alpha"]

    assert alpha() == pytest.approx(0.5)
    assert alpha(prompt_set="easy") == pytest.approx(0.9)
    assert alpha(weights={"easy": 3.0, "hard": 1.0}) == pytest.approx(0.7)


def test_weights_must_fit_the_sets():
    verdict = decide(simulated(0, 16, [2.0]), weights={"easy": 1, "hard": 1, "code": 1})
    assert (verdict.decision, verdict.reason_values) == ("undecided", {"prompt_set": "code"})
    with pytest.raises(UserError, match="no weight for prompt set 'hard'"):
        decide(simulated(0, 16, [2.0]), weights={"easy": 1.0})


def test_several_drafts_compete_and_the_winner_is_named():
    one, two = simulated(0, 24, [1.5], noise=0.05), simulated(0, 24, [0.7], noise=0.05)
    other = {Candidate("other", 1): two.candidates[FIRST]}
    verdict = decide(replace(one, candidates={**one.candidates, **other}))
    assert verdict.draft == verdict.reason_values["draft"] == "small"


def test_the_same_seed_gives_the_same_verdict():
    evidence = simulated(0, 16, [1.1, 1.2])
    assert decide(evidence, seed=3) == decide(evidence, seed=3)
    assert decide(evidence, seed=3) != decide(evidence, seed=4)


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


def evidence_of(trials, times=None):
    return evidence_from_trials(trials, draft="small", temperature=1.0, times=times)


def test_evidence_holds_the_prompts_complete_in_every_cell():
    trials = [trial(p, k, 1.0 + k, failed=(p, k) == ("b", 1)) for p in "cab" for k in (0, 1, 2)]
    trials.append(trial("a", 0, 9.0, temperature=0.0))
    times = RoundTimes(0.010, ((2, 0.012),))
    evidence = evidence_of(trials, times)
    assert evidence.names == (("easy", "a"), ("easy", "c"))
    assert {*evidence.candidates} == {Candidate("small", 1), Candidate("small", 2)}
    assert evidence.candidates[Candidate("small", 2)].seconds.tolist() == [3.0, 3.0]
    assert evidence.baseline.tokens.tolist() == [10, 10]
    timed = evidence.candidates[FIRST]
    assert (timed.accepted, timed.judged) == (pytest.approx([6, 6]), pytest.approx([8, 8]))
    assert timed.breakeven_alpha == times.break_even_alpha(1)


def test_evidence_sums_repetitions_and_asks_for_all_of_them():
    trials = [trial(p, k, 1.0 + r, repetition=r) for p in "ab" for k in (0, 1) for r in (0, 1)]
    evidence = evidence_of(trials[:-1])
    assert (evidence.names, evidence.baseline.seconds.tolist()) == ((("easy", "a"),), [3.0])
    assert evidence.candidates[FIRST].judged == pytest.approx([16])
    assert evidence.candidates[FIRST].breakeven_alpha is None


def test_evidence_leaves_out_a_k_that_mostly_failed_rather_than_the_prompts():
    trials = [trial(p, k, 1.0) for p in "abcd" for k in (0, 1)]
    evidence = evidence_of([*trials, *(trial(p, 8, 1.0, failed=p != "a") for p in "abcd")])
    assert [prompt for _, prompt in evidence.names] == ["a", "b", "c", "d"]
    assert set(evidence.candidates) == {Candidate("small", 1)}


def test_evidence_leaves_out_a_k_that_failed_one_set_rather_than_that_set():
    trials = [trial(p, k, 1.0, prompt_set=s) for s in SETS for p in "abcd" for k in (0, 1)]
    trials += [trial(p, 8, 1.0, prompt_set=s, failed=s == "hard") for s in SETS for p in "abcd"]
    evidence = evidence_of(trials)
    assert (set(evidence.prompt_sets), set(evidence.candidates)) == (
        {*SETS},
        {Candidate("small", 1)},
    )


def test_evidence_without_a_baseline_is_empty_and_splits_by_set():
    trials = [trial("a", 1, 1.0), trial("b", 1, 1.0, prompt_set="hard")]
    assert evidence_of(trials).names == ()
    assert decide(evidence_of(trials)).decision == "undecided"
    both = [*trials, trial("a", 0, 2.0), trial("b", 0, 3.0, prompt_set="hard")]
    hard = evidence_of(both).only(["hard"])
    assert (hard.names, hard.baseline.seconds.tolist()) == ((("hard", "b"),), [3.0])
