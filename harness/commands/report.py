"""Render stored runs again, compare them, or list them all; no model is loaded.

A run is analysed again from its raw files, whether it is complete or unfinished, new or old.
Records of requests that were served elsewhere, and the counters of a server that is running, become
a run first (`harness.commands.served_elsewhere`).
"""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path

from rich.console import Console

from harness import reporting
from harness.analysis import analyse
from harness.analysis.comparison import compare
from harness.commands.progress import progress
from harness.commands.run_lifecycle import Outcome, shown, write_analysis
from harness.config import ReportConfig
from harness.engine_facts.engines import spec_of
from harness.measurement.environment import describe_host
from harness.records import UserError
from harness.reporting import grid, index
from harness.reporting.index import Line
from harness.storage import RunFolder, StoredRun, load, refuse_lost
from harness.storage.files import Busy
from harness.summary import ComparisonRow, Summary

RUN_FILES = ("manifest.json", "config.yaml")
# Keys that have an effect only with one of these
NEEDS: Mapping[str, tuple[str, ...]] = {
    "k": ("records",),
    "png": ("run",),
    "temperature": ("records", "metrics"),
    **dict.fromkeys(("api_key_env", "latency_from"), ("metrics",)),
}
# What fail_below does not go with, and why
NOT_JUDGED = {
    "index": "it has no effect on an index",
    "records": "give it with the run of the records",
    "metrics": "it has no effect on metrics",
}


def run(config: ReportConfig) -> Outcome:
    """Report a run, several, records, a server or a folder; status 1 below `fail_below`."""
    if config.fail_below is not None and not 0 < config.fail_below < math.inf:
        raise UserError(f"fail_below={config.fail_below}: give a ratio above 0, for example 0.95")
    given = [
        name for name in ("run", "runs", "index", "records", "metrics") if getattr(config, name)
    ]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: give one of them")
    _check_belongs(config)
    for name, why in NOT_JUDGED.items() if config.fail_below is not None else ():
        if getattr(config, name):
            raise UserError(f"fail_below: needs run= or runs=; {why}")
    if config.index is not None:
        return _index(config.index)
    if config.records or config.metrics is not None:
        from harness.commands import served_elsewhere  # the engines load torch

        if config.records:
            return served_elsewhere.import_records(config)
        return served_elsewhere.read_counters(config)
    if config.runs:
        return _compared(config)
    if config.run is None:
        raise UserError("run: name the run folder to render, run=results/...")
    return _rendered(config.run, config)


def _check_belongs(config: ReportConfig) -> None:
    """Refuse keys that have no effect with the others."""
    defaults = ReportConfig()
    given = {
        entry.name
        for entry in fields(config)
        if getattr(config, entry.name) != getattr(defaults, entry.name)
    }
    for name, needed in NEEDS.items():
        if name in given and not given & {*needed}:
            needs = " or ".join(f"{other}=" for other in needed)
            raise UserError(f"{name}: needs {needs}; a stored run is reported with all that it has")


def _rendered(name: str, config: ReportConfig) -> Outcome:
    """Analyse a stored run again, complete or not, store the analysis in it, and render it."""
    with progress(f"reading {name}") as bar:
        stored = load(name)
        bar.say("analysing the run")
        summary = _analysed(stored)
        _store(stored, summary)
        if config.engine is not None:
            summary = replace(summary, run=replace(summary.run, serve_on=config.engine))
    with progress("writing the report"):
        reporting.render(summary, stored.folder, png=config.png)
    reporting.show(summary, verbose=config.verbose)
    below = _below(summary, stored.folder, config.fail_below)
    return Outcome(stored.folder, int(below), summary=summary)


def _analysed(stored: StoredRun) -> Summary:
    """The summary of a run; a run that has lost measurements is refused."""
    refuse_lost(stored)
    summary = analyse(stored)
    if len(stored.results) and not summary.results:
        raise UserError(
            f"{stored.folder}: its results.csv has rows, but the raw files that they come from are "
            "not there (trials.jsonl, traces.parquet, latency_samples.csv); put them back"
        )
    return summary


def _store(stored: StoredRun, summary: Summary) -> None:
    """Store the analysis of a run, unless another process is writing it.

    A summary.json that another version wrote stays: a comparison is in no other file.
    """
    there = (stored.folder / "summary.json").exists()
    if not there or (stored.summary is not None and stored.summary != summary):
        with suppress(Busy):
            write_analysis(RunFolder.reopen(stored), summary)


def _compared(config: ReportConfig) -> Outcome:
    with progress("comparing the runs"):
        runs = [load(folder) for folder in config.runs]
        for run in runs:
            refuse_lost(run)
        comparison = compare(runs, config.fail_below)
    folder = RunFolder.create(config.results_root, "report", ("compare",), asdict(config))
    folder.write_table("comparison.csv", ComparisonRow, comparison.rows)
    folder.note(environment=describe_host(), status="complete")
    summary = replace(analyse(load(folder.path)), comparison=comparison)
    folder.write_summary(summary)
    return shown(summary, folder.path, int(comparison.failed), verbose=config.verbose)


def _below(summary: Summary, folder: Path, fail_below: float | None) -> bool:
    """True where the headline's speedup is below `fail_below`; prints which one was judged."""
    if fail_below is None:
        return False
    answer, asked = summary.headline, summary.run.serve_on
    if asked and (answer is None or not answer.timed):
        raise UserError(
            f"fail_below={fail_below:g}: {folder} timed no round of {spec_of(asked).title}; leave"
            " engine= out, or give a run of its server"
        )
    if answer is None or answer.speedup is None:
        raise UserError(f"fail_below={fail_below:g}: {folder} has no headline with a speedup")
    below = answer.speedup < fail_below
    outcome = "FAIL, the headline's speedup is below it" if below else "PASS"
    shown = grid.marked(summary)
    where = f", {grid.evidence(answer)}, for {shown.phrase}" if shown else ""
    speedup = f"{answer.speedup:.2f}x at K={answer.named[1]}"
    _print(f"fail_below={fail_below:g}: {outcome}: {speedup}{where}")
    return below


# ---- the page over all runs of a folder ----------------------------------------------------------


def _index(root: str) -> Outcome:
    """Write index.html over the runs of a results folder; a run without a report gets one first.

    A run that cannot be read keeps a row that says so; it stops no other.
    """
    folder = Path(root)
    if not folder.is_dir():
        raise UserError(f"index={root}: no such folder; name the one that your runs are in")
    runs = [path for path in folder.iterdir() if any((path / name).is_file() for name in RUN_FILES)]
    if not runs:
        raise UserError(f"index={root}: no run folder in it; runs are put there by results_root=")
    lines: list[Line] = []
    with progress("reading runs", len(runs)) as tick:
        for path in runs:
            lines.append(_line(path))
            tick()
    # When it was made, as digits; of a run that cannot be read as far as its name tells
    lines.sort(
        key=lambda line: (re.sub(r"\D", "", line.created or line.folder)[:14], line.folder),
        reverse=True,
    )
    try:
        file = index.render(folder, lines)
    except OSError as error:
        raise UserError(f"index={root}: cannot write there ({error.strerror})") from error
    unread = sum(bool(line.error) for line in lines)
    unreadable = f", {unread} of them unreadable" if unread else ""
    _print(f"{len(lines)} runs{unreadable}: {file}")
    return Outcome(None)


def _print(line: str) -> None:
    Console(highlight=False, soft_wrap=True).print(line, markup=False)


def _line(path: Path) -> Line:
    """A run's row, from its summary.json where it ended with one; else it is analysed."""
    try:
        stored = load(path)
        summary, reported = stored.summary, (path / "report.html").is_file()
        if summary is None or summary.run.status != stored.manifest.status or not reported:
            summary = _analysed(stored)
            _store(stored, summary)
            reporting.render(summary, path)
        return index.line_of(path.name, summary)
    except UserError as error:
        text = str(error)
    except Exception as error:  # one damaged folder must not hide the others; its row says it
        text = f"{path}: damaged ({type(error).__name__}: {error})"
    return index.unreadable(path.name, text)
