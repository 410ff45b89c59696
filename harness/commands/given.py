"""What `breakeven` is given besides typed numbers: a benchmark's file, a run's times, a log."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from harness.analysis.fit import LogRow, RoundFit, fit_rounds
from harness.analysis.latency import step_times
from harness.commands.server_log import read_log
from harness.commands.vllm_bench import Bench, read_bench
from harness.config import BreakevenConfig
from harness.records import UserError
from harness.storage import load, timings_from
from harness.theory.speedup import StepTimes

ACCEPTANCE = ("acceptance_rate", "acceptance_by_position", "acceptance_from")


@dataclass(frozen=True)
class Given:
    """A configuration whose numbers are all there, and where they came from.

    Attributes:
        config: with draft_ms, target_ms, verify_ms, k and acceptance filled in.
        served: K to the speedup that a server itself measured.
        caveats: what a reader must know of the sources.
        extra: entries of summary.json.
    """

    config: BreakevenConfig
    served: Mapping[int, float] = field(default_factory=dict)
    caveats: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


def gathered(config: BreakevenConfig) -> Given:
    """Read what the configuration names.

    Raises:
        UserError: two sources of one number, none of a latency, or a file that cannot be used.
    """
    _only_one(config, ACCEPTANCE)
    _only_one(config, ("target_ms", "baseline_from", "latency_from", "log"), unless="log")
    _only_one(config, ("draft_ms", "latency_from", "log"), unless="log")
    _only_one(config, ("verify_ms", "latency_from"))
    if config.log is not None:
        return _from_log(config)
    given = _with_latencies(Given(config))
    missing = [key for key in ("draft_ms", "target_ms") if getattr(given.config, key) is None]
    if missing:
        give = " ".join(f"{key}=..." for key in missing)
        raise UserError(
            f"{missing[0]}: no value and no default; give {give} (or latency_from=RUN, or log=CSV)"
        )
    return given if config.acceptance_from is None else _with_acceptance(given)


def _only_one(config: BreakevenConfig, keys: Sequence[str], unless: str | None = None) -> None:
    """Refuse two sources; with a log, a run's times are its verify curve and no second source."""
    found = [key for key in keys if getattr(config, key) is not None]
    if unless in found and "latency_from" in found:
        found.remove("latency_from")
    if len(found) > 1:
        raise UserError(f"{found[0]} and {found[1]}: give one of the two")


def _from_log(config: BreakevenConfig) -> Given:
    """Everything from the log; a run's or a typed verify curve parts verify from overhead."""
    _refuse(config, ACCEPTANCE)
    rows = read_log(str(config.log))
    curve: tuple[float, ...] = tuple(config.verify_ms or ())
    if config.latency_from is not None:
        curve = _curve(config.latency_from, rows)
    fit = fit_rounds(rows, curve)
    logged = sorted({row.k for row in fit.rows})
    ks = sorted({*config.k, *logged})
    if curve:
        ks = [k for k in ks if k in logged or k < len(curve)]
    times = fit.step_times(max(ks))
    filled = replace(
        config,
        draft_ms=fit.draft_ms,
        target_ms=fit.target_ms,
        verify_ms=[value * 1e3 for value in times.verify_s],
        k=ks,
        acceptance_rate={k: _mean(fit, k, "acceptance_rate") for k in logged},
    )
    served = {k: fit.target_ms / _mean(fit, k, "ms_per_token") for k in logged}
    worst = max(fit.rows, key=lambda row: abs(row.residual))
    caveats = [
        f"from {config.log}: draft step, target step and what a round costs besides are a line"
        f" through its rounds, which misses one by {abs(worst.residual):.1%} (K={worst.k}) at most",
        *_unseparated(fit),
    ]
    return Given(filled, served, tuple(caveats), {"log_fit": _fit_entries(fit)})


def _curve(folder: str, rows: Sequence[LogRow]) -> tuple[float, ...]:
    """The run's verify times as multiples of its target step, in the log's own milliseconds.

    Raises:
        UserError: as `run_times`, or a run that timed no verify as long as the log's.
    """
    times = run_times(folder)
    longest = max((row.k for row in rows), default=0)
    if len(times.verify_s) <= longest:
        raise UserError(
            f"latency_from={folder}: times verifies of up to {len(times.verify_s)} positions, but"
            f" the log's k={longest} verifies {longest + 1}; leave latency_from out, or name a run"
            " with a larger k"
        )
    baseline = [row.ms_per_token for row in rows if row.k == 0]
    mean = sum(baseline) / max(1, len(baseline))  # none at all is refused by the fit
    return tuple(mean * value / times.target_s for value in times.verify_s)


def _unseparated(fit: RoundFit) -> list[str]:
    notes: list[str] = []
    if not fit.separated:
        notes.append(
            "such a log cannot part the verify from the loop's overhead: they are one number,"
            " v + overhead, the same at every K, and what a longer verify adds per position is in"
            " the draft step; verify_ms=[...] or latency_from=RUN gives the verify's own curve"
        )
    elif fit.rest_ms < 0:
        notes.append(
            "the overhead comes out below 0: the verify times given are longer than this log's"
        )
    if fit.draft is None:
        notes.append("two different K: the line goes through both, so nothing tests it")
    return notes


def _mean(fit: RoundFit, k: int, name: str) -> float:
    values = [getattr(row, name) for row in fit.rows if row.k == k]
    return sum(values) / len(values)


def _fit_entries(fit: RoundFit) -> dict[str, Any]:
    return {
        **{key: value for key, value in asdict(fit).items() if key not in ("draft", "rest")},
        "draft_lo_hi": list(fit.draft) if fit.draft else None,
        "rest_lo_hi": list(fit.rest) if fit.rest else None,
        "c": fit.c,
        "c_lo_hi": [bound / fit.target_ms for bound in fit.draft] if fit.draft else None,
        "rest_steps": fit.rest_steps,
        "rest_steps_lo_hi": [bound / fit.target_ms for bound in fit.rest] if fit.rest else None,
    }


def _refuse(config: BreakevenConfig, keys: Sequence[str]) -> None:
    for key in keys:
        if getattr(config, key) is not None:
            raise UserError(f"log and {key}: the log has its own acceptance; leave out {key}")


def _with_latencies(given: Given) -> Given:
    config = given.config
    if config.latency_from is not None:
        times = run_times(config.latency_from)
        verify = [value * 1e3 for value in times.verify_s]
        ks = [k for k in config.k if times.covers(k)]
        if not ks:
            raise UserError(f"latency_from={config.latency_from}: times no verify for k={config.k}")
        left = [str(k) for k in config.k if k not in ks]
        note = f"latency_from times no verify for k = {', '.join(left)}; left out"
        filled = replace(
            config,
            draft_ms=times.draft_s * 1e3,
            target_ms=times.target_s * 1e3,
            verify_ms=verify or None,
            k=ks,
        )
        return replace(given, config=filled, caveats=(note,) if left else ())
    if config.baseline_from is None:
        return given
    bench = read_bench("baseline_from", config.baseline_from)
    if bench.k is not None:
        raise UserError(
            f"baseline_from={bench.file}: that server speculated; give one that did not"
        )
    assert bench.tpot_ms is not None  # `read_bench` refuses a file with neither
    return replace(
        given, config=replace(config, target_ms=bench.tpot_ms), caveats=tuple(_load(bench))
    )


def run_times(folder: str) -> StepTimes:
    """The step times of a run with one draft.

    Raises:
        UserError: not a run with step times, or one with several drafts.
    """
    timings = timings_from(load(folder).latency_samples)
    drafts = sorted({timing.model for timing in timings if timing.role == "draft"})
    if not drafts or not any(timing.role == "target" for timing in timings):
        raise UserError(f"latency_from={folder}: no step times there; name a profile or a sweep")
    if len(drafts) > 1:
        raise UserError(
            f"latency_from={folder}: times of {', '.join(drafts)}; name a run with one draft"
        )
    return step_times(timings)


def _with_acceptance(given: Given) -> Given:
    """The acceptance of a benchmark's file, and its own speedup where a baseline's is known."""
    config = given.config
    bench = read_bench("acceptance_from", str(config.acceptance_from))
    if bench.k is None or bench.acceptance_rate is None:
        raise UserError(
            f"acceptance_from={bench.file}: no spec_decode_acceptance_rate or other spec_decode_*"
            " field: that server did not speculate"
        )
    ks = sorted({*config.k, bench.k})
    filled = replace(config, k=ks)
    if bench.positions:
        filled = replace(filled, acceptance_by_position=list(bench.positions))
    else:
        filled = replace(filled, acceptance_rate={bench.k: bench.acceptance_rate})
    served: dict[int, float] = {}
    if config.baseline_from is not None and bench.tpot_ms is not None:
        served[bench.k] = (config.target_ms or 0.0) / bench.tpot_ms
    caveats = (*given.caveats, *_load(bench))
    return Given(
        filled, served, tuple(dict.fromkeys(caveats)), {"acceptance_source": asdict(bench)}
    )


def _load(bench: Bench) -> list[str]:
    """What stands between a benchmark under load and one request at a time."""
    notes: list[str] = []
    if bench.concurrency != 1:
        limit = "no limit" if bench.concurrency is None else str(bench.concurrency)
        notes.append(
            f"{bench.file}: requests ran side by side (max_concurrency: {limit}), so its times are"
            " of batches; acceptance does not mind"
        )
    if bench.failed:
        notes.append(f"{bench.file}: {bench.failed} requests failed")
    return notes
