"""Replay: exact expectations at every K of every draft from one target generation, without a loop.

Speculative sampling emits x ~ target with any draft. Given the emitted text x, the flag "the draft
token at this drafted position was accepted" is Bernoulli(a), independent of the others:
1. by Bayes, a = P(accepted and emitted x_i) / target(x_i), and the rules differ only there:
   `ratio` min(1, draft(x_i) / target(x_i)), `exact_match` draft(x_i), `greedy_draft` x_i = argmax
   (`harness.theory.acceptance_rules.accept_probabilities`);
2. so from a start s the round accepts j < K and rejects with probability a_1 .. a_j (1 - a_j+1),
   and the next starts at s + j + 1; it accepts all K with a_1 .. a_K, and the next starts at
   s + K + 1;
3. V[s], the probability that a round starts at s, is the renewal recursion V[0] = 1,
   V[s + j + 1] += V[s] P(the round from s emits j + 1 tokens), and rounds = sum of V;
4. every other count is a sum over s of V[s] times the distribution of the round from s;
5. where r <= K text positions are left, accepting all r is a cut: neither rejection nor bonus;
6. where a drafter proposes only n < K tokens from s (an n-gram), K = n there: after n comes the
   bonus, and n = 0 is a plain step;
7. where a drafter stops after an unlikely token, K = n there as well, but after a rejected token it
   may have drafted more or fewer than n.
Assumptions: the text is drawn from the same target distribution (temperature, top-k, top-p) as in
`a`, rounds start afresh (no state carries over), and the draft sees only what was emitted.

Block verification (rule `block`) judges a round's tokens together, so its chance at a position
depends on where the round starts. Let P_i and Q_i be the target's and the draft's probability of
the round's tokens x_1 .. x_i, p_0 = 1 and p_i = min(1, p_i-1 target(x_i) / draft(x_i)):
8. given the drafted x_1 .. x_i, at least i are accepted with probability p_i. For the last drafted
   token this is the rule itself. Before it, more than i are accepted with E[p_i+1], the sum of
   min(p_i target, draft) = p_i - S_i, and otherwise i with h_i = S_i / (S_i + 1 - p_i): together
   p_i;
9. then the next token y is accepted with draft(y) p_i+1 = min(p_i target(y), draft(y)), or drawn
   from the residual max(0, p_i target(y) - draft(y)): together p_i target(y). So the next token has
   the target's distribution, given that at least i are accepted;
10. so P(at least i accepted | text) = Q_i p_i / P_i, for every K of at least i. By the recursion of
   p this is the smaller of Q_i-1 p_i-1 / P_i-1 and Q_i / P_i, thus min(1, min over k <= i of
   Q_k / P_k). The product of min(1, draft / target), as for `ratio`, is no larger. The chance at an
   offset, given that the round got there, is a ratio of two of these.

Thresholds (`p_min`): a round drafts no more after a token to which the draft gave less probability
than a threshold (the harness's loop; transformers' `assistant_confidence_threshold`), or no more
from that token on (llama.cpp's `--spec-draft-p-min`, `EngineSpec.drops_unlikely`). That depends
only on the drafted tokens, so the chances above hold unchanged:
11. while the drafted tokens are the text's, the number proposed from a start follows from the
   draft's probabilities of the text's tokens, as for a drafter that proposes n < K;
12. after a token that is not the text's, the drafter continues from its own text. The number of
   further tokens is measured by letting it draft on from there once
   (`harness.measurement.confidences`). With a drafter that samples, the rejected token is drawn
   from its distribution given the rejection, so that the count of one such draw is unbiased. A
   model's drafts depend only on the text before them, so one draw per position serves every start
   (`drafted_by_accepted`). A head drafts from its own output within a round, so a whole round from
   every start is drawn given the text.
So expected rounds are exact, and expected drafted tokens are exact at temperature 0 and unbiased
above it, for every threshold and K from one pass.

Note: the mean of `a` over the next token, the sum of min(target, draft) over the vocabulary, must
not be chained along a text in place of `a`, since after an acceptance the text is not
target-distributed.

Sources: Leviathan et al. 2023 and Chen et al. 2023 for the rule `ratio` and x ~ target; Sun et al.
2024 (arXiv 2403.10444) for block verification, its p_i, S_i and h_i.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from harness.records import UserError
from harness.theory.acceptance import check_k

Array = NDArray[np.float64]
Counts = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Replayed:
    """Expected counts of one K, per text; the names are those of a Trial."""

    k: int  # num_draft_tokens
    # new_tokens, rounds, drafted, accepted, rejected, bonus, cut: shape (texts,)
    new_tokens: Array
    rounds: Array
    drafted: Array
    accepted: Array
    rejected: Array
    bonus: Array
    cut: Array
    accepted_lengths: Array  # shape (texts, K + 1); entry j is the rounds that kept exactly j
    # Shape (texts, K + 1); entry n is the rounds that proposed n tokens. All are at K, except with
    # a drafter that may propose fewer; 0 proposed is a plain step, which counts as a bonus without
    # acceptances.
    proposals: Array

    @property
    def judged(self) -> Array:
        """Draft tokens accepted or rejected, the denominator of alpha, shape (texts,)."""
        return self.accepted + self.rejected

    @property
    def tokens_per_round(self) -> float:
        """Over all texts, new_tokens / rounds."""
        return float(self.new_tokens.sum() / self.rounds.sum())

    @property
    def mean_acceptance_length(self) -> float:
        """Over all texts, 1 + accepted / rounds."""
        return 1.0 + float(self.accepted.sum() / self.rounds.sum())

    @property
    def acceptance_rate(self) -> float:
        """Over all texts, accepted / drafted; NaN where nothing was drafted."""
        drafted = float(self.drafted.sum())
        return float(self.accepted.sum()) / drafted if drafted else float("nan")

    @property
    def alpha(self) -> float:
        """Over all texts, accepted / (accepted + rejected); NaN where nothing was judged."""
        judged = float(self.judged.sum())
        return float(self.accepted.sum()) / judged if judged else float("nan")

    def summed(self, groups: Sequence[int] | NDArray[np.integer], size: int) -> "Replayed":
        """The sums of the counts over groups of texts, such as the repetitions of one prompt.

        `groups` has the group of each text, (texts,), below `size`; a group without a text gets
        zeros.
        """
        into = np.asarray(groups, dtype=np.intp)

        def add(values: Array) -> Array:
            total = np.zeros((size, *values.shape[1:]))
            np.add.at(total, into, values)
            return total

        return Replayed(self.k, *map(add, _arrays(self)))

    def rows(self, keep: NDArray[np.bool_] | NDArray[np.intp]) -> "Replayed":
        return Replayed(self.k, *(values[keep] for values in _arrays(self)))

    def scaled(self, factors: Array) -> "Replayed":
        return Replayed(self.k, *((values.T * factors).T for values in _arrays(self)))


def _arrays(replayed: Replayed) -> list[Array]:
    """Every count, in the order of the fields."""
    return [getattr(replayed, field.name) for field in fields(Replayed)[1:]]


def stacked(parts: Sequence[Replayed]) -> Replayed:
    """The texts of several replays of one K, one after the other; at least one part."""
    columns = zip(*(_arrays(part) for part in parts), strict=True)
    return Replayed(parts[0].k, *(np.concatenate(column) for column in columns))


def by_start(accept_prob: ArrayLike, depth: int) -> Array:
    """The input of `replay` from chances by position, as those of an autoregressive draft are.

    Args:
        accept_prob: shape (texts, positions), with any padding.
        depth: number of offsets, the largest K.

    Returns:
        Shape (texts, positions, depth), read-only: entry [., s, i] is the chance at position s + i.
    """
    values = np.asarray(accept_prob, dtype=np.float64)
    texts, positions = values.shape
    padded = np.zeros((texts, positions + depth - 1))
    padded[:, :positions] = values
    row, step = padded.strides
    # Not sliding_window_view, which took most of this function's time
    windows = np.ndarray((texts, positions, depth), np.float64, padded, 0, (row, step, step))
    windows.flags.writeable = False
    return windows


def replay(
    accept_prob: ArrayLike,
    lengths: Sequence[int] | NDArray[np.integer],
    ks: Sequence[int],
    *,
    proposed: ArrayLike | None = None,
    drafted: ArrayLike | None = None,
) -> Mapping[int, Replayed]:
    """Expected counts of the speculative loop on given texts, for every K.

    Args:
        accept_prob: shape (texts, starts, offsets): the chance that a round from that start accepts
            at that offset, given the text and that it got there. `by_start` makes it from shape
            (texts, positions). Entries beyond a text's end are not read.
        lengths: tokens of each text, (texts,).
        ks: the K to replay, each at most the number of offsets.
        proposed: shape (texts, starts), tokens proposed from each start; at a smaller K the first K
            of them. None: K from every start.
        drafted: shape (texts, starts, offsets + 1), only with `proposed`: tokens that a drafter
            which stops early drafts in a round that accepts exactly 0, 1, ... tokens, with rejected
            ones and those beyond the text's end; at a smaller K the first K of them. None: a round
            proposes the same number of tokens however it ends.

    Returns:
        By K, per-text expectations.

    Raises:
        UserError: a K below 1 or beyond the offsets.
        ValueError: shapes that do not fit, or a chance outside [0, 1].
    """
    chances = np.asarray(accept_prob, dtype=np.float64)
    sizes = np.asarray(lengths, dtype=np.intp)
    if chances.ndim != 3 or sizes.shape != chances.shape[:1]:
        raise ValueError("accept_prob must be (texts, starts, offsets), lengths (texts,)")
    if sizes.max(initial=0) > chances.shape[1] or sizes.min(initial=1) < 1:
        raise ValueError("a text must have at least one token and no more than there are starts")
    counts = None if proposed is None else np.asarray(proposed, dtype=np.intp)
    if counts is not None and counts.shape != chances.shape[:2]:
        raise ValueError("proposed must be (texts, starts)")
    totals = None if drafted is None else np.asarray(drafted, dtype=np.intp)
    widened = (*chances.shape[:2], chances.shape[2] + 1)
    if totals is not None and (counts is None or totals.shape != widened):
        raise ValueError("drafted must be (texts, starts, offsets + 1), and needs proposed")
    results: dict[int, Replayed] = {}
    for k in ks:
        if check_k(k) > chances.shape[2]:
            raise UserError(f"k={k}: the traces reach {chances.shape[2]} draft positions; lower k")
        results[k] = _replay_one(chances, sizes, k, counts, totals)
    return results


class PaddedTexts(NamedTuple):
    """Texts of several lengths in padded arrays, as `replay` takes them."""

    chances: Array  # (texts, starts, K), 0 where nothing is drafted
    lengths: Counts  # (texts,)
    proposed: Counts  # (texts, starts), at most K


def padded_texts(
    chances: Sequence[Array], proposed: Sequence[Counts | None], k: int
) -> PaddedTexts:
    """Texts of several lengths in padded arrays.

    Args:
        chances: for each text, [start, offset] the chance that its token there is accepted if it is
            drafted; at least k offsets.
        proposed: for each text, [start] tokens drafted; entries beyond the text's end are not read.
            None: K from every start.
        k: the largest number of drafted tokens.
    """
    lengths = np.array([len(rows) for rows in chances], dtype=np.intp)
    padded = np.zeros((len(lengths), int(lengths.max()), k))
    drafts = np.full(padded.shape[:2], k, dtype=np.intp)
    for row, (size, most) in enumerate(zip(lengths, proposed, strict=True)):
        padded[row, :size] = chances[row][:, :k]
        if most is not None:
            drafts[row, :size] = np.minimum(most[:size], k)
    drafted = np.greater.outer(drafts, np.arange(k))
    return PaddedTexts(np.where(drafted, padded, 0.0), lengths, drafts)


def replay_texts(chances: Sequence[Array], proposed: Sequence[Counts], k: int) -> Replayed:
    """Replay texts of several lengths at one K, as an engine drafts them; see `padded_texts`."""
    texts = padded_texts(chances, proposed, k)
    return replay(texts.chances, texts.lengths, [k], proposed=texts.proposed)[k]


def rounds_variance(chances: Sequence[Array], proposed: Sequence[Counts], k: int) -> Array:
    """The variance of each text's rounds, given the text, (texts,); 0 where they are certain.

    With N[s] the rounds from a start s on, and L the tokens that the round from s emits,
    N[s] = 1 + N[s + L]. So, from the text's end backwards, with 0 beyond it,
    E N[s] = 1 + sum over L of P(L) E N[s + L], and
    E N[s]^2 = 1 + 2 sum of P(L) E N[s + L] + sum of P(L) E N[s + L]^2.
    The arguments are those of `padded_texts`.
    """
    padded = padded_texts(chances, proposed, k)
    left = _positions_left(padded.lengths, padded.chances)
    emits = _emits(_reached(padded.chances, _drafted_in_text(left, padded.proposed, k)))
    texts, positions = left.shape
    mean, square = np.zeros((2, texts, positions + k + 1))
    for s in range(positions - 1, -1, -1):
        later = slice(s + 1, s + k + 2)
        mean_later = (emits[:, s] * mean[:, later]).sum(axis=1)
        square_later = (emits[:, s] * square[:, later]).sum(axis=1)
        mean[:, s] = np.where(left[:, s] > 0, 1.0 + mean_later, 0.0)
        square[:, s] = np.where(left[:, s] > 0, 1.0 + 2.0 * mean_later + square_later, 0.0)
    variance = square[:, 0] - mean[:, 0] ** 2
    # A smaller value is only the rounding of the difference of two squares
    return np.where(variance > 1e-9 * square[:, 0], variance, 0.0)


def _positions_left(lengths: Counts, chances: Array) -> Counts:
    """The text positions left from each start, (texts, starts); at most 0 beyond the end."""
    return np.subtract.outer(lengths, np.arange(int(chances.shape[1]))).astype(np.intp)


def _drafted_in_text(left: Counts, drafts: Counts, k: int) -> NDArray[np.bool_]:
    """True at each offset from each start where the text has a position and drafts it."""
    in_text = np.greater.outer(left, np.arange(k))
    return np.logical_and(in_text, np.greater.outer(drafts, np.arange(k)))


def _reached(chances: Array, exists: NDArray[np.bool_]) -> Array:
    """reach[., s, j]: the chance to accept at least j from s; 0 beyond the text."""
    products = np.multiply.accumulate(np.where(exists, chances, 0.0), axis=2)
    return np.concatenate([np.ones((*exists.shape[:2], 1)), products], axis=2)


def _emits(reach: Array) -> Array:
    """P(a round from s emits j + 1 tokens): it stops after exactly j < K, or accepts all K."""
    return reach - np.concatenate([reach[:, :, 1:], np.zeros_like(reach[:, :, :1])], axis=2)


def _replay_one(
    chances: Array, lengths: Counts, k: int, proposed: Counts | None, drafted: Counts | None
) -> Replayed:
    """The counts of one K: the chance of every round length, the renewal recursion, the sums."""
    left = _positions_left(lengths, chances)
    drafts = np.full_like(left, k) if proposed is None else np.clip(proposed, 0, k)
    exists = _drafted_in_text(left, drafts, k)
    chances = chances[:, :, :k]
    if not ((chances >= 0.0) & (chances <= 1.0 + 1e-12))[exists].all():
        raise ValueError("accept_prob must lie between 0 and 1")
    reach = _reached(chances, exists)
    starts = _renewal(reach, left, k)
    kept = starts[:, :, None] * reach
    most = np.clip(left, 0, k).astype(np.intp)[:, :, np.newaxis]
    cut_at = np.where(left <= drafts, np.take_along_axis(kept, most, axis=2)[..., 0], 0.0)
    at_least, cut = kept.sum(axis=1), cut_at.sum(axis=1)
    tokens = lengths.astype(np.float64)
    accepted = at_least[:, 1:].sum(axis=1)
    # Every round that is not cut emits one token beyond the accepted ones.
    rounds = tokens - accepted + cut
    at_least[:, 0] = rounds
    nothing = np.zeros((len(tokens), 1))
    rejected = np.where(exists, kept[:, :, :k], 0.0).sum(axis=(1, 2)) - accepted
    if proposed is None:
        proposals = np.zeros((len(tokens), k + 1))
        proposals[:, k] = rounds
    elif drafted is not None:
        # Entry j: rounds that accept exactly j, and end by a rejection, the text's end or a bonus
        exactly = _emits(kept)
        totals = np.clip(drafted[:, :, : k + 1], 0, k)
        by_count = [(exactly * (totals == n)).sum(axis=(1, 2)) for n in range(k + 1)]
        proposals = np.stack(by_count, axis=1)
    else:
        proposals = np.stack([(starts * (drafts == n)).sum(axis=1) for n in range(k + 1)], axis=1)
    return Replayed(
        k=k,
        new_tokens=tokens,
        rounds=rounds,
        drafted=proposals @ np.arange(k + 1.0),
        accepted=accepted,
        rejected=rejected,
        bonus=rounds - rejected - cut,
        cut=cut,
        accepted_lengths=at_least - np.concatenate([at_least[:, 1:], nothing], axis=1),
        proposals=proposals,
    )


def _renewal(reach: Array, left: Counts, k: int) -> Array:
    """V: the chance that a round starts at each position, shape (texts, starts)."""
    texts, positions = left.shape
    starts = np.zeros((texts, positions + k + 1))
    starts[:, 0] = 1.0
    emits = _emits(reach)
    for s in range(positions):
        starts[:, s] *= left[:, s] > 0
        starts[:, s + 1 : s + k + 2] += starts[:, s, None] * emits[:, s]
    return starts[:, :positions]


def until_unlikely(confidence: ArrayLike, threshold: float, *, dropped: bool = False) -> Counts:
    """The tokens drafted along the last axis: up to and including the first below the threshold.

    `confidence` is (..., K), the draft's probabilities; NaN, as beyond a text's end, does not stop.
    With `dropped` the token below the threshold is not proposed.
    """
    values = np.asarray(confidence, dtype=np.float64)
    unsure = values < threshold
    first = np.asarray(np.argmax(unsure, axis=-1), dtype=np.intp)
    last = first if dropped else first + 1
    return np.where(unsure.any(axis=-1), last, np.intp(values.shape[-1]))


def drafted_by_accepted(along: Counts, off_text: Counts, k: int) -> Counts:
    """The tokens drafted in a round from each start that accepts exactly 0..K.

    Args:
        along: (texts, starts) tokens drafted where all of them are the text's.
        off_text: (texts, starts + 1) tokens drafted from a position at which the draft leaves the
            text, with the first one; the entry at a text's length is of tokens beyond its end.
        k: the largest number of drafted tokens.

    Returns:
        Shape (texts, starts, K + 1).
    """
    offsets = np.arange(k + 1)
    at = np.minimum(np.add.outer(np.arange(int(along.shape[1])), offsets), off_text.shape[1] - 1)
    stopped = offsets >= along[:, :, None]
    return np.where(stopped, along[:, :, None], np.minimum(k, offsets + off_text[:, at]))
