"""An audition of GGUF files: drafts, K and thresholds on llama.cpp's servers."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runs import EXACT_FLAGS, FROZEN, analysed, needs_llamacpp, outcome_of, stored

from harness.analysis import analyse
from harness.analysis.round_costs import Latency, ServedTimes
from harness.analysis.served_audition import (
    best_by_replay,
    next_finalist,
    predicted_drafts,
    served_draft,
)
from harness.analysis.server_costs import Requests, ServerCosts, TimedRequests, fit_costs
from harness.analysis.setup import Setup
from harness.analysis.verdict import Candidate
from harness.cli import as_hydra_takes, compose, draft_confs
from harness.commands import served_audition, server_plan
from harness.commands.server_plan import AuditionTime, memory_line, timed_lengths
from harness.models.embedded import EMBEDDED, gguf_of
from harness.records import GREEDY, UserError, where
from harness.reporting.tables.leaderboard import targets_table, threshold_tables
from harness.storage import StoredRun, load
from harness.storage.manifest import ChosenK, IneligibleDraft, ServedKs
from harness.theory.speedup import RoundTimes

TARGET, GOOD, SMALL, UNRELATED = (
    gguf_of(EMBEDDED / name) for name in ("tiny", "tiny_good", "tiny_small", "tiny_unrelated")
)
FEW = ("prompts.limit=6", "new_tokens=24", "threads=1", EXACT_FLAGS)


@pytest.fixture(scope="module")
def audition(tmp_path_factory: pytest.TempPathFactory) -> StoredRun:
    drafts = f"drafts=[{SMALL},{GOOD},ngram_simple]"
    root = tmp_path_factory.mktemp("auditions")
    outcome = outcome_of(
        "audition", f"model={TARGET}", drafts, "k=[1,4,8]", *FEW, f"results_root={root}"
    )
    assert outcome.status in (0, 1), outcome  # a look-up may be disturbed
    return stored(outcome)


@needs_llamacpp
def test_every_draft_has_every_k_and_threshold_and_the_best_is_measured(
    audition: StoredRun,
) -> None:
    setup = Setup(audition)
    predicted = predicted_drafts(setup)
    assert predicted is not None
    grid = {(name.draft, name.k, name.p_min) for name in predicted.replays.candidates}
    thresholds = (0.0, 0.5, 0.75, 0.9)
    ranked = {"tiny_small", "tiny_good"} & {*predicted.replays.drafts}
    assert ranked  # a machine with much other work may not tell what rounds of one cost
    for draft in ranked:
        assert {(draft, k, p) for k in (1, 4, 8) for p in thresholds} <= grid
    assert not {p for draft, _, p in grid if draft == "ngram_simple"} - {0.0}
    (answer,) = [each for each in analyse(audition).answers if each.prompt_set == "all"]
    ks = audition.manifest.served_ks
    assert ks is not None
    assert answer.named[0] in {each.draft for each in ks.chosen}
    assert (answer.engine, answer.source) == ("llamacpp", "measured")
    assert {each.draft for each in answer.candidates} == {draft for draft, *_ in grid}


@needs_llamacpp
def test_rounds_of_the_measured_server_are_those_that_its_draft_s_scores_say(
    audition: StoredRun,
) -> None:
    ks = audition.manifest.served_ks
    assert ks is not None
    chosen = ks.chosen[0]
    assert chosen.draft is not None
    assert chosen.k is not None
    made = served_draft(Setup(audition), chosen.draft)
    assert made is not None
    expected = made.served.replayed(made.plain, chosen.k, chosen.p_min)
    rounds = dict(zip([t.prompt for t in made.plain.trials], expected.rounds, strict=True))
    measured = where(audition.trials, draft=chosen.draft, status="ok", stop_reason="budget")
    assert len(measured) >= 3
    for trial in measured:
        assert trial.rounds == pytest.approx(rounds[trial.prompt])


@needs_llamacpp
def test_a_complete_audition_that_is_resumed_asks_for_nothing(audition: StoredRun) -> None:
    again = outcome_of("audition", f"resume={audition.folder}")
    resumed = stored(again)
    for name in ("trials", "rounds", "probes", "starts"):
        assert len(getattr(resumed, name)) == len(getattr(audition, name)), name
    for name in ("traces", "confidences", "timings"):
        assert len(list(getattr(resumed, name))) == len(list(getattr(audition, name))), name
    assert best_by_replay(resumed) == best_by_replay(audition)


@needs_llamacpp
def test_a_draft_s_file_that_is_cut_is_refused_before_a_server_starts(tmp_path: Path) -> None:
    broken = tmp_path / "cut.gguf"
    broken.write_bytes(GOOD.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"cut\.gguf.*(cut|ends|short)"):
        outcome_of("audition", f"model={TARGET}", f"drafts=[{broken}]", *FEW)


@pytest.mark.parametrize(
    ("target", "draft", "line"),
    [
        (TARGET, "tiny_good", "tiny_good.*is a GGUF file alone.*name@FILE.gguf"),
        (TARGET, f"eagle3@{EMBEDDED / 'tiny_eagle3'}", "eagle3.*is a GGUF file alone"),
        ("tiny", str(GOOD), "a GGUF file, and model=tiny is a checkpoint"),
    ],
)
def test_a_file_next_to_a_checkpoint_is_refused(target: object, draft: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        outcome_of("audition", f"model={target}", f"drafts=[{draft}]", "dry_run=true")


# ---- without a server ----------------------------------------------------------------------------


def test_a_file_in_drafts_is_named_by_its_stem() -> None:
    config = compose("audition", [f"model={TARGET}", f"drafts=[{GOOD},b@{SMALL},ngram_simple]"])
    assert [conf.name for conf in draft_confs(config)] == ["tiny_good", "b", "ngram_simple"]
    assert config.k == [1, 2, 4, 8, 16]
    assert config.p_min == [0.0, 0.5, 0.75, 0.9]
    assert (config.engine, config.temperature, config.decode.rule) == (
        "llamacpp",
        [0.0],
        "greedy_draft",
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([f"model={TARGET}", "engine=vllm"], "engine=vllm"),
        ([f"model={TARGET}", "temperature=[1]"], "temperature=.*give temperature="),
        ([f"model={TARGET}", "latency.target_ms=3"], "latency.target_ms: not with"),
        ([f"model={TARGET}", "texts_from=http://localhost:1"], "texts_from: not with"),
        (["flags=[-ngl,9]"], "flags: of servers"),
    ],
)
def test_what_an_audition_on_servers_does_not_take_is_refused(words: list[str], line: str) -> None:
    with pytest.raises(UserError, match=line):
        compose("audition", words)


def test_a_round_that_a_threshold_ends_takes_the_step_of_the_token_that_it_drops() -> None:
    times = RoundTimes(1.0, ((1, 1.5), (4, 3.0)))
    costs = ServerCosts(0.0, 0.0, times)
    served = ServedTimes("llamacpp", "run", 0.0, 1, "measured", costs, (costs, costs))
    latency = Latency(times, served=served, dropped_s=0.25)
    assert latency.at_threshold(4, 0.0) is latency
    stopped = latency.at_threshold(4, 0.5)
    assert [stopped.rounds.at(n) for n in range(5)] == [1.25, 1.75, 2.25, 2.75, 3.0]
    assert stopped.served is not None
    assert stopped.served.costs.times == stopped.rounds


def test_rounds_of_every_number_of_tokens_follow_from_one_server_of_the_largest_k() -> None:
    true = RoundTimes(1.0, ((1, 1.6), (2, 2.0), (4, 2.8), (8, 5.0)))
    lengths = timed_lengths([1, 2, 4, 8])
    assert lengths == [1, 2, 3, 5, 9, 12]
    rounds = np.zeros((len(lengths), 9))
    for row, length in enumerate(lengths):
        for left in range(length):
            rounds[row, min(8, left)] += 1.0
    seconds = 0.3 + rounds @ np.array([true.at(n) for n in range(9)])
    plain = np.array(lengths, dtype=float)
    prompts = tuple(enumerate(lengths))
    timed = TimedRequests(
        {0: Requests(0.1 + plain, plain[:, None], prompts), 8: Requests(seconds, rounds, prompts)},
        fitted_at=(1, 2, 4, 8),
    )
    fitted = fit_costs(timed)
    assert fitted is not None
    assert [fitted.times.at(k) for k in (1, 2, 4, 8)] == pytest.approx([1.6, 2.0, 2.8, 5.0])
    # A disturbed request makes no round shorter than one of fewer tokens
    slow = replace(
        timed, by_k={**timed.by_k, 8: replace(timed.by_k[8], seconds=seconds * [3, 1, 1, 1, 1, 1])}
    )
    disturbed = fit_costs(slow)
    assert disturbed is not None
    values = [disturbed.times.at(k) for k in (0, 1, 2, 4, 8)]
    assert values == sorted(values)


def test_the_time_that_is_left_follows_from_what_the_texts_took() -> None:
    time = AuditionTime(100.0, {"a": 40.0, "b": 20.0}, 200.0)
    assert time.ranking_s == 160.0
    left = time.left(150.0)
    assert (left.plain, left.drafts, left.measuring) == (0.0, {"a": 60.0, "b": 30.0}, 300.0)
    early = time.left(50.0, 0.25)  # twice as slow as planned
    assert (early.plain, early.measuring) == (150.0, 400.0)
    assert "at most about" in time.sentence()


def test_two_servers_that_do_not_fit_the_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = SimpleNamespace(available=1_000_000)
    monkeypatch.setattr(server_plan.psutil, "virtual_memory", lambda: free)
    config = compose("audition", [f"model={TARGET}", f"drafts=[{GOOD}]"])
    with pytest.raises(UserError, match=r"two servers side by side take about .* are free; take"):
        memory_line(config, draft_confs(config))


def test_a_draft_that_does_not_fit_is_named_with_its_reason() -> None:
    run = load(FROZEN / "audition_files")
    notes = replace(run.manifest.audition, not_eligible=(IneligibleDraft("other", "too long"),))
    asked = {**run.config, "drafts": [*run.config["drafts"], "other.gguf"]}
    changed = replace(run, config=asked, manifest=replace(run.manifest, audition=notes))
    summary = analyse(changed)
    assert [(each.where, each.error) for each in summary.ineligible] == [("other", "too long")]
    assert summary.run.not_scored == ("other",)
    assert not summary.failures


def test_models_are_one_run_each() -> None:
    words = as_hydra_takes("audition", ["models=[a/T.gguf, b/U.gguf]", "drafts=[ngram_simple]"])
    assert words[0] == "-m"
    assert "model.id=a/T.gguf,b/U.gguf" in words


def test_every_target_has_every_draft_in_one_table() -> None:
    one = analysed("audition_files")
    other = replace(one, run=replace(one.run, model="other"))
    table = targets_table([one, other])
    drafts = len(one.leaderboards[0].rows)
    assert len(table.rows) == 2 * drafts
    first = table.column("speed / first target, plain")
    plain = [cell.value for cell, name in zip(first, table.column("draft"), strict=True)]
    assert plain.count(1.0) == 2  # each target's plain decoding, of one speed here
    assert not targets_table([one]).rows


def test_the_table_of_thresholds_has_every_candidate_once() -> None:
    summary = analysed("audition_files")
    answer = summary.headline
    assert answer is not None
    (table,) = threshold_tables(summary)
    shown = [cell for title in ("K=1", "K=4", "K=8") for cell in table.column(title)]
    assert sum(cell.value is not None for cell in shown) == len(answer.candidates)
    assert not any(each.rows for each in threshold_tables(analysed("audition")))


def test_before_anything_is_measured_each_draft_has_its_best_alone() -> None:
    run = load(FROZEN / "audition_files")
    summary = analyse(replace(run, manifest=replace(run.manifest, served_ks=None)))
    answer = summary.headline
    assert answer is not None
    assert answer.source == "replayed"
    assert len(answer.candidates) == summary.run.ranked
    if answer.speedup_lo is not None:
        assert answer.speedup_lo <= (answer.speedup or 0.0) <= (answer.speedup_hi or 0.0)


def test_the_prediction_that_is_quoted_is_that_of_the_measured_threshold() -> None:
    answer = analysed("audition_files").headline
    assert answer is not None
    assert len({each.k for each in answer.by_k}) == len(answer.by_k)
    assert {each.p_min for each in answer.by_k} == {answer.p_min}
    assert "measured" in {each.source for each in answer.by_k}


# ---- a second finalist ---------------------------------------------------------------------------


def test_a_draft_that_is_expected_to_be_faster_than_the_first_was_is_measured_next() -> None:
    run = load(FROZEN / "audition_files")
    (answer,) = [each for each in analyse(run).answers if each.prompt_set == "all"]
    others = [each for each in answer.candidates if each.draft != answer.named[0]]
    best = max(others, key=lambda each: each.speedup)
    assert answer.decision == "undecided"
    assert best.speedup > (answer.speedup or 0.0)
    following = next_finalist(run)
    assert following == Candidate(best.draft, best.k, best.p_min or 0.0)
    # Before anything is measured, and once two are, there is none
    ks = run.manifest.served_ks
    assert ks is not None
    assert following is not None
    for chosen in (
        (),
        (*ks.chosen, ChosenK(GREEDY, following.k, draft=following.draft, p_min=following.p_min)),
    ):
        trials = run.trials if chosen else tuple(where(run.trials, k=0))
        if len(chosen) == 2:  # its pairs are those of the first
            trials += tuple(
                replace(trial, draft=following.draft, k=following.k)
                for trial in where(run.trials, draft=ks.chosen[0].draft)
            )
        manifest = replace(run.manifest, served_ks=replace(ks, chosen=chosen))
        changed = replace(run, manifest=manifest, trials=trials)
        vars(changed).update(traces=run.traces, confidences=run.confidences)
        assert next_finalist(changed) is None


@needs_llamacpp
def test_both_finalists_and_what_learns_are_measured_and_the_fastest_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def other(run: StoredRun) -> Candidate | None:
        ks = run.manifest.served_ks
        assert ks is not None
        drafts = {"tiny_small", "tiny_good"} - {str(each.draft) for each in ks.chosen}
        return Candidate(drafts.pop(), 4, 0.5)

    monkeypatch.setattr(served_audition, "next_finalist", other)
    outcome = outcome_of(
        *("audition", f"model={TARGET}", f"drafts=[{SMALL},{GOOD},ngram_mod]", "k=[4]"),
        *("p_min=[0,0.5]", *FEW),
    )
    run = stored(outcome)
    ks = run.manifest.served_ks
    assert ks is not None
    assert {each.draft for each in ks.chosen} == {"tiny_small", "tiny_good"}
    summary = analyse(run)
    (answer,) = [each for each in summary.answers if each.prompt_set == "all"]
    measured = {each.draft: each.speedup for each in answer.candidates if each.source == "measured"}
    # What learns from requests is measured, too, every prompt once
    drafts = {"tiny_small", "tiny_good", "ngram_mod"}
    assert {*measured} == drafts
    asked = [trial.prompt for trial in where(run.trials, draft="ngram_mod")]
    assert len(asked) == len({*asked}) == len(where(run.trials, k=0, repetition=0))
    rows = [row for row in summary.results if row.source == "measured" and row.k]
    assert {row.draft for row in rows} == drafts
    (board,) = summary.leaderboards
    assert {row.draft for row in board.rows} == {None, *drafts}
    # Each next to plain decoding of its own
    visits = {trial.draft: trial.repetition for trial in run.trials if trial.k}
    assert len({*visits.values()}) == len(drafts)


@needs_llamacpp
def test_a_second_finalist_that_fails_leaves_the_first_one_s_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[str | None] = []
    measure = served_audition._measure_finalist

    def fails(run: Any, plain: Any, ks: ServedKs) -> bool:
        measured.append(ks.chosen[-1].draft)
        return len(ks.chosen) == 1 and measure(run, plain, ks)

    def other(run: StoredRun) -> Candidate:
        ks = run.manifest.served_ks
        assert ks is not None
        return Candidate(({"tiny_small", "tiny_good"} - {ks.chosen[0].draft}).pop(), 4)

    monkeypatch.setattr(served_audition, "_measure_finalist", fails)
    monkeypatch.setattr(served_audition, "next_finalist", other)
    words = (f"model={TARGET}", f"drafts=[{SMALL},{GOOD}]", "k=[4]", "p_min=[0]")
    run = stored(outcome_of("audition", *words, *FEW))
    assert len(measured) == len({*measured}) == 2
    (answer,) = [each for each in analyse(run).answers if each.prompt_set == "all"]
    assert (answer.source, answer.named[0]) == ("measured", measured[0])
