"""Do two runs emit the same texts, and does the draft get the same of them accepted?

Greedy text depends on the target and on rounding alone. Two runs of one target on the same prompts
must agree token by token, whatever drafts for them; with the same draft, K and rule the rounds must
agree as well. A comparison of speeds says nothing of either, and both break silently when an engine
is changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.analysis.compare import cells_of
from harness.analysis.counts import completed
from harness.records import Trial


@dataclass(frozen=True)
class TextCheck:
    """Greedy generations that both runs finished.

    Attributes:
        compared: how many generations both have.
        differing: how many of them differ in a token that both had the budget for.
        counted: speculative ones of equal text and length.
        recounted: how many of those differ in rounds or accepted tokens.
        first: the first that differs, in words; None where none does.
        first_recounted: likewise, in counts.
    """

    compared: int = 0
    differing: int = 0
    counted: int = 0
    recounted: int = 0
    first: str | None = None
    first_recounted: str | None = None


def compare_texts(reference: Sequence[Trial], other: Sequence[Trial]) -> TextCheck:
    """Compare the greedy texts (temperature 0) of two runs, generation by generation.

    A text that one run's budget cut short is compared as far as it goes.
    """
    sides = cells_of(reference), cells_of(other)
    pairs = [
        (cell[name], sides[1][key][name])
        for key, cell in sorted(sides[0].items())
        if key[1] == 0.0 and key in sides[1]
        for name in sorted(cell.keys() & sides[1][key].keys())
    ]
    pairs = [
        (one, two)
        for one, two in pairs
        if len(completed([one, two])) == 2 and one.prompt_tokens == two.prompt_tokens
    ]
    differing = [pair for pair in pairs if not _same_text(*pair)]
    equal = [(one, two) for one, two in pairs if one.k > 0 and one.tokens == two.tokens]
    recounted = [pair for pair in equal if _counts(pair[0]) != _counts(pair[1])]
    return TextCheck(
        compared=len(pairs),
        differing=len(differing),
        counted=len(equal),
        recounted=len(recounted),
        first=_where(differing[0][0]) if differing else None,
        first_recounted=_where(recounted[0][0]) if recounted else None,
    )


def _same_text(one: Trial, two: Trial) -> bool:
    texts = one.tokens or (), two.tokens or ()
    length = min(map(len, texts))
    cut = {trial.stop_reason for trial in (one, two) if len(trial.tokens or ()) == length}
    whole = len(texts[0]) == len(texts[1]) or "budget" in cut
    return whole and texts[0][:length] == texts[1][:length]


def _counts(trial: Trial) -> tuple[object, ...]:
    return trial.rounds, trial.accepted, trial.accepted_lengths


def _where(trial: Trial) -> str:
    return f"{trial.prompt_set}/{trial.prompt} at K={trial.k}"
