"""The sentences of a server run: load, prediction errors, losslessness, memory."""

from collections.abc import Iterator, Sequence

import numpy as np

from harness import formatting as fmt
from harness.analysis.caveats.texts import differences
from harness.engine_facts.engines import OWN
from harness.engine_facts.spec import changes
from harness.records import first, where
from harness.summary import (
    Answer,
    ServedGate,
    ServedMemory,
    ServedSummary,
    StartedServers,
    Summary,
)

# A draft's memory is given where it takes at least this share of the target's
LEAST_SHARE = 0.01
NOT_PREDICTED = {
    "not_lossless": "replay is of lossless sampling, which this server's is not",
    "no_weights": (
        "target and draft are not loaded here, so the texts that the server returned were not"
        " replayed"
    ),
    "no_texts": (
        "no text of plain decoding was scored, for lack of one whose rounds emitted a token, or of"
        " an answer"
    ),
    "no_counting": (
        "this server counts no rounds, or does not say how it accepts drafts; its speedups are"
        " measured times, and whether it drafted K tokens was not checked"
    ),
    "no_costs": (
        "its round times are not known: it has no synthetic acceptance, and there is no second"
        " prompt set to take them from (prompts.sets=[...])"
    ),
    "servers_failed": "servers did not answer, so no K was timed next to plain decoding",
    "costs_untold": (
        "the requests that were timed do not tell what rounds cost: their texts are too alike in"
        " length, or other work disturbed them"
    ),
}


def load(served: ServedSummary) -> str:
    """The load of the speedups: one request at a time, and whether it is processor time."""
    requests = "one request at a time"
    return f"{requests}, by processor time" if served.clock == "cpu" else requests


def under_load(served: ServedSummary, answer: Answer) -> str:
    """The K to serve by concurrency, where loads were timed; "" for the harness's loop.

    "Under load (timed: 1, 2 and 8 requests side by side): K=4 for 1, no draft for 2 to 8."
    """
    temperature = answer.temperature
    if served.engine == OWN.name:
        return ""
    if not served.load:
        return "Not seen under load (concurrency=[1,2,4,8] measures that)."
    schedule = first(served.schedules, temperature=temperature)
    if schedule is None:
        return "Under load no K is named."
    largest = max(entry.concurrency for entry in schedule.entries)
    lows = changes({entry.low: entry.k for entry in schedule.entries})
    ends = [*(low - 1 for low in [*lows][1:]), max(largest, *lows)]
    parts = [
        f"{f'K={k}' if k else 'no draft'} for {low if low == end else f'{low} to {end}'}"
        for (low, k), end in zip(lows.items(), ends, strict=True)
    ]
    cells = where(served.load, temperature=temperature)
    timed = _listed([str(each) for each in sorted({c.concurrency for c in cells if c.concurrency})])
    return f"Under load (timed: {timed} requests side by side): {', '.join(parts)}."


def reasons(summary: Summary) -> tuple[str, ...]:
    """The K that were measured, prediction errors, losslessness, and the draft's memory."""
    served = summary.served
    if served is None:
        return ()
    # The memory of toy models decides nothing
    toys = any(entry.code == "embedded_models" for entry in summary.caveats)
    memory = () if toys or served.memory is None else _memory(served.memory)
    started = () if served.servers is None else _servers(served.servers)
    gates = _gates(served, len(summary.text_checks))
    return (*started, *_predictions(summary, served), *gates, *memory)


def _predictions(summary: Summary, served: ServedSummary) -> Iterator[str]:
    errors = [
        predicted.speedup / measured.speedup - 1.0
        for measured, predicted in summary.predicted_cells
        if measured.speedup and predicted.speedup
    ]
    if served.not_predicted is not None:
        yield f"No prediction: {NOT_PREDICTED[served.not_predicted]}."
    if errors:
        yield (
            f"Predicted against measured speedup: {_median_error(errors)} over {len(errors)} cells,"
            " each predicted from other requests than its own."
        )


def _servers(started: StartedServers) -> Iterator[str]:
    """The K that were not measured on all prompts, and those without a server."""
    if not started.number:
        return
    if others := _listed([f"K={k}" for k in started.ks if k not in started.measured]):
        measured = _listed([f"K={k}" for k in started.measured])
        yield f"Measured on all prompts: {measured}; what is said of {others} is predicted."


def not_tried(served: ServedSummary | None) -> str:
    """The K that the search for the fastest left out, as a sentence; "" where it left out none."""
    started = None if served is None else served.servers
    left = [] if started is None else [f"K={k}" for k in started.asked if k not in started.ks]
    if not left:
        return ""
    was, them = ("was", "it") if len(left) == 1 else ("were", "them")
    return f"{_listed(left)} {was} not tried: speedups fall towards {them} (until=all tries all)."


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def _median_error(errors: Sequence[float]) -> str:
    sizes = np.abs(errors)
    return f"median error {fmt.percent(np.median(sizes))}, largest {fmt.percent(sizes.max())}"


def _gates(served: ServedSummary, checks: int) -> Iterator[str]:
    """The results of the lossless test, greedy texts first, then sampled ones.

    `checks` is the number of compared greedy texts over all visits.
    """
    greedy = [gate for gate in served.gates if gate.equal_texts is not None]
    if greedy:
        equal, texts = sum(g.equal_texts or 0 for g in greedy), sum(g.texts for g in greedy)
        failed = [gate for gate in greedy if gate.lossless is False]
        which = f"; not lossless: {_listed([f'K={gate.k}' for gate in failed])}" if failed else ""
        tied, differing = (
            sum(getattr(gate, name) or 0 for gate in greedy)
            for name in ("tied_texts", "differing_texts")
        )
        noise = max((gate.noise for gate in greedy if gate.noise is not None), default=None)
        apart = differences(tied, differing, noise) if tied or differing else ""
        if differing and not failed:
            which = "; no K has more of these than the error rate of that rule explains"
        visits = f" in every visit ({checks} checks)" if checks > texts else ""
        yield (
            f"{equal} of {texts} greedy texts, one for each prompt and K, equal plain"
            f" decoding's{visits}{apart}{_rounds(greedy)}{which}."
        )
    sampled = [gate for gate in served.gates if gate.text_z is not None]
    # Where one is not lossless a caution names it
    failing = {gate.temperature for gate in sampled if not gate.lossless}
    sampled = [gate for gate in sampled if gate.temperature not in failing]
    text = [abs(gate.text_z) for gate in sampled if gate.text_z is not None]
    if text:
        rounds = [abs(gate.rounds_z) for gate in sampled if gate.rounds_z is not None]
        parts = [f"texts |z| <= {max(text):.1f}"]
        parts += [f"rounds |z| <= {max(rounds):.1f}"] if rounds else []
        yield (
            "Sampled texts follow the target's distribution (one for each prompt, K and visit;"
            f" {', '.join(parts)})"
            f"{_rounds(sampled)}."
        )


def _rounds(gates: Sequence[ServedGate]) -> str:
    known = [gate for gate in gates if gate.equal_rounds is not None]
    if not known:
        return ""
    equal = sum(gate.equal_rounds or 0 for gate in known)
    texts = sum(gate.replayed_texts or 0 for gate in known)
    return f", and {equal} of {texts} took exactly the rounds that replay of the same texts has"


def _memory(memory: ServedMemory) -> Iterator[str]:
    """The memory that the draft takes on this server, where it is a notable share."""
    requests = f"{fmt.count(memory.slots)} request{'s' if memory.slots > 1 else ''}"
    kind = f" in {memory.kv_type}" if memory.kv_type else ""
    tokens = memory.slots * memory.context_tokens
    parts: list[str] = []
    shares: list[float] = []
    for what, draft, target, each in (
        ("weights", memory.draft_weights_bytes, memory.target_weights_bytes, 1),
        (
            f"cache{kind} for {requests} of {fmt.count(memory.context_tokens)} tokens",
            memory.draft_kv_bytes_per_token,
            memory.target_kv_bytes_per_token,
            tokens,
        ),
    ):
        if draft and target:
            shares.append(draft / target)
            parts.append(
                f"{fmt.memory(each * draft)} of {what}, where the target has"
                f" {fmt.memory(each * target)}"
            )
    if max(shares, default=0.0) < LEAST_SHARE:
        return
    per_token = memory.draft_kv_bytes_per_token
    more = (
        f"; each further token of context takes {fmt.memory(per_token)} of it" if per_token else ""
    )
    yield f"On this server at K={memory.k} the draft takes {'; and '.join(parts)}{more}."
