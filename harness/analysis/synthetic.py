"""Synthetic acceptance: the acceptance is given, so the speedup of a loop is known beforehand.

Acceptance is imposed per position, unconditionally: rate j is the share of rounds that keep at
least j tokens, as in vLLM's `synthetic_acceptance_rates`. Position j is then kept, given that all
before it were, with probability rate_j / rate_(j-1). With these chances the renewal recursion of
`harness.theory.replay` gives the expected rounds of a text of n tokens exactly, the cut of its last
round included, and step times turn rounds into seconds. A loop that needs longer than that spends
time that its steps do not explain.
"""

from collections.abc import Sequence

import numpy as np

from harness.theory.acceptance import conditional
from harness.theory.replay import replay


def expected_tokens_per_round(rates: Sequence[float], lengths: Sequence[int]) -> float:
    """Expected tokens per round on texts of these lengths, K = len(rates), all together.

    Args:
        rates: unconditional, per position.
        lengths: tokens of each text, each at least 1.
    """
    k, longest = len(rates), max(lengths)
    chances = np.broadcast_to(np.array(conditional(rates)), (len(lengths), longest, k))
    return sum(lengths) / float(replay(chances, lengths, [k])[k].rounds.sum())
