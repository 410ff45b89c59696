"""How much acceptance a draft can lose before it stops paying, on the texts it was replayed on.

The iid break-even assumes one alpha everywhere. Text has easy and hard stretches, rounds are cut
at its end and an n-gram often proposes little, so a draft can lose with an alpha above the iid
break-even. Here the replayed rounds are kept as they are and their acceptances changed evenly: at
every position of a round the conditional acceptance h_j becomes t h_j (thinned, t <= 1) or
1 - (2 - t) (1 - h_j) (mended, t > 1), which gives tokens per round and alpha as functions of t; the
answer is the alpha where the workload's speedup is 1. The law of where rounds start is taken as it
was, so this is a first-order answer; at t = 1 it is exact, so the margin has the sign of the gain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

from harness.analysis.evidence import Candidate
from harness.analysis.predicted import alpha_of
from harness.analysis.replays import Replays
from harness.analysis.step_latency import Latency, round_costs
from harness.stats.draws import PromptDraws
from harness.stats.intervals import Array
from harness.theory.replay_counts import Replayed


@dataclass(frozen=True, eq=False)
class _Part:
    """One prompt set's mean round: its weight in the workload, and its cost in target steps.

    Attributes:
        available: [K] share of rounds with a j-th drafted position inside the text.
        conditional: [K] acceptance at position j, given those before it.
        cut: cut rounds / rounds.
        offset: tokens per round as replayed, minus the model's at t = 1; 0 but for rounding and
            where acceptance rises along a round.
    """

    share: float
    cost: float
    available: Array
    conditional: Array
    cut: float
    offset: float

    def kept(self, t: float) -> tuple[Array, Array]:
        """Per round, draft tokens accepted and judged at each position."""
        rate = t * self.conditional if t <= 1.0 else 1.0 - (2.0 - t) * (1.0 - self.conditional)
        reach = np.concatenate([[1.0], np.cumprod(rate)])
        return self.available * reach[1:], self.available * reach[:-1]

    def tokens_per_round(self, t: float) -> float:
        """Tokens that a round emits."""
        mended = t if t <= 1.0 else 2.0 - t
        cut = self.cut * min(t, 1.0)
        return 1.0 + float(self.kept(t)[0].sum()) - cut + self.offset * mended


def wins_above_alpha(
    name: Candidate, replays: Replays, latency: Latency, prompts: PromptDraws
) -> float | None:
    """The alpha at which this candidate's replayed speedup would be 1.

    Args:
        name: the candidate.
        replays: where its counts are.
        latency: its step times.
        prompts: the workload's prompt sets and weights.

    Returns:
        None where even full acceptance loses, or nothing was judged; 0.0 where even none wins.
    """
    counts, (draft, k) = replays.candidates[name], name
    alpha = alpha_of(counts)
    if alpha is None:
        return None
    costs = round_costs(latency.times, k, lookup=draft in replays.lookups) / latency.times.target_s
    parts = [
        _part(share, counts.rows(members), costs)
        for share, (members, _) in zip(prompts.shares.values(), prompts.parts, strict=True)
    ]

    def gain(t: float) -> float:
        return 1.0 - sum(part.share * part.cost / part.tokens_per_round(t) for part in parts)

    if gain(2.0) < 0.0:
        return None
    if gain(0.0) >= 0.0:
        return 0.0
    root = brentq(gain, 0.0, 2.0, xtol=1e-9)
    if alpha == 0.0 or root > 1.0:
        # Mended: the share of rejections that must go.
        missing = (1.0 - _alpha(parts, root)) / (1.0 - _alpha(parts, 1.0))
        return 1.0 - (1.0 - alpha) * missing
    return alpha * _alpha(parts, root) / _alpha(parts, 1.0)


def _alpha(parts: Sequence[_Part], t: float) -> float:
    pairs = [part.kept(t) for part in parts]
    return float(sum(kept.sum() for kept, _ in pairs) / sum(judged.sum() for _, judged in pairs))


def _part(share: float, counts: Replayed, costs: Array) -> _Part:
    rounds = float(counts.rounds.sum())
    proposals, room = counts.proposals.sum(axis=0), counts.room.sum(axis=0)
    proposed = proposals[::-1].cumsum()[::-1][1:]
    available = np.minimum(proposed, room) / rounds
    at_least = counts.accepted_lengths.sum(axis=0)[::-1].cumsum()[::-1][1:] / rounds
    survival = np.divide(at_least, available, out=np.zeros_like(available), where=available > 0.0)
    survival = np.minimum.accumulate(np.clip(survival, 0.0, 1.0))
    before = np.concatenate([[1.0], survival[:-1]])
    conditional = np.divide(survival, before, out=np.zeros_like(survival), where=before > 0.0)
    cut = float(counts.cut.sum()) / rounds
    part = _Part(share, float(proposals @ costs) / rounds, available, conditional, cut, 0.0)
    offset = float(counts.new_tokens.sum()) / rounds - part.tokens_per_round(1.0)
    return _Part(share, part.cost, available, conditional, cut, offset)
