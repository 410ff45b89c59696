"""Numbers that were measured elsewhere: by a server's benchmark, or by a run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from harness.analysis.caveats.given import benchmark_requests
from harness.analysis.caveats.prompts import k_left_out
from harness.analysis.caveats.timing import priced_from_steps
from harness.analysis.latency import Latency
from harness.records import UserError
from harness.summary import Caveat


@dataclass(frozen=True)
class ServerBenchmark:
    """What a server's benchmark says."""

    file: str  # where it was read
    k: int | None  # None where the server did not speculate
    positions: tuple[float, ...]  # acceptance by position, K shares; empty where the file has none
    acceptance_rate: float | None  # accepted / drafted
    seconds_per_token: float | None  # None where the file has none
    concurrency: int | None  # most requests at once; None where the client did not limit them
    failed: int
    requests: int | None = None  # that were completed; None where the file has no count


@dataclass(frozen=True)
class MeasuredInputs:
    """What files of elsewhere say, under the keys of break-even's configuration that they fill."""

    # draft_ms, target_ms, verify_ms, k, acceptance_rate, acceptance_by_position: None where no
    # file has it.
    draft_ms: float | None = None
    target_ms: float | None = None
    verify_ms: tuple[float, ...] | None = None
    # plain_ms, round_ms: R(0), and R(K) by K, of a run that timed rounds.
    plain_ms: float | None = None
    round_ms: dict[int, float] | None = None
    k: tuple[int, ...] | None = None
    acceptance_rate: dict[int, float] | None = None
    acceptance_by_position: tuple[float, ...] | None = None
    # K to the speedup that the server itself measured.
    served: dict[int, float] = field(default_factory=dict[int, float])
    requests: int | None = None  # behind the acceptance; of a baseline too, the fewer
    caveats: tuple[Caveat, ...] = ()


def from_run(run: str, latency: Latency, ks: Sequence[int]) -> MeasuredInputs:
    """A run's round times, and the steps that explain them; K that were not timed are left out.

    A run of a version that timed no rounds gives its steps alone.
    """
    steps, rounds = latency.steps, latency.rounds
    covered = tuple(k for k in ks if rounds.covers(k))
    if not covered or steps is None:
        raise UserError(f"latency_from={run}: times no rounds for k={list(ks)}")
    inputs = MeasuredInputs(
        draft_ms=1e3 * steps.draft_s,
        target_ms=1e3 * steps.target_s,
        verify_ms=tuple(1e3 * value for value in steps.verify_s) or None,
        k=covered,
        caveats=tuple(k_left_out.of([k for k in ks if k not in covered], "latency_from")),
    )
    if latency.visits is None:
        from_steps = priced_from_steps.of([latency.round_summary("")])
        return replace(inputs, caveats=(*from_steps, *inputs.caveats))
    round_ms = {k: 1e3 * rounds.at(k) for k in covered}
    return replace(inputs, plain_ms=1e3 * rounds.plain_s, round_ms=round_ms)


def with_baseline(inputs: MeasuredInputs, baseline: ServerBenchmark) -> MeasuredInputs:
    """The target's time per token from a benchmark of the server without speculation."""
    if baseline.k is not None:
        raise UserError(
            f"baseline_from={baseline.file}: that server speculated; give one that did not"
        )
    assert baseline.seconds_per_token is not None  # a file with neither is refused when read
    caveats = (*inputs.caveats, *_load(baseline))
    return replace(inputs, target_ms=1e3 * baseline.seconds_per_token, caveats=caveats)


def with_acceptance(
    inputs: MeasuredInputs,
    speculative: ServerBenchmark,
    ks: Sequence[int],
    baseline: ServerBenchmark | None = None,
) -> MeasuredInputs:
    """The acceptance of a benchmark, and the server's own speedup where its baseline is known."""
    k, rate = speculative.k, speculative.acceptance_rate
    if k is None or rate is None:
        raise UserError(
            f"acceptance_from={speculative.file}: no spec_decode_acceptance_rate or other"
            " spec_decode_* field: that server did not speculate"
        )
    plain_s = baseline.seconds_per_token if baseline else None
    counts = (each.requests for each in (speculative, baseline) if each is not None)
    served_s = speculative.seconds_per_token
    return replace(
        inputs,
        k=tuple(sorted({*(inputs.k or ks), k})),
        acceptance_rate=None if speculative.positions else {k: rate},
        acceptance_by_position=speculative.positions or None,
        served={k: plain_s / served_s} if plain_s and served_s else {},
        requests=min((count for count in counts if count is not None), default=None),
        caveats=(*inputs.caveats, *_load(speculative)),
    )


def _load(benchmark: ServerBenchmark) -> Iterator[Caveat]:
    """What stands between a benchmark under load and one request at a time."""
    return benchmark_requests.of(benchmark.file, benchmark.concurrency, benchmark.failed)
