"""What a server run stored: its requests, and their texts as the pair sees them, with replay."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from harness.analysis.cells import completed, latest
from harness.analysis.lossless import text_checks, without_faulty
from harness.analysis.replayed import as_served
from harness.analysis.request_times import Settle, settled, settling
from harness.analysis.setup import Setup
from harness.records import Cell, Rule, ServingEngine, TextTrace, Trial, grouped, where
from harness.serving.round_counting import Counting, shorter_budget
from harness.stats.jackknife import Array
from harness.summary import TextCheck, Visits
from harness.theory.replay import Replayed, replay_texts, rounds_variance


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
        """Those of some prompt sets."""
        names = set(prompt_sets)
        return Texts(tuple(pair for pair in self.pairs if pair[0].prompt_set in names))

    @property
    def prompts(self) -> tuple[tuple[str, str], ...]:
        """[n] what they answer, by prompt set; turns of one conversation are one prompt."""
        return tuple((trial.prompt_set, trial.conversation) for trial in self.trials)

    @property
    def seconds(self) -> Array:
        """[n] of decoding."""
        return np.array([trial.decode_s for trial in self.trials], dtype=np.float64)

    @property
    def tokens(self) -> Array:
        """[n] that rounds emitted."""
        return np.array([trial.new_tokens for trial in self.trials], dtype=np.float64)


@dataclass(frozen=True)
class ServedTexts:
    """The requests of a server run; each part is derived once."""

    setup: Setup

    # ---- what was stored -------------------------------------------------------------------------

    @property
    def engine(self) -> ServingEngine:
        """What served."""
        assert self.setup.engine is not None, "a server run notes its engine before any request"
        return self.setup.engine

    @property
    def counting(self) -> Counting | None:
        """How its counters count; None where it has none."""
        first, shortens = self.engine.first_position, self.engine.shortens_last_draft
        return None if first is None or shortens is None else Counting(first, shortens)

    @cached_property
    def checks(self) -> list[TextCheck]:
        """Greedy texts compared with plain decoding's."""
        return text_checks(self.setup.run.trials, self.setup.run.checks)

    @cached_property
    def _stored(self) -> list[Trial]:
        """As they were stored; those whose text is not the target's have failed."""
        return without_faulty(self.setup.run.trials, self.checks)

    @cached_property
    def trials(self) -> list[Trial]:
        """Each generation once."""
        return latest(self._stored)

    @cached_property
    def settle(self) -> Settle:
        """A request's time over its visits."""
        return settling(self._stored)

    @cached_property
    def settled(self) -> list[Trial]:
        """One trial per greedy text, its seconds settled over visits; all others."""
        return settled(self._stored, self.settle)

    @cached_property
    def _settled_starts(self) -> list[Trial]:
        """The same of requests for a part of their budget."""
        return settled(self.setup.run.starts, self.settle)

    @cached_property
    def _settled_probes(self) -> list[Trial]:
        """The same of requests on a few prompts."""
        return settled(self.setup.run.probes, self.settle)

    @property
    def visits_asked(self) -> int | None:
        """Visits that the run needed; None of records of requests that were served elsewhere.

        A run that ended between looks, since it was decided or out of time, lacks none of them.
        """
        asked, chosen = self.setup.run.config.get("repetitions"), self.setup.run.manifest.served_ks
        if asked is None or chosen is None or chosen.ended in (None, "prompts"):
            return asked
        return min([asked, *(visits for visits in self._visits.values() if visits)])

    def visits_lacking(self, cell: Cell) -> Visits | None:
        """In how few visits a cell was timed next to plain decoding; None where in all."""
        asked, timed = self.visits_asked, self._visits.get(cell, 0)
        return Visits(timed, asked) if asked is not None and timed < asked else None

    @cached_property
    def _visits(self) -> dict[Cell, int]:
        """Of each cell, the visits that both it and plain decoding finished.

        Fewest of a prompt, of those that both ever finished: the others are failures of their own.
        """
        finished: dict[tuple[Cell, str], set[int]] = {}
        for t in self.trials:
            if t.status == "ok":
                finished.setdefault((t.cell_key, t.prompt), set()).add(t.repetition)
        prompts = grouped(self.trials, lambda t: (t.prompt_set, t.temperature))
        plain = {cell: replace(cell, k=0) for cell in {t.cell_key for t in self.trials}}
        shared: dict[Cell, int] = {}
        for cell in plain:
            both = (
                len(finished.get((cell, name), set()) & finished.get((plain[cell], name), set()))
                for name in {t.prompt for t in prompts[cell.prompt_set, cell.temperature]}
            )
            shared[cell] = min(filter(None, both), default=0)
        return shared

    @property
    def ks(self) -> tuple[int, ...]:
        """The K above 0 that were measured, ascending."""
        return tuple(sorted({trial.k for trial in completed(self.trials) if trial.k}))

    @property
    def priced_ks(self) -> tuple[int, ...]:
        """The K above 0 whose rounds were timed, if on a few prompts; ascending."""
        probed = {trial.k for trial in completed(self._settled_probes) if trial.k}
        return tuple(sorted({*self.ks, *probed}))

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

    @cached_property
    def plain_trials(self) -> list[Trial]:
        """Plain decoding's: of prompts that were asked for few tokens of every K alone, those."""
        plain = where(self.settled, k=0)
        asked = {(t.prompt_set, t.prompt, t.temperature) for t in completed(plain)}
        few = where(completed(self._settled_probes), k=0)
        return [
            *plain,
            *(t for t in few if (t.prompt_set, t.prompt, t.temperature) not in asked),
        ]

    @cached_property
    def _traces(self) -> dict[tuple[str, str, float], list[TextTrace]]:
        """By prompt and temperature."""
        return grouped(self.setup.run.traces, lambda t: (t.prompt_set, t.prompt, t.temperature))

    @cached_property
    def _prefilled(self) -> dict[tuple[object, ...], tuple[int, ...]]:
        """The tokens of each text that come from its prefill, which its trace has not."""
        first = 0 if self.counting is None else self.counting.first_position
        return {
            (t.prompt_set, t.prompt, t.temperature, t.repetition, t.k): t.tokens[:first]
            for t in self.setup.run.trials
            if t.tokens
        }

    def trace_of(self, trial: Trial) -> TextTrace | None:
        """What the pair says of what a request's rounds emitted; None where it was not scored.

        The text is all of a scored one, or its beginning, where a request had a smaller budget.
        """
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

    # ---- replay ----------------------------------------------------------------------------------

    def replayed(self, texts: Texts, k: int, counting: Counting | None = None) -> Replayed:
        """Expected counts at K, one entry per text.

        As the engine accepts, and counts unless `counting` says otherwise.
        """
        rule = self.engine.rule
        assert rule is not None
        return replay_texts(*self._as_served(texts, k, rule, counting))

    def rounds_expected(self, texts: Texts, k: int, rule: Rule) -> tuple[Array, Array]:
        """Expected rounds of each text by an acceptance rule, and their variance."""
        served = self._as_served(texts, k, rule)
        return replay_texts(*served).rounds, rounds_variance(*served)

    def _as_served(
        self, texts: Texts, k: int, rule: Rule, counting: Counting | None = None
    ) -> tuple[list[Array], list[NDArray[np.intp]], int]:
        """What `replay_texts` takes."""
        counting = counting or self.counting
        assert counting is not None
        lengths = [trial.new_tokens or 0 for trial in texts.trials]
        limits = [counting.proposed(k, self._budget(trial)) for trial in texts.trials]
        return as_served(texts.traces, lengths, limits, rule, k)

    def _budget(self, trial: Trial) -> int:
        """Tokens that a request was allowed."""
        if trial.stop_reason == "budget":
            return len(trial.tokens or ())
        budget = int(self.setup.run.config["new_tokens"])
        return shorter_budget(budget) if trial.cell in self._started else budget

    @cached_property
    def _started(self) -> frozenset[str]:
        """The requests that had a part of their budget."""
        return frozenset(trial.cell for trial in self.setup.run.starts)

    def sets_at(self, temperature: float) -> list[str]:
        """The prompt sets of a temperature, by name."""
        asked = (*self.trials, *self.setup.run.probes)
        return sorted({t.prompt_set for t in asked if t.temperature == temperature})
