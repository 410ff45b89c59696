"""The forms of acceptance, and conversions between them.

`alpha` is the probability that a draft token is accepted, given that all before it in its round
were; the iid model takes it as one number for every position. `acceptance_rate` is accepted /
drafted and falls with K by construction: at alpha 0.6 and K = 4 it is 0.33.
`acceptance_by_position` lists, for j = 1..K, the share of rounds that accept at least j tokens
(unconditional). The parameters of each function name the form that it takes; impossible numbers
raise a UserError.

Source: Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding"
(ICML 2023), cited as LKM.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from scipy.optimize import brentq

from harness.records import UserError


def check_k(k: int) -> int:
    try:
        number = math.nan if isinstance(k, bool) else float(k)
    except (TypeError, ValueError):
        number = math.nan
    if not number.is_integer() or number < 1:
        raise UserError(f"k={k}: must be a whole number of draft tokens, 1 or more")
    return int(number)


def check_share(name: str, value: float) -> float:
    """A probability or rate as a float, or a UserError (NaN included)."""
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = math.nan
    if not 0.0 <= share <= 1.0:
        raise UserError(f"{name}={value}: must be a number between 0 and 1")
    return share


def expected_tokens_per_round(alpha: float, k: int) -> float:
    """Tokens a round emits under the iid model: (1 - alpha^(K+1)) / (1 - alpha), K+1 at alpha = 1.

    Source: LKM eq. 1.
    """
    k, alpha = check_k(k), check_share("alpha", alpha)
    if alpha == 1.0:
        return float(k + 1)
    if alpha == 0.0:
        return 1.0
    # 1 - alpha^(K+1) loses every digit next to alpha = 1; expm1 and log1p keep them.
    log_alpha = math.log1p(alpha - 1.0) if alpha > 0.5 else math.log(alpha)
    return -math.expm1((k + 1) * log_alpha) / (1.0 - alpha)


def alpha_from_tokens_per_round(tokens_per_round: float, k: int) -> float:
    """The alpha at which the iid model emits this many tokens per round: LKM eq. 1 inverted."""
    k = check_k(k)
    if not 1.0 <= tokens_per_round <= k + 1:
        raise UserError(f"tokens_per_round={tokens_per_round}: must lie between 1 and {k + 1}, K+1")

    def excess(alpha: float) -> float:
        return expected_tokens_per_round(alpha, k) - tokens_per_round

    return brentq(excess, 0.0, 1.0, xtol=1e-14)


def acceptance_rate_from_alpha(alpha: float, k: int) -> float:
    """Share of drafted tokens accepted under the iid model, (E[tokens per round] - 1) / K."""
    return (expected_tokens_per_round(alpha, k) - 1.0) / k


def alpha_from_acceptance_rate(acceptance_rate: float, k: int) -> float:
    """The alpha whose iid acceptance_rate at K is this one: the inverse of the function above."""
    k = check_k(k)
    return alpha_from_tokens_per_round(1.0 + k * check_share("acceptance_rate", acceptance_rate), k)


def accepted_over_emitted(tokens_per_round: float) -> float:
    """Another published rate: accepted / emitted = 1 - 1 / tokens_per_round, with no round cut."""
    if not (math.isfinite(tokens_per_round) and tokens_per_round >= 1.0):
        raise UserError(f"tokens_per_round={tokens_per_round}: must be finite and 1 or more")
    return 1.0 - 1.0 / tokens_per_round


def _positions(acceptance_by_position: Sequence[float]) -> list[float]:
    """A checked acceptance_by_position: not empty, each in [0, 1], non-increasing.

    Entry j - 1 is the share of rounds that accept at least j tokens.
    """
    rates = [check_share("acceptance_by_position", value) for value in acceptance_by_position]
    if not rates:
        raise UserError("acceptance_by_position=[]: give one rate per draft position")
    for before, after in pairwise(rates):
        if after > before + 1e-9:
            raise UserError(
                f"acceptance_by_position: {after} follows {before}; the rates are unconditional,"
                " so none may exceed the one before it"
            )
    return rates


def mean_acceptance_length_from_positions(acceptance_by_position: Sequence[float]) -> float:
    """1 + accepted / rounds, as the sum of the unconditional rates plus 1."""
    return 1.0 + math.fsum(_positions(acceptance_by_position))


def acceptance_rate_from_positions(acceptance_by_position: Sequence[float]) -> float:
    """The acceptance_rate, accepted / drafted, as the mean of the unconditional rates."""
    rates = _positions(acceptance_by_position)
    return math.fsum(rates) / len(rates)


def alpha_from_positions(acceptance_by_position: Sequence[float]) -> float:
    """The alpha, accepted / (accepted + rejected): a round rejects unless all K were accepted."""
    rates = _positions(acceptance_by_position)
    accepted = math.fsum(rates)
    return accepted / (accepted + 1.0 - rates[-1])


def positions_at_k(acceptance_by_position: Sequence[float], k: int) -> tuple[float, ...]:
    """The rates by position of rounds that draft K tokens, from those of rounds that draft L >= K.

    The first K rates of the list are not the answer: with L tokens fewer rounds start where much is
    accepted. Where a draft token's acceptance depends only on the text before it, as with a model
    that drafts token by token, a round of L tokens that accepts i (K + 1) corresponds to 1 + i
    rounds of K: the token after the first K is emitted either way, accepted or not, and the next
    round starts after it. So with p(0) = 1, the sum over i = 0, 1, ... of

        p(i (K + 1) + j)

    counts, for each round of L, the rounds of K that accept at least j tokens. A round of L that
    accepts all ends within a round of K, which continues in the next round of L; both end together
    only where K + 1 divides L + 1, and the rates are then exact for every text. Otherwise the
    shared round is estimated as in a long stretch of text in which each token is accepted with the
    conditional rate of the list's last position.

    Where this gives fewer tokens per round than the list's first K rates, acceptance falls with the
    position in the round, as a head's does, and these are returned.

    `k` is at most the number of rates.
    """
    rates = [1.0, *_positions(acceptance_by_position)]
    last = len(rates) - 1
    if not 1 <= k <= last:
        raise UserError(f"k={k}: acceptance_by_position has {last} positions")
    alpha = min(1.0, rates[-1] / rates[-2]) if rates[-2] > 0.0 else 0.0
    # The number of rounds of K that emit as many tokens as one round of L, at this alpha
    rounds = expected_tokens_per_round(alpha, last) / expected_tokens_per_round(alpha, k)

    def at_least(accepted: int) -> float:
        within = range(accepted, last + 1, k + 1)
        beyond = rates[-1] * alpha ** (within[-1] + k + 1 - last) * rounds
        shared = math.fsum(rates[-1] * alpha ** (n + 1) for n in within)
        return math.fsum(rates[n] for n in within) + beyond - shared

    found = (at_least(j) / at_least(0) for j in range(k + 1))
    of_k = tuple(accumulate(found, min))[1:]
    return max(tuple(rates[1 : k + 1]), of_k, key=math.fsum)


def conditional(rates: Sequence[float]) -> tuple[float, ...]:
    """The chance that position j is accepted, given that all before it were; 0 where none were."""
    before = (1.0, *rates[:-1])
    return tuple(rate / last if last > 0 else 0.0 for rate, last in zip(rates, before, strict=True))
