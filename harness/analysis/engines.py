"""A pair under every engine's acceptance rule: same texts, other acceptances and speedups."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.analysis.candidates import ENGINES, replay_drafts
from harness.analysis.counts import ratio
from harness.records import RULES, Rule, TextTrace
from harness.theory.replay import Replayed
from harness.theory.speedup import StepTimes, speedup_from_tokens_per_round


@dataclass(frozen=True)
class EngineCell:
    """One draft at one K under one acceptance rule, replayed on the whole workload.

    Attributes:
        rule: of acceptance.
        engines: who uses it.
        draft, temperature, k: which cell.
        tokens_per_round, alpha: replayed.
        speedup: tokens_per_round / (K c + v(K)), with this run's step times.
    """

    rule: Rule
    engines: tuple[str, ...]
    draft: str
    temperature: float
    k: int
    tokens_per_round: float
    alpha: float | None
    speedup: float


def engine_cells(
    traces: Sequence[TextTrace],
    draft: str,
    temperature: float,
    ks: Iterable[int],
    times: StepTimes,
) -> list[EngineCell]:
    """Every rule and K that the step times cover.

    Args:
        traces: of this draft, any temperatures.
        draft: its name.
        temperature: which of the texts.
        ks: numbers of draft tokens.
        times: the run's.
    """
    own = [trace for trace in traces if trace.temperature == temperature]
    covered = sorted(k for k in set(ks) if k > 0 and times.covers(k))
    if not own or not covered:
        return []
    cells: list[EngineCell] = []
    for rule in RULES:
        found = replay_drafts({draft: own}, rule, covered, temperature)
        cells += [
            _cell(rule, draft, temperature, k, counts, times)
            for (_, k), counts in found.candidates.items()
        ]
    return cells


def _cell(
    rule: Rule, draft: str, temperature: float, k: int, counts: Replayed, times: StepTimes
) -> EngineCell:
    tokens_per_round = float(counts.new_tokens.sum() / counts.rounds.sum())
    return EngineCell(
        rule=rule,
        engines=ENGINES[rule],
        draft=draft,
        temperature=temperature,
        k=k,
        tokens_per_round=tokens_per_round,
        alpha=ratio(float(counts.accepted.sum()), float(counts.judged.sum())),
        speedup=speedup_from_tokens_per_round(tokens_per_round, k, times.c, times.v(k)),
    )
