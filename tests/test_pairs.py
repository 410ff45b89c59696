"""Runs that are measured in looks: their pairs, what they cost, and the verdicts on them."""

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from runs import ran

from harness.analysis import analyse
from harness.analysis.looks import choice, decided
from harness.analysis.pairs import measured_pairs, pairs_of, rounds_as_replayed
from harness.analysis.predicted import Predicted
from harness.analysis.round_costs import Latency
from harness.analysis.setup import Setup
from harness.analysis.sweep_and_audition import leaderboard, pair_run
from harness.analysis.verdict import Candidate
from harness.records import Trial, where
from harness.storage import StoredRun
from harness.storage.manifest import Looks
from harness.theory.speedup import RoundTimes

pytestmark = pytest.mark.usefixtures("few_samples")
KS = (1, 2, 3)
SMALL = ("k=[1,2,3]", "temperature=[0,1]", "new_tokens=8", "threads=1", "prompts.limit=8")


def trial(prompt="a", k=0, repetition=1, turn=1, **more: Any) -> Trial:
    name = prompt if turn == 1 else f"{prompt}/{turn}"
    rule = "ratio" if k else None
    return Trial(
        "cell", "easy", name, repetition, k, 0.0, rule, "ok", turn=turn,
        **{"new_tokens": 10, "decode_s": 1.0, "rounds": 5 if k else None} | more,
    )  # fmt: skip


# ---- which generations are pairs -----------------------------------------------------------------


def test_pairs_are_in_the_order_in_which_the_later_of_both_ran() -> None:
    ran_so = [trial("b"), trial("a"), trial("a", 2), trial("b", 2), trial("a", 4)]
    assert [pair.name for pair in pairs_of(ran_so, 0.0, 2)] == [("easy", "a"), ("easy", "b")]
    again = [*ran_so, trial("a", 2, repetition=2), trial("a", repetition=2)]
    pairs = pairs_of(again, 0.0, 2)
    assert [(pair.name[1], pair.plain[0].repetition) for pair in pairs] == [
        ("a", 1), ("b", 1), ("a", 2),
    ]  # fmt: skip
    assert pairs_of(again, 1.0, 2) == []


def test_a_conversation_is_one_pair_if_every_turn_of_it_finished_on_both_sides() -> None:
    turns = [trial("a", k, turn=turn) for turn in (1, 2) for k in (0, 2)]
    (pair,) = pairs_of(turns, 0.0, 2)
    assert [len(side) for side in (pair.plain, pair.drafted)] == [2, 2]
    assert pairs_of([*turns[:3], replace(turns[3], status="failed")], 0.0, 2) == []
    assert pairs_of(turns[:3], 0.0, 2) == []


# ---- a run ---------------------------------------------------------------------------------------


def undisturbed(folder: Path, *more: str) -> StoredRun:
    """A sweep with few samples, made again where other work left a time that cannot be right."""
    for attempt in range(5):
        run = ran("sweep", folder / str(attempt), *SMALL, *more)
        if all(answer.speedup for answer in where(analyse(run).answers, engine="own")):
            return run
    raise AssertionError("five sweeps had a time that cannot be right")


@pytest.fixture(scope="module")
def run(few_samples: None, tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    del few_samples
    return undisturbed(tmp_path_factory.mktemp("looks"))


def looks_of(run: StoredRun) -> Looks:
    assert run.manifest.looks is not None
    return run.manifest.looks


def k_at(run: StoredRun, temperature: float | None) -> int:
    k = looks_of(run).k_at(temperature or 0.0)
    assert k is not None
    return k


def with_trials(run: StoredRun, change) -> StoredRun:
    return replace(run, trials=tuple(map(change, run.trials)))


def slower(run: StoredRun, factor: float) -> StoredRun:
    """Speculation took so much longer."""

    def change(trial: Trial) -> Trial:
        times = trial.k > 0 and trial.decode_s is not None
        return replace(trial, decode_s=factor * trial.decode_s) if times else trial  # type: ignore[operator]

    return with_trials(run, change)


def as_fast_as_plain(run: StoredRun) -> StoredRun:
    """Every speculative generation takes its plain one's time, a fifth more or less in turn."""
    plain_s = {trial.key: trial.decode_s for trial in run.trials if trial.k == 0}
    # In turn within a cell: other K, which are timed between, must not make the pairs of one alike
    numbers: defaultdict[tuple[float, int], Iterator[int]] = defaultdict(itertools.count)

    def change(trial: Trial) -> Trial:
        seconds = plain_s.get(trial.key)
        if not trial.k or seconds is None:
            return trial
        number = next(numbers[trial.temperature, trial.k])
        return replace(trial, decode_s=seconds * (0.8 if number % 2 else 1.2))

    return with_trials(run, change)


def test_the_k_that_replays_best_is_measured_and_named(run: StoredRun) -> None:
    sweep = pair_run(Setup(run))
    for temperature in (0.0, 1.0):
        chosen = choice(run, temperature)
        predicted = sweep.drafts.by_rule[sweep.setup.rule, temperature]
        board = leaderboard(sweep.drafts, predicted, {})
        (row,) = [row for row in board.rows if row.draft is not None]
        assert (chosen.k, chosen.p_min) == (row.k, 0.0)
    for evidence in sweep.evidence:
        assert evidence.pairs is not None
        assert evidence.named == Candidate("tiny_good", k_at(run, evidence.temperature))
    for answer in where(analyse(run).answers, engine="own"):
        assert answer.named[1] == k_at(run, answer.temperature)
        assert answer.source == "measured"
        assert answer.pairs is not None
        assert answer.pairs.prompts == (16 if answer.prompt_set == "all" else 8)
        (ended,) = (
            each.looks for each in looks_of(run).chosen if each.temperature == answer.temperature
        )
        assert answer.pairs.measured == 4 * (ended or looks_of(run).made)
        assert None not in (answer.speedup_lo, answer.speedup_hi, answer.chance, answer.gain)


def test_a_run_may_stop_once_every_question_is_decided(run: StoredRun) -> None:
    """At its last look; a K that is much too slow is told from one look's pairs."""
    fast, made = slower(run, 0.4), looks_of(run).made
    answers = where(analyse(fast).answers, engine="own")
    assert decided(fast, made) >= {
        temperature
        for temperature in (0.0, 1.0)
        if all(a.decision != "undecided" for a in answers if a.temperature == temperature)
    }
    assert not decided(as_fast_as_plain(run), 1), "a gain of nothing is not decided by four pairs"
    assert not decided(replace(run, manifest=replace(run.manifest, looks=None)), 1)


@pytest.mark.exhaustive
def test_too_few_prompts_for_a_verdict_keep_no_run_going(tmp_path: Path) -> None:
    run = undisturbed(tmp_path, "prompts.limit=3", "temperature=[0]", "k=[2]")
    made = looks_of(run)
    assert (made.made, made.ended) == (3, "decided"), "with pairs of four prompts or more"
    for answer in where(analyse(run).answers, engine="own"):
        assert (answer.reason, answer.named[1]) == ("too_few_prompts", made.k_at(0.0))
        assert answer.speedup is not None


def test_round_times_that_are_off_move_no_verdict_on_measured_pairs(run: StoredRun) -> None:
    rounds = tuple(
        replace(line, seconds=line.seconds * (0.9 if line.k else 1.0)) for line in run.rounds
    )
    answers, moved = (
        where(analyse(each).answers, engine="own", prompt_set="all")
        for each in (run, replace(run, rounds=rounds))
    )
    for answer, other in zip(answers, moved, strict=True):
        assert other.speedup_lo == pytest.approx(answer.speedup_lo)
        assert other.speedup == pytest.approx(answer.speedup, rel=0.01)


def test_a_loop_that_does_not_do_as_replay_expects_is_judged_by_its_generations_alone(
    run: StoredRun,
) -> None:
    def fewer_rounds(trial: Trial) -> Trial:
        return replace(trial, rounds=max(1, trial.rounds // 2)) if trial.rounds else trial

    summary = analyse(with_trials(run, fewer_rounds))
    for answer in where(summary.answers, engine="own"):
        assert answer.pairs is None
        assert answer.named[1] == k_at(run, answer.temperature)
        pairs = pairs_of(run.trials, answer.temperature or 0.0, answer.named[1])
        if answer.prompt_set == "all" and len(pairs) == len({pair.name for pair in pairs}):
            assert answer.speedup is not None


def test_rounds_are_priced_by_how_much_they_drafted(run: StoredRun) -> None:
    sweep = pair_run(Setup(run))
    replayed = sweep.drafts.by_rule[sweep.setup.rule, 0.0].replays
    candidate = Candidate("tiny_good", k_at(run, 0.0))
    pairs = pairs_of(sweep.trials, 0.0, candidate.k)
    assert rounds_as_replayed(pairs, replayed, candidate)
    counts = replayed.candidates[candidate]
    # As of a look-up: rounds of K and rounds that propose nothing, half of each
    half = np.zeros_like(counts.proposals)
    half[:, [0, -1]] = counts.rounds[:, None] / 2.0
    changed = replace(counts, proposals=half, drafted=counts.rounds * candidate.k / 2.0)
    replays = replace(replayed, candidates={candidate: changed})
    latency = Latency(RoundTimes(1.0, tuple((k, 1.0 + 0.5 * k) for k in KS)))
    priced = measured_pairs(pairs, Predicted(replays, {"tiny_good": latency}), candidate)
    assert priced is not None
    drafted = np.array([sum(t.drafted or 0 for t in pair.drafted) for pair in pairs])
    rounds = np.array([sum(t.rounds or 0 for t in pair.drafted) for pair in pairs])
    assert priced.cost == pytest.approx(rounds + 0.5 * drafted)
