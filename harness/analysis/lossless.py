"""Did speculation leave the target's output unchanged? Greedy texts, and tests of distributions.

In a run at temperature 0 the k = 0 trial of a prompt is the plain text, and speculation must emit
the same. Where it does not, only the models can tell whether that is a tie within rounding: the run
stores their judgement in checks.jsonl. A text that they did not judge is PASS where the tokens are
equal, and OPEN where they are not. A pair that changes greedy texts gets no verdict.

A server's engine is judged by its own noise (`harness.measurement.engine_noise`), a rule with an
error rate: of a lossless server's texts at most NOISE_FAILS are FAIL. So one FAIL voids no K; more
do than that rate gives with a probability of LEAST_CHANCE: 2 of up to 7 texts, 3 of up to 22, 4 of
up to 42.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from scipy.special import bdtrc

from harness.analysis.cells import latest
from harness.analysis.setup import Setup
from harness.records import (
    GREEDY,
    Failure,
    Measurement,
    NotMeasured,
    Trial,
    first_difference,
    grouped,
    where,
)
from harness.storage.contents import Check
from harness.summary import CheckResult, DistributionTest, TextCheck, Value, Values, VerdictReason

TextId = tuple[str, str, int, int]
WORST: tuple[CheckResult, ...] = ("PASS", "TIE", "UNTESTED", "UNJUDGED", "OPEN", "FAIL")
# Of texts judged by an engine's noise, what is FAIL though the server is lossless, at most; and the
# probability of so many FAIL below which a K is void
NOISE_FAILS, LEAST_CHANCE = 0.02, 0.01
NOTHING_TESTED = "every distribution is nearly certain: nothing could be tested"


def greedy_pairs(trials: Iterable[Trial]) -> Iterator[tuple[TextCheck, Trial, Trial]]:
    """Every greedy text with the plain one of its prompt, and the result by tokens alone."""
    done = where(latest(list(trials)), status="ok", temperature=GREEDY)
    done = [trial for trial in done if trial.tokens is not None]
    plain = {trial.key: trial for trial in done if trial.k == 0}
    for trial in done:
        if trial.k and trial.key in plain:
            rate = (trial.accepted or 0) / trial.drafted if trial.drafted else None
            position = first_difference(plain[trial.key].tokens or (), trial.tokens or ())
            result = "PASS" if position is None else "OPEN"
            check = TextCheck(*_id(trial), result, position, acceptance_rate=rate)
            yield check, trial, plain[trial.key]


def text_checks(trials: Iterable[Trial], stored: Iterable[Check]) -> list[TextCheck]:
    """An entry for every greedy text that can be compared: as stored, or what tokens alone say."""
    judged = {check.id: check for check in stored if isinstance(check, TextCheck)}
    return [
        replace(judged.get(check.id, check), acceptance_rate=check.acceptance_rate)
        for check, *_ in greedy_pairs(trials)
    ]


def voiding(checks: Iterable[TextCheck]) -> list[TextCheck]:
    """The FAIL checks by which a K's speedups do not count.

    Of an engine that is judged by its noise, those of a K with more differing texts than the rule's
    error rate explains; else every one. A prompt counts once, in whichever visit its text differs.
    """
    void: list[TextCheck] = []
    for of_k in grouped(checks, lambda check: check.k).values():
        results = Counter(check.result for check in by_text(of_k))
        judged, failed = results.total() - results["OPEN"], where(of_k, result="FAIL")
        # That a binomial number of `judged` trials is as large
        chance = bdtrc(results["FAIL"] - 1, judged, NOISE_FAILS) if failed else 1.0
        if chance < LEAST_CHANCE or any(check.noise is None for check in failed):
            void += failed
    return void


def by_text(checks: Iterable[TextCheck]) -> list[TextCheck]:
    """One check for each prompt and K, that of the visit with the worst result."""
    texts = grouped(checks, lambda check: (check.prompt_set, check.prompt, check.k))
    return [max(visits, key=lambda check: WORST.index(check.result)) for visits in texts.values()]


def without_faulty(trials: Sequence[Trial], checks: Iterable[TextCheck]) -> list[Trial]:
    """The trials, marked failed where their text is not the target's, so that none is counted."""
    faults = {check.id: fault(check) for check in voiding(checks)}
    return [
        replace(trial, status="failed", error=faults[_id(trial)])
        if trial.temperature == GREEDY and trial.status == "ok" and _id(trial) in faults
        else trial
        for trial in trials
    ]


def distrust(checks: Sequence[TextCheck]) -> tuple[VerdictReason, dict[str, Value]] | None:
    """Why this pair gets no verdict, with the values to quote; None where it may have one."""
    reasons: tuple[tuple[VerdictReason, list[TextCheck]], ...] = (
        ("greedy_texts_differ", voiding(checks)),
        ("greedy_texts_unjudged", where(checks, result="OPEN")),
    )
    for reason, bad in reasons:
        if bad:
            return reason, {"texts": len(checks), "differing": len(bad), **place(bad[0])}
    return None


def _id(trial: Trial) -> TextId:
    return trial.prompt_set, trial.prompt, trial.repetition, trial.k


# ---- what failed ---------------------------------------------------------------------------------


def place(check: TextCheck) -> Values:
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
    """Failed checks, generations and drafts; `trials` replace the stored, some marked failed."""
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
