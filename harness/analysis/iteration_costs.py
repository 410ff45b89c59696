"""Costs of iterations on a server that decodes requests side by side, by the server's own clock.

Each request of a load says two times: its prefill's, which is one iteration, and its
decoding's, which is the sum of the iterations that its rounds were in. How many requests shared
each of them, and whose prompts were in it, follows from the rounds that all requests of the load
took: the load is simulated (`harness.simulation`), so each time is a sum of counts x costs. The
costs are those with the least sum of absolute relative errors over requests (least absolute
deviations): a request that something disturbed has no more weight than another. These are medians,
and what waits in a queue waits for the mean: on a machine that is slow for a part of the time the
mean is above the median. So all costs are multiplied by one factor, with which they add up to the
seconds of all requests together, where one that took more than `DISTURBED` times as long as its
costs, or as much less, counts with that much. What prefills took more or less than they cost
(`IterationCosts.prefill_scatter_s`) is in the percentiles of waits, not in a simulation's clock. Of
decoding it is not: there it is mostly who was side by side, which a simulation has in it.

    R(n, b)     an iteration of b requests whose rounds draft n tokens; never less with more of
                them; rounds in which a look-up finds nothing have their own: no plain tokens
    alone       of prompts that enter while nobody decodes, besides their tokens; and idle, what is
                added where the server had nothing to do for a while
    mixed       of prompts that enter an iteration of requests that decode, besides their tokens:
                of one request, whose plain step is no batch otherwise, and of several
    per token   of a prompt
    context     of each token in the caches, where texts differ enough in length for it to show
    client      what a request takes outside of the server, sent one at a time

Prompts have the same costs at every K of a draft; plain servers, which have no draft to fill, have
their own. Which requests were side by side depends on the costs a little (which text ends first),
so fit and simulation alternate.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import compress

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from harness.analysis.server_costs import shares_of_rounds
from harness.engine_facts.draft_kinds import looks_up
from harness.records import LoadTiming
from harness.simulation import Costs, Counts, Iteration, Request, sent_at_once, simulate
from harness.stats.jackknife import Array
from harness.theory.speedup import BatchTimes, RoundTimes

# Of simulation and fit
ALTERNATIONS = 3
# Of two texts, by which the contexts of their rounds differ for a token of it to have a time
CONTEXT_SPREAD = 128
# Times what a request costs, from where it says that something disturbed it
DISTURBED = 2.0
# Quantiles that are kept of what prefills took more than they cost
QUANTILES = 20
# Columns of a server's prompts
ALONE, BY_ONE, BY_SEVERAL, IDLE, TOKEN = range(5)
STARTS = 5


@dataclass(frozen=True)
class Starts:
    """Costs of prompts, seconds."""

    alone_s: float  # besides their tokens, while nobody decodes
    token_s: float  # of each token
    # As `alone_s`, in an iteration of one request, and of several; None if an engine does not mix
    mixed_s: tuple[float, float] | None = None
    idle_s: float = 0.0  # more than `alone_s`, where the server had nothing to do for a while


@dataclass(frozen=True)
class IterationCosts:
    """Costs of a plain and of a speculating server."""

    times: BatchTimes  # R(n, b)
    # plain, speculative: of prompts
    plain: Starts
    speculative: Starts
    client_s: float = 0.0  # of a request, outside of the server
    # context_tokens, context_token_s: in the cache of each request where an iteration takes
    # `times`, and what each token more takes
    context_tokens: float = 0.0
    context_token_s: float = 0.0
    # What prefills took more than they cost, or less: quantiles at equal steps, ascending
    prefill_scatter_s: Sequence[float] = (0.0,)

    def priced(self, slots: int, largest_k: int) -> tuple[Costs, Costs]:
        """The plain server's, and that of one that drafts up to so many tokens."""
        rows = [[self.times.at(n, b) for n in range(largest_k + 1)] for b in range(slots + 1)]
        plain_rows = [[self.times.plain.at(0, b)] for b in range(slots + 1)]
        return self._priced(plain_rows, self.plain), self._priced(rows, self.speculative)

    def _priced(self, rows: Sequence[Sequence[float]], starts: Starts) -> Costs:
        mixed_s: tuple[float, ...] = ()
        if starts.mixed_s is not None:
            by_one_s, by_several_s = starts.mixed_s
            mixed_s = (0.0, by_one_s, *[by_several_s] * (len(rows) - 3))
        return Costs(
            rows,
            starts.alone_s,
            starts.token_s,
            mixed_start_s=mixed_s,
            client_s=self.client_s,
            idle_s=starts.idle_s,
            draft_step_s=[self._draft_step_s(b, len(rows[0]) - 1) for b in range(len(rows))],
            context_tokens=self.context_tokens,
            context_token_s=self.context_token_s,
            prefill_scatter_s=self.prefill_scatter_s,
        )

    def _draft_step_s(self, batch: int, largest_k: int) -> float:
        """Seconds of a draft token besides its verification; a look-up takes no steps."""
        high, (first, *_) = largest_k, self.times.by_batch.values()
        low = first.round_s[0][0]
        if not high or low == 0:
            return 0.0
        low = low if low < high else 0
        more_s = self.times.at(high, batch) - self.times.at(low, batch)
        return max(0.0, more_s / (high - low) - batch * self.plain.token_s)


def evenly_emitted(prompt_tokens: int, tokens: int, rounds: int, most: Counts) -> Request:
    """A request of so many equal rounds; `most` [tokens] are drafted at most from each start."""
    ends = -(-np.arange(1, rounds + 1) * tokens // max(rounds, 1))
    starts = np.concatenate([[0], ends])[:-1]
    runs = np.zeros(tokens, dtype=np.intp)
    runs[starts] = ends - starts - 1
    return Request(prompt_tokens, runs, np.maximum(most, runs))


def rounds_of(request: Request, k: int) -> int:
    """The number of rounds of up to k tokens that emit a request."""
    rounds, position, after = 0, 0, request.rounds[k].after
    while position < request.tokens:
        rounds, position = rounds + 1, after[position]
    return rounds


# A load to fit: what it took, and of what requests
SentLoad = tuple[LoadTiming, Sequence[Request]]


def fit_iterations(loads: Sequence[SentLoad], slots: int, *, mixes: bool) -> IterationCosts | None:
    """Fit what iterations cost, by plain loads and those of some K, each with its requests.

    Loads at a rate tell what a server costs after a pause; `mixes`: whether the engine puts prompts
    into iterations of requests that decode. None where the server tells no times of its own, or
    plain or speculative loads are missing.
    """
    ks = sorted({timing.k for timing, _ in loads})
    if not tells_times([timing for timing, _ in loads]) or len(ks) < 2 or ks[0] != 0:
        return None
    costs = _first_guess(loads, slots, ks, mixes=mixes)
    for time in range(1, ALTERNATIONS + 1):
        fitted = _fitted(_observed(loads, slots, ks[-1], costs), costs, last=time == ALTERNATIONS)
        if fitted is None:
            return None
        costs = fitted
    return costs


def tells_times(timings: Iterable[LoadTiming]) -> bool:
    """True where requests tell the time of their prefill and decoding; true of no loads."""
    times = [each for t in timings for each in (t.user_decode_s, t.user_prefill_s)]
    return all(each and None not in each for each in times)


def fit_without_texts(
    loads: Sequence[SentLoad], costs: IterationCosts, left_out: Sequence[Collection[str]]
) -> list[IterationCosts | None]:
    """Fits without some texts' times, side by side as at the costs of `fit_iterations`."""
    largest_k = max(timing.k for timing, _ in loads)
    observed = _observed(loads, max(costs.times.by_batch), largest_k, costs)
    return [_fitted(observed.without(names), costs, last=True) for names in left_out]


def _first_guess(
    loads: Sequence[SentLoad], slots: int, ks: Sequence[int], *, mixes: bool
) -> IterationCosts:
    """From the medians over requests: what a round took, whoever was next to it."""
    paces: dict[int, float] = {}
    for k in ks:
        of_k = [load for load in loads if load[0].k == k]
        decode_s = np.concatenate([_known(timing.user_decode_s) for timing, _ in of_k])
        rounds = np.concatenate([_rounds(*load) for load in of_k])
        paces[k] = float(np.median(decode_s[rounds > 0] / rounds[rounds > 0]))
    times = RoundTimes(paces[0], tuple((k, paces[k]) for k in ks if k))
    spent = [
        np.array(alone.user_s) - _known(alone.user_decode_s) - _known(alone.user_prefill_s)
        for alone, _ in loads
        if alone.concurrency == 1
    ]
    client_s = max(0.0, float(np.median(np.concatenate(spent)))) if spent else 0.0
    starts = Starts(0.0, 0.0, (0.0, 0.0) if mixes else None)
    looked_up = [requests for timing, requests in loads if timing.k and looks_up(timing.draft)]
    # Whether there are rounds that find nothing
    if any(not request.most.all() for requests in looked_up for request in requests):
        times = replace(times, round_s=((0, paces[0]), *times.round_s))
    by_batch = dict.fromkeys(range(1, slots + 1), times)
    return IterationCosts(BatchTimes(by_batch), starts, starts, client_s)


def _known(seconds: Sequence[float | None]) -> Array:
    return np.array(seconds, dtype=np.float64)


def _rounds(timing: LoadTiming, requests: Sequence[Request]) -> Array:
    told = [each or 0 for each in timing.rounds]
    return np.array(told if timing.k else [each.tokens for each in requests], dtype=np.float64)


@dataclass(frozen=True, eq=False)
class _Observed:
    """Prefills and decodings as counts of costs, with requests side by side as at some costs."""

    slots: int  # of the loads
    texts: Sequence[str]  # [n] the name of each one's text
    prefills: NDArray[np.bool_]  # [n] whether it is a prefill
    counts: Array  # [n, column] as of `_counted`
    seconds: Array  # [n] that it took
    # Of the tokens in a request's cache half through its text, the mean, and how far they range
    context_tokens: float
    context_spread: float

    def without(self, names: Collection[str]) -> "_Observed":
        kept = [name not in names for name in self.texts]
        return replace(
            self,
            texts=[*compress(self.texts, kept)],
            prefills=self.prefills[kept],
            counts=self.counts[kept],
            seconds=self.seconds[kept],
        )


def _fitted(observed: _Observed, costs: IterationCosts, *, last: bool) -> IterationCosts | None:
    """The costs that fit the observed best; the last ones add up to the seconds of all requests."""
    slots, mean = observed.slots, observed.context_tokens
    counts, known_s = observed.counts[:, :-1].copy(), observed.counts[:, -1]
    if observed.context_spread < CONTEXT_SPREAD:
        counts[:, -1] = 0.0
    drafts = [n for n, _ in costs.times.by_batch[1].round_s]
    kinds = 1 + len(drafts)
    columns = _increments(counts, slots, kinds)
    fitted = least_absolute(columns, observed.seconds, known_s)
    scatter_s: tuple[float, ...] = (0.0,)
    if last:
        costs_s = columns @ fitted + known_s
        # What the requests took together, as a part of what they cost by the fit of medians
        fitted *= _clipped(observed.seconds, costs_s).sum() / costs_s.sum()
        costs_s = (columns @ fitted + known_s)[observed.prefills]
        scatter_s = _scatter_s(observed.seconds[observed.prefills], costs_s)
    of_rounds, of_starts = slice(slots * kinds), slice(slots * kinds, -1)
    context_token_s = float(fitted[-1])
    rounds_s = np.cumsum(fitted[of_rounds].reshape(kinds, slots), axis=1)
    rounds_s += context_token_s * mean * np.arange(1, slots + 1)
    if rounds_s[:, 0].min() <= 0.0:
        return None
    happened = counts[:, of_starts].sum(axis=0).reshape(2, STARTS)
    mixes = costs.plain.mixed_s is not None
    plain, speculative = (
        _starts(*each, mixes=mixes)
        for each in zip(fitted[of_starts].reshape(2, STARTS), happened, strict=True)
    )
    by_batch = {
        b: RoundTimes(plain_s, tuple(zip(drafts, of_batch, strict=True)))
        for b, (plain_s, *of_batch) in enumerate(rounds_s.T.tolist(), start=1)
    }
    return IterationCosts(
        BatchTimes(by_batch),
        plain,
        speculative,
        costs.client_s,
        context_tokens=mean if context_token_s else 0.0,
        context_token_s=context_token_s,
        prefill_scatter_s=scatter_s,
    )


def _scatter_s(seconds: Array, costs_s: Array) -> tuple[float, ...]:
    """Quantiles of what [n] requests took more than they cost."""
    if not len(seconds):
        return (0.0,)
    more_s = _clipped(seconds, costs_s) - costs_s
    return tuple(np.quantile(more_s, (np.arange(QUANTILES) + 0.5) / QUANTILES).tolist())


def _clipped(seconds: Array, costs_s: Array) -> Array:
    return np.clip(seconds, costs_s / DISTURBED, costs_s * DISTURBED)


def _observed(
    loads: Sequence[SentLoad], slots: int, largest_k: int, costs: IterationCosts
) -> _Observed:
    priced = costs.priced(slots, largest_k)
    kinds = 1 + len(costs.times.by_batch[1].round_s)
    batches = range(1, slots + 1)
    plain = {b: np.eye(1, kinds) for b in batches}
    drafting = {b: shares_of_rounds(costs.times.by_batch[b], largest_k) for b in batches}
    texts: list[str] = []
    prefills: list[NDArray[np.bool_]] = []
    counts: list[Array] = []
    seconds: list[Array] = []
    for timing, requests in loads:
        number = len(requests)
        of_server = priced[min(timing.k, 1)]
        arrivals = timing.due_s or sent_at_once(number, timing.concurrency)
        journal: list[Iteration] = []
        simulate(requests, arrivals, of_server, [timing.k], timing.concurrency, journal)
        decoded = np.array([request.tokens > 0 for request in requests])
        # Which prompts share an iteration depends on fractions of a millisecond of the client
        single = np.zeros(number, dtype=bool)
        for iteration in journal:
            single[list(iteration.entered)] = len(iteration.entered) == 1
        single[: timing.concurrency or 0] = timing.concurrency == 1
        shares = drafting if timing.k else plain
        prefill, decode = _counted((timing, requests), journal, shares, kinds, of_server)
        names = np.array(timing.texts)
        texts += [*names[single].tolist(), *names[decoded].tolist()]
        prefills += [np.ones(single.sum(), dtype=bool), np.zeros(decoded.sum(), dtype=bool)]
        counts += [prefill[single], decode[decoded]]
        seconds += [_known(timing.user_prefill_s)[single], _known(timing.user_decode_s)[decoded]]
    contexts = [r.prompt_tokens + r.tokens / 2.0 for _, requests in loads for r in requests]
    low, high = np.percentile(contexts, [10, 90])
    return _Observed(
        slots,
        texts,
        np.concatenate(prefills),
        np.concatenate(counts),
        np.concatenate(seconds),
        float(np.mean(contexts)),
        float(high - low),
    )


def _starts(costs: Array, counts: Array, *, mixes: bool) -> Starts:
    """From their columns, and how often each was counted: what never happened costs as the like."""
    alone_s, by_one_s, by_several_s, idle_s, token_s = costs.tolist()
    if not counts[BY_ONE]:
        by_one_s = by_several_s
    if not counts[BY_SEVERAL]:
        by_several_s = by_one_s
    return Starts(alone_s, token_s, (by_one_s, by_several_s) if mixes else None, idle_s)


def _counted(
    load: SentLoad,
    journal: Sequence[Iteration],
    shares: Mapping[int, Array],
    kinds: int,
    priced: Costs,
) -> tuple[Array, Array]:
    """[request, column] what each request's prefill and its decoding were made of.

    Columns: a plain token, R of a look-up that finds nothing where there are such, and R of each K,
    by requests active, [kind][slots]; then of a plain server's prompts and of a
    speculating one's, [ALONE, BY_ONE, BY_SEVERAL, IDLE, TOKEN]; then the tokens in caches; last
    the seconds of `Costs.more_steps_s`.
    """
    (timing, requests), slots = load, len(shares)
    width = kinds * slots + 2 * STARTS + 2
    prefill, decode = np.zeros((2, len(requests), width))
    of_starts = kinds * slots + (STARTS if timing.k else 0)

    @cache
    def of_drafts(drafts: tuple[int, ...]) -> tuple[Array, float]:
        mean = np.mean([shares[len(drafts)][n] for n in drafts], axis=0)
        return mean, priced.more_steps_s(drafts)

    for iteration in journal:
        made = np.zeros(width)
        active = iteration.active
        if active:
            of_batch, more_steps_s = of_drafts(tuple(iteration.drafts))
            made[: kinds * slots].reshape(kinds, slots)[:, len(active) - 1] = of_batch
            made[-1] = more_steps_s
        if iteration.entered:
            tokens = sum(requests[place].prompt_tokens for place in iteration.entered)
            made[of_starts + min(len(active), BY_SEVERAL)] = 1.0
            made[of_starts + TOKEN] = tokens
            made[of_starts + IDLE] = iteration.idle
        made[-2] = iteration.context
        prefill[list(iteration.entered)] = made
        for slot in active:
            decode[slot.place] += iteration.number * made
    return prefill, decode


def _increments(columns: Array, slots: int, kinds: int) -> Array:
    """The columns of R(n, 1), R(n, 2) - R(n, 1), ..., none of which is below 0."""
    rounds = columns[:, : kinds * slots].reshape(-1, kinds, slots)
    above = np.cumsum(rounds[..., ::-1], axis=2)[..., ::-1]
    return np.hstack([above.reshape(len(columns), -1), columns[:, kinds * slots :]])


def least_absolute(columns: Array, seconds: Array, known_s: Array) -> Array:
    """The cost of each of the [n, column] counts, none below 0, by least absolute deviations.

    Errors are relative to the [n] seconds, of which some are known already. What took no time by
    its clock is left out.
    """
    timed = seconds > 0.0
    counts = columns[timed] / seconds[timed, None]
    # Its dual, which has as many constraints as there are costs: they are its multipliers
    found = linprog(
        known_s[timed] / seconds[timed] - 1.0,
        A_ub=counts.T,
        b_ub=np.zeros(counts.shape[1]),
        bounds=(-1.0, 1.0),
        method="highs",
    )
    return np.maximum(0.0, -np.asarray(found.ineqlin.marginals))
