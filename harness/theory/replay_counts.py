"""What replay gives back: expected counts of the loop, per text, under the names of a Trial."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from harness.stats.intervals import Array


@dataclass(frozen=True, eq=False)
class Replayed:
    """Expected counts of one K, per text; the names are those of a Trial.

    Attributes:
        k: num_draft_tokens.
        new_tokens, rounds, drafted, accepted, rejected, bonus, cut: shape (texts,).
        accepted_lengths: shape (texts, K + 1); entry j is the rounds that kept exactly j.
        room: shape (texts, K); entry j - 1 is the rounds with at least j text positions left.
        proposals: shape (texts, K + 1); entry n is the rounds that proposed n tokens. All are at
            K, but for a drafter that may propose fewer; 0 proposed is a plain step, which counts
            as a bonus after no acceptance.
    """

    k: int
    new_tokens: Array
    rounds: Array
    drafted: Array
    accepted: Array
    rejected: Array
    bonus: Array
    cut: Array
    accepted_lengths: Array
    room: Array
    proposals: Array

    @property
    def judged(self) -> Array:
        """Draft tokens accepted or rejected, the denominator of alpha, shape (texts,)."""
        return self.accepted + self.rejected

    @property
    def tokens_per_round(self) -> float:
        """Over all texts, new_tokens / rounds."""
        return float(self.new_tokens.sum() / self.rounds.sum())

    @property
    def mean_acceptance_length(self) -> float:
        """Over all texts, 1 + accepted / rounds."""
        return 1.0 + float(self.accepted.sum() / self.rounds.sum())

    @property
    def acceptance_rate(self) -> float:
        """Over all texts, accepted / drafted; NaN where nothing was drafted."""
        drafted = float(self.drafted.sum())
        return float(self.accepted.sum()) / drafted if drafted else float("nan")

    @property
    def alpha(self) -> float:
        """Over all texts, accepted / (accepted + rejected); NaN where nothing was judged."""
        judged = float(self.judged.sum())
        return float(self.accepted.sum()) / judged if judged else float("nan")

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Over all texts, for j = 1..K; positions that no round had room for are left out."""
        at_least = self.accepted_lengths.sum(axis=0)[::-1].cumsum()[::-1][1:]
        pairs = zip(at_least, self.room.sum(axis=0), strict=True)
        return tuple(float(kept / rounds) for kept, rounds in pairs if rounds > 0.0)

    def summed(self, groups: Sequence[int] | NDArray[np.integer], size: int) -> "Replayed":
        """The counts of texts added up by group, such as the repetitions of one prompt.

        Args:
            groups: group of each text, (texts,), below `size`.
            size: how many groups; one without a text gets zeros.
        """
        into = np.asarray(groups, dtype=np.intp)

        def add(values: Array) -> Array:
            total = np.zeros((size, *values.shape[1:]))
            np.add.at(total, into, values)
            return total

        return Replayed(self.k, *(add(values) for values in _arrays(self)))

    def rows(self, keep: NDArray[np.bool_] | NDArray[np.intp]) -> "Replayed":
        """The counts of some texts."""
        return Replayed(self.k, *(values[keep] for values in _arrays(self)))


def _arrays(replayed: Replayed) -> list[Array]:
    """Every count, in the order of the fields."""
    return [getattr(replayed, field.name) for field in fields(Replayed)[1:]]


def stacked(parts: Sequence[Replayed]) -> Replayed:
    """The texts of several replays of one K, one after the other; at least one part."""
    columns = zip(*(_arrays(part) for part in parts), strict=True)
    return Replayed(parts[0].k, *(np.concatenate(column) for column in columns))
