"""The draft's temperature as a free knob: which one serves each target temperature best?

Under the rule `ratio` the output has the target's law whatever the draft's law is, so the draft may
be sampled at any temperature; what changes is how often its tokens are accepted. Replay tries them
all on one target text. Only rules that sample the draft have this knob: `greedy_draft` has none.

The temperature and K are chosen by their speedup, so the gain over the default (draft temperature =
target temperature, at its own best K) is cross-fitted: chosen on some prompts, scored on others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.analysis.candidates import replay_drafts
from harness.analysis.evidence import Candidate, Evidence
from harness.analysis.predicted import evidence_of
from harness.analysis.step_latency import Latency
from harness.analysis.verdict import FOLDS
from harness.records import Rule, TextTrace, UserError
from harness.stats.crossfit import cross_fit, workload_of


@dataclass(frozen=True)
class DraftTemperatureRow:
    """The best draft temperature of one draft at one target temperature.

    Attributes:
        draft_temperature, k, speedup: the best pair on all prompts (optimistic: it was chosen
            there).
        default_k, default_speedup: the default draft temperature at its own best K.
        gain, gain_lo, gain_hi: speedup over the default, held out; with too few prompts to hold
            any out the plain ratio without bounds, and 1 where the default is the best.
        held_out: which of the two it is.
        pays: whether the gain's lower bound is above 1.
        tried: the draft temperatures compared.
        prompts: how many.
    """

    rule: Rule
    temperature: float
    draft: str
    draft_temperature: float
    k: int
    speedup: float
    default_k: int
    default_speedup: float
    gain: float
    gain_lo: float | None
    gain_hi: float | None
    held_out: bool
    pays: bool
    tried: tuple[float, ...]
    prompts: int


def best_draft_temperature(
    traces: Sequence[TextTrace],
    latency: Latency,
    ks: Sequence[int],
    temperature: float,
    *,
    rule: Rule = "ratio",
    weights: Mapping[str, float] | None = None,
    seed: int = 0,
) -> DraftTemperatureRow | None:
    """The draft temperature and K of largest speedup, against the default.

    Args:
        traces: of one draft, at several draft temperatures.
        latency: its step times.
        ks: the K to choose from.
        temperature: of the target's texts.
        rule: `ratio` or `exact_match`.
        weights: of the prompt sets, equal if None.
        seed: of the folds and the resampling.

    Returns:
        None where only one draft temperature was scored.

    Raises:
        UserError: the rule `greedy_draft`, no trace at the default, or as `replay_drafts`.
    """
    if rule == "greedy_draft":
        raise UserError("rule=greedy_draft: the draft is not sampled, so it has no temperature")
    here = [t for t in traces if t.temperature == temperature and t.matches is None]
    tried = tuple(sorted({trace.draft_temperature for trace in here}))
    if temperature not in tried:
        raise UserError(
            f"traces: no draft temperature {temperature:g} at target temperature {temperature:g};"
            " score the default as well"
        )
    if len(tried) == 1:
        return None
    by_name = {f"{value:g}": [t for t in here if t.draft_temperature == value] for value in tried}
    evidence = _evidence(by_name, latency, rule, ks, temperature)
    return _compared(evidence, here[0].draft, rule, tried, weights, seed)


def _evidence(
    by_name: Mapping[str, Sequence[TextTrace]],
    latency: Latency,
    rule: Rule,
    ks: Sequence[int],
    temperature: float,
) -> Evidence:
    """Candidates named by draft temperature; each replayed as if it were a draft of its own."""
    replays = replay_drafts(by_name, rule, ks, temperature, any_draft_temperature=True)
    return evidence_of(replays, dict.fromkeys(by_name, latency.times))


def _compared(
    evidence: Evidence,
    draft: str,
    rule: Rule,
    tried: tuple[float, ...],
    weights: Mapping[str, float] | None,
    seed: int,
) -> DraftTemperatureRow:
    workload = workload_of(evidence, weights)
    speedups = dict(zip(workload.candidates, workload.plain().tolist(), strict=True))
    default = _best(speedups, f"{evidence.temperature:g}")
    best = max(speedups, key=lambda name: (speedups[name], name == default))
    against = Evidence(
        evidence.temperature,
        evidence.prompts,
        evidence.prompt_sets,
        baseline=evidence.candidates[default],
        candidates=evidence.candidates,
        facts={},
    )
    # Where the default is the best there is, nothing was selected and nothing is gained.
    held = None if best == default else cross_fit(workload_of(against, weights), FOLDS, seed)
    by_name = {f"{value:g}": value for value in tried}
    return DraftTemperatureRow(
        rule=rule,
        temperature=evidence.temperature,
        draft=draft,
        draft_temperature=by_name[best[0]],
        k=best[1],
        speedup=speedups[best],
        default_k=default[1],
        default_speedup=speedups[default],
        gain=held.speedup if held else speedups[best] / speedups[default],
        gain_lo=held.interval.lo if held else None,
        gain_hi=held.interval.hi if held else None,
        held_out=held is not None,
        pays=held is not None and held.interval.lo > 1.0,
        tried=tried,
        prompts=len(evidence.prompts),
    )


def _best(speedups: Mapping[Candidate, float], draft: str) -> Candidate:
    own = {name: value for name, value in speedups.items() if name[0] == draft}
    return max(own, key=lambda name: own[name])
