"""The arithmetic of speculative decoding: from acceptance and times to a speedup.

A round drafts K tokens, one draft step each, and checks them in one target forward over K+1
positions; it emits between 1 and K+1 tokens. With R(K) the time of a round in a running loop, and
R(0) that of a plain token (`RoundTimes`), exactly and whatever the text,

    speedup = tokens_per_round x R(0) / R(K)

Where only single steps are known (`StepTimes`), R(K) / R(0) is taken as `K c + v`, with `c` = draft
step / target step and `v` = the target's forward over K+1 positions / target step; v = 1 gives LKM
theorem 3.8. This leaves out the work of a loop besides its forwards; it is used for typed latencies
and for the floors of a card.

Only tokens_per_round needs a model of the text. In the iid model every draft token is accepted with
one probability `alpha`, given that all before it in its round were. It explains and extrapolates; a
decision should use the measured or replayed tokens_per_round instead, since text with easy and hard
passages emits up to 6 % fewer tokens than in the iid model.

Acceptance comes in several forms; `harness.theory.acceptance` names and converts them.

Sources: Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding"
(ICML 2023), cited as LKM; Chen et al., "Accelerating Large Language Model Decoding with Speculative
Sampling" (2023).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from harness.records import UserError
from harness.theory.acceptance import alpha_from_tokens_per_round


@dataclass(frozen=True)
class StepTimes:
    """Step times of each model, in seconds: the latencies of a prediction."""

    draft_s: float  # one draft step
    target_s: float  # one target step
    # Entry i is a target forward over i + 1 positions; empty means v = 1 at every K
    verify_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        named = [("draft_ms", self.draft_s), ("target_ms", self.target_s)]
        for name, value in [*named, *(("verify_ms", value) for value in self.verify_s)]:
            if not (math.isfinite(value) and value > 0.0):
                raise UserError(f"{name}={value * 1e3:g}: must be a time above 0")

    @property
    def c(self) -> float:
        """Draft step / target step."""
        return self.draft_s / self.target_s

    def covers(self, k: int) -> bool:
        return not self.verify_s or k < len(self.verify_s)

    def v(self, k: int) -> float:
        """Target forward over k + 1 positions / target step."""
        if not self.covers(k):
            raise UserError(
                f"verify_ms: {len(self.verify_s)} entries, but k={k} verifies {k + 1} positions;"
                f" give {k + 1} times"
            )
        return self.verify_s[k] / self.target_s if self.verify_s else 1.0

    def round_s(self, k: int) -> float:
        """The seconds of K draft steps and one verify forward: a round without other work."""
        return k * self.draft_s + self.v(k) * self.target_s


def _line(n: int, low: int, high: int) -> tuple[tuple[int, float], ...]:
    """The weights of linear interpolation at n between two points."""
    share = (n - low) / (high - low)
    return ((low, 1.0 - share), (high, share))


@dataclass(frozen=True)
class RoundTimes:
    """The times of a plain token and a round in a running loop, seconds: R(0) and R(n).

    A prediction is tokens_per_round x R(0) / R(K). R is measured on consecutive rounds of the loop
    that will serve, or follows from typed step times (`from_steps`), without the other work of a
    loop.
    """

    plain_s: float  # R(0), one plain token
    # (tokens proposed, seconds of such a round), ascending. Rounds between two of them are
    # interpolated linearly. Rounds below the first are on the line through the first two, or on the
    # line from the plain token to the first, whichever is slower: the first line alone could give
    # rounds that are cheaper than a plain token. An entry for 0 is the round of a look-up that
    # found nothing; without it that round is a plain token.
    round_s: tuple[tuple[int, float], ...]
    # R(0) of the target without this draft, where the draft makes it run in a slower mode; None
    # where it does not
    other_plain_s: float | None = None

    @property
    def baseline_s(self) -> float:
        """R(0) for speedups: that of the target without this draft."""
        return self.plain_s if self.other_plain_s is None else self.other_plain_s

    @property
    def largest(self) -> int:
        """The most tokens proposed in a round whose time is known."""
        return self.round_s[-1][0] if self.round_s else 0

    def covers(self, k: int) -> bool:
        return 0 <= k <= self.largest

    def parts(self, n: int) -> tuple[tuple[int, float], ...]:
        """R(n) as a sum of timed rounds: (tokens proposed, weight); (0, 1.0) is R(0).

        Raises:
            UserError: n is above the largest that was timed.
        """
        known = [k for k, _ in self.round_s]
        if n in known or n == 0:
            return ((n, 1.0),)
        if not self.covers(n):
            raise UserError(f"latency: rounds were timed up to k={self.largest}, not at k={n}")
        above = next(i for i, k in enumerate(known) if k > n)
        if above:
            return _line(n, known[above - 1], known[above])
        lines = [_line(n, 0, known[0]), *([_line(n, *known[:2])] if len(known) > 1 else [])]
        return max(lines, key=self._seconds)

    def at(self, n: int) -> float:
        """The seconds of a round that proposes n tokens; raises as `parts`."""
        return self._seconds(self.parts(n))

    def _seconds(self, parts: tuple[tuple[int, float], ...]) -> float:
        known = {0: self.plain_s, **dict(self.round_s)}
        return sum(share * known[k] for k, share in parts)

    def relative(self, n: int) -> float:
        """R(n) / R(0): the cost of a round in plain tokens, those of `baseline_s`."""
        return self.at(n) / self.baseline_s

    def speedup(self, tokens_per_round: float, k: int) -> float:
        """tokens_per_round x R(0) / R(k), without a model of the text; k + 1 is the ideal."""
        return tokens_per_round / self.relative(k)

    def break_even_alpha(self, k: int) -> float | None:
        """The iid alpha that breaks even: E[tokens per round] = R(k) / R(0).

        0.0 where even alpha = 0 does not lose. None where even alpha = 1 loses, where R(k) is
        unknown, and for a look-up: most of its rounds propose fewer than k tokens, so that one
        alpha does not determine the tokens per round.
        """
        if not self.covers(k) or (self.round_s and self.round_s[0][0] == 0):
            return None
        cost = self.relative(k)
        if cost <= 1.0:
            return 0.0
        return None if cost > k + 1 else alpha_from_tokens_per_round(cost, k)

    @classmethod
    def from_steps(cls, times: StepTimes, largest: int, *, lookup: bool = False) -> "RoundTimes":
        """R(n) from single steps: n draft steps and a verify.

        `largest` is the largest n, as far as verify times are known. With `lookup` the draft takes
        one draft_s in a round, for any number of proposed tokens.
        """
        ns = [n for n in range(1, largest + 1) if times.covers(n)]
        if not lookup:
            return cls(times.target_s, tuple((n, times.round_s(n)) for n in ns))
        rounds = [(n, times.draft_s + times.v(n) * times.target_s) for n in ns]
        return cls(times.target_s, ((0, times.draft_s + times.target_s), *rounds))


@dataclass(frozen=True)
class BatchTimes:
    """The times of iterations of a server with continuous batching: R(n, B), seconds.

    The server decodes all active requests in one iteration: each takes one round (in plain decoding
    it emits one token), and a request that ends is replaced by the next. A request's acceptance
    does not depend on the others in the batch; only R does.
    """

    # R of each timed number of requests, ascending; interpolated linearly, and outside that of the
    # nearest
    by_batch: Mapping[int, RoundTimes]

    @property
    def plain(self) -> "BatchTimes":
        """The times of plain decoding, without rounds of look-ups that find nothing."""
        return BatchTimes({b: RoundTimes(each.plain_s, ()) for b, each in self.by_batch.items()})

    def at(self, n: int, batch: int) -> float:
        """The seconds of an iteration whose rounds draft n tokens; 0 as in `RoundTimes.at`."""
        known = sorted(self.by_batch)
        return float(np.interp(batch, known, [self.by_batch[b].at(n) for b in known]))
