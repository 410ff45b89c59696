"""Auditions in looks: who is dropped and when, and that what is left stays a fair comparison."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from runs import outcome_of, ran

from harness import reporting
from harness.analysis import analyse
from harness.analysis.looks import _questions, _winner
from harness.analysis.replayed import Replays
from harness.analysis.round_costs import Latency
from harness.analysis.scored_drafts import scored_drafts
from harness.analysis.setup import Setup
from harness.analysis.sweep_and_audition import leaderboard, pair_run
from harness.analysis.verdict import ONE_SIDED, Candidate, decide
from harness.commands import draft_scoring, sweep
from harness.measurement.round_times import LEAST_VISITS
from harness.records import StepTiming, UserError
from harness.stats.verdict_interval import LOOKS, look_shares, nominal_error
from harness.stats.workload import Workload, visit_error
from harness.storage import StoredRun, load
from harness.storage.manifest import AuditionNotes
from harness.summary import Dropped
from harness.theory.replay import replay
from harness.theory.speedup import RoundTimes

pytestmark = pytest.mark.usefixtures("few_samples")
SMALL = ("k=[1,4]", "temperature=[0]", "new_tokens=12", "threads=1", "prompts.sets=[easy]")
THREE = ("drafts=[tiny_good,tiny_unrelated,ngram]", "prompts.limit=32")


# ---- an audition ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def eliminated(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    return ran("audition", tmp_path_factory.mktemp("results"), *SMALL, *THREE)


def test_a_draft_that_loses_is_dropped_and_ranked_last_by_what_it_has(
    eliminated: StoredRun,
) -> None:
    dropped = eliminated.manifest.audition.dropped
    assert "tiny_good" not in dropped
    loser = dropped["tiny_unrelated"]
    # Than which of the two depends on what rounds take here: both are above a draft that is refused
    assert {*loser.slower_than} <= {"tiny_good", None}
    assert loser.slower_than
    assert (loser.prompts, loser.of) in {(8, 32), (16, 32), (24, 32)}
    scored = {trace.key for trace in eliminated.traces if trace.draft == "tiny_unrelated"}
    assert len(scored) == loser.prompts
    summary = analyse(eliminated)
    assert not summary.failures
    assert summary.run.ranked == 3, "a draft that was dropped has its rank too"
    for board in summary.leaderboards:
        assert [row.rank for row in board.rows] == [1, 2, 3, 4]
        assert board.rows[0].draft == "tiny_good"
        of_loser = next(row for row in board.rows if row.draft == "tiny_unrelated")
        assert of_loser.dropped == loser
        assert of_loser.probability_best is None
        assert of_loser.speedup_lo is not None
        chances = [row.probability_best for row in board.rows if row.dropped is None]
        assert sum(chance or 0.0 for chance in chances) == pytest.approx(1.0)
    rows = eliminated.results[eliminated.results.k > 0]
    assert (rows[rows.draft == "tiny_unrelated"].prompts == loser.prompts).all()
    assert (rows[rows.draft == "tiny_good"].prompts == 32).all()
    report = (eliminated.folder / "report.md").read_text()
    assert f"dropped after {loser.prompts} of 32 prompts, significantly slower than" in report


@pytest.mark.parametrize("others", [",tiny_good", pytest.param("", marks=pytest.mark.exhaustive)])
def test_no_rounds_are_timed_of_a_draft_that_loses_whatever_they_cost(
    others: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts so little that its steps alone lose; also where it is the only draft."""
    timed_steps = draft_scoring.timed_steps

    def steady(*args: Any, **named: Any) -> list[StepTiming]:
        """A draft step takes half of the target's, which something disturbed: a verify takes less.

        By these steps alone a round would take less than the token it emits.
        """
        seconds = {("draft", "step"): 0.005, ("target", "step"): 0.01}
        return [
            replace(timing, samples_s=(seconds.get((timing.role, timing.kind), 0.003),))
            for timing in timed_steps(*args, **named)
        ]

    monkeypatch.setattr(draft_scoring, "timed_steps", steady)
    asked = (*SMALL, f"drafts=[tiny_unrelated{others}]", "prompts.limit=32")
    run = ran("audition", tmp_path, *asked)
    assert run.manifest.audition.untimed == ("tiny_unrelated",)
    assert {line.draft for line in run.rounds} == ({"tiny_good"} if others else set[str]())
    assert len([trace for trace in run.traces if trace.draft == "tiny_unrelated"]) == 32
    summary = analyse(run)
    assert summary.headline is not None
    if not others:
        assert summary.headline.decision == "does_not_pay"
    (reason,) = [each.values for each in summary.caveats if each.code == "priced_from_steps"]
    assert 1.0 <= float(reason["tokens_per_round"] or 0.0) < 1.5
    assert float(reason["speedup"] or 1.0) < 1.0
    again = ran("audition", tmp_path, *asked, f"resume={run.folder}")
    assert again.rounds == run.rounds
    elsewhere = ran("audition", f"results_root={tmp_path}", f"traces_from={run.folder}")
    pd.testing.assert_frame_equal(elsewhere.results, run.results)


def test_the_numbers_of_a_dropped_draft_are_those_of_an_audition_of_its_prompts(
    eliminated: StoredRun,
) -> None:
    """As if nobody had been dropped and all had scored those prompts alone."""
    setup = Setup(eliminated)
    has = {trace.key for trace in eliminated.traces if trace.draft == "tiny_unrelated"}
    traces = {
        draft: [t for t in eliminated.traces if t.draft == draft and t.key in has]
        for draft in ("tiny_good", "tiny_unrelated")
    }
    notes = replace(eliminated.manifest, audition=AuditionNotes())
    (alone, board) = (
        leaderboard(drafts, drafts.by_own_rule[0], {})
        for drafts in (
            scored_drafts(Setup(replace(eliminated, manifest=notes)), traces),
            scored_drafts(setup),
        )
    )
    expected = next(r for r in alone.rows if r.draft == "tiny_unrelated")
    shown = next(row for row in board.rows if row.draft == "tiny_unrelated")
    for name in ("k", "speedup", "speedup_lo", "speedup_hi", "tokens_per_round", "alpha"):
        assert getattr(shown, name) == pytest.approx(getattr(expected, name)), name


def test_the_verdict_is_among_the_drafts_that_stay_at_the_error_of_the_last_look(
    eliminated: StoredRun,
) -> None:
    (evidence,) = pair_run(Setup(eliminated)).evidence
    dropped = eliminated.manifest.audition.dropped
    assert not {name.draft for name in evidence.candidates} & {*dropped}
    assert len(evidence.names) == 32
    spent = nominal_error(ONE_SIDED, look_shares(LOOKS))
    assert spent < ONE_SIDED
    at_last = decide(evidence, ONE_SIDED, seed=0)
    alone = decide(replace(evidence, looks=()), spent, seed=0)
    bounds = [(each.speedup_lo, each.speedup_hi) for each in (at_last, alone)]
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-9)
    assert at_last.reason_values["level"] == 1.0 - 2.0 * ONE_SIDED


def test_a_resumed_audition_loads_no_draft_again(
    eliminated: StoredRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        draft_scoring, "_measure_draft", lambda *_, **__: pytest.fail("measured again")
    )
    before = eliminated.manifest.audition.dropped
    again = ran("audition", f"resume={eliminated.folder}")
    assert again.manifest.audition.dropped == before
    pd.testing.assert_frame_equal(again.results, eliminated.results)


def test_other_auditions_take_the_texts_of_the_drafts_that_stayed(
    eliminated: StoredRun, tmp_path: Path
) -> None:
    source = f"traces_from={eliminated.folder}"
    run = ran("audition", source, tmp_path)
    assert run.config["until"] == "all"
    dropped = eliminated.manifest.audition.dropped
    assert {trace.draft for trace in run.traces} == {"tiny_good", "ngram"} - {*dropped}
    says = "draft 'tiny_unrelated' was dropped there and scored a part of the texts; leave it out"
    with pytest.raises(UserError, match=says):
        outcome_of("audition", source, tmp_path, "drafts=[tiny_good,tiny_unrelated]")


# ---- turns ---------------------------------------------------------------------------------------


@pytest.fixture
def precise_after_six(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every draft at most eight visits, six where they are precise, as all of these are."""
    monkeypatch.setattr("harness.measurement.round_times.MOST_VISITS", 16)
    for module in ("timing", "draft_scoring"):
        monkeypatch.setattr(f"harness.commands.{module}.can_pay", lambda *_: True)
        monkeypatch.setattr(f"harness.commands.{module}.timed_precisely", lambda *_: True)


EVERY = ("drafts=[tiny_good,tiny_eagle3,ngram]", "prompts.limit=8", "until=all")


@pytest.mark.usefixtures("precise_after_six")
def test_the_drafts_that_stay_are_visited_in_turn_and_timed_by_those_visits(tmp_path: Path) -> None:
    """A head's target keeps its states in its visits alone."""
    run = ran("audition", tmp_path, *SMALL, *EVERY)
    in_turn = [timing for timing in run.rounds if timing.turn is not None]
    order = [(timing.turn, timing.draft) for timing in in_turn if timing.k == 1]
    forth = ["tiny_good", "tiny_eagle3", "ngram"]
    assert order == [
        (turn, draft)
        for turn in range(LEAST_VISITS)
        for draft in (forth[::-1] if turn % 2 else forth)
    ]
    (drafts,) = scored_drafts(Setup(run)).latencies.values()
    visits = [latency.visits for latency in drafts.values()]
    assert [each.turns for each in visits if each is not None] == 3 * [tuple(range(LEAST_VISITS))]
    apart = {timing.visit for timing in run.rounds if timing.turn is None}
    assert not apart & {timing.visit for timing in in_turn}


@pytest.mark.usefixtures("precise_after_six")
def test_turns_that_were_interrupted_go_on_with_the_draft_that_lacks_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, reach = ("drafts=[tiny_good,ngram]", "prompts.limit=2"), draft_scoring._Turn.reach

    def interrupted(self: Any, visits: int) -> None:
        if visits == 3 and self.visits.complete == 2:
            monkeypatch.setattr(draft_scoring._Turn, "reach", reach)
            reach(self, visits)
            raise KeyboardInterrupt
        reach(self, visits)

    monkeypatch.setattr(draft_scoring._Turn, "reach", interrupted)
    with pytest.raises(KeyboardInterrupt):
        outcome_of("audition", tmp_path, *SMALL, *words)
    (folder,) = tmp_path.iterdir()
    run = ran("audition", f"resume={folder}")
    turns = {(timing.draft, timing.turn) for timing in run.rounds if timing.turn is not None}
    assert turns == {(draft, n) for draft in ("tiny_good", "ngram") for n in range(LEAST_VISITS)}
    monkeypatch.setattr(draft_scoring, "_Turn", lambda *_: pytest.fail("loaded"))
    assert ran("audition", f"resume={folder}").rounds == run.rounds


def test_drafts_that_do_not_fit_in_memory_together_have_all_visits_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_scoring, "free_bytes", lambda _: 1e6)
    run = ran("audition", tmp_path, *SMALL, "drafts=[tiny_good,ngram]", "prompts.limit=2")
    assert {timing.draft for timing in run.rounds} == {"tiny_good", "ngram"}
    assert {timing.turn for timing in run.rounds} == {None}


# ---- looks ---------------------------------------------------------------------------------------


@pytest.fixture
def dropping(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Drafts are dropped at these looks and no others; nothing is rendered."""
    at: dict[str, int] = {}

    def slower_than(_: Any, __: Any, draft: str, look: int) -> tuple[str | None, ...]:
        return (None,) if at.get(draft) == look else ()

    monkeypatch.setattr(draft_scoring, "slower_than", slower_than)
    for rendering in ("render", "show"):
        monkeypatch.setattr(reporting, rendering, lambda *_, **__: None)
    return at  # type: ignore[return-value]


@pytest.mark.exhaustive
def test_a_look_scores_a_quarter_of_the_prompts_and_makes_a_quarter_of_the_visits(
    dropping: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.measurement.round_times.MOST_VISITS", 16)
    # All visits are made, however fast and quiet the machine is
    monkeypatch.setattr("harness.commands.timing.can_pay", lambda *_: True)
    monkeypatch.setattr("harness.commands.timing.timed_precisely", lambda *_: False)
    dropping["ngram"] = 1
    words = ("drafts=[tiny_good,ngram]", "prompts.limit=8")
    run = ran("audition", tmp_path, *SMALL, *words)
    assert run.manifest.audition.dropped == {"ngram": Dropped(2, 8, (None,))}
    visits = {
        draft: len({timing.visit for timing in run.rounds if timing.draft == draft})
        for draft in ("tiny_good", "ngram")
    }
    # What stays has as many visits as before in turn
    assert visits == {"tiny_good": LEAST_VISITS + 8, "ngram": 3}
    assert {timing.turn for timing in run.rounds if timing.draft == "ngram"} == {None}
    turns = sorted(t.turn for t in run.rounds if t.turn is not None)
    assert {*turns} == {*range(8)}
    texts = {
        draft: {trace.prompt for trace in run.traces if trace.draft == draft}
        for draft in ("tiny_good", "ngram")
    }
    assert {name: len(each) for name, each in texts.items()} == {"tiny_good": 8, "ngram": 2}
    assert {t.model for t in run.timings if t.role == "draft"} == {"tiny_good", "ngram"}


@pytest.mark.exhaustive
def test_with_until_all_nobody_is_dropped(dropping: dict[str, int], tmp_path: Path) -> None:
    dropping |= {"tiny_good": 1, "ngram": 1}
    words = ("drafts=[tiny_good,ngram]", "prompts.limit=8", "until=all")
    run = ran("audition", tmp_path, *SMALL, *words)
    assert not run.manifest.audition.dropped
    assert len(run.traces) == 16
    assert pair_run(Setup(run)).evidence[0].looks == ()


@pytest.mark.usefixtures("dropping")
def test_a_budget_leaves_drafts_with_fewer_prompts_and_a_larger_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("drafts=[tiny_good,ngram]", "prompts.limit=32")
    left = sweep.Stopwatch.left_s
    monkeypatch.setattr(sweep.Stopwatch, "left_s", property(lambda _: 1e-9))
    run = ran("audition", tmp_path, *SMALL, *words, "budget_s=1000")
    assert {len([t for t in run.traces if t.draft == name]) for name in ("tiny_good", "ngram")} == {
        8
    }
    assert set(run.results.prompts) == {8}
    assert analyse(run).headline is not None
    monkeypatch.setattr(sweep.Stopwatch, "left_s", left)
    run = ran("audition", f"resume={run.folder}", "budget_s=2000")
    assert set(run.results.prompts) == {32}
    keys = [trace.key for trace in run.traces if trace.draft == "tiny_good"]
    assert len(keys) == len({*keys}) == 32


@pytest.mark.usefixtures("dropping")
def test_a_budget_that_the_completions_spend_is_refused_and_what_they_are_is_kept(
    tmp_path: Path,
) -> None:
    words = ("drafts=[tiny_good,ngram]", "prompts.limit=8")
    with pytest.raises(UserError) as refused:
        outcome_of("audition", tmp_path, *SMALL, *words, "budget_s=0.001")
    (folder,) = tmp_path.iterdir()
    assert str(refused.value).startswith("budget_s=0.001: the target's completions took ")
    assert str(refused.value).endswith(f"stored, resume={folder} continues the run")
    assert len(load(folder).trials) == 8


# ---- who loses -----------------------------------------------------------------------------------


def replays_of(rng: np.random.Generator, alphas: dict[str, float], number: int) -> Replays:
    """Drafts of these acceptances on prompts of one set that differ in how hard they are."""
    hard = rng.normal(0.0, 0.6, number)
    candidates: dict[Candidate, Any] = {}
    for draft, alpha in alphas.items():
        logit = math.log(alpha / (1.0 - alpha)) + hard + rng.normal(0.0, 0.2, number)
        chances = np.repeat(1.0 / (1.0 + np.exp(-logit))[:, None], 40 * 4, axis=1)
        counts = replay(chances.reshape(number, 40, 4), np.full(number, 40), [1, 2, 4])
        candidates |= {Candidate(draft, k): each for k, each in counts.items()}
    names = tuple(("easy", f"p{n:03}") for n in range(number))
    lengths = ((9,),) * number
    return Replays("ratio", 1.0, names, lengths, candidates, frozenset())


def lost(alphas: dict[str, float], seed: int) -> list[tuple[str | None] | None]:
    """What the second draft loses to at the first three looks of 32 prompts."""
    rng = np.random.default_rng(seed)
    replays = replays_of(rng, alphas, 32)
    first, second = alphas
    times = RoundTimes(1.0, ((1, 1.5), (2, 1.8), (4, 2.4)))
    latencies = {name: Latency(times) for name in alphas}
    order, found = rng.permutation(32), []
    others = {name: each for name, each in replays.candidates.items() if name.draft == first}
    for look in range(1, LOOKS):
        both = replays.rows(np.isin(np.arange(32), order[: 8 * look]).tolist())
        ((part, rest, weights),) = _questions(both, replace(replays, candidates=others), None)
        assert not {*part.names} & {*rest.names}
        level = 1.0 - 2.0 * nominal_error(ONE_SIDED, look_shares(look))
        found.append(_winner(part, rest, latencies, weights, second, level))
    return found


@pytest.mark.exhaustive
def test_a_tie_is_seldom_dropped_and_a_clear_loser_early() -> None:
    ties = [any(lost({"one": 0.8, "other": 0.8}, seed)) for seed in range(60)]
    assert sum(ties) <= 3  # 1 % is spent by the third look
    losers = [lost({"one": 0.85, "other": 0.6}, seed) for seed in range(20)]
    assert all(found[-1] == ("one",) for found in losers)
    assert sum(found[1] is not None for found in losers) >= 15
    both_lose = [lost({"one": 0.25, "other": 0.25}, seed)[-1] for seed in range(20)]
    assert all(found == (None,) for found in both_lose)


def test_a_ratio_of_two_candidates_is_the_speedup_of_one_over_the_other() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.uniform(20, 60, 12)
    seconds = np.exp(rng.normal(0.0, 0.3, (3, 12))) * tokens
    sets = ("easy",) * 6 + ("hard",) * 6
    costs = np.exp(rng.normal(0.0, 0.05, (2, 2, 6)))
    visits = visit_error(costs[0]).among(3, [0, 1]), visit_error(costs[1][:1]).among(3, [2])
    tokens_of = np.tile(tokens, (3, 1))
    workload = Workload(tokens, tokens, seconds, tokens_of, sets, None, visits)
    logs, variance = workload.log_speedups.value, workload.variance(1)
    ratios = logs - logs[1]
    over = Workload(seconds[1], tokens, seconds, tokens_of, sets)
    assert ratios.tolist() == pytest.approx(over.log_speedups.value.tolist())
    of_prompts = over.variance().value
    of_visits = workload.timing_variance(1).value
    assert variance.value.tolist() == pytest.approx((of_prompts + of_visits).tolist())
    assert (ratios[1], variance.value[1]) == (0.0, 0.0)
    # Drafts were visited apart, and K of one draft together
    apart = visits[0].variance.value[1] + visits[1].variance.value[2]
    assert of_visits[2] == pytest.approx(apart)
