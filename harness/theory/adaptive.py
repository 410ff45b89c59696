"""Adaptive drafting by replay: a round that drafts no more after an unlikely token.

The drafter stops after a token to which it gave less probability than a threshold
(`decode.stop=threshold`; transformers' `assistant_confidence_threshold`). That depends on what was
drafted alone, so the accept probabilities of `harness.theory.replay` hold as they are:
1. while the drafted tokens are the text's, the number proposed from a start is known from the
   probabilities of the text's tokens; it is that of a drafter which proposes n < K;
2. after a token that is not the text's, the drafter goes on from its own text. How far is found by
   letting it draft on from there once (`harness.measurement.confidences`); of a drafter that draws,
   the rejected token is drawn from its distribution given the rejection, so that the count of one
   such draw is unbiased. What a model drafts depends on the text before alone, so one draw per
   position serves every start (`drafted_by_accepted`). Of a head, which drafts from its own output
   within a round, a whole round from every start is drawn given the text.
So expected rounds are exact, and expected drafted tokens are exact at temperature 0 and unbiased
above it, for every threshold and K from one pass.

Two oracles, given what rounds cost:
- `flag_oracle` knows which draft tokens will be accepted, and drafts no token that will not: the
  bound that no rule for the number of draft tokens can beat;
- `best_k_per_round` knows the accept probabilities along the text, and chooses the number for each
  start before anything is drafted. It bounds the rules that choose before they draft. Above
  temperature 0 it does not bound those that look at drafted tokens, as a threshold does: a drawn
  token's own probability tells whether it is the text's, which the accept probability does not.
At temperature 0 the two are one, since every probability is 0 or 1.

Both minimise the expected cost by dynamic programming backwards from the text's end.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Counts = NDArray[np.intp]


def until_unlikely(confidence: ArrayLike, threshold: float) -> Counts:
    """Tokens drafted along the last axis: up to the first below the threshold, that one included.

    `confidence` is (..., K), the draft's probabilities; NaN, as beyond a text's end, stops nothing.
    """
    values = np.asarray(confidence, dtype=np.float64)
    unsure = values < threshold
    first = np.asarray(np.argmax(unsure, axis=-1), dtype=np.intp)
    return np.where(unsure.any(axis=-1), first + 1, np.intp(values.shape[-1]))


def drafted_by_accepted(along: Counts, off_text: Counts, k: int) -> Counts:
    """Tokens drafted in a round from each start that accepts exactly 0..K, (texts, starts, K + 1).

    Args:
        along: (texts, starts) tokens drafted where all of them are the text's.
        off_text: (texts, starts + 1) tokens drafted from a position on where the draft leaves the
            text, the first included; the entry at a text's length is of what lies beyond its end.
    """
    offsets = np.arange(k + 1)
    at = np.minimum(np.add.outer(np.arange(int(along.shape[1])), offsets), off_text.shape[1] - 1)
    stopped = offsets >= along[:, :, None]
    return np.where(stopped, along[:, :, None], np.minimum(k, offsets + off_text[:, at]))


def best_k_per_round(
    accept_prob: ArrayLike, lengths: Sequence[int] | Counts, cost: ArrayLike
) -> Array:
    """Least expected cost of each text where every start has the number of drafts that suits it.

    (texts,), in the unit of `cost`, which is (K + 1,): of a round that proposes n tokens, n = 0
    being a plain token. `accept_prob` and `lengths` are as `replay` takes them.
    """
    return _least_costs(accept_prob, lengths, cost, flags=False)


def flag_oracle(accept_prob: ArrayLike, lengths: Sequence[int] | Counts, cost: ArrayLike) -> Array:
    """Least expected cost of each text where it is known what will be accepted; as above."""
    return _least_costs(accept_prob, lengths, cost, flags=True)


def _least_costs(
    accept_prob: ArrayLike, lengths: Sequence[int] | Counts, cost: ArrayLike, *, flags: bool
) -> Array:
    chances, costs = np.asarray(accept_prob, dtype=np.float64), np.asarray(cost, dtype=np.float64)
    texts = zip(chances, lengths, strict=True)
    return np.array([_least_cost(text[:length], costs, flags=flags) for text, length in texts])


def _least_cost(chances: Array, prices: Array, *, flags: bool) -> float:
    """Dynamic programming from the end: the least expected cost of what follows each start.

    A round from s that accepts j of n < the positions left goes on at s + j + 1. Where times were
    measured, a round of more drafts may cost less.
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
