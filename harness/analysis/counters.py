"""What the counters of a running server say of its drafting.

Counters grow from a server's start on, so two scrapes differ by what was counted between them:
rounds, and rounds that accepted at least j tokens, j = 1 to K. The second / the first is the
acceptance by position, and 1 + the sum of these shares, which is 1 + accepted / rounds, is the
tokens per round that vLLM calls mean acceptance length. It is a little above what a text receives
per round: the round that ends a text may have accepted tokens beyond it. vLLM counts in the step,
llama.cpp and SGLang count a request when it ends. SGLang counts rounds, tokens and requests alone:
each round emits its accepted tokens and one of the target's, and each request has one token of its
prefill, so accepted = tokens - requests - rounds, and nothing is known by position.

A smaller K starts its rounds elsewhere, so its tokens per round are estimated
(`theory.acceptance.positions_at_k`); a larger one is not known at all.

Drift is judged on the intervals of a watch. Rounds of a request resemble each other, so the noise
is that between neighbouring intervals and not that of single rounds: with x an interval's accepted
tokens per round and n its rounds, the mean of (x[i+1] - x[i])^2 / (1/n[i] + 1/n[i+1]) estimates the
variance of one round, hardly raised by a slow change, with 2 (N - 1)^2 / (3 N - 4) degrees of
freedom for N intervals (von Neumann et al., "The mean square successive difference", 1941). The
later half of the intervals is compared with the earlier one by Student's t. That is done anew with
each interval, so look number l has the level 0.05 / (l (l + 1)), and all looks of a watch together,
however long, 0.05. Requests that last longer than an interval are in several, which makes
neighbours alike and the noise too small: intervals are to be several requests long.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from scipy.special import stdtr

from harness.analysis.breakeven import (
    acceptance_rows,
    answers_of,
    priced,
    round_times,
    stored_inputs,
)
from harness.analysis.latency import Latency
from harness.analysis.setup import Setup
from harness.records import MOST_K, Scrape
from harness.stats.jackknife import CONFIDENCE, LARGE
from harness.summary import Caveat, CountedInterval, Drift, RunningServer, Summary
from harness.theory.speedup import StepTimes

# Two in each half
FEWEST_INTERVALS = 4
# Below this share of K tokens a round, the shares of the later positions say little; and above this
# share of all tokens, those of steps that drafted nothing are said
FULL, PLAIN = 0.95, 0.05
# The most that tokens per round of a smaller K were off replay's, on the shipped prompt sets
# (benchmarks/counters.py): the estimate's with a draft model and with a head, and without any
# estimate what rounds of the larger K count
MODEL_ERROR, HEAD_ERROR, COUNTED_ERROR = 0.02, 0.041, 0.083


def analyse_counters(setup: Setup) -> Summary:
    """What a run's scrapes come to, and the K that pays where times of rounds are known."""
    run = setup.run
    server = running_server(run.manifest.engine.name if run.manifest.engine else "", run.scrapes)
    inputs = stored_inputs(run)
    summary = Summary(run=setup.facts(()), running=server, caveats=tuple(_counting(server)))
    if server.total is None or not server.k:
        return summary
    total, k = server.total, server.k
    # llama.cpp has no counter of a position at which nothing was ever accepted
    by_position = bool(total.accepted_at) or (total.drafted is not None and not total.accepted)
    unseen = (0.0,) * (k - len(total.accepted_at))
    positions = (*total.acceptance_by_position, *unseen) if by_position else ()
    rates = {} if positions else {k: min(1.0, total.accepted / (k * total.rounds))}
    rows = tuple(acceptance_rows(rates, positions, range(1, k + 1)))
    steps = None
    if inputs.draft_ms is not None and inputs.target_ms is not None:
        verify_s = tuple(value / 1e3 for value in inputs.verify_ms or ())
        steps = StepTimes(inputs.draft_ms / 1e3, inputs.target_ms / 1e3, verify_s)
    times = round_times(inputs, steps, k)
    caveats = (*summary.caveats, *inputs.caveats)
    if times is None:
        return replace(summary, results=rows, from_acceptance=rows, caveats=caveats)
    covered = [row.k for row in rows if times.covers(row.k)]
    of_times = _times([row.k for row in rows], covered, None if inputs.round_ms else steps)
    rows = tuple(priced(row, times) for row in rows if row.k in covered)
    shown = Latency(times, steps=steps).round_summary("")
    return replace(
        summary,
        answers=answers_of(rows, positions, total.requests),
        results=rows,
        from_acceptance=rows,
        round_times=(replace(shown, source="rounds") if inputs.round_ms else shown,),
        caveats=(*caveats, *of_times),
    )


def running_server(engine: str, scrapes: Sequence[Scrape]) -> RunningServer:
    """The intervals between scrapes, their sum and the drift over them."""
    intervals = tuple(_between(before, now) for before, now in pairwise(scrapes))
    counted = tuple(interval for interval in intervals if interval is not None)
    busy = [interval for interval in counted if interval.rounds]
    total = _sum(busy) if busy else None
    # Drift at the last look, or else at the latest look that found one beyond noise
    looks = [drift_of(busy[:number]) for number in range(len(busy), 0, -1)]
    beyond_noise = (drift for drift in looks if drift is not None and drift.beyond_noise)
    return RunningServer(
        engine=engine,
        k=_k_of(scrapes, total),
        ks=tuple(sorted({scrape.k for scrape in scrapes if scrape.k})),
        intervals=counted,
        total=total,
        restarts=len(intervals) - len(counted),
        drift=next(beyond_noise, looks[0] if looks else None),
    )


def _between(before: Scrape, now: Scrape) -> CountedInterval | None:
    """What was counted between two scrapes; None where the counters began anew."""

    def since(name: str) -> int | None:
        values = getattr(before, name), getattr(now, name)
        return None if None in values else values[1] - values[0]

    tokens, rounds = now.tokens - before.tokens, now.rounds - before.rounds
    requests, drafted, accepted = (since(name) for name in ("requests", "drafted", "accepted"))
    # A position has no counter before it is counted
    earlier = (*before.accepted_at, *(0,) * len(now.accepted_at))
    accepted_at = [value - earlier[j] for j, value in enumerate(now.accepted_at)]
    shrunk = len(now.accepted_at) < len(before.accepted_at)
    known = (value for value in (tokens, rounds, requests, drafted, accepted) if value is not None)
    if shrunk or any(value < 0 for value in (*known, *accepted_at)):
        return None
    if accepted is None:
        accepted = max(0, tokens - (requests or 0) - rounds)
    return CountedInterval(
        begin_s=before.at_s,
        end_s=now.at_s,
        rounds=rounds,
        accepted=accepted,
        tokens=tokens,
        requests=requests,
        drafted=drafted,
        accepted_at=tuple(accepted_at),
    )


def _sum(intervals: Sequence[CountedInterval]) -> CountedInterval:
    longest = max(len(interval.accepted_at) for interval in intervals)
    padded = ([*each.accepted_at, *[0] * (longest - len(each.accepted_at))] for each in intervals)
    requests = [each.requests for each in intervals if each.requests is not None]
    drafted = [each.drafted for each in intervals if each.drafted is not None]
    return CountedInterval(
        begin_s=intervals[0].begin_s,
        end_s=intervals[-1].end_s,
        rounds=sum(each.rounds for each in intervals),
        accepted=sum(each.accepted for each in intervals),
        tokens=sum(each.tokens for each in intervals),
        requests=sum(requests) if requests else None,
        drafted=sum(drafted) if drafted else None,
        accepted_at=tuple(map(sum, zip(*padded, strict=True))),
    )


def _k_of(scrapes: Sequence[Scrape], total: CountedInterval | None) -> int:
    """The most that a round drafts: as stated, or as many as were drafted or have a counter."""
    stated = [scrape.k for scrape in scrapes if scrape.k is not None]
    if stated:
        return max(stated)
    mean = 0.0 if total is None else (total.drafted or 0) / total.rounds
    return max(
        [min(MOST_K, math.ceil(mean - 1e-9)), *(len(scrape.accepted_at) for scrape in scrapes)]
    )


def drift_of(intervals: Sequence[CountedInterval]) -> Drift | None:
    """The later half of the intervals against the earlier one; None for too few intervals."""
    number = len(intervals)
    if number < FEWEST_INTERVALS:
        return None
    rounds = np.array([interval.rounds for interval in intervals], dtype=np.float64)
    accepted = np.array([interval.accepted for interval in intervals], dtype=np.float64)
    steps = np.diff(accepted / rounds) ** 2 / (1.0 / rounds[1:] + 1.0 / rounds[:-1])
    degrees = 2.0 * (number - 1) ** 2 / (3 * number - 4)
    first, second = slice(number // 2), slice(number // 2, None)
    before, after = (accepted[half].sum() / rounds[half].sum() for half in (first, second))
    error = math.sqrt(steps.mean() * (1.0 / rounds[first].sum() + 1.0 / rounds[second].sum()))
    distance = abs(after - before)
    student = 0.0 if distance == 0.0 else min(LARGE, distance / error if error else LARGE)
    chance, look = 2.0 * float(stdtr(degrees, -student)), number - FEWEST_INTERVALS + 1
    return Drift(
        before=1.0 + float(before),
        after=1.0 + float(after),
        beyond_noise=chance < (1.0 - CONFIDENCE) / (look * (look + 1)),
    )


def _counting(server: RunningServer) -> Iterator[Caveat]:
    """What the counters leave open."""
    total, k = server.total, server.k
    if server.restarts:
        yield Caveat("counters_restarted", {"restarts": server.restarts})
    if total is None:
        return
    if len(server.ks) > 1:
        yield Caveat("counters_of_several_k", {"ks": ", ".join(map(str, server.ks))})
    if total.drafted is not None and total.drafted < FULL * k * total.rounds:
        yield Caveat("counters_fewer_drafted", {"mean": total.drafted / total.rounds, "k": k})
    if total.drafted is not None and total.requests is not None:
        plain = 1.0 - (total.requests + total.rounds + total.accepted) / max(1, total.tokens)
        if plain > PLAIN:
            yield Caveat("counters_plain_steps", {"share": plain})
    if not total.accepted_at and total.accepted:
        yield Caveat("counters_without_positions", {"k": k})
    elif k > 1:
        shorter = ", ".join(map(str, range(1, k)))
        errors = {"model": MODEL_ERROR, "head": HEAD_ERROR, "counted": COUNTED_ERROR}
        yield Caveat("counters_of_longer_drafts", {"ks": shorter, "k": k, **errors})


def _times(
    ks: Sequence[int], covered: Sequence[int], priced_by: StepTimes | None
) -> Iterator[Caveat]:
    """What the times of rounds leave open; `priced_by` is None where a run timed rounds."""
    if len(covered) < len(ks):
        left_out = ", ".join(str(k) for k in ks if k not in covered)
        yield Caveat("latency_from_too_short", {"ks": left_out})
    if priced_by is not None and not priced_by.verify_s:
        yield Caveat("verify_assumed_equal_step", {"key": "verify_ms"})
    yield Caveat("counters_under_load")
