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
"""

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
