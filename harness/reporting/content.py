"""What a report says, gathered once from a Summary; console, markdown and HTML only lay it out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.records import Decision
from harness.reporting import serving
from harness.reporting.pages import brief_tables, page_of, tables_of, title_of
from harness.reporting.sentences import caveats, explanation, plan, run, verdict
from harness.reporting.tables import answers
from harness.reporting.tables.specification import Table
from harness.serving.engines import spec_of
from harness.summary import Summary

OTHERS_NOTE = "The command of the first line measures one of these with the keys in brackets."
Answer = Literal["yes", "no", "open", "none"]
Pairs = tuple[tuple[str, str], ...]
_DECISIONS: Mapping[Decision, Answer] = {
    "speculate": "yes",
    "does_not_pay": "no",
    "undecided": "open",
    "not_measured": "open",
}
# The worst first
_OUTCOMES: Mapping[str, Answer] = {"fail": "no", "unclear": "open", "pass": "yes"}
_CHECKS: Mapping[str, Answer] = {"PASS": "yes", "TIE": "yes", "FAIL": "no"}


@dataclass(frozen=True)
class Content:
    """One report, in the order it is read."""

    title: str
    banner: str | None  # what must be read before any number; None where there is no such thing
    status: str | None  # why it is not a complete run; None where it is
    verdicts: tuple[str, ...]  # the main one first; empty for a command that decides nothing
    answer: Answer  # the main decision in a word, for its colour
    grid: Table | None  # the answer by temperature and engine; None where nothing is decided
    brief: tuple[Table, ...]  # of the console: the grid in short, then what else a first look needs
    ranked: bool  # whether the second of these is the ranking of an audition
    main: tuple[Table, ...]  # of `tables` those that the answer is read from
    next_step: verdict.NextStep | None  # what to do with it
    page: str  # the path of report.html
    engine: str | None  # what our own steps ran on; None where no model ran, or a server did
    reasons: tuple[str, ...]  # why, and what would change it; whole sentences
    # caveats, failures: whole lines; cautions: the first caveats, which no short form leaves out.
    caveats: tuple[str, ...]
    cautions: tuple[str, ...]
    failures: tuple[str, ...]
    snippets: tuple[serving.Snippet, ...]  # to paste into a server; empty where nothing is served
    others: str  # what the snippets after the first are for
    others_note: str  # how to measure these; "" where they were, or have a command each
    tables: tuple[Table, ...]  # most important first
    # (name, value) pairs on how it was measured, or computed; and which of the two
    measured: Pairs
    origin: Literal["measured", "computed"]


def content_of(summary: Summary) -> Content:
    """Gather a run's report; whatever its summary lacks is left out."""
    page = page_of(summary)
    answered = answers.grid_table(summary)
    decides = page.grid is not None and bool(answered.rows)
    brief = brief_tables(summary)
    snippets = serving.snippets_of(summary) if page.serves else ()
    return Content(
        title=title_of(summary),
        banner=run.banner(summary.run) or plan.banner(summary),
        status=run.status(summary.run),
        verdicts=page.verdicts(summary),
        answer=_answer(summary),
        grid=answered if decides else None,
        brief=(page.grid(summary), *brief) if page.grid is not None and decides else brief,
        ranked=answers.drafts_table in page.brief and bool(brief),
        main=tables_of(summary, main=True),
        next_step=page.next_step(summary),
        page=str(Path(summary.run.folder) / "report.html"),
        engine=None if summary.served else run.engine(summary.run),
        reasons=explanation.explanation(summary),
        caveats=caveats.caveats(summary),
        cautions=caveats.cautions(summary),
        failures=run.failures(summary),
        snippets=snippets,
        others="other loads" if summary.served else "other servers",
        others_note=OTHERS_NOTE if any("(engine=" in each.title for each in snippets[1:]) else "",
        tables=tables_of(summary),
        measured=measured_with(summary),
        origin="computed" if page.computes else "measured",
    )


def measured_with(summary: Summary) -> Pairs:
    """What a reader asks of how it was made; all else is in manifest.json."""
    facts, made = summary.run, summary.run.made_with
    versions = dict(made.versions)
    if summary.served is not None:
        versions[spec_of(summary.served.engine).title] = summary.served.version
    dirty = " with uncommitted changes" if made.uncommitted else ""
    known = {
        "command line": made.command,
        "date": facts.created_utc,
        "device": made.device,
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "seed": facts.seed,
        "git commit": made.commit and f"{made.commit}{dirty}",
    }
    return tuple((name, str(value)) for name, value in known.items() if value not in (None, ""))


def _answer(summary: Summary) -> Answer:
    checks = verdict.snapshot_checks(summary)
    if run.banner(summary.run) is not None:
        return "none"
    if summary.headline is not None:
        return _DECISIONS[summary.headline.decision]
    if summary.comparison is not None:
        outcomes = [run.outcome for run in summary.comparison.runs]
        worst = next((key for key in _OUTCOMES if key in outcomes), None)
        return "none" if worst is None else _OUTCOMES[worst]
    if page_of(summary).serves or not checks:
        return "none"
    return _CHECKS.get(verdict.snapshot_result(checks), "open")
