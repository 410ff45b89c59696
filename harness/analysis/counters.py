"""The drafting of a running server, from its counters.

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
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from harness.analysis.breakeven import acceptance_rows, answers_of, known_round_times, stored_inputs
from harness.analysis.caveats import given
from harness.analysis.caveats.prompts import k_left_out
from harness.analysis.cells import priced
from harness.analysis.round_costs import Latency
from harness.analysis.setup import Setup, run_facts
from harness.records import MOST_K, Scrape
from harness.summary import Caveat, Counted, RunningServer, Summary
from harness.theory.speedup import StepTimes

# What the ends of texts take off the tokens that a round drafts in the mean, at most
SHORTENED = 0.25


def analyse_counters(setup: Setup) -> Summary:
    """The counts of a run's scrapes, and the K that pays where times of rounds are known."""
    run = setup.run
    server = running_server(run.manifest.engine.name if run.manifest.engine else "", run.scrapes)
    inputs, total, k = stored_inputs(run), server.total, server.k
    caveats: list[Caveat] = []
    if total is not None:
        caveats += given.counters_mixed.of(total, server.ks, k)
        if total.accepted_at or not total.accepted:
            caveats += given.positions_of_longer_drafts.of(range(1, k), k)
    summary = Summary(run=run_facts(setup, ()), running=server, caveats=tuple(caveats))
    if total is None or not k:
        return summary
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
    times = known_round_times(inputs, steps, k)
    caveats += inputs.caveats
    if times is None:
        return replace(summary, results=rows, from_acceptance=rows, caveats=tuple(caveats))
    caveats += k_left_out.of([row.k for row in rows if not times.covers(row.k)], "latency_from")
    if steps is not None and not inputs.round_ms:
        caveats += given.verify_assumed_equal_step.of("verify_ms", steps.verify_s)
    rows = tuple(priced(row, times) for row in rows if times.covers(row.k))
    shown = Latency(times, steps=steps).round_summary("")
    return replace(
        summary,
        answers=answers_of(rows, positions, total.requests),
        results=rows,
        from_acceptance=rows,
        round_times=(replace(shown, source="rounds") if inputs.round_ms else shown,),
        caveats=tuple(caveats),
    )


def running_server(engine: str, scrapes: Sequence[Scrape]) -> RunningServer:
    counted = counted_between(scrapes[0], scrapes[-1])
    total = counted if counted is not None and counted.rounds else None
    return RunningServer(
        engine=engine,
        k=_k_of(scrapes, total),
        ks=tuple(sorted({scrape.k for scrape in scrapes if scrape.k})),
        total=total,
    )


def counted_between(before: Scrape, now: Scrape) -> Counted | None:
    """The counts between two scrapes; None where the counters began anew."""

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
    return Counted(
        seconds=now.at_s - before.at_s,
        rounds=rounds,
        accepted=accepted,
        tokens=tokens,
        requests=requests,
        drafted=drafted,
        accepted_at=tuple(accepted_at),
    )


def _k_of(scrapes: Sequence[Scrape], total: Counted | None) -> int:
    """The most that a round drafts: as stated, or as many as nearly every round drafts.

    0 where that is not known: a threshold, a look-up or an adaptive K ends drafts early. Then the
    mean is further below the next whole number than the ends of texts make it, or more tokens than
    that were accepted at once.
    """
    stated = [scrape.k for scrape in scrapes if scrape.k is not None]
    if stated:
        return max(stated)
    accepted = max(len(scrape.accepted_at) for scrape in scrapes)
    mean = None if total is None else total.drafted_per_round
    if mean is None:
        return accepted
    k = min(MOST_K, math.ceil(mean - 1e-9))
    return k if accepted <= k and k - mean <= SHORTENED else 0
