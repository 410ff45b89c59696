"""From the ideal speedup to the measured one, in steps that each have a cause.

A round takes K draft steps, a verify, an accept step, reading the outcome on the host, and a
rewind; in units of a bare target step these are K c, v(K), and three more. The ideal is
(K + 1) / (K c + 1): every draft token accepted, a verify that costs one step, nothing else. Putting
in what was measured, one thing after the other, ends at what the loop really gained over plain
decoding, with nothing left over:

    (K + 1) / (K c + 1)                       ideal
    (K + 1) / (K c + v)                       verify costs v(K), not 1
    tokens_per_round / (K c + v)              the acceptance that was got
    tokens_per_round / (K c + v + accept ...) and so on, to the whole round
    x plain turn / bare step                  plain decoding has costs beside its step, too

A round was timed whole and in parts within moments. Times are means over the quarter of these pairs
with the smallest sum: whatever else runs on a machine only ever adds, and unlike medians means of
the same rounds add up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.records import PartTiming

# In the order of a round, without the draft and the verify
BESIDE = ("accept", "rewind", "host")
TOGETHER = "verify + accept"
ORDER = ("draft", "verify", "accept", TOGETHER, "host", "rewind")
MOST_UNEXPLAINED = 0.03
FASTEST = 4


@dataclass(frozen=True)
class RoundParts:
    """One K's round in parts.

    Attributes:
        k: num_draft_tokens.
        rounds: how many were timed.
        parts: (name, milliseconds), in the order of a round.
        round_ms: a whole round of the real loop.
        unexplained_ms: round_ms - the sum of the parts; below 0 where the waits between parts cost
            more than the loop's own doing.
        unexplained_share: of the round.
        tokens_per_round: of these rounds.
        step_ms, plain_ms: a bare target step, and a turn of plain decoding.
    """

    k: int
    rounds: int
    parts: tuple[tuple[str, float], ...]
    round_ms: float
    unexplained_ms: float
    unexplained_share: float
    tokens_per_round: float
    step_ms: float
    plain_ms: float

    def part(self, name: str) -> float:
        """Milliseconds of a part; 0 if it was not timed on its own."""
        return dict(self.parts).get(name, 0.0)

    @property
    def speedup(self) -> float:
        """Of these rounds over plain decoding on the same prompts."""
        return self.tokens_per_round * self.plain_ms / self.round_ms


@dataclass(frozen=True)
class Fall:
    """One step of a waterfall: its cause, the speedup after it, and the factor it brought."""

    cause: str
    speedup: float
    factor: float


def undisturbed(samples_s: NDArray[np.float64]) -> list[float]:
    """Means over the rounds of least total time, the fastest quarter, of each row.

    Args:
        samples_s: a row per thing timed, a column per round.
    """
    kept = max(1, samples_s.shape[1] // FASTEST)
    order = np.argsort(samples_s.sum(axis=0), kind="stable")[:kept]
    return [float(value) for value in samples_s[:, order].mean(axis=1)]


def round_parts(timings: Sequence[PartTiming]) -> list[RoundParts]:
    """Each K's round in parts, K ascending; empty without plain decoding to hold it against."""
    found = {(timing.k, timing.part): timing for timing in timings}
    if (0, "step") not in found or (0, "round") not in found:
        return []
    alone = [found[0, name].samples_s for name in ("step", "round")]
    step, plain = undisturbed(1e3 * np.array(alone))
    ks = sorted({timing.k for timing in timings} - {0})
    return [_of_one_k(k, found, step, plain) for k in ks if (k, "round") in found]


def _of_one_k(
    k: int, found: Mapping[tuple[int, str], PartTiming], step: float, plain: float
) -> RoundParts:
    whole = found[k, "round"]
    names = [name for name in ORDER if (k, name) in found]
    samples = [whole.samples_s, *(found[k, name].samples_s for name in names)]
    total, *parts = undisturbed(1e3 * np.array(samples))
    rest = total - sum(parts)
    return RoundParts(
        k=k,
        rounds=len(whole.samples_s),
        parts=tuple(zip(names, parts, strict=True)),
        round_ms=total,
        unexplained_ms=rest,
        unexplained_share=rest / total,
        tokens_per_round=sum(whole.tokens) / len(whole.tokens),
        step_ms=step,
        plain_ms=plain,
    )


def waterfall(entry: RoundParts) -> list[Fall]:
    """The speedup of one K from ideal to measured; the last entry is `entry.speedup`."""
    k, tokens, step = entry.k, entry.tokens_per_round, entry.step_ms
    verify = "verify" if entry.part("verify") else TOGETHER
    drafting, verifying = entry.part("draft"), entry.part(verify)
    cost = drafting + verifying
    speeds = [
        ("ideal", (k + 1) * step / (drafting + step)),
        (f"{verify} costs {verifying / step:.2f} steps", (k + 1) * step / cost),
        (f"{tokens:.2f} tokens a round, not {k + 1}", tokens * step / cost),
    ]
    for name in BESIDE:
        if entry.part(name):
            cost += entry.part(name)
            speeds.append((name, tokens * step / cost))
    speeds.append(("unexplained", tokens * step / entry.round_ms))
    speeds.append(("plain decoding's own overhead", entry.speedup))
    before = [speeds[0][1], *(value for _, value in speeds[:-1])]
    return [
        Fall(cause, value, value / last)
        for (cause, value), last in zip(speeds, before, strict=True)
    ]


def headline_round(rounds: Sequence[RoundParts]) -> RoundParts | None:
    """The K whose rounds were fastest: the one that a waterfall is drawn of."""
    return max(rounds, key=lambda entry: entry.speedup, default=None)
