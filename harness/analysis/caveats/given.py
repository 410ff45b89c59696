"""Caveats on numbers that were given: typed times, a benchmark's file, a server's counters."""

from collections.abc import Iterator, Sequence

from harness import formatting as fmt
from harness.analysis.caveats.record import Quoted, caveat
from harness.summary import Counted, Values

# Below this share of K tokens a round, the shares of the later positions say little; and above this
# share of all tokens, those of steps that drafted nothing are said
FULL, PLAIN = 0.95, 0.05
# The most that tokens per round of a smaller K were off replay's on the shipped prompt sets, with a
# draft model and with a head (tests/test_running_server.py)
MODEL_ERROR, HEAD_ERROR = 0.02, 0.041


@caveat(
    "note",
    "a verify over K + 1 positions is taken to cost one target step (v = 1); give {key}=[...] to"
    " use measured times",
)
def verify_assumed_equal_step(key: str, verify: object) -> Iterator[Values]:
    """That no times of a verify are given; key: by which they are."""
    if not verify:
        yield {"key": key}


@caveat(
    "note",
    "acceptance by position is of rounds of K={k}, which start in other places than shorter ones:"
    f" for K = {{ks}} it is estimated (at most {MODEL_ERROR:.0%} off replay with a draft model,"
    f" {HEAD_ERROR:.0%} with a head)",
)
def positions_of_longer_drafts(ks: Sequence[int], longest: int) -> Iterator[Values]:
    """The K whose acceptance is estimated from rounds that draft `longest` tokens."""
    shorter = [k for k in ks if k < longest]
    if shorter:
        yield {"ks": ", ".join(map(str, shorter)), "k": longest}


def _say_counters_mixed(values: Quoted) -> str:
    ks, mean, share, k = (values[name] for name in ("ks", "mean", "share", "k"))
    parts = [
        "" if ks is None else f"the server changed its K ({ks}), so the numbers are of a mixture",
        ""
        if mean is None
        else f"rounds drafted {mean:.2f} tokens on average, so the shares of later positions are"
        f" too low for K={k}",
        ""
        if share is None
        else f"{share:.0%} of the tokens come from steps that drafted nothing, and tokens per round"
        " are of the rounds that drafted",
    ]
    return "; ".join(filter(None, parts))


@caveat("note", _say_counters_mixed)
def counters_mixed(total: Counted, ks: Sequence[int], k: int) -> Iterator[Values]:
    """That not every step was a round of K tokens.

    ks: several, as the server told; mean: tokens that a round drafted, where these are fewer;
    share: of the tokens, from steps that drafted nothing. None where it does not apply.
    """
    mean = share = None
    if total.drafted is not None and total.drafted < FULL * k * total.rounds:
        mean = total.drafted / total.rounds
    if total.drafted is not None and total.requests is not None:
        plain = 1.0 - (total.requests + total.rounds + total.accepted) / max(1, total.tokens)
        share = plain if plain > PLAIN else None
    several = ", ".join(map(str, ks)) if len(ks) > 1 else None
    if several is not None or mean is not None or share is not None:
        yield {"ks": several, "mean": mean, "share": share, "k": k}


def _say_benchmark_requests(values: Quoted) -> str:
    limit, failed = values["max_concurrency"], values["failed"]
    parts = [
        f"requests ran at the same time (max_concurrency: {'no limit' if limit is None else limit})"
        ", so its times are of batches; acceptance does not depend on that"
        if limit != 1
        else "",
        f"{fmt.number_of(failed, 'request', 'requests')} failed" if failed else "",
    ]
    return f"{values['file']}: {'; '.join(filter(None, parts))}"


@caveat("note", _say_benchmark_requests)
def benchmark_requests(file: str, concurrency: int | None, failed: int) -> Iterator[Values]:
    """Requests of a benchmark that ran at the same time (None: without a limit), or failed."""
    if concurrency != 1 or failed:
        yield {"file": file, "max_concurrency": concurrency, "failed": failed}
