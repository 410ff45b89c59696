"""What a reader must know before acting, most important first."""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.reporting import formatting as fmt
from harness.reporting.sentences import Quoted, as_sentence, comparison, served
from harness.summary import Caveat, CaveatCode, ComparisonCaveatCode, Summary

# Without these a reader takes a number for what it is not: a console folds others, never these
CAUTIONS: frozenset[CaveatCode | ComparisonCaveatCode] = frozenset(
    {
        # Other work, heat or an outlier is in the times
        *("busy_machine", "busy_servers", "busy_cpu_clock", "busy_card", "throttled_card"),
        *("plain_tokens_unlike", "scattered_steps", "unstable_timings", "outlier_generations"),
        # Predictions are known to be off on this run, or leave something out
        *("predictions_off", "priced_from_steps", "server_rounds_unlike_replay"),
        "rounds_not_timed",
        # Texts are not the target's, so that a speed is of something else
        *("greedy_texts_differ", "server_not_lossless", "server_texts_unlike_target"),
        *("server_texts_repeat", "server_queues", "rate_beyond_capacity", "other_card"),
        *("failed_run", "unfinished_run", "different_devices", "machine_changed"),
        *("distrusted", "loads_disturbed", "plan_disturbed", "other_acceptance", "not_lossless"),
    }
)


def caveats(summary: Summary) -> tuple[str, ...]:
    """What a reader must know before acting, `cautions` first; not what `run.banner` says."""
    every, first = _sentences(summary), cautions(summary)
    return (*first, *(text for code, text in every if code not in CAUTIONS))


def cautions(summary: Summary) -> tuple[str, ...]:
    """Those without which the numbers are read wrongly."""
    return tuple(text for code, text in _sentences(summary) if code in CAUTIONS)


def _sentences(summary: Summary) -> list[tuple[CaveatCode | ComparisonCaveatCode, str]]:
    """Each with its code."""
    apart = {"launch_bound", "predictions_off"}
    if summary.run.dummies or summary.run.synthetic:
        apart |= {"dummy_weights", "synthetic_acceptance"}
    compared = summary.comparison.caveats if summary.comparison else ()
    bound, off = (
        [entry.values for entry in summary.caveats if entry.code == code]
        for code in ("launch_bound", "predictions_off")
    )
    said: list[tuple[CaveatCode | ComparisonCaveatCode, str]] = [
        *((entry.code, comparison.caveat(entry)) for entry in compared),
        *((entry.code, caveat(entry)) for entry in summary.caveats if entry.code not in apart),
    ]
    if off:
        said.append(("predictions_off", _predictions_off(off)))
    if bound:
        said.append(("launch_bound", _launch_bound(bound)))
    return [(code, as_sentence(text)) for code, text in said]


def caveat(entry: Caveat) -> str:
    """One caveat, without a full stop."""
    words = CAVEATS[entry.code]
    return words.format(**entry.values) if isinstance(words, str) else words(entry.values)


def log_covered(values: Quoted) -> str:
    """How much of a log of requests the sample is, and how alike: a `SampledLog` and `strata`."""
    left_out = values["unusable"]
    lines = fmt.number_of(left_out, "line", "lines")
    unusable = f", {lines} left out that cannot be generated from" if left_out else ""
    return (
        "{sampled:,} of {requests:,} requests{unusable}, drawn at random in"
        f" {fmt.number_of(values['strata'], 'stratum', 'strata')}; a prompt has"
        " {mean_bytes:,.0f} bytes on average in the log and {sampled_bytes:,.0f} by the sample"
    ).format(**{**values, "unusable": unusable})


def _generation_settings(values: Quoted) -> str:
    with_them = f"; to measure with them: {values['overrides']}" if values["overrides"] else ""
    return (
        f"the target's generation_config sets {values['settings']}: a server applies this unless a"
        f" request says otherwise, and this run did not{with_them}"
    )


def _engine_fallback(values: Quoted) -> str:
    role, name = values["role"], values["name"]
    cause = f"{role if role == name else f'{role} {name}'}: {values['reason']}"
    if values["compiled"] is False:
        return f"{cause}; its steps launch more kernels than compiled ones, which takes longer"
    launch_bound = (
        " ran eagerly, likely launch-bound: v(n), c and round times are then largely those of this"
        " loop's Python"
    )
    if not values["plain_too"]:
        return f"{cause}; its steps{launch_bound}"
    return (
        f"{cause}; its rounds{launch_bound}. Its speedup compares them with the target's plain"
        " tokens as compiled CUDA graphs: in an engine its rounds would be faster"
    )


def _plain_tokens_unlike(values: Quoted) -> str:
    step_s, several = values["step_s"], values["drafts"] > 1
    step = "" if step_s is None else f" and its bare step {fmt.in_ms(step_s)} ms"
    doubt = (
        "round times of these drafts do not compare, nor do their speedups, ranks and chances to be"
        " best; time them again on a quiet machine"
        if several
        else "predictions are as uncertain; time it again on a quiet machine"
    )
    return (
        f"at temperature {values['temperature']:g} the target's plain token took {values['times']}"
        f"{step}, the same work: the machine was not equally fast, so {doubt}"
    )


def _not_by_replay(values: Quoted) -> str:
    why = "too few prompts were both replayed and measured"
    if values["differs"]:
        why = "its rounds emit {measured:.2f} tokens, and {replayed:.2f} by replay".format(**values)
    return (
        "at temperature {temperature:g} the verdict rests on the measured generations of K={k}"
        " alone, which decides less: "
    ).format(**values) + why


def _unstable_timings(values: Quoted) -> str:
    if values["kind"] == "cell":
        timed = "{prompt_set} prompts, temperature {temperature:g}, K={tokens}"
    elif values["draft"] is not None:
        timed = "{role} {kind}, {draft}"
    else:
        positions = "" if values["kind"] == "step" else " of {tokens} positions"
        batch = "" if values["batch"] == 1 else ", batch {batch}"
        timed = f"{{role}} {{kind}}{positions} after {{context_tokens}} tokens{batch}"
    several = "" if values["timings"] == 1 else "first: "
    return (
        f"{fmt.number_of(values['timings'], 'impossible timing', 'impossible timings')}"
        f" ({several}{timed.format(**values)}): marked, not plotted"
    )


def _outlier_generations(values: Quoted) -> str:
    return (
        f"in {fmt.number_of(values['cells'], 'cell', 'cells')} a few generations decide the"
        " speedup ({prompt_set}, temperature {temperature:g}, K={k}: {speedup:.2f}x,"
        " {trimmed_speedup:.2f}x without them); repetitions= or a quieter machine settles it"
    ).format(**values)


def _greedy_texts_differ(values: Quoted) -> str:
    not_judged = ", {not_judged} not judged" if values["not_judged"] else ""
    differences = served.differences(values["tie"], values["different"], values["noise"])
    return (
        f"{{equal}} of {{texts}} greedy texts equal plain decoding's{differences}{not_judged}; the"
        " first difference is in {prompt_set}/{prompt} K={k} at position {position}"
    ).format(**values)


def _routing_ties(values: Quoted) -> str:
    cause = "a mixture of experts in 16 bits: rounding decides between experts that nearly tie"
    parts = [
        f"{fmt.number_of(values['tie'], 'text differs', 'texts differ')} by that alone"
        if values["tie"]
        else "",
        f"in {fmt.number_of(values['unjudged'], 'text', 'texts')} it may change as much as a wrong"
        " cache would, so that these cannot be judged (a run in float32 can)"
        if values["unjudged"]
        else "",
    ]
    return f"{cause}; {', and '.join(filter(None, parts))}"


def _server_concurrency(values: Quoted) -> str:
    limit = values["max_concurrency"]
    return (
        f"{values['file']}: requests ran at the same time (max_concurrency:"
        f" {'no limit' if limit is None else limit}), so its times are of batches; acceptance does"
        " not depend on that"
    )


# What slowed the card, and what to do about it
_THROTTLED = {
    "hw_thermal": ("heat (the hardware's slowdown)", "cool it"),
    "sw_thermal": ("heat (the driver's slowdown)", "cool it"),
    "power_brake": ("the board's power brake", "look at the machine's power supply"),
    "hw_slowdown": ("the hardware's slowdown (heat or power)", "look at its cooling and power"),
    "power_cap": ("its power limit", "raise its power limit"),
}


def _throttled_card(values: Quoted) -> str:
    clock, limit, heat = (values[name] for name in ("sm_mhz", "power_limit_w", "temperature_c"))
    default, device = values["default_power_limit_w"], values["device"]
    slowed_by, remedy = _THROTTLED[str(values["reason"])]
    clock_parts = [
        "" if clock is None else f"its SM clock was {clock:.0f} MHz",
        "" if values["max_sm_mhz"] is None else f"of {values['max_sm_mhz']:.0f}",
    ]
    more = [
        "" if heat is None else f"up to {heat:.0f} degrees C",
        "" if limit is None else f"power limit {limit:.0f} W",
        "" if default is None or limit == default else f"{default:.0f} W by default",
    ]
    clocks = " ".join(filter(None, clock_parts)) if clock is not None else ""
    facts = ", ".join(filter(None, [clocks, *more]))
    return (
        f"the card{'' if device is None else f' {device}'} was slowed by {slowed_by} in"
        f" {values['throttled']} of"
        f" {values['samples']} readings while it was measured{f' ({facts})' if facts else ''}: its"
        f" times are those of a throttled card; {remedy}, and time again"
    )


def _separate_passes(values: Quoted) -> str:
    engine, flag = values["engine"], values["flag"]
    if values["simulated"]:
        return (
            f"{engine} was started without {flag}, so it decodes each run of neighbouring slots by"
            f" itself, which is simulated; a server with {flag} takes less time"
        )
    return (
        f"{engine} without {flag} decodes each run of neighbouring slots by itself; how these"
        " servers were started is not known, so that all active requests are taken to share a pass,"
        f" as with {flag}"
    )


def _spread_over_cards(values: Quoted) -> str:
    parts = (
        " and parts on no card, which are copied for each forward" if values["offloaded"] else ""
    )
    return (
        f"{values['role']}: its layers are spread over"
        f" {fmt.number_of(values['cards'], 'card', 'cards')}{parts} (device_map) and run one group"
        " after the other, eagerly, by transformers: this is a pipeline and no tensor parallelism,"
        " so an engine that splits every layer over the cards has other times; measure it with"
        " python -m harness.server"
    )


def _launch_bound(bounds: Sequence[Quoted]) -> str:
    """One sentence for both models, since c is a property of the pair."""
    steps = "; ".join(
        f"{values['role']} step {fmt.milliseconds(1e3 * values['step_s'])} ms after"
        f" {values['context_tokens']} tokens where reading its weights takes"
        f" {fmt.milliseconds(1e3 * values['floor_s'])} ms (MBU"
        f" {fmt.decimal(values['mbu'])}), and {values['positions']} positions take"
        f" {fmt.decimal(values['positions_ratio'])} x one: {fmt.percent(values['overhead_share'])}"
        " of it is overhead"
        for values in bounds
    )
    return (
        f"launch-bound (overhead-bound): {steps}. c = {fmt.decimal(bounds[0]['c'])} says more"
        " about this engine than about the models"
    )


def _predictions_off(temperatures: Sequence[Quoted]) -> str:
    """One sentence for all temperatures."""
    parts = ", ".join(
        "{outside} of {cells} at temperature {temperature:g} ({prompt_set}, K={k}:"
        " {gap:+.1%})".format(**values)
        for values in temperatures
    )
    widened = " and ".join("{error:.1%}".format(**values) for values in temperatures)
    return (
        f"measured speedups outside their predictions' intervals: {parts}; these are widened by"
        f" {widened} for it"
    )


def _busy_servers(values: Quoted) -> str:
    line = (
        f"other work kept {values['load']:.1f} of {values['processors']} processors busy while the"
        " servers were timed: time them again on a quiet machine"
    )
    return f"{line}, or with clock=cpu" if values["processor_time"] else line


def _busy_cpu_clock(values: Quoted) -> str:
    line = (
        f"other work kept {values['load']:.1f} of {values['processors']} processors busy meanwhile;"
        " processor time (clock=cpu) leaves waiting out, but shared caches still slow what is timed"
    )
    if values.get("processor_time", True):
        return line
    return (
        f"{line}, and threads that wait for each other count: time the servers on a quiet machine,"
        " or with threads=1"
    )


CAVEATS: Mapping[str, Any] = {
    "dummy_weights": "dummy weights: latencies are real, acceptances are not",
    "synthetic_acceptance": (
        "acceptance is synthetic (decode.acceptance): speedups and the verdict hold at that"
        " acceptance only, and the texts are not the target's"
    ),
    "embedded_models": (
        "the embedded models are toys that show how the harness works; nothing here says anything"
        " about a model you would serve"
    ),
    "sampled_log": lambda values: (
        log_covered(values)
        + "; each stratum counts by its share of the log's requests times the tokens that its"
        " requests generate, and the intervals have the error of the sample in them"
    ),
    "prompts_left_out": lambda values: (
        "{used} of {available} prompts were used ({sets})".format(**values)
        + (": prompts.limit=null takes all of them" if values["limited"] else "")
    ),
    "k_at_edge": lambda values: (
        "the best K at temperature {temperature:g}, {k}, is the largest that was asked for, so a"
        " larger one may be faster ({} measures it)"
    ).format(values["command"] or "k=[{ks}]".format(**values), **values),
    "few_prompts": lambda values: (
        f"{fmt.number_of(values['prompts'], 'prompt', 'prompts')}"
        f"{' in a cell' if values['in_cell'] else ''}: below {values['needed']} there is no"
        f" interval{' of its own; a verdict pools the prompt sets' if values['in_cell'] else ''}"
    ),
    "unused_card": "device=auto took the CPU: {card}",
    "thinking_mode": "thinking mode is on: acceptance is that of reasoning text",
    "thinking_mode_off": (
        "thinking mode is off (prompts.enable_thinking=false) though the model has one: acceptance "
        "is that of answers without reasoning"
    ),
    "chat_template_unused": ("the model's chat template was not used: served traffic will differ"),
    "generation_settings": _generation_settings,
    "engine_fallback": _engine_fallback,
    "other_dtype": (
        "{role}: the checkpoint is stored in {stored}, which this processor computes far slower"
        " than {dtype}, so it ran in {dtype}; dtype={stored} keeps it"
    ),
    "fewer_drafts": (
        "{draft} drafts at most {tokens} tokens a round: what is shown of it for a larger K, up to"
        " {k}, is at {tokens} tokens"
    ),
    "other_card": (
        "gpu={card} was asked for and {device} ran: the step times are those of what ran, and no"
        " cost is given"
    ),
    "gpu_not_timed": (
        "gpu={card} is not the device whose steps were timed ({device}), so no cost is given: type"
        " its step times in (latency.target_ms=...) or name a run on it (latency_from=)"
    ),
    "plain_tokens_unlike": _plain_tokens_unlike,
    "scattered_steps": (
        "{roles} step times scatter (p90 above {spread:g} x the median), as on a busy machine:"
        " trust what generations measured more than predictions"
    ),
    "busy_servers": _busy_servers,
    "busy_cpu_clock": _busy_cpu_clock,
    "busy_machine": (
        "other work kept {load:.1f} of {processors} processors busy: time it on a quiet machine"
    ),
    "busy_card": lambda values: (
        f"{fmt.number_of(values['processes'], 'other process', 'other processes')} used the card"
        " while this run was timed: time it again on a card of its own"
    ),
    "throttled_card": _throttled_card,
    "spread_over_cards": _spread_over_cards,
    "unstable_timings": _unstable_timings,
    "outlier_generations": _outlier_generations,
    "predictions_off": lambda values: _predictions_off([values]),
    "priced_from_steps": (
        "this run timed single steps and no rounds, so its predictions leave out what a loop does"
        " besides its forwards (some 5 to 15 % of a round): run it again to time rounds"
    ),
    "rounds_not_timed": (
        "no rounds of {draft} were timed, for it loses whatever they cost: at K={k} a round emits"
        " {tokens_per_round:.2f} tokens and takes a plain token's time at least, besides draft"
        " steps of {step:.2f} of it; with half as long steps it has {speedup:.2f}x at most. Its"
        " other numbers follow from single steps"
    ),
    "rounds_at_other_temperature": (
        "rounds were timed at temperature {timed_at:g}, and price temperature {temperature:g} too"
    ),
    "not_by_replay": _not_by_replay,
    "k_not_timed": "K = {ks} is beyond the times of some draft, so nothing is predicted there",
    "texts_from": (
        "the target is on a server: {engine} {version} at {url} completed the prompts, and nothing"
        " was timed there"
    ),
    "typed_latency": "step times were typed in: the speedups are as good as those numbers",
    "latency_from": "step times are those of {run}, not of this run's machine",
    "rounds_of_engine": served.rounds_of_engine,
    "other_budget": (
        "{ignored} had no effect: the texts of traces_from were generated with {made_with}"
    ),
    "greedy_texts_differ": _greedy_texts_differ,
    "routing_ties": _routing_ties,
    "server_asked_less": (
        "to end within budget_s={budget_s:g} this run asked for less than was configured:"
        " {prompts} prompts, at most {new_tokens} tokens a text, visits: {repetitions}, temperature"
        " {temperatures}, K = {ks}; budget_s=null asks for everything"
    ),
    "server_every_k": lambda values: (
        f"every K was measured, as with until=all: {served.EVERY_K[str(values['reason'])]}"
    ),
    "server_not_lossless": served.not_lossless,
    "server_texts_unlike_target": served.unlike_target,
    "server_texts_repeat": (
        "at temperature {temperature:g}, K={k}, all visits of the server returned the same {texts}"
        " texts, which the target would not: it ignores the temperature or the seeds of requests;"
        " texts and rounds here are not those of sampling"
    ),
    "server_rounds_unlike_replay": served.rounds_unlike_replay,
    "draft_served_in_other_dtype": served.other_dtype,
    "server_not_predicted": lambda values: (
        f"no prediction: {served.NOT_PREDICTED[str(values['reason'])]}"
    ),
    "server_visits_lacking": served.visits_lacking,
    "rate_beyond_capacity": (
        "at {rate:g} requests per second more arrives than the server serves (K = {ks}): its queue"
        " grows for as long as they come, so waits there are those of this many requests, and no"
        " rate that it can hold; give a lower rate="
    ),
    "loads_disturbed": (
        "other work kept {others:.2f} processors busy while requests were sent side by side, more"
        " than {most:g}: loads are not compared and no K is named for them; measure them on a quiet"
        " machine"
    ),
    "server_queues": served.queues,
    "plan_without_ks": (
        "K={ks} changed what is generated in the server run, so it is no choice here"
    ),
    "plan_separate_passes": _separate_passes,
    "plan_mean_prompts": (
        "what a prompt's length costs is not known, since no prefills of two lengths were timed:"
        " every prompt costs the mean, so that high percentiles of TTFT are too low"
    ),
    "plan_disturbed": (
        "other work kept {others:.2f} processors busy while the run's loads were timed, so costs"
        " and waits here are those of a busy machine; measure them on a quiet one"
    ),
    "plan_few_beyond": (
        "only {beyond} simulated requests are beyond p{percentile:g}: near a card's capacity TTFT"
        " comes out too low, and the largest rate too high; give requests={requests}"
    ),
    "plan_rate_not_measured": lambda values: (
        f"waits at more than {values['measured']:g} requests/s are simulated and were not measured;"
        " a larger rate=[...] in the server run measures them"
        if values["measured"] is not None
        else "no waits at a rate were measured on such a server, all of these are simulated;"
        " rate=[...] in the server run measures some"
    ),
    "plan_other_slots": (
        "loads at a rate ran on servers of {slots} slots and are not used: what requests cost there"
        " is known for up to {known} side by side; concurrency=[1,2,4,{slots}] in the server run"
        " measures the rest"
    ),
    "plan_context_not_measured": (
        "the longest text here has {context} tokens with its prompt, the longest under load"
        " {measured}: what iterations cost at the difference was not measured"
    ),
    "verify_assumed_equal_step": (
        "a verify over K + 1 positions is taken to cost one target step (v = 1); give"
        " {key}=[...] to use measured times"
    ),
    "positions_too_short": (
        "acceptance_by_position is too short for k = {ks}; no row from it there"
    ),
    "positions_of_longer_drafts": (
        "acceptance_by_position is of rounds that draft {k} tokens, which start in other places"
        " than shorter ones do: for k = {ks} it is estimated, as of a model that drafts token by"
        " token; of a head the estimate may be too low"
    ),
    "latency_from_too_short": "latency_from times no verify for k = {ks}; left out",
    "counters_of_several_k": (
        "the server changed its K meanwhile ({ks}), so the numbers are of a mixture"
    ),
    "counters_fewer_drafted": (
        "rounds drafted {mean:.2f} tokens on average and {k} at most, and every round counts in the"
        " shares by position: those of later positions are too low for K={k}"
    ),
    "counters_without_positions": (
        "the server does not count by position, so nothing is known of a K other than {k}"
    ),
    "counters_of_longer_drafts": (
        "rounds of K={k} start in other places than shorter ones do, so tokens per round at"
        " K = {ks} are estimated: on the shipped prompt sets at most {model:.0%} off replay with a"
        " draft model and {head:.0%} with a head, where counts alone were {counted:.0%} off"
    ),
    "counters_plain_steps": (
        "{share:.0%} of the tokens come from steps that drafted nothing, as of a look-up that finds"
        " nothing; tokens per round are of the rounds that drafted"
    ),
    "counters_under_load": (
        "round times are taken to be this server's, with one request at a time; one that decodes"
        " several side by side has others (python -m harness.server with concurrency=[1,4] measures"
        " them)"
    ),
    "server_gap": (
        "the server measured {measured:.2f}x at K={k}, the arithmetic says {predicted:.2f}x: verify"
        " and overhead are not what was given"
    ),
    "server_concurrency": _server_concurrency,
    "server_failed_requests": lambda values: (
        f"{values['file']}: {fmt.number_of(values['requests'], 'request', 'requests')} failed"
    ),
}
