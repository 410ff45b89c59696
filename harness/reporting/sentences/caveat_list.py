"""The caveats of a run as sentences, most important first."""

from harness.analysis.caveats import RECORDS
from harness.reporting.sentences import as_sentence
from harness.summary import Caveat, Summary


def caveats(summary: Summary) -> tuple[str, ...]:
    """Every caveat as a sentence, `cautions` first; without the warning of `run.banner`."""
    notes = (caveat(each) for each in _every(summary) if not _is_caution(each))
    return (*cautions(summary), *notes)


def cautions(summary: Summary) -> tuple[str, ...]:
    """The caveats without which the numbers would be misread."""
    return tuple(caveat(each) for each in _every(summary) if _is_caution(each))


def caveat(entry: Caveat) -> str:
    """One caveat as a sentence."""
    return as_sentence(RECORDS[entry.code].say(entry.values))


def _every(summary: Summary) -> tuple[Caveat, ...]:
    compared = summary.comparison.caveats if summary.comparison else ()
    return (*compared, *summary.caveats)


def _is_caution(entry: Caveat) -> bool:
    return RECORDS[entry.code].severity == "caution"
