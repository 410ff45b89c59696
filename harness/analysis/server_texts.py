"""The stored requests of a server run, and their texts as the pair sees them, with replay."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from harness.analysis.cells import completed, few_visits, latest
from harness.analysis.lossless import by_text, distrust, text_checks, without_faulty
from harness.analysis.replayed import ScoredTexts, as_served, beginning, replayed_adaptively
from harness.analysis.settled_times import Settle, settled, settling
from harness.analysis.setup import Setup, p_min_of
from harness.engine_facts.engines import spec_of
from harness.engine_facts.spec import Counting, counting_of, shorter_budget
from harness.records import Cell, Rule, ServingEngine, TextTrace, Trial, grouped, where
from harness.stats.jackknife import Array
from harness.summary import Doubt, TextCheck, Visits
from harness.theory.replay import Replayed, replay_texts, rounds_variance

# Prompt set, prompt and temperature
Asked = tuple[str, str, float]


@dataclass(frozen=True, eq=False)
class Texts:
    """Some of a server's texts, n requests, each with the trace of what its rounds emitted."""

    pairs: tuple[tuple[Trial, TextTrace], ...]

    @property
    def trials(self) -> list[Trial]:
        """[n] the requests that returned them."""
        return [trial for trial, _ in self.pairs]

    @property
    def traces(self) -> list[TextTrace]:
        """[n] what the pair says of each."""
        return [trace for _, trace in self.pairs]

    def of(self, prompt_sets: Iterable[str]) -> "Texts":
        names = set(prompt_sets)
        return Texts(tuple(pair for pair in self.pairs if pair[0].prompt_set in names))

    @property
    def tokens(self) -> Array:
        """[n] that rounds emitted."""
        return np.array([trial.new_tokens for trial in self.trials], dtype=np.float64)


@dataclass(frozen=True, eq=False)
class ServedTexts:
    """The requests of a server run."""

    setup: Setup
    engine: ServingEngine
    counting: Counting | None  # how the engine's counters count; None where it has none
    checks: Sequence[TextCheck]  # greedy texts compared with plain decoding's
    trials: Sequence[Trial]  # each generation once; those of another text have failed
    settle: Settle  # a request's time over its visits
    settled: Sequence[Trial]  # one per greedy text, its seconds settled over visits; all others
    starts: Sequence[Trial]  # the same of requests for a part of their budget
    probes: Sequence[Trial]  # the same of those on a few prompts
    _traces: dict[Asked, list[TextTrace]]
    # The tokens of each text that come from its prefill, which its trace has not
    _prefilled: dict[tuple[object, ...], tuple[int, ...]]
    _visits: dict[Cell, int]  # that both a cell and plain decoding finished

    @property
    def distrusted(self) -> Doubt | None:
        """Why no verdict can rest on the greedy texts, by those that were judged."""
        return distrust(by_text([check for check in self.checks if check.result != "OPEN"]))

    # ---- which K, temperatures, sets and visits --------------------------------------------------

    @property
    def visits_asked(self) -> int | None:
        """Visits needed: those until a run ended between looks; None of foreign records."""
        asked, chosen = self.setup.run.config.get("repetitions"), self.setup.run.manifest.served_ks
        if asked is None or chosen is None or chosen.ended in (None, "prompts"):
            return asked
        return min([asked, *(visits for visits in self._visits.values() if visits)])

    def visits_lacking(self, cell: Cell) -> Visits | None:
        """In how few visits a cell was timed next to plain decoding; None where in all."""
        return few_visits(self._visits.get(cell, 0), self.visits_asked)

    @property
    def ks(self) -> tuple[int, ...]:
        """The K above 0 that were measured, ascending."""
        return tuple(sorted({trial.k for trial in completed(self.trials) if trial.k}))

    def chosen_k(self, temperature: float) -> int | None:
        """The K that replay chose to be measured; None where every K is."""
        chosen = self.setup.run.manifest.served_ks
        return None if chosen is None else chosen.k_at(temperature)

    def ks_at(self, temperature: float) -> tuple[int, ...]:
        """The K above 0 that were to be measured on all prompts, ascending."""
        chosen = self.chosen_k(temperature)
        return self.ks if chosen is None else (chosen,)

    @property
    def temperatures(self) -> list[float]:
        """As listed, of those at which anything was measured."""
        seen = {trial.temperature for trial in (*self.trials, *self.setup.run.probes)}
        return [value for value in self.setup.temperatures if value in seen]

    def sets_at(self, temperature: float) -> list[str]:
        asked = (*self.trials, *self.setup.run.probes)
        return sorted({t.prompt_set for t in asked if t.temperature == temperature})

    # ---- texts and replay ------------------------------------------------------------------------

    def trace_of(self, trial: Trial) -> TextTrace | None:
        """The trace of a request's text, or the longer one it begins; None if not scored."""
        if self.counting is None or not trial.tokens:
            return None
        emitted = np.array(self.counting.decoded(trial.tokens))
        prompt = (trial.prompt_set, trial.prompt, trial.temperature)
        prefilled = trial.tokens[: self.counting.first_position]
        for trace in self._traces.get(prompt, ()):
            before = self._prefilled.get((*prompt, trace.repetition, trace.k), prefilled)
            if before == prefilled and np.array_equal(trace.tokens[: len(emitted)], emitted):
                return trace
        return None

    def texts(self, trials: Iterable[Trial], k: int, temperature: float) -> Texts:
        """Completed requests of one cell or several, of those whose texts were scored."""
        cell = where(completed(list(trials)), k=k, temperature=temperature)
        pairs = ((trial, self.trace_of(trial)) for trial in cell)
        return Texts(tuple((trial, trace) for trial, trace in pairs if trace is not None))

    def replayed(self, texts: Texts, k: int, p_min: float | None = None) -> Replayed:
        """Expected counts at K, one entry per text; at the run's threshold where none is given."""
        rule = self.engine.rule
        p_min = p_min_of(self.setup) if p_min is None else p_min
        assert rule is not None
        chances, limits, k = self._as_served(texts, k, rule)
        if not p_min:
            return replay_texts(chances, limits, k)
        emitted = [
            beginning(trace, len(rows)) for trace, rows in zip(texts.traces, chances, strict=True)
        ]
        most = {id(trace): limit for trace, limit in zip(emitted, limits, strict=True)}
        scored = ScoredTexts(
            emitted,
            {each.key: each for each in self.setup.run.confidences},
            rule,
            spec_of(self.engine.name).drops_unlikely,
            lambda trace: most[id(trace)],
        )
        return replayed_adaptively(scored, k, p_min)

    def rounds_expected(self, texts: Texts, k: int, rule: Rule) -> tuple[Array, Array]:
        """Expected rounds of each text by an acceptance rule, and their variance."""
        if p_min_of(self.setup):  # of greedy texts, whose rounds are certain
            rounds = self.replayed(texts, k).rounds
            return rounds, np.zeros_like(rounds)
        served = self._as_served(texts, k, rule)
        return replay_texts(*served).rounds, rounds_variance(*served)

    def _as_served(
        self, texts: Texts, k: int, rule: Rule
    ) -> tuple[list[Array], list[NDArray[np.intp]], int]:
        counting = self.counting
        assert counting is not None
        lengths = [trial.new_tokens or 0 for trial in texts.trials]
        started = {trial.cell for trial in self.setup.run.starts}

        def budget(trial: Trial) -> int:
            if trial.stop_reason == "budget":
                return len(trial.tokens or ())
            whole = int(self.setup.run.config["new_tokens"])
            return shorter_budget(whole) if trial.cell in started else whole

        limits = [counting.proposed(k, budget(trial)) for trial in texts.trials]
        return as_served(texts.traces, lengths, limits, rule, k)


def served_texts(setup: Setup) -> ServedTexts:
    """The requests of a run whose engine is noted, as it is before any request."""
    run, engine = setup.run, setup.engine
    assert engine is not None
    counting, checks = counting_of(engine), text_checks(run.trials, run.checks)
    stored = without_faulty(run.trials, checks)
    trials, settle = latest(stored), settling(stored)
    first = 0 if counting is None else counting.first_position
    return ServedTexts(
        setup=setup,
        engine=engine,
        counting=counting,
        checks=checks,
        trials=trials,
        settle=settle,
        settled=settled(stored, settle),
        starts=settled(run.starts, settle),
        probes=settled(run.probes, settle),
        _traces=grouped(run.traces, lambda t: (t.prompt_set, t.prompt, t.temperature)),
        _prefilled={
            (t.prompt_set, t.prompt, t.temperature, t.repetition, t.k): t.tokens[:first]
            for t in run.trials
            if t.tokens
        },
        _visits=_shared_visits(trials),
    )


def _shared_visits(trials: Sequence[Trial]) -> dict[Cell, int]:
    """Visits that a cell and plain decoding finished: fewest of a prompt both ever finished."""
    finished: dict[tuple[Cell, str], set[int]] = {}
    for t in trials:
        if t.status == "ok":
            finished.setdefault((t.cell_key, t.prompt), set()).add(t.repetition)
    prompts = grouped(trials, lambda t: (t.prompt_set, t.temperature))
    shared: dict[Cell, int] = {}
    for cell in {t.cell_key for t in trials}:
        plain = replace(cell, k=0)
        both = (
            len(finished.get((cell, name), set()) & finished.get((plain, name), set()))
            for name in {t.prompt for t in prompts[cell.prompt_set, cell.temperature]}
        )
        shared[cell] = min(filter(None, both), default=0)
    return shared
