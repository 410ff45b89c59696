"""Where a draft loses rounds, what each kind of token costs, and what a better draft is worth.

Everything rests on replay with the stored scores. A round that ends at offset j although K tokens
could have been accepted costs (K - j) / (K + 1) of a round (`harness.theory.replay.Endings`): a sum
over places of the texts, so that the shares of any division of the tokens add up to 1.

"Accepted as well as the rest" raises the chances of a class C before they are replayed again: each
a becomes a + u (1 - a), with u = (alpha of the rest - alpha of C) / (1 - alpha of C), both alphas
being those of the run's own rounds. A draft that is better by d points has u = d / (1 - alpha) at
every place, or at one offset with that offset's alpha. A worse one has a (1 - u). So nothing is
assumed of how acceptance is spread over a text, but that a better draft closes the same part of
every gap.

A draft step that takes less time shortens a round by what its steps take of it. How much a smaller
output matrix, or one layer less, takes away is computed from the bytes that a step reads.

Of every draft the K of its ranking is taken; times, weights of the prompt sets and the acceptance
rule are the ranking's.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import PurePath
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from harness.analysis.latency import Latency
from harness.analysis.leaderboard import Ranking
from harness.analysis.lengths import FIRST, length_bucket
from harness.analysis.predicted import evidence_of
from harness.analysis.replayed import Replays, by_prompt, in_chunks, padded_traces
from harness.analysis.setup import Setup, architecture
from harness.analysis.sweep_and_audition import Audition, PairAnalysis
from harness.analysis.token_classes import CLASSES, rare_tokens, token_classes
from harness.analysis.verdict import Candidate
from harness.records import GREEDY, Rule, TextTrace, UserError
from harness.serving.drafts import DRAFTS
from harness.stats.crossfit import Workload
from harness.stats.jackknife import (
    CONFIDENCE,
    enough_prompts,
    half_width,
    token_weights,
    workload_ratio,
)
from harness.storage.training_log import TrainingLog
from harness.theory.cost import usd_per_million_tokens
from harness.theory.replay import (
    Endings,
    PaddedTexts,
    Replayed,
    RoundChoice,
    at_positions,
    by_start,
    cheapest_rounds,
    endings,
    replay,
    stacked,
)

Array = NDArray[np.float64]
Labels = NDArray[np.intp]
# A draft's chances, from those that are stored
Change = Callable[[PaddedTexts, int], Array]

Axis = Literal["offset", "token", "category", "answer", "context", "entropy"]
AXES: tuple[Axis, ...] = ("offset", "token", "category", "answer", "context", "entropy")
# Upper bounds of the buckets of the target's entropy, nats
ENTROPIES = (0.1, 0.5, 1.0, 2.0)
# Tokens of a span, and how many spans are named
SPAN, SPANS = 8, 10
POINTS = (0.01, 0.05, 0.1)
# Of the map: alphas, and how many times today's time a draft step takes
ALPHAS = tuple(round(0.05 * n, 2) for n in range(2, 21))
SCALES = tuple(round(0.1 * n, 1) for n in range(1, 21))
FASTER = 0.8
CHECKPOINT = re.compile(r"(?:step|checkpoint|ckpt|iter)[-_]?(\d+)$", re.IGNORECASE)
LEAST_CHECKPOINTS = 3


@dataclass(frozen=True)
class LossRow:
    """A part of the tokens: what it is of all, and what is lost there."""

    axis: Axis
    name: str
    token_share: float  # of the text's tokens; of an offset, of the tokens that were judged
    judged: float  # draft tokens, weighted so that all of the workload's tokens are 1
    alpha: float | None  # None where nothing was judged
    lost_share: float  # of the rounds that all parts lose together
    # The speedup / today's, were this part accepted as well as the rest; None where it is already.
    gain: float | None


@dataclass(frozen=True)
class Span:
    """Some tokens in a row, and what is lost there."""

    prompt_set: str
    prompt: str
    start: int
    pieces: tuple[str, ...]
    worst: int  # which of the pieces costs most
    lost_share: float


@dataclass(frozen=True)
class Worth:
    """What a better draft brings; `offset` None is everywhere."""

    points: float
    offset: int | None
    speedup: float  # at the K of today
    k: int  # the best one then
    best_speedup: float
    usd_per_million_tokens: float | None  # at that K


Cheaper = Literal["faster", "half_vocabulary", "layer_less"]


@dataclass(frozen=True)
class CheaperDraft:
    """A draft that takes a part of its step's time and accepts as now."""

    change: Cheaper
    step_share: float  # of today's step
    speedup: float
    k: int
    best_speedup: float


@dataclass(frozen=True)
class SpeedupMap:
    """What a speedup follows from: `tokens_per_round[k][alpha] / (round_cost[k] + moved steps)`.

    Attributes:
        ks, alphas: ascending.
        tokens_per_round: [K][alpha], replayed with the chances raised or lowered to that alpha.
        round_cost: [K] plain tokens that a round takes.
        draft_cost: [K] of them, those that its draft steps take; None where no step was timed.
    """

    ks: tuple[int, ...]
    alphas: tuple[float, ...]
    tokens_per_round: tuple[tuple[float, ...], ...]
    round_cost: tuple[float, ...]
    draft_cost: tuple[float, ...] | None

    def speedups(self, scale: float) -> Array:
        """[K, alpha] speedups where a draft step takes `scale` times today's time."""
        draft = np.array(self.draft_cost or [0.0] * len(self.ks))
        costs = np.array(self.round_cost) + draft * (scale - 1.0)
        return np.array(self.tokens_per_round) / costs[:, None]

    def best_k(self, scale: float) -> Labels:
        """[alpha] the K of the largest speedup; 0 where none is above 1."""
        speedups = self.speedups(scale)
        best = np.array(self.ks)[speedups.argmax(axis=0)]
        return np.where(speedups.max(axis=0) > 1.0, best, 0)


@dataclass(frozen=True)
class DraftLosses:
    """One draft at one temperature, at its best K."""

    temperature: float
    draft: str
    k: int
    speedup: float
    alpha: float | None  # None of a look-up that proposed nothing
    ceiling: float  # the largest speedup of any K, were everything accepted
    ceiling_k: int
    lost_rounds: float  # share of the rounds, beyond those of a draft that is always accepted
    cut_rounds: float  # likewise, by the ends of the texts
    rows: tuple[LossRow, ...]
    spans: tuple[Span, ...]
    worth: tuple[Worth, ...]
    cheaper: tuple[CheaperDraft, ...]
    map: SpeedupMap | None  # None without an alpha


@dataclass(frozen=True)
class Checkpoint:
    """A training step of one head, at its best K."""

    temperature: float
    step: int
    draft: str
    k: int
    alpha: float
    speedup: float
    speedup_lo: float | None
    speedup_hi: float | None
    # The last one's speedup / this one's, on the same texts
    left: float
    left_lo: float | None
    left_hi: float | None


@dataclass(frozen=True)
class Training:
    """The checkpoints of one head, by step; `enough` is the first that no later one beats.

    Attributes:
        head: what their names have in common.
        enough: steps from which on no checkpoint is faster beyond its interval; None with too few
            prompts, or where the last one still is.
    """

    head: str
    temperature: float
    checkpoints: tuple[Checkpoint, ...]
    enough: int | None


@dataclass(frozen=True)
class JointRow:
    """Where two drafts accept the first token of a round, by class of token; shares of it."""

    name: str
    token_share: float
    both: float
    first: float
    second: float
    neither: float


@dataclass(frozen=True)
class Compared:
    """Two drafts on the same tokens.

    Attributes:
        first, second, k, second_k: the drafts, each at its best K.
        ratio: speedup of the second / that of the first, with its interval over prompts.
        alpha_difference: share of tokens that only the second accepts less that only the first
            does, with its interval over prompts.
        rows: by class; the first one is of all tokens.
        router: the speedup of the best choice before every round, were all chances known; None
            where requests of a server cost more than their rounds.
        rounds_of_second: share of its rounds that the second drafts.
    """

    temperature: float
    first: str
    second: str
    k: int
    second_k: int
    ratio: float
    ratio_lo: float | None
    ratio_hi: float | None
    alpha_difference: float
    alpha_difference_lo: float | None
    alpha_difference_hi: float | None
    rows: tuple[JointRow, ...]
    router: float | None
    rounds_of_second: float | None


Cause = Literal[
    "layers", "template", "embedding", "norm", "rotary", "inputs", "own_states", "dependence",
    "starts", "none",
]  # fmt: skip


@dataclass(frozen=True)
class AccuracyRow:
    """A draft token's accuracy: logged, and on the texts of the run at temperature 0.

    Attributes:
        logged: by the trainer, on its texts.
        everywhere: from every position, fed with the text's tokens as in training.
        given: from every position, where the drafts before it were right.
        in_rounds: in the rounds that are run, where the drafts before it were accepted.
    """

    offset: int
    logged: float
    everywhere: float
    given: float
    in_rounds: float


@dataclass(frozen=True)
class AccuracyGap:
    """What a trainer's accuracies promise of a head, and what its rounds accept.

    Attributes:
        k: draft tokens that are compared: those that were logged and scored.
        logged_length: 1 + accepted / rounds, were the logged accuracies independent.
        everywhere_length: likewise, of those on the run's texts.
        joint_length: with the drafts of a round as they depend on each other, from every position.
        replayed_length: in the rounds that are run.
        cause: the first of the known causes that holds, in the order of `Cause`.
        fixed: of a cause in what the head reads, its first token's accuracy without that cause.
    """

    draft: str
    framework: str
    logged_of: Literal["eval", "train"]
    k: int
    rows: tuple[AccuracyRow, ...]
    logged_length: float
    everywhere_length: float
    joint_length: float
    replayed_length: float
    cause: Cause
    fixed: float | None = None


@dataclass(frozen=True)
class Losses:
    """What a run says of the losses of its drafts, the served one of each temperature first."""

    folder: str
    engine: str | None  # whose rounds price them; None for the harness's loop
    rule: Rule
    prompts: int
    texts_known: bool  # whether prompts could be encoded, so that copies are known
    drafts: tuple[DraftLosses, ...]
    trainings: tuple[Training, ...]
    compared: tuple[Compared, ...]
    accuracy: AccuracyGap | None = None


@dataclass(frozen=True)
class KnownTexts:
    """What the tokenizer knows: the text of each id, and the ids of prompts by set and id."""

    pieces: Mapping[int, str]
    prompts: Mapping[tuple[str, str], tuple[int, ...]]


def losses_of(setup: Setup, known: KnownTexts) -> Losses:
    """What a run's traces say of the losses of its drafts.

    Raises:
        UserError: no traces, no times, or checkpoints that are not of one head.
    """
    folder = setup.run.folder
    if not setup.run.traces:
        raise UserError(
            f"losses: {folder} has no traces.parquet; give an audition, or a sweep that scored its"
            " draft (mode=replay)"
        )
    if setup.adaptive:
        raise UserError("losses: rounds of this run stop early; give one with decode.stop=none")
    analysis = Audition(setup) if setup.command == "audition" else PairAnalysis(setup)
    groups = checkpoint_groups(setup, analysis.drafts)
    drafts: list[DraftLosses] = []
    trainings: list[Training] = []
    compared: list[Compared] = []
    for ranking in analysis.own_rankings:
        scored = [Scored.of(analysis, ranking, name) for name in ranking.best]
        classes = classes_of(scored[0].texts, known) if scored else []
        made = [losses_of_draft(each, classes, known) for each in scored]
        drafts += made
        trainings += [
            t for head, steps in groups.items() if (t := training(ranking, analysis, head, steps))
        ]
        compared += [compare(scored[0], other, classes) for other in scored[1:]]
    if not drafts:
        raise UserError(
            f"losses: {folder} has no times of its drafts; give one that timed them, or type"
            " latency.target_ms and latency.draft_ms in the audition"
        )
    priced = setup.priced_by
    return Losses(
        str(folder),
        priced and priced.engine.name,
        setup.rule,
        len(analysis.own_rankings[0].replays.prompts),
        bool(known.prompts),
        tuple(drafts),
        tuple(trainings),
        tuple(compared),
    )


# ---- one draft's texts ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Scored:
    """A draft's texts at one temperature, what its rounds cost, and the K that it is served with.

    Attributes:
        weights: of the prompt sets.
        parts: the texts in pieces that fit the memory.
    """

    name: Candidate
    rule: Rule
    ks: tuple[int, ...]
    texts: tuple[TextTrace, ...]
    latency: Latency
    weights: Mapping[str, float] | None
    lookups: frozenset[str]
    parts: tuple[PaddedTexts, ...]
    setup: Setup

    @classmethod
    def of(cls, analysis: PairAnalysis, ranking: Ranking, name: Candidate) -> "Scored":
        """A ranked draft."""
        replays = ranking.replays
        kept = {*zip(replays.prompt_sets, replays.prompts, strict=True)}
        texts, limits = analysis.replayed_texts(name.draft), analysis.limits(replays.ks)
        texts = sorted(
            (
                text
                for text in texts
                if text.temperature == replays.temperature
                and (text.prompt_set, text.conversation) in kept
            ),
            key=lambda text: text.key,
        )
        depth = max(replays.ks)
        return cls(
            name,
            replays.rule,
            replays.ks,
            tuple(texts),
            analysis.latencies[replays.temperature][name.draft],
            analysis.setup.weights,
            replays.lookups & {name.draft},
            tuple(
                padded_traces(part, replays.rule, depth, limits) for part in in_chunks(texts, depth)
            ),
            analysis.setup,
        )

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
        made = [
            replay(
                part.chances if change is None else change(part, first),
                part.lengths,
                ks,
                proposed=part.proposed,
            )
            for part, first in zip(self.parts, self.offsets, strict=True)
        ]
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


# ---- classes of the tokens -----------------------------------------------------------------------


def classes_of(texts: Sequence[TextTrace], known: KnownTexts) -> list[Labels]:
    """Of each text, [n] the place in CLASSES of each of its tokens."""
    rare = rare_tokens([text.tokens.tolist() for text in texts])
    place = {name: index for index, name in enumerate(CLASSES)}
    return [
        np.array(
            [
                place[name]
                for name in token_classes(
                    text.tokens.tolist(),
                    known.pieces,
                    known.prompts.get((text.prompt_set, text.prompt), ()),
                    rare,
                )
            ],
            dtype=np.intp,
        )
        for text in texts
    ]


def _labels(
    axis: Axis, texts: Sequence[TextTrace], classes: Sequence[Labels]
) -> tuple[list[Labels], list[str]]:
    """Of each text [n] the part of an axis that each token is in, and the parts' names."""
    if axis == "token":
        return list(classes), list(CLASSES)
    if axis == "category":
        names = sorted({text.category or text.prompt_set for text in texts})
        numbers = [names.index(text.category or text.prompt_set) for text in texts]
        return [
            np.full(len(text.tokens), number) for text, number in zip(texts, numbers, strict=True)
        ], names
    if axis == "entropy":
        labels = [
            np.where(
                np.isnan(text.target_entropy),
                len(ENTROPIES) + 1,
                np.searchsorted(ENTROPIES, text.target_entropy, side="right"),
            )
            for text in texts
        ]
        bounds = ["0", *(f"{value:g}" for value in ENTROPIES)]
        names = [f"{low} to {high}" for low, high in pairwise(bounds)]
        return labels, [*names, f"{bounds[-1]} and more", "not stored"]
    before = [text.prompt_tokens if axis == "context" else 0 for text in texts]
    labels = [
        length_bucket(np.arange(len(text.tokens), dtype=np.float64) + more).astype(np.intp)
        for text, more in zip(texts, before, strict=True)
    ]
    number = max(int(each.max()) for each in labels) + 1
    names = [f"{FIRST << (n - 1) if n else 0} to {(FIRST << n) - 1}" for n in range(number)]
    return labels, names


def _padded(
    rows: Sequence[NDArray[np.generic]], part: PaddedTexts, first: int, fill: float
) -> Array:
    """Values of texts side by side, (texts, positions)."""
    padded = np.full((len(part.lengths), int(part.chances.shape[1])), fill)
    for row, size in enumerate(part.lengths):
        padded[row, :size] = rows[first + row]
    return padded


# ---- losses of one draft -------------------------------------------------------------------------


def losses_of_draft(scored: Scored, classes: Sequence[Labels], known: KnownTexts) -> DraftLosses:
    """Everything on one draft at its best K."""
    k = scored.name.k
    judged, rejected, lost = np.zeros((3, k))
    lost_at: list[Array] = []
    judged_at: list[Array] = []
    rejected_at: list[Array] = []
    for part, factors, ends in scored.endings(k):
        ended = ends.lost_rounds * factors
        judged += (ends.judged * factors).sum(axis=(0, 1))
        rejected += (ends.rejected * factors).sum(axis=(0, 1))
        lost += ended.sum(axis=(0, 1))
        for rows, values in (
            (lost_at, ended),
            (judged_at, ends.judged * factors),
            (rejected_at, ends.rejected * factors),
        ):
            placed = at_positions(values)
            rows += [placed[row, :size] for row, size in enumerate(part.lengths)]
    counts = scored.replays()
    weighted = counts.weighted(scored.name, scored.weights)
    rounds = float(weighted.rounds.sum())
    ideal = 1.0 / (k + 1)
    base = scored.speedups()[k]
    total = float(lost.sum()) or 1.0  # where nothing is lost every share is 0

    def row(
        axis: Axis,
        name: str,
        share: float,
        sums: tuple[float, float, float],
        raise_: Callable[[float], Change],
    ) -> LossRow:
        n, bad, costs = sums
        others, bad_others = float(judged.sum()) - n, float(rejected.sum()) - bad
        gain = None
        if n > 0.0 and others > 0.0 and bad / n > bad_others / others:
            raised = 1.0 - (bad_others / others) / (bad / n)
            gain = scored.speedups(raise_(raised))[k] / base
        return LossRow(
            axis, name, share, n, 1.0 - bad / n if n > 0.0 else None, costs / total, gain
        )

    rows = [
        row(
            "offset",
            str(offset + 1),
            float(judged[offset] / max(judged.sum(), 1e-300)),
            (float(judged[offset]), float(rejected[offset]), float(lost[offset])),
            lambda u, offset=offset: raised_at(offset, u),
        )
        for offset in range(k)
    ]
    for axis in AXES[1:]:
        if axis == "entropy" and scored.texts[0].temperature == GREEDY:
            continue
        labels, names = _labels(axis, scored.texts, classes)
        joined = np.concatenate(labels)
        tokens = np.repeat(scored.factors, [len(each) for each in labels])
        sums = [
            np.bincount(joined, np.concatenate(values), minlength=len(names))
            for values in (judged_at, rejected_at, lost_at)
        ]
        shares = np.bincount(joined, tokens, minlength=len(names))
        rows += [
            row(
                axis,
                names[n],
                float(shares[n]),
                (float(sums[0][n]), float(sums[1][n]), float(sums[2][n])),
                lambda u, labels=labels, n=n: raised_in(labels, n, u),
            )
            for n in range(len(names))
            if shares[n] > 0.0
        ]
    alpha = 1.0 - float(rejected.sum() / judged.sum()) if judged.sum() else None
    best = {n: (n + 1) / scored.latency.rounds.relative(n) for n in scored.ks}
    ceiling_k = max(best, key=lambda n: best[n])
    return DraftLosses(
        temperature=scored.texts[0].temperature,
        draft=scored.name.draft,
        k=k,
        speedup=base,
        alpha=alpha,
        ceiling=best[ceiling_k],
        ceiling_k=ceiling_k,
        lost_rounds=float(lost.sum()) / rounds,
        cut_rounds=(rounds - ideal - float(lost.sum())) / rounds,
        rows=tuple(rows),
        spans=tuple(_spans(scored, lost_at, total, known)),
        worth=() if alpha is None else tuple(_worth(scored, alpha, judged, rejected)),
        cheaper=tuple(_cheaper(scored)),
        map=None if alpha is None else _map(scored, alpha),
    )


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
        inside = _padded([each == number for each in labels], part, first, 0.0)
        return raised(part, by * by_start(inside, part.chances.shape[2]))

    return change


def _spans(
    scored: Scored, lost_at: Sequence[Array], total: float, known: KnownTexts
) -> Iterator[Span]:
    """The most expensive tokens in a row, no two of them with a token in common."""
    found: list[tuple[float, int, int]] = []
    for number, lost in enumerate(lost_at):
        size = min(SPAN, len(lost))
        sums = np.convolve(lost, np.ones(size), mode="valid")
        taken = np.zeros(len(lost), dtype=bool)
        for start in np.argsort(-sums, kind="stable")[: SPANS * SPAN].tolist():
            if not taken[start : start + size].any():
                taken[start : start + size] = True
                found.append((float(sums[start]), number, start))
    for costs, number, start in sorted(found, key=lambda each: (-each[0], each[1:]))[:SPANS]:
        text, lost = scored.texts[number], lost_at[number][start : start + SPAN]
        pieces = tuple(
            known.pieces.get(int(token), "") for token in text.tokens[start : start + SPAN]
        )
        yield Span(text.prompt_set, text.prompt, start, pieces, int(lost.argmax()), costs / total)


# ---- what a better or a cheaper draft is worth ---------------------------------------------------


def _worth(scored: Scored, alpha: float, judged: Array, rejected: Array) -> Iterator[Worth]:
    """Points of acceptance everywhere, then at one offset; none that would lead beyond 1."""
    price, plain_s = scored.setup.price_per_hour, scored.latency.rounds.baseline_s
    reached = np.flatnonzero(judged > 0.0)
    by_offset = (1.0 - rejected[reached] / judged[reached]).tolist()
    places = [(None, alpha), *zip(reached.tolist(), by_offset, strict=True)]
    for offset, now in places:
        for points in POINTS:
            if not now + points <= 1.0:
                continue
            by = points / (1.0 - now)
            change = raised_everywhere(by) if offset is None else raised_at(offset, by)
            speedups = scored.speedups(change, scored.ks)
            best = max(speedups, key=lambda k: (speedups[k], -k))
            cost = None
            if price is not None:
                cost = usd_per_million_tokens(plain_s / max(1.0, speedups[best]), price)
            yield Worth(
                points,
                None if offset is None else offset + 1,
                speedups[scored.name.k],
                best,
                speedups[best],
                cost,
            )


def _cheaper(scored: Scored) -> Iterator[CheaperDraft]:
    """A faster draft; one that reads fewer bytes, as far as its sizes are known."""
    if scored.draft_cost(scored.name.k) is None:
        return
    shares: dict[Cheaper, float] = {"faster": FASTER}
    shape = architecture(scored.setup.described_draft(scored.name.draft))
    if shape is not None:
        read = shape.weight_bytes_read()
        shares["half_vocabulary"] = (
            1.0
            - (
                shape.weight_bytes_read()
                - replace(shape, vocab=max(1, shape.vocab // 2)).weight_bytes_read()
            )
            / read
        )
        if shape.layers > 1:
            shares["layer_less"] = (
                replace(shape, layers=shape.layers - 1).weight_bytes_read() / read
            )
    for change, share in shares.items():
        speedups = scored.speedups(None, scored.ks, share)
        best = max(speedups, key=lambda k: (speedups[k], -k))
        yield CheaperDraft(change, share, speedups[scored.name.k], best, speedups[best])


def _map(scored: Scored, alpha: float) -> SpeedupMap:
    """Tokens per round at every alpha, and what a round costs."""
    ks = scored.ks
    rows: list[list[float]] = [[] for _ in ks]
    alphas = tuple(sorted({*ALPHAS, alpha}))
    for wanted in alphas:
        by = wanted / alpha - 1.0 if wanted < alpha else (wanted - alpha) / max(1.0 - alpha, 1e-9)
        replays = scored.replays(raised_everywhere(by), ks)
        for row, k in zip(rows, ks, strict=True):
            counts = replays.weighted(Candidate(scored.name.draft, k), scored.weights)
            row.append(counts.tokens_per_round)
    costs = [scored.draft_cost(k) for k in ks]
    known = [cost for cost in costs if cost is not None]
    return SpeedupMap(
        ks,
        alphas,
        tuple(map(tuple, rows)),
        tuple(scored.latency.rounds.relative(k) for k in ks),
        tuple(known) if len(known) == len(ks) else None,
    )


# ---- checkpoints of one head ---------------------------------------------------------------------


def checkpoint_groups(setup: Setup, drafts: Sequence[str]) -> dict[str, dict[int, str]]:
    """By head, its drafts by training step: at least LEAST_CHECKPOINTS, known by their ids.

    Raises:
        UserError: two of them are not of one head.
    """
    groups: dict[str, dict[int, str]] = {}
    for name in drafts:
        entry = setup.described_draft(name)
        place = str(entry.id or name).rstrip("/")
        found = CHECKPOINT.search(place) or CHECKPOINT.search(name)
        if found:
            head = (place if found.string == place else name)[: found.start()].rstrip("/-_ ")
            groups.setdefault(head, {})[int(found[1])] = name
    kept = {head: steps for head, steps in groups.items() if len(steps) >= LEAST_CHECKPOINTS}
    for steps in kept.values():
        first = setup.described_draft(next(iter(steps.values())))
        for name in steps.values():
            entry = setup.described_draft(name)
            for what in ("kind", "parameters", "layers", "layers_read"):
                one, other = getattr(first, what, None), getattr(entry, what, None)
                if one != other:
                    raise UserError(
                        f"losses: {first.name} and {name} are not checkpoints of one head: {what}"
                        f" {one} and {other}; give the steps of one head, or folders of other names"
                    )
    return kept


def training(
    ranking: Ranking, analysis: PairAnalysis, head: str, steps: Mapping[int, str]
) -> Training | None:
    """The served speedup by training step, all priced as the last one is; None where too few ran.

    Checkpoints of one head have one architecture, so what their rounds are measured to cost differs
    by chance alone.
    """
    best = {name.draft: name.k for name in ranking.best}
    ran = {step: name for step, name in sorted(steps.items()) if name in best}
    if len(ran) < LEAST_CHECKPOINTS:
        return None
    replays = ranking.replays
    last = ran[max(ran)]
    latency = analysis.latencies[replays.temperature][last]
    kept = {c: counts for c, counts in replays.candidates.items() if c.draft in ran.values()}
    part = replace(replays, candidates=kept)
    weights = analysis.setup.weights
    evidence = evidence_of(part, dict.fromkeys(ran.values(), latency))
    chosen = [
        max(
            (c for c in kept if c.draft == name),
            key=lambda c: (evidence.speedups(weights)[c], -c.k),
        )
        for name in ran.values()
    ]
    # One set of times: what visits say of it moves all checkpoints alike
    timed = {candidate: evidence.candidates[candidate] for candidate in chosen}
    workload = replace(evidence, candidates=timed, visit_costs={}).workload(weights)
    logs, intervals = workload.log_speedups(), workload.intervals()
    ratios, variance = workload.log_ratios(len(chosen) - 1)
    half = half_width(variance, CONFIDENCE) if enough_prompts(workload.prompt_sets) else None
    rows: list[Checkpoint] = []
    for n, (step, candidate) in enumerate(zip(ran, chosen, strict=True)):
        counts = replays.weighted(candidate, weights)
        bounds = (
            (None, None)
            if half is None
            else (
                float(np.exp(-ratios[n] - half[n])),
                float(np.exp(-ratios[n] + half[n])),
            )
        )
        rows.append(
            Checkpoint(
                replays.temperature,
                step,
                candidate.draft,
                candidate.k,
                counts.alpha,
                float(np.exp(logs[n])),
                intervals[n].lo if intervals else None,
                intervals[n].hi if intervals else None,
                float(np.exp(-ratios[n])),
                *bounds,
            )
        )
    return Training(
        PurePath(head).name, replays.temperature, tuple(rows), _enough(workload, [*ran])
    )


def _enough(workload: Workload, steps: Sequence[int]) -> int | None:
    """The first step that no later one is faster than beyond its interval; not the last."""
    if not enough_prompts(workload.prompt_sets):
        return None
    for n, step in enumerate(steps[:-1]):
        ratios, variance = workload.log_ratios(n)
        lower = ratios - half_width(variance, CONFIDENCE)
        if (lower[n + 1 :] <= 0.0).all():
            return step
    return None


# ---- two drafts on the same tokens ---------------------------------------------------------------


def compare(first: Scored, second: Scored, classes: Sequence[Labels]) -> Compared:
    """Two drafts on the same texts; the ratio of their speedups is taken prompt by prompt."""
    texts = first.texts
    chances = [_first_chances(each) for each in (first, second)]
    joined = [np.concatenate(each) for each in chances]
    weights = np.repeat(first.factors, [len(text.tokens) for text in texts])
    labels = np.concatenate(classes)
    rows = [_joint("all", weights, *joined)]
    for number, name in enumerate(CLASSES):
        inside = labels == number
        if inside.any():
            rows.append(_joint(name, weights * inside, *joined))
    draft = {each.name.draft: each.latency for each in (first, second)}
    replays = [each.replays() for each in (first, second)]
    both = replace(
        replays[0],
        candidates={**replays[0].candidates, **replays[1].candidates},
        lookups=replays[0].lookups | replays[1].lookups,
    )
    workload = evidence_of(both, draft).workload(first.weights)
    ratios, variance = workload.log_ratios(0)
    bounds: tuple[float | None, float | None] = (None, None)
    if enough_prompts(workload.prompt_sets):
        half = float(half_width(variance, CONFIDENCE)[1])
        bounds = float(np.exp(ratios[1] - half)), float(np.exp(ratios[1] + half))
    difference = _difference(first, chances[1], chances[0])
    router, share = _router(first, second)
    return Compared(
        texts[0].temperature,
        first.name.draft,
        second.name.draft,
        first.name.k,
        second.name.k,
        float(np.exp(ratios[1])),
        *bounds,
        *difference,
        tuple(rows),
        router,
        share,
    )


def _first_chances(scored: Scored) -> list[Array]:
    """Of each text, [n] the chance that a round from there has its first draft token accepted."""
    return [
        part.chances[row, :size, 0]
        for part in scored.parts
        for row, size in enumerate(part.lengths)
    ]


def _joint(name: str, weights: Array, first: Array, second: Array) -> JointRow:
    """Both drafts at tokens of these weights; drafts are drawn apart, given the text."""
    share = float(weights.sum())
    both, one, other = (
        float(weights @ each) / share
        for each in (first * second, first * (1.0 - second), second * (1.0 - first))
    )
    return JointRow(name, share, both, one, other, max(0.0, 1.0 - both - one - other))


def _difference(
    scored: Scored, second: Sequence[Array], first: Sequence[Array]
) -> tuple[float, float | None, float | None]:
    """Share of the tokens that the second accepts and the first does not, less the reverse.

    By prompt, as McNemar's test has it by pair: only what one of them alone accepts counts.
    """
    prompts = sorted({(text.prompt_set, text.conversation) for text in scored.texts})
    place = {name: row for row, name in enumerate(prompts)}
    sums = np.zeros((2, len(prompts)))
    for text, a, b in zip(scored.texts, first, second, strict=True):
        sums[:, place[text.prompt_set, text.conversation]] += float((b - a).sum()), len(a)
    sets = tuple(name for name, _ in prompts)
    estimate = workload_ratio(sums[0], sums[1], sets, scored.weights)
    interval = estimate.interval()
    return (estimate.value, interval and interval.lo, interval and interval.hi)


def _router(first: Scored, second: Scored) -> tuple[float | None, float | None]:
    """The speedup of the better of two drafts before every round, and the second's share of these.

    None where requests of a server cost a start besides their rounds.
    """
    if first.latency.served is not None or second.latency.served is not None:
        return None, None
    cost, rounds = 0.0, np.zeros(2)
    for one, other, at in zip(first.parts, second.parts, first.offsets, strict=True):
        factors = first.factors[at : at + len(one.lengths)]
        choices = [
            RoundChoice(
                part._replace(
                    chances=part.chances[:, :, : scored.name.k],
                    proposed=np.minimum(part.proposed, scored.name.k),
                ),
                scored.latency.relative(scored.name.k),
            )
            for scored, part in ((first, one), (second, other))
        ]
        costs, drafted = cheapest_rounds(choices)
        cost += float(factors @ costs)
        rounds += drafted @ factors
    return 1.0 / cost, float(rounds[1] / rounds.sum())


# ---- what a trainer logged, and what is accepted -------------------------------------------------

# Accuracy that the first draft token lacks, beyond what other texts may explain
LACKS = 0.1
# The part of the second token's accuracy that is lost besides the first one's
DROPS = 0.15
# Of an acceptance length, a part that is worth naming
DIFFERS = 0.05


def accuracy_gap(setup: Setup, log: TrainingLog, name: str | None) -> AccuracyGap:
    """A trainer's accuracies next to those of the same head on the run's greedy texts.

    Teacher-forced accuracies count every position, whatever the drafts before it were. A round
    begins where the last one ended, more often at tokens that are hard to draft, and goes on only
    where all before it was accepted. The steps from one to the other are taken one at a time: other
    texts and inputs, the drafts' dependence on each other, where rounds start.

    Args:
        setup: of an audition at temperature 0.
        log: of its head.
        name: of the head; None for the best one.

    Raises:
        UserError: the run has no such head at temperature 0.
    """
    analysis = Audition(setup) if setup.command == "audition" else PairAnalysis(setup)
    rankings = [r for r in analysis.own_rankings if r.replays.temperature == GREEDY]
    ranked = rankings[0].best if rankings else ()
    heads = [c for c in ranked if DRAFTS.get(setup.kind_of(c.draft), DRAFTS["model"]).reads_states]
    chosen = next((c for c in heads if name in (None, c.draft)), None)
    if chosen is None:
        known = ", ".join(c.draft for c in heads) or "none"
        raise UserError(
            f"training_log: {name or 'it'} is of no head that this run scored at temperature 0"
            f" (heads: {known}); give an audition of the head with temperature=[0]"
        )
    scored = Scored.of(analysis, rankings[0], chosen)
    k = min(len(log.accuracies), max(scored.ks))
    ends = [(part.chances[:, :, :k], factors, ends) for part, factors, ends in scored.endings(k)]
    starts, right, together, reached, judged, rejected = np.zeros((6, k))
    for (chances, factors, ended), part in zip(ends, scored.parts, strict=True):
        left = np.subtract.outer(part.lengths, np.arange(chances.shape[1]))
        inside = (np.greater.outer(left, np.arange(k)) & (part.proposed > 0)[:, :, None]) * factors
        before = np.cumprod(np.concatenate([np.ones_like(chances[:, :, :1]), chances], 2), 2)
        starts += inside.sum(axis=(0, 1))
        right += (inside * chances).sum(axis=(0, 1))
        reached += (inside * before[:, :, :-1]).sum(axis=(0, 1))
        together += (inside * before[:, :, 1:]).sum(axis=(0, 1))
        judged += (ended.judged * factors).sum(axis=(0, 1))
        rejected += (ended.rejected * factors).sum(axis=(0, 1))
    everywhere, given = right / starts, together / np.maximum(reached, 1e-300)
    in_rounds = 1.0 - rejected / np.maximum(judged, 1e-300)
    logged = np.array(log.accuracies[:k])
    lengths = [1.0 + float(np.cumprod(each).sum()) for each in (logged, everywhere, given)]
    counts = scored.replays(ks=[k]).weighted(Candidate(chosen.draft, k), scored.weights)
    gap = AccuracyGap(
        chosen.draft,
        log.framework,
        log.of,
        k,
        tuple(
            AccuracyRow(n + 1, *map(float, values))
            for n, values in enumerate(zip(logged, everywhere, given, in_rounds, strict=True))
        ),
        *lengths,
        counts.mean_acceptance_length,
        "none",
    )
    return replace(gap, cause=_cause(gap, logged, everywhere))


def _cause(gap: AccuracyGap, logged: Array, everywhere: Array) -> Cause:
    """The first that holds; what the head reads differently only a second scoring tells."""
    if logged[0] - everywhere[0] > LACKS:
        return "inputs"
    if gap.k > 1 and logged[1] > 0.0:
        kept = everywhere[1] / max(float(everywhere[0]), 1e-9)
        if 1.0 - kept / (logged[1] / logged[0]) > DROPS:
            return "own_states"
    if abs(gap.joint_length / gap.everywhere_length - 1.0) > DIFFERS:
        return "dependence"
    return "starts" if abs(gap.replayed_length / gap.joint_length - 1.0) > DIFFERS else "none"
