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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from harness.analysis.draft_pairs import Compared, compare
from harness.analysis.head_training import AccuracyGap, Training, checkpoint_groups, training
from harness.analysis.lengths import FIRST, length_bucket
from harness.analysis.scored import (
    Array,
    Change,
    Labels,
    Scored,
    raised_at,
    raised_everywhere,
    raised_in,
)
from harness.analysis.setup import Setup, architecture
from harness.analysis.sweep_and_audition import Audition, PairAnalysis
from harness.analysis.token_classes import CLASSES, rare_tokens, token_classes
from harness.analysis.verdict import Candidate
from harness.records import Rule, TextTrace, UserError
from harness.theory.cost import usd_per_million_tokens
from harness.theory.replay import at_positions

Axis = Literal["offset", "token", "category", "answer", "context"]
AXES: tuple[Axis, ...] = ("offset", "token", "category", "answer", "context")
# Tokens of a span, and how many spans are named
SPAN, SPANS = 8, 10
POINTS = (0.01, 0.05, 0.1)
# Of the map: alphas, and how many times today's time a draft step takes
ALPHAS = tuple(round(0.05 * n, 2) for n in range(2, 21))
SCALES = tuple(round(0.1 * n, 1) for n in range(1, 21))
FASTER = 0.8


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
    before = [text.prompt_tokens if axis == "context" else 0 for text in texts]
    labels = [
        length_bucket(np.arange(len(text.tokens), dtype=np.float64) + more).astype(np.intp)
        for text, more in zip(texts, before, strict=True)
    ]
    number = max(int(each.max()) for each in labels) + 1
    names = [f"{FIRST << (n - 1) if n else 0} to {(FIRST << n) - 1}" for n in range(number)]
    return labels, names


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
        smaller = replace(shape, vocab=max(1, shape.vocab // 2))
        shares["half_vocabulary"] = smaller.weight_bytes_read() / read
        if shape.layers > 1:
            shallower = replace(shape, layers=shape.layers - 1)
            shares["layer_less"] = shallower.weight_bytes_read() / read
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
