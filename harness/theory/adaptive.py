"""Adaptive drafting by replay: a round that drafts no more after an unlikely token.

The drafter stops after a token to which it gave less probability than a threshold
(`decode.stop=threshold`; transformers' `assistant_confidence_threshold`). That depends on what was
drafted alone, so the accept probabilities of `harness.theory.replay` hold as they are:
1. while the drafted tokens are the text's, the number proposed from a start is known from the
   probabilities of the text's tokens; it is that of a drafter which proposes n < K (`along_text`);
2. after a token that is not the text's, the drafter goes on from its own text. How far is found by
   letting it draft on from there once (`harness.measurement.confidences`); of a drafter that draws,
   the rejected token is drawn from its distribution given the rejection, so that the count of one
   such draw is unbiased (`off_text`).
So expected rounds are exact, and expected drafted tokens are exact at temperature 0 and unbiased
above it, for every threshold and K from one pass.

Two bounds that no rule for the number of draft tokens can beat, given what rounds cost:
- `best_k_per_round`: knows the accept probabilities along the text, and chooses the number for each
  start before the draws;
- `flag_oracle`: knows which draft tokens will be accepted, and drafts no token that will not.
At temperature 0 the two are one, since every probability is 0 or 1.

To fixed K and thresholds these bounds compare as optimal policies: both minimise the expected cost
by dynamic programming backwards from the text's end.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Counts = NDArray[np.intp]


def along_text(confidence: ArrayLike, lengths: Sequence[int], threshold: float, k: int) -> Counts:
    """Tokens proposed from each start where all of them are the text's, (texts, starts).

    Args:
        confidence: (texts, positions) the draft's probability of the text's token, padded.
        lengths: tokens of each text; drafting does not stop beyond a text's end.
        threshold: drafting stops after a token below it.
        k: the most that are proposed.
    """
    values = np.asarray(confidence, dtype=np.float64)
    beyond = np.greater_equal.outer(np.arange(int(values.shape[1])), np.asarray(lengths)).T
    values = np.pad(np.where(beyond, np.inf, values), ((0, 0), (0, k - 1)), constant_values=np.inf)
    return _count(np.lib.stride_tricks.sliding_window_view(values, k, axis=1), threshold)


def off_text(confidence: ArrayLike, threshold: float) -> Counts:
    """Tokens drafted from a position on where the draft leaves the text, the first included.

    Args:
        confidence: (..., K) the draft's probabilities of what it drafts from there; NaN where it
            never leaves the text.
        threshold: drafting stops after a token below it.
    """
    return _count(np.asarray(confidence, dtype=np.float64), threshold)


def _count(confidence: Array, threshold: float) -> Counts:
    """How many tokens are drafted along the last axis: up to the first below the threshold."""
    unsure = confidence < threshold
    most = confidence.shape[-1]
    first = np.asarray(np.argmax(unsure, axis=-1), dtype=np.intp)
    return np.where(unsure.any(axis=-1), first + 1, np.intp(most))


def best_k_per_round(accept_prob: ArrayLike, lengths: Sequence[int], cost: ArrayLike) -> Array:
    """Least expected cost of each text where every start has the number of drafts that suits it.

    Args:
        accept_prob: (texts, starts, K), as `replay` takes it.
        lengths: tokens of each text.
        cost: (K + 1,) of a round that proposes n tokens, n = 0 being a plain token.

    Returns:
        (texts,) in the unit of `cost`.
    """
    chances, price = np.asarray(accept_prob, dtype=np.float64), np.asarray(cost, dtype=np.float64)
    return np.array(
        [
            _least_cost(text[:length], price, flags=False)
            for text, length in zip(chances, lengths, strict=True)
        ]
    )


def flag_oracle(accept_prob: ArrayLike, lengths: Sequence[int], cost: ArrayLike) -> Array:
    """Least expected cost of each text where it is known what will be accepted; as above."""
    chances, price = np.asarray(accept_prob, dtype=np.float64), np.asarray(cost, dtype=np.float64)
    return np.array(
        [
            _least_cost(text[:length], price, flags=True)
            for text, length in zip(chances, lengths, strict=True)
        ]
    )


def _least_cost(chances: Array, price: Array, *, flags: bool) -> float:
    """Dynamic programming from the end: the least expected cost of what follows each start.

    A round from s that accepts j of n < the positions left goes on at s + j + 1.
    """
    length, k = len(chances), len(price) - 1
    after = np.zeros(length + 2)
    for s in range(length - 1, -1, -1):
        # exactly[j], j < K: accepts j and would reject the next; the last entry: accepts all K
        most = min(k, length - s)
        reach = np.concatenate([[1.0], np.cumprod(chances[s, :most])])
        following = after[s + 1 : s + most + 2]
        if flags:
            exactly = reach - np.append(reach[1:], 0.0)
            # Of the drafts that stand, as many as pay; running minimum over n
            best = np.minimum.accumulate(price[: most + 1] + following)
            after[s] = float(exactly @ best)
            continue
        stops = (reach[:-1] - reach[1:]) * following[:-1]
        until = np.concatenate([[0.0], np.cumsum(stops)])
        after[s] = float((price[: most + 1] + until + reach * following).min())
    return float(after[0])
