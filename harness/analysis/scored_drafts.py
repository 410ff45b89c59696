"""The drafts of a sweep or an audition: their scores of the texts, their costs, their predictions.

A draft's latency is that of rounds that were timed, of steps, typed in, or of another engine. With
its replayed rounds it predicts seconds on every prompt, under every acceptance rule
(`harness.analysis.predicted`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from harness.analysis.engine_costs import priced_by
from harness.analysis.predicted import Predicted
from harness.analysis.replayed import Limits, decoded, replay_drafts
from harness.analysis.round_costs import (
    LOOKUP_S,
    Latency,
    latency_of_draft,
    typed_latency,
    without_rounds,
)
from harness.analysis.setup import Setup, timed_apart
from harness.engine_facts.engines import with_lines
from harness.engine_facts.spec import Counting, counting_of
from harness.records import DraftConfidence, Rule, TextKey, TextTrace, UserError, grouped
from harness.summary import Dropped
from harness.theory.speedup import StepTimes


@dataclass(frozen=True, eq=False)
class ScoredDrafts:
    """Drafts with their texts and costs."""

    setup: Setup
    traces: Mapping[str, Sequence[TextTrace]]  # by draft, in stored order; not of those that failed
    latencies: Mapping[float, Mapping[str, Latency]]  # by temperature and draft that was timed
    dropped: Mapping[str, Dropped]  # those that scored a part of the texts, since they lost
    # By draft and text, how sure it is off the text; none unless there is a threshold
    confidences: Mapping[str, Mapping[TextKey, DraftConfidence]]
    _made: dict[tuple[Rule, float, tuple[float, ...]], Predicted | None] = field(
        default_factory=dict[tuple[Rule, float, tuple[float, ...]], Predicted | None]
    )

    @property
    def rules(self) -> list[Rule]:
        """The acceptance rules that drafts are replayed by, the verdict's first."""
        accepted_by: list[Rule] = [spec.rule for spec in with_lines().values() if spec.rule]
        return [*dict.fromkeys((self.setup.rule, *accepted_by))]

    def predicted(
        self, rule: Rule, temperature: float, *, thresholds: bool = True
    ) -> Predicted | None:
        """The predictions of the drafts scored and timed at a temperature; None without any.

        With `thresholds` at those of the run, if the rule is its own: engines with another rule
        have no such threshold.
        """
        at = self._thresholds(rule) if thresholds else (0.0,)
        if (rule, temperature, at) not in self._made:
            timed = self.latencies.get(temperature, {})
            ranked = [name for name in timed if name in self.traces and name not in self.dropped]
            self._made[rule, temperature, at] = self.predicted_of(ranked, rule, temperature, at)
        return self._made[rule, temperature, at]

    def _thresholds(self, rule: Rule) -> tuple[float, ...]:
        return self.setup.thresholds if rule == self.setup.rule else (0.0,)

    def predicted_of(
        self,
        drafts: Sequence[str],
        rule: Rule,
        temperature: float,
        thresholds: Sequence[float] | None = None,
    ) -> Predicted | None:
        """Some drafts, on the prompts that all scored; thresholds as of `predicted` if None."""
        at = self._thresholds(rule) if thresholds is None else thresholds
        setup, latencies = self.setup, self.latencies.get(temperature, {})
        traces = {name: self.traces[name] for name in drafts}
        limits: Limits | None = None
        ks = [k for k in setup.ks if all(each.rounds.covers(k) for each in latencies.values())]
        counting = counting_of(setup.priced_by and setup.priced_by.engine)
        if counting is not None and ks:
            traces = {  # as far as the rounds of that engine emit them
                name: [each for trace in texts if (each := decoded(trace, counting)) is not None]
                for name, texts in traces.items()
            }
            limits = partial(_limits, counting, setup.new_tokens or 0, max(ks))
        scored = (any(t.temperature == temperature for t in texts) for texts in traces.values())
        if not traces or not ks or not all(scored):
            return None
        replays = replay_drafts(traces, rule, ks, temperature, at, self.confidences, limits)
        return Predicted(replays, latencies)

    @property
    def by_own_rule(self) -> list[Predicted]:
        """The predictions under the run's own rule, which is the verdict's, by temperature."""
        made = (self.predicted(self.setup.rule, temperature) for temperature in self.latencies)
        return [each for each in made if each is not None]

    @property
    def by_rule(self) -> dict[tuple[Rule, float], Predicted]:
        """By rule, the verdict's first, and temperature."""
        return {
            (rule, temperature): made
            for temperature in self.latencies
            for rule in self.rules
            if (made := self.predicted(rule, temperature)) is not None
        }

    def next_to_first(self, predicted: Predicted) -> Iterator[tuple[str, Predicted]]:
        """Each draft that was dropped, with the first one of these, on the prompts it has."""
        replays = predicted.replays
        for name in self.dropped:
            if name in self.latencies[replays.temperature]:
                both = [replays.drafts[0], name]
                made = self.predicted_of(both, replays.rule, replays.temperature)
                if made is not None:
                    yield name, made


def scored_drafts(
    setup: Setup, traces: Mapping[str, Sequence[TextTrace]] | None = None
) -> ScoredDrafts:
    """The drafts of a run; `traces` by draft stand for those that are stored."""
    notes = setup.run.manifest.audition
    failed = {entry.draft for entry in notes.failures}
    if traces is None:
        scored = (trace for trace in setup.run.traces if trace.draft not in failed)
        traces = grouped(scored, lambda trace: trace.draft)
    drafts = [*traces] if setup.command == "audition" else [setup.draft]
    lookups = {name for name, texts in traces.items() if texts[0].chosen}
    by_draft = grouped(setup.run.confidences, lambda entry: entry.draft)
    return ScoredDrafts(
        setup,
        traces,
        {value: _latencies(setup, drafts, lookups, value) for value in setup.temperatures},
        {name: notes.dropped[name] for name in traces if name in notes.dropped},
        {draft: {each.key: each for each in known} for draft, known in by_draft.items()},
    )


def _limits(counting: Counting, asked: int, k: int, trace: TextTrace) -> NDArray[np.intp]:
    """[start] tokens that the engine that prices the drafts drafts at most, near a text's end."""
    emitted = len(trace.tokens) + counting.first_position
    budget = emitted if trace.stop_reason == "budget" else max(asked, emitted)
    return counting.proposed(k, budget)


# ---- plain tokens next to each draft -------------------------------------------------------------


def _latencies(
    setup: Setup, drafts: Sequence[str], lookups: set[str], temperature: float
) -> dict[str, Latency]:
    """By draft, of those that were timed, or whose costs are known.

    Speedups of drafts that were timed apart are over the others' plain token. Next to its own plain
    token, a head whose target ran eagerly would be compared with a baseline that nobody serves, and
    with drafts that are compared with another one.
    """
    every = {name: _latency(setup, name, temperature, name in lookups) for name in drafts}
    latencies = {name: latency for name, latency in every.items() if latency is not None}
    if setup.typed_latency:
        return latencies
    for name in {*latencies} & {*setup.run.manifest.audition.untimed}:
        latencies[name] = without_rounds(latencies[name])
    apart = timed_apart(setup)
    first = next((draft for draft in latencies if draft not in apart), None)
    if first is not None:
        plain_s = latencies[first].rounds.plain_s
        for name in apart & set(latencies):
            rounds = replace(latencies[name].rounds, other_plain_s=plain_s)
            latencies[name] = replace(latencies[name], rounds=rounds)
    return latencies


def _latency(setup: Setup, draft: str, temperature: float, lookup: bool) -> Latency | None:
    if setup.typed_latency:
        return _typed(setup, draft, lookup)
    if setup.priced_by is None:
        return latency_of_draft(setup.run, draft, temperature, lookup=lookup)
    kind = draft if lookup else setup.kind_of(draft)
    with suppress(UserError):  # which the command refused; a manifest may be edited
        return priced_by(setup.priced_by, draft, kind, setup.described_draft(draft), temperature)
    return None


def _typed(setup: Setup, draft: str, lookup: bool) -> Latency | None:
    """From the step times in the configuration; None where it has none of the draft."""
    typed = setup.conf("latency")
    draft_ms = typed.get("draft_ms")
    if isinstance(draft_ms, Mapping):
        draft_ms = draft_ms.get(draft)
    elif lookup:
        draft_ms = LOOKUP_S * 1e3
    if draft_ms is None:
        return None
    verify = tuple(value / 1e3 for value in typed.get("verify_ms") or ())
    times = StepTimes(draft_ms / 1e3, typed["target_ms"] / 1e3, verify)
    return typed_latency(times, max(setup.ks, default=0), lookup=lookup)
