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
"""

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
