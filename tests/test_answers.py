"""One answer: the grid, the headline, the serving line and the summary of hard runs agree.

The runs are stored ones whose generations, step times or settings were changed; the analysis and
the reports are the product's.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from runs import FROZEN

from harness import reporting
from harness.analysis import analyse
from harness.records import GREEDY, Trial, grouped
from harness.reporting import grid, html, markdown
from harness.reporting.console import MOST_LINES
from harness.reporting.content import content_of
from harness.reporting.sentences.verdict import next_step
from harness.serving.engines import with_lines
from harness.storage import StoredRun, load
from harness.summary import Answer, Caveat, Failure, Summary, Verdict

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


def only_measured_pays(run: StoredRun) -> StoredRun:
    """What replay predicts of the other engines loses, what the loop measured does not."""
    return changed(slow_draft(run, 30.0), temperature=[1.0])


def only_predicted_pays(run: StoredRun) -> StoredRun:
    lost = slower(run, lambda trial: 4.0 if trial.k else 1.0)
    return changed(lost, temperature=[1.0])


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
    "only the measured rule pays": ("sweep", only_measured_pays),
    "only predicted rules pay": ("sweep", only_predicted_pays),
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
    "adaptive": ("sweep", lambda run: changed(run, decode__stop="threshold")),
    "synthetic": ("sweep", lambda run: changed(run, decode__acceptance=0.6)),
    "an audition": ("audition", changed),
    "an audition where nothing pays": ("audition", lambda run: slow_draft(run, 60.0)),
    "a replayed sweep": ("sweep_replay", changed),
}
any_run = pytest.mark.parametrize("name", RUNS)
CAVEATS = (
    Caveat("thinking_mode"),
    Caveat("chat_template_unused"),
    Caveat("generation_settings", {"settings": "top_k=20, " * 20, "overrides": "decode.top_k=20"}),
    Caveat("few_prompts", {"prompts": 2, "needed": 8, "in_cell": True}),
)


@cache
def summary(name: str) -> Summary:
    stored, change = RUNS[name]
    return analyse(change(load(FROZEN / stored)))


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
        r"|num-draft-tokens (\d+)|num_assistant_tokens = (\d+)",
        code,
    )
    return None if match is None else int(next(filter(None, match.groups())))


@pytest.mark.parametrize(
    ("name", "measured", "predicted"),
    [
        ("nothing pays", "does_not_pay", "does_not_pay"),
        ("an audition where nothing pays", None, "does_not_pay"),
        ("only the measured rule pays", "speculate", "does_not_pay"),
        ("only predicted rules pay", "does_not_pay", "speculate"),
        ("texts differ", "undecided", "undecided"),
    ],
)
def test_the_changed_runs_are_what_their_names_say(
    name: str, measured: str | None, predicted: str
) -> None:
    decisions = {
        (answer.source, answer.decision)
        for answer in summary(name).answers
        if answer.prompt_set == "all"
    }
    expected = {("measured", measured), ("replayed", predicted)}
    assert decisions == {pair for pair in expected if pair[1] is not None}


@any_run
@pytest.mark.parametrize("server", [None, *with_lines()])
def test_the_headline_the_grid_and_the_line_to_serve_are_one_answer(
    name: str, server: str | None
) -> None:
    made = asked(summary(name), server)
    content, shown = content_of(made), grid.marked(made)
    if name == "adaptive" and server == "vllm_probabilistic":  # which does not stop drafting
        assert shown is None
        assert content.verdicts[0].startswith("Not known for vLLM")
        return
    assert shown is not None
    answer, headline, first = shown.row.answer, content.verdicts[0], content.snippets[0]
    assert shown.phrase in headline
    assert shown.phrase in first.title
    assert (
        content.answer
        == {"speculate": "yes", "does_not_pay": "no", "undecided": "open"}[answer.decision]
        or made.run.synthetic
    )
    if answer.decision == "speculate":
        assert headline.startswith(f"Serve {answer.draft} at K={answer.k}: {answer.speedup:.2f}x")
        assert drafted(first.code) == answer.k
        assert {"measured": "measured", "replayed": "predicted"}[answer.source] in headline
    else:
        assert headline.startswith(("Do not speculate: ", "Undecided: "))
        assert drafted(first.code) is None
        assert server or not any(row.speculates for row in grid.rows(made))


@any_run
def test_every_line_drafts_what_some_cell_of_its_temperature_says(name: str) -> None:
    made = summary(name)
    shown = grid.marked(made)
    assert shown is not None
    cells = [
        answer
        for answer in made.answers
        if (answer.temperature, answer.prompt_set) == (shown.row.temperature, "all")
    ]
    served = {answer.k if answer.decision == "speculate" else None for answer in cells}
    lines = [snippet.code for snippet in content_of(made).snippets if snippet.code]
    assert lines
    assert {drafted(line) for line in lines} <= served


@any_run
def test_the_summarys_verdicts_are_cells_of_the_grid(name: str) -> None:
    """Of the cells of one group of engines, where those of the run's rule have different drafts."""
    made = summary(name)

    def content(entry: Answer | Verdict) -> tuple[Any, ...]:
        served = (entry.decision, entry.draft, entry.k, entry.speedup, entry.speedup_lo)
        return entry.prompt_set, *served

    assert made.verdict == made.per_temperature[0]
    for workload in made.per_temperature:
        at = workload.temperature
        sets = [verdict for verdict in made.per_prompt_set if verdict.temperature == at]
        cells = grouped(
            [
                answer
                for answer in made.answers
                if (answer.temperature, answer.rule) == (at, made.run.sampling.rule)
            ],
            lambda answer: answer.servers,
        )
        assert [content(verdict) for verdict in (workload, *sets)] in [
            [content(answer) for answer in group] for group in cells.values()
        ]
        assert len(cells) == 1 or made.run.command == "audition"


@any_run
def test_every_rule_and_temperature_is_answered_and_at_temperature_0_by_one(name: str) -> None:
    made = summary(name)
    adaptive = made.run.sampling.stop_threshold is not None
    for temperature in {answer.temperature for answer in made.answers}:
        cells = {
            answer.rule: replace(answer, rule="ratio", servers=())
            for answer in made.answers
            if (answer.temperature, answer.prompt_set) == (temperature, "all")
        }
        assert set(cells) == {spec.rule for spec in with_lines().values()}
        if temperature == GREEDY and not adaptive:
            assert len({repr(answer) for answer in cells.values()}) == 1


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


@any_run
def test_no_sentence_contradicts_the_headline_or_holds_a_raw_name(name: str) -> None:
    made = summary(name)
    content = content_of(made)
    text = " ".join([*content.verdicts, *content.reasons, content.next_step or ""])
    assert not re.search(r"greedy_draft|exact_match|does_not_pay|least_regret|held_out", text) or (
        "decode.rule=" in text
    )
    assert not re.search(r"best\b[^.]* at 0\.\d\dx", text)
    notes = " ".join(note for snippet in content.snippets[:1] for note in snippet.notes)
    assert not (content.verdicts[0].startswith("Serve") and "No draft" in notes)


@any_run
def test_report_md_and_report_html_lead_with_the_same_grid(name: str, tmp_path: Path) -> None:
    content = content_of(summary(name))
    assert content.grid is not None
    written = markdown.report(content, (), tmp_path)
    page = html.report(content, ())
    for row in content.grid.rows:
        for cell in row.cells:
            assert markdown.escape(cell.text) in written
            assert cell.text.strip("* ").partition(" [")[0] in page
    assert written.index(markdown.escape(content.verdicts[0])) < written.index("| engines")
    first = content.grid.rows[0].cells[1].text
    assert page.index(first) < page.index('id="measured"')


def test_a_default_sweeps_screen_has_the_grid_and_every_temperature_and_set() -> None:
    lines = screen(summary("as it was"))
    assert next(line for line in lines if line.startswith("* ")).startswith("* 0  all engines")
    assert any(line.startswith("* For vLLM with its defaults") for line in lines)
    alone = lines[lines.index("Each prompt set alone (transformers)") + 3 :][:4]
    assert [line.split()[:2] for line in alone] == [
        ["0", "easy"], ["0", "hard"], ["1", "easy"], ["1", "hard"],
    ]  # fmt: skip
    assert all(
        re.search(r"\dx \[.+\] +\d\.\d\dx +\d\.\d\d +0\.\d\d / 0\.\d\d", line) for line in alone
    )


def test_a_prediction_that_the_measurement_contradicts_says_so_in_the_headline() -> None:
    said = {
        name: "Measured at this temperature" in content_of(summary(name)).verdicts[0]
        for name in ("as it was", "only predicted rules pay", "an audition")
    }
    assert said == {"as it was": False, "only predicted rules pay": True, "an audition": False}


def test_a_set_that_brought_nothing_leaves_the_workload_undecided() -> None:
    def ended(trial: Trial) -> Trial:
        if trial.prompt_set != "hard":
            return trial
        return replace(trial, status="failed", error="OutOfMemoryError: no memory")

    run = load(FROZEN / "sweep")
    made = analyse(changed(run, [ended(trial) for trial in run.trials], prompts__weights=None))
    of_the_runs_rule = [answer for answer in made.answers if answer.rule == made.run.sampling.rule]
    assert {(a.decision, a.reason) for a in of_the_runs_rule if a.prompt_set == "all"} == {
        ("undecided", "no_complete_prompt")
    }
    of_easy = [answer.speedup for answer in of_the_runs_rule if answer.prompt_set == "easy"]
    assert of_easy
    assert None not in of_easy


def test_a_k_beyond_the_times_is_left_out_and_named() -> None:
    latency = {"target_ms": 1.0, "draft_ms": 0.1, "verify_ms": [1.0, 1.1, 1.2]}
    made = analyse(changed(load(FROZEN / "audition"), k=[1, 2, 4], latency=latency))
    assert Caveat("k_not_timed", {"ks": "4"}) in made.caveats
    assert {row.k for row in made.results} == {0, 1, 2}


def test_where_the_target_is_on_a_server_measuring_there_is_advised() -> None:
    made = summary("an audition")
    served = Caveat("texts_from", {"engine": "vllm", "version": "0.32.0", "url": "host:8000"})
    advice = content_of(replace(made, caveats=(*made.caveats, served))).next_step or ""
    assert "harness.server engine=vllm k=[" in advice
    assert "harness.sweep" not in advice


@pytest.mark.parametrize(
    ("facts", "keys"),
    [
        ({}, "draft=tiny_good "),
        ({"name": "mine", "id": "org/draft"}, "draft=hf draft.id=org/draft "),
        ({"name": "eagle3", "id": "/a head", "kind": "eagle3"}, "draft=eagle3 draft.id='/a head' "),
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
    advice = next_step(replace(made, answers=tuple(answers), run=run))
    assert advice is None if keys is None else f"harness.sweep {keys}k=[" in str(advice)


def test_many_temperatures_show_the_rows_of_the_marked_engine_first() -> None:
    text = "\n".join(screen(summary("many temperatures")))
    for temperature in ("0", "1", "0.3", "0.5", "0.7", "1.2", "1.5"):
        assert re.search(rf"^[* ] {re.escape(temperature)} ", text, re.MULTILINE)
    assert "12 more rows are in the report" in text
