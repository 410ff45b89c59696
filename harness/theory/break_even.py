"""Break-even: the acceptance at which speculative decoding is as fast as plain decoding.

A round of K draft tokens that costs R(K) / R(0) plain tokens breaks even where it emits as many. In
the iid model that is one alpha, the root of E[tokens per round](alpha) = R(K) / R(0), which
`acceptance.alpha_from_tokens_per_round` solves. What a round costs: `speedup.RoundTimes`.
"""

from harness.theory.acceptance import alpha_from_tokens_per_round


def break_even_alpha(cost: float, k: int) -> float | None:
    """The iid alpha at which a round of k draft tokens breaks even.

    Args:
        cost: R(k) / R(0), what such a round costs in plain tokens.
        k: num_draft_tokens.

    Returns:
        0.0 where even alpha = 0 does not lose; None where even alpha = 1 loses.
    """
    if cost <= 1.0:
        return 0.0
    return None if cost > k + 1 else alpha_from_tokens_per_round(cost, k)
