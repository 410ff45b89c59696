"""Caveats on times: other work, heat, whose rounds price a run, and predictions."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import get_args

from harness import formatting as fmt
from harness.analysis.caveats.record import Quoted, caveat
from harness.analysis.cells import PredictionError
from harness.analysis.round_costs import UNLIKE, Latency, plain_tokens_apart
from harness.analysis.setup import Setup
from harness.engine_facts.engines import OWN, spec_of
from harness.records import CardReadings, ThrottleReason
from harness.storage.manifest import EngineCosts
from harness.summary import Answer, Basis, RoundSummary, StepBound, Values
from harness.theory.speedup import StepTimes

# Share of all processors that other work may take before it is reported
BUSY = 0.1
# By how much the power limit may lower a card's SM clock, of the highest, without a caveat
CAPPED = 0.1
# Of the readings of a card that was busy, those with a reason for it to be a caveat
LEAST_THROTTLED = 0.01
# Those that say more before those that are set along with them
THROTTLE_REASONS: tuple[ThrottleReason, ...] = get_args(ThrottleReason)


# ---- other work, and heat ------------------------------------------------------------------------


def _say_busy_machine(values: Quoted) -> str:
    if values.get("processes"):
        others = fmt.number_of(values["processes"], "other process", "other processes")
        return f"{others} used the card while this run was timed: time it on a card of its own"
    share = values["load"] / values["processors"]
    busy = f"other work took {share:.0%} of the processors"
    if values.get("clock") == "cpu":
        return (
            f"{busy}; processor time (clock=cpu) leaves waiting out, but shared caches still slow"
            " what is timed"
        )
    again = ", or with clock=cpu, on one thread" if values.get("clock") == "engine" else ""
    return f"{busy}; repeat on a quiet machine{again}"


@caveat("caution", _say_busy_machine)
def busy_machine(setup: Setup) -> Iterator[Values]:
    """Other work on the processors, and of other processes on the card, while times were taken.

    load: processors that it kept busy, on average, of so many. clock: "wall"; "engine" of servers
    that the run started and that tell their own times; "cpu" of processor time.
    """
    if setup.command == "snapshot":  # whose question is no timing
        return
    load, engine = setup.run.manifest.other_load, setup.engine
    if load is not None and load.load > BUSY * load.processors:
        values: Values = {**asdict(load), "clock": "wall"}
        if setup.run.config.get("clock") == "cpu" and engine is None:
            values["clock"] = "cpu"
        elif engine is not None and engine.name != OWN.name and engine.started:
            values["clock"] = "engine" if engine.clock == "engine" else "cpu"
        yield values
    if processes := setup.run.manifest.other_gpu_processes:
        yield {"processes": processes}


def _say_throttled_card(values: Quoted) -> str:
    device, (slowed_by, remedy) = values["device"], _THROTTLED[values["reason"]]
    return (
        f"the card{'' if device is None else f' {device}'} was slowed by {slowed_by} in"
        f" {values['throttled']} of {values['samples']} readings while it was measured: its times"
        f" are those of a throttled card; {remedy}, and time again (manifest.json has its readings)"
    )


@caveat("caution", _say_throttled_card)
def throttled_card(setup: Setup) -> Iterator[Values]:
    """What lowered the card's clocks while it was measured: heat, a brake, or its power limit.

    Of several reasons the one of most samples is named; `hw_slowdown` is set along with those that
    say more. throttled, samples: readings with it, and in all; device: the card that had most.
    """
    entries = setup.run.manifest.card_readings
    counted = [(entry, _throttled(entry)) for entry in entries]
    samples = sum((by_reason for _, by_reason in counted), Counter[ThrottleReason]())
    if samples:
        reason = max(THROTTLE_REASONS, key=lambda one: samples[one])
        worst, _ = max(counted, key=lambda each: each[1][reason])
        yield {
            "reason": reason,
            "throttled": samples[reason],
            "samples": sum(entry.busy or entry.samples for entry in entries),
            "device": worst.device,
        }


def _throttled(entry: CardReadings) -> Counter[ThrottleReason]:
    """The samples of each reason that counts.

    Most cards reach their power limit under load, and some (L4, A10G) run at it all the time, far
    below their highest clock: that is how the card performs. So a limit counts where it is not
    known to be the card's own, and only if the clocks fell by more than `CAPPED`.
    """
    clock, most = entry.capped_sm_mhz, entry.max_sm_mhz
    fell = clock is not None and most is not None and clock < (1.0 - CAPPED) * most
    limit, default = entry.power_limit_w, entry.default_power_limit_w
    is_default = limit is not None and default is not None and limit >= default
    least = LEAST_THROTTLED * (entry.busy or entry.samples)
    return Counter(
        {
            reason: samples
            for reason, samples in (entry.throttled or {}).items()
            if samples >= least and (reason != "power_cap" or (fell and not is_default))
        }
    )


# What slowed the card, and what to do about it
_THROTTLED = {
    "hw_thermal": ("heat (the hardware's slowdown)", "cool it"),
    "sw_thermal": ("heat (the driver's slowdown)", "cool it"),
    "power_brake": ("the board's power brake", "look at the machine's power supply"),
    "hw_slowdown": ("the hardware's slowdown (heat or power)", "look at its cooling and power"),
    "power_cap": ("its power limit", "raise its power limit"),
}


# ---- times that do not fit -----------------------------------------------------------------------


def _say_plain_tokens_unlike(values: Quoted) -> str:
    if values["drafts"] > 1:
        return f"unsteady machine: a plain token took {values['times']}; their ranks do not compare"
    return (
        f"unsteady machine: a plain token took {values['times']} in the loop,"
        f" {fmt.in_ms(values['step_s'])} ms alone"
    )


@caveat("caution", _say_plain_tokens_unlike)
def plain_tokens_unlike(
    latencies: Mapping[float, Mapping[str, Latency]], answers: Sequence[Answer]
) -> Iterator[Values]:
    """Where the target's plain token differs by far more than timing scatters, the worst case.

    It is the same work next to whichever draft, and nearly that of a bare step, against which that
    of a single draft is held. Not where an answer is undecided for it.
    times: "1.6 to 6.3 ms with a and b", or of one "6.3 ms"; drafts: how many.
    """
    found: dict[float, Values] = {}
    refused = {answer.temperature for answer in answers if answer.reason == "drafts_not_compared"}
    for temperature, by_draft in latencies.items():
        timed = {
            draft: latency
            for draft, latency in by_draft.items()
            if latency.visits is not None
            and latency.visits.temperature == temperature
            and latency.rounds.other_plain_s is None
        }
        values: Values = {"temperature": temperature, "drafts": len(timed), "step_s": None}
        if len(timed) == 1:
            (latency,) = timed.values()
            plain_s, step_s = latency.rounds.plain_s, latency.steps and latency.steps.target_s
            apart = 1.0 if step_s is None else max(plain_s, step_s) / min(plain_s, step_s)
            if apart > UNLIKE:
                times = f"{fmt.in_ms(plain_s)} ms"
                found[apart] = {**values, "times": times, "step_s": step_s}
        elif temperature not in refused and (gaps := plain_tokens_apart(timed)):
            named = {draft for drafts in gaps for draft in drafts}
            plain = {draft: timed[draft].rounds.plain_s for draft in named}
            *slower, fastest = sorted(named, key=lambda draft: -plain[draft])
            least, most = fmt.in_ms(plain[fastest]), fmt.in_ms(plain[slower[0]])
            times = f"{least} to {most} ms with {', '.join(slower)} and {fastest}"
            found[max(gaps.values())] = {**values, "times": times}
    if found:
        yield found[max(found)]


@caveat(
    "caution",
    "measured speedups outside their predictions' intervals: {outside} of {cells} at temperature"
    " {temperature:g} ({prompt_set}, K={k}: {gap:+.1%}); these are widened by {error:.1%} for it",
)
def predictions_off(errors: Mapping[float, PredictionError]) -> Iterator[Values]:
    """Where more measured cells lie outside their predictions' intervals than by chance.

    outside, cells: how many of how many; error: that predictions have besides (standard deviation
    of the logarithm); gap: predicted / measured - 1 of the cell that differs most.
    """
    for error in errors.values():
        if error.off:
            worst, gap = error.worst
            yield {
                "outside": error.outside,
                "cells": len(error.gaps),
                "error": math.sqrt(float(error.variance.value)),
                "prompt_set": worst.prompt_set,
                "temperature": worst.temperature,
                "k": worst.k,
                "gap": math.expm1(gap.value),
            }


@caveat(
    "note",
    "steps of {roles} are mostly overhead of launching kernels, so on another engine rounds may"
    " cost more or less",
)
def launch_bound(bounds: Sequence[StepBound], times: StepTimes | None) -> Iterator[Values]:
    """Whose steps wait for launches, and c = draft step / target step."""
    roles = [bound.role for bound in bounds if bound.launch_bound]
    if roles and times is not None:
        yield {"roles": " and ".join(roles), "c": times.c}


# ---- whose times these are -----------------------------------------------------------------------


def _say_latency_from(values: Quoted) -> str:
    if "engine" not in values:
        return f"step times are those of {values['run']}, not of this run's machine"
    title = spec_of(str(values["engine"])).title
    device = f" on {values['device']}" if values["device"] else ""
    text = (
        f"nothing was timed here: round times are those of {title} {values['version']}"
        f"{device}, measured with draft {values['draft']} in {values['run']}"
    )
    if values["same_shape"]:
        text += f"; {values['same_shape']}: of the same shape, so of the same round times"
    if values["composed"]:
        text += (
            f"; {values['composed']}: not measured there, so its draft steps follow from its size,"
            " and intervals hold how far that may be off"
        )
    return text


@caveat("note", _say_latency_from)
def latency_from(
    setup: Setup, costs: EngineCosts | None, latencies: Mapping[float, Mapping[str, Latency]]
) -> Iterator[Values]:
    """Whose rounds price a run in which nothing was timed, and how each draft's are known.

    run: the folder. Of an engine's costs also which it is, the draft that was measured there, and
    same_shape, composed: names of the drafts whose R follows from that one's.
    """
    if costs is None:
        if setup.latency_from is not None:
            yield {"run": setup.latency_from}
        return

    def drafts(basis: Basis) -> str:
        timed = (each for by_draft in latencies.values() for each in by_draft.items())
        names = (name for name, each in timed if each.served and each.served.basis == basis)
        return ", ".join(dict.fromkeys(names))

    yield {
        "engine": costs.engine.name,
        "version": costs.engine.version,
        "run": costs.run,
        "device": costs.device,
        "draft": costs.draft.name,
        "same_shape": drafts("same_shape"),
        "composed": drafts("composed"),
    }


def _say_priced_from_steps(values: Quoted) -> str:
    if "draft" not in values:
        return (
            "single steps and no rounds were timed, so predictions leave out what a loop does"
            " besides its forwards (some 5 to 15 % of a round): run it again to time rounds"
        )
    return (
        "no rounds of {draft} were timed: with half as long steps it has {speedup:.2f}x at most."
        " Its numbers follow from single steps"
    ).format(**values)


@caveat("caution", _say_priced_from_steps)
def priced_from_steps(
    rounds: Sequence[RoundSummary], untimed: Sequence[Values] = ()
) -> Iterator[Values]:
    """That predictions follow from single steps, for want of timed rounds.

    Of a draft whose rounds were not timed since it loses whatever they cost: its name, its best K,
    tokens_per_round, step (/ the target's), and the speedup that it has at most.
    """
    yield from untimed
    if any(each.source == "steps" for each in rounds):
        yield {}
