"""The sentences on a running server's counters: tokens per round, and which K pays."""

from collections.abc import Iterator

from harness import formatting as fmt
from harness.engine_facts.engines import spec_of
from harness.summary import RunningServer, Summary


def verdicts(summary: Summary, server: RunningServer, decision: str | None) -> tuple[str, ...]:
    """The verdict where there is one, then the counters.

    `decision` is the verdict as a sentence; None where the times of rounds are not known.
    """
    counted = tuple(_counted(server))
    if decision is None:
        return counted
    return (f"{decision}{_present_k(summary, server)}", *counted)


def _present_k(summary: Summary, server: RunningServer) -> str:
    """A sentence on the K that the server has, where the verdict is of another K; else ""."""
    row = next((row for row in summary.from_acceptance if row.k == server.k), None)
    named = {answer.named[1] for answer in summary.answers}
    if row is None or server.k in named:
        return ""
    return f" As it runs, K={server.k}: {fmt.speedup(row.speedup)}."


def _counted(server: RunningServer) -> Iterator[str]:
    title, total = spec_of(server.engine).title, server.total
    if total is None:
        yield f"{title} counted no round between the two scrapes."
        return
    tokens = fmt.decimal(total.tokens_per_round)
    requests = ""
    if total.requests is not None:
        requests = f" of {fmt.number_of(total.requests, 'request', 'requests')}"
    at = f"at K={server.k}"
    if not server.k and total.drafted_per_round:
        at = (
            f"at a K that its counters do not tell, for rounds drafted"
            f" {total.drafted_per_round:.1f} tokens in the mean"
        )
    yield (
        f"{title} emits {tokens} tokens per round {at}"
        f" ({total.rounds:,} rounds{requests} in {total.seconds:.0f} s):"
        f" speculation pays there if a round takes less time than {tokens} ordinary tokens."
    )
    if total.accepted_at:
        shares = ", ".join(map(fmt.decimal, total.acceptance_by_position))
        yield f"Acceptance by position: {shares}."
