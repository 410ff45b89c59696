"""Adaptive drafting by replay: a round that drafts no more after an unlikely token.

The drafter stops after a token to which it gave less probability than a threshold
(`decode.stop=threshold`; transformers' `assistant_confidence_threshold`). That depends only on the
drafted tokens, so the accept probabilities of `harness.theory.replay` hold unchanged:
1. while the drafted tokens are the text's, the number proposed from a start follows from the
   draft's probabilities of the text's tokens, as for a drafter that proposes n < K;
2. after a token that is not the text's, the drafter continues from its own text. The number of
   further tokens is measured by letting it draft on from there once
   (`harness.measurement.confidences`). With a drafter that samples, the rejected token is drawn
   from its distribution given the rejection, so that the count of one such draw is unbiased. A
   model's drafts depend only on the text before them, so one draw per position serves every start
   (`drafted_by_accepted`). A head drafts from its own output within a round, so a whole round from
   every start is drawn given the text.
So expected rounds are exact, and expected drafted tokens are exact at temperature 0 and unbiased
above it, for every threshold and K from one pass.

Two oracles, given the costs of rounds:
- `flag_oracle` knows which draft tokens will be accepted, and drafts no other token: no rule for
  the number of draft tokens is faster;
- `best_k_per_round` knows the accept probabilities along the text, and chooses the number for each
  start before drafting. No rule that chooses before it drafts is faster. Above temperature 0 a rule
  that looks at drafted tokens, as a threshold does, may be faster: a sampled token's own
  probability tells something on whether it is the text's, which the accept probability does not.
At temperature 0 both oracles are the same, since every probability is 0 or 1.

Both minimise the expected cost by dynamic programming backwards from the text's end.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Counts = NDArray[np.intp]


def until_unlikely(confidence: ArrayLike, threshold: float) -> Counts:
    """The tokens drafted along the last axis: up to and including the first below the threshold.

    `confidence` is (..., K), the draft's probabilities; NaN, as beyond a text's end, does not stop.
    """
    values = np.asarray(confidence, dtype=np.float64)
    unsure = values < threshold
    first = np.asarray(np.argmax(unsure, axis=-1), dtype=np.intp)
    return np.where(unsure.any(axis=-1), first + 1, np.intp(values.shape[-1]))


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


def best_k_per_round(
    accept_prob: ArrayLike, lengths: Sequence[int] | Counts, cost: ArrayLike
) -> Array:
    """The least expected cost of each text, with the best number of drafts at every start.

    Shape (texts,), in the unit of `cost`, which is (K + 1,): the cost of a round that proposes n
    tokens; n = 0 is a plain token. `accept_prob` and `lengths` are as in `replay`.
    """
    return _least_costs(accept_prob, lengths, cost, flags=False)


def flag_oracle(accept_prob: ArrayLike, lengths: Sequence[int] | Counts, cost: ArrayLike) -> Array:
    """The least expected cost of each text where accepted tokens are known; as above."""
    return _least_costs(accept_prob, lengths, cost, flags=True)


def _least_costs(
    accept_prob: ArrayLike, lengths: Sequence[int] | Counts, cost: ArrayLike, *, flags: bool
) -> Array:
    chances, costs = np.asarray(accept_prob, dtype=np.float64), np.asarray(cost, dtype=np.float64)
    texts = zip(chances, lengths, strict=True)
    return np.array([_least_cost(text[:length], costs, flags=flags) for text, length in texts])


def _least_cost(chances: Array, prices: Array, *, flags: bool) -> float:
    """The least expected cost of a text, by dynamic programming from its end.

    A round from s that accepts j of n < the positions left is followed by one from s + j + 1. With
    measured times a round of more drafts may cost less than one of fewer.
    """
    length, k = len(chances), len(prices) - 1
    at_least = np.minimum.accumulate(prices[::-1])[::-1]
    after = np.zeros(length + 2)
    for s in range(length - 1, -1, -1):
        # exactly[j], j < K: accepts j and would reject the next; the last entry: accepts all K
        most = min(k, length - s)
        price = np.append(prices[:most], at_least[most])  # the last may be beyond the text's end
        reach = np.concatenate([[1.0], np.cumprod(chances[s, :most])])
        following = after[s + 1 : s + most + 2]
        if flags:
            exactly = reach - np.append(reach[1:], 0.0)
            # Of the drafts that stand, as many as pay (running minimum over n), or all of them
            fewer = np.minimum.accumulate(price + following)
            best = np.minimum(fewer, at_least[: most + 1] + following)
            after[s] = float(exactly @ best)
            continue
        stops = (reach[:-1] - reach[1:]) * following[:-1]
        until = np.concatenate([[0.0], np.cumsum(stops)])
        after[s] = float((price + until + reach * following).min())
    return float(after[0])
