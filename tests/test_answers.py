"""One answer: the grid, the headline, the serving line and the summary of hard runs agree.

The runs are stored ones whose generations, step times or settings were changed; the analysis and
the reports are the product's.
"""

import io
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import escape
from rich.console import Console
from runs import FROZEN, analysed, sample

from harness import formatting, reporting
from harness.analysis import analyse
from harness.cli import compose
from harness.command_words import of_hydra
from harness.engine_facts.draft_kinds import kind_of
from harness.engine_facts.engines import drafts_alike, spec_of, with_lines
from harness.records import GREEDY, RoundTiming, Trial, first
from harness.reporting import grid, html, markdown
from harness.reporting.console import MOST_LINES
from harness.reporting.content import content_of
from harness.reporting.sentences.run import status
from harness.reporting.sentences.verdict import pair
from harness.reporting.serving_commands import snippets_of
from harness.storage import StoredRun, load
from harness.summary import Caveat, Failure, Summary, from_json, to_json

Change = Callable[[StoredRun], StoredRun]


def changed(run: StoredRun, trials: Sequence[Trial] | None = None, **settings: Any) -> StoredRun:
    """The run with other generations or settings; two underscores lead into a group."""
    config = deepcopy(run.config)
    for name, value in settings.items():
        group, _, key = name.rpartition("__")
        (config[group] if group else config)[key] = value
    kept = run.trials if trials is None else tuple(trials)
    made = replace(run, config=config, trials=kept)
    vars(made).update(traces=run.traces, timings=run.timings)
    return made


def slower(run: StoredRun, factor: Callable[[Trial], float]) -> StoredRun:
    """Generations that took longer by a factor of their own."""
    return changed(run, [replace(t, decode_s=(t.decode_s or 0.0) * factor(t)) for t in run.trials])


def slow_draft(run: StoredRun, factor: float) -> StoredRun:
    """Draft steps that take longer, and with them the rounds."""
    steps_s = {
        timing.model: float(np.median(timing.samples_s))
        for timing in run.timings
        if (timing.role, timing.kind) == ("draft", "step")
    }
    rounds = [
        replace(t, seconds=t.seconds + (factor - 1) * steps_s[t.draft] * t.k * t.rounds)
        for t in run.rounds
    ]
    made = changed(replace(run, rounds=tuple(rounds)))
    vars(made)["timings"] = [
        replace(timing, samples_s=tuple(factor * s for s in timing.samples_s))
        if timing.role == "draft"
        else timing
        for timing in run.timings
    ]
    return made


def noisy(run: StoredRun) -> StoredRun:
    rng = np.random.default_rng(1)
    return slower(run, lambda _: float(rng.lognormal(0.0, 0.7)))


def nothing_pays(run: StoredRun) -> StoredRun:
    return slower(slow_draft(run, 30.0), lambda trial: 4.0 if trial.k else 1.0)


def one_temperature_pays(run: StoredRun) -> StoredRun:
    loses = {0.0: 3.0, 1.0: 1.0}
    return slower(run, lambda trial: loses[trial.temperature] if trial.k else 1.0)


def nothing_is_accepted(run: StoredRun) -> StoredRun:
    """A draft whose every token is another than the target's."""
    made = changed(run)
    vars(made)["traces"] = [
        replace(
            trace,
            draft_logprob=np.full_like(trace.draft_logprob, -np.inf),
            draft_is_argmax=np.zeros_like(trace.draft_is_argmax),
        )
        for trace in run.traces
    ]
    return made


def every_set_differs(run: StoredRun) -> StoredRun:
    """Four prompt sets, each fastest at another K, or at none."""
    order = {"a": 1, "b": 2, "c": 4, "d": 0}

    def name(prompt_set: str, prompt: str) -> str:
        return {"easy": "ab", "hard": "cd"}[prompt_set][int(prompt[-1]) % 2]

    def factor(trial: Trial) -> float:
        favourite = order[name(trial.prompt_set, trial.prompt)]
        return 1.0 if trial.k in (0, favourite) else 2.5

    made = slower(run, factor)
    trials = [replace(t, prompt_set=name(t.prompt_set, t.prompt)) for t in made.trials]
    renamed = changed(made, trials, prompts__weights=None)
    manifest = renamed.manifest.updated(prompts=dict.fromkeys(order, 4))
    renamed = replace(renamed, manifest=manifest)
    vars(renamed)["traces"] = [
        replace(t, prompt_set=name(t.prompt_set, t.prompt)) for t in run.traces
    ]
    return renamed


def many_temperatures(run: StoredRun) -> StoredRun:
    """Seven temperatures, with the generations of the two."""
    others = (0.3, 0.5, 0.7, 1.2, 1.5)
    sampled = [trial for trial in run.trials if trial.temperature == 1.0]
    trials = [replace(trial, temperature=value) for value in others for trial in sampled]
    made = changed(run, [*run.trials, *trials], temperature=[0.0, 1.0, *others])
    vars(made)["traces"] = run.traces + [
        replace(trace, temperature=value, draft_temperature=value)
        for value in others
        for trace in run.traces
        if trace.temperature == 1.0
    ]
    return made


def some_failed(run: StoredRun) -> StoredRun:
    def ended(trial: Trial) -> Trial:
        if trial.k != 4 or trial.prompt_set != "hard":
            return trial
        return replace(trial, status="failed", error="OutOfMemoryError: no memory")

    return changed(run, [ended(trial) for trial in run.trials])


def few_prompts(run: StoredRun) -> StoredRun:
    kept = ("easy-01", "hard-01", "easy-02", "hard-02")
    made = changed(run, [trial for trial in run.trials if trial.prompt in kept])
    vars(made)["traces"] = [trace for trace in run.traces if trace.prompt in kept]
    return made


def texts_differ(run: StoredRun) -> StoredRun:
    """One greedy text of speculation is not plain decoding's; the run ended before judging any."""
    greedy = [i for i, trial in enumerate(run.trials) if trial.k and trial.temperature == GREEDY]
    first = run.trials[greedy[0]]
    other = replace(first, tokens=(*(first.tokens or ())[:-1], 7))
    trials = [*run.trials[: greedy[0]], other, *run.trials[greedy[0] + 1 :]]
    return changed(replace(run, checks=()), trials)


RUNS: Mapping[str, tuple[str, Change]] = {
    "as it was": ("sweep", changed),
    "noisy": ("sweep", noisy),
    "nothing pays": ("sweep", nothing_pays),
    "one temperature pays": ("sweep", one_temperature_pays),
    "nothing is accepted": ("sweep_replay", nothing_is_accepted),
    "every set differs": ("sweep", every_set_differs),
    "other weights": ("sweep", lambda run: changed(run, prompts__weights={"easy": 1, "hard": 9})),
    "many temperatures": ("sweep", many_temperatures),
    "some failed": ("sweep", some_failed),
    "few prompts": ("sweep", few_prompts),
    "texts differ": ("sweep", texts_differ),
    "greedy drafting measured": (
        "sweep",
        lambda run: changed(run, decode__rule="greedy_draft", temperature=[1.0, 0.0]),
    ),
    "a threshold": ("audition_threshold", changed),
    "synthetic": ("sweep", lambda run: changed(run, decode__acceptance=0.6)),
    "an audition": ("audition", changed),
    "an audition where nothing pays": ("audition", lambda run: slow_draft(run, 60.0)),
    "a replayed sweep": ("sweep_replay", changed),
}
# Those whose answers differ most
KEPT = (
    *("as it was", "nothing pays", "nothing is accepted", "every set differs", "some failed"),
    *("texts differ", "a threshold", "synthetic", "an audition", "an audition where nothing pays"),
)
any_run = pytest.mark.parametrize("name", sample(RUNS, *KEPT))
CAVEATS = (
    Caveat("embedded_models"),
    Caveat("other_budget", {"ignored": "new_tokens=64", "made_with": "new_tokens=32"}),
    Caveat("server_defaults", {"settings": "top_k=20, " * 20 + "min_p=0.1", "overrides": ""}),
    Caveat("few_prompts", {"prompts": 2, "needed": 8, "in_cell": True}),
)


@cache
def summary(name: str) -> Summary:
    stored, change = RUNS[name]
    return analysed(stored) if change is changed else analyse(change(load(FROZEN / stored)))


def asked(made: Summary, server: str | None) -> Summary:
    return replace(made, run=replace(made.run, serve_on=server))


def screen(made: Summary, width: int = 80) -> list[str]:
    out = io.StringIO()
    reporting.show(made, Console(file=out, width=width))
    return out.getvalue().splitlines()


def drafted(code: str) -> int | None:
    """The K of a line to serve."""
    match = re.search(
        r'num_speculative_tokens":(\d+)|num-steps (\d+)|draft-n-max (\d+)'
        r"|num-draft-tokens (\d+)|num_assistant_tokens = (\d+)|max_draft_len: (\d+)",
        code,
    )
    return None if match is None else int(next(filter(None, match.groups())))


@pytest.mark.parametrize(
    ("name", "own", "others"),
    [
        ("nothing pays", "does_not_pay", {"not_measured"}),
        ("an audition where nothing pays", "does_not_pay", {"not_measured"}),
        ("nothing is accepted", "does_not_pay", {"does_not_pay"}),
        ("texts differ", "undecided", set[str]()),
        ("synthetic", "speculate", set[str]()),
    ],
)
def test_the_changed_runs_are_what_their_names_say(name: str, own: str, others: set[str]) -> None:
    first = [a for a in summary(name).answers if a.prompt_set == "all" and a.temperature == GREEDY]
    assert {answer.decision for answer in first if answer.timed} == {own}
    assert {answer.decision for answer in first if not answer.timed} == others


@pytest.mark.parametrize("name", [*KEPT, "tests/frozen/server"])
def test_no_engine_that_was_not_timed_has_a_speedup_or_is_called_measured(name: str) -> None:
    made = analysed("server") if name not in RUNS else summary(name)
    stored = json.loads(to_json(made))["answers"]
    for answer, entry in zip(made.answers, stored, strict=True):
        timed = {"own"} if made.served is None else {"own", made.served.engine}
        assert answer.timed == (answer.engine in timed)
        assert entry["servers"] == ([] if answer.engine == "own" else [answer.engine])
        if answer.timed:
            continue
        assert (answer.speedup, answer.speedup_lo, answer.speedup_hi) == (None, None, None)
        assert answer.source != "measured"
        assert answer.decision in ("not_measured", "does_not_pay")
        assert entry["largest_round_cost"] == entry["tokens_per_round"]


@any_run
def test_what_carries_over_is_tokens_per_round_by_the_engines_rule(name: str) -> None:
    made = summary(name)
    boards = {(board.rule, board.temperature): board for board in made.leaderboards}
    for answer in made.answers:
        if answer.timed or answer.prompt_set != "all" or answer.temperature is None:
            continue
        assert answer.rule == spec_of(str(answer.engine)).rule
        draft, k = answer.named
        own = grid.own_answer(made, answer.temperature)
        assert own is not None
        if own.reason == "no_complete_prompt":
            assert (draft, k, answer.rounds) == (None, 0, ())
            continue
        # Without the threshold another K may be best
        if (own.named[0], own.named_p_min) == (draft, answer.named_p_min):
            assert k == own.named[1]
        assert answer.rule is not None
        row = first(boards[answer.rule, answer.temperature].rows, draft=draft)
        assert row is not None
        (of_best,) = [entry for entry in answer.rounds if entry.k == row.k]
        same = row.p_min == answer.named_p_min
        assert same == (of_best.tokens_per_round == pytest.approx(row.tokens_per_round))
        if answer.name == own.name:  # a round costs there what it costs here
            costs = {entry.k: entry.own_cost for entry in own.rounds}
            assert of_best.own_cost == costs[row.k]
        elif same and (row.draft, row.k) != own.named:  # that row has the answer's number
            assert of_best.own_cost == pytest.approx((row.tokens_per_round or 0.0) / row.speedup)
        for entry in answer.rounds:
            if entry.tokens_per_round_lo is not None and entry.tokens_per_round_hi is not None:
                assert 1.0 <= entry.tokens_per_round_lo <= entry.tokens_per_round
                assert entry.tokens_per_round <= entry.tokens_per_round_hi


@any_run
@pytest.mark.parametrize("server", [None, *with_lines()])
def test_the_headline_the_grid_and_the_line_to_serve_are_one_answer(
    name: str, server: str | None
) -> None:
    made = asked(summary(name), server)
    content, shown = content_of(made), grid.marked(made)
    if made.headline is None:
        assert server is not None
        assert shown is None
        assert content.verdicts[0].startswith("Not known for ")
        assert content.snippets == ()
        return
    assert shown is not None
    assert shown.answer is made.headline
    answer, sentence, first_line = made.headline, content.verdicts[0], content.snippets[0]
    colours = {"speculate": "yes", "does_not_pay": "no"}
    assert content.answer == colours.get(answer.decision, "open") or made.run.synthetic
    own = made.answers[0]
    if answer.timed:
        start = {"measured": "Timed ", "replayed": "Predicted "}[answer.source]
        assert content.verdicts[1].startswith(start)
        assert content.verdicts[1].count("one request at a time") == 1
    if answer.speculates:
        named = pair(answer.draft, answer.k, answer.p_min)
        verb = "Use" if answer.source == "measured" else "Try"
        assert f"{verb} {named}: {answer.speedup:.2f} times as fast" in sentence
    if own.speculates and answer.decision != "does_not_pay":
        assert drafted(first_line.code) == answer.k
    else:
        assert drafted(first_line.code) is None or server != answer.engine
    (row,) = [row for row in content.grid.rows if row.best] if content.grid else []
    assert row.cells[0].text.startswith(grid.MARK)
    assert first_line.marked == (server is not None)


@any_run
def test_one_answer_is_the_verdict_the_price_and_the_gate(name: str) -> None:
    made = summary(name)
    headline = made.headline
    assert headline is not None
    assert headline is made.per_temperature[0]
    stored = json.loads(to_json(made))
    assert stored["verdict"] == stored["per_temperature"][0]
    assert stored["verdict"]["speedup"] == headline.speedup
    assert stored["verdict"]["speculate"] == headline.speculates
    assert len(stored["per_prompt_set"]) == len(made.per_prompt_set)
    priced = replace(made, plain_usd_per_million_tokens=3.0)
    gain = headline.speedup if headline.speculates and headline.speedup else 1.0
    assert priced.usd_per_million_tokens == pytest.approx(3.0 / gain)
    asked_for = asked(priced, "mlx")
    if asked_for.headline is not None:
        assert asked_for.usd_per_million_tokens == 3.0
    assert from_json(to_json(made)) == made


@any_run
def test_every_temperature_is_answered_for_every_engine_that_has_the_draft(name: str) -> None:
    made = summary(name)
    known = made.run.synthetic or made.headline is None or made.headline.reason in OF_THE_TEXTS
    for temperature in made.run.temperatures:
        engines = [
            answer.engine
            for answer in made.answers
            if (answer.temperature, answer.prompt_set) == (temperature, "all")
        ]
        drafts = {made.run.draft, *made.drafts}
        kinds = {kind_of(draft, made.run.models) for draft in drafts - {None}}
        has = [
            name
            for name in with_lines()
            if any(drafts_alike(name, kind, temperature) for kind in kinds)
        ]
        assert engines == ["own", *([] if known else has)]


OF_THE_TEXTS = ("greedy_texts_differ", "greedy_texts_unjudged")


@any_run
@pytest.mark.parametrize("server", [None, "mlx", "transformers"])
def test_the_console_is_short_whatever_happened(name: str, server: str | None) -> None:
    made = asked(summary(name), server)
    failures = tuple(Failure(f"easy/p{index} k=8", "out of memory, " * 9) for index in range(20))
    run = replace(made.run, status="running", failed_cells=3, measured_cells=9)
    hard = replace(made, run=run, failures=failures, caveats=(*made.caveats, *CAVEATS))
    for shown in (made, hard):
        lines = screen(shown)
        assert sum(max(1, -(-len(line) // 80)) for line in lines) <= MOST_LINES
        text = " ".join(" ".join(lines).split())
        assert content_of(shown).verdicts[0] in text
        assert content_of(shown).page in text


CAUTIONS = (
    Caveat("busy_machine", {"load": 1.9, "processors": 2}),
    Caveat(
        "predictions_off",
        {
            "outside": 5,
            "cells": 6,
            "error": 0.45,
            "prompt_set": "easy",
            "temperature": 0.0,
            "k": 4,
            "gap": 0.61,
        },
    ),
)


@any_run
def test_what_changes_the_reading_is_never_among_the_notes_that_are_left_out(name: str) -> None:
    made = summary(name)
    made = replace(made, caveats=(*CAVEATS, *made.caveats, *CAUTIONS))
    content, lines = content_of(made), screen(made)
    text = " ".join(" ".join(lines).split())
    assert len(content.cautions) >= len(CAUTIONS)
    assert content.caveats[: len(content.cautions)] == content.cautions
    assert all(f"Caution: {caution}" in text for caution in content.cautions)
    assert "other work took 95% of the processors" in text.lower()
    assert lines[-1] == f"report: {content.page}"
    everything = io.StringIO()
    reporting.show(made, Console(file=everything, width=80), verbose=True)
    every = " ".join(everything.getvalue().split())
    assert all(f"Caution: {caution}" in every for caution in content.cautions)
    others = content.caveats[len(content.cautions) :]
    assert all(f"Note: {caveat}" in every for caveat in others)


@any_run
def test_report_md_and_report_html_lead_with_the_same_grid(name: str, tmp_path: Path) -> None:
    content = content_of(summary(name))
    assert content.grid is not None
    written = markdown.report(content, (), tmp_path)
    page = html.report(content, ())
    for row in content.grid.rows:
        for cell in row.cells:
            assert markdown.escape(cell.text) in written
            assert str(escape(cell.text.strip("* ").partition(" [")[0])) in page
    assert written.index(markdown.escape(content.verdicts[0])) < written.index("| engines")
    first = str(escape(content.grid.rows[0].cells[1].text))
    assert page.index(first) < page.index('id="measured"')


def test_a_set_that_brought_nothing_leaves_the_workload_undecided() -> None:
    def ended(trial: Trial) -> Trial:
        if trial.prompt_set != "hard":
            return trial
        return replace(trial, status="failed", error="OutOfMemoryError: no memory")

    run = load(FROZEN / "sweep")
    made = analyse(changed(run, [ended(trial) for trial in run.trials], prompts__weights=None))
    own = [answer for answer in made.answers if answer.engine == "own"]
    assert {(a.decision, a.reason) for a in own if a.prompt_set == "all"} == {
        ("undecided", "no_complete_prompt")
    }
    of_easy = [answer.speedup for answer in own if answer.prompt_set == "easy"]
    assert of_easy
    assert None not in of_easy


def test_a_k_beyond_the_times_is_left_out_and_named() -> None:
    latency = {"target_ms": 1.0, "draft_ms": 0.1, "verify_ms": [1.0, 1.1, 1.2]}
    made = analyse(changed(load(FROZEN / "audition"), k=[1, 2, 4], latency=latency))
    assert Caveat("k_left_out", {"ks": "4", "why": "not_timed"}) in made.caveats
    assert {row.k for row in made.results} == {0, 1, 2}


@pytest.mark.parametrize(
    ("facts", "keys"),
    [
        ({}, "draft=tiny_good "),
        ({"name": "mine", "id": "org/draft"}, "draft=hf draft.id=org/draft "),
        (
            {"name": "eagle3", "id": "/a head", "kind": "eagle3"},
            "draft=eagle3 'draft.id=\"/a head\"' ",
        ),
        ({"name": "half", "kind": "early_exit", "layers": 8}, "draft=early_exit draft.layers=8 "),
        ({"name": "mine", "id": None}, None),
    ],
)
def test_the_sweep_that_is_advised_names_a_draft_that_there_is(
    facts: dict[str, Any], keys: str | None
) -> None:
    made = summary("an audition")
    name = facts.get("name", "tiny_good")
    answers = [replace(a, draft=name) if a.draft == "tiny_good" else a for a in made.answers]
    models = [replace(m, **facts) if m.name == "tiny_good" else m for m in made.run.models]
    run = replace(made.run, models=tuple(models))
    advice = content_of(replace(made, answers=tuple(answers), run=run)).next_step
    assert (advice is None) == (keys is None)
    assert advice is None or f"harness.sweep model=tiny {keys}" in advice.command


def of_temperature(made: Summary, temperature: float) -> tuple[Any, Any]:
    """The answer for the whole workload, and the ranking by the run's own rule."""
    answer = first(made.answers, temperature=temperature, prompt_set="all", timed=True)
    board = first(made.leaderboards, temperature=temperature, rule=made.run.sampling.rule)
    assert answer is not None
    assert board is not None
    return answer, board


def test_a_ranking_is_not_corrected_for_the_choice_and_says_what_that_leaves() -> None:
    made = analysed("audition")
    content = content_of(made)
    answer, board = of_temperature(made, 0.0)
    (row,) = (row for row in board.rows if (row.draft, row.k) == answer.named)
    assert answer.speedup is not None
    assert answer.speedup < row.speedup
    assert f"{answer.speedup:.2f} times as fast" in content.verdicts[0]
    (best,) = (bar for bar in content.bars if bar.best)
    assert best.speedup == answer.speedup, "the first screen has one number of it"
    ranked = next(entry for entry in content.tables if "by any rule" in entry.title)
    (note,) = (note for note in ranked.notes if note.startswith("Rows are not corrected"))
    assert note.endswith(f"of tiny_good with K=4 that leaves {formatting.gain(answer)}.")


def own_loop_only(made: Summary) -> Summary:
    """As if early_exit were a copy of the target, which no engine drafts with, and the fastest."""
    answer, _ = of_temperature(made, 0.0)
    name = "early_exit"
    served = replace(answer, draft=name, reason_values={**answer.reason_values, "draft": name})
    boards = []
    for board in made.leaderboards:
        rows = sorted(board.rows, key=lambda row: row.draft != name)
        rows[0] = replace(rows[0], k=answer.k)
        ranked = (replace(row, rank=place) for place, row in enumerate(rows, start=1))
        boards.append(replace(board, rows=tuple(ranked)))
    answers = (served if each is answer else each for each in made.answers)
    models = (replace(each, kind="copy") if each.name == name else each for each in made.run.models)
    run = replace(made.run, models=tuple(models))
    return replace(made, run=run, answers=tuple(answers), leaderboards=tuple(boards))


def test_a_draft_that_no_engine_has_is_marked_and_never_the_best() -> None:
    made = own_loop_only(analysed("audition"))
    content = content_of(made)
    assert (
        "No engine here has early_exit; of the drafts that one has, tiny_good with K=4 looks"
        " fastest," in content.verdicts[1]
    )
    assert content.grid is not None
    assert content.grid.rows[0].cells[2].text == "early_exit, K=4 (harness's loop only)"
    assert content.bars[0].label == "early_exit, K=4 (harness's loop only)"
    by_title = {entry.title: entry for entry in content.tables}
    every = by_title["Predicted on the harness's loop at temperature 0, accepted by any rule"]
    names = [cell.text for cell in every.column("draft")]
    assert names[0] == "early_exit (harness's loop only)"
    assert {"tiny_good", "ngram"} < {*names}
    assert [row.cells[1].text for row in every.rows if row.best] == ["tiny_good"]
    by_title = {entry.title: entry for entry in content_of(asked(made, "mlx")).tables}
    mlx = by_title["Predicted on the harness's loop at temperature 1, if accepted as on mlx-lm"]
    assert "tiny_eagle3 (none of these engines)" in [cell.text for cell in mlx.column("draft")]


def test_a_best_k_at_the_edge_of_the_grid_is_a_caveat_with_the_command_that_looks_further() -> None:
    run = load(FROZEN / "audition")
    (caveat,) = (each for each in analysed("audition").caveats if each.code == "k_at_edge")
    assert (caveat.values["k"], caveat.values["ks"]) == (4, "4,6,8")
    command = str(caveat.values["command"])
    assert command.startswith("python -m harness.audition ")
    assert shlex.split(command)[-1] == "k=[4,6,8]"
    assert command.count("k=[") == 1
    tied = content_of(analysed("audition"))
    assert "K=2 and tiny_small are as good within error" in tied.verdicts[0]
    assert any("is the largest that was asked for" in each for each in tied.caveats)
    alone = content_of(analysed("sweep"))
    assert alone.verdicts[0].endswith(". K=4 is the largest tried; try k=[4,6,8].")
    assert not any("largest that was asked for" in each for each in alone.caveats), "said once"
    below = analyse(changed(run, temperature=[1.0]))
    assert of_temperature(below, 1.0)[0].k == 2
    assert "k_at_edge" not in {each.code for each in below.caveats}
    alone = analyse(changed(run, k=[4]))
    assert "k_at_edge" not in {each.code for each in alone.caveats}


def test_own_prompts_that_a_limit_leaves_out_are_the_first_caveat() -> None:
    run = load(FROZEN / "sweep")
    there = {name: 3 * count for name, count in run.manifest.prompts.items()}
    run = replace(run, manifest=run.manifest.updated(prompts_available=there))
    own = changed(run, prompts__files=["mine.jsonl"])
    used, available = sum(run.manifest.prompts.values()), sum(there.values())
    said = content_of(analyse(own)).caveats[0]
    assert said.startswith(f"{used} of {available} prompts were used (")
    assert "prompts_left_out" not in {each.code for each in analysed("sweep").caveats}


def test_the_command_that_is_next_can_be_pasted_whole(tmp_path: Path) -> None:
    made, config = analysed("audition"), load(FROZEN / "audition").config
    step = content_of(made).next_step
    assert step is not None
    assert step.command in screen(made)  # a line of its own, which nothing breaks
    assert f"\n{step.command}\n" in markdown.report(content_of(made), (), tmp_path)
    python, flag, module, *words = shlex.split(step.command)
    assert (python, flag, module) == ("python", "-m", "harness.sweep")
    composed = compose("sweep", words)
    assert (composed.draft.name, composed.k, composed.temperature) == ("tiny_good", [2, 4], [0.0])
    assert composed.model.id == config["model"]["id"]
    assert composed.prompts.limit == config["prompts"]["limit"] == 8
    for key in ("new_tokens", "seed", "threads"):
        assert getattr(composed, key) == config[key], key


ODD = "/x/ra (1)/with=equals/模型"


def typed(run: StoredRun, *words: str) -> StoredRun:
    """The run as if this command line had made it."""
    environment = replace(run.manifest.environment, command=words)
    return replace(changed(run), manifest=replace(run.manifest, environment=environment))


def composed_as_printed(line: str) -> Any:
    """The configuration that a printed line composes, pasted into a shell."""
    for place, server in enumerate(("PLAIN", "SPECULATIVE"), start=1):
        line = line.replace(server, f"http://127.0.0.1:{place}")
    python, flag, module, *words = shlex.split(line)
    assert (python, flag) == ("python", "-m")
    return compose(module.removeprefix("harness."), words)


@pytest.mark.parametrize("name", ["audition", "server", "sweep", "audition_server", "profile"])
def test_every_printed_command_of_a_run_with_odd_names_can_be_pasted(name: str) -> None:
    of_texts = [
        f"prompts.files={of_hydra([f'{ODD}/a#b, c.jsonl'])}",
        f"results_root={of_hydra(ODD)}",
    ]
    made = analyse(
        typed(load(FROZEN / name), *load(FROZEN / name).manifest.environment.command, *of_texts)
    )
    models = tuple(replace(each, id=f"{ODD}/it's {each.name}") for each in made.run.models)
    run = replace(made.run, folder=ODD, models=models, model="my target")
    made = replace(made, run=run)
    lines = [line for line in screen(made) if line.startswith("python -m harness.")]
    lines += [snippet.measure for snippet in snippets_of(made) if snippet.measure]
    for line in lines:
        config = composed_as_printed(line)
        assert config.model.id == f"{ODD}/it's tiny"
        assert config.prompts.files == [f"{ODD}/a#b, c.jsonl"]
        assert config.results_root == ODD
        if "latency_from=" in line:
            assert config.latency_from == ODD
    unfinished = status(replace(run, status="running"))
    assert f"""('resume="{ODD}"' continues it)""" in str(unfinished)
    assert lines


@pytest.mark.parametrize(
    "brought", [f"resume={ODD}", "traces_from=results/a", "experiment=acceptance_demo"]
)
def test_the_keys_of_a_run_that_others_brought_are_those_that_it_stored(brought: str) -> None:
    run = changed(load(FROZEN / "sweep"), prompts__files=[f"{ODD}/mine.jsonl"], prompts__sets=[])
    made = analyse(typed(run, "sweep", brought))
    words = [shlex.join([word]) for word in made.run.made_with.workload]
    composed = composed_as_printed(f"python -m harness.sweep {' '.join(words)}")
    assert composed.prompts.files == [f"{ODD}/mine.jsonl"]
    assert (composed.new_tokens, composed.seed, composed.threads) == (32, 3, 1)
    assert composed.prompts.weights == {"easy": 3, "hard": 1}
    assert {word.partition("=")[0] for word in made.run.made_with.workload} <= {
        *("prompts.files", "prompts.limit", "prompts.limit_files", "prompts.weights"),
        *("new_tokens", "seed", "threads", "decode.rule"),
    }


@pytest.mark.parametrize("kind", ["model", "eagle3"])
def test_an_audition_is_next_where_the_rounds_of_the_server_price_other_drafts(kind: str) -> None:
    made = analysed("server")
    models = tuple(replace(m, kind=kind) if m.role == "draft" else m for m in made.run.models)
    step = content_of(replace(made, run=replace(made.run, models=models))).next_step
    assert step is not None
    assert ("latency_from=" in step.command) == (kind == "model")
    assert ("another draft" in step.text) == (kind != "model")


def paced(run: StoredRun, pace: Callable[[RoundTiming], float], *, in_turn: bool) -> Summary:
    """The analysis of an audition whose machine took so many times as long for each timing."""
    rounds = [
        replace(each, seconds=pace(each) * each.seconds, turn=each.visit if in_turn else None)
        for each in run.rounds
    ]
    return analyse(changed(replace(run, rounds=tuple(rounds))))


def test_drafts_that_were_timed_on_a_machine_of_changing_pace_are_not_compared() -> None:
    """The target's plain token is the same work next to every draft."""
    run, codes = load(FROZEN / "audition"), {each.code for each in analysed("audition").caveats}
    assert "plain_tokens_unlike" not in codes
    assert {each.decision for each in analysed("audition").per_temperature} == {"speculate"}
    for in_turn in (False, True):
        made = paced(run, lambda each: 3.0 if each.draft == "tiny_good" else 1.0, in_turn=in_turn)
        for answer in made.per_temperature:
            assert (answer.decision, answer.reason) == ("undecided", "drafts_not_compared")
            assert answer.named[0] == answer.reason_values["slow"] == "tiny_good"
            assert answer.speedup is not None
        assert "plain_tokens_unlike" not in {each.code for each in made.caveats}, "said once"
        content = content_of(made)
        assert content.verdicts[0].startswith("Undecided: plain decoding took ")
        assert content.next_step is None
        assert not [each for each in made.answers if each.speculates]


def test_a_draft_that_leads_at_any_pace_of_the_machine_is_served() -> None:
    """Those that do not compare are named; none of them can be the fastest."""
    run = load(FROZEN / "audition")

    def pace(each: RoundTiming) -> float:
        if each.draft == "early_exit":
            return 1.7 if each.k == 0 else 5.0
        return 1.0

    made = paced(run, pace, in_turn=False)
    assert {each.decision for each in made.per_temperature} == {"speculate"}
    (said,) = (each for each in made.caveats if each.code == "plain_tokens_unlike")
    assert str(said.values["times"]).partition(" with ")[2].startswith("early_exit, ")
    assert any("; their ranks do not compare" in each for each in content_of(made).cautions)


@pytest.mark.parametrize("in_turn", [False, True])
def test_a_drift_of_the_machine_cancels_between_drafts_that_are_visited_in_turn(
    in_turn: bool,
) -> None:
    """It slows down to a sixth, over all visits in turn, or from the first draft to the last."""
    run = load(FROZEN / "audition")
    drafts = [*dict.fromkeys(each.draft for each in run.rounds)]
    visits = max(each.visit for each in run.rounds)

    def pace(each: RoundTiming) -> float:
        done = each.visit / visits if in_turn else drafts.index(each.draft) / (len(drafts) - 1)
        return 6.0**done

    made = paced(run, pace, in_turn=in_turn)
    decisions = {each.decision for each in made.per_temperature}
    assert decisions == ({"speculate"} if in_turn else {"undecided"})


def test_noise_of_plain_tokens_is_no_change_of_pace() -> None:
    """Every third visit of a draft takes ten times as long, which doubles the mean."""

    def pace(each: RoundTiming) -> float:
        return 10.0 if each.draft == "tiny_good" and each.visit % 3 == 0 else 1.0

    made = paced(load(FROZEN / "audition"), pace, in_turn=False)
    assert "drafts_not_compared" not in {each.reason for each in made.answers}
