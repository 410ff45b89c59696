"""Costs of decoding on a server, from requests, and the seconds that follow for others.

A request costs a start and its rounds. Both matter where texts are short: the first round after a
prefill costs more than the others (llama.cpp, for one, builds its graphs anew). A round costs by
how many tokens it drafted, since near the budget some engines draft fewer than K. So a request is a
line in its rounds, and these are fitted by least squares over requests whose replay says how many
rounds there were, and what each drafted. A round that drafted another number of tokens than any
measured K is made of those that are fitted exactly as a prediction makes it (`RoundTimes.parts`).
A look-up finds nothing in most rounds. These are no plain tokens of the server that decodes plainly
(llama.cpp takes 11 % longer for them on a small model), so they have a cost of their own, R(0) of
its rounds. A draft model's drafts are empty on a request's last token alone, too seldom for that.

What a request takes is settled over visits first (`harness.analysis.settled_times`). Sampled
requests of one prompt get the same seconds per round, so they are no independent samples. The
error of costs is the jackknife's over groups of prompts (Kott, "The delete-a-group jackknife",
2001): all requests of a prompt, plain ones, those at every K and those of shorter budgets, are left
out together.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.analysis.settled_times import (
    Settle,
    Visit,
    fit_line,
    least_squares,
    paired_seconds,
    undisturbed,
)
from harness.engine_facts.spec import Counting
from harness.records import RoundTiming
from harness.stats.jackknife import Array
from harness.summary import ServedCosts
from harness.theory.replay import Replayed, replay_texts
from harness.theory.speedup import RoundTimes

# Costs' error is that of leaving out one such part of the prompts at a time
PARTS = 8
# What is left out together
Prompts = tuple[Hashable, ...]


@dataclass(frozen=True, eq=False)
class Requests:
    """Decoding seconds, prompts and rounds [n, K + 1] by drafted tokens (K = 0: plain) of one K."""

    seconds: Array
    rounds: Array
    prompts: Prompts


@dataclass(frozen=True, eq=False)
class TimedRequests:
    """Requests from which costs are fitted."""

    by_k: Mapping[int, Requests]  # 0 for those that were decoded plainly
    net: bool = False  # whether another request was taken off each: a start may be below 0
    looked_up: bool = False  # whether drafts come from a look-up: most rounds draft nothing
    # Drafted tokens at which rounds' times are fitted, none shorter than of fewer; empty: the K
    fitted_at: tuple[int, ...] = ()

    def __add__(self, other: "TimedRequests") -> "TimedRequests":
        """Both, of the K that either has."""
        by_k = {**other.by_k, **self.by_k}
        for k in other.by_k.keys() & self.by_k.keys():
            one, two = self.by_k[k], other.by_k[k]
            seconds = np.concatenate([one.seconds, two.seconds])
            rounds = np.concatenate([one.rounds, two.rounds])
            by_k[k] = Requests(seconds, rounds, one.prompts + two.prompts)
        return replace(self, by_k=by_k, net=self.net or other.net)

    def without_each_part(self) -> "list[TimedRequests]":
        """The requests without each of up to `PARTS` parts of their prompts."""
        every = list(dict.fromkeys(prompt for k in self.by_k.values() for prompt in k.prompts))
        made: list[TimedRequests] = []
        for part in range(min(PARTS, len(every))):
            left_out, by_k = {*every[part::PARTS]}, dict[int, Requests]()
            for k, each in self.by_k.items():
                rows = [row for row, prompt in enumerate(each.prompts) if prompt not in left_out]
                if rows:
                    prompts = tuple(each.prompts[row] for row in rows)
                    by_k[k] = Requests(each.seconds[rows], each.rounds[rows], prompts)
            made.append(replace(self, by_k=by_k))
        return made


@dataclass(frozen=True)
class ServerCosts:
    """Costs of decoding on a server."""

    plain_start_s: float  # of a plain request besides its tokens
    start_s: float  # of a speculative one besides its rounds
    times: RoundTimes  # of a plain token, and of a round that drafts n tokens

    @classmethod
    def of(cls, stored: ServedCosts) -> "ServerCosts":
        times = RoundTimes(stored.plain_s, tuple(sorted(stored.round_s.items())))
        return cls(stored.plain_start_s, stored.start_s, times)

    def plain_s(self, tokens: Array, requests: Array | float = 1.0) -> Array:
        """[n] seconds of requests of so many tokens, decoded plainly; of several, their sum."""
        return self.plain_start_s * requests + tokens * self.times.plain_s

    def speculative_s(self, counts: Replayed, requests: Array | float = 1.0) -> Array:
        """[n] seconds of requests whose rounds are expected to be these; of several, their sum."""
        rounds_s = counts.proposals @ np.array([self.times.at(n) for n in range(counts.k + 1)])
        return self.start_s * requests + rounds_s

    def speedup(self, tokens: Array, counts: Replayed, requests: Array | float = 1.0) -> float:
        """Plain seconds / speculative ones, of such requests together."""
        plain_s = self.plain_s(tokens, requests)
        return float(plain_s.sum() / self.speculative_s(counts, requests).sum())


def left_out_costs(timed: TimedRequests, k: int) -> list[ServerCosts]:
    """The costs without each part of the prompts, up to K = k; empty where prompts are too few."""
    fits = [fit_costs(others) for others in timed.without_each_part()]
    known = [fit for fit in fits if fit is not None and fit.times.covers(k)]
    return known if 1 < len(fits) == len(known) else []


def fit_costs(timed: TimedRequests) -> ServerCosts | None:
    """Fit costs by least squares, errors relative to a request's time.

    None without requests of two lengths, which tell a start from its rounds, and where they were so
    disturbed that a token or a round would cost nothing.
    """
    speculative = dict(sorted(timed.by_k.items()))
    plain = speculative.pop(0, None)
    if plain is None or not speculative or len({*(tokens := plain.rounds[:, 0])}) < 2:
        return None
    plain_start_s, token_s = fit_line(tokens, plain.seconds, net=timed.net)
    fitted = _fit_rounds(token_s, speculative, timed)
    return None if fitted is None else ServerCosts(plain_start_s, *fitted)


def _fit_rounds(
    plain_s: float, requests: Mapping[int, Requests], timed: TimedRequests
) -> tuple[float, RoundTimes] | None:
    """Fit what a start and rounds cost; None where a token or a round would cost nothing.

    Where another request was taken off each (`net`), a start may be below 0, but with the cheapest
    round is not. Where drafts are looked up, a round that drafts nothing has a time of its own, and
    is no plain token. `requests` are by K, ascending.
    """
    net = timed.net
    ks = sorted({*(timed.fitted_at or requests)} | ({0} if timed.looked_up else set[int]()))
    seconds = np.concatenate([each.seconds for each in requests.values()])
    # Which line a draft shorter than every K lies on depends on the times (`RoundTimes`), so these
    # are fitted twice; by the first ones it lies on that from the plain token.
    start_s, times = 0.0, RoundTimes(plain_s, tuple((k, plain_s * (1.0 + k**2)) for k in ks))
    for _ in range(2):
        # [n, 1 + ks] plain steps and rounds of each K
        counts = np.concatenate(
            [each.rounds @ shares_of_rounds(times, k) for k, each in requests.items()]
        )
        of_rounds, known = counts[:, 1:], counts[:, 0] * plain_s
        if timed.fitted_at:  # what each takes beyond the one before, the first beyond a plain token
            of_rounds = of_rounds[:, ::-1].cumsum(axis=1)[:, ::-1]
            known = counts.sum(axis=1) * plain_s
        columns = np.column_stack([np.ones_like(seconds), of_rounds])
        least_s = -min(each_s for _, each_s in times.round_s) if net else 0.0
        start_s, *rounds_s = least_squares(columns, seconds, known + least_s)
        start_s += least_s
        if timed.fitted_at:
            rounds_s = (plain_s + np.cumsum(rounds_s)).tolist()
        if min(plain_s, *rounds_s) <= 0.0:
            return None
        times = RoundTimes(plain_s, tuple(zip(ks, rounds_s, strict=True)))
    return start_s, times


def shares_of_rounds(times: RoundTimes, k: int) -> Array:
    """[k + 1, 1 + ks] how much of a plain token and each timed R a round of n = 0..k tokens is."""
    columns = {0: 0} | {n: column for column, (n, _) in enumerate(times.round_s, start=1)}
    made = np.zeros((k + 1, 1 + len(times.round_s)))
    for n in range(k + 1):
        for part, share in times.parts(n):
            made[n, columns[part]] += share
    return made


def timed_rounds(
    timings: Sequence[RoundTiming], counting: Counting, settle: Settle = undisturbed
) -> TimedRequests | None:
    """Requests of servers that reject every draft, and plain ones, of one draft and temperature."""
    visits: dict[tuple[int, int, int, bool], list[Visit]] = {}
    for place, t in enumerate(timings):
        shortened = t.k > 0 and t.drafted not in (None, t.k * t.rounds)
        visit = Visit(t.visit, place, t.seconds, t.one_token_s or 0.0)
        visits.setdefault((t.k, t.context_tokens, t.new_tokens, shortened), []).append(visit)
    most: dict[int, int] = {}
    for (k, *_), made in visits.items():
        most[k] = max(most.get(k, 0), len(made))
    by_k: dict[int, list[tuple[int, int, bool, float]]] = {}
    for (k, context, tokens, shortened), made in sorted(visits.items()):
        plain = visits.get((0, context, tokens, False), [])
        seconds = paired_seconds(made, plain if k else [], settle)
        # A length that fewer than half of the visits have is an end of text's
        if 2 * len(made) >= most[k] and seconds is not None:
            by_k.setdefault(k, []).append((context, tokens, shortened, seconds))
    if 0 not in by_k or len(by_k) == 1:
        return None
    requests: dict[int, Requests] = {}
    for k, rows in by_k.items():
        # Each length was timed by itself, so it stands for a prompt
        prompts = tuple((context, tokens) for context, tokens, *_ in rows)
        texts = [(tokens, shortened) for _, tokens, shortened, _ in rows]
        seconds = np.array([seconds for *_, seconds in rows])
        requests[k] = Requests(seconds, _rejected(texts, k, counting), prompts)
    return TimedRequests(requests, any(t.one_token_s is not None for t in timings))


def _rejected(texts: Sequence[tuple[int, bool]], k: int, counting: Counting) -> Array:
    """The rounds of texts whose every draft was rejected: (tokens, whether the last were cut)."""
    if k == 0:
        return np.array([[tokens] for tokens, _ in texts], dtype=np.float64)
    proposed = [
        counting.proposed(k, tokens + counting.first_position) if shortened else np.full(tokens, k)
        for tokens, shortened in texts
    ]
    return replay_texts([np.zeros((tokens, k)) for tokens, _ in texts], proposed, k).proposals
