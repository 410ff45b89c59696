"""report.html: the report as one file that opens anywhere, on a phone and in print too.

It says what report.md says, in the same order. Nothing is loaded from elsewhere, and the page's
own policy forbids it. Every text goes through the template's escaping: names of models are the
user's. Without script it is whole; a few lines of it let tables be sorted.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.reporting.content import Content
from harness.reporting.definitions import closure
from harness.reporting.html_page import drawing, page
from harness.reporting.html_table import html_table

# What stands under the title: the label of content.MEASURED_WITH.
_FACTS = ("device", "when", "harness commit")
_COMMIT_SHOWN = 10
_MINUTES = 16  # characters of an ISO date and time
MOODS = {"speculate": "yes", "does_not_pay": "no", "undecided": "open"}
_WORDS = {"PASS": "yes", "TIE": "yes", "FAIL": "no", "UNTESTED": "open"}


class Said(NamedTuple):
    """The verdict as it is laid out: what to do, the rest of the sentence, and its colour."""

    said: str
    figures: str
    mood: str


def report(
    content: Content,
    plots: Sequence[tuple[str, str]],
    folder: Path,
    verdict: Mapping[str, Any] | None = None,
) -> str:
    """The text of report.html.

    Args:
        content: what to say.
        plots: (file inside the run folder, caption) of every plot that was drawn.
        folder: the run folder, where the plots lie.
        verdict: the main entry of summary.json, for its decision; None where there is none.
    """
    tables = [html_table(table, f"table-{number}") for number, table in enumerate(content.tables)]
    drawings = [
        drawing((folder / file).read_text(encoding="utf-8"), caption, f"plot-{number}")
        for number, (file, caption) in enumerate(plots)
    ]
    used = {entry for table in tables for entry in table.definitions}
    return page(
        "report.html.j2",
        title=content.title,
        skip_to="the verdict",
        report=content,
        facts=_facts(content),
        verdict=_said(content, verdict),
        before=bool(content.reasons or content.caveats or content.failures),
        tables=tables,
        plots=drawings,
        definitions=closure(used),
    )


def _said(content: Content, verdict: Mapping[str, Any] | None) -> Said | None:
    if not content.verdicts:
        return None
    sentence = content.verdicts[0]
    said, _, figures = sentence.partition(": ")
    mood = MOODS.get(str((verdict or {}).get("decision")), _WORDS.get(said, "none"))
    return Said(said, figures, mood if content.banner is None else "none")


def _facts(content: Content) -> tuple[str, ...]:
    """Where, when and with what: the line under the title."""
    known = dict(content.measured)
    shown = {
        "when": f"{known.get('when', '')[:_MINUTES].replace('T', ' ')} UTC",
        "harness commit": f"harness commit {known.get('harness commit', '')[:_COMMIT_SHOWN]}",
    }
    return tuple(shown.get(label, known[label]) for label in _FACTS if label in known)
