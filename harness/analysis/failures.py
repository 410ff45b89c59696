"""Failures: generations, checks and drafts that did not complete, with place and reason."""

from collections.abc import Sequence

from harness.analysis.setup import Setup
from harness.records import Failure, Measurement, NotMeasured, Trial, where
from harness.summary import DistributionTest, TextCheck, Values

NOTHING_TESTED = "every distribution is nearly certain: nothing could be tested"


def place(check: TextCheck) -> Values:
    """The place at which a text first differs."""
    return {
        "prompt_set": check.prompt_set,
        "prompt": check.prompt,
        "k": check.k,
        "position": check.first_difference,
    }


def failures(
    setup: Setup,
    trials: Sequence[Trial] | None = None,
    *,
    checks: Sequence[TextCheck] = (),
    tests: Sequence[DistributionTest] = (),
) -> tuple[Failure, ...]:
    """Checks that failed, generations that did not complete, what met broken logits, and drafts.

    `trials` stand in for the stored ones, where some were marked failed.
    """
    latest = {t.cell: t for t in (setup.run.trials if trials is None else trials)}
    untested = tests and not checks and all(test.result == "UNTESTED" for test in tests)
    failed = [
        *((f"{c.prompt_set}/{c.prompt} K={c.k}", fault(c)) for c in checks if c.result == "FAIL"),
        *(
            (
                f"K={test.k} temperature={test.temperature:g} offset {test.offset}",
                f"drawn tokens do not follow the target's distribution (p = {test.p_value:.2g})",
            )
            for test in tests
            if test.result == "FAIL"
        ),
        *([("temperature > 0", NOTHING_TESTED)] if untested else ()),
        *(
            (
                f"{t.prompt_set}/{t.prompt} k={t.k} temperature={t.temperature:g}",
                t.error or "failed",
            )
            for t in where(latest.values(), status="failed")
        ),
        *((_measurement(note), note.error) for note in setup.run.manifest.not_measured),
    ]
    return (*(Failure(*each) for each in failed), *setup.run.manifest.audition.failures)


def _measurement(note: NotMeasured) -> str:
    at_k = f"K={note.k}{', rejecting every draft' if note.rejects else ''}"
    if note.varying:
        at_k = f"a K that changes ({note.varying})"
    at = f"temperature {note.temperature or 0.0:g}"
    words: dict[Measurement, str] = {
        "plain_tokens": f"plain tokens at {at}",
        "rounds": f"rounds of {note.draft} at {at_k}, {at}",
        "draft_scores": "the draft's scores of the target's text",
        "returned_texts": "the scores of the returned texts",
        "distribution_test": f"{at_k} temperature={note.temperature or 0.0:g}",
        "server_rounds": f"rounds at {at_k}",
        "server_starts": f"requests for a part of the budget at {at_k}",
        "server_loads": f"requests side by side at {at_k}",
    }
    return words[note.what]


def fault(check: TextCheck) -> str:
    """The error of a text, for results.csv and the list of failures."""
    line = f"text differs from plain decoding's from position {check.first_difference} on"
    if check.noise is not None and check.target_margin is not None:
        return (
            f"{line}, beyond the engine's noise (margin {check.target_margin:.3g} nats, noise"
            f" {check.noise:.3g})"
        )
    if check.target_margin is None or check.rounding is None:
        return line
    return (
        f"{line}, beyond rounding (top-2 margin {check.target_margin:.3g}, "
        f"rounding {check.rounding:.3g})"
    )
