"""Latency of a server's users: the first token (TTFT), each further one (TPOT), the whole answer.

A request is one prompt in one visit, as it was, on the client's clock; a speedup rests on times
that are settled over visits, and a wait is whatever it was. The server's own clock says what came
after the first token, so what is left is the wait for it: the queue, the prefill and the way there.
Tokens of a round arrive in bundles, so the time per token is the request's, not between two tokens.

A percentile is of the whole workload, in which prompt sets count by their weights. It is given
where at least one request is expected beyond it: p50 from 2 requests on, p95 from 20, p99 from 100.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from harness.analysis.batch_schedule import by_load, full_loads
from harness.records import LoadTiming, ServingEngine, Trial, grouped, set_of
from harness.stats.jackknife import Weights, token_weights
from harness.summary import Percentiles, UserLatency

PERCENTS = (50, 95, 99)


class _Request(NamedTuple):
    """One request; None where the server does not tell."""

    prompt_set: str
    request_s: float | None  # until the end of its answer
    decode_s: float | None  # after its first token
    tokens: int  # in that time; our own loop's first among them


def one_by_one(
    trials: Sequence[Trial], engine: ServingEngine, weights: Weights
) -> Iterator[UserLatency]:
    """By temperature and K, of requests that were sent outside of a load.

    Trials are of every visit; those of a run that did not store what the client saw are taken by
    the server's clock, where that is the run's. Prompt sets have equal weights if None.
    """
    done = [trial for trial in trials if trial.status == "ok"]
    seen = [trial for trial in done if trial.user_s is not None]
    clock: Literal["client", "engine"] = "client" if seen else "engine"
    if not seen:
        seen = done if engine.clock == "engine" else []
    cells = grouped(seen, lambda t: (t.temperature, t.k))
    for (temperature, k), made in sorted(cells.items()):
        row = UserLatency(temperature, k, 1, None, load=False, clock=clock)
        waits = _waits([*map(_of_trial, made)], engine, weights)
        if waits:
            yield replace(row, **waits)


def _of_trial(trial: Trial) -> _Request:
    request_s, decode_s = trial.user_s, trial.user_decode_s
    if request_s is None:
        decode_s = trial.decode_s
        if decode_s is not None and trial.prefill_s is not None:
            request_s = trial.prefill_s + decode_s
    return _Request(trial.prompt_set, request_s, decode_s, trial.new_tokens or 0)


def under_load(
    timings: Sequence[LoadTiming], engine: ServingEngine, weights: Weights
) -> Iterator[UserLatency]:
    """By temperature, load and K, closed loops first; arguments as of `one_by_one`."""
    for made in by_load(full_loads(timings)):
        requests = [each for timing in made for each in _of_load(timing, engine)]
        first = made[0]
        row = UserLatency(
            first.temperature, first.k, first.concurrency, first.rate, load=True, clock="client"
        )
        if first.rate is not None:
            row = replace(row, behind=float(np.median([_behind(timing) for timing in made])))
        waits = _waits(requests, engine, weights)
        if waits:
            yield replace(row, **waits)


def _behind(timing: LoadTiming) -> float:
    """The server's time beyond the time in which requests came, relative to it.

    Of what came after the last arrival, that is what exceeds the time that requests took at first,
    before others could be waiting.
    """
    ends = np.add(timing.sent_s, timing.user_s)
    alone_s = float(np.quantile(timing.user_s[: max(1, len(ends) // 4)], 0.9))
    return float(max(0.0, ends.max() - timing.due_s[-1] - alone_s) / timing.due_s[-1])


def _of_load(timing: LoadTiming, engine: ServingEngine) -> Iterator[_Request]:
    decode_s = timing.user_decode_s or (None,) * len(timing.user_s)
    first = engine.first_position
    prefilled = 1 if first is None else first
    # From when it was due, which is when the user would have sent it
    late_s = np.subtract(timing.sent_s, timing.due_s) if timing.due_s else np.zeros(len(decode_s))
    waits_s = np.add(timing.user_s, late_s).tolist()
    for user_s, each_s, returned in zip(waits_s, decode_s, timing.returned, strict=True):
        yield _Request(set_of(timing.group), user_s, each_s, returned - prefilled)


def _waits(requests: Sequence[_Request], engine: ServingEngine, weights: Weights) -> dict[str, Any]:
    """The numbers of a row; empty where no prompt set of it counts."""
    counted = [r for r in requests if weights is None or weights.get(r.prompt_set, 1.0) > 0]
    if not counted:
        return {}
    first_s: list[float | None] = []
    each_s: list[float | None] = []  # an answer of one token has none to wait for
    for _, request_s, decode_s, tokens in counted:
        first = None if request_s is None or decode_s is None else request_s - decode_s
        first_s.append(None if engine.first_position == 0 else first)
        each_s.append(None if decode_s is None else decode_s / tokens if tokens else 0.0)
    names = [each.prompt_set for each in counted]
    return {
        "requests": len(counted),
        "first_token": _percentiles(names, first_s, weights),
        "per_token": _percentiles(names, each_s, weights),
        "request": _percentiles(names, [each.request_s for each in counted], weights),
    }


def _percentiles(
    prompt_sets: Sequence[str], times: Sequence[float | None], weights: Weights
) -> Percentiles | None:
    """The percentiles of the known times, each of a prompt set; None without any."""
    known = [pair for pair in zip(prompt_sets, times, strict=True) if pair[1] is not None]
    if not known:
        return None
    names, seconds = zip(*known, strict=True)
    # Equal ones are 1.0, whose sums are exact: which request a percentile is hangs on them
    weight = len(names) * token_weights(names, np.ones(len(names)), weights)

    def percentile(percent: int) -> float | None:
        if len(known) * (100 - percent) < 100:
            return None
        # The method that takes weights
        return float(np.percentile(seconds, percent, weights=weight, method="inverted_cdf"))

    return Percentiles(*map(percentile, PERCENTS))
