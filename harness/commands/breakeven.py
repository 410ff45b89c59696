"""The arithmetic alone: from two latencies to speedups, without a model and without torch.

Latencies and acceptance are typed in, or come from a server's files (`server_files`);
`harness.analysis.breakeven` does the arithmetic.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from harness import storage
from harness.analysis import analyse
from harness.analysis.breakeven import iid_rows, inputs_of, measured_rows
from harness.commands.run import Outcome, shown
from harness.commands.server_files import measured_inputs
from harness.config import BreakevenConfig
from harness.measurement.environment import describe_host
from harness.records import LatencyRow, Summary, Verdict
from harness.summary import Caveat
from harness.summary import Summary as NewSummary
from harness.summary import Verdict as NewVerdict
from harness.theory.speedup import StepTimes


def run(config: BreakevenConfig) -> Outcome:
    """Computes every row, stores the run and prints it.

    Raises:
        UserError: a latency <= 0, too few verify times for the largest K, a rate outside [0, 1], or
            a file that cannot be used.
    """
    measured = measured_inputs(config)
    from_files = {key: value for key, value in asdict(measured).items() if value}
    inputs = inputs_of({**asdict(config), **from_files})
    rows = [*iid_rows(inputs), *measured_rows(inputs)]
    folder = storage.RunFolder.create(config.results_root, "breakeven", (), asdict(config))
    folder.write_latency(list(_typed_latency(inputs.times)), ())
    folder.write_results(rows)
    folder.update_manifest({"environment": describe_host(), "inputs": from_files})
    folder.write_summary(*_stored_summary(analyse(storage.load(folder.path))))
    folder.update_manifest({"status": "complete"})
    return shown(folder.path)


def _typed_latency(times: StepTimes) -> Iterator[LatencyRow]:
    """Latencies that were typed, not measured: no samples stand behind them."""
    steps = [("draft", "step", 1, times.draft_s), ("target", "step", 1, times.target_s)]
    steps += [("target", "verify", n, value) for n, value in enumerate(times.verify_s, start=1)]
    for role, kind, tokens, seconds in steps:
        ms = 1e3 * seconds
        yield LatencyRow(role, "", kind, tokens, 0, 1, ms, ms, ms, samples=0)


# ---- until summary.json is written as harness.summary has it ----


def _stored_summary(summary: NewSummary) -> tuple[Summary, dict[str, Any]]:
    (steps,) = summary.steps
    best = max(summary.ceilings, key=lambda entry: entry.ideal_speedup, default=None)
    verdict = summary.verdict
    values = {name: getattr(verdict, name) for name in Verdict.__dataclass_fields__ if verdict}
    headline = {
        "draft_ms": 1e3 * steps.draft_step_s,
        "target_ms": 1e3 * steps.target_step_s,
        "c": steps.c,
        "step_ratio": 1.0 / steps.c,
        "ideal_k": best.k if best and best.ideal_speedup > 1 else 0,
        "ideal_speedup": max(1.0, best.ideal_speedup) if best else 1.0,
    }
    by_k = [
        {**asdict(entry), "ideal_ms_per_token": 1e3 * entry.ideal_seconds_per_token}
        for entry in summary.ceilings
    ]
    return (
        Summary(
            verdict=Verdict(**{**values, "reason": _reason(verdict)}) if verdict else None,
            caveats=tuple(_caveat(entry) for entry in summary.caveats),
            headline=headline,
        ),
        {
            "by_k": by_k,
            "best_k": [asdict(entry) for entry in summary.best_k],
            "inputs": {
                "draft_ms": 1e3 * steps.draft_step_s,
                "target_ms": 1e3 * steps.target_step_s,
                "verify_ms": [1e3 * value for value in steps.verify_s] or None,
            },
            "round_fit": asdict(summary.round_fit) if summary.round_fit else None,
        },
    )


def _reason(verdict: NewVerdict) -> str:
    values: Any = verdict.reason_values
    k, needed = values["k"], values["breakeven_alpha"]
    how = "measured by the server" if values["measured"] else "by arithmetic"
    reason = f"the best is K={k} at {verdict.speedup:.2f}x {how}"
    if verdict.decision != "speculate" and needed is None:
        reason += f"; at K={k} even alpha = 1 loses"
    elif verdict.decision != "speculate":
        reason += f"; K={k} needs alpha >= {needed:.2f} and has {values['alpha']:.2f}"
    if verdict.decision == "undecided":
        reason += f"; within {values['near']:.0%} of 1, which numbers without an interval cannot"
        reason += " distinguish from it"
    return reason


CAVEATS = {
    "verify_assumed_equal_step": (
        "a verify over K + 1 positions is taken to cost one target step (v = 1); give"
        " verify_ms=[...] to use measured times"
    ),
    "positions_too_short": "acceptance_by_position is too short for k = {ks}; no row from it there",
    "latency_from_too_short": "latency_from times no verify for k = {ks}; left out",
    "server_gap": (
        "the server measured {measured:.2f}x at K={k}, the arithmetic says {predicted:.2f}x: verify"
        " and overhead are not what was given"
    ),
    "server_concurrency": (
        "{file}: requests ran at the same time (max_concurrency: {max_concurrency}), so its times"
        " are of batches; acceptance does not depend on that"
    ),
    "server_failed_requests": "{file}: {requests} requests failed",
    "round_fit": (
        "from {file}: draft step, target step and the rest of a round are a line through its"
        " rounds, which misses one by {residual:.1%} (K={k}) at most"
    ),
    "fit_not_separated": (
        "such a log cannot separate the verify from the loop's overhead: they are one number;"
        " verify_ms=[...] or latency_from=RUN gives the verify's own curve"
    ),
    "fit_negative_overhead": (
        "the overhead comes out below 0: the verify times given are longer than this log's"
    ),
    "fit_untested": "two different K: the line goes through both, so nothing tests it",
}


def _caveat(entry: Caveat) -> str:
    values = {key: "no limit" if value is None else value for key, value in entry.values.items()}
    return CAVEATS[entry.code].format(**values)
