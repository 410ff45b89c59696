"""What the counters of a running server say: tokens per round, which K pays, drift."""

from collections.abc import Iterator
from datetime import timedelta

from harness.reporting import formatting as fmt
from harness.reporting.sentences import as_sentence
from harness.serving.engines import spec_of
from harness.summary import CountedInterval, Drift, RunningServer, Summary

SHORT_S = 360.0


def verdicts(summary: Summary, server: RunningServer, decision: str | None) -> tuple[str, ...]:
    """What to serve where that is known; what was counted; how acceptance changed.

    `decision` is the verdict on the K of the run; None without times of rounds.
    """
    counted = tuple(_counted(server))
    if decision is None:
        return counted
    return (f"{decision}{_as_it_runs(summary, server)}", *counted)


def _as_it_runs(summary: Summary, server: RunningServer) -> str:
    """The server's own K, where the verdict is of another."""
    row = next((row for row in summary.from_acceptance if row.k == server.k), None)
    named = {answer.named[1] for answer in summary.answers}
    if row is None or server.k in named:
        return ""
    return f" As it runs, K={server.k}: {fmt.speedup(row.speedup)}."


def _counted(server: RunningServer) -> Iterator[str]:
    title, total = spec_of(server.engine).title, server.total
    if total is None:
        yield f"{title} counted no round while it was watched."
        return
    tokens = fmt.decimal(total.tokens_per_round)
    requests = ""
    if total.requests is not None:
        requests = f" of {fmt.number_of(total.requests, 'request', 'requests')}"
    yield (
        f"{title} emits {tokens} tokens per round at K={server.k}"
        f" ({total.rounds:,} rounds{requests} in {clock(total.end_s - total.begin_s)}):"
        f" speculation pays there while a round costs less than {tokens} plain tokens."
    )
    if total.accepted_at:
        yield f"Acceptance by position: {_positions(total)}."
    if server.drift is not None:
        yield as_sentence(_drift(server.drift))


def interval(server: RunningServer, at_s: float) -> str:
    """The interval that ended at this time, in a line, and the drift until then."""
    last = server.intervals[-1] if server.intervals else None
    if last is None or last.end_s != at_s:
        return f"{clock(at_s)}  the counters began anew: the server was restarted"
    if not last.rounds:
        return f"{clock(at_s)}  no round"
    parts = [f"{last.rounds:,} rounds", f"{fmt.decimal(last.tokens_per_round)} tokens per round"]
    if last.accepted_at:
        parts.append(f"acceptance by position {_positions(last)}")
    if server.drift is not None:
        parts.append(_drift(server.drift))
    return f"{clock(at_s)}  {'; '.join(parts)}"


def _positions(counted: CountedInterval) -> str:
    return ", ".join(fmt.decimal(share) for share in counted.acceptance_by_position)


def _drift(drift: Drift) -> str:
    """As "tokens per round fell from 3.33 to 1.90 between the halves of the watch"."""
    before, after = fmt.decimal(drift.before), fmt.decimal(drift.after)
    if not drift.beyond_noise:
        return f"no drift beyond noise ({before} tokens per round in the first half, then {after})"
    changed = "fell" if drift.after < drift.before else "rose"
    return (
        f"DRIFT: tokens per round {changed} from {before} in the first half of the watch to"
        f" {after} in the second, beyond noise"
    )


def clock(seconds: float) -> str:
    """As "60 s", from an hour's tenth on as "0:06:00"."""
    return f"{seconds:.0f} s" if seconds < SHORT_S else str(timedelta(seconds=round(seconds)))
