"""Compare a sweep's greedy texts with plain decoding; a pair that changes them gets no verdict.

In a sweep at temperature 0 the k = 0 trial of a prompt is the plain text, and speculation must emit
the same. Where it does not, only the models can tell whether that is a tie within rounding
(`harness.measurement.lossless`); a run that is finished without them leaves the text OPEN. Nothing
here needs torch.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from harness.analysis.cells import latest
from harness.records import GREEDY_RESULTS, Trial, Verdict
from harness.reporting.reading import synthetic
from harness.storage import StoredRun
from harness.summary import CheckResult, TextCheck

GREEDY = 0.0
KEY = "greedy_texts"


@dataclass(frozen=True)
class GreedyText:
    """The comparison of one speculative greedy text with the plain one; an entry of summary.json.

    Attributes:
        prompt_set, prompt, repetition, k: which text.
        result: PASS, TIE, FAIL, or OPEN where the texts differ and no model was loaded to judge it.
        first_difference: position of the first token that differs; None where none does.
        target_margin, spec_margin: between the two best logits there, by a plain step and by a
            forward of K + 1 positions.
        noise: largest difference there between logits by different forwards.
    """

    prompt_set: str
    prompt: str
    repetition: int
    k: int
    result: CheckResult
    first_difference: int | None = None
    target_margin: float | None = None
    spec_margin: float | None = None
    noise: float | None = None

    @property
    def where(self) -> str:
        """The text in words."""
        return f"{self.prompt_set}/{self.prompt} K={self.k}"

    @property
    def fault(self) -> str:
        """What is wrong with it, for a FAIL."""
        line = f"text differs from plain decoding's from position {self.first_difference} on"
        if self.target_margin is None or self.noise is None:
            return line
        return (
            f"{line}, beyond rounding (top-2 margin {self.target_margin:.3g}, "
            f"noise {self.noise:.3g})"
        )


def with_plain(trials: Iterable[Trial]) -> Iterator[tuple[Trial, Trial]]:
    """Every speculative trial at temperature 0 with the plain one of its prompt; both complete."""
    done = [
        trial
        for trial in latest(list(trials))
        if trial.status == "ok" and trial.temperature == GREEDY and trial.tokens is not None
    ]
    plain = {_text(trial): trial for trial in done if trial.k == 0}
    for trial in done:
        if trial.k and _text(trial) in plain:
            yield trial, plain[_text(trial)]


def known_texts(trials: Sequence[Trial], entries: Iterable[GreedyText]) -> list[GreedyText]:
    """An entry for every text that can be compared: one of `entries`, or what tokens alone say."""
    judged = {_key(entry): entry for entry in entries}
    return [
        judged.get(_key(trial)) or _by_tokens(trial, plain) for trial, plain in with_plain(trials)
    ]


def without_faulty(trials: Sequence[Trial], texts: Iterable[GreedyText]) -> list[Trial]:
    """The trials, marked failed where their text is not the target's, so that none is counted."""
    faults = {_key(entry): entry.fault for entry in texts if entry.result == "FAIL"}
    return [
        replace(trial, status="failed", error=faults[_key(trial)])
        if trial.temperature == GREEDY and trial.status == "ok" and _key(trial) in faults
        else trial
        for trial in trials
    ]


def trusted(verdict: Verdict, texts: Sequence[GreedyText]) -> Verdict:
    """The verdict; undecided, without a speedup, where texts may differ beyond a tie."""
    reason = distrust(texts)
    if reason is None:
        return verdict
    return replace(
        verdict,
        decision="undecided",
        draft=None,
        k=0,
        speedup=None,
        speedup_lo=None,
        speedup_hi=None,
        reason=reason,
    )


def distrust(texts: Sequence[GreedyText]) -> str | None:
    """Why this pair gets no verdict; None where it may have one."""
    wrong = [entry for entry in texts if entry.result == "FAIL"]
    if wrong:
        return (
            f"{len(wrong)} of {len(texts)} greedy texts are not plain decoding's (first: "
            f"{wrong[0].where} from position {wrong[0].first_difference} on), so the target's "
            "cache or a forward is wrong, and no speedup of this pair is valid"
        )
    unknown = [entry for entry in texts if entry.result == "OPEN"]
    if unknown:
        return (
            f"{len(unknown)} of {len(texts)} greedy texts differ from plain decoding's (first: "
            f"{unknown[0].where} from position {unknown[0].first_difference} on), and the run "
            "stopped before it was known whether these are ties; resume= judges them"
        )
    return None


def distrusted(run: StoredRun) -> str | None:
    """Why nothing of a stored run's pair may be used elsewhere; None where nothing speaks against.

    Auditions and replayed sweeps have no speculative texts to compare.
    """
    if run.door != "sweep" or run.config.get("mode") != "measure" or synthetic(run):
        return None
    return distrust(known_texts(run.trials, judged(run)))


def caveat(texts: Sequence[GreedyText]) -> str | None:
    """The counts, where not every text is plain decoding's."""
    if all(entry.result == "PASS" for entry in texts):
        return None
    first = next(entry for entry in texts if entry.result != "PASS")
    return (
        f"greedy texts against plain decoding: {counted(texts)}; the first difference is in "
        f"{first.where} at position {first.first_difference}"
    )


def counted(texts: Sequence[GreedyText]) -> str:
    """How many texts are equal, tie within rounding, differ, or are not known to."""
    results = [entry.result for entry in texts]
    shown = (name for name in GREEDY_RESULTS if name != "OPEN" or name in results)
    return ", ".join(f"{results.count(name)} {GREEDY_RESULTS[name]}" for name in shown)


def as_stored(texts: Sequence[GreedyText]) -> dict[str, Any]:
    """What summary.json holds: the counts, and every text that is not equal."""
    results = [entry.result for entry in texts]
    return {
        **{name: results.count(name) for name in GREEDY_RESULTS},
        "differences": [asdict(entry) for entry in texts if entry.result != "PASS"],
    }


def judged(run: StoredRun) -> list[GreedyText]:
    """The comparisons that a run stored; an older run has the differences in its summary.json."""
    checks = [check for check in run.checks if isinstance(check, TextCheck)]
    if checks:
        return [
            GreedyText(
                *(c.prompt_set, c.prompt, c.repetition, c.k, c.result, c.first_difference),
                *(c.target_margin, c.verify_margin, c.rounding),
            )
            for c in checks
        ]
    entries = ((run.summary or {}).get(KEY) or {}).get("differences") or ()
    return [GreedyText(**entry) for entry in entries if entry["result"] != "OPEN"]


def _by_tokens(trial: Trial, plain: Trial) -> GreedyText:
    speculative, expected = trial.tokens or (), plain.tokens or ()
    names = (trial.prompt_set, trial.prompt, trial.repetition, trial.k)
    if speculative == expected:
        return GreedyText(*names, "PASS")
    pairs = zip(speculative, expected, strict=False)
    shorter = min(len(speculative), len(expected))
    position = next((index for index, (a, b) in enumerate(pairs) if a != b), shorter)
    return GreedyText(*names, "OPEN", position)


def _text(trial: Trial) -> tuple[str, str, int]:
    return trial.prompt_set, trial.prompt, trial.repetition


def _key(entry: Trial | GreedyText) -> tuple[str, str, int, int]:
    return entry.prompt_set, entry.prompt, entry.repetition, entry.k
