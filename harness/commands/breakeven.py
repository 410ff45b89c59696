"""The arithmetic alone: from two latencies to speedups, without a model and without torch.

For each K and alpha the iid model's speedup (Leviathan et al. 2023, theorem 3.8, with v(K) where
verify times are given), for each K the ideal speedup and the alpha that breaks even. A measured
acceptance, a rate at one K or a list by position, needs no model of the text: its speedup is
tokens_per_round / (K c + v) exactly, and its row carries that acceptance_rate. With one there is a
verdict; latencies and acceptance may come from files of elsewhere (`harness.commands.given`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from harness import storage
from harness.analysis import given_verdict as verdict
from harness.commands.given import Given, gathered
from harness.commands.outcome import Outcome
from harness.commands.running import shown
from harness.commands.validate import validated
from harness.config import BreakevenConfig
from harness.measurement.host import describe_host
from harness.records import LatencyRow, ResultRow, Summary, UserError, Verdict
from harness.theory import acceptance
from harness.theory import speedup as theory
from harness.theory.speedup import StepTimes


def run(config: BreakevenConfig) -> Outcome:
    """Computes every row, stores the run and prints it.

    Raises:
        UserError: a latency <= 0, too few verify times for the largest K, a rate outside [0, 1], or
            a source that cannot be used.
    """
    given = gathered(validated(config))
    config, asked = given.config, config
    times = step_times(config)
    ks = sorted({k for k in config.k if k > 0})
    measured = [*measured_rows(config, times, ks)]
    rows = [*iid_rows(config, times, ks), *measured]
    summary = Summary(
        verdict=_verdict(measured, given.served),
        caveats=(*_caveats(config, ks), *given.caveats, *_gaps(measured, given)),
        headline=_headline(times, ks),
    )
    used = {
        "draft_ms": config.draft_ms,
        "target_ms": config.target_ms,
        "verify_ms": config.verify_ms,
    }
    details = {"by_k": _by_k(times, ks), "best_k": _best_k(config, times, ks), "inputs": used}

    folder = storage.RunFolder.create(config.results_root, "breakeven", (), asdict(asked))
    folder.write_latency(list(_latency_rows(config)), ())
    folder.write_results(rows)
    folder.write_summary(summary, {**details, **given.extra})
    folder.update_manifest({"environment": describe_host(), "status": "complete"})
    return shown(folder.path)


def step_times(config: BreakevenConfig) -> StepTimes:
    """The configured latencies in seconds; verify_ms[i] is the time for i + 1 positions.

    Raises:
        UserError: a time that is not above 0.
    """
    verify_s = tuple(value / 1e3 for value in config.verify_ms or ())
    if config.verify_ms is not None and not verify_s:
        raise UserError("verify_ms=[]: give the times for 1, 2, ... positions, or leave it out")
    return StepTimes((config.draft_ms or 0.0) / 1e3, (config.target_ms or 0.0) / 1e3, verify_s)


def iid_rows(config: BreakevenConfig, times: StepTimes, ks: list[int]) -> Iterator[ResultRow]:
    """One row per (K, alpha), by the iid formulas."""
    if not config.alpha:
        raise UserError("alpha=[]: give at least one, for example alpha=[0.6,0.8,1.0]")
    if len(set(config.alpha)) != len(config.alpha):
        raise UserError("alpha: a value is given twice; list each once")
    for k in ks:
        for alpha in config.alpha:
            tokens = acceptance.expected_tokens_per_round(alpha, k)
            yield _row(times, k, alpha, acceptance.acceptance_rate_from_alpha(alpha, k), tokens)


def measured_rows(config: BreakevenConfig, times: StepTimes, ks: list[int]) -> Iterator[ResultRow]:
    """A row for each K whose acceptance was measured; its alpha is derived from what was.

    From a rate, alpha is the one that gives this rate under the iid model. From a list by position
    it is accepted / (accepted + rejected), and K up to the list's length are answered.
    """
    for k, rate in measured_rates(config.acceptance_rate, ks).items():
        alpha = acceptance.alpha_from_acceptance_rate(rate, k)
        yield _row(times, k, alpha, rate, 1.0 + k * rate)
    positions = config.acceptance_by_position
    if positions is None:
        return
    acceptance.acceptance_rate_from_positions(positions)  # refuses a bad list whatever k is
    for k in (k for k in ks if k <= len(positions)):
        shown = positions[:k]
        rate = acceptance.acceptance_rate_from_positions(shown)
        tokens = acceptance.mean_acceptance_length_from_positions(shown)
        yield _row(times, k, acceptance.alpha_from_positions(shown), rate, tokens)


def measured_rates(given: Any, ks: list[int]) -> dict[int, float]:
    """acceptance_rate by K: what was typed is {K: rate}, or one number where k holds one K.

    Raises:
        UserError: a number beside several K (a rate belongs to the K it was measured at), a K that
            k does not list, or something else altogether.
    """
    if given is None:
        return {}
    if isinstance(given, int | float) and not isinstance(given, bool):
        if len(ks) != 1:
            raise UserError(
                f"acceptance_rate={given}: a rate belongs to the K it was measured at; give that"
                " K alone as k=[K], or a rate for each as 'acceptance_rate={4:0.34,8:0.21}'"
            )
        return {ks[0]: float(given)}
    if not isinstance(given, Mapping):
        raise UserError(f"acceptance_rate={given}: give a number, or {{K: rate}}")
    rates: dict[int, float] = {}
    for key, rate in given.items():
        if not str(key).isdigit() or int(key) not in ks:
            raise UserError(f"acceptance_rate: {key} is not among k={ks}")
        rates[int(key)] = rate
    return rates


def _row(times: StepTimes, k: int, alpha: float, rate: float, tokens: float) -> ResultRow:
    gain = theory.speedup_from_tokens_per_round(tokens, k, times.c, times.v(k))
    ms_per_token = times.target_s * 1e3 / gain
    return ResultRow(
        model=None,
        draft=None,
        prompt_set=None,
        temperature=None,
        k=k,
        source="theory",
        status="complete",
        acceptance_rate=rate,
        alpha=alpha,
        mean_acceptance_length=tokens,
        tokens_per_round=tokens,
        ms_per_token=ms_per_token,
        tokens_per_second=1e3 / ms_per_token,
        speedup=gain,
        breakeven_alpha=times.break_even_alpha(k),
    )


def _verdict(measured: list[ResultRow], served: Mapping[int, float]) -> Verdict | None:
    """What the acceptance comes to; what a server itself measured goes before the arithmetic."""
    return verdict.decide_given(
        {
            row.k: verdict.Given(
                served.get(row.k, row.speedup or 0.0),
                row.alpha,
                row.breakeven_alpha,
                measured=row.k in served,
            )
            for row in measured
            if row.k in served or not served
        }
    )


def _gaps(measured: list[ResultRow], given: Given) -> Iterator[str]:
    """Where a benchmark's own speedup is not what the arithmetic says, how far it is off."""
    if given.config.log is not None:
        return  # the fit's own residuals say it
    for row in measured:
        own, said = given.served.get(row.k), row.speedup or 0.0
        if own is not None and abs(own - said) > verdict.NEAR * said:
            yield (
                f"the server measured {own:.2f}x at K={row.k}, the arithmetic says {said:.2f}x:"
                " verify and overhead are not what was given"
            )


def _by_k(times: StepTimes, ks: list[int]) -> list[dict[str, float | None]]:
    """What each K could give at best, and needs at least."""
    return [
        {
            "k": k,
            "v": times.v(k),
            "ideal_speedup": theory.ideal_speedup(k, times.c, times.v(k)),
            "ideal_ms_per_token": times.round_s(k) * 1e3 / (k + 1),
            "breakeven_alpha": times.break_even_alpha(k),
        }
        for k in ks
    ]


def _best_k(config: BreakevenConfig, times: StepTimes, ks: list[int]) -> list[dict[str, float]]:
    """The best K at each alpha, 0 (do not speculate) included."""
    v = {k: times.v(k) for k in ks}
    best = ((alpha, theory.best_k(alpha, ks, times.c, v)) for alpha in config.alpha)
    return [{"alpha": alpha, "k": k, "speedup": gain} for alpha, (k, gain) in best]


def _headline(times: StepTimes, ks: list[int]) -> dict[str, float | int | str | None]:
    k, gain = theory.best_k(1.0, ks, times.c, {k: times.v(k) for k in ks})
    return {
        "draft_ms": times.draft_s * 1e3,
        "target_ms": times.target_s * 1e3,
        "c": times.c,
        "step_ratio": times.target_s / times.draft_s,
        "ideal_k": k,
        "ideal_speedup": gain,
    }


def _caveats(config: BreakevenConfig, ks: list[int]) -> tuple[str, ...]:
    caveats: list[str] = []
    if config.verify_ms is None:
        caveats.append(
            "a verify over K + 1 positions is taken to cost one target step (v = 1); give"
            " verify_ms=[...] to use measured times"
        )
    beyond = [k for k in ks if k > len(config.acceptance_by_position or ())]
    if config.acceptance_by_position is not None and beyond:
        listed = ", ".join(str(k) for k in beyond)
        caveats.append(
            f"acceptance_by_position is too short for k = {listed}; no row from it there"
        )
    return tuple(caveats)


def _latency_rows(config: BreakevenConfig) -> Iterator[LatencyRow]:
    yield _typed("draft", "step", 1, config.draft_ms or 0.0)
    yield _typed("target", "step", 1, config.target_ms or 0.0)
    for tokens, value in enumerate(config.verify_ms or (), start=1):
        yield _typed("target", "verify", tokens, value)


def _typed(role: str, kind: str, tokens: int, value_ms: float) -> LatencyRow:
    """A latency that was typed, not measured: no samples stand behind it."""
    return LatencyRow(role, "", kind, tokens, 0, 1, value_ms, value_ms, value_ms, samples=0)
