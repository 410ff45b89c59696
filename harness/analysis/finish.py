"""From what a run stored to its results and summary; no model, so `report` can do it again.

Everything here reads a run folder and writes into it. A run that was killed is finished as far as
it got.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from harness.analysis.advise import engines, followed_up
from harness.analysis.cells import (
    completed,
    expected_tokens_per_round,
    latest,
    measured_rows,
    theory_rows,
)
from harness.analysis.latency import latency_of, step_times
from harness.analysis.predicted import evidence_of, replayed_rows
from harness.analysis.priced import prices
from harness.analysis.replayed import Replays, replay_check, replay_drafts
from harness.analysis.told import Number, caveats, failures, headline, in_words, not_measured
from harness.analysis.verdict import Candidate, Evidence, decide, evidence_from_trials, least_regret
from harness.commands import greedy
from harness.commands.synthetic import stored_rates
from harness.records import (
    Cell,
    ResultRow,
    StepTiming,
    Summary,
    Trial,
    Verdict,
)
from harness.reporting import reading
from harness.reporting.reading import dummies_of, synthetic
from harness.storage import RunFolder, StoredRun, load_traces
from harness.theory.speedup import StepTimes


def finish_sweep(folder: RunFolder, stored: StoredRun) -> Summary:
    """Derive a sweep's results.csv and summary.json from its trials and timings, and write them.

    In a sweep of mode=replay no generation was timed: its rows and verdicts come from the traces.
    Where a pair changes greedy texts, those generations count as failed and every verdict is
    undecided.

    Args:
        folder: the run, written to.
        stored: the same run as loaded.
    """
    timings, config = folder.timings(), stored.config
    trials: Sequence[Trial] = stored.trials if config["mode"] == "measure" else ()
    texts: list[greedy.GreedyText] = []
    if not synthetic(stored):
        texts = greedy.known_texts(trials, greedy.judged(stored))
        trials = greedy.without_faulty(trials, texts)
    times = step_times(timings) if timings else None
    names = {"model": config["model"]["name"], "draft": config["draft"]["name"]}
    measured = measured_rows(trials, **names, times=times, seed=config["seed"])
    replays = _replays(stored)
    rows = [*measured]
    if times is not None:
        rows += _theory(stored, measured, times)
        rows += _replayed_rows(replays, timings, config, baseline=not measured)
    folder.write_results(rows)
    evidence = _evidence(trials, replays, config, timings)
    verdicts = [_verdicts(entry, config, texts) for entry in evidence]
    verdict = verdicts[0][0] if verdicts else None
    summary = Summary(
        verdict=verdict,
        per_temperature=tuple(whole for whole, _ in verdicts),
        per_prompt_set=tuple(verdict for _, sets in verdicts for verdict in sets),
        failures=(*failures(trials), *not_measured(stored.manifest)),
        caveats=(*_text_caveat(texts), *caveats(stored, rows, timings)),
        headline={
            **headline(timings),
            **({} if greedy.distrust(texts) else _gains(stored, rows, evidence, verdict, times)),
        },
    )
    extra: dict[str, Any] = {"replay_gaps": _gaps(trials, replays, names["draft"])}
    if texts:
        extra[greedy.KEY] = greedy.as_stored(texts)
    advised = {} if greedy.distrust(texts) else _advised(stored, verdict, rows, times)
    folder.write_summary(summary, {**extra, **advised})
    return summary


def _gains(
    stored: StoredRun,
    rows: Sequence[ResultRow],
    evidence: Sequence[Evidence],
    verdict: Verdict | None,
    times: StepTimes | None,
) -> dict[str, Number]:
    """The gains from speculation among the headline's numbers."""
    return {**_best_cell(rows), **_least_regret(evidence), **prices(stored, verdict, times)}


def _advised(
    stored: StoredRun, verdict: Verdict | None, rows: Sequence[ResultRow], times: StepTimes | None
) -> dict[str, Any]:
    """Reasons, rules of thumb and the engines' own numbers."""
    return {
        **followed_up(
            verdict,
            rows,
            times,
            latency=reading.latency_of(stored),
            models=stored.manifest.get("models"),
            dummy=bool(dummies_of(stored)),
        ),
        **engines(verdict, load_traces(stored.folder), times, stored.config["k"], stored.trials),
    }


def _theory(stored: StoredRun, measured: Sequence[ResultRow], times: StepTimes) -> list[ResultRow]:
    """What step times predict: from the imposed acceptance where there is one, else the cell's own.

    A round of adaptive drafting has no fixed length, so its cells have no prediction.
    """
    if stored.config["decode"].get("stop", "none") != "none":
        return []
    rates = stored_rates(stored.manifest)
    if not rates:
        return theory_rows(measured, times)
    expected: list[ResultRow] = []
    for row in measured:
        own = rates.get((row.prompt_set or "", row.temperature or 0.0, row.k))
        cell = [
            trial.new_tokens or 0
            for trial in completed(latest(stored.trials))
            if (trial.prompt_set, trial.temperature, trial.k)
            == (row.prompt_set, row.temperature, row.k)
        ]
        if own and cell:
            tokens_per_round = expected_tokens_per_round(own, cell)
            expected.append(replace(row, tokens_per_round=tokens_per_round, alpha=None))
    return theory_rows(expected, times)


def _replays(stored: StoredRun) -> list[Replays]:
    """The draft's replays, by temperature, where the run has traces."""
    config = stored.config
    traces = load_traces(stored.folder)
    ks = [k for k in config["k"] if k > 0]
    return [
        replay_drafts({config["draft"]["name"]: traces}, config["decode"]["rule"], ks, value)
        for value in config["temperature"]
        if any(trace.temperature == value for trace in traces)
    ]


def _replayed_rows(
    replays: Sequence[Replays],
    timings: Sequence[StepTiming],
    config: Mapping[str, Any],
    *,
    baseline: bool,
) -> list[ResultRow]:
    """Rows of source replayed; with the k = 0 rows only where no baseline was measured."""
    latency = {config["draft"]["name"]: latency_of(timings)}
    rows = [
        row
        for entry in replays
        for row in replayed_rows(entry, latency, model=config["model"]["name"], seed=config["seed"])
    ]
    return [row for row in rows if baseline or row.k > 0]


def _evidence(
    trials: Sequence[Trial],
    replays: Sequence[Replays],
    config: Mapping[str, Any],
    timings: Sequence[StepTiming],
) -> list[Evidence]:
    """What each temperature's verdict rests on: generations where they ran, else replay."""
    draft = config["draft"]["name"]
    if config["mode"] == "measure":
        times = step_times(timings) if timings else None
        return [
            evidence_from_trials(trials, draft=draft, temperature=value, times=times)
            for value in config["temperature"]
            if any(trial.temperature == value for trial in trials)
        ]
    if not timings:
        return []
    return [evidence_of(entry, {draft: latency_of(timings)}) for entry in replays]


def _text_caveat(texts: Sequence[greedy.GreedyText]) -> list[str]:
    line = greedy.caveat(texts)
    return [line] if line else []


def _verdicts(
    evidence: Evidence, config: Mapping[str, Any], texts: Sequence[greedy.GreedyText]
) -> tuple[Verdict, list[Verdict]]:
    """The whole workload's verdict at one temperature, then each prompt set's."""
    seed = config["seed"]
    whole = in_words(decide(evidence, weights=config["prompts"]["weights"], seed=seed))
    sets = sorted(set(evidence.prompt_sets))
    each = [in_words(decide(evidence, prompt_set=name, seed=seed)) for name in sets]
    return greedy.trusted(whole, texts), [greedy.trusted(verdict, texts) for verdict in each]


def _gaps(
    trials: Sequence[Trial], replays: Sequence[Replays], draft: str
) -> list[dict[str, Number]]:
    """Replayed beside measured tokens per round, cell by cell, with the gap in standard errors."""
    entries: list[dict[str, Number]] = []
    for replay in replays:
        for name in sorted(set(replay.prompt_sets)):
            for k in replay.ks:
                cell = Cell(name, replay.temperature, k)
                mine = [trial for trial in trials if trial.cell_key == cell]
                check = replay_check(cell, mine, replay.only([name]), Candidate(draft, k))
                if check is not None:
                    entry = asdict(check)
                    entry["gap_standard_errors"] = entry.pop("gap_in_standard_errors")
                    entries.append(entry)
    return entries


def _best_cell(rows: Sequence[ResultRow]) -> dict[str, Number]:
    """The largest plain speedup of any cell: what a reader will look for, and must distrust."""
    own = [row for row in rows if row.k and row.speedup is not None and row.source != "theory"]
    timed = [row for row in own if row.source == "measured"] or own
    if not timed:
        return {}
    best = max(timed, key=lambda row: row.speedup or 0.0)
    return {
        "best_cell_speedup": best.speedup,
        "best_cell_k": best.k,
        "best_cell_prompt_set": best.prompt_set,
        "best_cell_temperature": best.temperature,
    }


def _least_regret(evidence: Sequence[Evidence]) -> dict[str, Number]:
    """The K that gives away least if traffic shifts between the prompt sets, first temperature."""
    by_set = evidence[0].by_set() if evidence else {}
    return {"least_regret_k": least_regret(by_set)[1]} if len(by_set) > 1 else {}
