"""One draft's scored texts, replayed with the chances that a better or a worse draft would have.

A better draft closes the same part of every gap to 1: each chance a becomes a + u (1 - a), at every
place, at one offset of the rounds, or at some of the tokens; a worse one has a (1 - u).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from harness.analysis.cells import Weights
from harness.analysis.latency import Latency
from harness.analysis.leaderboard import Ranking
from harness.analysis.predicted import evidence_of
from harness.analysis.replayed import Replays, by_prompt, in_chunks, padded_traces
from harness.analysis.setup import Setup
from harness.analysis.sweep_and_audition import PairAnalysis
from harness.analysis.verdict import Candidate
from harness.records import Rule, TextTrace, where
from harness.serving.drafts import DRAFTS
from harness.stats.jackknife import token_weights
from harness.theory.replay import Endings, PaddedTexts, Replayed, by_start, endings, replay, stacked

Array = NDArray[np.float64]
Labels = NDArray[np.intp]
# Other chances of a part of the texts, from the part and the number of its first text
Change = Callable[[PaddedTexts, int], Array]


@dataclass(frozen=True, eq=False)
class Scored:
    """A draft's texts at one temperature, what its rounds cost, and the K that it is served with.

    `weights` are of the prompt sets; `parts` are the texts in pieces that fit the memory;
    `plain_s` is the plain token that a ranking prices every draft over, the first draft's.
    """

    name: Candidate
    rule: Rule
    ks: tuple[int, ...]
    texts: tuple[TextTrace, ...]
    latency: Latency
    plain_s: float
    weights: Weights
    lookups: frozenset[str]
    parts: tuple[PaddedTexts, ...]
    setup: Setup

    @classmethod
    def of(cls, analysis: PairAnalysis, ranking: Ranking, name: Candidate) -> "Scored":
        """A ranked draft."""
        replays, setup = ranking.replays, analysis.setup
        kept, rule, ks = {*replays.names}, replays.rule, replays.ks
        texts = where(analysis.replayed_texts(name.draft), temperature=replays.temperature)
        texts = [text for text in texts if (text.prompt_set, text.conversation) in kept]
        texts.sort(key=lambda text: text.key)
        depth, limits = max(ks), analysis.limits(ks)
        parts = tuple(padded_traces(part, rule, depth, limits) for part in in_chunks(texts, depth))
        latencies = analysis.latencies[replays.temperature]
        latency, plain_s = latencies[name.draft], latencies[replays.drafts[0]].rounds.baseline_s
        weights, lookups = setup.weights, replays.lookups & {name.draft}
        return cls(name, rule, ks, tuple(texts), latency, plain_s, weights, lookups, parts, setup)

    @cached_property
    def factors(self) -> Array:
        """[text] what each of its tokens counts, so that the workload's are 1."""
        tokens = np.array([len(text.tokens) for text in self.texts], dtype=np.float64)
        return token_weights([text.prompt_set for text in self.texts], tokens, self.weights)

    @cached_property
    def offsets(self) -> list[int]:
        """Of each part, its first text."""
        return np.cumsum([0, *(len(part.lengths) for part in self.parts)]).tolist()[:-1]

    def endings(self, k: int) -> Iterator[tuple[PaddedTexts, Array, Endings]]:
        """Of each part, what its texts count and where its rounds end."""
        for part, first in zip(self.parts, self.offsets, strict=True):
            factors = self.factors[first : first + len(part.lengths), None, None]
            yield part, factors, endings(part.chances, part.lengths, k, proposed=part.proposed)

    def counts(self, change: Change | None, ks: Sequence[int]) -> dict[int, Replayed]:
        """Replay with other chances, by K; a change sees a part and its first text."""
        made: list[Mapping[int, Replayed]] = []
        for part, first in zip(self.parts, self.offsets, strict=True):
            chances = part.chances if change is None else change(part, first)
            made.append(replay(chances, part.lengths, ks, proposed=part.proposed))
        return {k: stacked([each[k] for each in made]) for k in ks}

    def replays(self, change: Change | None = None, ks: Sequence[int] = ()) -> Replays:
        """The same, added up by prompt; at the K that is served unless others are given."""
        counts = self.counts(change, ks or [self.name.k])
        named = {Candidate(self.name.draft, k): each for k, each in counts.items()}
        return by_prompt(self.texts, self.rule, named, self.lookups)

    def speedups(
        self, change: Change | None = None, ks: Sequence[int] = (), step_share: float = 1.0
    ) -> dict[int, float]:
        """By K, the workload's speedup; a draft step takes `step_share` of today's time."""
        latency = self.latency if step_share == 1.0 else self.at_step(step_share)
        evidence = evidence_of(self.replays(change, ks), {self.name.draft: latency})
        return {name.k: value for name, value in evidence.speedups(self.weights).items()}

    def raised_to(self, alpha: float) -> Change:
        """Every gap closed by the part that makes alpha of the rounds at its K the one wanted.

        Better chances also end rounds elsewhere, so that it is not (wanted - now) / (1 - now). At
        least today's alpha is wanted.
        """

        def lacks(by: float) -> float:
            counts = self.replays(raised_everywhere(by)).weighted(self.name, self.weights)
            return counts.alpha - alpha

        if lacks(0.0) >= 0.0:
            return raised_everywhere(0.0)
        return raised_everywhere(float(brentq(lacks, 0.0, 1.0, xtol=1e-4)))

    # ---- a round's time, and the draft's part of it ----

    def draft_steps(self, k: int) -> int | None:
        """Steps that a round of K takes one after the other; None of a look-up."""
        if self.lookups:
            return None
        spec = DRAFTS.get(self.setup.kind_of(self.name.draft), DRAFTS["model"])
        return k if spec.chained or not spec.reads_states else 1

    def draft_cost(self, k: int) -> float | None:
        """Plain tokens that the draft steps of a round take; None where no step was timed."""
        steps, timed = self.draft_steps(k), self.latency.steps
        if steps is None or timed is None or self.latency.served is not None:
            return None
        return steps * timed.draft_s / self.latency.rounds.baseline_s

    def at_step(self, share: float) -> Latency:
        """Its times with draft steps that take a share of today's time."""
        rounds = self.latency.rounds
        moved = tuple(
            (k, seconds + (share - 1.0) * (self.draft_cost(k) or 0.0) * rounds.baseline_s)
            for k, seconds in rounds.round_s
        )
        return replace(self.latency, rounds=replace(rounds, round_s=moved), visits=None)


def raised(part: PaddedTexts, by: Array | float) -> Array:
    """Chances that close a part of their gap to 1, or below 0 lose a part of themselves."""
    up = part.chances + np.maximum(by, 0.0) * (1.0 - part.chances)
    return up * (1.0 + np.minimum(by, 0.0))


def raised_everywhere(by: float) -> Change:
    """At every place."""
    return lambda part, _: raised(part, by)


def raised_at(offset: int, by: float) -> Change:
    """At one offset of every round."""
    return lambda part, _: raised(part, by * (np.arange(part.chances.shape[2]) == offset))


def raised_in(labels: Sequence[Labels], number: int, by: float) -> Change:
    """At the tokens with one label."""

    def change(part: PaddedTexts, first: int) -> Array:
        inside = np.zeros(part.chances.shape[:2])
        for row, size in enumerate(part.lengths):
            inside[row, :size] = labels[first + row] == number
        return raised(part, by * by_start(inside, part.chances.shape[2]))

    return change


def of_texts(part: PaddedTexts, values: Array) -> list[Array]:
    """Of each text of a part its [position, ...] values, without what pads them."""
    return [values[row, :size] for row, size in enumerate(part.lengths)]
