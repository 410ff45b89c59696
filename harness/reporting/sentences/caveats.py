"""What a reader must know before acting, most important first."""

from harness.analysis.caveats import RECORDS
from harness.reporting.sentences import as_sentence
from harness.summary import Caveat, Summary


def caveats(summary: Summary) -> tuple[str, ...]:
    """What a reader must know before acting, `cautions` first; not what `run.banner` says."""
    notes = (caveat(each) for each in _every(summary) if not _cautions(each))
    return (*cautions(summary), *notes)


def cautions(summary: Summary) -> tuple[str, ...]:
    """Those without which the numbers are read wrongly."""
    return tuple(caveat(each) for each in _every(summary) if _cautions(each))


def caveat(entry: Caveat) -> str:
    """One caveat as a sentence."""
    return as_sentence(RECORDS[entry.code].say(entry.values))


def _every(summary: Summary) -> tuple[Caveat, ...]:
    compared = summary.comparison.caveats if summary.comparison else ()
    return (*compared, *summary.caveats)


def _cautions(entry: Caveat) -> bool:
    return RECORDS[entry.code].severity == "caution"
