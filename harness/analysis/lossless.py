"""Did speculation leave the target's output unchanged? Greedy texts, and tests of distributions.

In a run at temperature 0 the k = 0 trial of a prompt is the plain text, and speculation must emit
the same. Where it does not, only the models can tell whether that is a tie within rounding: the run
stores their judgement in checks.jsonl. A text that they did not judge is PASS where the tokens are
equal, and OPEN where they are not. A pair that changes greedy texts gets no verdict.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from harness.analysis.caveats import caveats, failures, fault, place, routing_ties
from harness.analysis.cells import latest, measured_positions, measured_rows
from harness.analysis.setup import Setup
from harness.records import GREEDY, Trial, where
from harness.storage.contents import Check
from harness.summary import DistributionTest, Summary, TextCheck, Value, VerdictReason

TextId = tuple[str, str, int, int]


def analyse_snapshot(setup: Setup) -> Summary:
    """The comparisons and tests of a snapshot, and what was decoded."""
    run = setup.run
    checks = text_checks(run.trials, run.checks)
    tests = tuple(check for check in run.checks if isinstance(check, DistributionTest))
    rows = measured_rows(run.trials, model=setup.model, draft=setup.draft, times={})
    return Summary(
        run=setup.facts(rows),
        failures=failures(setup, checks=checks, tests=tests),
        caveats=(*caveats(setup), *routing_ties(checks)),
        results=tuple(rows),
        acceptance_by_position=tuple(measured_positions(setup.draft, run.trials, setup.weights)),
        text_checks=tuple(checks),
        distribution_tests=tests,
    )


def with_plain(trials: Iterable[Trial]) -> Iterator[tuple[Trial, Trial]]:
    """Every speculative trial at temperature 0 with the plain one of its prompt; both complete."""
    done = where(latest(list(trials)), status="ok", temperature=GREEDY)
    done = [trial for trial in done if trial.tokens is not None]
    plain = {trial.key: trial for trial in done if trial.k == 0}
    for trial in done:
        if trial.k and trial.key in plain:
            yield trial, plain[trial.key]


def text_checks(trials: Iterable[Trial], stored: Iterable[Check]) -> list[TextCheck]:
    """An entry for every greedy text that can be compared: as stored, or what tokens alone say."""
    judged = {_id(check): check for check in stored if isinstance(check, TextCheck)}
    checks: list[TextCheck] = []
    for trial, plain in with_plain(trials):
        check = judged.get(_id(trial)) or _by_tokens(trial, plain)
        rate = (trial.accepted or 0) / trial.drafted if trial.drafted else None
        checks.append(replace(check, acceptance_rate=rate))
    return checks


def _by_tokens(trial: Trial, plain: Trial) -> TextCheck:
    speculative, expected = trial.tokens or (), plain.tokens or ()
    if speculative == expected:
        return TextCheck(*_id(trial), "PASS")
    pairs = zip(speculative, expected, strict=False)
    shorter = min(len(speculative), len(expected))
    position = next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)
    return TextCheck(*_id(trial), "OPEN", position)


def without_faulty(trials: Sequence[Trial], checks: Iterable[TextCheck]) -> list[Trial]:
    """The trials, marked failed where their text is not the target's, so that none is counted."""
    faults = {_id(check): fault(check) for check in checks if check.result == "FAIL"}
    return [
        replace(trial, status="failed", error=faults[_id(trial)])
        if trial.temperature == GREEDY and trial.status == "ok" and _id(trial) in faults
        else trial
        for trial in trials
    ]


def distrust(checks: Sequence[TextCheck]) -> tuple[VerdictReason, dict[str, Value]] | None:
    """Why this pair gets no verdict, with the values to quote; None where it may have one."""
    reasons: tuple[tuple[str, VerdictReason], ...] = (
        ("FAIL", "greedy_texts_differ"),
        ("OPEN", "greedy_texts_unjudged"),
    )
    for result, reason in reasons:
        bad = where(checks, result=result)
        if bad:
            return reason, {"texts": len(checks), "differing": len(bad), **place(bad[0])}
    return None


def _id(entry: Trial | TextCheck) -> TextId:
    return entry.prompt_set, entry.prompt, entry.repetition, entry.k
