"""The banner, status, engine, failures and caveats of a run."""

from collections.abc import Iterable

from harness.analysis.caveats import RECORDS
from harness.command_words import as_typed
from harness.engine_facts.draft_kinds import DRAFTS
from harness.records import GREEDY_RESULTS, grouped
from harness.reporting import grid
from harness.reporting.sentences import as_sentence
from harness.summary import Caveat, RunFacts, Summary, TextCheck

DUMMY = "DUMMY WEIGHTS: LATENCIES ARE REAL, ACCEPTANCES ARE NOT."
SYNTHETIC = (
    "Acceptance is synthetic (decode.acceptance): speedups and the verdict hold at that acceptance"
    " only, and the texts are not the target's."
)
ENGINES = {
    "cuda_graphs": "CUDA graphs",
    "lean": "eager forward of the harness",
    "transformers": "eager forward of transformers",
    **{kind: f"eager {spec.noun}" for kind, spec in DRAFTS.items() if spec.reads_states},
}
_FAILURES_SHOWN = 8


def banner(run: RunFacts) -> str | None:
    """The warning that comes before any number; None where weights and acceptance are real."""
    if not run.dummies:
        return SYNTHETIC if run.synthetic else None
    warning = f"{DUMMY} The weights of {' and '.join(run.dummies)} are random:"
    if run.synthetic:
        return f"{warning} acceptance was set (decode.acceptance), and speedups are as good as it."
    return (
        f"{warning} what they accept of each other is chance, so nothing here recommends a draft."
    )


def status(run: RunFacts) -> str | None:
    """The reason why a run is not complete, in one line; None where it is complete."""
    counts = (("failed", run.failed_cells), ("partial", run.partial_cells))
    cells = ", ".join(f"{number} {name}" for name, number in counts if number)
    incomplete = f" Cells: {cells} of {run.measured_cells}." if cells else ""
    if run.not_scored:
        incomplete = f" Not ranked: {', '.join(run.not_scored)} (below: why)."
    if run.not_scored and run.ranked and run.status in ("complete", "failed"):
        drafts = run.ranked + len(run.not_scored)
        return f"PARTIAL RANKING: {run.ranked} of {drafts} drafts are ranked.{incomplete}"
    if run.status == "complete":
        return f"PARTIAL RUN: some cells did not complete.{incomplete}" if cells else None
    again = f"{as_typed('resume', run.folder)} continues it"
    if run.status == "failed":
        return f"FAILED RUN: what follows is what was stored ({again}).{incomplete}"
    if run.status == "running":
        return f"UNFINISHED RUN: still running, or interrupted ({again}).{incomplete}"
    return f"UNKNOWN STATUS: the manifest does not say whether the run ended.{incomplete}"


def engine(run: RunFacts) -> str | None:
    """The engine of the steps, by model where it differs; None where no model ran.

    Nor where all ran as a processor runs them, eagerly and in the harness's own forward.
    "engine: CUDA graphs (target); CUDA graphs, uncompiled (draft: no C compiler)"
    """
    roles: dict[tuple[str, str | None], list[str]] = {}
    for model in run.models:
        if model.engine is None:
            continue
        reason = model.engine_reason
        uncompiled = model.engine == "cuda_graphs" and (reason or model.compiled is False)
        name = f"{ENGINES.get(model.engine, model.engine)}{', uncompiled' if uncompiled else ''}"
        roles.setdefault((name, reason), []).append(model.role)
    heads = {kind for kind, spec in DRAFTS.items() if spec.reads_states}
    engines = {model.engine for model in run.models if model.engine is not None}
    if not any(reason for _, reason in roles) and engines <= {"lean", *heads}:
        return None
    if len(roles) == 1 and not any(reason for _, reason in roles):
        return f"engine: {next(iter(roles))[0]}"
    parts = [
        f"{name} ({', '.join(models)}{f': {reason}' if reason else ''})"
        for (name, reason), models in roles.items()
    ]
    return f"engine: {'; '.join(parts)}"


def failures(summary: Summary) -> tuple[str, ...]:
    """The cells and drafts that failed, and the drafts that do not fit the target, with the error.

    Failures with the same error share a line, such as the cells of one server. Only the first lines
    are given where there are many.
    """
    lines: list[str] = []
    for error, alike in grouped(summary.failures, lambda failure: failure.error).items():
        more = f" and {len(alike) - 1} more" if len(alike) > 1 else ""
        lines.append(f"{alike[0].where}{more}: {error}")
    lines += [f"draft {each.where}: {each.error}" for each in summary.ineligible]
    if len(lines) <= _FAILURES_SHOWN:
        return tuple(lines)
    more = len(lines) - _FAILURES_SHOWN
    return (*lines[:_FAILURES_SHOWN], f"and {more} more, all listed in summary.json")


def greedy_counts(checks: Iterable[TextCheck]) -> str:
    """The numbers of greedy texts that are equal, tie within rounding, differ, are not judged."""
    results = ["OPEN" if check.result == "UNJUDGED" else check.result for check in checks]
    return ", ".join(f"{results.count(key)} {words}" for key, words in GREEDY_RESULTS.items())


def caveats(summary: Summary) -> tuple[str, ...]:
    """Every caveat as a sentence, `cautions` first; without the warning of `banner`."""
    answered = grid.larger_to_try(summary)
    notes = (
        caveat(each)
        for each in _every(summary)
        if not _is_caution(each) and each != answered  # which the answer has
    )
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
