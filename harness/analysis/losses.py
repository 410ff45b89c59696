"""Where a draft loses rounds, what each kind of token costs, and what a better draft is worth.

Everything rests on replay with the stored scores. A round that ends at offset j although K tokens
could have been accepted costs (K - j) / (K + 1) of a round (`harness.theory.replay.Endings`): a sum
over places of the texts, so that the shares of any division of the tokens add up to 1.

"Accepted as well as the rest" raises the chances of a class C before they are replayed again: each
a becomes a + u (1 - a), with u = (alpha of the rest - alpha of C) / (1 - alpha of C), both alphas
being those of the run's own rounds. A draft that is better by d points has at every place the u
that brings alpha of its replayed rounds to alpha + d, or at one offset u = d / (1 - alpha) with
that offset's alpha. A worse one has a (1 - u). So nothing is assumed of how acceptance is spread
over a text, but that a better draft closes the same part of every gap.

A draft step that takes less time shortens a round by what its steps take of it. How much a smaller
output matrix, or one layer less, takes away is computed from the bytes that a step reads.

Of every draft the K of its ranking is taken; times, weights of the prompt sets and the acceptance
rule are the ranking's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Literal

import numpy as np

from harness.analysis.draft_pairs import Compared, compare
from harness.analysis.head_training import AccuracyGap, Training, checkpoint_groups, training
from harness.analysis.predicted import FIRST, length_bucket
from harness.analysis.scored import (
    Array,
    Change,
    Labels,
    Scored,
    of_texts,
    raised_at,
    raised_everywhere,
    raised_in,
)
from harness.analysis.setup import Setup, architecture
from harness.analysis.sweep_and_audition import Audition, PairAnalysis
from harness.analysis.token_classes import CLASSES, rare_tokens, token_classes
from harness.analysis.verdict import Candidate
from harness.records import Rule, TextKey, TextTrace, UserError
from harness.stats.jackknife import ZERO
from harness.storage.manifest import ModelEntry
from harness.theory.cost import usd_per_million_tokens
from harness.theory.replay import at_positions

Axis = Literal["offset", "token", "category", "answer", "context", "entropy"]
AXES: tuple[Axis, ...] = ("offset", "token", "category", "answer", "context", "entropy")
# Between the ranges of the target's entropy, nats
ENTROPIES = (0.01, 0.1, 0.5, 1.0, 2.0)
NOT_STORED, NOTHING = "not stored", "(nothing)"
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
    # The draft's most likely token there, in the round that loses most; NOTHING where it drafted
    # none, None where it is not stored
    drafted: str | None
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
CHEAPER: tuple[Cheaper, ...] = ("faster", "half_vocabulary", "layer_less")

# Why it is not known what a change brings: no step was timed, its sizes are not stored, one layer
Unknown = Literal["no_step", "no_sizes", "one_layer"]


@dataclass(frozen=True)
class CheaperDraft:
    """A draft that takes a part of its step's time and accepts as now."""

    change: Cheaper
    # Of today's step; None, as all that follows from it, with the reason `unknown`
    step_share: float | None = None
    speedup: float | None = None  # at today's K
    k: int | None = None  # the best one then
    best_speedup: float | None = None
    unknown: Unknown | None = None


@dataclass(frozen=True)
class SpeedupMap:
    """What a speedup follows from: `tokens_per_round / (round_cost + moved draft steps)`."""

    # ks, alphas: ascending
    ks: tuple[int, ...]
    alphas: tuple[float, ...]
    # [K][alpha], replayed with the chances raised or lowered to that alpha
    tokens_per_round: tuple[tuple[float, ...], ...]
    # [K][alpha] plain tokens that a round takes in the mean, those of look-ups that propose less
    # included, and a request's start where a server has one
    round_cost: tuple[tuple[float, ...], ...]
    # [K] of them, those that its draft steps take; None where no step was timed
    draft_cost: tuple[float, ...] | None

    def speedups(self, scale: float) -> Array:
        """[K, alpha] speedups where a draft step takes `scale` times today's time."""
        draft = np.array(self.draft_cost or [0.0] * len(self.ks))
        costs = np.array(self.round_cost) + draft[:, None] * (scale - 1.0)
        return np.array(self.tokens_per_round) / costs

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
    entropies_known: bool  # whether the target's entropy is stored of any token
    drafts: tuple[DraftLosses, ...]
    trainings: tuple[Training, ...]
    compared: tuple[Compared, ...]
    accuracy: AccuracyGap | None = None


@dataclass(frozen=True)
class KnownTexts:
    """What the tokenizer knows: the text of each id, and the ids of prompts by set and id."""

    pieces: Mapping[int, str]
    prompts: Mapping[tuple[str, str], tuple[int, ...]]


@dataclass(frozen=True)
class _Tokens:
    """What is known of the texts' tokens, by text."""

    classes: list[Labels]  # the place in CLASSES of each
    entropies: list[Array]  # of the target at each, NaN where that is not stored
    pieces: Mapping[int, str]  # the text of each id

    @property
    def entropies_known(self) -> bool:
        """Of any token."""
        return any(not np.isnan(each).all() for each in self.entropies)


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
    entropies_known = False
    for ranking in analysis.own_rankings:
        scored = [Scored.of(analysis, ranking, name) for name in ranking.best]
        texts = scored[0].texts if scored else ()
        classes = classes_of(texts, known)
        tokens = _Tokens(classes, _entropies(setup, texts), known.pieces)
        entropies_known |= tokens.entropies_known
        drafts += [losses_of_draft(each, tokens) for each in scored]
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
        len(analysis.own_rankings[0].replays.names),
        bool(known.prompts),
        entropies_known,
        tuple(drafts),
        tuple(trainings),
        tuple(compared),
    )


# ---- classes of the tokens -----------------------------------------------------------------------


def classes_of(texts: Sequence[TextTrace], known: KnownTexts) -> list[Labels]:
    """Of each text, [n] the place in CLASSES of each of its tokens."""
    rare = rare_tokens([text.tokens.tolist() for text in texts])
    place = {name: index for index, name in enumerate(CLASSES)}
    labels: list[Labels] = []
    for text in texts:
        prompt = known.prompts.get((text.prompt_set, text.prompt), ())
        names = token_classes(text.tokens.tolist(), known.pieces, prompt, rare)
        labels.append(np.array([place[name] for name in names], dtype=np.intp))
    return labels


def _entropies(setup: Setup, texts: Sequence[TextTrace]) -> list[Array]:
    """Of each text, [n] the target's entropy at each of its tokens, where the run stored it."""
    stored: dict[TextKey, tuple[float, ...]] = {
        trial.key: trial.entropies
        for trial in setup.run.trials
        if trial.k == 0 and trial.entropies is not None
    }
    return [np.array(stored.get(text.key, np.full(len(text.tokens), np.nan))) for text in texts]


def _labels(
    axis: Axis, texts: Sequence[TextTrace], tokens: _Tokens
) -> tuple[list[Labels], list[str]]:
    """Of each text [n] the part of an axis that each token is in, and the parts' names."""
    if axis == "token":
        return tokens.classes, list(CLASSES)
    if axis == "entropy":
        labels = [
            np.where(np.isnan(each), len(ENTROPIES) + 1, np.searchsorted(ENTROPIES, each, "right"))
            for each in tokens.entropies
        ]
        bounds = ["0", *(f"{value:g}" for value in ENTROPIES)]
        names = [f"{low} to {high}" for low, high in pairwise(bounds)]
        return labels, [*names, f"{bounds[-1]} and more", NOT_STORED]
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


@dataclass(frozen=True, eq=False)
class _Ended:
    """Where a draft's rounds end, weighted by what the texts count."""

    # [(judged, rejected, lost), offset] draft tokens, and rounds that are lost there
    by_offset: Array
    # The same three; of each text, [position]
    by_text: tuple[list[Array], list[Array], list[Array]]
    lost_from: list[Array]  # of each text, [start, offset] rounds that are lost

    @classmethod
    def of(cls, scored: Scored) -> "_Ended":
        """At its best K."""
        ended = cls(np.zeros((3, scored.name.k)), ([], [], []), [])
        for part, factors, ends in scored.endings(scored.name.k):
            counts = [each * factors for each in (ends.judged, ends.rejected, ends.lost_rounds)]
            ended.by_offset[:] += [each.sum(axis=(0, 1)) for each in counts]
            for texts, each in zip(ended.by_text, counts, strict=True):
                texts += of_texts(part, at_positions(each))
            ended.lost_from.extend(of_texts(part, counts[-1]))
        return ended

    @cached_property
    def lost(self) -> float:
        """Rounds that are lost; 1 where none is, so that every share of them is 0."""
        return float(self.by_offset[2].sum()) or 1.0


def losses_of_draft(scored: Scored, tokens: _Tokens) -> DraftLosses:
    """Everything on one draft at its best K."""
    k, ended = scored.name.k, _Ended.of(scored)
    judged, rejected, lost = ended.by_offset
    rounds = float(scored.replays().weighted(scored.name, scored.weights).rounds.sum())
    alpha = 1.0 - float(rejected.sum() / judged.sum()) if judged.sum() else None
    ceilings = scored.speedups(raised_everywhere(1.0), scored.ks)
    ceiling_k = _fastest(ceilings)
    return DraftLosses(
        temperature=scored.texts[0].temperature,
        draft=scored.name.draft,
        k=k,
        speedup=scored.speedups()[k],
        alpha=alpha,
        ceiling=ceilings[ceiling_k],
        ceiling_k=ceiling_k,
        lost_rounds=float(lost.sum()) / rounds,
        cut_rounds=(rounds - 1.0 / (k + 1) - float(lost.sum())) / rounds,
        rows=tuple(_rows(scored, ended, tokens)),
        spans=tuple(_spans(scored, ended, tokens.pieces)),
        worth=() if alpha is None else tuple(_worth(scored, alpha, judged, rejected)),
        cheaper=tuple(_cheaper(scored)),
        map=None if alpha is None else _map(scored, alpha),
    )


def _rows(scored: Scored, ended: _Ended, tokens: _Tokens) -> Iterator[LossRow]:
    """The parts of every axis, and what each loses."""
    every_judged, every_rejected = ended.by_offset[:2].sum(axis=1).tolist()
    base = scored.speedups()[scored.name.k]

    def row(
        axis: Axis, name: str, share: float, sums: Array, change: Callable[[float], Change]
    ) -> LossRow:
        judged, rejected, lost = sums.tolist()
        others, others_rejected = every_judged - judged, max(0.0, every_rejected - rejected)
        gain = None
        # All tokens may be in one part: what is left is then rounding
        if judged > 0.0 and others > ZERO and rejected / judged > others_rejected / others:
            closed = 1.0 - (others_rejected / others) / (rejected / judged)
            gain = scored.speedups(change(closed))[scored.name.k] / base
        alpha = 1.0 - rejected / judged if judged > 0.0 else None
        return LossRow(axis, name, float(share), judged, alpha, lost / ended.lost, gain)

    for offset, sums in enumerate(ended.by_offset.T):
        share = sums[0] / max(every_judged, 1e-300)
        yield row("offset", str(offset + 1), share, sums, partial(raised_at, offset))
    for axis in AXES[1:]:
        if axis == "entropy" and not tokens.entropies_known:
            continue
        labels, names = _labels(axis, scored.texts, tokens)
        counted = np.repeat(scored.factors, [len(each) for each in labels])
        values = [np.concatenate(each) for each in ended.by_text]
        shares, *by_part = (
            np.bincount(np.concatenate(labels), each, minlength=len(names))
            for each in (counted, *values)
        )
        for n, name in enumerate(names):
            if shares[n] > 0.0:
                sums = np.array([each[n] for each in by_part])
                yield row(axis, name, shares[n], sums, partial(raised_in, labels, n))


def _spans(scored: Scored, ended: _Ended, pieces: Mapping[int, str]) -> Iterator[Span]:
    """The most expensive tokens in a row, no two of them with a token in common."""
    found: list[tuple[float, int, int]] = []
    lost_at = ended.by_text[2]
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
        worst = int(lost.argmax())
        yield Span(
            text.prompt_set,
            text.prompt,
            start,
            tuple(pieces.get(int(token), "") for token in text.tokens[start : start + SPAN]),
            worst,
            _drafted(text, start + worst, ended.lost_from[number], pieces),
            costs / ended.lost,
        )


def _drafted(
    text: TextTrace, position: int, lost_from: Array, pieces: Mapping[int, str]
) -> str | None:
    """What the draft holds most likely at a position, from the start that loses most there."""
    if text.draft_token is None:
        return None
    place: tuple[int, ...] = (position,)
    if text.depth is not None:
        offsets = range(min(lost_from.shape[1], text.depth, position + 1))
        offset = max(offsets, key=lambda each: lost_from[position - each, each])
        place = (position - offset, offset)
    token = float(text.draft_token[place])
    return NOTHING if np.isnan(token) else pieces.get(int(token), "")


# ---- what a better or a cheaper draft is worth ---------------------------------------------------


def _fastest(speedups: Mapping[int, float]) -> int:
    """The K of the largest speedup; the smallest of equal ones."""
    return max(speedups, key=lambda k: (speedups[k], -k))


def _worth(scored: Scored, alpha: float, judged: Array, rejected: Array) -> Iterator[Worth]:
    """Points of acceptance everywhere, then at one offset; none that would lead beyond 1."""
    price, plain_s = scored.setup.price_per_hour, scored.plain_s
    reached = np.flatnonzero(judged > 0.0)
    by_offset = (1.0 - rejected[reached] / judged[reached]).tolist()
    places = [(None, alpha), *zip(reached.tolist(), by_offset, strict=True)]
    for offset, now in places:
        for points in POINTS:
            if not now + points <= 1.0:
                continue
            if offset is None:
                change = scored.raised_to(now + points)
            else:
                change = raised_at(offset, points / (1.0 - now))
            speedups = scored.speedups(change, scored.ks)
            best = _fastest(speedups)
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
    if scored.lookups:
        return
    timed = scored.draft_cost(scored.name.k) is not None
    sizes = _step_shares(scored.setup.described_draft(scored.name.draft))
    shares: dict[Cheaper, float | Unknown] = {"faster": FASTER, **sizes}
    for change in CHEAPER:
        share = shares.get(change, "no_sizes") if timed else "no_step"
        if isinstance(share, str):
            yield CheaperDraft(change, unknown=share)
            continue
        speedups = scored.speedups(None, scored.ks, share)
        best = _fastest(speedups)
        yield CheaperDraft(change, share, speedups[scored.name.k], best, speedups[best])


def _step_shares(entry: ModelEntry) -> dict[Cheaper, float | Unknown]:
    """Of a step's bytes, what is left of them with half the vocabulary, or one layer less."""
    shape = architecture(entry)
    if shape is not None:
        read = shape.weight_bytes_read()
        smaller = replace(shape, vocab=max(1, shape.vocab // 2)).weight_bytes_read()
        layers = shape.layers
        less = replace(shape, layers=layers - 1).weight_bytes_read() if layers > 1 else None
    elif entry.step_parameters is not None and entry.output_parameters is not None:
        read, layer = entry.step_parameters, entry.layer_parameters
        smaller = read - entry.output_parameters // 2
        less = None if layer is None else read - layer
    else:
        return {}
    return {
        "half_vocabulary": smaller / read,
        "layer_less": "one_layer" if less is None else less / read,
    }


def _map(scored: Scored, alpha: float) -> SpeedupMap:
    """Tokens per round at every alpha of the rounds at its K, and what a round costs."""
    ks, served = scored.ks, scored.ks.index(scored.name.k)
    names = [Candidate(scored.name.draft, k) for k in ks]
    worse = [wanted / alpha - 1.0 for wanted in ALPHAS if wanted < alpha] if alpha else []
    better = [(wanted - alpha) / (1.0 - alpha) for wanted in ALPHAS if wanted > alpha]
    reached: list[float] = []
    # [chances][K] tokens per round, and what a round costs
    replayed: list[list[tuple[float, float]]] = []
    for by in (-1.0, *worse, 0.0, *better):
        change = raised_everywhere(by)
        counts, speedups = scored.replays(change, ks), scored.speedups(change, ks)
        of_k = [counts.weighted(name, scored.weights) for name in names]
        reached.append(max([of_k[served].alpha, *reached]))
        tokens = [each.tokens_per_round for each in of_k]
        replayed.append([(n, n / speedups[k]) for n, k in zip(tokens, ks, strict=True)])
    alphas = tuple(sorted({*ALPHAS, alpha}))

    def at_alphas(column: int) -> tuple[tuple[float, ...], ...]:
        values = np.array(replayed)[:, :, column].T
        return tuple(tuple(np.interp(alphas, reached, row).tolist()) for row in values)

    costs = [scored.draft_cost(k) for k in ks]
    known = [cost for cost in costs if cost is not None]
    return SpeedupMap(
        ks, alphas, at_alphas(0), at_alphas(1), tuple(known) if len(known) == len(ks) else None
    )
