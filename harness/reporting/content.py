"""The parts of a report, made once from a Summary; console, markdown and HTML only lay them out."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.engine_facts.engines import spec_of
from harness.records import Decision
from harness.reporting import picture, serving_commands
from harness.reporting.pages import brief_tables, page_of, tables_of, title_of
from harness.reporting.sentences import explanation, plan, run, verdict
from harness.reporting.tables import answers
from harness.reporting.tables.specification import Table
from harness.summary import Summary

OTHERS_NOTE = "The command of the first line measures one of these with the keys in brackets."
AnswerCode = Literal["yes", "no", "open", "none"]
Pairs = tuple[tuple[str, str], ...]
_DECISIONS: Mapping[Decision, AnswerCode] = {
    "speculate": "yes",
    "does_not_pay": "no",
    "undecided": "open",
    "not_measured": "open",
}
# The worst first
_OUTCOMES: Mapping[str, AnswerCode] = {"fail": "no", "unclear": "open", "pass": "yes"}
_CHECKS: Mapping[str, AnswerCode] = {"PASS": "yes", "TIE": "yes", "FAIL": "no"}


@dataclass(frozen=True)
class Content:
    """One report, in reading order."""

    title: str
    banner: str | None  # a warning that comes before any number; None where there is none
    status: str | None  # why the run is not complete; None where it is
    verdicts: tuple[str, ...]  # the main one first; empty for a command that decides nothing
    answer: AnswerCode  # the main decision in a word, for its colour
    too_few: bool  # whether it is open for want of prompts
    grid: Table | None  # the answer by temperature and engine; None where nothing is decided
    bars: tuple[picture.Bar, ...]  # of K, or of drafts; empty where nothing is decided
    worth: tuple[str, ...]  # sentences: what a gain is worth, and answers at other temperatures
    brief: tuple[Table, ...]  # the console's tables
    main: tuple[Table, ...]  # the tables of `tables` that the answer is read from
    next_step: verdict.NextStep | None  # what to do after this run
    folder: str  # of the run
    page: str  # the path of report.html
    engine: str | None  # what the harness's own steps ran on; None where no model ran in it
    reasons: tuple[str, ...]  # why the verdict is so, and what would change it; whole sentences
    # caveats, failures: whole lines; cautions: the first caveats, which the console never omits.
    caveats: tuple[str, ...]
    cautions: tuple[str, ...]
    failures: tuple[str, ...]
    snippets: tuple[serving_commands.Snippet, ...]  # empty where nothing is served
    others: str  # what the snippets after the first are for
    others_note: str  # how to measure those; "" where they were measured or name their command
    tables: tuple[Table, ...]  # most important first
    measured: Pairs  # (name, value) pairs on how the numbers were measured, or computed
    origin: Literal["measured", "computed"]


def content_of(summary: Summary) -> Content:
    """The report of a run; a part that its summary has no data for is empty."""
    page = page_of(summary)
    answered = answers.grid_table(summary)
    decides = page.decides and bool(answered.rows)
    snippets = serving_commands.snippets_of(summary) if page.serves else ()
    return Content(
        title=title_of(summary),
        banner=run.banner(summary.run) or plan.banner(summary),
        status=run.status(summary.run),
        verdicts=page.verdicts(summary),
        answer=_answer_code(summary),
        too_few=summary.headline is not None and summary.headline.reason == "too_few_prompts",
        grid=answered if decides else None,
        bars=picture.bars(summary) if decides else (),
        worth=_worth(summary) if decides else (),
        brief=brief_tables(summary),
        main=tables_of(summary, main=True),
        next_step=page.next_step(summary),
        folder=summary.run.folder,
        page=str(Path(summary.run.folder) / "report.html"),
        engine=None if summary.served else run.engine(summary.run),
        reasons=explanation.explanation(summary),
        caveats=run.caveats(summary),
        cautions=run.cautions(summary),
        failures=run.failures(summary),
        snippets=snippets,
        others="other loads" if summary.served else "other servers",
        others_note=OTHERS_NOTE if any("(engine=" in each.title for each in snippets[1:]) else "",
        tables=tables_of(summary),
        measured=measured_with(summary),
        origin="computed" if page.computes else "measured",
    )


def _worth(summary: Summary) -> tuple[str, ...]:
    others = (*picture.sets_apart(summary), *picture.other_temperatures(summary))
    return tuple(filter(None, (picture.worth(summary), " ".join(others))))


def measured_with(summary: Summary) -> Pairs:
    """The command line, date, device, versions, seed and commit of a run, as (name, value)."""
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


def _answer_code(summary: Summary) -> AnswerCode:
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
