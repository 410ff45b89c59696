"""Arrivals at a server: requests, each with what its rounds would accept, and their times.

The flag "this drafted token was accepted" is a Bernoulli draw for each text position, independent
of the others (`harness.theory.replay`), and each position is judged at most once, by the round that
reaches it. So one uniform per position decides every K: flag = uniform < chance.
At temperature 0 chances are 0 or 1, and a text is one request whatever is drawn.

Arrivals are in units of the mean time between two requests, so that one draw serves every rate.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Counts = NDArray[np.intp]


class Rounds(NamedTuple):
    """The rounds of a request where up to k tokens are drafted, by the start of each, [n]."""

    after: list[int]  # where the next round begins; n where the text has ended
    drafted: list[int]  # tokens that the round drafts
    alike: list[int]  # how many rounds from here on, one after the other, draft k tokens


class _RoundsByK(dict[int, Rounds]):
    """Rounds by k, each made when it is first asked for.

    A dict, as simulations ask several times for each round.
    """

    def __init__(self, runs: Counts, most: Counts) -> None:
        super().__init__()
        self._runs, self._most = runs, most

    def __missing__(self, k: int) -> Rounds:
        size, drafted = len(self._runs), np.minimum(self._most, k)
        accepted = np.minimum(self._runs, drafted)
        ends = np.minimum(np.arange(1, size + 1) + accepted, size).tolist()
        alike = [0] * (size + 1)
        for start in np.flatnonzero(drafted == k)[::-1].tolist():
            alike[start] = 1 + alike[ends[start]]
        made = self[k] = Rounds(ends, drafted.tolist(), alike)
        return made


@dataclass(frozen=True, eq=False)
class Request:
    """A request whose rounds emit n tokens."""

    prompt_tokens: int
    runs: Counts  # [n] draft tokens in a row that would be accepted from each start
    most: Counts  # [n] tokens that the engine drafts at most from each start

    @property
    def tokens(self) -> int:
        """The tokens that rounds emit; 0 where all come from the prefill."""
        return len(self.runs)

    @cached_property
    def rounds(self) -> Mapping[int, Rounds]:
        """The rounds by k, where up to k tokens are drafted."""
        return _RoundsByK(self.runs, self.most)


@dataclass(frozen=True, eq=False)
class Text:
    """A text of the target, of which requests are made."""

    # prompt_set, prompt: that it answers
    prompt_set: str
    prompt: str
    prompt_tokens: int  # of that prompt
    # [n, K] the chance that a round from a start accepts at an offset, given that it got there.
    # What is NaN, or beyond the text, is not accepted.
    chances: Array
    most: Counts  # [n] tokens that the engine drafts at most from each start

    @cached_property
    def certain(self) -> Request | None:
        """The request where nothing is left to chance, as at temperature 0."""
        chances = np.nan_to_num(self.chances)
        if ((chances > 0.0) & (chances < 1.0)).any():
            return None
        return self._request(chances > 0.0)

    def drawn(self, uniforms: Array) -> Request:
        """One request, its flags drawn by uniforms in [0, 1), one per text position at least."""
        if self.certain is not None:
            return self.certain
        size, depth = self.chances.shape
        # Beyond the text nothing is accepted
        padded = np.pad(uniforms[:size], (0, depth - 1), constant_values=1.0)
        return self._request(np.lib.stride_tricks.sliding_window_view(padded, depth) < self.chances)

    def _request(self, flags: NDArray[np.bool_]) -> Request:
        """The request whose flags [n, K] say which tokens would be accepted."""
        rejected = np.pad(~flags, ((0, 0), (0, 1)), constant_values=True)
        runs = np.argmax(rejected, axis=1).astype(np.intp)
        return Request(self.prompt_tokens, runs, self.most)


class Stream(Sequence[Request]):
    """Requests of texts, each drawn when it is asked for and not kept."""

    def __init__(
        self, texts: Sequence[Text], rows: Sequence[int], uniforms: Callable[[int], Array]
    ) -> None:
        """`rows` are places in the texts; `uniforms`, of a place, is as `Text.drawn` takes it."""
        self._texts, self._rows, self._uniforms = texts, rows, uniforms

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> Request: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Request]: ...
    def __getitem__(self, place: int | slice) -> Request | Sequence[Request]:
        if isinstance(place, slice):
            return [self[at] for at in range(*place.indices(len(self)))]
        text = self._texts[self._rows[place]]
        return text.certain or text.drawn(self._uniforms(place))


# ---- when they come ------------------------------------------------------------------------------


def at_random(number: int, random: np.random.Generator) -> Array:
    """[number] arrivals of a Poisson process of requests."""
    return np.cumsum(random.exponential(1.0, number))


def as_recorded(times: Sequence[float], number: int, random: np.random.Generator) -> Array:
    """[number] arrivals with the gaps of a record, from a random place in it on, round and round.

    Its times ascend, and at least two differ.
    """
    gaps = np.diff(np.asarray(times, dtype=np.float64))
    # Between the last and the first of the next round lies a mean gap
    gaps = np.append(gaps, gaps.mean()) / gaps.mean()
    return np.cumsum(np.resize(np.roll(gaps, -int(random.integers(len(gaps)))), number))
