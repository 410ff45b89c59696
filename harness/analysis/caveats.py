"""What a reader must know before acting on a run: caveats (codes with their values), failures.

`harness.summary` lists the values of each code; its sentence is made in
`harness.reporting`.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import get_args

import numpy as np

from harness.analysis.latency import Latency
from harness.analysis.setup import Setup
from harness.records import (
    BUSY,
    CardReadings,
    Failure,
    Measurement,
    NotMeasured,
    ResultRow,
    ServingEngine,
    StepTiming,
    ThrottleReason,
    Trial,
    grouped,
    where,
)
from harness.serving.engines import OWN
from harness.stats.jackknife import MIN_PROMPTS
from harness.storage.manifest import EngineCosts
from harness.summary import (
    Answer,
    Basis,
    Caveat,
    CaveatCode,
    DistributionTest,
    OutlierCell,
    RoundSummary,
    StepBound,
    TextCheck,
    Unstable,
    Values,
)
from harness.theory.speedup import StepTimes

NOTHING_TESTED = "every distribution is nearly certain: nothing could be tested"
# A step spread this wide says that something else was using the machine.
WIDE_SPREAD = 1.5
# By how much the power limit may lower a card's SM clock, of the highest, without a caveat
CAPPED = 0.1
# Of the readings of a card that was busy, those with a reason for it to be a caveat
LEAST_THROTTLED = 0.01
# Those that say more before those that are set along with them
THROTTLE_REASONS: tuple[ThrottleReason, ...] = get_args(ThrottleReason)
# Settings that mean nothing at temperature 0, where the likeliest token is taken
_SAMPLED_ONLY = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"}
)
_OFFERED = ("top_k", "top_p", "min_p", "repetition_penalty", "stop_strings")
_NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}


def caveats(
    setup: Setup,
    results: Sequence[ResultRow] = (),
    timings: Sequence[StepTiming] = (),
    *,
    prompts: int | None = None,
) -> tuple[Caveat, ...]:
    """Every caveat that the configuration, the manifest, the rows and the steps call for.

    The most important first. A snapshot measures no speed, so it has only those on texts.

    `prompts`, of the whole workload, is looked at in place of the rows' numbers.
    """
    return (
        *_of_the_prompts(setup),
        *_of_the_models(setup),
        *_of_the_run(setup, results, prompts),
        *_of_the_steps(setup, timings),
    )


def _of_the_models(setup: Setup) -> Iterator[Caveat]:
    if setup.dummy:
        yield Caveat("dummy_weights")
    if setup.command == "snapshot":
        return
    if setup.synthetic:
        yield Caveat("synthetic_acceptance")
    if setup.embedded:
        yield Caveat("embedded_models")
    largest = max(setup.ks, default=0)
    for entry in setup.described.values():
        most = entry.drafts_at_most
        if most is not None and most < largest:
            values: Values = {"draft": entry.name, "tokens": most, "k": largest}
            yield Caveat("fewer_drafts", values)


def _of_the_run(
    setup: Setup, results: Sequence[ResultRow], prompts: int | None
) -> Iterator[Caveat]:
    if setup.command != "snapshot":
        counted = [row for row in results if row.prompts is not None]
        cells = grouped(counted, lambda row: (row.temperature, row.prompt_set))
        # A sweep in looks measures some K of a cell on few of its prompts
        counts = [max(row.prompts or 0 for row in rows) for rows in cells.values()]
        fewest = min(counts, default=MIN_PROMPTS) if prompts is None else prompts
        if fewest < MIN_PROMPTS:
            values = {"prompts": fewest, "needed": MIN_PROMPTS, "in_cell": prompts is None}
            yield Caveat("few_prompts", values)
        unused = setup.environment.unused_card
        if unused and setup.conf("device").get("name") == "auto":
            yield Caveat("unused_card", {"card": unused})
        thinking = setup.conf("prompts").get("enable_thinking")
        if thinking is True or (isinstance(thinking, list) and True in thinking):
            yield Caveat("thinking_mode")
        if setup.target.chat_template and setup.conf("prompts").get("chat_template") == "never":
            yield Caveat("chat_template_unused")
        elif setup.target.thinking_mode and not thinking:
            yield Caveat("thinking_mode_off")
    yield from _generation_settings(setup)
    yield from _other_budget(setup)


def _of_the_prompts(setup: Setup) -> Iterator[Caveat]:
    """That a limit leaves some of the user's own out, or that a sample stands for a log."""
    conf, prompts = setup.conf("prompts"), setup.run.manifest.prompts
    counts = {
        name: (used, max(used, setup.run.manifest.prompts_available.get(name, used)))
        for name, used in prompts.items()
    }
    used, available = (sum(count[at] for count in counts.values()) for at in (0, 1))
    if used < available and (conf.get("files") or conf.get("hub")):
        sets = ", ".join(f"{name} {used} of {there}" for name, (used, there) in counts.items())
        values = {"used": used, "available": available, "sets": sets}
        yield Caveat("prompts_left_out", {**values, "limited": conf.get("limit") is not None})
    log = setup.run.manifest.prompts_log
    if log is not None:
        values = {**asdict(log), "strata": len(setup.run.manifest.prompts_available)}
        yield Caveat("sampled_log", values)


def k_at_edge(setup: Setup, answers: Sequence[Answer]) -> Iterator[Caveat]:
    """That the best K is the largest of several: a larger one may be faster.

    Of answers for the whole workload on what was timed; a head that drafts no more has no larger.
    """
    largest = max(setup.ks, default=0)
    for answer in answers if len(setup.ks) > 1 else ():
        draft, k = answer.named
        most = setup.described_draft(draft or "").drafts_at_most
        open_end = k == largest and (most is None or most > largest)
        if open_end and answer.timed and answer.prompt_set == "all" and answer.speedup is not None:
            next_ks = ",".join(map(str, sorted({k, -(-3 * k // 2), 2 * k})))
            command = setup.command_line(f"k=[{next_ks}]")
            values: Values = {"draft": draft, "k": k, "temperature": answer.temperature}
            yield Caveat("k_at_edge", {**values, "ks": next_ks, "command": command})
            return  # the same command for every temperature


def _generation_settings(setup: Setup) -> Iterator[Caveat]:
    """What the target's generation_config sets, and a server applies, but this run did not."""
    decode, temperatures = setup.conf("decode"), setup.temperatures or (0.0,)

    def differs(key: str, value: object) -> bool:
        if key == "do_sample" or (key in _SAMPLED_ONLY and not any(temperatures)):
            return False
        if key == "temperature":
            return value not in temperatures
        return value != (decode.get(key) or _NEUTRAL.get(key))

    settings = setup.target.generation_config.items()
    unused = {key: value for key, value in settings if differs(key, value)}
    if unused:
        shown = ", ".join(f"{key}={value}" for key, value in unused.items())
        overrides = " ".join(f"decode.{key}={unused[key]}" for key in _OFFERED if key in unused)
        yield Caveat("generation_settings", {"settings": shown, "overrides": overrides})


def _other_budget(setup: Setup) -> Iterator[Caveat]:
    """What the command asks for, but the texts of another run were not generated with."""
    if setup.run.manifest.texts_made_with is None:
        return
    made_with = asdict(setup.run.manifest.texts_made_with)
    config = setup.run.config
    differing = [key for key, value in made_with.items() if value != config.get(key)]
    if differing:
        ignored = " and ".join(f"{key}={config.get(key)}" for key in differing)
        used = " ".join(f"{key}={made_with[key]}" for key in differing)
        yield Caveat("other_budget", {"ignored": ignored, "made_with": used})


def _of_the_steps(setup: Setup, timings: Sequence[StepTiming]) -> Iterator[Caveat]:
    if completed_by := setup.run.manifest.texts_from:
        yield Caveat("texts_from", asdict(completed_by))
    if setup.typed_latency:
        yield Caveat("typed_latency")
        if not setup.conf("latency").get("verify_ms"):
            yield Caveat("verify_assumed_equal_step", {"key": "latency.verify_ms"})
    if setup.latency_from is not None and setup.priced_by is None:
        yield Caveat("latency_from", {"run": setup.latency_from})
    if setup.typed_latency or setup.latency_from is not None:
        return
    yield from _engine_fallbacks(setup)
    for role, entry in setup.described.items():
        if entry.stored_dtype is not None:
            values: Values = {"role": role, "stored": entry.stored_dtype, "dtype": entry.dtype}
            yield Caveat("other_dtype", values)
    if setup.gpu is not None and not setup.ran_on_gpu:
        device = setup.environment.device_name or "another device"
        code = "gpu_not_timed" if setup.command == "audition" else "other_card"
        yield Caveat(code, {"card": setup.gpu.name, "device": device})
    load = setup.run.manifest.other_load
    times = setup.command != "snapshot"  # whose question is no timing
    if times and load is not None and load.load > BUSY * load.processors:
        engine = setup.engine
        code: CaveatCode = "busy_machine"
        if setup.run.config.get("clock") == "cpu" and engine is None:
            code = "busy_cpu_clock"
        elif engine is not None and engine.name != OWN.name and engine.started:
            code = "busy_servers" if engine.clock == "engine" else "busy_cpu_clock"
        values: Values = asdict(load)
        if code != "busy_machine" and engine is not None:
            values = {**values, "processor_time": _processor_time_tells(setup, engine)}
        yield Caveat(code, values)
    if processes := setup.run.manifest.other_gpu_processes:
        yield Caveat("busy_card", {"processes": processes})
    yield from _throttled_card(setup)
    yield from _spread_over_cards(setup)
    wide = {
        timing.role
        for timing in timings
        if timing.kind == "step"
        and np.percentile(timing.samples_s, 90) > WIDE_SPREAD * np.median(timing.samples_s)
    }
    if wide:
        roles = " and ".join(sorted(wide))
        yield Caveat("scattered_steps", {"roles": roles, "spread": WIDE_SPREAD})


def _processor_time_tells(setup: Setup, engine: ServingEngine) -> bool:
    """Whether the servers' processor time says what they take on a busy machine.

    Threads that wait for each other run on meanwhile; and of servers that tell no times of their
    own a long prefill is not told from decoding (`harness.engines.cpu_clock`).
    """
    untimed = any(trial.one_token_s is not None for trial in setup.run.trials)
    return setup.run.manifest.server_threads == 1 and (engine.clock == "cpu" or not untimed)


def _throttled_card(setup: Setup) -> Iterator[Caveat]:
    """What lowered the card's clocks while it was measured: heat, a brake, or its power limit.

    Of several reasons the one of most samples is named; `hw_slowdown` is set along with those that
    say more.
    """
    entries = setup.run.manifest.card_readings
    counted = [(entry, _throttled(entry)) for entry in entries]
    samples = sum((by_reason for _, by_reason in counted), Counter[ThrottleReason]())
    if not samples:
        return
    reason = max(THROTTLE_REASONS, key=lambda one: samples[one])
    worst, _ = max(counted, key=lambda each: each[1][reason])
    median = None if worst.sm_mhz is None else worst.sm_mhz.median
    yield Caveat(
        "throttled_card",
        {
            "reason": reason,
            "throttled": samples[reason],
            "samples": sum(entry.busy or entry.samples for entry in entries),
            "sm_mhz": worst.capped_sm_mhz if reason == "power_cap" else median,
            "max_sm_mhz": worst.max_sm_mhz,
            "temperature_c": None if worst.temperature_c is None else worst.temperature_c.highest,
            "power_limit_w": worst.power_limit_w,
            "default_power_limit_w": worst.default_power_limit_w,
            "device": worst.device,
        },
    )


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


def _spread_over_cards(setup: Setup) -> Iterator[Caveat]:
    """Models whose layers transformers put on several devices."""
    for role, entry in setup.described.items():
        cards = [device for device in entry.devices if device.startswith("cuda")]
        if len(entry.devices) > 1:
            offloaded = len(cards) < len(entry.devices)
            values: Values = {"role": role, "cards": len(cards), "offloaded": offloaded}
            yield Caveat("spread_over_cards", values)


def of_the_engine(costs: EngineCosts, latencies: Mapping[float, Mapping[str, Latency]]) -> Caveat:
    """Whose rounds price a run's drafts, and how each draft's are known."""

    def drafts(basis: Basis) -> str:
        timed = (each for by_draft in latencies.values() for each in by_draft.items())
        names = (name for name, each in timed if each.served and each.served.basis == basis)
        return ", ".join(dict.fromkeys(names))

    return Caveat(
        "rounds_of_engine",
        {
            "engine": costs.engine.name,
            "version": costs.engine.version,
            "run": costs.run,
            "device": costs.device,
            "draft": costs.draft.name,
            "same_shape": drafts("same_shape"),
            "composed": drafts("composed"),
        },
    )


# Times of the target's plain token, slowest / fastest, beyond which drafts do not compare
UNLIKE = 1.5


def of_the_timings(
    unstable: Sequence[Unstable],
    outliers: Sequence[OutlierCell],
    round_times: Mapping[float, RoundSummary],
) -> Iterator[Caveat]:
    """What to mind of the times; `round_times` by temperature, those that predictions rest on."""
    if unstable:
        yield Caveat("unstable_timings", {"timings": len(unstable), **asdict(unstable[0])})
    if outliers:
        worst = max(outliers, key=lambda cell: abs(math.log(cell.speedup / cell.trimmed_speedup)))
        yield Caveat("outlier_generations", {"cells": len(outliers), **asdict(worst)})
    if any(rounds.source == "steps" for rounds in round_times.values()):
        yield Caveat("priced_from_steps")
    for temperature, rounds in round_times.items():
        if rounds.temperature not in (None, temperature):
            values: Values = {"temperature": temperature, "timed_at": rounds.temperature}
            yield Caveat("rounds_at_other_temperature", values)


def unlike_plain_tokens(latencies: Mapping[float, Mapping[str, Latency]]) -> Iterator[Caveat]:
    """Where the target's plain token differs by far more than timing scatters, the worst case.

    It is the same work next to whichever draft, and nearly that of a bare step: of all drafts at a
    temperature, and the first's step, the slowest is held against the fastest. A target that runs
    in a slower way for a draft is another one.
    """
    found: dict[float, Caveat] = {}
    for temperature, by_draft in latencies.items():
        timed = {
            draft: latency.rounds.plain_s
            for draft, latency in by_draft.items()
            if latency.visits is not None
            and latency.visits.temperature == temperature
            and latency.rounds.other_plain_s is None
        }
        steps = [each.steps.target_s for draft, each in by_draft.items() if each.steps]
        known_s = [*timed.values(), *(steps[:1] if timed else [])]
        if timed and max(known_s) > UNLIKE * min(known_s):
            slowest_first = sorted(timed.items(), key=lambda entry: -entry[1])
            times = ", ".join(
                f"{1e3 * seconds:.3g} ms ({draft})" for draft, seconds in slowest_first
            )
            values: Values = {"temperature": temperature, "times": times, "drafts": len(timed)}
            values["step_s"] = steps[0] if steps else None
            found[max(known_s) / min(known_s)] = Caveat("plain_tokens_unlike", values)
    if found:
        yield found[max(found)]


def _engine_fallbacks(setup: Setup) -> Iterator[Caveat]:
    """The models that did not run on the requested engine, or only on part of it."""
    reasons = {role: entry for role, entry in setup.described.items() if entry.engine_reason}
    by_role: list[tuple[str, bool | None]] = []
    by_role += [(role, False) for role, entry in reasons.items() if entry.compiled is False]
    if setup.run.config.get("backend") != "eager" and setup.environment.device == "cuda":
        by_role += [
            (role, None) for role, entry in reasons.items() if entry.engine != "cuda_graphs"
        ]
    for role, compiled in by_role:
        values: Values = {
            "role": role,
            "name": reasons[role].name or role,
            "reason": reasons[role].engine_reason,
            "compiled": compiled,
            "plain_too": role in setup.timed_apart,
        }
        yield Caveat("engine_fallback", values)


OF_BOUND = (
    *("role", "context_tokens", "step_s", "floor_s", "mbu"),
    *("positions", "positions_ratio", "overhead_share"),
)


def launch_bound(bounds: Sequence[StepBound], times: StepTimes | None) -> Iterator[Caveat]:
    """A launch-bound step says more about the engine than about the model."""
    for bound in bounds:
        if bound.launch_bound and times is not None:
            values = {name: getattr(bound, name) for name in OF_BOUND}
            yield Caveat("launch_bound", {**values, "c": times.c})


def greedy_texts_differ(checks: Sequence[TextCheck]) -> Iterator[Caveat]:
    """The counts of greedy texts, where not every one is plain decoding's."""
    first = next((check for check in checks if check.result != "PASS"), None)
    if first is not None:
        names = {"PASS": "equal", "TIE": "tie", "FAIL": "different", "OPEN": "not_judged"}
        results = Counter(check.result for check in checks)
        results["OPEN"] += results["UNJUDGED"]
        counts: Values = {name: results[key] for key, name in names.items()}  # type: ignore[index]
        noise = [each.noise for each in checks if each.noise is not None]
        counts = {**counts, "texts": len(checks), "noise": max(noise, default=None)}
        yield Caveat("greedy_texts_differ", {**counts, **place(first)})
    yield from routing_ties(checks)


def routing_ties(checks: Sequence[TextCheck]) -> Iterator[Caveat]:
    """Texts of a mixture that its routers' near ties change, or hide what else does."""
    tie = sum(check.result == "TIE" and check.routing is not None for check in checks)
    unjudged = sum(check.result == "UNJUDGED" for check in checks)
    if tie or unjudged:
        yield Caveat("routing_ties", {"tie": tie, "unjudged": unjudged})


def place(check: TextCheck) -> Values:
    """Where a text first differs."""
    return {
        "prompt_set": check.prompt_set,
        "prompt": check.prompt,
        "k": check.k,
        "position": check.first_difference,
    }


# ---- what did not complete -----------------------------------------------------------------------


def failures(
    setup: Setup,
    trials: Sequence[Trial] | None = None,
    *,
    checks: Sequence[TextCheck] = (),
    tests: Sequence[DistributionTest] = (),
) -> tuple[Failure, ...]:
    """Checks that failed, generations that did not complete, what met broken logits, and drafts.

    `trials` stand in for the stored ones, where some were marked failed.
    """
    latest = {t.cell: t for t in (setup.run.trials if trials is None else trials)}
    untested = tests and not checks and all(test.result == "UNTESTED" for test in tests)
    failed = [
        *((f"{c.prompt_set}/{c.prompt} K={c.k}", fault(c)) for c in checks if c.result == "FAIL"),
        *(
            (
                f"K={test.k} temperature={test.temperature:g} offset {test.offset}",
                f"drawn tokens do not follow the target's distribution (p = {test.p_value:.2g})",
            )
            for test in tests
            if test.result == "FAIL"
        ),
        *([("temperature > 0", NOTHING_TESTED)] if untested else ()),
        *(
            (
                f"{t.prompt_set}/{t.prompt} k={t.k} temperature={t.temperature:g}",
                t.error or "failed",
            )
            for t in where(latest.values(), status="failed")
        ),
        *((_measurement(note), note.error) for note in setup.run.manifest.not_measured),
    ]
    return (*(Failure(*each) for each in failed), *setup.run.manifest.audition.failures)


def _measurement(note: NotMeasured) -> str:
    at_k = f"K={note.k}{', rejecting every draft' if note.rejects else ''}"
    if note.varying:
        at_k = f"a K that changes ({note.varying})"
    at = f"temperature {note.temperature or 0.0:g}"
    words: dict[Measurement, str] = {
        "plain_tokens": f"plain tokens at {at}",
        "rounds": f"rounds of {note.draft} at {at_k}, {at}",
        "round_parts": "the parts of a round",
        "draft_scores": "the draft's scores of the target's text",
        "returned_texts": "the scores of the returned texts",
        "distribution_test": f"{at_k} temperature={note.temperature or 0.0:g}",
        "server_rounds": f"rounds at {at_k}",
        "server_starts": f"requests for a part of the budget at {at_k}",
        "server_loads": f"requests side by side at {at_k}",
    }
    return words[note.what]


def fault(check: TextCheck) -> str:
    """What is wrong with a text, for results.csv and the list of failures."""
    line = f"text differs from plain decoding's from position {check.first_difference} on"
    if check.noise is not None and check.target_margin is not None:
        return (
            f"{line}, beyond the engine's noise (margin {check.target_margin:.3g} nats, noise"
            f" {check.noise:.3g})"
        )
    if check.target_margin is None or check.rounding is None:
        return line
    return (
        f"{line}, beyond rounding (top-2 margin {check.target_margin:.3g}, "
        f"rounding {check.rounding:.3g})"
    )
